//! [`Buffer`]: bytes of a heap that a program made. Uses `pool` and `heap`.

use crate::heap::Core;
use crate::pool;
use core::alloc::Layout;
use core::fmt;
use core::mem::MaybeUninit;
use core::ops::{Deref, DerefMut};
use core::ptr::NonNull;
use rdmalloc_arenas::TakeError;

/// The alignment of buffers: a cache line, so that no two share one.
const ALIGN: usize = 64;

/// Bytes of a [`Heap`](crate::Heap): like a `Vec<u8>` that never moves and never grows beyond its capacity.
///
/// Dropping it gives the memory back to its heap, which it keeps alive.
///
/// While a peer may write into the buffer, what it holds can change at any time; agree with the peer on when that is, and
/// look at the bytes only outside of it.
pub struct Buffer {
    start: NonNull<u8>,
    len: usize,
    capacity: usize,
}

// SAFETY: a buffer owns its bytes alone, as a Vec does.
unsafe impl Send for Buffer {}
// SAFETY: shared references only read.
unsafe impl Sync for Buffer {}

/// Bytes did not fit a buffer; nothing was written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BufferFull {
    /// Bytes that were to be added.
    pub wanted: usize,
    /// Bytes that there is room for.
    pub room: usize,
}

impl fmt::Display for BufferFull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} bytes do not fit the {} that are left of the buffer's capacity; take a larger one",
            self.wanted, self.room
        )
    }
}

impl std::error::Error for BufferFull {}

fn layout(capacity: usize) -> Option<Layout> {
    Layout::from_size_align(capacity.max(1), ALIGN).ok()
}

impl Buffer {
    pub(crate) fn take(core: &Core, capacity: usize) -> Result<Buffer, TakeError> {
        let too_long = || TakeError::NoMemory { wanted: capacity, source: std::io::ErrorKind::InvalidInput.into() };
        let block = core.allocate(layout(capacity).ok_or_else(too_long)?, false)?;
        Ok(Buffer { start: block.start, len: 0, capacity })
    }

    /// How many bytes it can hold.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Where it begins; stays there as long as it lives.
    #[must_use]
    pub fn as_ptr(&self) -> *const u8 {
        self.start.as_ptr()
    }

    /// Where it begins, to write to.
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

    /// Adds bytes.
    ///
    /// # Errors
    ///
    /// [`BufferFull`] if they do not all fit.
    pub fn try_extend_from_slice(&mut self, bytes: &[u8]) -> Result<(), BufferFull> {
        let full = BufferFull { wanted: bytes.len(), room: self.capacity - self.len };
        let room = self.spare_capacity_mut().get_mut(..bytes.len()).ok_or(full)?;
        room.write_copy_of_slice(bytes);
        self.len += bytes.len();
        Ok(())
    }

    /// The room behind the bytes: what a device receives into.
    pub fn spare_capacity_mut(&mut self) -> &mut [MaybeUninit<u8>] {
        // SAFETY: the block is the buffer's, `len <= capacity`, and the rest is not read as anything.
        unsafe { core::slice::from_raw_parts_mut(self.start.as_ptr().add(self.len).cast(), self.capacity - self.len) }
    }

    /// Says that the first `len` bytes have been written, by a device or a peer.
    ///
    /// # Safety
    ///
    /// `len` is at most the capacity, and that many bytes from the beginning are initialised.
    pub unsafe fn set_len(&mut self, len: usize) {
        debug_assert!(len <= self.capacity);
        self.len = len;
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let core = pool::core_of(self.start.addr().get());
        if let Some((core, layout)) = core.zip(layout(self.capacity)) {
            // SAFETY: the block was taken from the core of its arena, with this layout, and goes with the buffer.
            let ended = unsafe { core.free(self.start, layout) };
            if ended {
                pool::end_if_empty(core);
            }
        }
    }
}

impl Deref for Buffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the block is the buffer's, and its first `len` bytes are initialised.
        unsafe { core::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the borrow is unique.
        unsafe { core::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer")
            .field("start", &self.start)
            .field("len", &self.len)
            .field("capacity", &self.capacity)
            .finish()
    }
}

/// Writes as much as there is room for.
impl std::io::Write for Buffer {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let count = bytes.len().min(self.capacity - self.len);
        self.try_extend_from_slice(&bytes[..count]).map_err(std::io::Error::other)?;
        Ok(count)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
