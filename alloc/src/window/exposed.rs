//! The steps of an exposed buffer: [`Binding`], [`Exposed`], [`Revoking`]. Uses the parent's list of windows, and `bytes`.

use super::bytes::{Bytes, OutOfRange};
use super::error::{BindFailed, Kept, NotRevoked};
use super::{Node, Shared};
use crate::buffer::Buffer;
use crate::remote_slice::RemoteSlice;
use core::fmt;
use core::mem::{self, ManuallyDrop};
use core::sync::atomic::Ordering::Relaxed;
use rdmalloc_arenas::Hold;
use rdmalloc_arenas::registrar::verbs::window;
use std::io;
use std::sync::Arc;

/// What belongs together until the window is dead: see the order in which things end in the parent. Without a `drop` of its own:
/// each step says how it ends.
pub(super) struct Held {
    shared: Arc<Shared>,
    node: Box<Node>,
    buffer: Buffer,
    hold: Hold,
}

impl Held {
    pub(super) fn new(shared: Arc<Shared>, node: Box<Node>, buffer: Buffer, hold: Hold) -> Held {
        shared.counts.exposed.fetch_add(1, Relaxed);
        Held { shared, node, buffer, hold }
    }

    /// The window is bound to nothing any more: it goes back to the others, and the buffer to the program.
    fn dead(self) -> Buffer {
        let Held { shared, node, buffer, hold } = self;
        shared.counts.exposed.fetch_sub(1, Relaxed);
        shared.put(node);
        drop(hold);
        buffer
    }

    /// Lets the window go, with a system call.
    fn end(self) -> Result<Buffer, Kept> {
        let Held { shared, node, buffer, hold } = self;
        let Node { window, next } = *node;
        match window.release() {
            Ok(()) => {
                shared.counts.exposed.fetch_sub(1, Relaxed);
                drop(hold);
                Ok(buffer)
            }
            Err((window, source)) => {
                let (len, node) = (buffer.len(), Box::new(Node { window, next }));
                Held { shared, node, buffer, hold }.leak();
                Err(Kept { len, source })
            }
        }
    }

    /// Keeps all of it for ever: the share too, so that the queue pair's owner stays.
    fn leak(self) {
        let counts = &self.shared.counts;
        counts.exposed.fetch_sub(1, Relaxed);
        counts.leaked.fetch_add(1, Relaxed);
        counts.leaked_bytes.fetch_add(self.buffer.len(), Relaxed);
        mem::forget(self);
    }

    fn bytes(&self) -> Bytes {
        // SAFETY: the buffer's bytes are initialised and its own, it is owned, and hands out no reference while it is here.
        // Writing takes `&mut self`.
        unsafe { Bytes::new(self.buffer.as_ptr().cast_mut(), self.buffer.len()) }
    }
}

macro_rules! step {
    ($type:ident) => {
        impl $type {
            pub(super) fn new(held: Held) -> $type {
                $type(ManuallyDrop::new(held))
            }

            /// Takes what is held out, without the step's own end.
            fn into_held(mut self) -> Held {
                // SAFETY: once, since `self` is forgotten.
                let held = unsafe { ManuallyDrop::take(&mut self.0) };
                mem::forget(self);
                held
            }

            /// What to tell the peer: where the exposed bytes are, and the window's rkey.
            #[must_use]
            pub fn remote(&self) -> RemoteSlice {
                let buffer = &self.0.buffer;
                let (addr, len) = (buffer.as_ptr().addr() as u64, buffer.len() as u64);
                RemoteSlice { addr, len, rkey: self.0.node.window.rkey() }
            }

            /// How many bytes are exposed; never 0.
            #[must_use]
            #[expect(clippy::len_without_is_empty, reason = "never empty")]
            pub fn len(&self) -> usize {
                self.0.buffer.len()
            }
        }

        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_tuple(stringify!($type)).field(&self.remote()).finish()
            }
        }
    };
}

step!(Binding);
step!(Exposed);
step!(Revoking);

/// A buffer whose window is being bound: the work request is posted.
///
/// What [`remote`](Self::remote) says may be sent to the peer at once, by a work request on the same queue pair: that comes after the bind,
/// and not at all if it fails. By other ways only when it is [`bound`](Self::bound).
///
/// Dropping it leaks the buffer, the window and a hold on the device, and counts them
/// ([`WindowStats::leaked`](super::WindowStats::leaked)): the bind may still be done.
#[must_use = "dropping this leaks the buffer; call `bound` when the bind has completed"]
pub struct Binding(ManuallyDrop<Held>);

impl Binding {
    /// The bind has completed, with this status (`ibv_wc.status`; 0 is success).
    ///
    /// # Errors
    ///
    /// [`BindFailed`], with the buffer. The queue pair has failed then.
    ///
    /// # Safety
    ///
    /// The completion of the work request that [`expose`](super::Windows::expose) posted was taken from the completion queue of
    /// the queue pair's sends, and had this status.
    pub unsafe fn bound(self, status: u32) -> Result<Exposed, BindFailed> {
        let held = self.into_held();
        if status == 0 { Ok(Exposed::new(held)) } else { Err(BindFailed { status, buffer: held.end() }) }
    }

    /// Takes the buffer back without a completion.
    ///
    /// # Errors
    ///
    /// [`Kept`], if the window cannot be let go.
    ///
    /// # Safety
    ///
    /// The work request will not be carried out from now on: the queue pair has failed or was reset, and does not go on.
    pub unsafe fn reclaim(self) -> Result<Buffer, Kept> {
        self.into_held().end()
    }
}

impl Drop for Binding {
    fn drop(&mut self) {
        // SAFETY: dropped once, and not used again.
        unsafe { ManuallyDrop::take(&mut self.0) }.leak();
    }
}

/// A buffer that a peer may read or write by an rkey of its own.
///
/// It owns the buffer, so there is no reference to bytes that change beneath it: they are copied out and in. When they are
/// complete is for program and peer to agree on: a message from the peer, or a flag, which is an aligned word of 8 bytes that the
/// peer writes last. (A flag in the same write as the data is only good on devices that write in ascending order, and never with
/// [`Access::RELAXED_ORDERING`](crate::Access::RELAXED_ORDERING).)
///
/// Ends by [`revoke`](Self::revoke) (a work request, and its completion), [`end`](Self::end) (a system call), or when dropped
/// (the same; the buffer is freed).
pub struct Exposed(ManuallyDrop<Held>);

impl Exposed {
    /// Copies bytes out, from `offset` on, as they are at that moment: what the peer writes meanwhile is seen in part.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`]; then nothing is copied.
    pub fn copy_to_slice(&self, offset: usize, to: &mut [u8]) -> Result<(), OutOfRange> {
        self.0.bytes().read(offset, to)
    }

    /// Copies bytes in, from `offset` on. What the peer reads meanwhile, it sees in part.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`]; then nothing is copied.
    pub fn copy_from_slice(&mut self, offset: usize, from: &[u8]) -> Result<(), OutOfRange> {
        self.0.bytes().write(offset, from)
    }

    /// Reads the aligned word of 8 bytes at `offset`, whole; what is copied out after it is at least as new (acquire). In the
    /// byte order of this machine, which is that of remote atomics.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`]; also if `offset` is no multiple of 8.
    pub fn load_u64(&self, offset: usize) -> Result<u64, OutOfRange> {
        self.0.bytes().load(offset)
    }

    /// Writes the aligned word of 8 bytes at `offset`, whole; what was copied in before it is there first (release).
    ///
    /// # Errors
    ///
    /// [`OutOfRange`]; also if `offset` is no multiple of 8.
    pub fn store_u64(&mut self, offset: usize, value: u64) -> Result<(), OutOfRange> {
        self.0.bytes().store(offset, value)
    }

    /// Posts the work request that ends the binding (a local invalidate; for type 1 a bind to nothing), signalled, under the
    /// `wr_id` `id`. Until it has completed, the peer may still reach the bytes.
    ///
    /// If the peer has ended it already, by a send with invalidate, the work request fails, and the queue pair with it: see
    /// [`invalidated_by_peer`](Self::invalidated_by_peer).
    ///
    /// # Errors
    ///
    /// [`NotRevoked`] gives it back: the send queue is full (`ENOMEM`), the queue pair does not take work, or the device is lost
    /// (`EIO`).
    pub fn revoke(self, id: u64) -> Result<Revoking, NotRevoked> {
        let mut held = self.into_held();
        let mut unbind = || {
            let _stay = window::regions_stay();
            let address = held.buffer.as_ptr().addr();
            let mr = held.shared.region_of(address).map_err(|_| io::Error::from_raw_os_error(libc::EIO))?;
            // SAFETY: the queue pair to which the bind was posted, kept by `shared`, and the region, kept by `_stay`.
            unsafe { held.node.window.post_unbind(held.shared.qp, id, mr) }
        };
        match unbind() {
            Ok(()) => Ok(Revoking::new(held)),
            Err(source) => Err(NotRevoked { exposed: Exposed::new(held), source }),
        }
    }

    /// Ends it at once, by a system call that lets the window go; then the rkey is dead, and the buffer the program's. Works
    /// also when the queue pair has failed.
    ///
    /// # Errors
    ///
    /// [`Kept`]: the window could not be let go, and all is kept for ever.
    pub fn end(self) -> Result<Buffer, Kept> {
        self.into_held().end()
    }

    /// The peer has ended the binding, by a send with invalidate: nothing is posted for it.
    ///
    /// # Safety
    ///
    /// A receive of this queue pair has completed with `IBV_WC_WITH_INV` and this rkey, since it was bound. (Soft-RoCE ends the
    /// window and sets another bit, the kernel's: what else tells that the peer's send was one with invalidate will do there.)
    pub unsafe fn invalidated_by_peer(self) -> Buffer {
        self.into_held().dead()
    }
}

impl Drop for Exposed {
    fn drop(&mut self) {
        // SAFETY: dropped once, and not used again.
        let held = unsafe { ManuallyDrop::take(&mut self.0) };
        // What cannot be ended is kept and counted.
        let _ = held.end();
    }
}

/// A buffer whose window is being ended: the work request is posted.
///
/// Dropping it leaks the buffer, the window and a hold on the device, and counts them
/// ([`WindowStats::leaked`](super::WindowStats::leaked)): the peer may still reach it.
#[must_use = "dropping this leaks the buffer; call `revoked` when the revocation has completed"]
pub struct Revoking(ManuallyDrop<Held>);

impl Revoking {
    /// The revocation has completed, with this status (`ibv_wc.status`; 0 is success): the rkey is dead, and the window ready for
    /// the next. If it has failed, the window is let go instead, with the same effect.
    ///
    /// # Errors
    ///
    /// [`Kept`]: it has failed, and the window could not be let go either.
    ///
    /// # Safety
    ///
    /// The completion of the work request that [`revoke`](Exposed::revoke) posted was taken from the completion queue of the
    /// queue pair's sends, and had this status.
    pub unsafe fn revoked(self, status: u32) -> Result<Buffer, Kept> {
        let held = self.into_held();
        if status == 0 { Ok(held.dead()) } else { held.end() }
    }

    /// Takes the buffer back without a completion.
    ///
    /// # Errors
    ///
    /// [`Kept`], if the window cannot be let go.
    ///
    /// # Safety
    ///
    /// The work request will not be carried out from now on: the queue pair has failed or was reset, and does not go on.
    pub unsafe fn reclaim(self) -> Result<Buffer, Kept> {
        self.into_held().end()
    }
}

impl Drop for Revoking {
    fn drop(&mut self) {
        // SAFETY: dropped once, and not used again.
        unsafe { ManuallyDrop::take(&mut self.0) }.leak();
    }
}
