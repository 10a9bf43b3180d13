//! The ways to fill a [`Buffer`]: its own, which say when there is no room, and those of the traits that programs know.

use super::Buffer;
use bytes::BufMut;
use bytes::buf::UninitSlice;
use core::borrow::BorrowMut;
use core::fmt;
use core::mem::MaybeUninit;

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
    /// Adds bytes.
    ///
    /// # Errors
    ///
    /// [`BufferFull`] if they do not all fit.
    pub fn try_extend_from_slice(&mut self, bytes: &[u8]) -> Result<(), BufferFull> {
        let full = BufferFull { wanted: bytes.len(), room: self.room() };
        let room = self.spare_capacity_mut().get_mut(..bytes.len()).ok_or(full)?;
        room.write_copy_of_slice(bytes);
        self.len += bytes.len();
        Ok(())
    }

    /// Makes it `len` bytes long: forgets those beyond, or adds as many of `value` as are missing.
    ///
    /// ```
    /// let mut buffer = rdmalloc::Heap::builder().build()?.buffer(64)?;
    /// buffer.try_resize(3, 7)?;
    /// assert_eq!(buffer, [7, 7, 7]);
    /// assert_eq!(buffer.try_resize(65, 0).expect_err("too long").to_string(),
    ///     "62 bytes do not fit the 61 that are left of the buffer's capacity; take a larger one");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`BufferFull`] if that is more than its capacity; nothing has changed then.
    pub fn try_resize(&mut self, len: usize, value: u8) -> Result<(), BufferFull> {
        let Some(more) = len.checked_sub(self.len) else {
            self.len = len;
            return Ok(());
        };
        let full = BufferFull { wanted: more, room: self.room() };
        self.spare_capacity_mut().get_mut(..more).ok_or(full)?.fill(MaybeUninit::new(value));
        self.len = len;
        Ok(())
    }
}

// SAFETY: `chunk_mut` is the room behind the bytes, all of it and nothing else, and `advance_mut` moves past what the caller
// says it has written.
unsafe impl BufMut for Buffer {
    #[inline]
    fn remaining_mut(&self) -> usize {
        self.room()
    }

    #[inline]
    unsafe fn advance_mut(&mut self, count: usize) {
        assert!(count <= self.room(), "{}", BufferFull { wanted: count, room: self.room() });
        self.len += count;
    }

    #[inline]
    fn chunk_mut(&mut self) -> &mut UninitSlice {
        UninitSlice::uninit(self.spare_capacity_mut())
    }
}

/// Writes as much as there is room for.
impl std::io::Write for Buffer {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let count = bytes.len().min(self.room());
        self.try_extend_from_slice(&bytes[..count]).map_err(std::io::Error::other)?;
        Ok(count)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Fails, having written nothing of it, when a piece does not fit.
impl fmt::Write for Buffer {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.try_extend_from_slice(text.as_bytes()).map_err(|BufferFull { .. }| fmt::Error)
    }
}

/// Panics when there is no room for one.
impl Extend<u8> for Buffer {
    fn extend<I: IntoIterator<Item = u8>>(&mut self, bytes: I) {
        bytes.into_iter().for_each(|byte| self.put_u8(byte));
    }
}

/// Panics when there is no room for one.
impl<'a> Extend<&'a u8> for Buffer {
    fn extend<I: IntoIterator<Item = &'a u8>>(&mut self, bytes: I) {
        self.extend(bytes.into_iter().copied());
    }
}

impl AsMut<[u8]> for Buffer {
    #[inline]
    fn as_mut(&mut self) -> &mut [u8] {
        self
    }
}

impl BorrowMut<[u8]> for Buffer {
    fn borrow_mut(&mut self) -> &mut [u8] {
        self
    }
}

impl<'a> IntoIterator for &'a mut Buffer {
    type Item = &'a mut u8;
    type IntoIter = core::slice::IterMut<'a, u8>;
    fn into_iter(self) -> Self::IntoIter {
        self.iter_mut()
    }
}
