//! Memory that is open and registered before it is needed. Uses what opens arenas; a heap's maintainer calls it.
//!
//! What is taken is counted by span. When it passes a mark that the maintainer has set, the maintainer is called, and opens
//! arenas until there is again as much free as it wants to have. Who allocates meanwhile takes what is left.

use super::{Arenas, Policy, Role, arenas, is_empty};
use crate::arena::{Arena, State};
use crate::error::TakeError;
use crate::region::{Region, SLICE};
use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::Relaxed;
use core::time::Duration;

/// What is taken, and what shall be free.
#[derive(Debug)]
pub(super) struct Headroom {
    /// Bytes in spans that are taken.
    taken: AtomicUsize,
    /// Above so many the maintainer is called.
    mark: AtomicUsize,
    /// Bytes that shall be free in registered arenas; 0 without a maintainer. No rule of retention goes below.
    pub(super) wanted: AtomicUsize,
}

impl Headroom {
    /// Nothing taken, and nothing wanted.
    pub(super) const fn new() -> Headroom {
        Headroom { taken: AtomicUsize::new(0), mark: AtomicUsize::new(usize::MAX), wanted: AtomicUsize::new(0) }
    }
}

/// What became of headroom that was wanted.
#[derive(Debug, Default)]
#[must_use]
pub struct Ahead {
    /// Arenas opened for it.
    pub opened: usize,
    /// Why there is less than was wanted, if there is.
    pub refused: Option<TakeError>,
}

impl Arenas {
    /// A span of so many slices was taken.
    pub(super) fn took(&self, slices: usize) {
        let bytes = slices * SLICE;
        let taken = self.headroom.taken.fetch_add(bytes, Relaxed) + bytes;
        if taken > self.headroom.mark.load(Relaxed) {
            self.bell.call();
        }
    }

    /// So many slices were given back.
    pub(super) fn gave(&self, slices: usize) {
        self.headroom.taken.fetch_sub(slices * SLICE, Relaxed);
    }

    /// Bytes in spans that are taken now.
    #[must_use]
    pub fn taken_bytes(&self) -> usize {
        self.headroom.taken.load(Relaxed)
    }

    /// The time by the heap's clock.
    #[must_use]
    pub fn time(&self) -> Duration {
        Duration::from_nanos(self.now())
    }

    /// Opens arenas until `bytes` are free in arenas that every device has registered; from now on the maintainer is called
    /// when less is. Does nothing for a heap without a device: there, opening is cheap. May call devices.
    pub fn keep_headroom(&self, bytes: usize) -> Ahead {
        let mut ahead = Ahead::default();
        self.headroom.wanted.store(bytes, Relaxed);
        // Not called while the caller is at it anyway.
        self.headroom.mark.store(usize::MAX, Relaxed);
        let Some(region) = Region::existing().filter(|_| bytes > 0) else { return ahead };
        loop {
            // Others who want the role, to attach or for a large block, get it between two arenas.
            let mut role = self.role();
            if role.attached.is_empty() {
                return ahead;
            }
            let taken = self.taken_bytes();
            let free = self.free_registered(&role);
            if free >= bytes {
                self.headroom.mark.store(taken + (free - bytes), Relaxed);
                if self.taken_bytes() <= taken + (free - bytes) {
                    return ahead;
                }
                continue;
            }
            if let Err(error) = self.open_ahead(region, &mut role, bytes - free) {
                ahead.refused = Some(error);
                return ahead;
            }
            ahead.opened += 1;
        }
    }

    /// No more headroom is kept.
    pub fn end_headroom(&self) {
        self.headroom.mark.store(usize::MAX, Relaxed);
        self.headroom.wanted.store(0, Relaxed);
    }

    /// After what was free is gone (the program trims), the next span that is taken calls the maintainer.
    pub(super) fn headroom_is_gone(&self) {
        if self.headroom.wanted.load(Relaxed) > 0 {
            self.headroom.mark.store(0, Relaxed);
        }
    }

    fn free_registered(&self, role: &Role) -> usize {
        let offered = role.attached.iter().filter(|attached| !attached.is_lost());
        let all = offered.fold(0, |all, attached| all | attached.slotted.bit());
        arenas(&self.read()).filter(|arena| arena.is_registered_with(all)).map(Arena::free_bytes).sum()
    }

    /// Opens an arena of the usual size, or of what is `wanted` up to 32 MiB if that is more: all devices willing, or none.
    fn open_ahead(&self, region: &Region, role: &mut Role, wanted: usize) -> Result<(), TakeError> {
        let size = self.next_size(region, role, wanted);
        let (bytes, align) = self.in_whole_pages(region, role, size, 0, 1);
        self.open_exactly(region, role, bytes, align, Policy::Require)
    }

    /// Whether the headroom does without an empty arena. `free`: what is free in registered arenas.
    pub(super) fn can_do_without(&self, arena: &Arena, free: usize) -> bool {
        debug_assert!(is_empty(arena));
        arena.registered.load(Relaxed) == 0 || free - arena.free_bytes().min(free) >= self.headroom.wanted.load(Relaxed)
    }
}

impl Arena {
    fn is_registered_with(&self, devices: u64) -> bool {
        let live = self.word.state() == State::Live && !self.word.is_kept();
        live && self.registered.load(Relaxed) & devices == devices
    }

    /// Bytes that are free, about.
    pub(super) fn free_bytes(&self) -> usize {
        self.free_slices() * SLICE
    }
}
