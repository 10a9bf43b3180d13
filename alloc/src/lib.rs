//! An allocator for RDMA: every allocation comes from memory that is registered with the adapter in advance.
//!
//! As the global allocator, it puts everything that a program allocates into arenas that a device reaches:
//!
//! ```
//! use rdmalloc::{Rdmalloc, Registrar};
//!
//! #[global_allocator]
//! static HEAP: Rdmalloc = Rdmalloc::new();
//!
//! // `registrar`: a `registrar::verbs::Verbs`, or a `registrar::uring::Uring`.
//! fn send_from_where_it_lies(registrar: impl Registrar) -> Result<(), Box<dyn std::error::Error>> {
//!     let device = HEAP.attach(registrar)?;
//!     let message = vec![7u8; 4096];
//!     let sge = device.sge(&message)?;
//!     assert_eq!((sge.addr(), sge.length()), (message.as_ptr() as u64, 4096));
//!     // Post it with sge.lkey(), and keep the message until the completion.
//!     Ok(())
//! }
//! ```
//!
//! Beside any global allocator, a [`Heap`] gives out [`Buffer`]s with access flags of its own, such as remote access.
//!
//! | type | what for |
//! | --- | --- |
//! | [`Rdmalloc`] | the global allocator: every `Vec`, `String` and `Box` can be sent from where it lies |
//! | [`Heap`] | memory apart, with access flags, a budget and pages of its own |
//! | [`Buffer`] | a block of a heap that never moves: filled by `BufMut`, `io::Write` or a device |
//! | [`SharedBuffer`] | a buffer that is only read: cloned, cut, and turned into `Bytes` without copying |
//! | [`Device`] | what `attach` gives: finds the keys of any address; the same for all heaps to which one domain is attached |
//! | [`Sge`], [`SgeMut`] | a scatter-gather entry that borrows what it describes |
//! | [`Flight`] | a value on which a work request works: owned, and out of reach until the completion |
//! | [`Gathering`] | makes one list of entries of many pieces, in place or copied |
//! | [`RecvPool`] | keeps a receive queue stocked, and gives messages as `Bytes` where they were received |
#![cfg_attr(
    feature = "verbs",
    doc = "| [`Windows`] | memory windows: one buffer with an rkey of its own, dead once revoked or dropped |"
)]
#![cfg_attr(
    not(feature = "verbs"),
    doc = "| `Windows` (feature `verbs`) | memory windows: one buffer with an rkey of its own, dead once revoked or dropped |"
)]
//! | [`RemoteSlice`] | memory of a peer, or ours for a peer: address, length and rkey in 20 bytes |
//! | [`Maintainer`] | the thread that registers memory before it is needed and closes what is idle |
//!
//! The pages of this crate show items of `rdmalloc-arenas`, which it re-exports: where an example there says
//! `rdmalloc_arenas::`, `rdmalloc::` does as well.

// The modules; each uses only what stands above it in this list (`thread` and `heap` know the global heap), and the arenas of
// the crate below.
//
// class    size classes: what a layout gets
// claim    how a thread uses its cache without a lock, and how a drain pass takes it away
// misuse   a message, and an abort
// loan     the same for caches of heaps that a program makes, of which a thread may have several
// slab     blocks of one class in a span; blocks that others freed
// cache    all slabs of one owner; spare spans
// caches   all caches, by number
// phase    where a heap is in its life
// fork     what becomes of all this in a child of fork
// heap     the core of a heap: its arenas, its caches, its shards
// thread   which cache is mine
// places   which caches of heaps that a program makes are lent to this thread
// stats    what a heap has, and what a drain pass left
// global   the GlobalAlloc
// hardened the same with checks (feature)
// pool     heaps that a program makes
// block    their blocks, known by their address
// buffer   their buffers
// shared   buffers that are only read, by any number of owners
// remote_slice   memory of a peer, as it is told over the wire
// stable   that they fly
// gather   messages of many pieces
// allocator   collections in them (feature allocator-api2)
// limits   what a heap may have registered
// recv_pool   keeps a receive queue stocked with buffers
// memory   what memory its arenas have
// window   memory windows: buffers with an rkey of their own (verbs)
//
// bytes_like is what types that are bytes have in common.

#[cfg(feature = "allocator-api2")]
mod allocator;
mod block;
mod buffer;
mod bytes_like;
mod cache;
mod caches;
mod claim;
mod class;
mod fork;
mod gather;
mod global;
#[cfg(feature = "hardened")]
mod hardened;
mod heap;
mod inside;
mod limits;
mod loan;
mod maintain;
mod memory;
mod misuse;
#[cfg(test)]
mod model;
mod phase;
mod places;
mod pool;
mod recv_pool;
mod remote_slice;
mod shared;
mod slab;
mod stable;
mod stats;
mod thread;
#[cfg(feature = "verbs")]
mod window;

pub use buffer::{Buffer, BufferFull};
pub use class::LiveBlocks;
pub use gather::{Gather, GatherError, Gathered, Gathering};
pub use global::Rdmalloc;
pub use maintain::{MaintainError, Maintained, Maintainer, Maintenance};
pub use pool::{BuildError, Builder, Heap};
pub use rdmalloc_arenas::{
    Access, ArenaInfo, ArenaStats, AttachError, Budget, CaughtUp, Clock, DetachError, Device, DeviceStats, Event,
    Failures, Flight, Flights, FlyError, Grounded, Hold, HoldError, IdError, KeyError, Keys, Limits, MAX_DEVICES,
    Memlock, Name, NotRegistered, Overrun, Policy, Refusal, Refusals, RegisterError, Registered, Registrar, Retention,
    Sge, SgeError, SgeMut, Sges, SgesError, SgesMut, StableBytes, StableBytesMut, State, TakeError, Times, drop_flight,
    registrar,
};
pub use rdmalloc_arenas::{Fallback, NoOnDemand, Node, OnDemand, Operations, Pages, Pinning, Placed, Resident};
pub use recv_pool::{
    PostFailed, PostedBuffers, Receive, ReceiveQueue, RecvError, RecvPool, RecvPoolBuilder, RecvPoolError, RecvStats,
    RestockError, Stock,
};
#[cfg(feature = "verbs")]
pub use recv_pool::{RecvQueue, SharedRecvQueue};
pub use remote_slice::{NotARemoteSlice, RemoteError, RemoteRangeError, RemoteSlice};
pub use shared::SharedBuffer;
pub use stats::{Stats, Trimmed};
#[cfg(feature = "verbs")]
pub use window::{
    BindFailed, Binding, ExposeError, Exposed, Kept, NotExposed, NotRevoked, OutOfRange, Revoking, WindowKind,
    WindowStats, Windows, WindowsError,
};
