//! The one face behind which every device lies: [`Registrar`], the unsafe trait of things that pin memory for a device.
//!
//! Uses [`Access`] and `os`; knows nothing of regions and arenas. The backends stand beside it: `verbs` (an `ibv_pd`) and `uring`
//! (the fixed buffers of an io_uring).

#[cfg(feature = "uring")]
pub mod uring;
#[cfg(feature = "verbs")]
pub mod verbs;

use crate::Access;
use crate::os::{self, Memlock};
use crate::pinning::OnDemand;
use core::num::NonZeroUsize;
use core::ops::Range;
use std::io;

/// The keys by which a device names memory that was registered with it.
///
/// Integers in host order, as in `ibv_mr`. For io_uring the lkey is the index of the fixed buffer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Keys {
    /// Names the memory in the local device's work requests.
    pub lkey: u32,
    /// Names the memory in a peer's work requests. Opens nothing unless the heap's [`Access`] is remote.
    pub rkey: u32,
}

/// What a successful registration gives back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Registered {
    /// The keys of the memory.
    pub keys: Keys,
    /// Whatever the registrar needs to undo the registration, such as the `ibv_mr` pointer.
    pub handle: u64,
}

/// What a device can register.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// The longest registration in bytes (`max_mr_size`; 1 GiB for io_uring). At least 2 MiB, or nothing can be registered.
    pub max_len: u64,
    /// How many registrations there may be at once (`max_mr`; the table's size for io_uring).
    pub max_registrations: u64,
}

impl Limits {
    /// No limit at all.
    pub const NONE: Limits = Limits { max_len: u64::MAX, max_registrations: u64::MAX };
}

/// A thing that registers memory with a device: pins its pages, and hands out the keys by which the device reaches them.
///
/// Implemented for verbs by `Verbs`, for io_uring by `Uring`; tests implement it to inject faults. The methods are called
/// with no lock of the allocator held, and may allocate: what they allocate comes from memory that is never registered.
/// They are never called in a child of `fork`, and a registrar that was attached is not dropped there. Where a heap has several
/// devices, they may run on a thread that lives only for the call, with all signals blocked, while other registrars' do; one
/// heap calls one registrar once at a time.
///
/// Whoever needs a new arena of the heap waits while one of them runs. So they must not wait for a thread that may allocate
/// from that heap, and not call the heap themselves to attach, detach, trim, list its arenas, or take memory of it (what the
/// global allocator serves them meanwhile is not of that heap).
///
/// # Safety
///
/// An implementor promises that
///
/// - `register` makes the device reach exactly the given range, and keeps it from writing anywhere else under those keys;
/// - after `deregister` has returned `Ok`, the device never touches the memory again, and the memory's pages are no longer
///   held for it, so that they may be unmapped and handed to anyone;
/// - after `register` has returned an error, the same holds as if it had not been called.
pub unsafe trait Registrar: Send + Sync + 'static {
    /// Registers `memory`. The arenas' bounds are multiples of 2 MiB.
    ///
    /// # Safety
    ///
    /// From now until it is deregistered, `memory` stays mapped for reading and writing, and what it holds may be read, and
    /// changed as far as `access` allows, by whoever has the keys.
    ///
    /// # Errors
    ///
    /// The operating system's error, `raw_os_error` kept: `ENOMEM` is explained to the user by the memlock limit.
    unsafe fn register(&self, memory: Range<usize>, access: Access) -> io::Result<Registered>;

    /// Ends a registration that `register` made. Returns only when the device has let go of the memory.
    ///
    /// # Errors
    ///
    /// If the device may still reach the memory. The memory is then kept mapped for ever.
    fn deregister(&self, registered: Registered, memory: Range<usize>) -> io::Result<()>;

    /// What the device can register.
    fn limits(&self) -> Limits {
        Limits::NONE
    }

    /// Whether memory can be registered here with this access; asked when the device is attached, so that what can never work is
    /// an error then ([`AttachError::Access`](crate::AttachError::Access)), and not at the first buffer.
    fn supports(&self, access: Access) -> bool {
        let _ = access;
        true
    }

    /// What makes two registrars one device: where the keys of one are valid for the other (for verbs, the address of the
    /// `ibv_pd`). `None`: a device of its own. Who gives the address of an `ibv_pd` promises that its handles are the addresses
    /// of `ibv_mr`s, since memory windows are bound by them.
    fn identity(&self) -> Option<NonZeroUsize> {
        None
    }

    /// Whether registered pages count against `RLIMIT_MEMLOCK`.
    fn is_memlocked(&self) -> bool {
        true
    }

    /// Whether registering pins the pages, so that they are better huge ones. Otherwise (on-demand
    /// paging) untouched memory stays untouched.
    fn pins_pages(&self) -> bool {
        true
    }

    /// Bytes of memory that the machine, or the container, has to give: an arena that is longer is not opened, since pinning it would
    /// have the kernel end some process. `None`: nobody knows.
    fn available(&self) -> Option<u64> {
        os::available_memory()
    }

    /// What may still be pinned here, as the kernel will count it; asked before each registration, which is not tried where
    /// that would fail for certain. `None`: it is not limited, or not known.
    fn memlock(&self) -> Option<Memlock> {
        self.is_memlocked().then(Memlock::now)
    }

    /// What it can do with memory that it does not pin; `None` if nothing. Asked when it is attached to a heap that wants that
    /// ([`Pinning`](crate::Pinning)); `register` is then called with an access that [says so](Access::is_on_demand).
    fn on_demand(&self) -> Option<OnDemand> {
        None
    }

    /// The memory node to which the device is near, where it is known; asked when it is attached. See
    /// [`Node::OfDevice`](crate::Node).
    fn node(&self) -> Option<u32> {
        None
    }

    /// Whether children of `fork` no longer have memory once it is registered here (the verbs library marks it DONTFORK when
    /// `ibv_fork_init` was called on a kernel older than 5.12). A heap that children need must not be registered then.
    fn hides_memory_from_children(&self) -> bool {
        false
    }

    /// Asked after the device has answered `EIO` or `ENODEV`: whether it is lost, so that nothing will ever come of it again.
    /// Its keys end then, on every heap ([`Device::mark_lost`](crate::Device::mark_lost)). What it had registered is
    /// deregistered all the same, each time the memory is to go.
    ///
    /// An error alone is no proof: adapters answer `EIO` also to single commands that they did not like.
    fn is_lost(&self) -> bool {
        false
    }

    /// A name for people, such as `mlx5_0`.
    fn name(&self) -> &str;
}
