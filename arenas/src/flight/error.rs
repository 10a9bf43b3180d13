//! Why something does not fly, or does not come back. Uses the errors of keys and holds.

use crate::error::KeyError;
use crate::hold::HoldError;
use core::fmt;

/// Why a value does not fly; and the value.
pub struct FlyError<B> {
    /// What was to fly.
    pub value: B,
    /// Why it does not.
    pub reason: Grounded,
}

/// Why a value does not fly.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Grounded {
    /// The device is detached, or about to be, or lost.
    Hold(HoldError),
    /// The device does not reach a piece of the value. Copy it to memory of a heap to which the device is attached.
    Key {
        /// Which piece, counted from 0.
        piece: usize,
        /// How many pieces the value has.
        pieces: usize,
        /// Why it does not.
        error: KeyError,
    },
    /// As many flights are under way, or were leaked, as there is room for: 2^24 - 1, or less where address space is limited.
    TooMany,
}

/// Why an id gives no flight. Nothing has changed then, but where it says that a completion was counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum IdError {
    /// No flight under way has the id: it was completed already, or is no flight's.
    Unknown {
        /// The id.
        id: u64,
    },
    /// The flight is one of another type.
    OtherType {
        /// What flies.
        flies: &'static str,
        /// What was asked for.
        asked: &'static str,
    },
    /// It is an id for several completions, of which more than one is to come: [`Flight::from_id`](super::Flight::from_id) is for one.
    /// None was counted; call [`Flight::landed`](super::Flight::landed) for each.
    Several {
        /// How many are to come.
        left: u16,
    },
    /// It is an id for several completions. This one was counted, and others are to come ([`drop_flight`](super::drop_flight)).
    MoreToCome {
        /// How many.
        left: u16,
    },
}

/// A completion tells of more bytes than there was room for: it belongs to another work request. The value is as it was.
pub struct Overrun<B> {
    /// What has flown.
    pub value: B,
    /// How many bytes the completion tells of.
    pub byte_len: u32,
    /// How many there was room for.
    pub room: usize,
}

impl<B> fmt::Debug for FlyError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FlyError").field("reason", &self.reason).finish_non_exhaustive()
    }
}

impl<B> fmt::Display for FlyError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.reason.fmt(f)
    }
}

impl<B> std::error::Error for FlyError<B> {}

impl std::error::Error for Grounded {}

impl fmt::Display for Grounded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hold(error) => error.fmt(f),
            Self::Key { pieces: 1, error, .. } => write!(f, "the value is not within the device's reach: {error}"),
            Self::Key { piece, pieces, error } => {
                write!(f, "piece {piece} of {pieces} (from 0) is not within the device's reach: {error}")
            }
            Self::TooMany => f.write_str("too many flights are under way, or were leaked; complete or reclaim some"),
        }
    }
}

impl fmt::Display for IdError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown { id } => {
                write!(f, "no flight under way has the id {id:#x}: it was completed already, or is no flight's")
            }
            Self::OtherType { flies, asked } => write!(f, "the flight is one of {flies}, not of {asked}"),
            Self::Several { left } => {
                write!(
                    f,
                    "{left} completions of the flight are to come, and none was counted: call Flight::landed for each"
                )
            }
            Self::MoreToCome { left } => write!(f, "this completion was counted; {left} of the flight are to come"),
        }
    }
}

impl std::error::Error for IdError {}

impl<B> fmt::Debug for Overrun<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { byte_len, room, .. } = self;
        f.debug_struct("Overrun").field("byte_len", byte_len).field("room", room).finish_non_exhaustive()
    }
}

impl<B> fmt::Display for Overrun<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { byte_len, room, .. } = self;
        write!(
            f,
            "the completion tells of {byte_len} bytes, but there was room for {room}: it is another work request's"
        )
    }
}

impl<B> std::error::Error for Overrun<B> {}
