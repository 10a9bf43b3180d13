//! Fixed buffers of an io_uring: registered memory on any machine with Linux 6.13 or newer, without an adapter.
//!
//! Uses the [`Registrar`] trait, the io-uring crate, `slots` (which indices are free) and `probe` (whether the kernel
//! releases a slot at once). The key of an arena is an index into the ring's table of fixed buffers, to be used as
//! `buf_index` of `ReadFixed`, `WriteFixed` and their kind.
//!
//! Three decisions:
//!
//! - The ring stays its user's. What is kept here is a duplicate of its file descriptor, which is enough to change the
//!   table and keeps the kernel's side of the ring alive as long as a registration needs it.
//! - A registration ends inside the call that ends it. The kernel's other way of saying so, a tag that is posted to the
//!   completion queue once the pages are released, would put foreign completions into the user's loop, and a user who
//!   frees memory in that very loop could never see them. Since Linux 6.13 each slot has its own reference count (commit
//!   "io_uring/rsrc: get rid of per-ring io_rsrc_node list"), so that emptying a slot which no request uses releases its
//!   pages before the call returns. Before that, every request in flight on the ring held up the release of whatever was
//!   removed after it was submitted, for ever if need be. [`Uring::new`] tries this out and refuses an older kernel.
//! - A request in flight keeps its slot's pages, whatever happens to the slot. That it has completed before its block is
//!   freed is the duty of whoever submits. If it is neglected, the kernel finishes on pages that are nobody's any more:
//!   it pins pages, not addresses, so no other memory is at risk. (A request that ran in a kernel worker can keep the
//!   pages, untouched, for a moment after its completion was posted: the worker gives up the request a little later.)

mod probe;
mod slots;

use super::{Keys, Limits, Registered, Registrar};
use crate::{Access, Memlock};
use core::num::NonZeroUsize;
use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use core::{fmt, ptr};
use io_uring::{IoUring, cqueue, squeue};
use slots::Slots;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd};
use std::sync::Arc;

/// A [`Registrar`] whose registrations are fixed buffers of an io_uring.
///
/// A cheap handle: clones are the same device. The ring's own limits hold: at most 1 GiB in a registration and 16384
/// registrations. Fixed buffers can always be read and written by the ring's requests, so [`Access::LOCAL_READ`] and
/// [`Access::LOCAL_WRITE`] are the same here, and [`Access::RELAXED_ORDERING`] changes nothing; there are no peers, so
/// heaps with remote access or memory windows cannot be attached.
///
/// Dropping the last handle takes the table off the ring. If the user's [`IoUring`] is dropped earlier, its requests in
/// flight are only cancelled when the last handle is gone too.
///
/// ```
/// use io_uring::{IoUring, opcode, types};
/// use rdmalloc_arenas::{Access, Registrar, registrar::uring::Uring};
/// # use std::{fs::File, os::fd::AsRawFd};
/// # fn example(mut ring: IoUring) -> Result<(), Box<dyn std::error::Error>> {
/// # let mut map = memmap2::MmapMut::map_anon(4 << 20)?;
/// # let start = (map.as_mut_ptr() as usize).next_multiple_of(2 << 20);
/// # let memory = start..start + (2 << 20);
/// let uring = Uring::new(&ring)?;
/// // A heap does this by itself, for each of its arenas:
/// // SAFETY: the memory is mapped until after `deregister`.
/// let registered = unsafe { uring.register(memory.clone(), Access::LOCAL_WRITE)? };
///
/// let zeros = File::open("/dev/zero")?;
/// let slot = registered.keys.lkey as u16;
/// let read = opcode::ReadFixed::new(types::Fd(zeros.as_raw_fd()), start as *mut u8, 100, slot).build();
/// // SAFETY: the memory is mapped until after the completion, and nothing else uses it.
/// unsafe { ring.submission().push(&read)? };
/// ring.submit_and_wait(1)?;
/// assert_eq!(ring.completion().next().unwrap().result(), 100);
///
/// uring.deregister(registered, memory)?;
/// # Ok(())
/// # }
/// # // Where io_uring is forbidden or too old there is nothing to see.
/// # let Ok(ring) = IoUring::new(8) else { return };
/// # if Uring::new(&ring).is_ok() { example(ring).unwrap() }
/// ```
#[derive(Clone)]
pub struct Uring {
    shared: Arc<Shared>,
}

struct Shared {
    /// A second mapping of the user's ring, over a duplicate of its descriptor. Only ever used to register: the queues
    /// are the user's.
    ring: IoUring,
    slots: Slots,
    /// Bytes in the slots.
    bytes: AtomicU64,
    /// Whether registrations count against the memlock limit. The kernel decides that when a ring is made: for a process with
    /// the capability `IPC_LOCK` they never do.
    is_limited: bool,
    /// The process that made it. A child of `fork` has the same ring, and must not take its table away.
    process: u32,
}

impl Uring {
    /// How many registrations [`Uring::new`] has room for: with 1 GiB in each, 1 TiB. The empty table costs the kernel
    /// 8 bytes a slot.
    pub const DEFAULT_SLOTS: u32 = 1024;

    /// The largest table that the kernel accepts (`IORING_MAX_REG_BUFFERS` in Linux's io_uring/rsrc.c).
    pub const MAX_SLOTS: u32 = 1 << 14;

    /// The longest registration in bytes: 1 GiB (`SZ_1G` in `io_buffer_validate` of Linux's io_uring/rsrc.c; EFAULT
    /// above it).
    pub const MAX_LEN: u64 = 1 << 30;

    /// Gives `ring` a table of [`DEFAULT_SLOTS`](Self::DEFAULT_SLOTS) empty slots for fixed buffers, to be filled by
    /// registrations.
    ///
    /// # Errors
    ///
    /// As [`with_slots`](Self::with_slots).
    pub fn new<S, C>(ring: &IoUring<S, C>) -> Result<Uring, UringError>
    where
        S: squeue::EntryMarker,
        C: cqueue::EntryMarker,
    {
        Uring::with_slots(ring, Uring::DEFAULT_SLOTS)
    }

    /// Gives `ring` a table of `slots` empty slots (1 to [`MAX_SLOTS`](Self::MAX_SLOTS)) for fixed buffers.
    ///
    /// # Errors
    ///
    /// - [`UringError::SingleIssuer`]: the ring was made with `setup_single_issuer`.
    /// - [`UringError::SlotCount`]: `slots` is zero or too large.
    /// - [`UringError::TableExists`]: the ring has fixed buffers already.
    /// - [`UringError::LateRelease`]: a kernel older than Linux 6.13.
    /// - [`UringError::Os`]: the system refused, such as ENOMEM, or EMFILE for a second descriptor.
    pub fn with_slots<S, C>(ring: &IoUring<S, C>, slots: u32) -> Result<Uring, UringError>
    where
        S: squeue::EntryMarker,
        C: cqueue::EntryMarker,
    {
        if ring.params().is_setup_single_issuer() {
            return Err(UringError::SingleIssuer);
        }
        if slots == 0 || slots > Uring::MAX_SLOTS {
            return Err(UringError::SlotCount { wanted: slots });
        }
        if !probe::releases_at_once().map_err(|source| UringError::Os { doing: "try a fixed buffer", source })? {
            return Err(UringError::LateRelease);
        }
        let duplicate = |source| UringError::Os { doing: "duplicate the ring's descriptor", source };
        // SAFETY: `ring` owns the descriptor and is borrowed for longer than this borrow of it.
        let fd = unsafe { BorrowedFd::borrow_raw(ring.as_raw_fd()) };
        let fd = fd.try_clone_to_owned().map_err(duplicate)?;
        // SAFETY: the descriptor is a ring's and owned, being the duplicate just made; the parameters are those of that
        // ring. The entry types may be smaller than the ring's own, but no entry is ever reached through this value.
        let ring = unsafe { IoUring::from_fd(fd.into_raw_fd(), ring.params().clone()) }.map_err(duplicate)?;
        ring.submitter().register_buffers_sparse(slots).map_err(|source| match source.raw_os_error() {
            Some(libc::EBUSY) => UringError::TableExists,
            _ => UringError::Os { doing: "register an empty table of fixed buffers", source },
        })?;
        let (slots, bytes, process) = (Slots::new(slots), AtomicU64::new(0), std::process::id());
        let is_limited = Memlock::now().limit.is_some();
        Ok(Uring { shared: Arc::new(Shared { ring, slots, bytes, is_limited, process }) })
    }

    /// How many slots hold a registration now.
    pub fn registered(&self) -> u32 {
        self.shared.slots.taken()
    }
}

impl Shared {
    /// Puts the buffer into the slot, in place of what it had.
    ///
    /// # Safety
    ///
    /// Requests of the ring may then read and write the buffer through the slot, which must be sound for as long as the
    /// slot keeps it. An empty buffer (null, 0) is always sound.
    unsafe fn put(&self, slot: u32, base: *mut u8, len: usize) -> io::Result<()> {
        let buffer = libc::iovec { iov_base: base.cast(), iov_len: len };
        // SAFETY: the caller's promise. No tag: the completion queue is the user's.
        unsafe { self.ring.submitter().register_buffers_update(slot, &[buffer], None) }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if std::process::id() == self.process {
            // It fails only if the user took the table away already, and then there is nothing left to do.
            let _ = self.ring.submitter().unregister_buffers();
        }
    }
}

// SAFETY: the three promises:
// - a slot is filled with exactly the range that is given, in an index that no other registration has (`Slots`), and the
//   kernel refuses a request that reaches outside its slot's range (EFAULT);
// - emptying the slot drops the table's reference to its pages under the ring's lock, in which also every request takes
//   and drops its own: with none in flight (the submitter's duty) the pages are released when the call returns, as
//   `probe` has seen this kernel do while another slot was in use. Requests that come later find the slot empty;
// - an update with one buffer fails before it changes the slot, and the index is given back.
unsafe impl Registrar for Uring {
    unsafe fn register(&self, memory: Range<usize>, access: Access) -> io::Result<Registered> {
        if !self.supports(access) {
            return Err(UringError::Remote { access }.into());
        }
        if memory.len() as u64 > Uring::MAX_LEN {
            return Err(UringError::TooLong { wanted: memory.len() as u64 }.into());
        }
        let shared = &*self.shared;
        let slot = shared.slots.take().ok_or(UringError::NoSlot { slots: shared.slots.count() })?;
        let base = ptr::with_exposed_provenance_mut(memory.start);
        // SAFETY: the caller of `register` has the memory mapped and lets the device write it.
        match unsafe { shared.put(slot, base, memory.len()) } {
            Ok(()) => {
                shared.bytes.fetch_add(memory.len() as u64, Relaxed);
                Ok(Registered { keys: Keys { lkey: slot, rkey: 0 }, handle: slot.into() })
            }
            Err(error) => {
                shared.slots.give_back(slot);
                Err(error)
            }
        }
    }

    fn deregister(&self, registered: Registered, memory: Range<usize>) -> io::Result<()> {
        let shared = &*self.shared;
        let slot = registered.keys.lkey;
        // SAFETY: an empty buffer.
        unsafe { shared.put(slot, ptr::null_mut(), 0) }?;
        // Only now, or another thread's registration could be emptied. After an error the index stays taken, as the slot
        // may still have its buffer.
        shared.slots.give_back(slot);
        shared.bytes.fetch_sub(memory.len() as u64, Relaxed);
        Ok(())
    }

    /// A ring has no peers.
    fn supports(&self, access: Access) -> bool {
        !access.needs_peers()
    }

    /// The kernel counts for the user, over all processes and rings (`__io_account_mem` in Linux's io_uring/rsrc.c), and does not
    /// tell. So what this ring has pinned is the least that it may be: what is refused for that would have failed.
    fn memlock(&self) -> Option<Memlock> {
        let limit = Memlock::now().limit.filter(|_| self.shared.is_limited);
        Some(Memlock { limit, pinned: self.shared.bytes.load(Relaxed) })
    }

    fn limits(&self) -> Limits {
        Limits { max_len: Uring::MAX_LEN, max_registrations: self.shared.slots.count().into() }
    }

    fn identity(&self) -> Option<NonZeroUsize> {
        NonZeroUsize::new(Arc::as_ptr(&self.shared).addr())
    }

    fn name(&self) -> &str {
        "io_uring"
    }
}

impl fmt::Debug for Uring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Uring")
            .field("ring", &self.shared.ring.as_raw_fd())
            .field("registered", &self.registered())
            .field("slots", &self.shared.slots.count())
            .finish()
    }
}

/// Why an io_uring cannot take registrations, or not this one.
///
/// [`Registrar::register`] gives it inside an [`io::Error`], where `get_ref` and `downcast_ref` find it.
#[derive(Debug)]
#[non_exhaustive]
pub enum UringError {
    /// The ring was made with `setup_single_issuer` (`setup_defer_taskrun` asks for it), and takes registrations from one
    /// thread only, while an allocator opens arenas on any.
    SingleIssuer,
    /// A table must have 1 to [`Uring::MAX_SLOTS`] slots.
    SlotCount {
        /// The slots that were asked for.
        wanted: u32,
    },
    /// The ring has a table of fixed buffers already: the program's own, or that of another [`Uring`].
    TableExists,
    /// The kernel is older than Linux 6.13 and keeps a slot's pages after the slot was emptied.
    LateRelease,
    /// Remote access or memory windows were asked for.
    Remote {
        /// The access that was asked for.
        access: Access,
    },
    /// The registration is longer than [`Uring::MAX_LEN`].
    TooLong {
        /// The length that was asked for, in bytes.
        wanted: u64,
    },
    /// Every slot of the table is in use.
    NoSlot {
        /// The size of the table.
        slots: u32,
    },
    /// The operating system refused.
    Os {
        /// What was being done: "cannot ...".
        doing: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

impl fmt::Display for UringError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            UringError::SingleIssuer => f.write_str(
                "the ring was made with setup_single_issuer, which forbids registrations from other threads: make it without",
            ),
            UringError::SlotCount { wanted } => {
                write!(f, "a table of {wanted} fixed buffers was asked for: it can have 1 to {}", Uring::MAX_SLOTS)
            }
            UringError::TableExists => f.write_str(
                "the ring has a table of fixed buffers already: share that Uring by cloning it, or use another ring",
            ),
            UringError::LateRelease => f.write_str(
                "this kernel keeps the pages of a fixed buffer after the buffer was removed: Linux 6.13 or newer is needed",
            ),
            UringError::Remote { access } => write!(
                f,
                "{access:?} was asked for, but an io_uring has no peers: attach it to a heap without remote access or windows"
            ),
            UringError::TooLong { wanted } => write!(
                f,
                "a registration of {wanted} bytes was asked for: a fixed buffer can have {} bytes (1 GiB), so split it",
                Uring::MAX_LEN
            ),
            UringError::NoSlot { slots } => write!(
                f,
                "all {slots} slots for fixed buffers are in use: ask for more with Uring::with_slots (up to {})",
                Uring::MAX_SLOTS
            ),
            UringError::Os { doing, source } => write!(f, "cannot {doing}: {source}"),
        }
    }
}

impl std::error::Error for UringError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            UringError::Os { source, .. } => Some(source),
            _ => None,
        }
    }
}

impl From<UringError> for io::Error {
    fn from(error: UringError) -> io::Error {
        let kind = match &error {
            UringError::SingleIssuer | UringError::LateRelease => io::ErrorKind::Unsupported,
            UringError::SlotCount { .. } | UringError::Remote { .. } | UringError::TooLong { .. } => {
                io::ErrorKind::InvalidInput
            }
            UringError::TableExists => io::ErrorKind::AlreadyExists,
            UringError::NoSlot { .. } => io::ErrorKind::StorageFull,
            UringError::Os { source, .. } => source.kind(),
        };
        io::Error::new(kind, error)
    }
}
