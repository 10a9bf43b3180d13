//! Devices come: the half of [`Arenas`] that calls registrars. Everything here runs under the heap's role. Devices go in `detach`.

use super::Policy;
use super::{Arenas, Role};
use crate::Access;
use crate::arena::{Arena, State};
use crate::device::{Device, Slotted};
use crate::error::{AttachError, RegisterError};
use crate::held::{Amount, Budget};
use crate::os;
use crate::refusal::Refusal;
use crate::region::{CHUNK, Region};
use crate::registrar::{Limits, Registered, Registrar};
use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

/// A device that is attached to a heap.
pub(super) struct Attached {
    pub(super) slotted: Slotted,
    pub(super) registrar: Box<dyn Registrar>,
    /// The length of the pieces in which arenas are registered with this device; a power of two from [`CHUNK`] on.
    piece: usize,
    /// How many registrations the device takes.
    max_registrations: u64,
    /// Whether its registrations count against the memlock limit.
    pub(super) memlocked: bool,
    /// Whether it registers on demand: nothing is pinned.
    pub(super) on_demand: bool,
    /// The memory node near it, if it says so.
    pub(super) node: Option<u32>,
    /// Arenas of which it would not let go, and their bytes: it must not be dropped then.
    pub(super) kept: AtomicUsize,
    pub(super) kept_bytes: AtomicUsize,
    /// The process that attached it.
    process: u32,
}

impl Attached {
    /// What registering so many bytes with the device takes.
    pub(super) fn amount(&self, bytes: usize) -> Amount {
        Amount::new(bytes, bytes.div_ceil(self.piece))
    }

    /// The longest piece in which it registers memory, in bytes: a power of two.
    pub(super) fn piece(&self) -> usize {
        self.piece
    }

    /// What the device takes at most, of all heaps together.
    pub(super) fn most(&self) -> Budget {
        Budget { registrations: self.max_registrations, ..Budget::NONE }
    }

    /// Whether it is the device of the process of which this is a child: not to be called, nor dropped.
    pub(super) fn is_parents(&self) -> bool {
        self.process != os::process() || os::is_forked_child()
    }

    /// It will not let go of an arena, which is therefore kept, and so is the registrar.
    fn keep(&self, arena: &Arena) {
        arena.word.keep();
        self.kept.fetch_add(1, Relaxed);
        self.kept_bytes.fetch_add(arena.len(), Relaxed);
    }

    /// The pieces of `memory` (a whole arena, or the first pieces of one), in order.
    fn pieces(&self, memory: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let (Range { start, end }, piece) = (memory.clone(), self.piece);
        (0..memory.len().div_ceil(piece)).map(move |index| {
            let from = start + index * piece;
            from..end.min(from.saturating_add(piece))
        })
    }
}

impl core::fmt::Debug for Attached {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Attached").field("device", &self.slotted.device).field("name", &self.registrar.name()).finish()
    }
}

/// The largest power of two that a device registers at once. `max_len` is not 0.
fn piece_length(max_len: u64) -> usize {
    // An arena can be of any length, as a block can, so there is no limit that may be taken for none.
    1 << max_len.ilog2()
}

fn chunks(region: &Region, memory: &Range<usize>) -> Range<usize> {
    (memory.start - region.base()) / CHUNK..(memory.end - region.base()) / CHUNK
}

impl Arenas {
    /// Attaches a device: registers every arena that is open, and from now on every arena that is opened.
    ///
    /// Other threads may take and give spans meanwhile; they wait only if they need a new arena. Arenas without a span are
    /// closed first, the others advised to be huge pages.
    ///
    /// # Errors
    ///
    /// [`AttachError`]; whatever was registered is deregistered again, and the registrar dropped. Where the policy is
    /// [`Policy::Prefer`], arenas that a limit does not allow are left unregistered, but an attachment that would have
    /// registered nothing of what is open is an error.
    pub fn attach(&self, registrar: Box<dyn Registrar>) -> Result<Device, AttachError> {
        match self.attach_all(vec![registrar])?[..] {
            [device] => Ok(device),
            _ => unreachable!(),
        }
    }

    /// Attaches several devices, all or none, as [`attach`](Self::attach) does one. They register what is open at once, each on
    /// a thread, where that pays: so they take as long as the slowest does.
    ///
    /// # Errors
    ///
    /// The first [`AttachError`]; whatever was registered is deregistered again, and all the registrars dropped.
    pub fn attach_all(&self, registrars: Vec<Box<dyn Registrar>>) -> Result<Vec<Device>, AttachError> {
        if os::is_forked_child() {
            return Err(AttachError::ForkedChild);
        }
        if self.is_gone() {
            return Err(AttachError::NotInChild);
        }
        registrars.iter().try_for_each(|registrar| self.check(&**registrar))?;
        let region = Region::get().map_err(AttachError::NoMemory)?;
        os::mark_process().map_err(AttachError::NoMemory)?;
        // Dropped after the role's guard: a registrar may do as it likes then.
        let (mut registrars, mut refused) = (registrars.into_iter(), None);
        let mut role = self.role();
        self.close_empty(&mut role);
        let before = role.attached.len();
        let mut result = registrars.try_for_each(|registrar| {
            self.take_in(&mut role, registrar).map_err(|(error, registrar)| {
                refused = Some(registrar);
                error
            })
        });
        // Only the role's holder changes the list, so it may be walked without the lock.
        let all: Vec<_> = self.all(&role).collect();
        if result.is_ok() {
            result = self.register_with_new(region, &role, before, &all).map_err(AttachError::Register);
        }
        let Err(error) = result else {
            return Ok(role.attached[before..].iter().map(|attached| attached.slotted.device).collect());
        };
        // An arena that a device will not let go of is marked as kept by `take_out`.
        let left: Vec<_> =
            role.attached.drain(before..).map(|attached| self.take_out(region, attached, &all)).collect();
        drop(role);
        drop((left, refused));
        Err(error)
    }

    /// Whether a device may be attached to this heap at all.
    fn check(&self, registrar: &dyn Registrar) -> Result<(), AttachError> {
        let name = || registrar.name().to_owned();
        let limits = registrar.limits();
        if limits.max_len < CHUNK as u64 {
            return Err(AttachError::LengthLimit { device: name(), max_len: limits.max_len, wanted: CHUNK as u64 });
        }
        if !registrar.supports(self.config.access) {
            return Err(AttachError::Access { device: name(), access: self.config.access });
        }
        if self.config.serves_children && registrar.hides_memory_from_children() {
            return Err(AttachError::HidesMemoryFromChildren { device: name() });
        }
        Ok(())
    }

    /// Puts a device into the role's list, with a column. Nothing is registered yet.
    fn take_in(&self, role: &mut Role, registrar: Box<dyn Registrar>) -> Result<(), (AttachError, Box<dyn Registrar>)> {
        let name = || registrar.name().to_owned();
        let slotted = match Slotted::acquire(registrar.identity(), registrar.name()) {
            Ok(slotted) => slotted,
            Err(error) => return Err((error, registrar)),
        };
        let device = slotted.device;
        let error = if role.attached.iter().any(|other| other.slotted.device == device) {
            AttachError::AlreadyAttached { device: name() }
        } else if device.is_lost() {
            AttachError::Lost { device: name() }
        } else {
            let Limits { max_len, max_registrations } = registrar.limits();
            let on_demand = match self.pinning().choose(self.config.access, || registrar.on_demand()) {
                Ok(on_demand) => on_demand,
                Err(why) => {
                    let error = AttachError::OnDemand { device: name(), why };
                    slotted.release();
                    return Err((error, registrar));
                }
            };
            let max_len = on_demand.map_or(max_len, |can| can.max_len.clamp(CHUNK as u64, max_len));
            let on_demand = on_demand.is_some();
            let (piece, memlocked) = (piece_length(max_len), registrar.is_memlocked() && !on_demand);
            if !on_demand {
                self.limits.pinning.fetch_or(slotted.bit(), Relaxed);
            }
            let ((kept, kept_bytes), process) = (Default::default(), os::process());
            self.counts.of(device).reset();
            let node = registrar.node();
            role.attached.push(Attached {
                slotted,
                registrar,
                piece,
                max_registrations,
                memlocked,
                on_demand,
                node,
                kept,
                kept_bytes,
                process,
            });
            return Ok(());
        };
        slotted.release();
        Err((error, registrar))
    }

    /// Registers all arenas with the devices from `before` on. Stops at the first error, and leaves what is registered then.
    fn register_with_new(
        &self,
        region: &Region,
        role: &Role,
        before: usize,
        all: &[&'static Arena],
    ) -> Result<(), RegisterError> {
        // What another device keeps serves nobody any more once it is empty.
        let serves = |arena: &Arena| !arena.word.is_kept() || arena.word.live_spans() > 0;
        let live = || all.iter().copied().filter(|arena| arena.word.state() == State::Live && serves(arena));
        let new = &role.attached[before..];
        live().for_each(|arena| self.place_late(region, role, arena));
        let failed = AtomicBool::new(false);
        // What a device has not registered though it may stay; or why it may not.
        let register = |attached: &Attached| {
            let (mut registered, mut refused) = (0, Vec::new());
            for arena in live().take_while(|_| !failed.load(Relaxed)) {
                self.pin_and_advise(region, attached, arena);
                let Err(error) = self.register(region, role, attached, arena) else {
                    registered += 1;
                    continue;
                };
                if self.policy() == Policy::Require || !error.reason.is_limit() || arena.word.is_kept() {
                    failed.store(true, Relaxed);
                    return Err(error);
                }
                refused.push((arena, error));
            }
            match refused.pop() {
                Some((_, error)) if registered == 0 => {
                    failed.store(true, Relaxed);
                    Err(error)
                }
                last => {
                    refused.extend(last);
                    Ok(refused)
                }
            }
        };
        let bytes = live().map(Arena::len).sum();
        let (mut first, mut refused) = (Ok(()), Vec::new());
        for (attached, result) in self.each_at_once(new, bytes, register) {
            match result {
                Ok(arenas) => refused.extend(arenas.into_iter().map(|(arena, error)| (attached, arena, error))),
                Err(error) => {
                    if let Refusal::Device(source) = &error.reason {
                        attached.look_if_lost(source);
                    }
                    first = first.and(Err(error));
                }
            }
        }
        // Not before all are done: each has pinned for itself.
        live().for_each(|arena| self.unpin_if_nobody_pins(arena));
        first?;
        for attached in new {
            self.limits.attached.fetch_or(attached.slotted.bit(), Relaxed);
        }
        refused.iter().for_each(|(attached, arena, error)| self.note_refusal(attached, arena, error));
        Ok(())
    }

    /// The devices that are attached, with their names.
    #[must_use]
    pub fn devices(&self) -> Vec<(Device, String)> {
        let role = self.role();
        role.attached.iter().map(|attached| (attached.slotted.device, attached.registrar.name().to_owned())).collect()
    }

    /// Registers an arena with a device, piece by piece; all of it or nothing. A child of fork has no device to do so.
    pub(super) fn register(
        &self,
        region: &Region,
        role: &Role,
        attached: &Attached,
        arena: &Arena,
    ) -> Result<(), RegisterError> {
        let result = self.try_register(region, attached, arena);
        self.watch_soft_limit();
        result.map_err(|reason| {
            self.counts.refused(attached.slotted.device, &reason);
            RegisterError {
                device: attached.registrar.name().to_owned(),
                wanted: arena.len(),
                devices: role.attached.len().max(1),
                memlock: attached.memlocked.then(|| attached.registrar.memlock()).flatten(),
                reason,
            }
        })
    }

    fn try_register(&self, region: &Region, attached: &Attached, arena: &Arena) -> Result<(), Refusal> {
        let memory = arena.memory(region);
        let child = || io::Error::other("this process is a child of fork of the one that attached the device");
        if attached.is_parents() {
            return Err(Refusal::Device(child()));
        }
        attached.slotted.prepare(arena.run()).map_err(Refusal::Device)?;
        // What is open already may be there in part, so nothing can be said of it.
        if arena.word.state() == State::Opening && attached.registrar.pins_pages() && !attached.on_demand {
            let (wanted, available) = (memory.len() as u64, attached.registrar.available());
            if let Some(available) = available.filter(|available| *available < wanted) {
                return Err(Refusal::OutOfMemory { wanted, available });
            }
        }
        self.admit(attached, attached.amount(memory.len()))?;
        let access = self.config.access;
        let access = if attached.on_demand { access | Access::ON_DEMAND } else { access };
        let (mut done, mut keeps) = (memory.start, false);
        for piece in attached.pieces(&memory) {
            // SAFETY: an arena that is open stays mapped until every device has let go of it, and is memory of a heap whose
            // access flags say who may reach it.
            let register = || unsafe { attached.registrar.register(piece.clone(), access) };
            let begin = Instant::now();
            let result = guard(register);
            if attached.is_parents() {
                // Forked inside the registrar: whatever was registered is the parent's.
                self.dismiss(attached, attached.amount(memory.len()));
                return Err(Refusal::Device(child()));
            }
            let result = result.inspect_err(|_| self.dismiss(attached, Amount::new(piece.len(), 1)));
            let result = result.and_then(|registered| {
                self.counts.of(attached.slotted.device).registering.since(begin);
                self.counts.registrations.fetch_add(1, Relaxed);
                if attached.slotted.publish(chunks(region, &piece), registered.keys, registered.handle) {
                    return Ok(());
                }
                // The keys are refused; let go of them, or keep the memory for ever.
                match self.deregister(region, attached, piece.clone()) {
                    Ok(()) => Err(io::Error::new(io::ErrorKind::InvalidData, "the device gave reserved keys")),
                    Err(error) => {
                        keeps = true;
                        Err(error)
                    }
                }
            });
            if let Err(source) = result {
                for piece in attached.pieces(&(memory.start..done)) {
                    keeps |= self.deregister(region, attached, piece).is_err();
                }
                if keeps {
                    attached.keep(arena);
                }
                // Nobody was asked for what follows the piece that failed.
                let rest = memory.end - piece.end;
                self.dismiss(attached, attached.amount(rest));
                return Err(Refusal::Device(source));
            }
            done = piece.end;
        }
        arena.registered.fetch_or(attached.slotted.bit(), Relaxed);
        Ok(())
    }

    /// Hides the keys of a piece and ends its registration. In a child of fork nothing is called: the registration is the
    /// parent's.
    fn deregister(&self, region: &Region, attached: &Attached, piece: Range<usize>) -> io::Result<()> {
        let (keys, handle) = attached.slotted.withdraw(chunks(region, &piece));
        if attached.is_parents() {
            return Ok(());
        }
        let (device, begin) = (attached.slotted.device, Instant::now());
        let ended = guard(|| attached.registrar.deregister(Registered { keys, handle }, piece.clone()));
        if attached.is_parents() {
            // Forked inside the registrar.
            return Ok(());
        }
        ended.inspect_err(|error| {
            self.counts.not_ended(device);
            attached.look_if_lost(error);
        })?;
        self.counts.of(device).deregistering.since(begin);
        self.counts.deregistrations.fetch_add(1, Relaxed);
        self.dismiss(attached, Amount::new(piece.len(), 1));
        self.watch_soft_limit();
        Ok(())
    }

    /// Ends an arena's registration with one device.
    pub(super) fn unregister(&self, region: &Region, attached: &Attached, arena: &Arena) -> io::Result<()> {
        if arena.registered.load(Relaxed) & attached.slotted.bit() == 0 {
            return Ok(());
        }
        let mut result = Ok(());
        for piece in attached.pieces(&arena.memory(region)) {
            let ended = self.deregister(region, attached, piece);
            result = result.and(ended);
        }
        arena.registered.fetch_and(!attached.slotted.bit(), Relaxed);
        if result.is_err() {
            attached.keep(arena);
        }
        result
    }
}

/// Calls a registrar. A panic of its becomes an error: nothing may unwind through an allocator.
pub(super) fn guard<T>(call: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|_| Err(io::Error::other("the registrar panicked")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_piece_is_longer_than_the_device_takes() {
        for max_len in [CHUNK as u64, (3 << 20) - 1, 5 << 30, 16 << 30, (32 << 30) - 1, 1 << 50, u64::MAX] {
            let piece = piece_length(max_len);
            assert!(piece as u64 <= max_len && piece.is_power_of_two() && piece as u64 > max_len / 2, "{max_len}");
        }
    }
}
