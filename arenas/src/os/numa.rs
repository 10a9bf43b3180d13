//! On which memory node pages lie: mbind(2) and move_pages(2), without libnuma. Uses libc only.

use core::ffi::{c_int, c_long};
use core::ptr;
use std::io;

/// From `linux/mempolicy.h`.
const MPOL_PREFERRED: c_int = 1;
const MPOL_MF_MOVE: c_int = 1 << 1;
/// Nodes that a mask has room for: as many as any kernel is built for (`CONFIG_NODES_SHIFT` is at most 10).
const NODES: usize = 1024;

/// Has the pages of a range taken from `node`, and from others only where it has none left. With `moves`, what is there already
/// is moved, as far as nobody has pinned it.
///
/// # Errors
///
/// `EINVAL`: there is no such node. `ENOSYS`: the kernel knows no nodes. `EPERM`: a filter of system calls forbids it.
///
/// # Safety
///
/// The range is page-aligned, in a reservation of ours.
pub(crate) unsafe fn prefer_node(start: *mut u8, len: usize, node: u32, moves: bool) -> io::Result<()> {
    super::debug_assert_whole_pages(start, len);
    let (node, bits) = (node as usize, u64::BITS as usize);
    let mut mask = [0_u64; NODES / 64];
    let word = mask.get_mut(node / bits).ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))?;
    *word |= 1 << (node % bits);
    let flags = if moves { MPOL_MF_MOVE } else { 0 };
    // SAFETY: where the pages of a range lie changes nothing that the program sees. The mask is read only; the kernel looks at one
    // bit less than it is told.
    let result = unsafe {
        libc::syscall(libc::SYS_mbind, start, len, MPOL_PREFERRED, mask.as_ptr(), NODES + 1, flags as c_long)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Calls `found` with the node of each base page of a range that is in memory.
///
/// # Errors
///
/// `ENOSYS`, `EPERM`: as above.
pub(crate) fn nodes_of(start: usize, len: usize, mut found: impl FnMut(u32)) -> io::Result<()> {
    const AT_ONCE: usize = 128;
    let page = super::pages::kernel_page_size();
    let end = start + len;
    let (mut pages, mut status) = ([ptr::null::<u8>(); AT_ONCE], [0 as c_int; AT_ONCE]);
    for first in (start..end).step_by(AT_ONCE * page) {
        let count = ((end - first) / page).min(AT_ONCE);
        for (index, place) in pages.iter_mut().enumerate() {
            *place = ptr::without_provenance(first + index * page);
        }
        let none = ptr::null::<c_int>();
        // SAFETY: both arrays have room for `count`. Without nodes to move to, the pages are only looked up, and addresses at
        // which nothing is are an error of their page.
        let result = unsafe {
            libc::syscall(libc::SYS_move_pages, 0, count, pages.as_ptr(), none, status.as_mut_ptr(), 0 as c_long)
        };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        status[..count].iter().filter_map(|node| u32::try_from(*node).ok()).for_each(&mut found);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::{Reserve, open, page_size, reserve};
    use super::*;

    #[test]
    fn nodes_that_no_mask_has_room_for_are_an_error_as_others_that_are_not_there() {
        let len = page_size();
        let start = reserve(len, len, Reserve::Nothing).unwrap();
        for node in [1023, 1024, u32::MAX] {
            // SAFETY: the reservation just made, which nobody else knows.
            let error = unsafe { prefer_node(start, len, node, false) }.unwrap_err();
            let code = error.raw_os_error().unwrap();
            assert!([libc::EINVAL, libc::ENOSYS, libc::EPERM].contains(&code), "{error}");
        }
        // SAFETY: as above.
        unsafe {
            open(start, len).unwrap();
            match nodes_of(start.addr(), len, |node| panic!("nothing is there, on node {node}")) {
                Ok(()) => {
                    start.write(1);
                    let mut all = Vec::new();
                    nodes_of(start.addr(), len, |node| all.push(node)).unwrap();
                    assert_eq!(all.len(), len / super::super::pages::kernel_page_size());
                }
                Err(error) => println!("skipped: move_pages: {error}"),
            }
            libc::munmap(start.cast(), len);
        }
    }
}
