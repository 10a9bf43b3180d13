//! [`SharedBuffer`]: a buffer that is only read, by any number of owners. Uses `buffer`.

#[cfg(test)]
mod tests;

use crate::Buffer;
use crate::bytes_like::bytes_like;
use bytes::{Buf, Bytes};
use core::ops::{Deref, RangeBounds};
use core::ptr::NonNull;
use std::sync::Arc;

/// A part of a buffer that nobody writes any more: cheap to clone and to cut, as [`Bytes`] are.
///
/// [`Buffer::freeze`] makes it. The memory goes back to its heap when the last part is dropped. [`Bytes`] of it, which are made
/// without copying, are owners as well; so whoever keeps a part gets the buffer back
/// ([`try_into_buffer`](Self::try_into_buffer)) once all the `Bytes` are gone.
///
/// It is a source only: a device receives into what one owner has alone. In a heap that peers can write, they still can: do not
/// tell them of memory that was frozen, or tell them by a window that is revoked before.
///
/// How many owners there are is counted in the program's own memory (the global allocator's), never in the heap's, which a peer
/// may be able to write.
///
/// ```
/// use bytes::Bytes;
///
/// let heap = rdmalloc::Heap::builder().build()?;
/// let whole = heap.buffer_from_slice(b"headbody")?.freeze();
/// let body = whole.slice(4..);
/// let reply = Bytes::from(body.clone());
/// assert_eq!((&whole[..4], &body[..], reply.as_ptr()), (&b"head"[..], &b"body"[..], body.as_ptr()));
///
/// let whole = whole.try_into_buffer().expect_err("others have parts of it");
/// drop((body, reply));
/// let buffer = whole.try_into_buffer().expect("the only owner");
/// assert_eq!(buffer, "headbody");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct SharedBuffer {
    /// Never written, nor lent to be written, as long as there is more than one owner. Never lies in the heap.
    owner: Arc<Buffer>,
    /// `start` and `len` are a part of the bytes of `owner`.
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: it is a shared, immutable part of a Buffer, which is Send and Sync, and an owner of it.
unsafe impl Send for SharedBuffer {}
// SAFETY: as above.
unsafe impl Sync for SharedBuffer {}

impl Buffer {
    /// Makes it immutable, and its bytes shareable. What there is of capacity behind them is kept, and comes back with
    /// [`SharedBuffer::try_into_buffer`].
    ///
    /// Allocates a few words from the global allocator, to count the owners.
    ///
    /// ```
    /// let heap = rdmalloc::Heap::builder().build()?;
    /// let shared = heap.buffer_from_slice(b"to three replicas")?.freeze();
    /// let [a, b, c] = [shared.clone(), shared.clone(), shared];
    /// assert!(a.as_ptr() == b.as_ptr() && b == c);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn freeze(self) -> SharedBuffer {
        SharedBuffer { start: NonNull::from(&self[..]).cast(), len: self.len(), owner: Arc::new(self) }
    }
}

impl SharedBuffer {
    /// The part of it in a range, without copying.
    ///
    /// # Panics
    ///
    /// If the range is not within it, as slices do.
    #[must_use]
    pub fn slice(&self, range: impl RangeBounds<usize>) -> SharedBuffer {
        self.part(&self[(range.start_bound().cloned(), range.end_bound().cloned())])
    }

    /// The part of it that `part` is, which was borrowed from it, without copying: what a parser has found, say.
    ///
    /// ```
    /// let heap = rdmalloc::Heap::builder().build()?;
    /// let line = heap.buffer_from_slice(b"key=value")?.freeze();
    /// let value = line.split(|byte| *byte == b'=').nth(1).unwrap();
    /// assert_eq!(line.slice_ref(value), "value");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Panics
    ///
    /// If it is not.
    #[must_use]
    pub fn slice_ref(&self, part: &[u8]) -> SharedBuffer {
        let at = part.as_ptr().addr().wrapping_sub(self.start.addr().get());
        let within = at <= self.len && part.len() <= self.len - at;
        assert!(within, "the slice of {} bytes is no part of the buffer's {}", part.len(), self.len);
        self.slice(at..at + part.len())
    }

    fn part(&self, part: &[u8]) -> SharedBuffer {
        SharedBuffer { owner: self.owner.clone(), start: NonNull::from(part).cast(), len: part.len() }
    }

    /// Keeps the first `at` bytes, and returns the rest.
    ///
    /// # Panics
    ///
    /// If it has fewer.
    #[must_use = "use truncate to forget the rest"]
    pub fn split_off(&mut self, at: usize) -> SharedBuffer {
        let rest = self.slice(at..);
        self.len = at;
        rest
    }

    /// Returns the first `at` bytes, and keeps the rest.
    ///
    /// # Panics
    ///
    /// If it has fewer.
    #[must_use = "use advance to forget the first"]
    pub fn split_to(&mut self, at: usize) -> SharedBuffer {
        let first = self.slice(..at);
        self.advance(at);
        first
    }

    /// Forgets the bytes from `len` on, if there are more.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Whether nobody else has a part of the same buffer.
    #[must_use]
    pub fn is_unique(&self) -> bool {
        Arc::strong_count(&self.owner) == 1
    }

    /// The buffer back, to write it again, if nobody else has a part of it.
    ///
    /// It is whole, whatever part this is: with the bytes that it was frozen with.
    ///
    /// # Errors
    ///
    /// This, when others have parts. Two owners that try at once, as the last ones, may both be refused; where each wants to be
    /// rid of its part, [`into_last`](Self::into_last) never misses.
    pub fn try_into_buffer(self) -> Result<Buffer, SharedBuffer> {
        let SharedBuffer { owner, start, len } = self;
        Arc::try_unwrap(owner).map_err(|owner| SharedBuffer { owner, start, len })
    }

    /// Drops this part; if it was the last, the buffer comes back in place of going to its heap. Exactly one of several owners
    /// that do this gets it, whenever they do.
    ///
    /// ```
    /// let heap = rdmalloc::Heap::builder().build()?;
    /// let shared = heap.buffer_from_slice(b"to three replicas")?.freeze();
    /// let acknowledged = [shared.clone(), shared.clone(), shared.clone()];
    /// assert!(shared.into_last().is_none());
    /// let back: Vec<_> = acknowledged.into_iter().filter_map(|part| part.into_last()).collect();
    /// assert_eq!(back, ["to three replicas"]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use = "drop it to give the memory back"]
    pub fn into_last(self) -> Option<Buffer> {
        Arc::into_inner(self.owner)
    }
}

impl Deref for SharedBuffer {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: a part of the owner's bytes, which are initialised, do not move, are not written, and live as long as it.
        unsafe { core::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

bytes_like!(SharedBuffer);
crate::bytes_like::like!(SharedBuffer: Buffer);

/// Reads from the front, which is forgotten.
impl Buf for SharedBuffer {
    #[inline]
    fn remaining(&self) -> usize {
        self.len
    }

    #[inline]
    fn chunk(&self) -> &[u8] {
        self
    }

    #[inline]
    fn advance(&mut self, count: usize) {
        assert!(count <= self.len, "advanced by {count} of {} bytes", self.len);
        // SAFETY: within the bytes, or right behind them.
        self.start = unsafe { self.start.add(count) };
        self.len -= count;
    }

    /// Without copying.
    fn copy_to_bytes(&mut self, len: usize) -> Bytes {
        self.split_to(len).into()
    }
}

impl From<Buffer> for SharedBuffer {
    fn from(buffer: Buffer) -> SharedBuffer {
        buffer.freeze()
    }
}

/// Without copying; the memory goes back to its heap with the last of the `Bytes`.
impl From<SharedBuffer> for Bytes {
    fn from(shared: SharedBuffer) -> Bytes {
        Bytes::from_owner(shared)
    }
}

/// Without copying; the memory goes back to its heap with the last of the `Bytes`. To get the buffer back then, keep a
/// [`SharedBuffer`] of it and make the `Bytes` from its clone.
impl From<Buffer> for Bytes {
    fn from(buffer: Buffer) -> Bytes {
        Bytes::from_owner(buffer)
    }
}

/// As [`try_into_buffer`](SharedBuffer::try_into_buffer).
impl TryFrom<SharedBuffer> for Buffer {
    type Error = SharedBuffer;
    fn try_from(shared: SharedBuffer) -> Result<Buffer, SharedBuffer> {
        shared.try_into_buffer()
    }
}
