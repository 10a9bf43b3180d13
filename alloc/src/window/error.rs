//! What can go wrong with windows. Uses the errors of the crate below.

use super::Exposed;
use crate::buffer::Buffer;
use core::fmt;
use rdmalloc_arenas::{Access, Device, HoldError, KeyError};
use std::error::Error;
use std::io;

/// Why a queue pair has no windows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum WindowsError {
    /// The device has no memory windows, or does not say so.
    None,
    /// The device has been detached.
    Detached,
    /// The device is another than that of the queue pair's protection domain.
    OtherDomain {
        /// The device that was given.
        device: Device,
    },
}

impl fmt::Display for WindowsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str(
                "the device has no memory windows (device_cap_flags in `ibv_devinfo -v`); use a heap with remote access, whose \
                 rkey opens all of it, or copy",
            ),
            Self::Detached => f.write_str("the device has been detached; use the Device that attaching it anew gives"),
            Self::OtherDomain { .. } => f.write_str(
                "the queue pair is in another protection domain than the device; use the Device that attaching this domain gave",
            ),
        }
    }
}

impl Error for WindowsError {}

/// A buffer was not exposed; nothing was posted.
pub struct NotExposed {
    /// The buffer, as it was.
    pub buffer: Buffer,
    /// Why.
    pub why: ExposeError,
}

/// Without the bytes, which may be many, and secret.
impl fmt::Debug for NotExposed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NotExposed").field("len", &self.buffer.len()).field("why", &self.why).finish()
    }
}

impl fmt::Display for NotExposed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.why.fmt(f)
    }
}

impl Error for NotExposed {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        // What it is for is printed already.
        self.why.source()
    }
}

/// Why a buffer cannot be exposed.
#[derive(Debug)]
#[non_exhaustive]
pub enum ExposeError {
    /// A window gives remote reading, writing and atomics, at least one of them and nothing else.
    Rights {
        /// What was asked for.
        rights: Access,
    },
    /// The buffer has no bytes: it is exposed as far as it is filled.
    Empty,
    /// The buffer's heap was made without [`Access::WINDOWS`].
    Heap {
        /// What it was made with.
        access: Access,
    },
    /// The device cannot be held: it is detached, being detached, or lost.
    Hold(HoldError),
    /// The device has not registered the buffer.
    Key(KeyError),
    /// The bytes lie in more than one registration of the device.
    Straddles {
        /// How many they are.
        len: usize,
    },
    /// The device gives no window: it has no more (`max_mw`), or not of this kind.
    NoWindow(io::Error),
    /// This process is a child of fork, and the queue pair is its parent's.
    ForkedChild,
    /// The bind could not be posted: `ENOMEM` when the send queue is full, `EINVAL` for a queue pair that is not connected.
    Post(io::Error),
}

impl fmt::Display for ExposeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rights { rights } => write!(
                f,
                "a window gives REMOTE_READ, REMOTE_WRITE and REMOTE_ATOMIC, at least one of them and nothing else; {rights:?} was \
                 asked for"
            ),
            Self::Empty => f.write_str("the buffer is empty: fill it before, with zeros if a peer is to write"),
            Self::Heap { access } => {
                write!(f, "the buffer's heap was made with {access:?}; windows need Access::WINDOWS")
            }
            Self::Hold(error) => error.fmt(f),
            Self::Key(error) => error.fmt(f),
            Self::Straddles { len } => {
                write!(f, "the {len} bytes lie in more than one registration of the device; use several buffers")
            }
            Self::NoWindow(error) => {
                write!(f, "the device gives no window: {error}; end some, and see max_mw in `ibv_devinfo -v`")
            }
            Self::ForkedChild => f.write_str("this process is a child of fork, and the queue pair is its parent's"),
            Self::Post(error) => write!(
                f,
                "the bind was not posted: {error}; complete something if the send queue is full, and connect the queue pair first"
            ),
        }
    }
}

impl Error for ExposeError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            // These are printed already.
            Self::Hold(error) => error.source(),
            Self::Key(error) => error.source(),
            Self::NoWindow(error) | Self::Post(error) => Some(error),
            _ => None,
        }
    }
}

/// A bind has completed, and failed. The queue pair has failed with it.
pub struct BindFailed {
    /// The status of the completion: 6 (`MW_BIND_ERR`), or 5 when the queue pair had failed before.
    pub status: u32,
    /// The buffer; `Err` if even then the window could not be let go.
    pub buffer: Result<Buffer, Kept>,
}

/// Without the bytes, as [`NotExposed`].
impl fmt::Debug for BindFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let len = self.buffer.as_ref().map(|buffer| buffer.len());
        f.debug_struct("BindFailed").field("status", &self.status).field("len", &len).finish()
    }
}

impl fmt::Display for BindFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the window was not bound (status {}), and the queue pair has failed; connect a new one",
            self.status
        )?;
        if let Err(kept) = &self.buffer { write!(f, "; {kept}") } else { Ok(()) }
    }
}

impl Error for BindFailed {}

/// The invalidation could not be posted; the buffer is exposed as before. It can be tried again, or ended by a system call
/// ([`Exposed::end`]).
#[derive(Debug)]
pub struct NotRevoked {
    /// The exposed buffer.
    pub exposed: Exposed,
    /// What the system said: `ENOMEM` when the send queue is full.
    pub source: io::Error,
}

impl fmt::Display for NotRevoked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the revocation was not posted: {}; complete something, or end the window by a system call",
            self.source
        )
    }
}

impl Error for NotRevoked {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&self.source)
    }
}

/// A window could not be let go, so a peer may still reach the buffer: it is kept for ever, and counted
/// ([`WindowStats::leaked`](super::WindowStats::leaked)).
#[derive(Debug)]
pub struct Kept {
    /// The bytes that are kept.
    pub len: usize,
    /// What the system said. In a child of fork, which has no windows, [`Unsupported`](io::ErrorKind::Unsupported).
    pub source: io::Error,
}

impl fmt::Display for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the window could not be let go ({}), and its {} bytes are kept", self.source, self.len)
    }
}

impl Error for Kept {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&self.source)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Heap;

    #[test]
    fn no_bytes_of_a_buffer_get_into_a_log_by_an_error() {
        let heap = Heap::builder().build().unwrap();
        let buffer = || heap.buffer_from_slice(&[77; 100]).unwrap();
        let not_exposed = NotExposed { buffer: buffer(), why: ExposeError::Empty };
        assert_eq!(format!("{not_exposed:?}"), "NotExposed { len: 100, why: Empty }");
        let failed = BindFailed { status: 6, buffer: Ok(buffer()) };
        assert_eq!(format!("{failed:?}"), "BindFailed { status: 6, len: Ok(100) }");
    }

    #[test]
    fn why_a_buffer_is_not_exposed_is_printed_once() {
        let heap = Heap::builder().build().unwrap();
        let not_exposed = |why| NotExposed { buffer: heap.buffer(1).unwrap(), why };
        assert!(not_exposed(ExposeError::Key(KeyError::Foreign)).source().is_none());
        let beneath = not_exposed(ExposeError::Post(io::Error::from_raw_os_error(libc::ENOMEM)));
        assert!(beneath.source().is_some_and(|source| source.is::<io::Error>()));
    }
}
