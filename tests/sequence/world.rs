//! The reference: what the program has done so far, and so what has to be true of the allocator. Knows heaps as a set of blocks
//! and devices; that is all it knows. Uses `held` and `device`.

use super::device::{Attached, FEW, LIMITED};
use super::held::{Held, Root};
use super::operation::{DeviceKind, PLACES};
use rdmalloc::{ArenaInfo, Heap, KeyError, Rdmalloc, Trimmed};
use std::collections::BTreeMap;

/// That something is as it has to be, or what is not.
pub type Check = Result<(), String>;

/// The error of a check, unless it holds.
pub fn check(holds: bool, what: impl FnOnce() -> String) -> Check {
    if holds { Ok(()) } else { Err(what()) }
}

/// The number of the global heap.
pub const GLOBAL: u32 = 0;

/// A heap.
pub struct Place {
    /// Its handles; of the global heap none.
    pub handles: Vec<Heap>,
    /// Whether it serves registered memory or none.
    pub requires: bool,
    /// Whether its free memory is zero.
    pub zero_on_free: bool,
    /// Its devices.
    pub attached: Vec<Attached>,
    /// What may be registered, in bytes.
    pub budget: u64,
    /// The same, or what was registered already when the budget was set.
    allowance: u64,
    /// Whether memory may have been refused since it last caught up.
    pub pending: bool,
    /// How many roots it has.
    pub blocks: usize,
}

impl Place {
    pub fn new(handles: Vec<Heap>, requires: bool, zero_on_free: bool) -> Place {
        let attached = Vec::new();
        let (budget, allowance) = (u64::MAX, u64::MAX);
        Place { handles, requires, zero_on_free, attached, budget, allowance, pending: false, blocks: 0 }
    }

    /// Whether registering may be refused.
    pub fn is_limited(&self) -> bool {
        self.budget != u64::MAX || self.attached.iter().any(Attached::is_excused)
    }

    fn registered(&self) -> usize {
        self.attached.iter().map(|attached| attached.ledger.live_bytes()).sum()
    }

    /// Sets what may be registered.
    pub fn set_budget(&mut self, bytes: u64) {
        self.budget = bytes;
        self.allowance = bytes.max(self.registered() as u64);
    }
}

/// Everything.
pub struct World {
    /// Heaps, and those without a handle that have blocks still.
    pub places: BTreeMap<u32, Place>,
    /// Which of them can be named.
    pub names: [Option<u32>; PLACES],
    /// Memory, by where it begins.
    pub roots: BTreeMap<usize, Root>,
    /// What holds it, with where its memory begins.
    pub held: Vec<(usize, Held)>,
    /// What a thread will free as it ends, by where its memory begins.
    pub left: Vec<(usize, usize)>,
    next_heap: u32,
    next_seed: u8,
}

/// Calls a heap, the global one or another.
macro_rules! on {
    ($place:expr, $heap:ident => $call:expr) => {
        match $place.handles.first() {
            Some($heap) => $call,
            None => {
                let $heap = &Rdmalloc::new();
                $call
            }
        }
    };
}
pub(super) use on;

impl World {
    pub fn new() -> World {
        let places = BTreeMap::from([(GLOBAL, Place::new(Vec::new(), false, false))]);
        let (roots, held, left) = Default::default();
        let mut names = [None; PLACES];
        names[0] = Some(GLOBAL);
        World { places, names, roots, held, left, next_heap: GLOBAL + 1, next_seed: 0 }
    }

    /// A seed for contents.
    pub fn seed(&mut self) -> u8 {
        self.next_seed = self.next_seed.wrapping_mul(5).wrapping_add(1);
        self.next_seed
    }

    /// Gives a number to a new heap.
    pub fn name(&mut self, name: usize, place: Place) -> u32 {
        let heap = self.next_heap;
        self.next_heap += 1;
        self.places.insert(heap, place);
        self.names[name] = Some(heap);
        heap
    }

    /// Takes note of new memory: it must be nobody else's, and registered.
    pub fn adopt(&mut self, start: usize, root: Root, held: Held) -> Check {
        let before = self.roots.range(..root.end).next_back();
        if let Some((other, before)) = before.filter(|(other, before)| before.end > start || **other >= start) {
            let what = format!("{start:x} is handed out to {root:x?} and, at {other:x}, to {before:x?}");
            // Whose it is nobody knows: it is not given back.
            std::mem::forget(held);
            return Err(what);
        }
        self.place(root.heap).blocks += 1;
        self.roots.insert(start, root);
        self.held.push((start, held));
        self.look_up(start)
    }

    /// Takes note that something no longer holds its memory, which is free if it was the last.
    pub fn forget(&mut self, start: usize) -> Check {
        let root = self.roots.get_mut(&start).ok_or("nobody's memory was freed")?;
        root.owners -= 1;
        if root.owners > 0 {
            return Ok(());
        }
        let heap = root.heap;
        self.roots.remove(&start);
        self.place(heap).blocks -= 1;
        self.end_if_empty(heap)
    }

    /// A heap without handles ends with its last block, at once.
    pub fn end_if_empty(&mut self, heap: u32) -> Check {
        let place = self.place(heap);
        if heap == GLOBAL || !place.handles.is_empty() || place.blocks > 0 {
            return Ok(());
        }
        let place = self.places.remove(&heap).expect("it is there");
        for Attached { device, ledger, .. } in &place.attached {
            check(ledger.live() == 0, || format!("a heap has ended, {} registrations are left", ledger.live()))?;
            check(device.key_of_address(0) == Err(KeyError::Detached), || "its device is attached".into())?;
        }
        Ok(())
    }

    pub fn place(&mut self, heap: u32) -> &mut Place {
        self.places.get_mut(&heap).expect("a heap with a block or a name is known")
    }

    /// Whether memory is in a live registration of each device of its heap, as far as it has to be.
    pub fn look_up(&self, start: usize) -> Check {
        let root = &self.roots[&start];
        let place = &self.places[&root.heap];
        for attached in &place.attached {
            for address in [start, root.end - 1] {
                let memory = if attached.kind == DeviceKind::Short { address..address + 1 } else { start..root.end };
                let excused = !place.requires && (place.is_limited() || place.pending);
                match attached.device.key_of_address(address) {
                    Ok(keys) if attached.ledger.covers(keys.lkey, memory) => {}
                    Err(KeyError::NotRegistered(_)) if excused => {}
                    other => {
                        let kind = attached.kind;
                        return Err(format!("{address:x} of {root:x?} at {start:x} has {other:?} on {kind:?}"));
                    }
                }
            }
        }
        Ok(())
    }

    /// Looks all memory of a heap up.
    pub fn look_all_up(&self, heap: u32) -> Check {
        self.roots.iter().filter(|(_, root)| root.heap == heap).try_for_each(|(start, _)| self.look_up(*start))
    }

    /// Whether everything is as it was written.
    pub fn check_contents(&self) -> Check {
        self.held.iter().try_for_each(|(start, held)| held.check(*start, &self.roots[start]))
    }

    /// Whether a heap has registered what its devices say, and no more than it may.
    pub fn check_figures(&mut self, heap: u32) -> Check {
        let place = self.place(heap);
        if heap != GLOBAL && place.handles.is_empty() {
            return Ok(());
        }
        let registered = place.registered() as u64;
        let said = on!(place, heap => heap.registered_bytes());
        check(said == registered, || format!("{said} bytes are said to be registered, {registered} are"))?;
        let allowance = place.allowance;
        check(registered <= allowance, || format!("{registered} bytes are registered, {allowance} may be"))?;
        place.allowance = place.budget.max(registered);
        for Attached { ledger, kind, .. } in &place.attached {
            let (live, bytes) = (ledger.live(), ledger.live_bytes());
            let may = match kind {
                DeviceKind::Few => live <= FEW,
                DeviceKind::Limited => bytes <= LIMITED,
                _ => true,
            };
            check(may, || format!("a device of the kind {kind:?} has {live} registrations, {bytes} bytes"))?;
        }
        place.pending |= place.is_limited();
        Ok(())
    }

    /// Whether a drain pass was exact: what is open has a block, and there are as many blocks as there are.
    pub fn check_trimmed(&mut self, heap: u32, trimmed: &Trimmed) -> Check {
        let place = self.place(heap);
        place.pending &= place.is_limited();
        check(trimmed.busy_threads == 0 && trimmed.stuck_arenas == 0, || format!("{trimmed:?}"))?;
        let arenas: Vec<ArenaInfo> = on!(place, heap => heap.arenas());
        check(arenas.len() == trimmed.open_arenas, || format!("{trimmed:?} but {} arenas", arenas.len()))?;
        let live = trimmed.live.iter().map(|(_, count)| count as usize).sum::<usize>() + trimmed.large_blocks;
        check(live == place.blocks, || format!("{} blocks are in use, not as {trimmed:?} says", place.blocks))?;
        for arena in arenas {
            let block = self.roots.range(..arena.memory.end).next_back();
            let used = block.is_some_and(|(start, _)| *start >= arena.memory.start);
            check(used, || format!("{arena:x?} is empty, and open after a drain pass"))?;
        }
        self.check_contents()?;
        self.look_all_up(heap)
    }
}
