//! Memory windows: one buffer with an rkey of its own, which is dead once it was revoked. Uses `buffer`, `pool`, `remote_slice`, the
//! devices and the window calls of the crate below.
//!
//! ```text
//! Windows        the windows of one queue pair: ready ones in a list
//!   expose       Buffer  -> Binding     posts the bind; the rkey may go out behind it, on the same queue pair
//! Binding
//!   bound        Binding -> Exposed     when the bind has completed
//! Exposed
//!   revoke       Exposed -> Revoking    posts the invalidation
//!   end, drop    Exposed -> Buffer      a system call instead: the window itself is let go
//! Revoking
//!   revoked      Revoking -> Buffer     when the invalidation has completed: the rkey is dead
//! ```
//!
//! The order in which things end is what this is for: the window is dead, then the buffer is free, then its arena may close (a
//! region with a bound window cannot be deregistered: `EINVAL`), and the window is let go before the queue pair. So a value of
//! each step owns the buffer, the window, a hold on the device, and a share of the queue pair. Where a window cannot be ended,
//! all four are kept for ever, and counted ([`WindowStats::leaked`]).
//!
//! What is under way must not be forgotten: a window that is let go while its bind is still in the send queue could leave the
//! bind to find another window of that number (on soft-RoCE: if its tag, too, is the same). So a [`Binding`] or [`Revoking`] that
//! is dropped leaks, like any work request that nobody waits for.

mod bytes;
mod error;
mod exposed;

pub use bytes::OutOfRange;
pub use error::{BindFailed, ExposeError, Kept, NotExposed, NotRevoked, WindowsError};
pub use exposed::{Binding, Exposed, Revoking};
pub use rdmalloc_arenas::registrar::verbs::window::Kind as WindowKind;

use crate::buffer::Buffer;
use crate::pool;
use core::mem::ManuallyDrop;
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use exposed::Held;
use rdma_sys::{ibv_mr, ibv_pd, ibv_qp};
use rdmalloc_arenas::registrar::verbs::window::{self, Part, TAGS, Window};
use rdmalloc_arenas::registrar::verbs::{AsQueuePair, Origin};
use rdmalloc_arenas::sync::Lock;
use rdmalloc_arenas::{Access, Device, HoldError, KeyError};
use std::sync::Arc;

/// The memory windows of one queue pair: makes them, binds them to buffers, and keeps those that are free for the next.
///
/// A handle; clones share the windows. Making a window is a system call, binding one is a work request, so windows are used
/// again. With windows of type 2 (all current adapters, soft-RoCE), each is open to the peer of this one queue pair only.
///
/// Where completions come from is the program's affair: every work request posted here is signalled, takes one place in the send
/// queue and one in its completion queue, and carries the `wr_id` that the caller chose.
///
/// # What a window is good for, and what not
///
/// The heap is made with [`Access::WINDOWS`] and no remote access: its arenas' own rkeys open nothing, so a guessed rkey opens
/// nothing but what is exposed at that moment, and with type 2, only to the peer it is exposed to. Adapters check a window's
/// bounds as well as its rights. Soft-RoCE does not check bounds (Linux 6.1 and 7.3: rights, protection domain, queue pair and
/// end of life it does): there, an rkey with write access opens the whole arena while it lives.
///
/// An rkey counts up in its low 8 bits each time the window is bound again, so that of the first binding would be alive again in
/// the 257th. Windows are let go before that; but a device may give the number of one that was let go to a new one, after a
/// while. So an old rkey is no proof of who sent it, and a peer that must never reach anything else is disconnected.
///
/// ```no_run
/// use rdmalloc::registrar::verbs::{AsQueuePair, ProtectionDomain, Verbs};
/// use rdmalloc::{Access, Heap, Windows};
/// use std::sync::Arc;
///
/// # fn example(qp: impl AsQueuePair + Send + Sync + 'static, wait_for: impl Fn(u64) -> u32) -> Result<(), Box<dyn std::error::Error>> {
/// let domain = Arc::new(ProtectionDomain::open(None)?);
/// let heap = Heap::builder().access(Access::WINDOWS).build()?;
/// let device = heap.attach(Verbs::new(domain.clone()))?;
/// let windows = Windows::new(device, qp)?; // a connected queue pair of `domain`
///
/// let buffer = heap.buffer_zeroed(4096)?; // what shall be written is initialised before
/// let binding = windows.expose(buffer, Access::REMOTE_WRITE, 1)?;
/// let _told = binding.remote().to_bytes(); // send it to the peer, behind the bind
/// // SAFETY: the completion of work request 1 was polled, with this status.
/// let exposed = unsafe { binding.bound(wait_for(1)) }?;
/// // ... the peer says that it has written:
/// let revoking = exposed.revoke(2)?;
/// // SAFETY: the completion of work request 2 was polled, with this status.
/// let buffer = unsafe { revoking.revoked(wait_for(2)) }?;
/// assert_eq!(buffer.len(), 4096); // ours again, and the rkey is dead
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Windows {
    shared: Arc<Shared>,
}

/// What all handles and all exposed buffers of one queue pair share.
pub(crate) struct Shared {
    device: Device,
    qp: NonNull<ibv_qp>,
    kind: WindowKind,
    ready: Lock<Ready>,
    counts: Counts,
    /// A child of fork has no windows, and no queue pair.
    origin: Origin,
    /// Dropped only after the last window is gone, and not in a child.
    owner: ManuallyDrop<Box<dyn Send + Sync>>,
}

// SAFETY: `qp` is the field that is not Send by itself: a verbs object, which any thread may use, at once (ibv_alloc_td(3)).
unsafe impl Send for Shared {}
// SAFETY: as above; the rest has a lock or is atomic.
unsafe impl Sync for Shared {}

/// Free windows, as a list of boxes, so that nothing is allocated or freed under the lock.
#[derive(Default)]
struct Ready {
    first: Option<Box<Node>>,
    count: usize,
}

/// A window, with its place in the list.
pub(crate) struct Node {
    pub(crate) window: Window,
    next: Option<Box<Node>>,
}

#[derive(Default)]
struct Counts {
    made: AtomicU64,
    bound: AtomicU64,
    exposed: AtomicUsize,
    leaked: AtomicUsize,
    leaked_bytes: AtomicUsize,
}

/// Figures of the windows of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct WindowStats {
    /// Windows that were made: system calls.
    pub made: u64,
    /// Binds that were posted.
    pub bound: u64,
    /// Buffers that are exposed now, or becoming so, or being revoked.
    pub exposed: usize,
    /// Windows that are ready for the next.
    pub ready: usize,
    /// Buffers that are lost, since their window could not be ended, or what was under way was dropped: see
    /// [`Binding`] and [`Revoking`]. Each holds the device for ever.
    pub leaked: usize,
    /// The bytes of these buffers.
    pub leaked_bytes: usize,
}

impl Windows {
    /// The windows of a queue pair, of the best kind that the device has. `owner` is kept until the last window is gone.
    ///
    /// # Errors
    ///
    /// [`WindowsError`]: the device has none, is not that of the queue pair's protection domain, or has been detached.
    pub fn new(device: Device, owner: impl AsQueuePair + Send + Sync + 'static) -> Result<Windows, WindowsError> {
        // SAFETY: `AsQueuePair` promises a live queue pair, which has a live protection domain.
        let kind = unsafe { window::kind_of(pd_of(owner.as_queue_pair())) }.ok_or(WindowsError::None)?;
        Windows::with_kind(device, owner, kind)
    }

    /// The same, with windows of one kind. Type 1 opens to every queue pair of the protection domain.
    ///
    /// # Errors
    ///
    /// [`WindowsError::OtherDomain`], [`WindowsError::Detached`]. That the device has no such windows shows at the first [`expose`](Self::expose).
    pub fn with_kind(
        device: Device,
        owner: impl AsQueuePair + Send + Sync + 'static,
        kind: WindowKind,
    ) -> Result<Windows, WindowsError> {
        let qp = owner.as_queue_pair();
        // SAFETY: `AsQueuePair` promises a live queue pair, which has a live protection domain.
        let pd = unsafe { pd_of(qp) };
        if device.identity() != Some(pd.addr()) {
            return Err(match device.hold() {
                Err(HoldError::Detached) => WindowsError::Detached,
                _ => WindowsError::OtherDomain { device },
            });
        }
        let owner = ManuallyDrop::new(Box::new(owner) as Box<dyn Send + Sync>);
        let (ready, counts) = Default::default();
        Ok(Windows { shared: Arc::new(Shared { device, qp, kind, ready, counts, origin: Origin::here(), owner }) })
    }

    /// Which kind of windows they are.
    #[must_use]
    pub fn kind(&self) -> WindowKind {
        self.shared.kind
    }

    /// Makes windows beforehand, so that so many are ready.
    ///
    /// # Errors
    ///
    /// [`ExposeError::NoWindow`] when the device has no more; [`ExposeError::ForkedChild`].
    pub fn reserve(&self, count: usize) -> Result<(), ExposeError> {
        let ready = self.shared.ready();
        (ready..count).try_for_each(|_| self.shared.make().map(|node| self.shared.put(node)))
    }

    /// Exposes the bytes of a buffer to the peer: posts the work request that binds a window to them, signalled, under the
    /// `wr_id` `id`. Not the spare capacity: what a peer may write was initialised before, and what it may read is what the
    /// program has put there.
    ///
    /// `rights` are of [`Access::REMOTE_READ`], [`REMOTE_WRITE`](Access::REMOTE_WRITE), [`REMOTE_ATOMIC`](Access::REMOTE_ATOMIC).
    /// What can be known before is checked, since a bind that fails takes the queue pair with it.
    ///
    /// # Errors
    ///
    /// [`NotExposed`] has the buffer, and why.
    pub fn expose(&self, buffer: Buffer, rights: Access, id: u64) -> Result<Binding, NotExposed> {
        let shared = &self.shared;
        let (start, len) = (buffer.as_ptr().addr(), buffer.len());
        let remote = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        let check = || match pool::core_of(start).map(|core| core.arenas.config().access).unwrap_or_default() {
            _ if !shared.origin.is_here() => Err(ExposeError::ForkedChild),
            _ if !rights.is_remote() || !remote.contains(rights) => Err(ExposeError::Rights { rights }),
            _ if len == 0 => Err(ExposeError::Empty),
            access if !access.contains(Access::WINDOWS) => Err(ExposeError::Heap { access }),
            // First the hold: from here on the device is not detached, unless it is lost.
            _ => Ok((shared.device.hold().map_err(ExposeError::Hold)?, shared.take()?)),
        };
        let (hold, mut node) = match check() {
            Ok(checked) => checked,
            Err(why) => return Err(NotExposed { buffer, why }),
        };
        let mut bind = || {
            let _stay = window::regions_stay();
            let mr = shared.region_of(start).map_err(ExposeError::Key)?;
            if !shared.device.is_one_registration(start, start + (len - 1)) {
                return Err(ExposeError::Straddles { len });
            }
            let part = Part { mr, addr: start as u64, len: len as u64, rights };
            // SAFETY: the queue pair is its owner's, whom `shared` keeps, and the window was made for its domain, of which the
            // region is. It stays registered while `_stay` does; and longer: the buffer lives until the binding has ended. Peers
            // may do as they like to bytes that nobody has a reference to: `Held` owns the buffer from here on. A window that
            // was ready is not bound, and nothing of it is under way.
            unsafe { node.window.post_bind(shared.qp, id, &part) }.map_err(ExposeError::Post)
        };
        if let Err(why) = bind() {
            shared.put(node);
            return Err(NotExposed { buffer, why });
        }
        shared.counts.bound.fetch_add(1, Relaxed);
        Ok(Binding::new(Held::new(Arc::clone(shared), node, buffer, hold)))
    }

    /// Figures of these windows.
    #[must_use]
    pub fn stats(&self) -> WindowStats {
        let counts = &self.shared.counts;
        WindowStats {
            made: counts.made.load(Relaxed),
            bound: counts.bound.load(Relaxed),
            exposed: counts.exposed.load(Relaxed),
            ready: self.shared.ready(),
            leaked: counts.leaked.load(Relaxed),
            leaked_bytes: counts.leaked_bytes.load(Relaxed),
        }
    }
}

impl core::fmt::Debug for Windows {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Windows").field("kind", &self.kind()).field("stats", &self.stats()).finish_non_exhaustive()
    }
}

impl Shared {
    /// The region that has this address: the device's identity is the domain of the queue pair, so its handles are regions of it
    /// (`Registrar::identity`). Registered as long as something lives there, unless the device is lost: then as long as who asks
    /// has [`window::regions_stay`].
    fn region_of(&self, address: usize) -> Result<NonNull<ibv_mr>, KeyError> {
        let (_, handle) = self.device.registration_of(address)?;
        // Not null unless the device was lost between the look-up of the keys and that of the handle.
        NonNull::new(ptr::with_exposed_provenance_mut(handle as usize)).ok_or(KeyError::Lost)
    }

    /// How many windows are ready: none in a child of fork, where the lock may be locked for ever.
    fn ready(&self) -> usize {
        if self.origin.is_here() { self.ready.lock().count } else { 0 }
    }

    /// A window that is ready, or a new one.
    fn take(&self) -> Result<Box<Node>, ExposeError> {
        let node = {
            let mut ready = self.ready.lock();
            let mut node = ready.first.take();
            if let Some(node) = &mut node {
                ready.first = node.next.take();
                ready.count -= 1;
            }
            node
        };
        node.map_or_else(|| self.make(), Ok)
    }

    fn make(&self) -> Result<Box<Node>, ExposeError> {
        if !self.origin.is_here() {
            return Err(ExposeError::ForkedChild);
        }
        // SAFETY: the queue pair is live, so its domain is; and stays so as long as `owner`, which is dropped after the windows.
        let window = unsafe { Window::new(pd_of(self.qp), self.kind) }.map_err(ExposeError::NoWindow)?;
        self.counts.made.fetch_add(1, Relaxed);
        Ok(Box::new(Node { window, next: None }))
    }

    /// A window that is not bound is ready for the next; or is let go, when its rkeys have all been used.
    fn put(&self, mut node: Box<Node>) {
        if self.kind == WindowKind::Type2 && node.window.binds() >= TAGS - 1 {
            // If it cannot be let go, it is lost, and bound to nothing.
            let _ = node.window.release();
            return;
        }
        if !self.origin.is_here() {
            // A child of fork, where the lock may be locked for ever.
            core::mem::forget(node);
            return;
        }
        let mut ready = self.ready.lock();
        node.next = ready.first.take();
        ready.first = Some(node);
        ready.count += 1;
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if !self.origin.is_here() {
            // A child of fork: another thread of the parent's may have been changing the list.
            return;
        }
        let (mut node, mut released) = (self.ready.get_mut().first.take(), true);
        while let Some(this) = node {
            released &= this.window.release().is_ok();
            node = this.next;
        }
        if released {
            // SAFETY: here only, and `self` is not used again. Every other window had a share of this, so it is gone too.
            unsafe { ManuallyDrop::drop(&mut self.owner) };
        }
    }
}

/// # Safety
///
/// `qp` is live.
unsafe fn pd_of(qp: NonNull<ibv_qp>) -> NonNull<ibv_pd> {
    // SAFETY: a live queue pair has a protection domain.
    unsafe { NonNull::new_unchecked((*qp.as_ptr()).pd) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Heap;
    use core::mem::MaybeUninit;
    use rdmalloc_tests::Ledger;

    #[test]
    fn a_child_that_was_forked_while_the_list_was_locked_is_not_locked_with_it() {
        let heap = Heap::builder().build().unwrap();
        let device = heap.attach(Ledger::new()).unwrap();
        let (ready, counts) = Default::default();
        let (qp, kind, origin) = (NonNull::dangling(), WindowKind::Type2, Origin::here());
        let owner = ManuallyDrop::new(Box::new(()) as Box<dyn Send + Sync>);
        let windows = Windows { shared: Arc::new(Shared { device, qp, kind, ready, counts, origin, owner }) };
        let locked = windows.shared.ready.lock();
        // SAFETY: the child calls what is tested, and exits; it is ended by the alarm if that hangs.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above.
            unsafe { libc::alarm(10) };
            let refused = matches!(windows.reserve(1), Err(ExposeError::ForkedChild));
            // SAFETY: as above.
            unsafe { libc::_exit(i32::from(!refused || windows.stats().ready != 0)) }
        }
        let mut status = -1;
        // SAFETY: the child is ours, and the place a local one.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        drop(locked);
        assert_eq!(status, 0, "the child hung, or went on");
    }

    /// A queue pair of which only the domain is there.
    struct Fake(Box<MaybeUninit<ibv_qp>>);

    // SAFETY: nothing is done with the pointer in it.
    unsafe impl Send for Fake {}
    // SAFETY: as above.
    unsafe impl Sync for Fake {}
    // SAFETY: no calls are made with it here: making `Windows` of a kind only reads the domain, which is written.
    unsafe impl AsQueuePair for Fake {
        fn as_queue_pair(&self) -> NonNull<ibv_qp> {
            NonNull::from(&*self.0).cast()
        }
    }

    #[test]
    fn a_device_that_was_detached_is_not_said_to_be_of_another_domain() {
        let heap = Heap::builder().access(Access::WINDOWS).build().unwrap();
        let device = heap.attach(Ledger::new()).unwrap();
        let windows = || {
            let mut qp = Box::new(MaybeUninit::<ibv_qp>::zeroed());
            // SAFETY: within the box.
            unsafe { (&raw mut (*qp.as_mut_ptr()).pd).write(NonNull::dangling().as_ptr()) };
            Windows::with_kind(device, Fake(qp), WindowKind::Type2).map(|_| ()).unwrap_err()
        };
        assert_eq!(windows(), WindowsError::OtherDomain { device });
        heap.detach(device).unwrap();
        assert_eq!(windows(), WindowsError::Detached);
    }
}
