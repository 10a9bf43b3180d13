//! An allocator for RDMA: every allocation comes from memory that is registered with the adapter in advance.
//!
//! See [`Rdmalloc`], the global allocator, and [`Heap`], for buffers with access flags of their own.
//!
//! ```text
//! class    size classes: what a layout gets
//! claim    how a thread uses its cache without a lock, and how a drain pass takes it away
//! slab     blocks of one class in a span; blocks that others freed
//! cache    all slabs of one owner; spare spans
//! caches   all caches, by number
//! phase    where a heap is in its life
//! heap     the core of a heap: its arenas, and the caches that have no thread
//! thread   which cache is mine
//! global   the GlobalAlloc
//! pool     heaps that a program makes
//! buffer   their buffers
//! ```
//!
//! Each module uses only what stands above it in this list (`thread` and `heap` know the global heap), and the arenas of the
//! crate below, `rdmalloc-arenas`.

mod buffer;
mod cache;
mod caches;
mod claim;
mod class;
mod global;
mod heap;
#[cfg(test)]
mod model;
mod phase;
mod pool;
mod slab;
mod thread;

pub use buffer::{Buffer, BufferFull};
pub use global::{Rdmalloc, Trimmed};
pub use pool::{BuildError, Builder, Heap};
pub use rdmalloc_arenas::{
    Access, ArenaInfo, ArenaStats, AttachError, DetachError, Device, KeyError, Keys, Limits, MAX_DEVICES, Memlock,
    NotRegistered, RegisterError, Registered, Registrar, Sge, SgeError, SgeMut, State, TakeError, registrar,
};
