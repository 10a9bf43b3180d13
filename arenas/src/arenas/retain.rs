//! Which empty arenas are kept for the next demand, and for how long: opening one is dear. Uses the list of arenas.
//!
//! The rule is asked when an arena is opened, and by a heap's maintainer; a drain pass that the program asks for (`trim`)
//! keeps none.

use super::{Arenas, Closed, List, Role, arenas, is_empty};
use crate::arena::Arena;
use crate::os;
use core::cell::Cell;
use core::sync::atomic::Ordering::Relaxed;
use core::time::Duration;

/// A clock: the time since any fixed moment. It is asked where memory is given back, so it must not allocate, wait or panic.
pub type Clock = fn() -> Duration;

/// How long empty arenas are kept for who does not say.
pub(super) const DEFAULT_TIME: Duration = Duration::from_secs(10);
/// How many bytes of them are, at least; and an eighth of what is open.
const DEFAULT_BYTES: usize = 64 << 20;

/// How much of memory that nobody uses a heap keeps open (and registered) for the next demand, and for how long.
///
/// An arena that is empty closes when it has been so for the time, or when all empty ones together have more than the bytes,
/// those that have been empty for longest first. The rule is applied whenever an arena is opened, and by the heap's maintainer if it has one: with
/// a maintainer, 0 of either means at once. What the program holds for itself in threads' caches does not count as empty before a
/// drain pass.
///
/// Unless said: the larger of 64 MiB and an eighth of what is open, for 10 seconds.
///
/// ```
/// use core::time::Duration;
/// use rdmalloc_arenas::Retention;
/// let hour = Retention::new().bytes(1 << 30).time(Duration::from_secs(3600));
/// assert_ne!(hour, Retention::NONE);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[must_use]
pub struct Retention {
    bytes: Option<usize>,
    time: Option<Duration>,
}

impl Retention {
    /// Nothing is kept.
    pub const NONE: Retention = Retention { bytes: Some(0), time: Some(Duration::ZERO) };

    /// What holds where nothing is said.
    pub const fn new() -> Retention {
        Retention { bytes: None, time: None }
    }

    /// How many bytes of empty arenas are kept, all together.
    pub const fn bytes(self, bytes: usize) -> Retention {
        Retention { bytes: Some(bytes), ..self }
    }

    /// For how long an empty arena is kept. [`Duration::MAX`]: for ever.
    pub const fn time(self, time: Duration) -> Retention {
        Retention { time: Some(time), ..self }
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl Arenas {
    /// Sets which empty arenas are kept, from now on.
    pub fn set_retention(&self, retention: Retention) {
        // `usize::MAX` bytes is more than there are, and stands for the rule; one less is as good.
        let bytes = retention.bytes.map_or(usize::MAX, |bytes| bytes.min(usize::MAX - 1));
        self.settings.retain_bytes.store(bytes, Relaxed);
        self.settings.retain_time.store(nanos(retention.time.unwrap_or(DEFAULT_TIME)), Relaxed);
    }

    /// Sets the clock by which empty arenas age; once, before the heap's first arena. Whether it was the first.
    pub fn set_clock(&self, clock: Clock) -> bool {
        self.settings.clock.set(clock).is_ok()
    }

    /// The time in nanoseconds, by the heap's clock.
    pub(super) fn now(&self) -> u64 {
        nanos(self.settings.clock.get().map_or_else(os::coarse_now, |clock| clock()))
    }

    /// Closes the empty arenas that need not be kept. How long it is until the next one need not be, if there is one.
    pub fn close_idle(&self) -> (Closed, Option<Duration>) {
        let closed = self.retire(&mut self.role());
        let (now, time) = (self.now(), self.settings.retain_time.load(Relaxed));
        let list = self.read();
        let free = registered_free(&list);
        let spare = arenas(&list).filter(|arena| is_empty(arena) && self.can_do_without(arena, free));
        let oldest = spare.map(|arena| arena.empty_since.load(Relaxed)).min();
        let left = oldest.map(|since| time.saturating_sub(now.saturating_sub(since)));
        (closed, left.filter(|_| time != u64::MAX).map(Duration::from_nanos))
    }

    /// The last span of an arena was given back; a lock may be held.
    pub(super) fn became_empty(&self) {
        let settings = &self.settings;
        if settings.retain_time.load(Relaxed) == 0 || settings.retain_bytes.load(Relaxed) == 0 {
            self.bell.call();
        } else {
            self.bell.touch_after_fence();
        }
    }

    /// The rule. Two walks over the list, and no memory: the internal heap asks it too.
    pub(super) fn retire(&self, role: &mut Role) -> Closed {
        let settings = &self.settings;
        let (now, time) = (self.now(), settings.retain_time.load(Relaxed));
        let bytes = match settings.retain_bytes.load(Relaxed) {
            usize::MAX => DEFAULT_BYTES.max(self.open.load(Relaxed) / 8),
            bytes => bytes,
        };
        let bytes = bytes.max(self.headroom.wanted.load(Relaxed));
        let age = |arena: &Arena| now.saturating_sub(arena.empty_since.load(Relaxed));
        let mut empty = [0; AGES];
        for arena in arenas(&self.read()).filter(|arena| is_empty(arena)) {
            empty[age_class(age(arena))] += arena.len();
        }
        // All that is older than the class `last` goes, and of that class as much as is still too much.
        let (mut last, mut excess) = (AGES, empty.iter().sum::<usize>().saturating_sub(bytes));
        while excess > 0 {
            last -= 1;
            if empty[last] >= excess {
                break;
            }
            excess -= empty[last];
        }
        let (excess, free) = (Cell::new(excess), Cell::new(registered_free(&self.read())));
        self.close_where(role, |arena| {
            let age = age(arena);
            let is_too_much = age_class(age) == last && excess.get() > 0;
            let goes = (is_too_much || age >= time || age_class(age) > last) && self.can_do_without(arena, free.get());
            if goes {
                excess.set(excess.get().saturating_sub(if is_too_much { arena.len() } else { 0 }));
                free.set(free.get().saturating_sub(arena.free_bytes()));
            }
            goes
        })
    }
}

/// Ages in classes: four for each doubling, so that arenas of one class are of about the same age.
const AGES: usize = 4 * 64;

fn age_class(nanos: u64) -> usize {
    let log = nanos.max(1).ilog2();
    (log as usize) << 2 | ((nanos << (63 - log)) >> 61 & 3) as usize
}

/// Bytes that are free in arenas that a device has.
fn registered_free(list: &List) -> usize {
    arenas(list).filter(|arena| arena.registered.load(Relaxed) != 0).map(Arena::free_bytes).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Access, Config, Policy, SLICE};
    use core::sync::atomic::AtomicU64;

    /// A clock that a test sets, in seconds. Each test has its own.
    macro_rules! clock {
        ($name:ident) => {
            static $name: AtomicU64 = AtomicU64::new(100);
        };
    }

    fn arenas(clock: Clock) -> Arenas {
        let config = Config { access: Access::LOCAL_READ, policy: Policy::Require, serves_children: false, tag: 7 };
        let arenas = Arenas::new(config);
        assert!(arenas.set_clock(clock));
        arenas
    }

    /// Arenas of their own, of so many MiB each, empty since those times.
    fn emptied(arenas: &Arenas, clock: &AtomicU64, all: &[(usize, u64)]) {
        let spans = all.iter().map(|(mib, _)| arenas.take((mib << 20) / SLICE, 1).unwrap()).collect::<Vec<_>>();
        for (span, (_, since)) in spans.iter().zip(all) {
            clock.store(*since, Relaxed);
            arenas.give(span.address, span.slices);
        }
    }

    fn lengths(arenas: &Arenas) -> Vec<usize> {
        let mut lengths: Vec<_> = arenas.arenas().iter().map(|arena| arena.memory.len() >> 20).collect();
        lengths.sort_unstable();
        lengths
    }

    #[test]
    fn an_arena_that_was_empty_for_the_time_closes_and_no_other() {
        clock!(NOW);
        let arenas = arenas(|| Duration::from_secs(NOW.load(Relaxed)));
        arenas.set_retention(Retention::new().bytes(1 << 40).time(Duration::from_secs(5)));
        emptied(&arenas, &NOW, &[(40, 100), (50, 102), (60, 103)]);
        let live = arenas.take((70 << 20) / SLICE, 1).unwrap();
        NOW.store(104, Relaxed);
        assert_eq!(arenas.close_idle(), (Closed::default(), Some(Duration::from_secs(1))));
        NOW.store(107, Relaxed);
        let (closed, left) = arenas.close_idle();
        assert_eq!((closed.arenas, closed.bytes, left), (2, 90 << 20, Some(Duration::from_secs(1))));
        NOW.store(1000, Relaxed);
        assert_eq!((arenas.close_idle().0.arenas, lengths(&arenas)), (1, vec![70]));
        // Its age counts from when it became empty, not from when it was opened.
        arenas.give(live.address, live.slices);
        assert_eq!(arenas.close_idle(), (Closed::default(), Some(Duration::from_secs(5))));
        // Taken again, it is young again.
        NOW.store(1004, Relaxed);
        let again = arenas.take(1, 1).unwrap();
        arenas.give(again.address, 1);
        NOW.store(1006, Relaxed);
        assert_eq!(arenas.close_idle(), (Closed::default(), Some(Duration::from_secs(3))));
        arenas.close_all_empty();
    }

    #[test]
    fn the_longest_empty_go_first_when_they_are_too_many() {
        clock!(NOW);
        let arenas = arenas(|| Duration::from_secs(NOW.load(Relaxed)));
        arenas.set_retention(Retention::new().bytes(120 << 20).time(Duration::MAX));
        emptied(&arenas, &NOW, &[(40, 103), (50, 101), (60, 102)]);
        assert_eq!(arenas.close_idle(), (Closed { arenas: 1, bytes: 50 << 20, stuck: 0 }, None));
        assert_eq!(lengths(&arenas), [40, 60]);
        // Opening asks the rule as well: there are no more when the new one comes.
        arenas.set_retention(Retention::NONE);
        let span = arenas.take((70 << 20) / SLICE, 1).unwrap();
        assert_eq!(lengths(&arenas), [70]);
        arenas.give(span.address, span.slices);
        arenas.close_all_empty();
    }

    #[test]
    fn classes_of_ages_are_in_order() {
        let ages = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 1000, 1_000_000, 1 << 40, 5 << 38, u64::MAX];
        let classes = ages.map(age_class);
        assert!(classes.is_sorted(), "{classes:?}");
        assert!(classes[ages.len() - 1] < AGES && age_class(1 << 40) < age_class(5 << 38));
    }

    #[test]
    fn nothing_is_kept_where_zero_is_said() {
        clock!(NOW);
        let arenas = arenas(|| Duration::from_secs(NOW.load(Relaxed)));
        for retention in [Retention::new().bytes(0), Retention::new().time(Duration::ZERO), Retention::NONE] {
            arenas.set_retention(retention);
            emptied(&arenas, &NOW, &[(40, 100), (50, 100)]);
            assert_eq!((arenas.close_idle().1, lengths(&arenas).len()), (None, 0), "{retention:?}");
        }
    }

    #[test]
    fn who_says_nothing_keeps_some_for_a_while() {
        clock!(NOW);
        let arenas = arenas(|| Duration::from_secs(NOW.load(Relaxed)));
        emptied(&arenas, &NOW, &[(32, 100), (32, 100), (40, 101)]);
        assert_eq!(arenas.close_idle().0.arenas, 2);
        assert_eq!(lengths(&arenas), [40]);
        NOW.store(111, Relaxed);
        assert_eq!(arenas.close_idle().0.bytes, 40 << 20);
    }
}
