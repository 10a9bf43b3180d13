//! Pages: how large they are, and mappings of large ones. Uses libc only.
//!
//! A page's size is a fact of the running kernel (4 KiB; 16 or 64 KiB on some arm64 and other machines), so it is asked for,
//! once. Everything that this crate maps, opens, purges and closes is cut at multiples of it; debug builds check that.

use core::ffi::c_int;
use core::ptr;
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::io;

/// Since Linux 5.14: faults pages in as a write would, contents kept; an error instead of a signal where there is none.
const MADV_POPULATE_WRITE: c_int = 23;

/// What `/sys/kernel/mm/transparent_hugepage/enabled` says where the administrator wants none.
const NEVER: &[u8] = b"[never]";

static PAGE: AtomicUsize = AtomicUsize::new(0);

/// The size of a base page in bytes.
pub(crate) fn page_size() -> usize {
    match PAGE.load(Relaxed) {
        0 => {
            let size = kernel_page_size();
            // Not over what a test has set meanwhile.
            let _ = PAGE.compare_exchange(0, size, Relaxed, Relaxed);
            PAGE.load(Relaxed)
        }
        size => size,
    }
}

/// What the kernel says: at multiples of it new mappings begin, whatever a test pretends.
pub(crate) fn kernel_page_size() -> usize {
    // SAFETY: sysconf has no preconditions.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// For tests: takes base pages to be larger than they are, which is right on the real ones too, as a multiple of them.
/// Whether it was done: only before the first memory is asked for, and for a power of two from the real size to 64 KiB.
#[doc(hidden)]
pub fn pretend_page_size(bytes: usize) -> bool {
    let fits = bytes.is_power_of_two() && (kernel_page_size()..=crate::SLICE).contains(&bytes);
    fits && PAGE.compare_exchange(0, bytes, Relaxed, Relaxed).is_ok()
}

/// What the functions of this layer ask of their ranges.
pub(super) fn debug_assert_whole_pages(start: *mut u8, len: usize) {
    debug_assert!((start.addr() | len).is_multiple_of(page_size()), "{start:?} and {len:#x} bytes are not whole pages");
}

/// What transparent huge pages a range shall have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Advice {
    /// As many as can be had, unless the system's administrator has said `never`.
    Huge,
    /// None, even where he has said `always`.
    Base,
}

/// Advises on huge pages: a wish, and nothing where the kernel knows none.
///
/// # Safety
///
/// The range is page-aligned and writable, in a reservation of ours.
pub(crate) unsafe fn advise(start: *mut u8, len: usize, advice: Advice) {
    debug_assert_whole_pages(start, len);
    let advice = if advice == Advice::Huge { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
    // SAFETY: the advice changes nothing that the program sees in the range.
    unsafe { libc::madvise(start.cast(), len, advice) };
}

/// Whether this process may have transparent huge pages where it asks for them.
pub(crate) fn has_huge_pages() -> bool {
    // SAFETY: takes and gives numbers only.
    let disabled = unsafe { libc::prctl(libc::PR_GET_THP_DISABLE, 0, 0, 0, 0) };
    // 1: none at all. (Since Linux 6.18, 3 is: none but where a program asks for them.)
    let mut buffer = [0; 64];
    let enabled = super::read_file(c"/sys/kernel/mm/transparent_hugepage/enabled", &mut buffer);
    disabled != 1 && !enabled.is_empty() && !enabled.windows(NEVER.len()).any(|words| words == NEVER)
}

/// Faults a range in.
///
/// # Safety
///
/// The range is page-aligned and writable, in a reservation of ours.
pub(crate) unsafe fn populate(start: *mut u8, len: usize) -> io::Result<()> {
    debug_assert_whole_pages(start, len);
    // SAFETY: contents are kept.
    super::check(unsafe { libc::madvise(start.cast(), len, MADV_POPULATE_WRITE) })
}

/// Why a range is not mapped with large pages.
#[derive(Debug)]
pub(crate) enum NotLarge {
    /// The range is reserved as before.
    Refused(io::Error),
    /// The range is not ours any more: another thread may have mapped something into it.
    Lost(io::Error),
}

/// Maps a reserved range, writable, with pages of the hugetlb pool of `1 << shift` bytes.
///
/// A mapping over the range is one step when it succeeds. When it fails (the pool has too few pages, which Linux notices only after
/// it has removed what was there, seen on 6.1), the range may be a hole. So the pages are first asked for elsewhere, where a
/// failure costs nothing; what can still fail is that others take them in between. Then the hole is closed again, unless
/// somebody has mapped something into it.
///
/// # Safety
///
/// The range lies in a reservation, is closed, and nobody else has it. Start and length are multiples of the page.
pub(crate) unsafe fn open_large(start: *mut u8, len: usize, shift: u32) -> Result<(), NotLarge> {
    debug_assert!((start.addr() | len).is_multiple_of(1 << shift));
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let anywhere = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let large = anywhere | libc::MAP_HUGETLB | (shift as c_int) << libc::MAP_HUGE_SHIFT;
    // SAFETY: a new mapping at an address of the kernel's choice, removed at once. Nothing is faulted in.
    unsafe {
        let trial = libc::mmap(ptr::null_mut(), len, access, large, -1, 0);
        if trial == libc::MAP_FAILED {
            return Err(NotLarge::Refused(io::Error::last_os_error()));
        }
        libc::munmap(trial, len);
        map_over(start, len, large)
    }
}

/// Maps over a reserved range, writable; or leaves it reserved, or says that it may be another's.
///
/// # Safety
///
/// The range is page-aligned, lies in a reservation, is closed, and nobody else has it.
unsafe fn map_over(start: *mut u8, len: usize, flags: c_int) -> Result<(), NotLarge> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: MAP_FIXED replaces only the caller's range, which nobody uses.
    let at = unsafe { libc::mmap(start.cast(), len, access, flags | libc::MAP_FIXED, -1, 0) };
    if at != libc::MAP_FAILED {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    let closed = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: replaces nothing. Kernels before 4.17 take the address for a hint, so what comes back is looked at.
    let at = unsafe { libc::mmap(start.cast(), len, libc::PROT_NONE, closed, -1, 0) };
    if at == start.cast() {
        return Err(NotLarge::Refused(error));
    }
    if at != libc::MAP_FAILED {
        // SAFETY: made just now, and nobody knows of it.
        unsafe { libc::munmap(at, len) };
    }
    // Something is there: the reservation as it was (newer kernels put it back), or another thread's. Nobody can tell.
    Err(NotLarge::Lost(error))
}

#[cfg(test)]
mod tests {
    use super::super::{Reserve, close, open, reserve};
    use super::*;

    #[test]
    fn a_range_that_is_refused_large_pages_is_reserved_as_before() {
        const LEN: usize = 1 << 40; // no pool has as much
        let start = reserve(LEN, 1 << 30, Reserve::Nothing).unwrap();
        // SAFETY: the reservation just made, which nobody else knows.
        unsafe {
            for shift in [21, 30, 13] {
                assert!(matches!(open_large(start, LEN, shift), Err(NotLarge::Refused(_))), "{shift}");
            }
            let page = page_size();
            open(start, page).unwrap();
            advise(start, page, Advice::Base);
            let _ = populate(start, page);
            assert_eq!(start.read(), 0);
            close(start, page).unwrap();
            libc::munmap(start.cast(), LEN);
        }
    }

    #[test]
    fn a_mapping_that_fails_leaves_no_hole_that_is_taken_for_ours() {
        const LEN: usize = 1 << 40;
        let start = reserve(LEN, 1 << 30, Reserve::Nothing).unwrap();
        // Huge pages that no pool has: an older kernel has removed what was there by the time it notices (6.1), a newer one has
        // not, or puts it back (6.18).
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB | 21 << libc::MAP_HUGE_SHIFT;
        // SAFETY: the reservation just made, which nobody else knows.
        let result = unsafe { map_over(start, LEN, flags) };
        println!("{result:?}");
        assert!(result.is_err());
        // Something is there in any case, so nobody's mapping gets these addresses. (Or the second call would do it.)
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
        // SAFETY: replaces nothing.
        let again = unsafe { libc::mmap(start.cast(), LEN, libc::PROT_NONE, flags, -1, 0) };
        assert_eq!(again, libc::MAP_FAILED);
        // SAFETY: the reservation again.
        unsafe { libc::munmap(start.cast(), LEN) };
    }

    #[test]
    fn a_page_size_that_is_in_use_is_not_changed() {
        let size = page_size();
        assert!(!pretend_page_size(64 << 10) && !pretend_page_size(size));
        assert_eq!(page_size(), size);
    }
}
