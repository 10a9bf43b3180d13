//! Does this kernel release a fixed buffer's pages before the call that empties its slot returns? Tried out, on a ring of
//! its own, since distributions carry changes between versions. Uses the io-uring crate and memmap2.

use io_uring::{IoUring, opcode, types};
use std::io::{self, Write};
use std::os::fd::AsRawFd;

const PAGE: usize = 4096;
const READ: u64 = 1;
const RELEASED: u64 = 2;

/// Empties one slot while a request is in flight on another, and looks whether the tag of the emptied one, which the kernel
/// posts as it releases the pages, is there already.
///
/// The request in flight matters: kernels before 6.13 may release at once on an idle ring, but hold back everything that
/// is removed while an older request is in flight.
///
/// # Errors
///
/// The system's, if the trial itself cannot be made.
pub(super) fn releases_at_once() -> io::Result<bool> {
    let mut pages = memmap2::MmapMut::map_anon(2 * PAGE)?;
    let (reader, mut writer) = io::pipe()?;
    let mut ring = IoUring::new(4)?;
    ring.submitter().register_buffers_sparse(2)?;
    let (used, idle) = pages.split_at_mut(PAGE);
    let buffer = |page: &mut [u8]| libc::iovec { iov_base: page.as_mut_ptr().cast(), iov_len: page.len() };
    let (used, idle) = (buffer(used), buffer(idle));
    let empty = libc::iovec { iov_base: core::ptr::null_mut(), iov_len: 0 };

    // SAFETY: both pages are mapped until the end of this function, nothing else reads or writes them, and the slots are
    // filled one after the other with one page each.
    unsafe {
        ring.submitter().register_buffers_update(0, &[used], None)?;
        ring.submitter().register_buffers_update(1, &[idle], Some(&[RELEASED]))?;
    }
    let read =
        opcode::ReadFixed::new(types::Fd(reader.as_raw_fd()), used.iov_base.cast(), 1, 0).build().user_data(READ);
    // SAFETY: the descriptor is open and the page mapped until the read has completed below; and if an error ends this
    // function earlier, a late read goes to the page that the kernel holds, not to an address.
    unsafe { ring.submission().push(&read) }.map_err(io::Error::other)?;
    ring.submit()?; // the pipe is empty, so the read waits

    // SAFETY: an empty buffer.
    unsafe { ring.submitter().register_buffers_update(1, &[empty], None)? };
    let mut released = false;
    for completion in ring.completion() {
        match completion.user_data() {
            RELEASED => released = true,
            _ => return Err(io::Error::other("a fixed read from an empty pipe did not wait")),
        }
    }

    writer.write_all(&[1])?;
    loop {
        ring.submit_and_wait(1)?;
        if ring.completion().any(|completion| completion.user_data() == READ) {
            // Not left to the ring's end, which the kernel finishes in the background: nothing is pinned after this.
            ring.submitter().unregister_buffers()?;
            return Ok(released);
        }
    }
}
