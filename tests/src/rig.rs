//! A small face of verbs, just enough to move bytes: open a device, connect RC queue pairs, post work, poll completions.
//!
//! Uses rdma-sys, and of rdmalloc only the opener: it is the program on the other side of the allocator. [`Domain`] is an open
//! device with a protection domain; [`Queue`] is a reliable queue pair with its completion queue; an [`Endpoint`] is what
//! two queues tell each other, over any byte stream, to become connected; [`Memory`] is plain registered memory, made the
//! way programs make it without an allocator such as ours.
//!
//! ```no_run
//! use rdmalloc_tests::rig::{Depth, Domain, Memory, Queue};
//! use std::time::Duration;
//!
//! let domain = Domain::open(None)?;
//! let (left, right) = Queue::pair(&domain, Depth::default())?; // both ends in this process: the device loops back
//! let (from, to) = (Memory::new(&domain, 4096)?, Memory::new(&domain, 4096)?);
//! from.fill(0, b"hello");
//! // SAFETY: `from` and `to` outlive both completions, and nothing touches them before.
//! unsafe {
//!     right.post_recv(1, to.sge(0, 4096))?;
//!     left.post_send(2, from.sge(0, 5))?;
//! }
//! let received = right.wait(Duration::from_secs(5))?.ok()?;
//! assert_eq!((received.id, received.len), (1, 5));
//! assert_eq!(to.to_vec(0, 5), b"hello");
//! # std::io::Result::Ok(())
//! ```

mod completion;
mod domain;
mod endpoint;
mod lists;
mod memory;
mod queue;
mod shared;

pub use completion::{Completion, Status};
pub use domain::Domain;
pub use endpoint::{Endpoint, exchange};
pub use memory::Memory;
pub use queue::{Depth, Queue, Remote};
pub use shared::SharedQueue;

/// Opens the first device, or says on standard output why the test that asked is skipped.
///
/// # Panics
///
/// If there is a device that cannot be opened: that is a fault, not a missing device.
pub fn domain_or_skip() -> Option<Domain> {
    match Domain::open(None) {
        Ok(domain) => Some(domain),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            println!("skipped: no verbs device");
            None
        }
        Err(error) => panic!("the first verbs device does not open: {error}"),
    }
}
