//! What can be seen of a heap's arenas. Reads; changes nothing.

use super::counts::{Failures, Refusals, Times};
use super::{Arenas, arenas};
use crate::arena::{Arena, State};
use crate::device::Device;
use crate::numa::{self, Placed};
use crate::pages::{Fallback, Pages, Resident};
use crate::region::{Region, SLICE};
use crate::registrar::Keys;
use core::ops::Range;
use core::sync::atomic::Ordering::Relaxed;

/// What a heap has, and has done. What is counted since the start never falls.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct ArenaStats {
    /// Arenas that are open.
    pub arenas: usize,
    /// Their bytes.
    pub open_bytes: usize,
    /// Bytes in spans that are taken.
    pub taken_bytes: usize,
    /// Spans that are taken.
    pub spans: usize,
    /// Of the open arenas, those without a span: kept for the next demand.
    pub retained_arenas: usize,
    /// Their bytes.
    pub retained_bytes: usize,
    /// Of the open arenas, those that are not registered with every device of the heap that is not lost.
    pub unregistered_arenas: usize,
    /// Their bytes.
    pub unregistered_bytes: usize,
    /// Arenas that are being opened.
    pub opening_arenas: usize,
    /// Arenas that are being closed.
    pub closing_arenas: usize,
    /// Arenas that a device would not let go of; kept for ever.
    pub stuck_arenas: usize,
    /// Their bytes.
    pub stuck_bytes: usize,
    /// Bytes registered, summed over the devices; of arenas that are stuck as well.
    pub registered_bytes: usize,
    /// Registrations there are, over all devices.
    pub registered: u64,
    /// Arenas opened since the start.
    pub opened: u64,
    /// Registrations made since the start, over all devices.
    pub registrations: u64,
    /// Registrations ended since the start.
    pub deregistrations: u64,
    /// Registrations refused since the start, by devices and by limits.
    pub refusals: u64,
    /// The same by the reason.
    pub refused: Refusals,
    /// What else failed since the start.
    pub failures: Failures,
    /// How long opening arenas took, since the start.
    pub opening: Times,
    /// How long closing arenas took, since the start.
    pub closing: Times,
    /// Bytes given back to the kernel by purging since the start.
    pub purged_bytes: u64,
    /// Of the open bytes, those in pages of the hugetlb pool.
    pub hugetlb_bytes: usize,
    /// Of the open arenas, those that should have had pages of the hugetlb pool, or larger ones: why not, `arenas()` tells.
    pub fallen_back_arenas: usize,
}

/// One arena, for those who look.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ArenaInfo {
    /// Its addresses.
    pub memory: Range<usize>,
    /// Where it is in its life.
    pub state: State,
    /// Spans that are taken in it.
    pub spans: usize,
    /// Bytes in these spans.
    pub taken_bytes: usize,
    /// What pages it has.
    pub pages: Pages,
    /// Why it has not those that the heap asked for when it was opened, if it has not.
    pub fallback: Option<Fallback>,
    /// Whether a device has pinned it (or its pages are of the hugetlb pool): then none of it is given back while it is open.
    pub pinned: bool,
    /// On which memory node it was placed.
    pub placed: Placed,
    /// Its keys on each device that has it registered; of its first piece where there are several.
    pub keys: Vec<(Device, Keys)>,
}

impl ArenaInfo {
    /// What the kernel says is there: how much of it is in memory, and in huge pages.
    ///
    /// # Errors
    ///
    /// As [`Resident::now`].
    pub fn resident(&self) -> std::io::Result<Resident> {
        Resident::now(&self.memory)
    }

    /// On which memory nodes it is: bytes in memory, by node. Asks for each base page (move_pages(2)), so it takes its time.
    ///
    /// # Errors
    ///
    /// Of the system: `ENOSYS`, the kernel knows no nodes; `EPERM`, a container forbids to ask.
    pub fn nodes(&self) -> std::io::Result<Vec<(u32, usize)>> {
        numa::nodes_of(&self.memory)
    }
}

impl Arenas {
    /// Figures of all arenas together. Allocates nothing, waits for no device: one walk over the list of arenas.
    #[must_use]
    pub fn stats(&self) -> ArenaStats {
        let list = self.read();
        let (counts, held, refused) = (&self.counts, self.limits.held.now(), self.counts.refusals());
        let mut stats = ArenaStats {
            opened: list.opened,
            opening_arenas: counts.opening_now.load(Relaxed) as usize,
            closing_arenas: counts.closing_now.load(Relaxed) as usize,
            registered_bytes: held.bytes as usize,
            registered: held.registrations,
            registrations: counts.registrations.load(Relaxed),
            deregistrations: counts.deregistrations.load(Relaxed),
            refusals: refused.total(),
            refused,
            failures: counts.failures(),
            opening: counts.opening.times(),
            closing: counts.closing.times(),
            purged_bytes: counts.purged.load(Relaxed),
            ..ArenaStats::default()
        };
        for arena in arenas(&list) {
            if arena.word.state() == State::Stuck || arena.word.is_kept() {
                stats.stuck_arenas += 1;
                stats.stuck_bytes += arena.len();
                continue;
            }
            stats.arenas += 1;
            stats.open_bytes += arena.len();
            stats.taken_bytes += arena.taken_slices() * SLICE;
            let spans = arena.word.live_spans();
            stats.spans += spans;
            if spans == 0 {
                stats.retained_arenas += 1;
                stats.retained_bytes += arena.len();
            }
            let (pages, fallback) = arena.pages();
            stats.hugetlb_bytes += if pages.is_hugetlb() { arena.len() } else { 0 };
            stats.fallen_back_arenas += usize::from(fallback.is_some());
            if !self.is_registered(arena) {
                stats.unregistered_arenas += 1;
                stats.unregistered_bytes += arena.len();
            }
        }
        stats
    }

    /// Each arena, lowest address first.
    #[must_use]
    pub fn arenas(&self) -> Vec<ArenaInfo> {
        // Nothing opens or closes meanwhile, and so nothing is allocated under the list lock.
        let role = self.role();
        let devices: Vec<_> = role.attached.iter().map(|attached| attached.slotted.device).collect();
        let Some(region) = Region::existing() else { return Vec::new() };
        let mut all = Vec::new();
        let mut at = self.read().head;
        while at != 0 {
            let arena = Arena::at(at as usize - 1);
            let memory = arena.memory(region);
            let keys = |device: &Device| Some((*device, device.key_of_address(memory.start).ok()?));
            all.push(ArenaInfo {
                state: arena.word.state(),
                spans: arena.word.live_spans(),
                taken_bytes: arena.taken_slices() * SLICE,
                pages: arena.pages().0,
                fallback: arena.pages().1,
                pinned: arena.word.is_pinned(),
                placed: arena.placed(),
                keys: devices.iter().filter_map(keys).collect(),
                memory,
            });
            at = arena.next.load(Relaxed);
        }
        all
    }
}
