//! A thread that looks after a heap: it opens arenas before they are needed, and closes what nobody needs any more. Uses
//! `heap`, and the bell and the headroom of the arenas.
//!
//! The thread is inside the arenas all its life: what it allocates comes from the internal heap, and no lock is held while it
//! calls devices. It sleeps at the heap's bell:
//!
//! - it is called when less is free than the headroom it keeps, and when something was attached;
//! - it is touched when somebody uses the heap after its last drain pass. That pass has left every cache revoked, so the first
//!   operation of each thread comes the slow way and tells. Then, and only then, a pass can bring anything, and it wakes
//!   again after its interval; a heap that nobody uses is left alone for ever.
//!
//! A pass costs its users their caches. One that has brought nothing doubles the time to the next, up to 64 intervals; one that
//! has, or much that was freed since, brings it down again.

use crate::heap::Core;
use crate::pool::Heap;
use crate::thread;
use core::fmt;
use core::time::Duration;
use rdmalloc_arenas::SLICE;
use rdmalloc_arenas::bell::Rung;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// How many intervals there are between passes at most, and between attempts that are refused.
const LONGEST: u32 = 64;
/// So much freed since the last pass makes the next one due: an arena's worth.
const MUCH: usize = 32 << 20;

/// How a heap is looked after; for `maintain` of [`Rdmalloc`](crate::Rdmalloc::maintain) and [`Heap`](Heap::maintain).
///
/// ```
/// use core::time::Duration;
/// use rdmalloc::{Heap, Maintenance};
///
/// let heap = Heap::builder().build()?;
/// let maintainer = heap.maintain(Maintenance::new().headroom(256 << 20).growth(Duration::from_secs(2)))?;
/// // ... and at the end, or when it is dropped:
/// maintainer.stop();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub struct Maintenance {
    headroom: usize,
    growth: Duration,
    interval: Duration,
}

impl Maintenance {
    /// 64 MiB of headroom, or what the heap grew by in the last second; looks each second while the heap is used.
    pub const fn new() -> Maintenance {
        Maintenance { headroom: 64 << 20, growth: Duration::from_secs(1), interval: Duration::from_secs(1) }
    }

    /// How many bytes are kept free, in arenas that are open and registered with every device. 0: none; no arena is opened ahead.
    pub const fn headroom(self, bytes: usize) -> Maintenance {
        Maintenance { headroom: bytes, ..self }
    }

    /// The headroom is at least what the heap grew by within this time, but at most half of what is taken. Zero: growth does not
    /// matter.
    pub const fn growth(self, within: Duration) -> Maintenance {
        Maintenance { growth: within, ..self }
    }

    /// How often the thread looks while the heap is used, at most; also after which time a refusal is tried again.
    pub const fn interval(self, interval: Duration) -> Maintenance {
        Maintenance { interval, ..self }
    }
}

impl Default for Maintenance {
    fn default() -> Self {
        Maintenance::new()
    }
}

/// What a maintainer has done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Maintained {
    /// How often it woke.
    pub rounds: u64,
    /// Drain passes among them.
    pub passes: u64,
    /// Arenas opened before they were needed.
    pub opened_arenas: u64,
    /// Arenas closed that nobody needed.
    pub closed_arenas: u64,
    /// Arenas registered that a device, or a limit, had refused before; each device counts.
    pub registered_late: u64,
    /// How often headroom, or what had been refused, could not be had.
    pub refusals: u64,
    /// For how long it sleeps now, if nothing calls it. `None`: until somebody uses the heap.
    pub sleeps: Option<Duration>,
}

/// Why a heap has no maintainer.
#[derive(Debug)]
#[non_exhaustive]
pub enum MaintainError {
    /// It has one already; there is one for each heap.
    AlreadyMaintained,
    /// The thread could not be started.
    NoThread(io::Error),
}

impl fmt::Display for MaintainError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AlreadyMaintained => {
                f.write_str("the heap has a maintainer; stop that one first, there is one for each heap")
            }
            Self::NoThread(error) => {
                write!(f, "the maintainer's thread could not be started: {error}; see `ulimit -u`")
            }
        }
    }
}

impl std::error::Error for MaintainError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::AlreadyMaintained => None,
            Self::NoThread(error) => Some(error),
        }
    }
}

/// The thread that looks after a heap, until this is stopped or dropped. It keeps the heap alive.
///
/// Neither stops it in a child of `fork`, where there is no such thread.
#[must_use = "the maintainer ends when this is dropped"]
pub struct Maintainer {
    core: &'static Core,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    process: u32,
    /// Dropped after the thread has ended.
    _heap: Option<Heap>,
}

/// What the thread and its handle share. Each of them allocates as it is, so the lock is held for copies only.
#[derive(Default)]
struct Shared {
    books: Mutex<Books>,
    done: Condvar,
}

#[derive(Clone, Copy, Default)]
struct Books {
    asked: u64,
    done: u64,
    ended: bool,
    maintained: Maintained,
}

impl Shared {
    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Maintainer {
    pub(crate) fn start(
        core: &'static Core,
        heap: Option<Heap>,
        maintenance: Maintenance,
    ) -> Result<Maintainer, MaintainError> {
        if !core.bell.begin() {
            return Err(MaintainError::AlreadyMaintained);
        }
        let shared = Arc::new(Shared::default());
        let theirs = shared.clone();
        let run = move || {
            let mut rounds = thread::inside(|| Rounds::new(core, maintenance));
            while thread::inside(|| rounds.run(&theirs)) {
                // The listener is the program's, and may allocate what it likes.
                core.arenas.tell();
            }
            core.bell.end();
        };
        match std::thread::Builder::new().name("rdmalloc".into()).spawn(run) {
            Ok(thread) => {
                Ok(Maintainer { core, shared, thread: Some(thread), process: std::process::id(), _heap: heap })
            }
            Err(error) => {
                core.bell.end();
                Err(MaintainError::NoThread(error))
            }
        }
    }

    /// Has the thread look at the heap now, and waits until it has: a drain pass, if anybody has used the heap since the
    /// last, retention, headroom.
    pub fn round(&self) -> Maintained {
        if self.is_inherited() {
            return self.done();
        }
        let mut books = self.shared.books();
        books.asked += 1;
        let mine = books.asked;
        self.core.bell.call();
        while books.done < mine && !books.ended {
            books = self.shared.done.wait(books).unwrap_or_else(PoisonError::into_inner);
        }
        books.maintained
    }

    /// What it has done so far.
    #[must_use]
    pub fn done(&self) -> Maintained {
        if self.is_inherited() {
            // The thread, which is not in this process, may have been writing them.
            return self.shared.books.try_lock().map(|books| books.maintained).unwrap_or_default();
        }
        self.shared.books().maintained
    }

    /// Ends it, and waits until it has ended. What it has opened stays open, as far as retention keeps it.
    pub fn stop(self) {
        drop(self);
    }

    /// Whether this process is a child of the one that has the thread.
    fn is_inherited(&self) -> bool {
        self.process != std::process::id()
    }
}

impl Drop for Maintainer {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if self.is_inherited() {
            // The handle's thread is the parent's; waiting for it would never end.
            core::mem::forget(thread);
            return;
        }
        self.core.bell.stop();
        // It does not panic; and if it did, there is nobody to tell.
        let _ = thread.join();
    }
}

impl fmt::Debug for Maintainer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Maintainer").field("done", &self.done()).finish_non_exhaustive()
    }
}

/// What the thread knows from round to round. Times are the heap's clock's.
struct Rounds {
    core: &'static Core,
    maintenance: Maintenance,
    maintained: Maintained,
    growth: Growth,
    /// The heap was used since the last pass.
    used: bool,
    last_pass: Duration,
    /// How long after a pass the next is due.
    pause: Duration,
    /// The most that was taken since the last pass.
    peak: usize,
    /// When what was refused is tried again, and how long that took last.
    again: Option<(Duration, Duration)>,
    /// What woke it.
    rung: Rung,
    /// The listener was called just now, and may have had nothing to say to it.
    told: bool,
}

impl Rounds {
    fn new(core: &'static Core, maintenance: Maintenance) -> Rounds {
        let now = core.arenas.time();
        Rounds {
            core,
            maintenance,
            maintained: Maintained::default(),
            growth: Growth { since: now, taken: core.arenas.taken_bytes(), before: 0, recent: false },
            used: true,
            last_pass: now,
            pause: maintenance.interval,
            peak: 0,
            again: None,
            rung: Rung::default(),
            told: false,
        }
    }

    /// Round after round, until the limits' listener is to be told something (`true`), or the maintainer ends.
    fn run(&mut self, shared: &Shared) -> bool {
        while !self.rung.stop {
            let asked = shared.books().asked;
            let asks = asked > shared.books().done;
            self.round(asks);
            let mut books = shared.books();
            books.done = asked;
            books.maintained = self.maintained;
            drop(books);
            shared.done.notify_all();
            if self.core.arenas.has_to_tell() && !self.told {
                self.told = true;
                self.rung = Rung::default();
                return true;
            }
            self.told = false;
            self.rung = self.core.bell.wait(self.maintained.sleeps);
        }
        self.core.arenas.end_headroom();
        shared.books().ended = true;
        shared.done.notify_all();
        false
    }

    fn round(&mut self, asks: bool) {
        let arenas = &self.core.arenas;
        let now = arenas.time();
        self.maintained.rounds += 1;
        self.used |= self.rung.touched;
        self.keep_headroom(now, asks);
        let taken = arenas.taken_bytes();
        self.peak = self.peak.max(taken);
        let freed_much = self.peak - taken >= MUCH.max(self.peak / 8);
        let due = self.last_pass + if freed_much { self.maintenance.interval } else { self.pause };
        let passes = self.used && (asks || now >= due);
        let mut brought = 0;
        if passes {
            let swept = self.core.sweep_and_listen();
            // Who was passed over may have freed something just now, and never comes again.
            self.used = swept.busy > 0;
            brought = swept.slices * SLICE;
            self.maintained.passes += 1;
            self.last_pass = now;
        }
        let (closed, left) = arenas.close_idle();
        if passes {
            arenas.purge_all();
        }
        self.maintained.closed_arenas += closed.arenas as u64;
        if passes {
            // Spare spans that threads take again are no gain.
            let gain = closed.arenas > 0 || brought >= MUCH.max(taken / 8);
            let longest = self.maintenance.interval * LONGEST;
            self.pause = if gain { self.maintenance.interval } else { longest.min(self.pause * 2) };
            self.peak = arenas.taken_bytes();
        }
        let in_use = (self.used || self.growth.recent).then_some(self.maintenance.interval);
        let again = self.again.map(|(at, _)| at.saturating_sub(now));
        self.maintained.sleeps = [in_use, again, left].into_iter().flatten().min();
    }

    /// Registers and opens what is missing, unless that was refused a short while ago.
    fn keep_headroom(&mut self, now: Duration, asks: bool) {
        let arenas = &self.core.arenas;
        let wanted = self.growth.headroom(&self.maintenance, now, arenas.taken_bytes());
        if self.again.is_some_and(|(at, _)| now < at && !asks) {
            return;
        }
        let caught_up = arenas.register_what_was_refused();
        let ahead = arenas.keep_headroom(wanted);
        self.maintained.opened_arenas += ahead.opened as u64;
        self.maintained.registered_late += caught_up.arenas as u64;
        let interval = self.maintenance.interval;
        let pause = self.again.map_or(interval, |(_, pause)| (pause * 2).min(interval * LONGEST));
        let is_refused = ahead.refused.is_some() || caught_up.left > 0;
        self.again = is_refused.then_some((now + pause, pause));
        self.maintained.refusals += u64::from(is_refused);
    }
}

/// How much more was taken of late: in a span of time that is under way, and in the one before it.
struct Growth {
    since: Duration,
    /// What was taken then.
    taken: usize,
    before: usize,
    /// What wants to be looked at again, when it is not of late any more.
    recent: bool,
}

impl Growth {
    /// How many bytes shall be free now.
    fn headroom(&mut self, maintenance: &Maintenance, now: Duration, taken: usize) -> usize {
        if maintenance.headroom == 0 {
            return 0;
        }
        let mut growth = taken.saturating_sub(self.taken);
        let passed = now.saturating_sub(self.since);
        if passed >= maintenance.growth {
            self.before = if passed < maintenance.growth * 2 { growth } else { 0 };
            (self.since, self.taken, growth) = (now, taken, 0);
        }
        self.recent = growth.max(self.before) > 0;
        maintenance.headroom.max(growth.max(self.before).min(taken / 2))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Heap, places};
    use rdmalloc_arenas::sync::asymmetric;
    use std::sync::mpsc::channel;

    #[test]
    fn a_thread_that_a_pass_has_met_in_the_middle_of_an_operation_is_met_by_another_though_it_sleeps() {
        if !asymmetric::is_available() {
            println!("skipped: no membarrier, so no operation is without a lock");
            return;
        }
        let heap = Heap::builder().build().unwrap();
        let tag = heap.core.tag();
        let ((say, is_in), (go, told), (leave, left), (end, ended)) =
            (channel(), channel::<()>(), channel(), channel::<()>());
        let user = heap.clone();
        let thread = std::thread::spawn(move || {
            drop(user.buffer(64));
            places::briefly(tag, |_| {
                say.send(()).unwrap();
                let _ = told.recv();
                Some(())
            });
            leave.send(()).unwrap();
            let _ = ended.recv();
        });
        is_in.recv().unwrap();
        let mut rounds = Rounds::new(heap.core, Maintenance::new());
        rounds.round(true);
        drop(go);
        left.recv().unwrap();
        rounds.round(true);
        rounds.round(true);
        heap.core.bell.end();
        assert_eq!(rounds.maintained.passes, 2, "one that has missed nothing is the last");
        drop(end);
        thread.join().unwrap();
    }

    #[test]
    fn headroom_follows_growth_and_forgets_it() {
        let maintenance = Maintenance::new().headroom(10).growth(Duration::from_secs(1));
        let mut growth = Growth { since: Duration::ZERO, taken: 0, before: 0, recent: false };
        let mut at = |millis, taken| {
            let wanted = growth.headroom(&maintenance, Duration::from_millis(millis), taken);
            (wanted, growth.recent)
        };
        assert_eq!(at(100, 1000), (500, true), "half of what is taken");
        assert_eq!(at(500, 5000), (2500, true));
        assert_eq!(at(1000, 10_000), (5000, true));
        assert_eq!(at(1100, 10_100), (5050, true));
        assert_eq!(at(2000, 10_200), (200, true));
        assert_eq!(at(3000, 9000), (10, false), "shrinking is no growth");
        assert_eq!(at(60_000, 20_000), (10, false), "what grew in a minute is not of late");
    }
}
