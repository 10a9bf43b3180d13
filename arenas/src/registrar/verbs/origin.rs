//! Tells the process that made a verbs object from a child of fork, which has a copy of it and must not use it.
//!
//! Uses libc only. A page that the kernel clears in every child (`MADV_WIPEONFORK`, Linux 4.14) holds the number of the
//! process: 0 tells a child that it needs a number of its own. So it also sees children that no `pthread_atfork` handler
//! hears of (raw `clone`), and unlike a comparison of process ids it does not take the first process of a new pid
//! namespace for its parent when both are number 1.

use core::ptr;
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

/// The process in which a value was made: verbs objects are that process's, and a child of fork, which has a copy of the value,
/// must not use them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Origin(Mark);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mark {
    /// The number in the page.
    Number(u64),
    /// The process id, where the kernel has no such page.
    Pid(u32),
}

/// The page: its first word is the number of this process, or 0.
static PAGE: AtomicPtr<AtomicU64> = AtomicPtr::new(ptr::null_mut());

/// The last number that was given out. Ordinary memory: a child goes on from its parent's value, so its numbers are higher
/// than any that it can have inherited.
static LAST: AtomicU64 = AtomicU64::new(0);

impl Origin {
    /// This process.
    #[must_use]
    pub fn here() -> Origin {
        let Some(number) = page() else { return Origin(Mark::Pid(std::process::id())) };
        let seen = number.load(Ordering::Acquire);
        if seen != 0 {
            return Origin(Mark::Number(seen));
        }
        let fresh = LAST.fetch_add(1, Ordering::Relaxed) + 1;
        // Two threads may come here at once: the first decides.
        let decided = number.compare_exchange(0, fresh, Ordering::AcqRel, Ordering::Acquire);
        Origin(Mark::Number(decided.map_or_else(|other| other, |_| fresh)))
    }

    /// Whether this is still that process, not a child of it.
    #[must_use]
    pub fn is_here(self) -> bool {
        match self.0 {
            Mark::Number(_) => self == Origin::here(),
            Mark::Pid(pid) => pid == std::process::id(),
        }
    }
}

/// The page, made at the first call and kept for ever. `None` where the kernel refuses.
///
/// No `OnceLock`: a child that was forked while another thread was inside it would wait for ever.
fn page() -> Option<&'static AtomicU64> {
    let mut page = PAGE.load(Ordering::Acquire);
    if page.is_null() {
        let fresh = map_page()?;
        page = match PAGE.compare_exchange(ptr::null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => fresh,
            Err(first) => {
                // SAFETY: mapped by this call, with this length, and never shown to anyone.
                unsafe { libc::munmap(fresh.cast(), size_of::<AtomicU64>()) };
                first
            }
        };
    }
    // SAFETY: PAGE holds null or a page from `map_page`, which is aligned, readable and writable, and never unmapped. Zeros
    // are a valid AtomicU64, and it is only used as one.
    Some(unsafe { &*page })
}

/// Maps a page of zeros (mmap rounds the length up to one) that children see as zeros again.
fn map_page() -> Option<*mut AtomicU64> {
    let (len, prot) = (size_of::<AtomicU64>(), libc::PROT_READ | libc::PROT_WRITE);
    // SAFETY: a new mapping, where the kernel likes; nothing else is touched.
    unsafe {
        let page = libc::mmap(ptr::null_mut(), len, prot, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0);
        if page == libc::MAP_FAILED {
            return None;
        }
        if libc::madvise(page, len, libc::MADV_WIPEONFORK) != 0 {
            libc::munmap(page, len);
            return None;
        }
        Some(page.cast())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Forks, and returns what `child` answers there.
    fn in_child(child: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child only runs `child`, which calls nothing but this module, and ends at once.
        match unsafe { libc::fork() } {
            -1 => panic!("fork: {}", std::io::Error::last_os_error()),
            // SAFETY: ends the child without running anything of the parent's.
            0 => unsafe { libc::_exit(i32::from(!child())) },
            pid => {
                let mut status = -1;
                // SAFETY: `pid` is a child of ours, `status` is ours.
                assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
                status == 0
            }
        }
    }

    #[test]
    fn child_and_grandchild_are_not_here() {
        let parent = Origin::here();
        assert!(parent.is_here());
        assert!(in_child(|| {
            let child = Origin::here();
            !parent.is_here()
                && child.is_here()
                && in_child(|| !parent.is_here() && !child.is_here() && Origin::here().is_here())
                && child.is_here()
        }));
        assert!(parent.is_here());
    }

    #[test]
    fn child_is_not_here_by_its_process_id_either() {
        let parent = Origin(Mark::Pid(std::process::id()));
        assert!(parent.is_here());
        assert!(in_child(|| !parent.is_here()));
    }
}
