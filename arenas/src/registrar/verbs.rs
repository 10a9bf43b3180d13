//! The verbs backend: [`Verbs`] registers memory with a protection domain (`ibv_pd`), whoever made it.
//!
//! Uses [`Registrar`] and [`Access`] above, the crate rdma-sys, and its own parts: `domain` opens a device for programs
//! that have no protection domain yet, `live` remembers what is registered, `origin` tells a child of fork from its
//! parent, [`fixes`] stands in for functions of rdma-sys that are wrong, [`window`] has the calls of memory windows,
//! `queues` the owners of queues that programs make.
//!
//! Needs rdma-core 35 or newer (`ibv_is_fork_initialized`, symbol version `IBVERBS_1.13`).

mod domain;
pub mod fixes;
mod live;
mod on_demand;
mod origin;
mod queues;
pub mod window;

pub use domain::{OpenError, ProtectionDomain, devices};
pub use origin::Origin;
pub use queues::{AsQueuePair, AsSharedReceiveQueue, RawQueuePair, RawSharedReceiveQueue};
pub use rdma_sys;

use crate::Access;
use crate::pinning::OnDemand;
use crate::registrar::{Keys, Limits, Registered, Registrar};
use core::ffi::{CStr, c_int, c_uint};
use core::fmt;
use core::mem::{ManuallyDrop, MaybeUninit};
use core::num::NonZeroUsize;
use core::ops::Range;
use core::ptr::{self, NonNull};
use live::{Live, Registration};
use rdma_sys::{ibv_access_flags, ibv_context, ibv_device_attr, ibv_pd, ibv_transport_type};
use std::io;
use std::sync::Arc;

/// Something that keeps a protection domain alive, such as [`ProtectionDomain`], or a program's own type around one.
///
/// # Safety
///
/// The pointer is that of a live `ibv_pd` with an open context, and the same at every call. Both stay valid until the
/// value is dropped, however it is moved in between.
pub unsafe trait AsProtectionDomain {
    /// The protection domain.
    fn as_protection_domain(&self) -> NonNull<ibv_pd>;
}

// SAFETY: the value behind an Arc lives at least as long as the Arc, and answers the same.
unsafe impl<T: AsProtectionDomain + ?Sized> AsProtectionDomain for Arc<T> {
    fn as_protection_domain(&self) -> NonNull<ibv_pd> {
        (**self).as_protection_domain()
    }
}

// SAFETY: the value behind a Box lives as long as the Box, and answers the same.
unsafe impl<T: AsProtectionDomain + ?Sized> AsProtectionDomain for Box<T> {
    fn as_protection_domain(&self) -> NonNull<ibv_pd> {
        (**self).as_protection_domain()
    }
}

/// Registers memory with a protection domain: one memory region (`ibv_mr`) for each registration.
///
/// The handle in [`Registered`] is the address of the `ibv_mr`, for calls that want one (binding a memory window). It is
/// valid until the registration ends, and must not be deregistered by any other way.
///
/// A `Verbs` that is dropped while something is still registered never drops the owner of its protection domain: the
/// domain and its context stay open until the process ends. In a child of fork it registers and deregisters nothing, and
/// dropping it does nothing: `ibv_dereg_mr` in a child would end the parent's registration.
///
/// On iWARP devices, memory that an RDMA READ writes to needs `IBV_ACCESS_REMOTE_WRITE`: heaps that ask for
/// [`Access::READ_TARGET`] get it there, others cannot be the target of a READ.
///
/// ```no_run
/// use rdmalloc_arenas::registrar::verbs::{ProtectionDomain, Verbs};
/// use std::sync::Arc;
///
/// let domain = Arc::new(ProtectionDomain::open(Some("mlx5_0"))?);
/// let registrar = Verbs::new(Arc::clone(&domain)); // to be attached to a heap; `domain` remains for the queue pairs
/// # Ok::<(), rdmalloc_arenas::registrar::verbs::OpenError>(())
/// ```
pub struct Verbs {
    /// Null only if `from_raw` was given null: then nothing can be registered.
    pd: *mut ibv_pd,
    limits: Limits,
    /// Whether the device has memory windows; also if it does not say.
    windows: bool,
    /// Whether its transport is iWARP.
    iwarp: bool,
    name: String,
    origin: Origin,
    live: Live,
    /// Dropped only when `live` is empty, and not in a child. `None`: the maker of `from_raw` sees to it.
    owner: ManuallyDrop<Option<Box<dyn AsProtectionDomain + Send + Sync>>>,
}

// SAFETY: `pd` is the only field that is not Send by itself. Verbs objects may be used from any thread, at once
// (ibv_alloc_td(3): "By default all verbs objects are safe for multi-threaded access"), and are not bound to the thread
// that made them.
unsafe impl Send for Verbs {}
// SAFETY: as above; the methods take `&self` and only call verbs on `pd`, and `live` has a lock.
unsafe impl Sync for Verbs {}

impl Verbs {
    /// Registers with the protection domain that `owner` keeps. The owner is dropped with the `Verbs`, so after the last
    /// registration has ended.
    pub fn new(owner: impl AsProtectionDomain + Send + Sync + 'static) -> Verbs {
        let pd = owner.as_protection_domain().as_ptr();
        // SAFETY: `AsProtectionDomain` promises a live domain while the owner lives, and the owner is dropped by
        // `Drop for Verbs`, and only with nothing registered.
        let mut verbs = unsafe { Verbs::from_raw(pd) };
        verbs.owner = ManuallyDrop::new(Some(Box::new(owner)));
        verbs
    }

    /// Registers with a protection domain that someone else keeps. If `pd` is null (`ibv_alloc_pd` failed), every
    /// registration fails with an error that says so.
    ///
    /// # Safety
    ///
    /// `pd` is null, or a live protection domain with an open context, and both stay so until the `Verbs` is dropped and
    /// its last memory region gone: detach the device from every heap, and wait for that, before `ibv_dealloc_pd`.
    pub unsafe fn from_raw(pd: *mut ibv_pd) -> Verbs {
        let (attr, iwarp, name) = if pd.is_null() {
            (None, false, "null".to_owned())
        } else {
            // SAFETY: the caller promises a live domain; a live domain has a live context.
            unsafe { (query_device((*pd).context), is_iwarp((*pd).context), device_name((*pd).context)) }
        };
        let limits = attr.as_ref().map_or(Limits::NONE, limits);
        let windows = attr.is_none_or(|attr| window::kind(&attr).is_some());
        let (origin, live, owner) = (Origin::here(), Live::default(), ManuallyDrop::new(None));
        Verbs { pd, limits, windows, iwarp, name, origin, live, owner }
    }

    /// Opens a device by name, or the first there is, and makes a protection domain on it: short for
    /// [`ProtectionDomain::open`] and [`Verbs::new`]. The domain is found by [`as_ptr`](Self::as_ptr).
    ///
    /// Each call makes a domain of its own, and with it another device, whose keys do not work on the queue pairs of the
    /// first. A program with several heaps opens one [`ProtectionDomain`] and attaches it to all of them, by
    /// `Verbs::new(domain.clone())` with an `Arc`: that is the same device everywhere.
    ///
    /// # Errors
    ///
    /// Those of [`ProtectionDomain::open`].
    pub fn open(name: Option<&str>) -> Result<Verbs, OpenError> {
        ProtectionDomain::open(name).map(Verbs::new)
    }

    /// The protection domain, for queue pairs and the like. Valid while the `Verbs` lives.
    #[must_use]
    pub fn as_ptr(&self) -> *mut ibv_pd {
        self.pd
    }

    /// What the verbs library does about fork. It is settled when the first device is opened or listed, so ask after that.
    #[must_use]
    pub fn fork_support() -> ForkSupport {
        // SAFETY: the function takes nothing and only reads the library's and the kernel's state.
        match unsafe { rdma_sys::ibv_is_fork_initialized() } {
            rdma_sys::IBV_FORK_UNNEEDED => ForkSupport::Unneeded,
            rdma_sys::IBV_FORK_ENABLED => ForkSupport::Enabled,
            _ => ForkSupport::Disabled,
        }
    }
}

/// What the verbs library does so that a process with registered memory can fork (`ibv_is_fork_initialized`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ForkSupport {
    /// Nothing is needed: the kernel copies pinned private pages during fork (Linux 5.12 and newer).
    Unneeded,
    /// The library marks all registered memory DONTFORK, so children do not have it: someone called `ibv_fork_init`, or set
    /// `RDMAV_FORK_SAFE` or `IBV_FORK_SAFE`. A child would lose its whole heap, if the global heap was registered.
    Enabled,
    /// The library does nothing, on a kernel that does nothing either: after a fork, whoever first writes to a pinned page
    /// gets a copy, and the device may go on with the other one. Only fork that is followed by exec is harmless.
    Disabled,
}

/// Why a registration was refused before the device was asked.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Refused {
    NullDomain,
    TooLong { wanted: u64, limit: u64, device: String },
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refused::NullDomain => {
                f.write_str("the protection domain is null: check what ibv_alloc_pd returned before handing it over")
            }
            Refused::TooLong { wanted, limit, device } => write!(
                f,
                "a registration of {wanted} bytes is over the {limit} bytes that {device} allows for one (max_mr_size): \
                 use smaller arenas"
            ),
        }
    }
}

impl std::error::Error for Refused {}

// SAFETY:
// - `register` hands exactly the range to the device, and refuses what is over the device's limit instead of shortening it;
// - `deregister` returns Ok only after ibv_dereg_mr has returned 0, which it does when the device has let go of the memory
//   and the kernel has unpinned it; it calls ibv_dereg_mr only for a region that is in `live`, so once for each;
// - when ibv_reg_mr_iova2 fails, nothing is registered.
unsafe impl Registrar for Verbs {
    /// As the trait says, by `ibv_reg_mr_iova2`, which knows optional access flags ([`Access::RELAXED_ORDERING`]) in every
    /// version that has it, and drops them where the kernel does not know them. In C the macro `ibv_reg_mr` chooses it for
    /// them; the function of that name does the same in rdma-core 44, and need not in older ones.
    ///
    /// # Errors
    ///
    /// Of the system: `ENOMEM` (the memlock limit, or memory of the device), `EINVAL` (access that the device does not
    /// have), `EFAULT` (nothing is mapped there). Before that, without `raw_os_error`: [`InvalidInput`] for a length over
    /// [`Limits::max_len`] and for a null protection domain, [`Unsupported`] in a child of fork.
    ///
    /// [`InvalidInput`]: io::ErrorKind::InvalidInput
    /// [`Unsupported`]: io::ErrorKind::Unsupported
    unsafe fn register(&self, memory: Range<usize>, access: Access) -> io::Result<Registered> {
        self.check_process("register")?;
        self.check(memory.len() as u64).map_err(|refused| io::Error::new(io::ErrorKind::InvalidInput, refused))?;
        let (addr, flags) = (ptr::with_exposed_provenance_mut(memory.start), verbs_access(access, self.iwarp));
        // SAFETY: `pd` is not null (checked) and live (`new` and `from_raw`). The call pins pages and touches no byte; a
        // range that is not mapped gets EFAULT.
        let mr = unsafe { rdma_sys::ibv_reg_mr_iova2(self.pd, addr, memory.len(), memory.start as u64, flags) };
        let mr = NonNull::new(mr).ok_or_else(io::Error::last_os_error)?;
        // SAFETY: the library returned a region, which lives until it is deregistered: not before it is in `live`.
        let keys = unsafe { Keys { lkey: mr.as_ref().lkey, rkey: mr.as_ref().rkey } };
        let registration = Registration { mr, keys, memory };
        let registered = registration.registered();
        self.live.insert(registration);
        Ok(registered)
    }

    /// As the trait says, by `ibv_dereg_mr`.
    ///
    /// # Errors
    ///
    /// Of the system: `EINVAL` or `EBUSY` if a memory window is still bound to the memory; the registration then goes on,
    /// and can be ended later; `EIO` from some libraries when the device was removed, which is no proof that it has let go, so
    /// the memory is kept. Without `raw_os_error`: [`NotFound`](io::ErrorKind::NotFound) for what is not registered
    /// here, or not any more; [`Unsupported`](io::ErrorKind::Unsupported) in a child of fork. The device is not called then.
    fn deregister(&self, registered: Registered, memory: Range<usize>) -> io::Result<()> {
        self.check_process("deregister")?;
        let Some(entry) = self.live.take(registered, &memory) else {
            let what = format!("{} has no registration of {memory:#x?} under {registered:x?}", self.name);
            return Err(io::Error::new(io::ErrorKind::NotFound, what));
        };
        let _no_bind = window::regions_go();
        // SAFETY: the region was in `live`, so it was registered and not deregistered since; taking it out made this call
        // the only one that has it. `pd` and its context are live (`new` and `from_raw`), and this is the process that
        // registered.
        match unsafe { rdma_sys::ibv_dereg_mr(entry.mr().as_ptr()) } {
            0 => Ok(()),
            errno => {
                self.live.put_back(entry);
                Err(from_verbs(errno))
            }
        }
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    /// Everything but windows, where the device has none. That an adapter has no atomics shows when it registers (or when they
    /// are used).
    fn supports(&self, access: Access) -> bool {
        self.windows || !access.contains(Access::WINDOWS)
    }

    fn identity(&self) -> Option<NonZeroUsize> {
        NonZeroUsize::new(self.pd.addr())
    }

    /// What the device says (`ibv_query_device_ex`) of reliable connections. Known to do it right is what the driver `mlx5_core`
    /// drives; of others, registrations have 1 GiB at most.
    fn on_demand(&self) -> Option<OnDemand> {
        if self.pd.is_null() || !self.origin.is_here() {
            return None;
        }
        // SAFETY: a live domain (`new` and `from_raw`) has an open context.
        unsafe { on_demand::of_device(NonNull::new((*self.pd).context)?, &self.name) }
    }

    /// What sysfs says of the device (`/sys/class/infiniband/NAME/device/numa_node`); nothing for devices of software.
    fn node(&self) -> Option<u32> {
        crate::numa::node_of_device("/sys".as_ref(), &self.name)
    }

    fn hides_memory_from_children(&self) -> bool {
        Verbs::fork_support() == ForkSupport::Enabled
    }

    /// Asks the kernel about the device. When a device is removed (`rdma link delete` on Linux 7.3, an adapter unplugged), the
    /// kernel ends every registration by itself, and from then on answers `EIO` to all but the destroying calls, which succeed.
    /// (On 6.1 the removal of a soft-RoCE device waits for the programs that have it open, and all goes on.) A port that is
    /// down is no loss: registering and deregistering go on.
    fn is_lost(&self) -> bool {
        if self.pd.is_null() || !self.origin.is_here() {
            return false;
        }
        let mut attr = MaybeUninit::zeroed();
        // SAFETY: a live domain (`new` and `from_raw`) has an open context, and `attr` has room for what the call writes.
        let errno = unsafe { rdma_sys::ibv_query_device((*self.pd).context, attr.as_mut_ptr()) };
        errno != 0 && matches!(from_verbs(errno).raw_os_error(), Some(libc::EIO | libc::ENODEV))
    }

    fn name(&self) -> &str {
        &self.name
    }
}

impl Verbs {
    fn check(&self, wanted: u64) -> Result<(), Refused> {
        match self.limits.max_len {
            _ if self.pd.is_null() => Err(Refused::NullDomain),
            limit if wanted > limit => Err(Refused::TooLong { wanted, limit, device: self.name.clone() }),
            _ => Ok(()),
        }
    }

    fn check_process(&self, what: &str) -> io::Result<()> {
        if self.origin.is_here() {
            return Ok(());
        }
        let why = format!("cannot {what} with {} in a child of fork: the device is its parent's", self.name);
        Err(io::Error::new(io::ErrorKind::Unsupported, why))
    }
}

impl Drop for Verbs {
    fn drop(&mut self) {
        if self.origin.is_here() && self.live.is_empty() {
            // SAFETY: dropped here only, and `self` is not used again.
            unsafe { ManuallyDrop::drop(&mut self.owner) };
        }
    }
}

impl fmt::Debug for Verbs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Verbs { pd, limits, name, .. } = self;
        f.debug_struct("Verbs").field("name", name).field("pd", pd).field("limits", limits).finish_non_exhaustive()
    }
}

/// The flags of `ibv_access_flags` for an [`Access`].
fn verbs_access(access: Access, iwarp: bool) -> c_uint {
    let flags = [
        (Access::LOCAL_WRITE, ibv_access_flags::IBV_ACCESS_LOCAL_WRITE),
        (Access::REMOTE_READ, ibv_access_flags::IBV_ACCESS_REMOTE_READ),
        (Access::REMOTE_WRITE, ibv_access_flags::IBV_ACCESS_REMOTE_WRITE),
        (Access::REMOTE_ATOMIC, ibv_access_flags::IBV_ACCESS_REMOTE_ATOMIC),
        (Access::WINDOWS, ibv_access_flags::IBV_ACCESS_MW_BIND),
        (Access::RELAXED_ORDERING, ibv_access_flags::IBV_ACCESS_RELAXED_ORDERING),
        (Access::ON_DEMAND, ibv_access_flags::IBV_ACCESS_ON_DEMAND),
    ];
    // What a READ brings comes as a write of the peer's there (RFC 5040: a Read Response is a tagged message, as a Write is).
    let access = if iwarp && access.contains(Access::READ_TARGET) { access | Access::REMOTE_WRITE } else { access };
    flags.iter().filter(|(ours, _)| access.contains(*ours)).fold(0, |all, (_, verbs)| all | verbs.0)
}

/// The error that a verb returned: an errno, or -1 with errno set (older providers).
fn from_verbs(errno: c_int) -> io::Error {
    if errno > 0 { io::Error::from_raw_os_error(errno) } else { io::Error::last_os_error() }
}

/// What a device says of itself; `None` if it does not.
///
/// # Safety
///
/// `context` is open.
unsafe fn query_device(context: *mut ibv_context) -> Option<ibv_device_attr> {
    let mut attr = MaybeUninit::zeroed();
    // SAFETY: the context is open, and `attr` has room for what the call writes. All zeros is a valid ibv_device_attr, so
    // it is initialised even where a provider fills in less.
    unsafe { (rdma_sys::ibv_query_device(context, attr.as_mut_ptr()) == 0).then(|| attr.assume_init()) }
}

/// The limits of a device. A limit of 0, which would forbid all registering, counts as none: then the registration itself tells.
fn limits(attr: &ibv_device_attr) -> Limits {
    let known = |limit: u64| if limit == 0 { u64::MAX } else { limit };
    // `max_mr` is an int: a driver with more than 2^31 shows a negative number.
    Limits { max_len: known(attr.max_mr_size), max_registrations: known(u64::try_from(attr.max_mr).unwrap_or(0)) }
}

/// Whether a context's device speaks iWARP.
///
/// # Safety
///
/// `context` is open.
unsafe fn is_iwarp(context: *mut ibv_context) -> bool {
    // SAFETY: an open context has a device, and the library keeps it while the context is open.
    unsafe { (*(*context).device).transport_type == ibv_transport_type::IBV_TRANSPORT_IWARP }
}

/// The name of a context's device.
///
/// # Safety
///
/// `context` is open.
unsafe fn device_name(context: *mut ibv_context) -> String {
    // SAFETY: an open context has a device, and the library keeps it, with its name, while the context is open. The name
    // is a C string.
    let name = unsafe { CStr::from_ptr(rdma_sys::ibv_get_device_name((*context).device)) };
    name.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_maps_to_the_flags_of_the_header() {
        // The numbers are those of enum ibv_access_flags in infiniband/verbs.h.
        assert_eq!(verbs_access(Access::LOCAL_READ, false), 0);
        assert_eq!(verbs_access(Access::LOCAL_WRITE, false), 1);
        assert_eq!(verbs_access(Access::REMOTE_READ, false), 4);
        assert_eq!(verbs_access(Access::REMOTE_WRITE, false), 1 | 2);
        assert_eq!(verbs_access(Access::REMOTE_ATOMIC, false), 1 | 8);
        assert_eq!(verbs_access(Access::WINDOWS, false), 1 | 16);
        assert_eq!(verbs_access(Access::RELAXED_ORDERING, false), 1 << 20);
        assert_eq!(
            verbs_access(Access::REMOTE_READ | Access::REMOTE_WRITE | Access::RELAXED_ORDERING, false),
            1 << 20 | 7
        );
    }

    #[test]
    fn target_of_reads_is_open_to_writes_on_iwarp_only() {
        assert_eq!(verbs_access(Access::READ_TARGET, false), 1);
        assert_eq!(verbs_access(Access::READ_TARGET, true), 1 | 2);
        assert_eq!(verbs_access(Access::LOCAL_WRITE | Access::REMOTE_READ, true), 1 | 4, "not without being asked");
    }

    #[test]
    fn length_over_the_limit_is_refused_not_shortened() {
        // SAFETY: null is allowed. The pointer that is put in is never followed: `check` compares only.
        let mut verbs = unsafe { Verbs::from_raw(ptr::null_mut()) };
        verbs.pd = ptr::dangling_mut();
        verbs.limits.max_len = 2 << 20;
        verbs.check(2 << 20).unwrap();
        let refused = verbs.check((2 << 20) + 1).unwrap_err();
        assert_eq!(refused, Refused::TooLong { wanted: 2097153, limit: 2097152, device: "null".into() });
        // SAFETY: refused before the library is called; nothing is registered.
        let error = unsafe { verbs.register(0..4 << 20, Access::LOCAL_WRITE) }.unwrap_err();
        assert!(error.to_string().contains("4194304 bytes is over the 2097152 bytes"), "{error}");
    }

    #[test]
    fn null_domain_is_an_error_not_a_crash() {
        // SAFETY: null is allowed.
        let verbs = unsafe { Verbs::from_raw(ptr::null_mut()) };
        // SAFETY: refused before the library is called; nothing is registered.
        let error = unsafe { verbs.register(0..2 << 20, Access::LOCAL_WRITE) }.unwrap_err();
        assert!(error.to_string().contains("null"), "{error}");
        assert_eq!(verbs.identity(), None);
    }

    #[test]
    fn foreign_handle_is_an_error_not_a_crash() {
        // SAFETY: null is allowed.
        let verbs = unsafe { Verbs::from_raw(ptr::null_mut()) };
        let registered = Registered { keys: Keys { lkey: 1, rkey: 1 }, handle: 0x1000 };
        assert_eq!(verbs.deregister(registered, 0..2 << 20).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
