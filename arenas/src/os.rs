//! The system calls of this crate: all of them, and nothing else. Uses nothing below it; `pages` and `numa` have those about pages and
//! nodes.
//!
//! Nothing here allocates: these run inside an allocator.

mod numa;
mod pages;

use core::ffi::{c_int, c_void};
use core::ptr;
use core::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, Ordering};
use core::time::Duration;
pub(crate) use numa::{nodes_of, prefer_node};
use pages::debug_assert_whole_pages;
pub use pages::pretend_page_size;
pub(crate) use pages::{Advice, NotLarge, advise, has_huge_pages, kernel_page_size, open_large, page_size, populate};
use std::io;

/// `CAP_IPC_LOCK`, from `linux/capability.h`.
const CAP_IPC_LOCK: u32 = 14;

/// How a range is mapped when it is reserved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Reserve {
    /// No access at all: address space for arenas.
    Nothing,
    /// Reads find zeros, and cost neither memory nor commit charge: tables, see [`crate::table`].
    Zeros,
}

/// Reserves `len` bytes of address space, aligned to `align` (a power of two, a multiple of the page).
///
/// A private mapping that cannot be written is charged nowhere: neither by overcommit mode 2 nor by `ulimit -d`
/// (`mm/mmap.c`, `accountable_mapping` and `is_data_mapping`).
pub(crate) fn reserve(len: usize, align: usize, how: Reserve) -> io::Result<*mut u8> {
    let page = kernel_page_size();
    debug_assert!(len.is_multiple_of(page_size()));
    let padded =
        len.checked_add(align.saturating_sub(page)).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
    let access = if how == Reserve::Nothing { libc::PROT_NONE } else { libc::PROT_READ };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new private anonymous mapping at an address of the kernel's choice touches nothing that exists.
    let start = unsafe { libc::mmap(ptr::null_mut(), padded, access, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let start = start.cast::<u8>();
    let lead = start.align_offset(align);
    let tail = padded - len - lead;
    // SAFETY: both pieces lie in the mapping just made, outside the `len` bytes that are returned; nobody knows them.
    unsafe {
        if lead > 0 {
            libc::munmap(start.cast(), lead);
        }
        if tail > 0 {
            libc::munmap(start.add(lead + len).cast(), tail);
        }
        Ok(start.add(lead))
    }
}

fn check(result: c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Makes a reserved range writable.
///
/// # Safety
///
/// The range is page-aligned and lies in a reservation of [`reserve`].
pub(crate) unsafe fn open(start: *mut u8, len: usize) -> io::Result<()> {
    debug_assert_whole_pages(start, len);
    // SAFETY: the caller's range is ours; giving rights takes nothing away from anybody.
    check(unsafe { libc::mprotect(start.cast(), len, libc::PROT_READ | libc::PROT_WRITE) })
}

/// Takes back the memory of a range, which stays reserved.
///
/// A fresh mapping over it, since `mprotect` back to no access keeps the commit charge (seen on 6.1).
///
/// # Safety
///
/// The range is page-aligned, lies in a reservation, holds nothing that anybody will touch, and no device reaches it.
pub(crate) unsafe fn close(start: *mut u8, len: usize) -> io::Result<()> {
    debug_assert_whole_pages(start, len);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: MAP_FIXED replaces only the caller's range, which nobody uses.
    let at = unsafe { libc::mmap(start.cast(), len, libc::PROT_NONE, flags, -1, 0) };
    if at == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Releases the pages of a range; it reads as zeros afterwards.
///
/// # Safety
///
/// The range is page-aligned, writable, free, and pinned by nobody: on pinned pages this would part the program's view
/// from the device's.
pub(crate) unsafe fn purge(start: *mut u8, len: usize) -> io::Result<()> {
    debug_assert_whole_pages(start, len);
    // SAFETY: the caller owns the content, which may go.
    check(unsafe { libc::madvise(start.cast(), len, libc::MADV_DONTNEED) })
}

/// Makes a range read as zeros in children of `fork` (Linux 4.14). Where the kernel cannot, the range is as in the parent.
///
/// # Safety
///
/// The range is page-aligned and a private anonymous mapping of ours.
pub(crate) unsafe fn wipe_on_fork(start: *mut u8, len: usize) {
    // SAFETY: nothing changes in this process.
    unsafe { libc::madvise(start.cast(), len, libc::MADV_WIPEONFORK) };
}

/// Commands of membarrier(2), from `linux/membarrier.h`.
const MEMBARRIER_GLOBAL: c_int = 1 << 0;
const MEMBARRIER_PRIVATE_EXPEDITED: c_int = 1 << 3;
const MEMBARRIER_REGISTER_PRIVATE_EXPEDITED: c_int = 1 << 4;

fn membarrier(command: c_int) -> bool {
    // SAFETY: membarrier touches no memory.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}

/// Whether [`heavy_barrier`] can be had; asked once, before the first. Linux 4.14, and no filter of system calls against it.
pub(crate) fn register_heavy_barrier() -> bool {
    membarrier(MEMBARRIER_REGISTER_PRIVATE_EXPEDITED) && membarrier(MEMBARRIER_PRIVATE_EXPEDITED)
}

/// A full barrier on every processor that runs a thread of this process. Whether it was done.
pub(crate) fn heavy_barrier() -> bool {
    // The first takes memory in the kernel (a mask of processors), and may fail for that; the other takes none, and milliseconds.
    membarrier(MEMBARRIER_PRIVATE_EXPEDITED) || membarrier(MEMBARRIER_GLOBAL)
}

/// Starts a thread that nobody waits for, with no signal handled on it. Nothing is allocated on it before `routine` runs.
///
/// # Safety
///
/// `routine` may be called with `argument` on another thread, once, at any time.
pub(crate) unsafe fn spawn(
    routine: extern "C" fn(*mut c_void) -> *mut c_void,
    argument: *mut c_void,
) -> io::Result<()> {
    /// As the standard library's threads have: a registrar may need it.
    const STACK: usize = 2 << 20;
    let failed = |code: c_int| if code == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(code)) };
    // SAFETY: all pointers are to locals that are initialised before they are read: zeros are valid for each type, and the
    // attributes are destroyed after their last use. The mask is put back as it was. What runs is the caller's promise.
    unsafe {
        let mut attributes: libc::pthread_attr_t = core::mem::zeroed();
        failed(libc::pthread_attr_init(&raw mut attributes))?;
        libc::pthread_attr_setdetachstate(&raw mut attributes, libc::PTHREAD_CREATE_DETACHED);
        libc::pthread_attr_setstacksize(&raw mut attributes, STACK);
        let (mut all, mut before): (libc::sigset_t, libc::sigset_t) = core::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, &raw mut before);
        let mut thread = core::mem::zeroed();
        let result = libc::pthread_create(&raw mut thread, &raw const attributes, routine, argument);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, ptr::null_mut());
        libc::pthread_attr_destroy(&raw mut attributes);
        failed(result)
    }
}

/// Leaves a range out of children of `fork` from now on; they have nothing mapped there. Where the kernel does not, children have
/// a copy.
///
/// # Safety
///
/// The range is page-aligned and a private anonymous mapping of ours, and no child is to use it.
pub(crate) unsafe fn keep_from_children(start: *mut u8, len: usize) {
    // SAFETY: nothing changes in this process.
    unsafe { libc::madvise(start.cast(), len, libc::MADV_DONTFORK) };
}

/// Reserves addresses again that were left out of this process, a child: nobody else shall have them.
///
/// # Errors
///
/// `EEXIST` if something is mapped there (before Linux 4.17: some other address, which is given back).
pub(crate) fn reserve_again(start: *mut u8, len: usize) -> io::Result<()> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: a new mapping, which replaces nothing.
    let at = unsafe { libc::mmap(start.cast(), len, libc::PROT_NONE, flags, -1, 0) };
    if at == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    if at != start.cast() {
        // SAFETY: mapped just now, and known to nobody.
        unsafe { libc::munmap(at, len) };
        return Err(io::Error::from_raw_os_error(libc::EEXIST));
    }
    Ok(())
}

/// How many forks lie between the first process that had devices and this one, as far as handlers were called.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// A number of this process, other than its parent's if it was forked with handlers.
pub(crate) fn process() -> u32 {
    PROCESS.load(Ordering::Relaxed)
}

/// In a child of `fork` that has forgotten its parent's devices: those that will be attached are its own.
pub(crate) fn own_process() {
    PROCESS.fetch_add(1, Ordering::Relaxed);
    // SAFETY: as in `is_forked_child`; the page is writable.
    if let Some(mark) = unsafe { MARK.load(Ordering::Acquire).as_ref() } {
        mark.store(1, Ordering::Relaxed);
    }
}

static MARK: AtomicPtr<AtomicU8> = AtomicPtr::new(ptr::null_mut());

/// Sets the mark by which [`is_forked_child`] knows, unless it is set. Called before a device is there, and not before one is
/// wanted: a daemon that forks first is the process that owns its devices.
pub(crate) fn mark_process() -> io::Result<()> {
    if !MARK.load(Ordering::Acquire).is_null() {
        return Ok(());
    }
    let page = page_size();
    let start = reserve(page, page, Reserve::Zeros)?;
    // SAFETY: one whole page of a reservation made here; AtomicU8 is valid over any byte, and the page is never unmapped.
    unsafe {
        open(start, page)?;
        wipe_on_fork(start, page);
        (*start.cast::<AtomicU8>()).store(1, Ordering::Relaxed);
    }
    if MARK.compare_exchange(ptr::null_mut(), start.cast(), Ordering::Release, Ordering::Relaxed).is_err() {
        // SAFETY: the page made here, which nobody knows: another thread's is the mark.
        unsafe { libc::munmap(start.cast(), page) };
    }
    Ok(())
}

/// Whether this process is a child of the one that owns the devices, made without the handlers that would have forgotten them. No
/// device may be called then.
pub(crate) fn is_forked_child() -> bool {
    let mark = MARK.load(Ordering::Acquire);
    // SAFETY: a mark that is not null points to the page of `mark_process`, which is never unmapped.
    !mark.is_null() && unsafe { &*mark }.load(Ordering::Relaxed) == 0
}

/// Sleeps while the word is `value`, until [`wake`], or for so long at most. May return early.
pub(crate) fn sleep_while(word: &AtomicU32, value: u32, at_most: Option<Duration>) {
    let time = at_most.map(|time| libc::timespec {
        tv_sec: libc::time_t::try_from(time.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: time.subsec_nanos().into(),
    });
    let time = time.as_ref().map_or(ptr::null(), ptr::from_ref);
    // SAFETY: the word and the time outlive the call, which only reads them.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG, value, time) };
}

/// Wakes one who sleeps in [`sleep_while`] on the word.
pub(crate) fn wake(word: &AtomicU32) {
    // SAFETY: only the word's address is used.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, 1) };
}

/// Wakes all who sleep in [`sleep_while`] on the word.
pub(crate) fn wake_all(word: &AtomicU32) {
    let all = libc::c_int::MAX;
    // SAFETY: only the word's address is used.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, all) };
}

/// The time since some moment in the past, to some milliseconds (`CLOCK_MONOTONIC_COARSE`: read in user space, in about 5 ns).
pub(crate) fn coarse_now() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a local of the right type. The clock exists since Linux 2.6.32, so this cannot fail.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut time) };
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

fn limit(which: libc::__rlimit_resource_t) -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointer is to a local of the right type.
    let result = unsafe { libc::getrlimit(which, &raw mut limit) };
    (result == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// `ulimit -v` in bytes, if there is one.
pub(crate) fn address_space_limit() -> Option<u64> {
    limit(libc::RLIMIT_AS)
}

/// How much memory this process may pin, and how much it has pinned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Memlock {
    /// `RLIMIT_MEMLOCK` in bytes; `None` when there is no limit, or the process has the capability `IPC_LOCK`.
    pub limit: Option<u64>,
    /// Bytes pinned by all devices of the process (`VmPin`); a page that two devices pinned counts twice.
    pub pinned: u64,
}

impl Memlock {
    /// Asks the kernel. Where `/proc` is missing, `pinned` is 0 and capabilities are taken as absent.
    #[must_use]
    pub fn now() -> Memlock {
        let mut buffer = [0; 4096];
        let status = read_file(c"/proc/self/status", &mut buffer);
        let pinned = field(status, b"VmPin:").map_or(0, |text| number(text, 10).saturating_mul(1024));
        let capable = field(status, b"CapEff:").is_some_and(|text| number(text, 16) & (1 << CAP_IPC_LOCK) != 0);
        let mut buffer = [0; 256];
        // Only a capability in the first user namespace counts: there the map is the identity over all 32 bits.
        let map = read_file(c"/proc/self/uid_map", &mut buffer);
        let first = field(map, b"").is_some_and(|text| text.ends_with(b"4294967295"));
        Memlock { limit: limit(libc::RLIMIT_MEMLOCK).filter(|_| !(capable && first)), pinned }
    }

    /// Bytes that may still be pinned; `u64::MAX` without a limit.
    #[must_use]
    pub fn allows(&self) -> u64 {
        self.limit.map_or(u64::MAX, |limit| limit.saturating_sub(self.pinned))
    }
}

impl core::fmt::Display for Memlock {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self.limit {
            Some(limit) => write!(f, "memlock limit {} KiB, pinned {} KiB", limit >> 10, self.pinned >> 10),
            None => write!(f, "no memlock limit, pinned {} KiB", self.pinned >> 10),
        }
    }
}

/// Bytes of memory that can be had without swapping: of the machine (`MemAvailable`), and of the container if it has less (the
/// control group at the root of what is seen, version 2). `None` where neither is told.
pub(crate) fn available_memory() -> Option<u64> {
    let mut buffer = [0; 512];
    let machine = field(read_file(c"/proc/meminfo", &mut buffer), b"MemAvailable:").map(|text| number(text, 10) * 1024);
    let mut group = |path| {
        let text = read_file(path, &mut buffer);
        text.first().is_some_and(u8::is_ascii_digit).then(|| number(text, 10))
    };
    let most = group(c"/sys/fs/cgroup/memory.max");
    let left = most.zip(group(c"/sys/fs/cgroup/memory.current")).map(|(most, now)| most.saturating_sub(now));
    machine.into_iter().chain(left).min()
}

/// Reads the beginning of a file without allocating; empty when it cannot.
fn read_file<'a>(path: &core::ffi::CStr, buffer: &'a mut [u8]) -> &'a [u8] {
    // SAFETY: the path ends in a zero, the buffer is as long as said, the descriptor is closed once.
    let got = unsafe {
        let file = libc::open(path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
        if file < 0 {
            return &[];
        }
        let got = libc::read(file, buffer.as_mut_ptr().cast(), buffer.len());
        libc::close(file);
        got
    };
    &buffer[..usize::try_from(got).unwrap_or(0)]
}

/// The rest of the first line that begins with `name`.
fn field<'a>(text: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    text.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(name))
}

/// The first number in `text`, after blanks; 0 when there is none.
fn number(text: &[u8], radix: u32) -> u64 {
    text.iter()
        .skip_while(|byte| byte.is_ascii_whitespace())
        .map_while(|byte| char::from(*byte).to_digit(radix))
        .fold(0, |sum: u64, digit| sum.wrapping_mul(radix.into()).wrapping_add(digit.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_fields_are_read_without_allocating() {
        let text = b"Name:\tkv\nVmPin:\t    2052 kB\nCapEff:\t0000000000004000\n";
        assert_eq!(number(field(text, b"VmPin:").unwrap(), 10), 2052);
        assert_eq!(number(field(text, b"CapEff:").unwrap(), 16), 1 << CAP_IPC_LOCK);
        assert_eq!(field(text, b"VmLck:"), None);
        assert_eq!(number(b" kB", 10), 0);
    }

    #[test]
    fn a_reservation_is_aligned_and_its_pieces_open_and_close() {
        let align = 1 << 21;
        let start = reserve(4 * align, align, Reserve::Nothing).unwrap();
        assert_eq!(start.addr() % align, 0);
        // SAFETY: the second quarter of the reservation just made, which nobody else knows.
        unsafe {
            let piece = start.add(align);
            open(piece, align).unwrap();
            piece.write(7);
            purge(piece, align).unwrap();
            assert_eq!(piece.read(), 0);
            piece.write(8);
            close(piece, align).unwrap();
            open(piece, align).unwrap();
            assert_eq!(piece.read(), 0);
            libc::munmap(start.cast(), 4 * align);
        }
    }

    #[test]
    fn the_parent_is_not_taken_for_a_child_and_the_child_not_for_the_parent() {
        mark_process().unwrap();
        assert!(!is_forked_child());
        // SAFETY: the child only reads a page and leaves.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: leaves without running anything of the parent's.
            unsafe { libc::_exit(i32::from(is_forked_child())) }
        }
        let mut status = 0;
        // SAFETY: waits for the child made above.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(libc::WEXITSTATUS(status), 1);
    }
}
