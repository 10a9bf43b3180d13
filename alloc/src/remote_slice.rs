//! [`RemoteSlice`]: memory of a peer, as it is told over the wire; and what tells it of a buffer. Uses `buffer`, `shared` and
//! `pool`.

#[cfg(feature = "serde")]
mod serial;
#[cfg(test)]
mod tests;

use crate::{Access, Buffer, Device, KeyError, SharedBuffer, pool};
use core::fmt;
use core::ops::{Bound, RangeBounds};

/// Memory of a peer: where it is, how long, and the key that opens it to RDMA. Plain data: nothing is borrowed or kept, and
/// whether the key still opens anything, only the peer knows.
///
/// Its wire form is 20 bytes: address, length, key, each little-endian ([`to_bytes`](Self::to_bytes)). The feature `serde` writes
/// these bytes in binary formats, and the three fields in formats that people read.
///
/// A key is an integer like any other, in the order of the machine's own bytes: `rkey` is a `uint32_t` in `infiniband/verbs.h`
/// (unlike `imm_data`, which is a `__be32`), and the driver brings it into the adapter's order. Put it into a work request as it
/// is, without `htonl`.
///
/// ```
/// use rdmalloc::RemoteSlice;
///
/// // The owner tells of a buffer, by `buffer.remote_mut(device)?`:
/// let told = RemoteSlice { addr: 0x7f00_0000_0000, len: 4096, rkey: 0x1234 }.to_bytes();
///
/// // The peer writes its second half:
/// let half = RemoteSlice::from_bytes(told).slice(2048..)?;
/// assert_eq!((half.addr, half.len, half.rkey), (0x7f00_0000_0800, 2048, 0x1234));
/// // wr.rdma.remote_addr = half.addr; wr.rdma.rkey = half.rkey;
///
/// let error = half.slice(..4096).expect_err("beyond its end");
/// assert_eq!(error.to_string(), "bytes 0 to 4096 are not within the peer's 2048 bytes");
/// # Ok::<(), rdmalloc::RemoteRangeError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct RemoteSlice {
    /// Where it begins, in the peer's address space: what a work request's `remote_addr` wants.
    pub addr: u64,
    /// How many bytes it has.
    pub len: u64,
    /// The key. In host order; see above.
    pub rkey: u32,
}

/// A part of a [`RemoteSlice`] was wanted that it does not have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RemoteRangeError {
    /// The first byte wanted.
    pub start: u64,
    /// The byte behind the last.
    pub end: u64,
    /// The slice that does not have them.
    pub of: RemoteSlice,
}

impl fmt::Display for RemoteRangeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RemoteRangeError { start, end, of } = self;
        if start <= end && *end <= of.len {
            // As only a peer can have told that lies, or has an error.
            write!(f, "bytes {start} to {end} of the peer's {of:?} lie beyond any address")
        } else {
            write!(f, "bytes {start} to {end} are not within the peer's {} bytes", of.len)
        }
    }
}

impl std::error::Error for RemoteRangeError {}

/// Bytes that are no [`RemoteSlice`], since there are not 20 of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NotARemoteSlice {
    /// How many there are.
    pub len: usize,
}

impl fmt::Display for NotARemoteSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes are no remote slice, which has {}", self.len, RemoteSlice::BYTES)
    }
}

impl std::error::Error for NotARemoteSlice {}

impl RemoteSlice {
    /// How many bytes its wire form has: 20.
    pub const BYTES: usize = 20;

    /// The wire form: address (8 bytes), length (8), key (4), each little-endian.
    #[must_use]
    pub const fn to_bytes(self) -> [u8; RemoteSlice::BYTES] {
        let (addr, len, rkey) = (self.addr.to_le_bytes(), self.len.to_le_bytes(), self.rkey.to_le_bytes());
        let mut bytes = [0; RemoteSlice::BYTES];
        bytes.split_at_mut(8).0.copy_from_slice(&addr);
        bytes.split_at_mut(16).0.split_at_mut(8).1.copy_from_slice(&len);
        bytes.split_at_mut(16).1.copy_from_slice(&rkey);
        bytes
    }

    /// From the wire form. Any 20 bytes are one: whether the peer's memory is there, its adapter will say.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; RemoteSlice::BYTES]) -> RemoteSlice {
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t] = bytes;
        RemoteSlice {
            addr: u64::from_le_bytes([a, b, c, d, e, f, g, h]),
            len: u64::from_le_bytes([i, j, k, l, m, n, o, p]),
            rkey: u32::from_le_bytes([q, r, s, t]),
        }
    }

    /// Whether it has no bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A part of it.
    ///
    /// # Errors
    ///
    /// [`RemoteRangeError`], if the range is not within it, or (as a peer may tell anything) beyond any address.
    pub fn slice(self, range: impl RangeBounds<u64>) -> Result<RemoteSlice, RemoteRangeError> {
        // A bound behind the last number there is lies outside of whatever the slice is.
        let behind = |at: u64| at.checked_add(1).ok_or(RemoteRangeError { start: at, end: at, of: self });
        let start = match range.start_bound() {
            Bound::Included(start) => *start,
            Bound::Excluded(before) => behind(*before)?,
            Bound::Unbounded => 0,
        };
        let end = match range.end_bound() {
            Bound::Included(last) => behind(*last)?,
            Bound::Excluded(end) => *end,
            Bound::Unbounded => self.len,
        };
        let within = start <= end && end <= self.len && self.addr.checked_add(end).is_some();
        if !within {
            return Err(RemoteRangeError { start, end, of: self });
        }
        Ok(RemoteSlice { addr: self.addr + start, len: end - start, rkey: self.rkey })
    }

    /// Its first `at` bytes, and the rest.
    ///
    /// ```
    /// let [head, body] = rdmalloc::RemoteSlice { addr: 1 << 20, len: 100, rkey: 7 }.split_at(20)?;
    /// assert_eq!((head.len, body.addr, body.len, body.rkey), (20, (1 << 20) + 20, 80, 7));
    /// # Ok::<(), rdmalloc::RemoteRangeError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`slice`](Self::slice), if it has fewer.
    pub fn split_at(self, at: u64) -> Result<[RemoteSlice; 2], RemoteRangeError> {
        Ok([self.slice(..at)?, self.slice(at..)?])
    }
}

impl fmt::Debug for RemoteSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RemoteSlice {{ addr: {:#x}, len: {}, rkey: {:#x} }}", self.addr, self.len, self.rkey)
    }
}

impl From<[u8; RemoteSlice::BYTES]> for RemoteSlice {
    fn from(bytes: [u8; RemoteSlice::BYTES]) -> RemoteSlice {
        RemoteSlice::from_bytes(bytes)
    }
}

impl From<RemoteSlice> for [u8; RemoteSlice::BYTES] {
    fn from(slice: RemoteSlice) -> [u8; RemoteSlice::BYTES] {
        slice.to_bytes()
    }
}

impl TryFrom<&[u8]> for RemoteSlice {
    type Error = NotARemoteSlice;
    fn try_from(bytes: &[u8]) -> Result<RemoteSlice, NotARemoteSlice> {
        let array = bytes.try_into().map_err(|_| NotARemoteSlice { len: bytes.len() })?;
        Ok(RemoteSlice::from_bytes(array))
    }
}

/// Why peers cannot be told of a buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum RemoteError {
    /// The buffer's heap was made without this access for peers, so its key would open nothing.
    NoAccess {
        /// What is wanted.
        wanted: Access,
        /// What the heap was made with.
        heap: Access,
    },
    /// The buffer lies in more than one registration of the device, and no key opens all of it: it is longer than the device
    /// registers as one. Take shorter ones.
    Straddles {
        /// Its bytes.
        len: usize,
    },
    /// The device has no key for it.
    Key(KeyError),
}

impl fmt::Display for RemoteError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoAccess { wanted, heap } if heap.contains(Access::WINDOWS) => write!(
                f,
                "the key of the buffer's heap gives peers no {wanted:?}; give the buffer a window of its own by Windows::expose, or make \
                 the heap with .access(Access::{wanted:?})"
            ),
            Self::NoAccess { wanted, .. } => write!(
                f,
                "the key of the buffer's heap gives peers no {wanted:?}; make the heap with .access(Access::{wanted:?}), or with \
                 Access::WINDOWS and Windows::expose"
            ),
            Self::Straddles { len } => {
                write!(f, "the {len} bytes lie in more than one registration of the device; take shorter buffers")
            }
            Self::Key(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for RemoteError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            // It is printed already.
            Self::Key(error) => error.source(),
            _ => None,
        }
    }
}

impl From<KeyError> for RemoteError {
    fn from(error: KeyError) -> RemoteError {
        RemoteError::Key(error)
    }
}

/// Of memory of a heap that a program made.
fn remote(device: Device, start: *const u8, len: usize, wanted: Access) -> Result<RemoteSlice, RemoteError> {
    let first = start.addr();
    let core = pool::core_of(first).ok_or(KeyError::Foreign)?;
    let heap = core.arenas.config().access;
    if !heap.contains(wanted) {
        return Err(RemoteError::NoAccess { wanted, heap });
    }
    let keys = device.key_of_address(first)?;
    if !device.is_one_registration(first, first + len.saturating_sub(1)) {
        return Err(RemoteError::Straddles { len });
    }
    Ok(RemoteSlice { addr: first as u64, len: len as u64, rkey: keys.rkey })
}

impl Buffer {
    /// What to tell a peer that shall read its bytes, by RDMA READ on `device`.
    ///
    /// The key is that of the whole arena: a peer that has it can read whatever else lies there, now and later. To give one
    /// buffer only, and only for a while, use a memory window.
    ///
    /// ```
    /// # use rdmalloc::{Access, Heap, Registrar, RemoteError};
    /// # fn f(registrar: impl Registrar) -> Result<(), Box<dyn std::error::Error>> {
    /// let heap = Heap::builder().access(Access::REMOTE_READ).build()?;
    /// let device = heap.attach(registrar)?;
    /// let buffer = heap.buffer_from_slice(b"for all to read")?;
    /// let told: [u8; 20] = buffer.remote(device)?.to_bytes();
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// [`RemoteError`]: the heap was made without [`Access::REMOTE_READ`], or the device has no key for all of the buffer.
    pub fn remote(&self, device: Device) -> Result<RemoteSlice, RemoteError> {
        remote(device, self.as_ptr(), self.len(), Access::REMOTE_READ)
    }

    /// What to tell a peer that shall write it, by RDMA WRITE on `device`: all of its capacity.
    ///
    /// From then on the peer may write at any time: look at the bytes only when you have agreed that it does not, and say by
    /// [`set_len`](Self::set_len) how many there are. The key is that of the whole arena, as for [`remote`](Self::remote).
    ///
    /// # Errors
    ///
    /// [`RemoteError`]: the heap was made without [`Access::REMOTE_WRITE`], or the device has no key for all of the buffer.
    pub fn remote_mut(&mut self, device: Device) -> Result<RemoteSlice, RemoteError> {
        remote(device, self.as_ptr(), self.capacity(), Access::REMOTE_WRITE)
    }
}

impl SharedBuffer {
    /// What to tell a peer that shall read its bytes: as [`Buffer::remote`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn remote(&self, device: Device) -> Result<RemoteSlice, RemoteError> {
        remote(device, self.as_ptr(), self.len(), Access::REMOTE_READ)
    }
}
