//! Reading from files into a [`Buffer`]'s room, which `std::io::Read` cannot: it wants bytes that were written before.

use super::Buffer;
use std::io::{Error, ErrorKind, Result};
use std::os::fd::{AsFd, AsRawFd};

impl Buffer {
    /// Reads from a file, from `offset` on, and adds what was read: at most `len` bytes, and at most as many as there is room
    /// for. Says how many; 0 at the end of the file. (One `pread`, so it may be less than is there; the file's own position stays.)
    ///
    /// A file that was opened with `O_DIRECT` wants `offset`, `len` and the place in memory to be multiples of its blocks: take an
    /// empty buffer of [`Heap::buffer_aligned`](crate::Heap::buffer_aligned).
    ///
    /// ```
    /// # fn example(heap: &rdmalloc::Heap) -> Result<(), Box<dyn std::error::Error>> {
    /// let file = std::fs::File::open("/proc/self/exe")?;
    /// let mut buffer = heap.buffer_aligned(64 << 10, 4096)?;
    /// let read = buffer.read_at(&file, 8192, 0)?;
    /// assert_eq!((read, buffer.len(), &buffer[1..4]), (8192, 8192, &b"ELF"[..]));
    /// # Ok(()) }
    /// # example(&rdmalloc::Heap::builder().build().unwrap()).unwrap();
    /// ```
    ///
    /// # Errors
    ///
    /// The system's; then nothing was added. `EINVAL` if the file was opened with `O_DIRECT` and something is not a multiple.
    pub fn read_at(&mut self, file: impl AsFd, len: usize, offset: u64) -> Result<usize> {
        let offset = offset.try_into().map_err(|_| Error::from(ErrorKind::InvalidInput))?;
        let fd = file.as_fd().as_raw_fd();
        let room = self.spare_capacity_mut();
        let (place, len) = (room.as_mut_ptr().cast(), len.min(room.len()));
        loop {
            // SAFETY: the room is the buffer's, `len` bytes are within it, and the system writes no more.
            let read = unsafe { libc::pread64(fd, place, len, offset) };
            let Ok(read) = usize::try_from(read) else {
                match Error::last_os_error() {
                    error if error.kind() == ErrorKind::Interrupted => continue,
                    error => return Err(error),
                }
            };
            // SAFETY: the system has written so many bytes behind those that there were.
            unsafe { self.set_len(self.len() + read) };
            return Ok(read);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::Heap;
    use std::fs::{File, OpenOptions, remove_file};
    use std::io::Write;

    #[test]
    fn what_was_read_is_behind_what_there_was_and_never_beyond_the_room() {
        let path = std::env::temp_dir().join(format!("rdmalloc_read_at_{}", std::process::id()));
        let mut file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
        remove_file(&path).unwrap();
        let bytes: Vec<u8> = (0..3000u32).map(|n| (n * n / 7) as u8).collect();
        file.write_all(&bytes).unwrap();

        let heap = Heap::builder().build().unwrap();
        let mut buffer = heap.buffer(256).unwrap();
        buffer.try_extend_from_slice(b"head").unwrap();
        assert_eq!(buffer.read_at(&file, 100, 1000).unwrap(), 100);
        assert_eq!((&buffer[..4], &buffer[4..]), (&b"head"[..], &bytes[1000..1100]));
        let room = buffer.capacity() - buffer.len();
        assert_eq!(buffer.read_at(&file, usize::MAX, 0).unwrap(), room);
        assert_eq!((buffer.len(), &buffer[104..]), (buffer.capacity(), &bytes[..room]));
        assert_eq!(buffer.read_at(&file, 9, 0).unwrap(), 0);

        buffer.clear();
        assert_eq!(buffer.read_at(&file, 100, 2990).unwrap(), 10);
        assert_eq!(buffer.read_at(&file, 100, 3000).unwrap(), 0);
        assert!(buffer.read_at(&file, 1, u64::MAX).is_err() && buffer.read_at(File::open("/").unwrap(), 1, 0).is_err());
        assert_eq!(buffer, &bytes[2990..]);
    }
}
