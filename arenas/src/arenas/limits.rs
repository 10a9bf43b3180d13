//! What a heap may have registered: its budget, its soft limit, the memlock limit, what a device takes; asked before a device
//! is called. And what happens to memory that none of them allows. Uses `held`, `refusal` and the heap's devices.
//!
//! Who registers holds the amount first, of the heap, of the heap's share of the device and of the device, and gives it back if
//! nothing came of it. So the three are never exceeded, and always known.

use super::attach::Attached;
use super::{Arenas, Role, arenas};
use crate::arena::{Arena, State};
use crate::device::without_lost;
use crate::error::RegisterError;
use crate::held::{Amount, Budget, Held, Over};
use crate::os;
use crate::refusal::Refusal;
use crate::region::Region;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;
use crossbeam_utils::Backoff;

/// What a heap does with memory that a device does not register.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub enum Policy {
    /// It is not served: the allocation fails.
    Require,
    /// It is served all the same. The device has no keys for it and says why, and it is registered as soon as that can be done.
    Prefer,
}

/// What counts against a heap's limits.
#[derive(Debug)]
pub(super) struct Counted {
    /// What is registered, over all devices.
    pub(super) held: Held,
    /// A bit for the slot of each device that is attached. Changes only under the role.
    pub(super) attached: AtomicU64,
    /// A bit for the slot of each device that pins what it registers. Likewise.
    pub(super) pinning: AtomicU64,
}

impl Counted {
    pub(super) const fn new() -> Counted {
        Counted { held: Held::new(), attached: AtomicU64::new(0), pinning: AtomicU64::new(0) }
    }
}

/// What [`Arenas::register_what_was_refused`] has done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct CaughtUp {
    /// Arenas that were registered with a device that had not registered them before; each device counts.
    pub arenas: usize,
    /// Their bytes.
    pub bytes: usize,
    /// Arenas that a device still has not registered; each device counts.
    pub left: usize,
}

impl Arenas {
    /// Sets what the heap may have registered, from now on: what is registered stays so.
    pub fn set_budget(&self, budget: Budget) {
        self.settings.budget_bytes.store(budget.bytes, Relaxed);
        self.settings.budget_registrations.store(budget.registrations, Relaxed);
    }

    /// What the heap may have registered.
    #[must_use]
    pub fn budget(&self) -> Budget {
        Budget {
            bytes: self.settings.budget_bytes.load(Relaxed),
            registrations: self.settings.budget_registrations.load(Relaxed),
        }
    }

    /// Sets how many registered bytes, summed over the devices, are told to the listener when they are exceeded.
    pub fn set_soft_limit(&self, limit: Option<u64>) {
        self.settings.soft_limit.store(limit.unwrap_or(u64::MAX), Relaxed);
        self.watch_soft_limit();
    }

    /// The soft limit.
    #[must_use]
    pub fn soft_limit(&self) -> Option<u64> {
        Some(self.settings.soft_limit.load(Relaxed)).filter(|limit| *limit != u64::MAX)
    }

    /// Sets what happens from now on to memory that a device does not register. What is served already stays as it is.
    pub fn set_policy(&self, policy: Policy) {
        self.settings.policy.store(policy as u8, Relaxed);
    }

    /// What happens to memory that a device does not register.
    #[must_use]
    pub fn policy(&self) -> Policy {
        if self.settings.policy.load(Relaxed) == Policy::Prefer as u8 { Policy::Prefer } else { Policy::Require }
    }

    /// Bytes registered now, summed over the devices. Takes no lock.
    #[must_use]
    pub fn registered_bytes(&self) -> u64 {
        self.limits.held.now().bytes
    }

    /// Bytes that are open now, registered or not. Takes no lock.
    #[must_use]
    pub fn open_bytes(&self) -> u64 {
        self.open.load(Relaxed) as u64
    }

    /// How many bytes may still be registered by the budget, over all devices.
    pub(super) fn budget_allows(&self) -> u64 {
        self.budget().bytes.saturating_sub(self.registered_bytes())
    }

    /// Notes whether more is registered than the soft limit says.
    pub(super) fn watch_soft_limit(&self) {
        let above = &self.notices.above_soft_limit;
        if self.registered_bytes() > self.settings.soft_limit.load(Relaxed) { above.raise() } else { above.resolve() }
    }

    /// Whether a registration may be tried now; calls nobody.
    pub(super) fn may_register(&self, attached: &Attached, amount: Amount) -> Result<(), Refusal> {
        let budget = self.budget();
        self.limits.held.has_room(amount, budget).map_err(|over| Refusal::by_budget(over, budget))?;
        let (held, most) = (attached.slotted.held(), attached.most());
        held.has_room(amount, most).map_err(|over| full(over, most))?;
        let memlock = attached.memlocked.then(|| attached.registrar.memlock()).flatten();
        memlock.and_then(|memlock| Refusal::by_memlock(memlock, amount.bytes)).map_or(Ok(()), Err)
    }

    /// Closes what is kept without need, if a limit leaves no room for a new arena of so many bytes otherwise.
    pub(super) fn make_way(&self, role: &mut Role, bytes: usize) {
        let refused =
            |attached: &Attached| !attached.is_lost() && self.may_register(attached, attached.amount(bytes)).is_err();
        if role.attached.iter().any(refused) {
            self.close_empty(role);
        }
    }

    /// Holds an amount that is about to be registered, or says which limit forbids it.
    pub(super) fn admit(&self, attached: &Attached, amount: Amount) -> Result<(), Refusal> {
        self.may_register(attached, amount)?;
        let budget = self.budget();
        self.limits.held.take(amount, budget).map_err(|over| Refusal::by_budget(over, budget))?;
        let most = attached.most();
        if let Err(over) = attached.slotted.held().take(amount, most) {
            self.limits.held.give(amount);
            return Err(full(over, most));
        }
        // Nothing forbids it here.
        let _ = self.counts.of(attached.slotted.device).held.take(amount, Budget::NONE);
        Ok(())
    }

    /// Gives back an amount that is not registered, or not any more.
    pub(super) fn dismiss(&self, attached: &Attached, amount: Amount) {
        self.limits.held.give(amount);
        attached.slotted.held().give(amount);
        self.counts.of(attached.slotted.device).held.give(amount);
    }

    /// Remembers why a device has not registered an arena, and that there is something to be told.
    pub(super) fn note_refusal(&self, attached: &Attached, arena: &Arena, error: &RegisterError) {
        attached.slotted.refuse(arena.run().start, error.reason.word());
        self.notices.unregistered.raise();
    }

    /// Whether some arena may be open that a device has not registered. One load.
    pub(super) fn has_unregistered(&self) -> bool {
        self.notices.unregistered.is_raised()
    }

    /// Whether every device that is not lost has registered the arena.
    pub(super) fn is_registered(&self, arena: &Arena) -> bool {
        without_lost(self.limits.attached.load(Relaxed) & !arena.registered.load(Relaxed)) == 0
    }

    /// Looks whether there is still an arena that a device has not registered. The caller has the role.
    pub(super) fn review(&self) {
        let list = self.read();
        let is_missing = |arena: &Arena| arena.word.state() == State::Live && !self.is_registered(arena);
        if !arenas(&list).any(|arena| is_missing(arena) && !arena.word.is_kept()) {
            self.notices.unregistered.resolve();
        }
    }

    /// Registers what a device had refused, or a limit had forbidden, as far as that can be done now. Cheap if there is
    /// nothing. For who gives memory back, and for who looks after a heap now and then; not inside an allocation.
    ///
    /// Arenas of which the limits still leave no room are passed over; a device that refuses one is not asked again in this
    /// call.
    pub fn register_what_was_refused(&self) -> CaughtUp {
        let mut done = CaughtUp::default();
        let Some(region) = Region::existing() else { return done };
        if !self.has_unregistered() || os::is_forked_child() {
            return done;
        }
        let role = self.role();
        // Only the role's holder changes the list, so it may be walked without the lock.
        let all: Vec<_> = self.all(&role).collect();
        for attached in role.attached.iter().filter(|attached| !attached.is_lost()) {
            let mut asked = true;
            let missing = |arena: &&&Arena| arena.registered.load(Relaxed) & attached.slotted.bit() == 0;
            let live = |arena: &&&Arena| arena.word.state() == State::Live && !arena.word.is_kept();
            for arena in all.iter().filter(live).filter(missing) {
                let result = if asked { self.register_late(region, &role, attached, arena) } else { Ok(false) };
                match result {
                    Ok(true) => (done.arenas, done.bytes) = (done.arenas + 1, done.bytes + arena.len()),
                    Ok(false) => done.left += 1,
                    Err(error) => {
                        asked = error.reason.is_limit();
                        self.note_refusal(attached, arena, &error);
                        done.left += 1;
                    }
                }
            }
        }
        self.review();
        done
    }

    /// Registers an arena that is live already, unless a limit forbids it. Whether it did.
    fn register_late(
        &self,
        region: &Region,
        role: &Role,
        attached: &Attached,
        arena: &Arena,
    ) -> Result<bool, RegisterError> {
        if let Err(reason) = self.may_register(attached, attached.amount(arena.len())) {
            // Its numbers are newer.
            attached.slotted.refuse(arena.run().start, reason.word());
            return Ok(false);
        }
        self.pin_and_advise(region, attached, arena);
        let result = self.register(region, role, attached, arena);
        if result.is_err() {
            self.unpin_if_nobody_pins(arena);
        }
        result.map(|()| true)
    }

    /// Keeps purgers off a live arena, which must be before it is registered; and has it advised, if it will be. A device that pins
    /// nothing minds neither.
    pub(super) fn pin_and_advise(&self, region: &Region, attached: &Attached, arena: &Arena) {
        if attached.on_demand {
            return;
        }
        let backoff = Backoff::new();
        arena.word.pin(|| backoff.snooze());
        if self.will_be_pinned(attached, arena.len()) {
            self.advise(region, arena);
        }
    }

    /// Whether registering an arena of so many bytes will pin it, as far as one can see: not if no limit allows that.
    pub(super) fn will_be_pinned(&self, attached: &Attached, bytes: usize) -> bool {
        let pins = attached.registrar.pins_pages() && !attached.on_demand && !attached.is_lost();
        pins && self.may_register(attached, attached.amount(bytes)).is_ok()
    }
}

fn full(over: Over, most: Budget) -> Refusal {
    let (Over::Bytes { registered } | Over::Registrations { registered }) = over;
    Refusal::DeviceFull { limit: most.registrations, registered }
}
