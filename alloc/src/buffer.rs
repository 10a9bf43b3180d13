//! [`Buffer`]: bytes of a heap that a program made. Uses `block` and `pool`.

mod filling;
mod reading;
#[cfg(test)]
mod tests;

use crate::bytes_like::bytes_like;
use crate::heap::Core;
use crate::{Heap, block, pool};
use core::alloc::Layout;
use core::mem::MaybeUninit;
use core::ops::{Deref, DerefMut};
use core::ptr::NonNull;
pub use filling::BufferFull;
use rdmalloc_arenas::{LINK_UNIT, TakeError};

/// The least alignment of buffers: a cache line, so that no two share one.
const ALIGN: usize = 64;

const _: () = assert!(ALIGN >= LINK_UNIT);

/// Bytes of a [`Heap`]: like a `Vec<u8>` that never moves and never grows beyond its capacity.
///
/// Dropping it gives the memory back to its heap, which it keeps alive. It is two words, as a `Box<[u8]>` is: its capacity and
/// its heap are found by its address.
///
/// It is filled by [`try_extend_from_slice`](Self::try_extend_from_slice), by `std::io::Write`, which writes what there is room
/// for, by [`BufMut`](bytes::BufMut) and `Extend`, which panic when there is none; or by a device, which receives into
/// [`spare_capacity_mut`](Self::spare_capacity_mut). Safe code never reads capacity that was not written. It compares, hashes and
/// prints as its bytes do.
///
/// While a peer may write into the buffer, what it holds can change at any time; agree with the peer on when that is, and
/// look at the bytes only outside of it.
///
/// ```
/// use bytes::BufMut;
///
/// let heap = rdmalloc::Heap::builder().build()?;
/// let mut message = heap.buffer(64)?;
/// message.put_u32_le(7);
/// message.put_slice(b"hello");
/// assert_eq!(message, b"\x07\0\0\0hello");
/// assert_eq!(message.capacity(), 64);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Buffer {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a buffer owns its bytes alone, as a Vec does.
unsafe impl Send for Buffer {}
// SAFETY: shared references only read.
unsafe impl Sync for Buffer {}

impl Heap {
    /// An empty buffer with room for `capacity` bytes, aligned to 64 bytes. It never moves, and never grows beyond its
    /// [capacity](Buffer::capacity), which is perhaps a little more.
    ///
    /// # Errors
    ///
    /// [`TakeError`], when there is no memory, or a device refuses it.
    #[inline]
    pub fn buffer(&self, capacity: usize) -> Result<Buffer, TakeError> {
        Buffer::take(self.core, capacity, ALIGN, false)
    }

    /// A buffer of `len` zeros. Costs no clearing where the memory was never handed out, and no peer could write it.
    ///
    /// ```
    /// let heap = rdmalloc::Heap::builder().build()?;
    /// assert_eq!(heap.buffer_zeroed(3)?, [0, 0, 0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`buffer`](Self::buffer).
    pub fn buffer_zeroed(&self, len: usize) -> Result<Buffer, TakeError> {
        let mut buffer = Buffer::take(self.core, len, ALIGN, true)?;
        buffer.len = len;
        Ok(buffer)
    }

    /// An empty buffer that begins at a multiple of `align` bytes, a power of two, and whose capacity is a multiple of it: so
    /// that whole blocks of a file opened with `O_DIRECT` can be read into it and written from it. These want 512 or 4096 bytes,
    /// as the device of the file does; addresses are aligned to 64 at least.
    ///
    /// ```
    /// let heap = rdmalloc::Heap::builder().build()?;
    /// let buffer = heap.buffer_aligned(10_000, 4096)?;
    /// assert!(buffer.as_ptr().addr() % 4096 == 0 && buffer.capacity() % 4096 == 0 && buffer.capacity() >= 10_000);
    /// let error = heap.buffer_aligned(10_000, 1000).expect_err("no power of two");
    /// assert_eq!(error.to_string(), "an alignment of 1000 bytes: it must be a power of two, 4096 for direct I/O, say");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`buffer`](Self::buffer), and [`TakeError::NotALayout`] if the alignment is no power of two.
    pub fn buffer_aligned(&self, capacity: usize, align: usize) -> Result<Buffer, TakeError> {
        // Checked here, since a larger one would hide it.
        if !align.is_power_of_two() {
            return Err(TakeError::NotALayout { wanted: capacity, align });
        }
        Buffer::take(self.core, capacity, align.max(ALIGN), false)
    }

    /// A buffer with a copy of `bytes`.
    ///
    /// ```
    /// let heap = rdmalloc::Heap::builder().build()?;
    /// assert_eq!(heap.buffer_from_slice(b"hello")?, "hello");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`buffer`](Self::buffer).
    pub fn buffer_from_slice(&self, bytes: &[u8]) -> Result<Buffer, TakeError> {
        let mut buffer = self.buffer(bytes.len())?;
        if let Some(room) = buffer.spare_capacity_mut().get_mut(..bytes.len()) {
            room.write_copy_of_slice(bytes);
            buffer.len = bytes.len();
        }
        Ok(buffer)
    }
}

impl Buffer {
    /// An empty buffer, or one whose first `capacity` bytes are zero.
    #[inline]
    fn take(core: &Core, capacity: usize, align: usize, zeroed: bool) -> Result<Buffer, TakeError> {
        let layout = Layout::from_size_align(capacity.max(1), align)
            .map_err(|_| TakeError::NotALayout { wanted: capacity, align })?
            .pad_to_align();
        // Aligned enough for links that lie outside, too.
        let block = core.allocate(layout, zeroed)?;
        if zeroed && !block.zero {
            // SAFETY: the block is new, and of this size.
            unsafe { block.start.write_bytes(0, capacity) };
        }
        Ok(Buffer { start: block.start, len: 0 })
    }

    /// How many bytes it can hold: all of its block, so at least as many as were asked for, and at most an eighth more, 64 more,
    /// or up to the next multiple of 64 KiB.
    #[inline]
    #[must_use]
    pub fn capacity(&self) -> usize {
        // SAFETY: the block was taken by `Core::allocate`, and is the buffer's.
        unsafe { block::size(self.start) }
    }

    /// How many bytes it holds. Without looking at them, so also while a peer may write them.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds none.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How many bytes there is room for.
    #[inline]
    fn room(&self) -> usize {
        self.capacity() - self.len
    }

    /// Where it begins; stays there as long as it lives.
    #[inline]
    #[must_use]
    pub fn as_ptr(&self) -> *const u8 {
        self.start.as_ptr()
    }

    /// Where it begins, to write to.
    #[inline]
    #[must_use]
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Forgets the bytes from `len` on, if there are more.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Forgets all bytes.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// The room behind the bytes: what a device receives into.
    #[inline]
    pub fn spare_capacity_mut(&mut self) -> &mut [MaybeUninit<u8>] {
        let room = self.room();
        // SAFETY: the block is the buffer's, `len <= capacity`, and the rest is not read as anything.
        unsafe { core::slice::from_raw_parts_mut(self.start.as_ptr().add(self.len).cast(), room) }
    }

    /// Says that the first `len` bytes have been written, by a device or a peer.
    ///
    /// # Safety
    ///
    /// `len` is at most the capacity, and that many bytes from the beginning are initialised.
    pub unsafe fn set_len(&mut self, len: usize) {
        debug_assert!(len <= self.capacity());
        self.len = len;
    }
}

impl Drop for Buffer {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the block was taken by `Core::allocate`, and goes with the buffer.
        unsafe { pool::give_back(self.start) };
    }
}

impl Deref for Buffer {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: the block is the buffer's, and its first `len` bytes are initialised.
        unsafe { core::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Buffer {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the borrow is unique.
        unsafe { core::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

bytes_like!(Buffer);
