//! Memory that a device can reach: large arenas that are registered in advance, and found by address.
//!
//! This is the lower half of rdmalloc: it knows spans of 64 KiB slices, devices and keys, and nothing of blocks. Most
//! programs want the crate `rdmalloc`, which serves allocations from here.
//!
//! ```text
//! os         the system calls
//! sync       atomics and locks; what the models swap
//! parallel   some jobs at once
//! numa       on which memory nodes it lies
//! pages      what pages memory has
//! table      flat tables beside the region
//! region     the address range; address <-> slice and chunk
//! links      links of free blocks, outside the blocks
//! pinning    whether registering pins memory
//! marks      marks of blocks, outside the blocks (feature `hardened`)
//! registrar  the trait of what pins memory for a device      <- registrar::verbs, registrar::uring
//! held       how much is registered, and may be
//! refusal    why memory is not registered
//! name       names of devices
//! arena      one arena: its word, its slices
//! hold       who uses a device now
//! device     the devices of the process, and their keys
//! sge, sges  scatter-gather entries that borrow what they describe; lists of them
//! flight     bytes on which a device may work, owned and out of reach until it is done
//! bell       how a heap's maintainer sleeps and is woken
//! arenas     all arenas of a heap
//! fork       what all heaps share, at a fork
//! ```
//!
//! Each module uses only what stands above it in this list.

pub mod access;
mod arena;
mod arenas;
pub mod bell;
mod device;
mod error;
mod flight;
pub mod fork;
mod held;
mod hold;
mod links;
#[cfg(feature = "hardened")]
mod marks;
mod name;
mod numa;
mod os;
mod pages;
mod parallel;
mod pinning;
mod refusal;
mod region;
pub mod registrar;
mod sge;
mod sges;
pub mod sync;
mod table;

pub use access::Access;
pub use arena::State;
pub use arenas::{
    Ahead, ArenaInfo, ArenaStats, Arenas, CaughtUp, Clock, Closed, Config, DeviceStats, Event, Failures, Listener,
    Policy, Refusals, Retention, Seen, Span, Times, memory_of, tag_of,
};
pub use device::{Device, Hold, MAX_DEVICES};
pub use error::{AttachError, DetachError, KeyError, NotRegistered, RegisterError, TakeError};
pub use flight::{Flight, Flights, FlyError, Grounded, IdError, Overrun, StableBytes, StableBytesMut, drop_flight};
pub use held::Budget;
pub use hold::HoldError;
pub use links::{LINK_UNIT, link_of};
#[cfg(feature = "hardened")]
pub use marks::{MARK_UNIT, mark_of};
pub use name::Name;
pub use numa::{Node, Placed};
pub use os::Memlock;
#[doc(hidden)]
pub use os::pretend_page_size;
pub use pages::{Fallback, Pages, Resident};
pub use parallel::Helper;
pub use pinning::{NoOnDemand, OnDemand, Operations, Pinning};
pub use refusal::Refusal;
pub use region::{CHUNK, CHUNK_SHIFT, SLICE, SLICE_META, SLICE_SHIFT, SLICES_PER_CHUNK, SliceMeta, meta_of, slice_of};
pub use registrar::{Keys, Limits, Registered, Registrar};
pub use sge::{Sge, SgeError, SgeMut};
pub use sges::{Sges, SgesError, SgesMut};
