//! What pages an arena has: what a heap asks for ([`Pages`]), why an arena has others ([`Fallback`]), and what the kernel says
//! is there ([`Resident`]). Uses `os`.

use crate::os::{self, Advice, NotLarge};
use core::fmt;
use core::ops::Range;
use std::io;

/// Which pages back a heap's memory.
///
/// Registering 64 MiB takes some thirty times as long in pages of 4 KiB as in pages of 2 MiB, and an adapter's table of
/// translations is 512 times as long.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub enum Pages {
    /// Base pages, of which the kernel makes huge ones where it can: memory that is to be pinned is advised so
    /// (`MADV_HUGEPAGE`) before it is registered, which faults it in. Where the system's setting
    /// (`/sys/kernel/mm/transparent_hugepage/enabled`) is `never`, they stay base pages. Memory without a device is left to
    /// that setting.
    #[default]
    Transparent,
    /// Base pages only (`MADV_NOHUGEPAGE`), whatever the setting is.
    Base,
    /// Pages of 2 MiB of the system's hugetlb pool (`vm.nr_hugepages`).
    ///
    /// They are faulted in when an arena is opened, device or not, and given back when it is closed: never in between. A child of
    /// fork has them only as far as the pool has as many more; without, touching them kills it, and a fork while they are
    /// pinned fails (`ENOMEM`): so rather for heaps that children do not use.
    Huge2M,
    /// Pages of 1 GiB of the hugetlb pool (`/sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages`), else of 2 MiB. As
    /// [`Huge2M`](Self::Huge2M); arenas have whole GiB, as far as limits allow so large ones.
    Huge1G,
}

impl Pages {
    const ALL: [Pages; 4] = [Pages::Transparent, Pages::Base, Pages::Huge2M, Pages::Huge1G];

    /// log2 of the page's bytes, for pages of the hugetlb pool.
    pub(crate) fn shift(self) -> Option<u32> {
        match self {
            Pages::Transparent | Pages::Base => None,
            Pages::Huge2M => Some(21),
            Pages::Huge1G => Some(30),
        }
    }

    /// What memory of this kind comes in: the bytes of a page of the hugetlb pool, or of a base page.
    #[must_use]
    pub fn bytes(self) -> usize {
        self.shift().map_or_else(os::page_size, |shift| 1 << shift)
    }

    /// Whether they come from the hugetlb pool.
    #[must_use]
    pub fn is_hugetlb(self) -> bool {
        self.shift().is_some()
    }

    /// This kind of hugetlb page, and the smaller ones that serve where it cannot.
    pub(crate) fn hugetlb(self) -> &'static [Pages] {
        match self {
            Pages::Transparent | Pages::Base => &[],
            Pages::Huge2M => &[Pages::Huge2M],
            Pages::Huge1G => &[Pages::Huge1G, Pages::Huge2M],
        }
    }

    /// From the number that `as u8` gives.
    pub(crate) fn from_number(number: u8) -> Pages {
        Pages::ALL.get(usize::from(number)).copied().unwrap_or_default()
    }
}

/// Why an arena has other pages than its heap asks for ([`Pages::Huge2M`], [`Pages::Huge1G`]): those of the hugetlb pool were
/// not to be had.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Fallback {
    /// The arena is not a multiple of the page: no address space for one that is, or a limit does not allow so much.
    Size,
    /// A device of the heap registers less than a page at once.
    Device,
    /// The system has refused, with this code: `ENOMEM`, the pool has too few free pages; `EINVAL`, there are none of this size;
    /// `EFAULT`, the pages were reserved but are not there, as under a cgroup's limit or with a policy of nodes.
    System(i32),
}

impl Fallback {
    /// As a number that is not 0; 0 is none.
    pub(crate) fn number(this: Option<Fallback>) -> u32 {
        match this {
            None => 0,
            Some(Fallback::Size) => 1,
            Some(Fallback::Device) => 2,
            Some(Fallback::System(code)) => 3 + code.unsigned_abs(),
        }
    }

    /// From the number.
    pub(crate) fn from_number(number: u32) -> Option<Fallback> {
        match number {
            0 => None,
            1 => Some(Fallback::Size),
            2 => Some(Fallback::Device),
            code => Some(Fallback::System((code - 3) as i32)),
        }
    }
}

impl fmt::Display for Fallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fallback::Size => f.write_str("the arena is no multiple of the page: a limit allows no larger one"),
            Fallback::Device => f.write_str("a device registers less than a page at once"),
            Fallback::System(libc::ENOMEM) => f.write_str(
                "the hugetlb pool has too few free pages: raise vm.nr_hugepages (or nr_hugepages below \
                 /sys/kernel/mm/hugepages), at boot for pages of 1 GiB",
            ),
            Fallback::System(libc::EINVAL) => f.write_str(
                "the kernel has no hugetlb pages of this size (see /sys/kernel/mm/hugepages), or cannot fault them in (Linux 5.14)",
            ),
            Fallback::System(code) => {
                write!(f, "the hugetlb pages are not to be had: {}", io::Error::from_raw_os_error(*code))
            }
        }
    }
}

/// Opens a reserved range with base pages, advised as `pages` says. Nothing is faulted in.
///
/// # Safety
///
/// As [`os::open`].
pub(crate) unsafe fn open_base(start: *mut u8, len: usize, pages: Pages) -> io::Result<()> {
    // SAFETY: the caller's promise.
    unsafe { os::open(start, len) }?;
    if pages == Pages::Base {
        // SAFETY: just opened.
        unsafe { os::advise(start, len, Advice::Base) };
    }
    Ok(())
}

/// Opens a reserved range with pages of the hugetlb pool, calls `place`, and faults them in: all of them, or the range is as it
/// was.
///
/// A page that was reserved may still not be there when it is touched (a cgroup's limit, a node without any), which would be a
/// signal later; so a range that cannot be faulted in is none.
///
/// # Safety
///
/// As [`os::open_large`]; `pages` are hugetlb pages.
pub(crate) unsafe fn open_hugetlb(
    start: *mut u8,
    len: usize,
    shift: u32,
    place: impl FnOnce(),
) -> Result<(), NotLarge> {
    // SAFETY: the caller's promise.
    unsafe { os::open_large(start, len, shift) }?;
    place();
    // SAFETY: just opened; and nobody has it yet, so it may be closed again.
    unsafe {
        os::populate(start, len).map_err(|error| match os::close(start, len) {
            Ok(()) => NotLarge::Refused(error),
            Err(_) => NotLarge::Lost(error),
        })
    }
}

/// Asks for huge pages before a range is pinned, if the heap's pages are transparent, and faults them in: wishes, since pinning does so
/// too, and says why it cannot.
///
/// What pinning itself faults in comes from memory that the kernel never moves, of which it has little at hand: huge pages of it
/// took up to four times as long. To fault in before is to walk all pages twice, though, which base pages pay for with 15 %.
///
/// # Safety
///
/// The range is page-aligned and writable, in a reservation of ours.
pub(crate) unsafe fn advise(start: *mut u8, len: usize, pages: Pages) {
    if pages == Pages::Transparent {
        // SAFETY: the caller's promise.
        unsafe { os::advise(start, len, Advice::Huge) };
        if os::has_huge_pages() {
            // SAFETY: as above.
            let _ = unsafe { os::populate(start, len) };
        }
    }
}

/// What the kernel says is in memory of some addresses (`/proc/self/smaps`).
///
/// The kernel tells it by mapping, and takes neighbours with the same properties for one. So the figures are of the mappings that
/// overlap the addresses, whose length is `of`: compare with that.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Resident {
    /// Bytes of the mappings that were looked at.
    pub of: usize,
    /// Bytes of them that are in memory.
    pub resident: usize,
    /// Of these, bytes in huge pages: transparent ones, or of the hugetlb pool.
    pub huge: usize,
    /// Bytes of them that are swapped out.
    pub swapped: usize,
}

impl Resident {
    /// Asks the kernel about these addresses: one walk over all the process's mappings, so for people, not for every message.
    ///
    /// # Errors
    ///
    /// Where there is no `/proc`.
    pub fn now(memory: &Range<usize>) -> io::Result<Resident> {
        Ok(Resident::parse(&std::fs::read_to_string("/proc/self/smaps")?, memory))
    }

    fn parse(smaps: &str, memory: &Range<usize>) -> Resident {
        let mut sum = Resident::default();
        let mut counts = false;
        for line in smaps.lines() {
            let mut words = line.split_ascii_whitespace();
            let Some(name) = words.next() else { continue };
            let Some(name) = name.strip_suffix(':') else {
                let bound = |text: &str| usize::from_str_radix(text, 16).ok();
                let bounds = name.split_once('-').and_then(|(from, to)| bound(from).zip(bound(to)));
                counts = bounds.is_some_and(|(from, to)| from < memory.end && memory.start < to);
                sum.of += bounds.filter(|_| counts).map_or(0, |(from, to)| to - from);
                continue;
            };
            let bytes = words.next().and_then(|number| number.parse::<usize>().ok()).unwrap_or(0) << 10;
            match name {
                _ if !counts => {}
                "Rss" => sum.resident += bytes,
                "AnonHugePages" => sum.huge += bytes,
                // Not part of Rss.
                "Private_Hugetlb" | "Shared_Hugetlb" => {
                    (sum.resident, sum.huge) = (sum.resident + bytes, sum.huge + bytes)
                }
                "Swap" => sum.swapped += bytes,
                _ => {}
            }
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_and_kinds_survive_their_numbers() {
        for fallback in [None, Some(Fallback::Size), Some(Fallback::Device), Some(Fallback::System(libc::ENOMEM))] {
            assert_eq!(Fallback::from_number(Fallback::number(fallback)), fallback);
        }
        assert!(Pages::ALL.iter().all(|pages| Pages::from_number(*pages as u8) == *pages));
    }

    #[test]
    fn figures_are_those_of_the_mappings_that_overlap() {
        let smaps = "7f0000000000-7f0000400000 rw-p 00000000 00:00 0 \nSize:  4096 kB\nRss:  3072 kB\nAnonHugePages:  2048 kB\n\
                     Swap:  512 kB\nVmFlags: rd wr mr\n7f0000400000-7f0000600000 rw-p 00000000 00:0f 1  /anon_hugepage (deleted)\n\
                     Rss:  0 kB\nPrivate_Hugetlb:  2048 kB\n7f0000600000-7f0000601000 r--p 00000000 00:00 0 \nRss:  4 kB\n";
        let base = 0x7f00_0000_0000;
        let found = Resident::parse(smaps, &(base + 4096..base + (6 << 20)));
        assert_eq!(found, Resident { of: 6 << 20, resident: 5 << 20, huge: 4 << 20, swapped: 512 << 10 });
        assert_eq!(Resident::parse(smaps, &(base + (6 << 20)..base + (7 << 20))).resident, 4096);
    }
}
