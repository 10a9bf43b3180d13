//! What a pool says of itself: figures, and what went wrong.

use super::PostFailed;
use core::fmt;
use rdmalloc_arenas::{KeyError, TakeError};

/// Figures of a pool. What is counted is counted from its beginning.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct RecvStats {
    /// Receives that are posted now.
    pub posted: usize,
    /// Buffers that are ready to be posted.
    pub ready: usize,
    /// Buffers that the program has, as `Bytes`; or had, and they were not taken back yet.
    pub lent: usize,
    /// Messages received.
    pub received: u64,
    /// Their bytes.
    pub received_bytes: u64,
    /// Of these messages, how many were copied.
    pub copied: u64,
    /// Receives that failed, most of them flushed when a queue pair failed.
    pub failed: u64,
    /// How often the pool ran short: no more than [`low`](super::RecvPoolBuilder::low) were posted, and no buffer was to be had.
    pub short: u64,
    /// How often nothing at all was posted then: reliable peers wait, datagrams are lost.
    pub dry: u64,
    /// How often the heap, below the limit, refused a buffer.
    pub refused: u64,
}

/// What a restocking has come to.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct Stock {
    /// Receives that are posted now.
    pub posted: u32,
    /// How many of them this call has posted.
    pub added: usize,
    /// How many the depth lacks, and there was no buffer for: the program keeps too many `Bytes`, or the limit is too low. 0 also
    /// while more than the low mark are posted.
    pub missing: u32,
}

/// Not everything that was wanted could be posted.
#[derive(Debug)]
#[non_exhaustive]
pub enum RestockError {
    /// The heap has no more buffers, though the pool's limit is not reached.
    Heap(TakeError),
    /// The device has not registered a buffer.
    Key(KeyError),
    /// A buffer is longer than what the device registers as one.
    Straddles {
        /// Its bytes.
        size: u32,
    },
    /// The queue did not take them all.
    Post(PostFailed),
    /// A receive has failed, so the queue pair has: nothing is posted until it is brought back, and
    /// [`resume`](super::RecvPool::resume) is called.
    QueueFailed {
        /// Receives that are still posted, and will complete with an error.
        posted: u32,
    },
}

impl fmt::Display for RestockError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Heap(error) => write!(f, "the heap gives no more buffers to receive into: {error}"),
            Self::Key(error) => write!(f, "a buffer to receive into has no key: {error}"),
            Self::Straddles { size } => {
                write!(
                    f,
                    "a buffer of {size} bytes is longer than what the device registers at once; take shorter ones"
                )
            }
            Self::Post(error) => error.fmt(f),
            Self::QueueFailed { posted } => write!(
                f,
                "the queue pair has failed, with {posted} receive(s) still posted; nothing is posted until it is brought back and \
                 resume() is called"
            ),
        }
    }
}

impl std::error::Error for RestockError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            // These are printed already.
            Self::Heap(error) => error.source(),
            Self::Key(error) => error.source(),
            Self::Post(error) => error.source(),
            Self::Straddles { .. } | Self::QueueFailed { .. } => None,
        }
    }
}

/// There is no message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum RecvError {
    /// The receive has failed, with this status (`ibv_wc_status`): 5 when the queue pair had failed; 1, on soft-RoCE 2, when the
    /// message was longer than the buffer. Its buffer is ready again.
    Failed {
        /// The status.
        status: u32,
        /// How long a message may be: the bytes of the pool's buffers ([`size`](super::RecvPoolBuilder::size)).
        size: u32,
    },
    /// No receive is posted under this id: it is not this pool's, or has completed before.
    NotPosted {
        /// The id.
        id: u64,
    },
}

impl fmt::Display for RecvError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed { status, size } => {
                write!(f, "a receive has failed with status {status} ({})", status_name(*status))?;
                match status {
                    1 => write!(
                        f,
                        ": the message was longer than the pool's buffers, {size} bytes; make it with a larger `size`"
                    ),
                    // Soft-RoCE's word for it, and for little else (`verbs_a_message_that_is_too_long_...` in the tests).
                    2 => write!(
                        f,
                        ": on soft-RoCE, the message was longer than the pool's buffers, {size} bytes; make it with a larger `size`"
                    ),
                    5 => f.write_str(": flushed, since the queue pair had failed, or was told to"),
                    _ => Ok(()),
                }
            }
            Self::NotPosted { id } => {
                write!(
                    f,
                    "no receive of this pool is posted under the id {id:#x}: it is not its, or has completed before"
                )
            }
        }
    }
}

impl std::error::Error for RecvError {}

/// The name of an `ibv_wc_status` (ibv_poll_cq(3)), as far as a receive may have it.
fn status_name(status: u32) -> &'static str {
    match status {
        1 => "IBV_WC_LOC_LEN_ERR",
        2 => "IBV_WC_LOC_QP_OP_ERR",
        4 => "IBV_WC_LOC_PROT_ERR",
        5 => "IBV_WC_WR_FLUSH_ERR",
        7 => "IBV_WC_BAD_RESP_ERR",
        8 => "IBV_WC_LOC_ACCESS_ERR",
        9 => "IBV_WC_REM_INV_REQ_ERR",
        10 => "IBV_WC_REM_ACCESS_ERR",
        11 => "IBV_WC_REM_OP_ERR",
        16 => "IBV_WC_REM_ABORT_ERR",
        19 => "IBV_WC_FATAL_ERR",
        20 => "IBV_WC_RESP_TIMEOUT_ERR",
        21 => "IBV_WC_GENERAL_ERR",
        _ => "an ibv_wc_status",
    }
}
