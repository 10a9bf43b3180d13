//! [`RecvPool`]: keeps a receive queue stocked with buffers of a heap. Uses `buffer`, `pool`, the devices of the crate below, and
//! its own parts: `queue` (what is posted to), `returned` (buffers that come back from other threads), `lent` (what is out),
//! `settings`, `stats`.
//!
//! ```text
//!           restock: posts            complete: the message
//!   ready -------------------> posted ---------------------> lent as Bytes (or copied, and ready again)
//!     ^  ^                                                     |
//!     |  +---- a heap, up to a limit                           |  dropped, by any thread
//!     +------------- restock: takes the list <---- returned <--+
//! ```
//!
//! Every buffer has a place in a table; its index is the low half of the `wr_id`. The pool itself has one user at a time
//! (`&mut self`): the thread that polls. Others only drop `Bytes`, and that puts a buffer into a lock-free list, no more. It does
//! not post: posting takes the queue pair's lock and rings the adapter's bell, one at a time, in whichever thread happens to drop
//! the last slice, perhaps inside a lock of the program's. The polling thread posts them in chains, between two polls.

mod lent;
mod queue;
mod returned;
mod settings;
mod stats;

pub use queue::{PostFailed, Receive, ReceiveQueue};
#[cfg(feature = "verbs")]
pub use queue::{RecvQueue, SharedRecvQueue};
pub use settings::{RecvPoolBuilder, RecvPoolError};
pub use stats::{RecvError, RecvStats, RestockError, Stock};

use crate::buffer::Buffer;
use crate::pool::Heap;
use bytes::Bytes;
use core::fmt;
use core::mem;
use core::ops::Range;
use lent::Lent;
use rdmalloc_arenas::{Hold, KeyError, TakeError};
use returned::Returned;
use settings::Settings;
use std::sync::Arc;

/// How many receives are made ready on the stack for one call of the queue.
const BATCH: usize = 32;

/// Keeps a receive queue, of one queue pair or shared, stocked with buffers of a heap; hands received messages out as
/// [`Bytes`], where they lie; posts their buffers again when those are dropped. Made by [`Heap::recv_pool`].
///
/// After each poll: [`complete`](Self::complete) for what was received, then [`restock`](Self::restock).
///
/// - **Ids.** The `wr_id`s of its receives have bit 63 set, the pool's own number in bits 32 to 62, and the buffer's below; see
///   [`owns`](Self::owns). (Flights have ids below 2^48.) What else the program posts to the same completion queue needs ids
///   between these.
/// - **Separate from sending.** It takes no buffer beyond its [limit](RecvPoolBuilder::limit), so received messages that are
///   kept do not use up what sends are made of; and what it has posted, nobody else takes. Give it a heap of its own to have it
///   the other way round as well, or where the heap has a budget.
/// - **When it runs dry**, since the program keeps all `Bytes`: it takes more buffers from the heap, up to the limit. Beyond that
///   the queue runs empty, and the peer's sends wait, on a reliable connection: its adapter is told so (RNR), and tries again as
///   often as the queue pair's `rnr_retry` says (7: for ever). Datagrams are lost. [`Stock::missing`] says so each time, and
///   [`RecvStats::short`] and [`RecvStats::dry`] count it. A thread that sleeps until there is a completion would not learn
///   that a buffer has come back: [`waker`](RecvPoolBuilder::waker).
/// - **A queue pair that fails** completes all its receives with status 5. [`complete`](Self::complete) takes these buffers back;
///   nothing is posted to it any more, and [`restock`](Self::restock) says so, until [`resume`](Self::resume) (a shared queue goes on).
/// - **Ending it.** When every receive has completed, dropping the pool frees everything, but what is still lent, which goes when it
///   is dropped. What is posted then, the device may still write: it is kept for ever, and the device with it
///   ([`Device::hold_count`](crate::Device::hold_count)). [`close`](Self::close) gives the means to take it back once the queue is destroyed.
///
#[cfg_attr(feature = "verbs", doc = "```no_run")]
#[cfg_attr(not(feature = "verbs"), doc = "```ignore")]
/// use rdmalloc::registrar::verbs::{AsQueuePair, ProtectionDomain, Verbs};
/// use rdmalloc::{Heap, RecvQueue};
/// use std::sync::Arc;
///
/// # struct Completion { wr_id: u64, status: u32, byte_len: u32, was_write: bool }
/// # fn example(qp: impl AsQueuePair, poll: impl Fn() -> Option<Completion>) -> Result<(), Box<dyn std::error::Error>> {
/// let domain = Arc::new(ProtectionDomain::open(None)?);
/// let heap = Heap::builder().build()?;
/// let device = heap.attach(Verbs::new(domain.clone()))?;
/// let mut pool = heap.recv_pool(device).size(64 << 10).depth(128).build(RecvQueue::new(qp))?;
/// loop {
///     while let Some(wc) = poll() {
///         if pool.owns(wc.wr_id) {
///             let len = if wc.was_write { 0 } else { wc.byte_len }; // IBV_WC_RECV_RDMA_WITH_IMM
///             // SAFETY: as polled from the queue's completion queue, once.
///             let message = unsafe { pool.complete(wc.wr_id, wc.status, len) }?;
///             std::thread::spawn(move || println!("{} bytes", message.len()));
///         }
///     }
///     pool.restock()?;
/// }
/// # }
/// ```
pub struct RecvPool<Q: ReceiveQueue> {
    stock: Shelves,
    queue: Option<Q>,
}

/// All but the queue.
struct Shelves {
    heap: Heap,
    settings: Settings,
    /// The id of the first place.
    first_id: u64,
    places: Box<[Place]>,
    /// Places whose buffers can be posted. As long as `places`, so it never grows.
    ready: Vec<u32>,
    /// Places without a buffer; likewise.
    empty: Vec<u32>,
    posted: u32,
    returned: Arc<Returned<Buffer>>,
    /// Whether the queue's queue pair has failed, and nothing is posted.
    stopped: bool,
    /// At the last restocking.
    was_short: bool,
    was_dry: bool,
    stats: RecvStats,
    /// The device stays: as long as something is posted, and the keys are remembered.
    hold: Option<Hold>,
}

/// Where a buffer belongs. `posted + ready + empty + lent or returned == places`.
#[derive(Default)]
struct Place {
    /// Not here while it is lent.
    buffer: Option<Buffer>,
    lkey: u32,
    /// How many bytes were posted.
    len: u32,
    posted: bool,
}

impl<Q: ReceiveQueue> RecvPool<Q> {
    /// Whether a `wr_id` is of this pool's receives.
    #[must_use]
    pub fn owns(&self, id: u64) -> bool {
        self.ids().contains(&id)
    }

    /// The `wr_id`s of this pool's receives; no other pool of the process has these.
    #[must_use]
    pub fn ids(&self) -> Range<u64> {
        self.stock.first_id..self.stock.first_id + self.stock.places.len() as u64
    }

    /// Takes a completion: the message that was received. (Of a datagram, 40 bytes of the network's header come first:
    /// `Bytes::advance`.)
    ///
    /// A message that is no longer than [`copy_up_to`](RecvPoolBuilder::copy_up_to) is copied, and its buffer is ready again at
    /// once. Otherwise the `Bytes` are the buffer, until the last of them and their slices is dropped, by whichever thread.
    ///
    /// # Errors
    ///
    /// [`RecvError`]: the receive failed, and its buffer is ready again; or the id is not that of a posted receive.
    ///
    /// # Safety
    ///
    /// A completion with this `wr_id`, `status` and `byte_len` was taken from a completion queue in which the receives of this
    /// pool's queue complete, and is told here for the first time. Where its opcode is `IBV_WC_RECV_RDMA_WITH_IMM`, `byte_len` is
    /// given as 0: the receive was used up by a peer's RDMA write, which has put its bytes elsewhere.
    pub unsafe fn complete(&mut self, id: u64, status: u32, byte_len: u32) -> Result<Bytes, RecvError> {
        let Shelves { places, ready, posted, returned, settings, stats, stopped, first_id, .. } = &mut self.stock;
        let number = id.wrapping_sub(*first_id);
        let place = usize::try_from(number).ok().and_then(|at| places.get_mut(at)).filter(|place| place.posted);
        let Some((place, mut buffer)) = place.and_then(|place| place.buffer.take().map(|buffer| (place, buffer)))
        else {
            return Err(RecvError::NotPosted { id });
        };
        place.posted = false;
        *posted -= 1;
        let (number, len) = (number as u32, byte_len.min(place.len) as usize);
        if status != 0 {
            place.buffer = Some(buffer);
            ready.push(number);
            stats.failed += 1;
            *stopped |= !self.queue.as_ref().is_some_and(Q::is_shared);
            return Err(RecvError::Failed { status, size: settings.size });
        }
        stats.received += 1;
        stats.received_bytes += len as u64;
        // SAFETY: the caller's promise: the device has written the message into the buffer that was posted under this id, which
        // is as long as `place.len`, and is done with it.
        unsafe { buffer.set_len(len) };
        if len <= settings.copy_up_to {
            let copy = Bytes::copy_from_slice(&buffer);
            buffer.clear();
            place.buffer = Some(buffer);
            ready.push(number);
            stats.copied += 1;
            return Ok(copy);
        }
        // SAFETY: the buffer was taken from this place, which is empty until it comes back.
        Ok(Bytes::from_owner(unsafe { Lent::new(buffer, number, Arc::clone(returned)) }))
    }

    /// Posts what is ready, once as little is posted as [`low`](RecvPoolBuilder::low) says; first takes back what was dropped, and
    /// takes more from the heap if it must, up to the limit. Costs a load when there is nothing to do.
    ///
    /// May open an arena, if the heap has no room ([`Heap::maintain`](crate::Heap::maintain) keeps some).
    ///
    /// # Errors
    ///
    /// [`RestockError`]: the heap or the queue has refused something. What could be posted is posted. Of a queue pair that has
    /// failed, each time [`RestockError::QueueFailed`], until [`resume`](Self::resume); dropped buffers are taken back all the same.
    pub fn restock(&mut self) -> Result<Stock, RestockError> {
        let (stock, Some(queue)) = (&mut self.stock, &mut self.queue) else { return Ok(Stock::default()) };
        stock.take_back(false);
        let mut added = 0;
        let mut error = None;
        if !stock.stopped && stock.posted <= stock.settings.low {
            loop {
                let wanted = (stock.settings.depth - stock.posted) as usize;
                error = stock.provide(wanted).err();
                match stock.post(queue, wanted) {
                    Ok(posted) => added += posted,
                    Err(failed) => {
                        error = Some(RestockError::Post(failed));
                        break;
                    }
                }
                // Only who has nothing left, and not enough posted, waits for what comes back.
                if stock.posted > stock.settings.low || !stock.take_back(true) {
                    break;
                }
            }
            stock.give_surplus_back();
        }
        stock.count_shortage();
        if stock.stopped {
            return Err(RestockError::QueueFailed { posted: stock.posted });
        }
        match error {
            Some(error) => Err(error),
            None => Ok(Stock { posted: stock.posted, added, missing: stock.missing() }),
        }
    }

    /// Goes on after the queue pair has failed, and was brought back: with the next [`restock`](Self::restock).
    pub fn resume(&mut self) {
        self.stock.stopped = false;
    }

    /// How many receives are posted now.
    #[must_use]
    pub fn posted(&self) -> usize {
        self.stock.posted as usize
    }

    /// The queue.
    #[must_use]
    pub fn queue(&self) -> &Q {
        // Only `close` takes it, with the pool.
        match &self.queue {
            Some(queue) => queue,
            None => unreachable!(),
        }
    }

    /// Figures.
    #[must_use]
    pub fn stats(&self) -> RecvStats {
        let stock = &self.stock;
        let (posted, ready) = (stock.posted as usize, stock.ready.len());
        let lent = stock.places.len() - stock.empty.len() - ready - posted;
        RecvStats { posted, ready, lent, ..stock.stats }
    }

    /// Ends the pool: the queue, to be destroyed, and what is still posted to it.
    pub fn close(mut self) -> (Q, PostedBuffers) {
        let posted = self.stock.close();
        match self.queue.take() {
            Some(queue) => (queue, posted),
            None => unreachable!(),
        }
    }
}

impl Shelves {
    /// Takes what has come back. With `wants`: if there is nothing, the next to come wakes.
    fn take_back(&mut self, wants: bool) -> bool {
        let Shelves { places, ready, returned, .. } = self;
        let each = |place: u32, buffer| {
            places[place as usize].buffer = Some(buffer);
            ready.push(place);
        };
        // SAFETY: this is the pool, and `&mut self` makes it the only call.
        unsafe { returned.take(wants, each) }
    }

    /// Takes buffers from the heap until so many are ready, or there are no more to be had.
    fn provide(&mut self, wanted: usize) -> Result<(), RestockError> {
        while self.ready.len() < wanted
            && let Some(place) = self.empty.pop()
        {
            match self.fresh() {
                Ok((buffer, lkey)) => {
                    let len = self.settings.size;
                    self.places[place as usize] = Place { buffer: Some(buffer), lkey, len, posted: false };
                    self.ready.push(place);
                }
                Err(error) => {
                    self.empty.push(place);
                    self.stats.refused += 1;
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    fn fresh(&self) -> Result<(Buffer, u32), RestockError> {
        let buffer = self.heap.buffer(self.settings.size as usize).map_err(RestockError::Heap)?;
        let (first, last) = (buffer.as_ptr().addr(), buffer.as_ptr().addr() + (self.settings.size as usize - 1));
        let keys = self.settings.device.key_of_address(first).map_err(RestockError::Key)?;
        if !self.settings.device.is_one_registration(first, last) {
            return Err(RestockError::Straddles { size: self.settings.size });
        }
        Ok((buffer, keys.lkey))
    }

    /// Posts at most so many of those that are ready.
    fn post(&mut self, queue: &mut impl ReceiveQueue, wanted: usize) -> Result<usize, PostFailed> {
        let mut added = 0;
        while added < wanted && !self.ready.is_empty() {
            let count = BATCH.min(wanted - added).min(self.ready.len());
            let mut batch = [Receive { id: 0, addr: 0, len: 0, lkey: 0 }; BATCH];
            let mut numbers = [0; BATCH];
            let from = self.ready.len() - count;
            for ((receive, number), ready) in batch.iter_mut().zip(&mut numbers).zip(self.ready.drain(from..)) {
                let place = &mut self.places[ready as usize];
                let addr = place.buffer.as_mut().map_or(0, |buffer| buffer.as_mut_ptr().expose_provenance());
                *number = ready;
                *receive = Receive {
                    id: self.first_id + u64::from(ready),
                    addr: addr as u64,
                    len: place.len,
                    lkey: place.lkey,
                };
                // Before the queue is called: if it panics, nobody knows which it has taken.
                place.posted = true;
            }
            self.posted += count as u32;
            // SAFETY: the buffers are the pool's, at least `len` long, and stay, untouched, in their places until `complete`.
            let result = unsafe { queue.post(&batch[..count]) };
            let posted = match &result {
                Ok(()) => count,
                Err(failed) => failed.posted.min(count),
            };
            // In order: those that were not taken are ready still.
            for number in &numbers[posted..count] {
                self.places[*number as usize].posted = false;
                self.ready.push(*number);
            }
            self.posted -= (count - posted) as u32;
            added += posted;
            if let Err(failed) = result {
                return Err(PostFailed { posted: added, ..failed });
            }
        }
        Ok(added)
    }

    fn missing(&self) -> u32 {
        if self.stopped || self.posted > self.settings.low { 0 } else { self.settings.depth - self.posted }
    }

    /// Once for each time that it begins.
    fn count_shortage(&mut self) {
        let (short, dry) = (self.missing() > 0, self.missing() > 0 && self.posted == 0);
        self.stats.short += u64::from(short && !self.was_short);
        self.stats.dry += u64::from(dry && !self.was_dry);
        (self.was_short, self.was_dry) = (short, dry);
    }

    /// After a peak, what is ready beyond another whole stock goes back to the heap.
    fn give_surplus_back(&mut self) {
        while self.ready.len() > self.settings.depth as usize
            && let Some(place) = self.ready.pop()
        {
            self.places[place as usize] = Place::default();
            self.empty.push(place);
        }
    }

    /// Lets go of everything but what is posted.
    fn close(&mut self) -> PostedBuffers {
        // What comes back later is freed by who brings it.
        // SAFETY: this is the pool, and `&mut self` makes it the only call.
        unsafe { self.returned.close(|_, buffer| drop(buffer)) };
        let places = mem::take(&mut self.places);
        (self.posted, self.ready, self.empty) = (0, Vec::new(), Vec::new());
        let buffers = places.into_iter().filter(|place| place.posted).filter_map(|place| place.buffer).collect();
        PostedBuffers { buffers, hold: self.hold.take() }
    }
}

impl<Q: ReceiveQueue> Drop for RecvPool<Q> {
    fn drop(&mut self) {
        // What is posted is kept, as its own drop says.
        drop(self.stock.close());
    }
}

impl<Q: ReceiveQueue> fmt::Debug for RecvPool<Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecvPool").field("ids", &self.ids()).field("stats", &self.stats()).finish_non_exhaustive()
    }
}

/// Buffers of a pool that has ended, which were still posted: a device may write them.
///
/// Dropping it, if there are any, keeps them for ever, and the device attached, by a hold that is counted
/// ([`Device::hold_count`](crate::Device::hold_count)).
#[derive(Debug)]
#[must_use = "dropping this leaks what is posted; call `reclaim` when the queue is gone"]
pub struct PostedBuffers {
    /// A slice, to be short: errors have this.
    buffers: Box<[Buffer]>,
    hold: Option<Hold>,
}

impl PostedBuffers {
    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.buffers.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.buffers.is_empty()
    }

    /// Takes them back, to be freed.
    ///
    /// # Safety
    ///
    /// No receive of the pool's queue will be carried out from now on: the queue was destroyed, or reset, or all that was posted
    /// has completed since.
    pub unsafe fn reclaim(mut self) -> Vec<Buffer> {
        mem::take(&mut self.buffers).into_vec()
    }
}

impl Drop for PostedBuffers {
    fn drop(&mut self) {
        if !self.buffers.is_empty() {
            mem::forget((mem::take(&mut self.buffers), self.hold.take()));
        }
    }
}

impl From<TakeError> for RestockError {
    fn from(error: TakeError) -> RestockError {
        RestockError::Heap(error)
    }
}

impl From<KeyError> for RestockError {
    fn from(error: KeyError) -> RestockError {
        RestockError::Key(error)
    }
}
