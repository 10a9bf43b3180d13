//! How a pool is made. Uses the pool.

use super::{Place, PostedBuffers, ReceiveQueue, RecvPool, RecvStats, RestockError, Returned, Shelves};
use crate::pool::Heap;
use core::fmt;
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};
use rdmalloc_arenas::{Access, Device, HoldError};
use std::sync::Arc;

/// Up to here a copy costs less than lending does, which allocates for the `Bytes` and brings the buffer back: 46 ns against 70
/// (`what_lending_and_copying_cost` in the tests).
const COPY_UP_TO: usize = 1024;
/// So that an index never reaches the number of the pool.
const MOST_BUFFERS: u32 = 1 << 24;

/// What was chosen, and checked.
pub(super) struct Settings {
    pub(super) device: Device,
    pub(super) size: u32,
    pub(super) depth: u32,
    pub(super) low: u32,
    pub(super) copy_up_to: usize,
}

impl Heap {
    /// Begins a pool that takes buffers from this heap and keeps a receive queue of this device's protection domain stocked.
    pub fn recv_pool(&self, device: Device) -> RecvPoolBuilder {
        let (size, depth, copy_up_to) = (16 << 10, 64, COPY_UP_TO);
        RecvPoolBuilder { heap: self.clone(), device, size, depth, low: None, limit: None, copy_up_to, waker: None }
    }
}

/// Makes a [`RecvPool`]; begun by [`Heap::recv_pool`].
#[must_use]
pub struct RecvPoolBuilder {
    heap: Heap,
    device: Device,
    size: u32,
    depth: u32,
    low: Option<u32>,
    limit: Option<u32>,
    copy_up_to: usize,
    waker: Option<Box<dyn Fn() + Send + Sync>>,
}

impl RecvPoolBuilder {
    /// The bytes of a buffer: the longest message that can be received. 16 KiB unless said. For datagrams, 40 more than that.
    pub fn size(mut self, bytes: u32) -> RecvPoolBuilder {
        self.size = bytes;
        self
    }

    /// How many receives shall be posted; 64 unless said. The queue must take as many (`max_recv_wr`, `max_wr`).
    pub fn depth(mut self, receives: u32) -> RecvPoolBuilder {
        self.depth = receives;
        self
    }

    /// At how many posted receives more are posted, up to the depth; three quarters of the depth unless said. The lower, the
    /// longer the chains that are posted at once; but a burst of as many messages finds the queue empty. Below the depth.
    pub fn low(mut self, receives: u32) -> RecvPoolBuilder {
        self.low = Some(receives);
        self
    }

    /// How many buffers the pool takes from the heap at most, posted and lent ones together; four times the depth unless said.
    pub fn limit(mut self, buffers: u32) -> RecvPoolBuilder {
        self.limit = Some(buffers);
        self
    }

    /// Messages of at most so many bytes are copied out of their buffer, so that a short message that is kept does not keep a
    /// long buffer, and its buffer is ready at once. 1024 unless said: up to there, copying costs less than lending, which
    /// allocates for the `Bytes` too and brings the buffer back (46 ns against 70, as
    /// `cargo test -p rdmalloc --test recv_pool -- --nocapture what_lending` prints). 0: only empty ones.
    ///
    /// The copies are the global allocator's. A program that sends messages on as they came (`Device::fly`) has rdmalloc for that,
    /// with the device attached; or says 0.
    pub fn copy_up_to(mut self, bytes: usize) -> RecvPoolBuilder {
        self.copy_up_to = bytes;
        self
    }

    /// What is called when the pool had run short, and a buffer has come back: by the thread that has dropped it, wherever that
    /// is, so it should only wake the one that polls (an eventfd, `Thread::unpark`).
    pub fn waker(mut self, wake: impl Fn() + Send + Sync + 'static) -> RecvPoolBuilder {
        self.waker = Some(Box::new(wake));
        self
    }

    /// Makes the pool, and posts the first stock. A queue pair takes receives once it is in the state INIT.
    ///
    /// # Errors
    ///
    /// [`RecvPoolError`]; the queue is dropped. If some receives were posted before the error, as when the queue is shorter than the
    /// depth, [`RecvPoolError::Stock`] has their buffers.
    pub fn build<Q: ReceiveQueue>(self, queue: Q) -> Result<RecvPool<Q>, RecvPoolError> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let RecvPoolBuilder { heap, device, size, depth, low, limit, copy_up_to, waker } = self;
        let low = low.unwrap_or(depth - depth.div_ceil(4));
        let limit = limit.unwrap_or(depth.saturating_mul(4).min(MOST_BUFFERS));
        if size == 0 || depth == 0 || low >= depth || limit < depth || limit > MOST_BUFFERS {
            return Err(RecvPoolError::Settings { size, depth, low, limit });
        }
        let access = heap.access();
        if !access.contains(Access::LOCAL_WRITE) {
            return Err(RecvPoolError::Access { access });
        }
        // First the hold: a device that was detached has no identity any more.
        let hold = Some(device.hold().map_err(RecvPoolError::Hold)?);
        if queue.domain().is_some_and(|domain| device.identity() != Some(domain)) {
            return Err(RecvPoolError::OtherDomain { device });
        }
        let number = u64::from(NUMBER.fetch_add(1, Relaxed) & (u32::MAX >> 1));
        let stock = Shelves {
            heap,
            settings: Settings { device, size, depth, low, copy_up_to },
            first_id: 1 << 63 | number << 32,
            places: (0..limit).map(|_| Place::default()).collect(),
            ready: Vec::with_capacity(limit as usize),
            empty: (0..limit).rev().collect(),
            posted: 0,
            returned: Arc::new(Returned::new(limit as usize, waker)),
            stopped: false,
            was_short: false,
            was_dry: false,
            stats: RecvStats::default(),
            hold,
        };
        let mut pool = RecvPool { stock, queue: Some(queue) };
        match pool.restock() {
            Ok(_) => Ok(pool),
            Err(error) => Err(RecvPoolError::Stock { error, posted: pool.close().1 }),
        }
    }
}

impl fmt::Debug for RecvPoolBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { size, depth, low, limit, copy_up_to, .. } = self;
        f.debug_struct("RecvPoolBuilder")
            .field("size", size)
            .field("depth", depth)
            .field("low", low)
            .field("limit", limit)
            .field("copy_up_to", copy_up_to)
            .finish_non_exhaustive()
    }
}

/// Why a pool was not made.
#[derive(Debug)]
#[non_exhaustive]
pub enum RecvPoolError {
    /// The settings do not fit each other.
    Settings {
        /// Bytes of a buffer: at least 1.
        size: u32,
        /// Receives that shall be posted: at least 1.
        depth: u32,
        /// At how many more are posted: below the depth.
        low: u32,
        /// Buffers at most: at least the depth, at most 2^24.
        limit: u32,
    },
    /// The device may not write the heap's memory.
    Access {
        /// What the heap was made with.
        access: Access,
    },
    /// The queue is in another protection domain than the device.
    OtherDomain {
        /// The device.
        device: Device,
    },
    /// The device cannot be held: it is detached, being detached, or lost.
    Hold(HoldError),
    /// The first stock was not posted, or not all of it.
    Stock {
        /// Why.
        error: RestockError,
        /// What was: the device may still write it. Dropping this keeps the buffers for ever, and holds the device; see
        /// [`PostedBuffers::reclaim`].
        posted: PostedBuffers,
    },
}

impl fmt::Display for RecvPoolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Settings { size, depth, low, limit } => write!(
                f,
                "a pool of buffers of {size} bytes, {depth} posted, more at {low}, at most {limit}: a buffer has at least 1 byte, and it \
                 must hold that 0 <= low < depth <= limit <= {MOST_BUFFERS}"
            ),
            Self::Access { access } => {
                write!(f, "messages are received into memory with Access::LOCAL_WRITE; the heap was made with {access:?}")
            }
            Self::OtherDomain { .. } => f.write_str(
                "the queue is in another protection domain than the device; use the Device that attaching this domain gave",
            ),
            Self::Hold(error) => error.fmt(f),
            Self::Stock { error, posted } if posted.is_empty() => error.fmt(f),
            Self::Stock { error, posted } => write!(
                f,
                "{error} ({} receive(s) are posted: destroy the queue, then reclaim their buffers from this error)",
                posted.len()
            ),
        }
    }
}

impl std::error::Error for RecvPoolError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            // These are printed already.
            Self::Hold(error) => error.source(),
            Self::Stock { error, .. } => error.source(),
            _ => None,
        }
    }
}
