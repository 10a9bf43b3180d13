//! [`Buffer`]: bytes of a heap that a program made. Uses `pool` and `heap`.

use crate::heap::Core;
use crate::{pool, slab};
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
/// Dropping it gives the memory back to its heap, which it keeps alive. It is two words, as a `Box<[u8]>` is: its capacity and
/// its heap are found by its address.
///
/// While a peer may write into the buffer, what it holds can change at any time; agree with the peer on when that is, and
/// look at the bytes only outside of it.
pub struct Buffer {
    start: NonNull<u8>,
    len: usize,
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

impl Buffer {
    pub(crate) fn take(core: &Core, capacity: usize) -> Result<Buffer, TakeError> {
        let too_long = |_| TakeError::NoMemory { wanted: capacity, source: std::io::ErrorKind::InvalidInput.into() };
        let layout = Layout::from_size_align(capacity.max(1), ALIGN).map_err(too_long)?;
        Ok(Buffer { start: core.allocate(layout, false)?.start, len: 0 })
    }

    /// How many bytes it can hold: all of its block, so at least as many as were asked for.
    #[must_use]
    pub fn capacity(&self) -> usize {
        // SAFETY: the block was taken by `Core::allocate`, which marks large ones; it was not resized, and is the buffer's.
        unsafe { slab::size_of_block(self.start) }
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
        let full = BufferFull { wanted: bytes.len(), room: self.capacity() - self.len };
        let room = self.spare_capacity_mut().get_mut(..bytes.len()).ok_or(full)?;
        room.write_copy_of_slice(bytes);
        self.len += bytes.len();
        Ok(())
    }

    /// The room behind the bytes: what a device receives into.
    pub fn spare_capacity_mut(&mut self) -> &mut [MaybeUninit<u8>] {
        // SAFETY: the block is the buffer's, `len <= capacity`, and the rest is not read as anything.
        unsafe { core::slice::from_raw_parts_mut(self.start.as_ptr().add(self.len).cast(), self.capacity() - self.len) }
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
    fn drop(&mut self) {
        if let Some(core) = pool::core_of(self.start.addr().get()) {
            // SAFETY: a layout of a block's size is a layout: the size is not 0, and no more than the region has.
            let layout = unsafe { Layout::from_size_align_unchecked(self.capacity(), 1) };
            // SAFETY: the block was taken from the core of its arena, is of this layout's kind, and goes with the buffer.
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
            .field("capacity", &self.capacity())
            .finish()
    }
}

/// Writes as much as there is room for.
impl std::io::Write for Buffer {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let count = bytes.len().min(self.capacity() - self.len);
        self.try_extend_from_slice(&bytes[..count]).map_err(std::io::Error::other)?;
        Ok(count)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Heap;
    use crate::class::{CLASSES, kind_of, size_of_class};

    const KIB: usize = 1 << 10;
    const MIB: usize = 1 << 20;
    const GIB: usize = 1 << 30;

    #[test]
    fn a_buffer_is_two_words_and_so_is_an_optional_one() {
        assert_eq!(
            (size_of::<Buffer>(), size_of::<Option<Buffer>>()),
            (2 * size_of::<usize>(), 2 * size_of::<usize>())
        );
    }

    /// Takes a block, and looks at it as who frees it by its address does.
    fn check(core: &Core, size: usize, align: usize) {
        let layout = Layout::from_size_align(size, align).unwrap();
        let block = core.allocate(layout, false).unwrap().start;
        // SAFETY: taken above by `Core::allocate`.
        let found = unsafe { slab::size_of_block(block) };
        assert!(found >= size && block.addr().get().is_multiple_of(align), "{size} at {align}: {found}");
        let by_address = Layout::from_size_align(found, 1).unwrap();
        assert_eq!(kind_of(by_address), kind_of(layout), "{size} at {align}");
        // SAFETY: taken above, and of this kind.
        unsafe { core.free(block, by_address) };
    }

    #[test]
    fn a_block_is_freed_by_its_address_as_its_layout_would() {
        let heap = Heap::builder().build().unwrap();
        // Twice, so that spans are slabs, then large, then slabs of other classes.
        for _ in 0..2 {
            for class in 0..CLASSES {
                for size in [size_of_class(class), size_of_class(class) - 1] {
                    (0..=22).for_each(|shift| check(heap.core, size, 1 << shift));
                }
            }
            for size in [64 * KIB + 1, 4 * MIB - 1, 4 * MIB, 4 * MIB + 1, 40 * MIB] {
                (0..=26).for_each(|shift| check(heap.core, size, 1 << shift));
            }
        }
        assert_eq!((heap.trim().stuck_arenas, heap.stats().live_bytes), (0, 0));
    }

    #[test]
    fn buffers_of_any_size_know_their_capacity_and_give_all_of_it_back() {
        let heap = Heap::builder().build().unwrap();
        for capacity in
            [0, 1, 63, 64, 65, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 4 * MIB - 1, 4 * MIB + 1, 32 * MIB, 100 * MIB]
        {
            let buffer = heap.buffer(capacity).unwrap();
            assert!(buffer.is_empty() && buffer.capacity() >= capacity, "{capacity}: {}", buffer.capacity());
            assert!(buffer.capacity() <= (capacity + capacity / 8 + 64).next_multiple_of(64 * KIB), "{capacity}");
        }
        match heap.buffer(5 * GIB) {
            Ok(buffer) => assert_eq!(buffer.capacity(), 5 * GIB),
            Err(error) => println!("skipped: 5 GiB of address space: {error}"),
        }
        for capacity in [isize::MAX as usize, isize::MAX as usize - 63, usize::MAX, usize::MAX / 2 - 1000] {
            heap.buffer(capacity).expect_err("more than there is");
        }
        heap.trim();
        assert_eq!(heap.open_bytes(), 0);
    }
}
