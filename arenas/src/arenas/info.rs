//! What can be seen of a heap's arenas. Reads; changes nothing.

use super::{Arenas, arenas};
use crate::arena::{Arena, State};
use crate::device::Device;
use crate::region::{Region, SLICE};
use crate::registrar::Keys;
use core::ops::Range;
use core::sync::atomic::Ordering::Relaxed;

/// What a heap has, and has done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
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
    /// Bytes registered, summed over the devices.
    pub registered_bytes: usize,
    /// Arenas that a device would not let go of; kept for ever.
    pub stuck_arenas: usize,
    /// Arenas opened since the start.
    pub opened: u64,
    /// Registrations made since the start, over all devices.
    pub registrations: u64,
    /// Registrations ended since the start.
    pub deregistrations: u64,
    /// Registrations refused since the start.
    pub refusals: u64,
    /// Bytes given back to the kernel by purging since the start.
    pub purged_bytes: u64,
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
    /// Its keys on each device that has it registered; of its first piece where there are several.
    pub keys: Vec<(Device, Keys)>,
}

impl Arenas {
    /// Figures of all arenas together.
    #[must_use]
    pub fn stats(&self) -> ArenaStats {
        let list = self.read();
        let mut stats = ArenaStats {
            opened: list.opened,
            registrations: self.counts.registrations.load(Relaxed),
            deregistrations: self.counts.deregistrations.load(Relaxed),
            refusals: self.counts.refusals.load(Relaxed),
            purged_bytes: self.counts.purged.load(Relaxed),
            ..ArenaStats::default()
        };
        for arena in arenas(&list) {
            if arena.word.state() == State::Stuck || arena.word.is_kept() {
                stats.stuck_arenas += 1;
                continue;
            }
            stats.arenas += 1;
            stats.open_bytes += arena.len();
            stats.taken_bytes += arena.taken_slices() * SLICE;
            stats.spans += arena.word.live_spans();
            stats.registered_bytes += arena.len() * arena.registered.load(Relaxed).count_ones() as usize;
        }
        stats
    }

    /// Each arena, lowest address first.
    #[must_use]
    pub fn arenas(&self) -> Vec<ArenaInfo> {
        // Nothing opens or closes meanwhile, and so nothing is allocated under the list lock.
        let role = self.role.lock();
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
                keys: devices.iter().filter_map(keys).collect(),
                memory,
            });
            at = arena.next.load(Relaxed);
        }
        all
    }
}
