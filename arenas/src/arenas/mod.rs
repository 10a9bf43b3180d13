//! All arenas of one heap: opens them, chooses one for a span, registers them with the heap's devices, closes them. The top
//! of this crate; uses everything below.
//!
//! Two things are held while arenas change, and neither is a lock that a span's taker or giver ever waits for long:
//!
//! - the *role*: whoever opens, closes, attaches or detaches has it, alone. Devices are called under the role, so the role's
//!   holder may allocate, and must have somewhere else to allocate from (the caller arranges it); others who need a new arena
//!   wait for the role;
//! - the *list lock*: guards the links between arenas, held for moments, and never while a device or the system is called.
//!
//! The order of closing, rule 1 of the crate: no new spans (the word leaves Live), no live span, keys hidden, deregistered
//! with every device, and only then unmapped.

mod attach;
mod counts;
mod detach;
mod fork;
mod growth;
mod headroom;
mod info;
mod limits;
mod memory;
mod notice;
mod placement;
mod purge;
mod retain;
mod settings;
#[cfg(test)]
mod tests;
mod together;

use crate::Access;
use crate::arena::{Arena, GLOBAL_TAG, PIECE, State};
use crate::bell::Bell;
use crate::error::TakeError;
use crate::links;
use crate::os::{self, Memlock};
use crate::parallel::{self, Helper};
use crate::region::{CHUNK, Region, SLICE, SLICES_PER_CHUNK};
use crate::sync::{Lock, LockGuard, ReadGuard, SharedLock, WriteGuard, this_thread};
use attach::Attached;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use counts::Counts;
pub use counts::{DeviceStats, Failures, Refusals, Times};
pub use headroom::Ahead;
use headroom::Headroom;
pub use info::{ArenaInfo, ArenaStats};
use limits::Counted;
pub use limits::{CaughtUp, Policy};
use memory::NoMemory;
use notice::Notices;
pub use notice::{Event, Listener};
pub use retain::{Clock, Retention};
use settings::Settings;
use std::time::Instant;

/// How a heap's arenas are made. Fixed for the heap's life.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// What devices and peers may do with the memory.
    pub access: Access,
    /// What happens to memory that a device does not register, unless [`Arenas::set_policy`] says otherwise.
    pub policy: Policy,
    /// Whether children of fork have this heap: then a device whose library would hide it from them is refused, and a fork copies
    /// what is pinned. Otherwise its memory is not in children, and costs a fork nothing.
    pub serves_children: bool,
    /// A number of the owner's, found again from any address by [`tag_of`].
    pub tag: u32,
}

impl Config {
    /// The tag of the process's global heap. That memory is its, an error says ([`NotRegistered`](crate::NotRegistered)).
    pub const GLOBAL_TAG: u32 = GLOBAL_TAG;
}

/// A run of slices, taken from an arena.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Span {
    /// Where it begins; a multiple of [`SLICE`].
    pub address: usize,
    /// How many slices it has.
    pub slices: usize,
    /// Whether all its bytes are zero.
    pub zero: bool,
}

/// How many arenas had been opened when a span was not to be had.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Seen(u64);

/// The arenas of one heap.
#[derive(Debug)]
pub struct Arenas {
    config: Config,
    list: SharedLock<List>,
    role: Lock<Role>,
    /// Which thread has the role ([`this_thread`]), 0: none. So a child of fork knows whether it is a copy of that thread.
    role_holder: AtomicUsize,
    /// This process is a child of fork that does not have the heap.
    gone: AtomicBool,
    /// Bytes in arenas that are not vacant.
    open: AtomicUsize,
    counts: Counts,
    limits: Counted,
    notices: Notices,
    settings: Settings,
    headroom: Headroom,
    bell: &'static Bell,
    /// For the threads that register with several devices at once.
    helper: Helper,
}

#[derive(Debug)]
struct List {
    /// The arena at the lowest address: 1 + its first chunk.
    head: u32,
    /// How many arenas were opened ever; tells a waiter whether somebody opened one meanwhile.
    opened: u64,
}

#[derive(Debug)]
struct Role {
    attached: Vec<Attached>,
}

/// The role, which its holder has alone.
#[must_use]
struct RoleGuard<'a> {
    role: LockGuard<'a, Role>,
    holder: &'a AtomicUsize,
}

impl Drop for RoleGuard<'_> {
    fn drop(&mut self) {
        self.holder.store(0, Relaxed);
    }
}

impl Deref for RoleGuard<'_> {
    type Target = Role;
    fn deref(&self) -> &Role {
        &self.role
    }
}

impl DerefMut for RoleGuard<'_> {
    fn deref_mut(&mut self) -> &mut Role {
        &mut self.role
    }
}

/// What a pass has closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Closed {
    /// Arenas closed.
    pub arenas: usize,
    /// Their bytes, given back to the kernel.
    pub bytes: usize,
    /// Arenas that a device would not let go of; they stay mapped.
    pub stuck: usize,
}

/// The first arena: a program that needs little shall pin little, which faults it in.
const FIRST_ARENA: usize = CHUNK;
/// Arenas are half as large as what is open, up to this: a few steps, and arenas are few all the same.
const LARGEST_STEP: usize = 32 << 20;
/// The largest arena that is opened for small blocks.
const LARGEST_ARENA: usize = 16 << 30;

impl Arenas {
    /// No arenas yet, and no maintainer ever.
    #[must_use]
    pub const fn new(config: Config) -> Arenas {
        static NOBODY: Bell = Bell::new();
        Arenas::with_bell(config, &NOBODY)
    }

    /// No arenas yet; a maintainer sleeps at this bell, if there is one.
    #[must_use]
    pub const fn with_bell(config: Config, bell: &'static Bell) -> Arenas {
        Arenas {
            config,
            list: SharedLock::new(List { head: 0, opened: 0 }),
            role: Lock::new(Role { attached: Vec::new() }),
            role_holder: AtomicUsize::new(0),
            gone: AtomicBool::new(false),
            open: AtomicUsize::new(0),
            counts: Counts::new(),
            limits: Counted::new(),
            notices: Notices::new(),
            settings: Settings::new(config.policy),
            headroom: Headroom::new(),
            bell,
            helper: parallel::no_help,
        }
    }

    /// The same, with a helper for the threads that register with several devices at once: needed where what such a thread
    /// allocates would come from these arenas.
    #[must_use]
    pub const fn helped_by(mut self, helper: Helper) -> Arenas {
        self.helper = helper;
        self
    }

    /// How they are made.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    fn read(&self) -> ReadGuard<'_, List> {
        self.list.read()
    }

    /// Waits for the role.
    fn role(&self) -> RoleGuard<'_> {
        let role = self.role.lock();
        self.role_holder.store(this_thread(), Relaxed);
        RoleGuard { role, holder: &self.role_holder }
    }

    /// All arenas. Only the role's holder changes the list, so it walks it without its lock: and so nothing is allocated under
    /// that.
    fn all(&self, _: &Role) -> impl Iterator<Item = &'static Arena> + use<> {
        arenas_from(self.read().head)
    }

    /// Takes a span of `slices`, at a multiple of `align` slices (a power of two). Opens an arena when none has room.
    ///
    /// # Errors
    ///
    /// When there is no memory, or a device refuses a new arena and the heap requires registration.
    pub fn take(&self, slices: usize, align: usize) -> Result<Span, TakeError> {
        loop {
            match self.try_take(slices, align) {
                Ok(span) => return Ok(span),
                Err(seen) => self.make_room(seen, slices, align)?,
            }
        }
    }

    /// Opens an arena that has room for a span, unless somebody has opened one since `seen`. May call devices.
    ///
    /// # Errors
    ///
    /// As [`take`](Self::take).
    pub fn make_room(&self, seen: Seen, slices: usize, align: usize) -> Result<(), TakeError> {
        let result = self.try_make_room(seen, slices, align);
        result.inspect_err(|error| self.counts.not_opened(error))
    }

    fn try_make_room(&self, seen: Seen, slices: usize, align: usize) -> Result<(), TakeError> {
        if self.is_gone() {
            return Err(TakeError::NotInChild);
        }
        let wanted = slices.saturating_mul(SLICE);
        let region = Region::get().map_err(|source| TakeError::NoMemory { wanted, source })?;
        if wanted > region.len() || align > region.len() / SLICE {
            return Err(TakeError::AddressSpace { wanted, region: region.len() });
        }
        let mut role = self.role();
        let opened = self.read().opened;
        if opened == seen.0 { self.open_arena(region, &mut role, slices, align, self.policy()) } else { Ok(()) }
    }

    /// The same for who has another way: only if every device registers the arena, whatever the policy, and that it failed is not
    /// counted. Whether it did, or somebody has opened an arena. Devices are not tried where they have refused one that is open.
    pub fn make_registered_room(&self, seen: Seen, slices: usize, align: usize) -> bool {
        let Some(bytes) = slices.checked_mul(SLICE).and_then(|bytes| bytes.checked_next_multiple_of(CHUNK)) else {
            return false;
        };
        let fits = |region: &&Region| bytes <= region.len() && align <= region.len() / SLICE;
        let Some(region) = Region::existing().filter(fits) else { return false };
        if self.is_gone() || self.has_unregistered() {
            return false;
        }
        let mut role = self.role();
        if self.read().opened != seen.0 {
            return true;
        }
        let may =
            |attached: &Attached| attached.is_lost() || self.may_register(attached, attached.amount(bytes)).is_ok();
        role.attached.iter().all(may) && self.open_arena(region, &mut role, slices, align, Policy::Require).is_ok()
    }

    /// Whether one of the arenas has about so many slices free, wherever they lie in it.
    #[must_use]
    pub fn has_free(&self, slices: usize) -> bool {
        arenas(&self.read()).any(|arena| arena.word.state() == State::Live && arena.free_slices() >= slices)
    }

    /// Whether a device is attached.
    #[must_use]
    pub fn has_devices(&self) -> bool {
        self.limits.attached.load(Relaxed) != 0
    }

    fn take_from(&self, region: &Region, arena: &Arena, slices: usize, align: usize) -> Option<Span> {
        if arena.free_slices() < slices || !arena.word.take_span() {
            return None;
        }
        let Some((slice, zero)) = arena.claim(region, slices, align, PIECE) else {
            self.give_span(arena);
            return None;
        };
        self.took(slices);
        // A peer may have written what nobody here has touched.
        let zero = zero && !self.config.access.is_remote_writable();
        Some(Span { address: region.base() + slice * SLICE, slices, zero })
    }

    /// Gives back a span that [`take`](Self::take) returned. `address` and `slices` as they are after growing and shrinking.
    pub fn give(&self, address: usize, slices: usize) {
        let Some((region, arena)) = Region::existing().zip(Arena::of(address)) else { return };
        let first = (address - region.base()) / SLICE;
        arena.free(region, first..first + slices);
        self.gave(slices);
        self.purge_if_due(region, arena);
        self.give_span(arena);
    }

    fn give_span(&self, arena: &Arena) {
        if arena.word.give_span(|| arena.empty_since.store(self.now(), Relaxed)) {
            self.became_empty();
        }
    }

    /// Lengthens a span in place, if the slices behind it are free: whether what was added is zero, or `None`.
    #[must_use]
    pub fn grow(&self, address: usize, old: usize, new: usize) -> Option<bool> {
        let region = Region::existing()?;
        let arena = Arena::of(address)?;
        if arena.word.is_kept() {
            return None;
        }
        let first = (address - region.base()) / SLICE;
        if crosses_piece(arena, first, new) {
            return None;
        }
        let zero = arena.claim_exactly(region, first + old..first + new)?;
        self.took(new - old);
        Some(zero && !self.config.access.is_remote_writable())
    }

    /// Gives back the tail of a span beyond `new` slices; `new` is at least 1. Whether it did: a span that was too long for
    /// one registration may lie where a shorter one must not, and is left as it is then.
    #[must_use]
    pub fn shrink(&self, address: usize, old: usize, new: usize) -> bool {
        let Some((region, arena)) = Region::existing().zip(Arena::of(address)) else { return false };
        let first = (address - region.base()) / SLICE;
        if crosses_piece(arena, first, new) {
            return false;
        }
        arena.free(region, first + new..first + old);
        self.gave(old - new);
        self.purge_if_due(region, arena);
        true
    }

    /// Opens an arena that has room for `slices`, registers it with every device, and puts it into the list.
    /// `policy`: what becomes of it if a device refuses.
    fn open_arena(
        &self,
        region: &Region,
        role: &mut Role,
        slices: usize,
        align: usize,
        policy: Policy,
    ) -> Result<(), TakeError> {
        let needed = (slices * SLICE).next_multiple_of(CHUNK);
        let align = (align * SLICE).div_ceil(CHUNK);
        let size = self.next_size(region, role, 0);
        self.retire(role);
        self.make_way(role, size.max(needed));
        let (size, whole) = self.in_whole_pages(region, role, size, needed, align);
        let mut result = self.open_exactly(region, role, size, whole, policy);
        // Rather a small arena than none, and rather none in reserve.
        if result.is_err() && needed < size {
            result = self.open_exactly(region, role, needed, align, policy);
        }
        if result.is_err() && self.close_empty(role).arenas > 0 {
            result = self.open_exactly(region, role, needed, align, policy);
        }
        result
    }

    /// How many bytes the next arena shall have, if nothing needs more. So much is `wanted` for later.
    fn next_size(&self, region: &Region, role: &Role, wanted: usize) -> usize {
        let open = self.open.load(Relaxed);
        let usual = usual_size(region.len(), open).max(wanted.next_multiple_of(CHUNK).min(largest_step(region.len())));
        let memlocked = role.attached.iter().filter(|attached| attached.memlocked).count();
        let size = policy_size(usual, open, memlocked, Memlock::now().allows());
        size.min(policy_size(usual, open, role.attached.len(), self.budget_allows()))
    }

    /// `policy`: what becomes of an arena that a device refuses.
    fn open_exactly(
        &self,
        region: &Region,
        role: &Role,
        bytes: usize,
        align: usize,
        policy: Policy,
    ) -> Result<(), TakeError> {
        let begin = Instant::now();
        self.counts.opening_now.fetch_add(1, Relaxed);
        let result = self.try_open(region, role, bytes, align, policy);
        self.counts.opening_now.fetch_sub(1, Relaxed);
        if result.is_ok() {
            self.counts.opening.since(begin);
        }
        result
    }

    fn try_open(
        &self,
        region: &Region,
        role: &Role,
        bytes: usize,
        align: usize,
        policy: Policy,
    ) -> Result<(), TakeError> {
        let no_memory = |source| TakeError::NoMemory { wanted: bytes, source };
        let count = bytes / CHUNK;
        let first = region.take_run(count, align).map_err(no_memory)?;
        let Some(first) = first else { return Err(TakeError::AddressSpace { wanted: bytes, region: region.len() }) };
        let run = first..first + count;
        let writable = self.config.access.contains(Access::LOCAL_WRITE);
        let links = if self.has_links_outside() { links::prepare(&run) } else { Ok(()) };
        let arena = match links.and_then(|()| Arena::prepare(run.clone(), self.config.tag, writable)) {
            Ok(arena) => arena,
            Err(source) => {
                region.give_run(run);
                return Err(no_memory(source));
            }
        };
        // SAFETY: the run was just taken: it lies in the region, is closed, and nobody else has it.
        match unsafe { self.open_memory(region, role, arena) } {
            Ok(()) if self.config.serves_children => {}
            // SAFETY: just opened. Nobody has memory of it yet that a child could want.
            Ok(()) => unsafe { os::keep_from_children(region.slice_address(first * SLICES_PER_CHUNK), bytes) },
            Err(NoMemory::Refused(source)) => {
                arena.word.end_open(State::Vacant, false);
                region.give_run(run);
                return Err(no_memory(source));
            }
            Err(NoMemory::Lost(source)) => {
                arena.word.end_open(State::Stuck, false);
                drop(self.link(arena));
                return Err(no_memory(source));
            }
        }
        if let Err(error) = self.register_everywhere(region, role, arena, policy) {
            if !self.end(region, role, arena, State::Opening) {
                drop(self.link(arena));
            }
            return Err(TakeError::Register(error));
        }
        self.open.fetch_add(bytes, Relaxed);
        arena.empty_since.store(self.now(), Relaxed);
        let pinned = self.is_fixed(arena);
        let mut list = self.link(arena);
        // Before the list is released: whoever sees the new count finds the arena Live.
        list.opened += 1;
        arena.word.end_open(State::Live, pinned);
        Ok(())
    }

    /// Puts an arena into the list, which is in the order of addresses: a new one, or one that is stuck, so that it is seen.
    fn link(&self, arena: &'static Arena) -> WriteGuard<'_, List> {
        let mut list = self.list.write();
        let (first, place) = (arena.run().start, 1 + arena.run().start as u32);
        let after = match arenas(&list).take_while(|other| other.run().start < first).last() {
            Some(before) => before.next.swap(place, Relaxed),
            None => core::mem::replace(&mut list.head, place),
        };
        arena.next.store(after, Relaxed);
        list
    }

    /// The end of an arena that nobody can take spans from: deregistered, then unmapped. Whether it is gone.
    fn end(&self, region: &Region, role: &Role, arena: &Arena, from: State) -> bool {
        let begin = Instant::now();
        self.counts.closing_now.fetch_add(1, Relaxed);
        let gone = self.try_end(region, role, arena, from);
        self.counts.closing_now.fetch_sub(1, Relaxed);
        if gone && from == State::Closing {
            self.counts.closing.since(begin);
        }
        gone
    }

    fn try_end(&self, region: &Region, role: &Role, arena: &Arena, from: State) -> bool {
        let mut free = true;
        arena.set_draining(false);
        let unregister = |attached: &Attached| self.unregister(region, attached, arena);
        for (attached, result) in self.each_at_once(&role.attached, arena.len(), unregister) {
            free &= result.is_ok();
            attached.slotted.forgive(arena.run().start);
        }
        let memory = arena.memory(region);
        let run = arena.run();
        // SAFETY: the arena has no span and gets none, and every device has let go of it.
        let gone = free
            && !arena.word.is_kept()
            && unsafe { os::close(region.slice_address(run.start * SLICES_PER_CHUNK), memory.len()) }.is_ok();
        let state = if gone { State::Vacant } else { State::Stuck };
        if from == State::Opening {
            arena.word.end_open(state, false);
        } else {
            arena.word.end_close(state);
        }
        if gone {
            if self.has_links_outside() {
                links::forget(&run);
            }
            region.give_run(run);
        }
        gone
    }

    /// Closes every arena that has no span: the part of a drain pass that this layer does.
    pub fn close_all_empty(&self) -> Closed {
        let closed = self.close_empty(&mut self.role());
        self.headroom_is_gone();
        closed
    }

    fn close_empty(&self, role: &mut Role) -> Closed {
        self.close_where(role, |_| true)
    }

    /// Closes the arenas that have no span, as far as `go` names them; exact for all that were empty when it began.
    ///
    /// One arena at a time leaves the list; devices are called without the list lock. Only the role's holder changes the list,
    /// so the pass goes on from where it was.
    fn close_where(&self, role: &mut Role, go: impl Fn(&Arena) -> bool) -> Closed {
        let mut closed = Closed::default();
        let Some(region) = Region::existing() else { return closed };
        let mut before = None;
        while let Some(arena) = self.unlink_empty(&mut before, &go) {
            let bytes = arena.len();
            if self.end(region, role, arena, State::Closing) {
                self.open.fetch_sub(bytes, Relaxed);
                closed.arenas += 1;
                closed.bytes += bytes;
            } else {
                drop(self.link(arena));
                closed.stuck += 1;
            }
        }
        closed
    }

    /// Takes an empty arena that comes after `before` and that `go` names out of the list and into Closing.
    fn unlink_empty(&self, before: &mut Option<&'static Arena>, go: impl Fn(&Arena) -> bool) -> Option<&'static Arena> {
        let mut list = self.list.write();
        loop {
            let at = before.map_or(list.head, |before| before.next.load(Relaxed)) as usize;
            let arena = Arena::at(at.checked_sub(1)?);
            if is_empty(arena) && go(arena) && arena.word.begin_close() {
                let next = arena.next.load(Relaxed);
                match before {
                    Some(before) => before.next.store(next, Relaxed),
                    None => list.head = next,
                }
                return Some(arena);
            }
            *before = Some(arena);
        }
    }
}

/// Whether an arena can be closed now, as far as one can see.
fn is_empty(arena: &Arena) -> bool {
    arena.word.state() == State::Live && arena.word.live_spans() == 0 && !arena.word.is_kept()
}

/// Whether a span would lie across two pieces although it fits one. `first` is its first slice, in the region.
fn crosses_piece(arena: &Arena, first: usize, slices: usize) -> bool {
    let (begin, piece) = (first - arena.run().start * SLICES_PER_CHUNK, PIECE / SLICE);
    slices <= piece && begin / piece != (begin + slices - 1) / piece
}

/// How many bytes the next arena would have where `open` are open and nothing is limited: half as many, from 2 MiB to 32 MiB (an
/// eighth of the region, if that is less); then an eighth, up to 16 GiB.
fn usual_size(region: usize, open: usize) -> usize {
    (open / 2).min(largest_step(region)).max(open / 8).clamp(FIRST_ARENA, LARGEST_ARENA) / CHUNK * CHUNK
}

fn largest_step(region: usize) -> usize {
    LARGEST_STEP.min(region / 8) / CHUNK * CHUNK
}

/// As many as are `usual`, but at most a quarter of what may still be pinned, `allows`, by each of `memlocked` devices.
fn policy_size(usual: usize, open: usize, memlocked: usize, allows: u64) -> usize {
    // Without a device, what is open counts as it will once there is one.
    let later = if memlocked == 0 { open as u64 } else { 0 };
    let left = allows.saturating_sub(later) / memlocked.max(1) as u64;
    // Where not even a chunk can be pinned, small arenas would only be many.
    let most = if left < CHUNK as u64 { u64::MAX } else { left / 4 };
    (usual.min(usize::try_from(most).unwrap_or(usize::MAX)) / CHUNK * CHUNK).max(CHUNK)
}

/// The tag of the heap to whose arenas `address` belongs.
#[inline]
#[must_use]
pub fn tag_of(address: usize) -> Option<u32> {
    Arena::of(address).map(Arena::tag)
}

/// The addresses of the arena in which `address` lies.
#[must_use]
pub fn memory_of(address: usize) -> Option<core::ops::Range<usize>> {
    Some(Arena::of(address)?.memory(Region::existing()?))
}

/// Walks the list. The guard of the list lock is what keeps it still.
fn arenas(list: &List) -> impl Iterator<Item = &'static Arena> + use<> {
    arenas_from(list.head)
}

fn arenas_from(head: u32) -> impl Iterator<Item = &'static Arena> {
    let mut at = head;
    core::iter::from_fn(move || {
        let arena = Arena::at((at as usize).checked_sub(1)?);
        at = arena.next.load(Relaxed);
        Some(arena)
    })
}
