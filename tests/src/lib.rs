//! What the tests that cross the crates share, and nothing that a program would depend on.
//!
//! [`Ledger`] is a registrar without a device, [`Brittle`] one whose device breaks, [`Null`] one that does nothing at all.
//! [`Trace`] is what a server's memory goes through. [`Garden`] is a set of blocks of every kind, to be looked at from outside.
//! [`rig`] (feature `verbs`) is a small face of RC queue pairs: the tests on real verbs and the example `kv` move bytes
//! through it.

mod brittle;
mod confined;
mod filter;
mod garden;
mod ledger;
mod null;
#[cfg(feature = "verbs")]
pub mod rig;
mod setting;
mod swap;
mod trace;
mod under_limit;
mod within;

pub use brittle::Brittle;
pub use confined::{confined, may_pin, set_memlock};
pub use filter::{again_without_membarrier, forbid, is_alone, is_without_membarrier};
pub use garden::{Churn, Garden};
pub use ledger::Ledger;
pub use null::Null;
use rdmalloc_arenas::{Access, Registered, Registrar};
pub use setting::Setting;
use std::io;
use std::ops::Range;
pub use swap::Swap;
pub use trace::Trace;
pub use under_limit::under_limit;
pub use within::{hide_proc, is_within, set_limit, within};

/// Registers memory of a test's.
///
/// # Errors
///
/// The registrar's.
pub fn register(registrar: &impl Registrar, memory: Range<usize>, access: Access) -> io::Result<Registered> {
    // SAFETY: a test registers what it has mapped itself, and looks at it after the completion of whatever it posts; where
    // it is not mapped, that the device refuses it is what the test is about.
    unsafe { registrar.register(memory, access) }
}

/// How many bytes devices have pinned for this process (`VmPin`).
///
/// # Panics
///
/// Without `/proc`.
pub fn pinned_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("/proc is there");
    let line = status.lines().find_map(|line| line.strip_prefix("VmPin:")).expect("Linux tells VmPin");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number of KiB") << 10
}
