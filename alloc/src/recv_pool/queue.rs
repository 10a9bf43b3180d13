//! What a [`RecvPool`](super::RecvPool) posts to: [`ReceiveQueue`], and the two of verbs (feature `verbs`).

#[cfg(feature = "verbs")]
pub use verbs::{RecvQueue, SharedRecvQueue};

use core::fmt;
use core::num::NonZeroUsize;
use std::io;

/// A receive that is to be posted: one scatter entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Receive {
    /// The `wr_id`.
    pub id: u64,
    /// Where the message is to land.
    pub addr: u64,
    /// How long it may be, in bytes.
    pub len: u32,
    /// The key of the memory.
    pub lkey: u32,
}

/// Not all receives could be posted.
#[derive(Debug)]
pub struct PostFailed {
    /// How many were, from the first on.
    pub posted: usize,
    /// Why not the next: `ENOMEM` when the queue is full.
    pub source: io::Error,
}

impl fmt::Display for PostFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { posted, source } = self;
        write!(f, "after {posted} receive(s), the next was not posted: {source}")?;
        if source.raw_os_error() == Some(libc::ENOMEM) {
            f.write_str("; the queue is shorter than the pool's depth: make it with that many (max_recv_wr, max_wr)")?;
        }
        Ok(())
    }
}

impl std::error::Error for PostFailed {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}

/// A receive queue, of one queue pair or shared: what takes receives, in order.
///
/// For `ibv_qp` and `ibv_srq` there are `RecvQueue` and `SharedRecvQueue` (feature `verbs`); implement it for the queues of another crate.
///
/// # Safety
///
/// An implementor promises that each receive that `post` has taken is for the memory, and under the id, that it was given; that
/// what was not taken, by the number in the error, is never carried out; and that the queue stays as long as the value does.
pub unsafe trait ReceiveQueue {
    /// Posts receives, in order; those at once that can be.
    ///
    /// # Errors
    ///
    /// [`PostFailed`]: how many were taken, and why the next was not.
    ///
    /// # Safety
    ///
    /// The memory stays, untouched, until the completion of each.
    unsafe fn post(&mut self, receives: &[Receive]) -> Result<(), PostFailed>;

    /// Whether it goes on when a queue pair that takes from it fails, as a shared receive queue does.
    fn is_shared(&self) -> bool {
        false
    }

    /// The address of its `ibv_pd`, to be compared with the device's ([`Device::identity`](crate::Device::identity)). `None`: is
    /// not compared.
    fn domain(&self) -> Option<NonZeroUsize> {
        None
    }
}

#[cfg(feature = "verbs")]
mod verbs {
    use super::{PostFailed, Receive, ReceiveQueue};
    use core::array;
    use core::num::NonZeroUsize;
    use core::ptr::{self, NonNull};
    use rdma_sys::{ibv_qp, ibv_recv_wr, ibv_sge, ibv_srq};
    use rdmalloc_arenas::registrar::verbs::{AsQueuePair, AsSharedReceiveQueue, Origin};
    use std::io;

    /// How many work requests are chained for one call, which takes the queue's lock and rings its bell once.
    const CHAIN: usize = 32;

    /// The receive queue of a queue pair, which is kept by `T`.
    #[derive(Debug)]
    pub struct RecvQueue<T> {
        owner: T,
        origin: Origin,
    }

    /// A shared receive queue, which is kept by `T`.
    #[derive(Debug)]
    pub struct SharedRecvQueue<T> {
        owner: T,
        origin: Origin,
    }

    macro_rules! owned {
        ($type:ident, $trait:ident) => {
            impl<T: $trait> $type<T> {
                /// That of this owner.
                pub fn new(owner: T) -> $type<T> {
                    $type { owner, origin: Origin::here() }
                }

                /// Its owner.
                pub fn owner(&self) -> &T {
                    &self.owner
                }
            }
        };
    }

    owned!(RecvQueue, AsQueuePair);
    owned!(SharedRecvQueue, AsSharedReceiveQueue);

    // SAFETY: the library takes work requests in order, copies them, and names the first that it has not taken. The owner keeps
    // the queue.
    unsafe impl<T: AsQueuePair> ReceiveQueue for RecvQueue<T> {
        unsafe fn post(&mut self, receives: &[Receive]) -> Result<(), PostFailed> {
            let qp: NonNull<ibv_qp> = self.owner.as_queue_pair();
            // SAFETY: the queue pair is live.
            chained(self.origin, receives, |first, bad| unsafe { rdma_sys::ibv_post_recv(qp.as_ptr(), first, bad) })
        }

        fn domain(&self) -> Option<NonZeroUsize> {
            // SAFETY: the queue pair is live, and has a protection domain.
            NonZeroUsize::new(unsafe { (*self.owner.as_queue_pair().as_ptr()).pd }.addr())
        }
    }

    // SAFETY: as above.
    unsafe impl<T: AsSharedReceiveQueue> ReceiveQueue for SharedRecvQueue<T> {
        unsafe fn post(&mut self, receives: &[Receive]) -> Result<(), PostFailed> {
            let srq: NonNull<ibv_srq> = self.owner.as_shared_receive_queue();
            // SAFETY: the queue is live.
            chained(self.origin, receives, |first, bad| unsafe {
                rdma_sys::ibv_post_srq_recv(srq.as_ptr(), first, bad)
            })
        }

        fn is_shared(&self) -> bool {
            true
        }

        fn domain(&self) -> Option<NonZeroUsize> {
            // SAFETY: the queue is live, and has a protection domain.
            NonZeroUsize::new(unsafe { (*self.owner.as_shared_receive_queue().as_ptr()).pd }.addr())
        }
    }

    /// Posts in chains. `post` takes the first of a chain, and a place for the first that was not taken.
    fn chained(
        origin: Origin,
        receives: &[Receive],
        mut post: impl FnMut(*mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> i32,
    ) -> Result<(), PostFailed> {
        if !origin.is_here() {
            let child = io::Error::new(io::ErrorKind::Unsupported, "a child of fork cannot post to its parent's queue");
            return Err(PostFailed { posted: 0, source: child });
        }
        for (number, chunk) in receives.chunks(CHAIN).enumerate() {
            let mut entries: [ibv_sge; CHAIN] = array::from_fn(|_| ibv_sge { addr: 0, length: 0, lkey: 0 });
            let none = || ibv_recv_wr { wr_id: 0, next: ptr::null_mut(), sg_list: ptr::null_mut(), num_sge: 1 };
            let mut chain: [ibv_recv_wr; CHAIN] = array::from_fn(|_| none());
            let (first, entry) = (chain.as_mut_ptr(), entries.as_mut_ptr());
            for (n, receive) in chunk.iter().enumerate() {
                // SAFETY: `n` is below `CHAIN`, and one past it only where there is a next.
                unsafe {
                    entry.add(n).write(ibv_sge { addr: receive.addr, length: receive.len, lkey: receive.lkey });
                    let next = if n + 1 < chunk.len() { first.add(n + 1) } else { ptr::null_mut() };
                    first.add(n).write(ibv_recv_wr { wr_id: receive.id, next, sg_list: entry.add(n), num_sge: 1 });
                }
            }
            let mut bad = ptr::null_mut();
            let errno = post(first, &mut bad);
            if errno != 0 {
                // Where the library has not said, it has taken none.
                let taken = (0..chunk.len()).find(|n| bad == first.wrapping_add(*n)).unwrap_or(0);
                let source = if errno > 0 { io::Error::from_raw_os_error(errno) } else { io::Error::last_os_error() };
                return Err(PostFailed { posted: number * CHAIN + taken, source });
            }
        }
        Ok(())
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn chains_have_every_receive_in_order_and_the_first_that_was_not_taken_is_counted() {
            for (count, room) in [(1, 9), (31, 99), (32, 99), (33, 99), (100, 200), (100, 70), (40, 32), (5, 0)] {
                let receives: Vec<_> =
                    (0..count).map(|n| Receive { id: n, addr: n * 10, len: n as u32 + 1, lkey: 7 }).collect();
                let mut seen = Vec::new();
                let result = chained(Origin::here(), &receives, |first, bad| {
                    let mut at = first;
                    while !at.is_null() {
                        // SAFETY: the chain lives during the call; `bad` is the caller's place.
                        unsafe {
                            if seen.len() == room {
                                *bad = at;
                                return libc::ENOMEM;
                            }
                            let (wr, sge) = (&*at, &*(*at).sg_list);
                            assert_eq!(wr.num_sge, 1);
                            seen.push(Receive { id: wr.wr_id, addr: sge.addr, len: sge.length, lkey: sge.lkey });
                            at = wr.next;
                        }
                    }
                    0
                });
                assert_eq!(seen, receives[..room.min(receives.len())]);
                match result {
                    Ok(()) => assert!(room >= receives.len()),
                    Err(failed) => assert_eq!(failed.posted, room),
                }
            }
        }
    }
}
