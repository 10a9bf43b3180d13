//! A maintainer opens arenas before they are needed, closes what nobody needs, and sleeps when nothing is to be done.

use rdmalloc::{
    Access, Event, Heap, MaintainError, Maintainer, Maintenance, Policy, Rdmalloc, Registered, Registrar, Retention,
};
use rdmalloc_tests::{Churn, Ledger, is_alone};
use std::io;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

const MIB: usize = 1 << 20;
const HOUR: Duration = Duration::from_secs(3600);
/// Nothing happens by time, unless the test sets the clock.
const STILL: Maintenance = Maintenance::new().headroom(0).interval(HOUR);

/// A registrar whose calls a test can wait for: bytes registered, or deregistered (less than 0).
struct Told(Ledger, Mutex<Sender<i64>>);

// SAFETY: there is no device, so nothing touches the memory.
unsafe impl Registrar for Told {
    unsafe fn register(&self, memory: Range<usize>, access: Access) -> io::Result<Registered> {
        // SAFETY: the caller's promise.
        let registered = unsafe { self.0.register(memory.clone(), access) }?;
        let _ = self.1.lock().unwrap().send(memory.len() as i64);
        Ok(registered)
    }
    fn deregister(&self, registered: Registered, memory: Range<usize>) -> io::Result<()> {
        self.0.deregister(registered, memory.clone())?;
        let _ = self.1.lock().unwrap().send(-(memory.len() as i64));
        Ok(())
    }
    fn is_memlocked(&self) -> bool {
        false
    }
    fn name(&self) -> &str {
        "told"
    }
}

fn told() -> (Told, Ledger, Receiver<i64>) {
    let (sender, receiver) = channel();
    let ledger = Ledger::new();
    (Told(ledger.clone(), Mutex::new(sender)), ledger, receiver)
}

/// Waits for what another thread does by itself.
fn until(what: &str, mut is: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is() {
        assert!(begin.elapsed() < Duration::from_secs(60), "not within a minute: {what}");
        thread::yield_now();
    }
}

/// A heap with a clock of its own, in seconds.
macro_rules! heap_with_clock {
    ($now:ident) => {{
        static $now: AtomicU64 = AtomicU64::new(1000);
        let heap = Heap::builder().build().unwrap();
        assert!(heap.set_clock(|| Duration::from_secs($now.load(Relaxed))));
        (heap, &$now)
    }};
}

#[test]
fn memory_is_registered_before_it_is_needed() {
    let heap = Heap::builder().build().unwrap();
    let (registrar, ledger, calls) = told();
    let maintainer = heap.maintain(STILL.headroom(100 * MIB).growth(Duration::ZERO)).unwrap();
    heap.attach(registrar).unwrap();
    // Nobody has asked for memory.
    let mut registered = 0;
    while registered < 100 * MIB as i64 {
        registered += calls.recv().unwrap();
    }
    let mut buffers = Vec::new();
    for taken in 1..=300 {
        buffers.push(heap.buffer(MIB).unwrap());
        while registered < ((taken + 100) * MIB) as i64 {
            registered += calls.recv().unwrap();
        }
    }
    let done = maintainer.round();
    assert_eq!(heap.stats().opened, done.opened_arenas, "an arena was opened by who needed it");
    assert!(ledger.live_bytes() >= 400 * MIB);
    drop(buffers);
    maintainer.stop();
    heap.trim();
    assert_eq!(ledger.live(), 0);
}

#[test]
fn headroom_is_neither_closed_by_age_nor_missing_after_trim() {
    let (heap, now) = heap_with_clock!(NOW);
    let ledger = Ledger::new();
    heap.attach(ledger.clone()).unwrap();
    let maintainer = heap.maintain(STILL.headroom(60 * MIB)).unwrap();
    maintainer.round();
    assert_eq!(ledger.live_bytes(), 60 * MIB);
    now.fetch_add(1000, Relaxed);
    assert_eq!(maintainer.round().closed_arenas, 0);
    assert_eq!((heap.trim().open_arenas, ledger.live()), (0, 0));
    // The first to take a span after that calls the maintainer.
    let buffer = heap.buffer(MIB).unwrap();
    until("headroom again", || ledger.live_bytes() >= 60 * MIB);
    drop(buffer);
    maintainer.stop();
}

#[test]
fn a_heap_without_a_device_opens_nothing_ahead() {
    let heap = Heap::builder().build().unwrap();
    let maintainer = heap.maintain(STILL.headroom(64 * MIB)).unwrap();
    assert_eq!((maintainer.round().opened_arenas, heap.stats().arenas), (0, 0));
}

#[test]
fn what_nobody_needs_is_closed_after_its_time() {
    let (heap, now) = heap_with_clock!(NOW);
    let ledger = Ledger::new();
    heap.attach(ledger.clone()).unwrap();
    heap.set_retention(Retention::new().time(Duration::from_secs(5)));
    let maintainer = heap.maintain(STILL).unwrap();
    let buffers: Vec<_> = (0..40).map(|_| heap.buffer(MIB).unwrap()).collect();
    drop(buffers);
    let arenas = ledger.live();
    assert!(arenas > 1);
    // Some of it is still with the heap's caches; the pass of a round takes it.
    let done = maintainer.round();
    assert_eq!((done.closed_arenas, ledger.live(), done.sleeps), (0, arenas, Some(Duration::from_secs(5))));
    now.fetch_add(4, Relaxed);
    assert_eq!(maintainer.round().closed_arenas, 0);
    now.fetch_add(1, Relaxed);
    let done = maintainer.round();
    assert_eq!((done.closed_arenas, ledger.live(), done.sleeps), (arenas as u64, 0, None));
}

#[test]
fn where_nothing_is_retained_an_arena_closes_by_itself() {
    let heap = Heap::builder().retention(Retention::NONE).build().unwrap();
    let (registrar, _, calls) = told();
    heap.attach(registrar).unwrap();
    let _maintainer = heap.maintain(STILL).unwrap();
    for _ in 0..100 {
        let buffer = heap.buffer(40 * MIB).unwrap();
        assert_eq!(calls.recv().unwrap(), 40 * MIB as i64);
        drop(buffer);
        assert_eq!(calls.recv().unwrap(), -(40 * MIB as i64));
    }
}

#[test]
fn what_was_refused_is_tried_again_and_less_and_less_often() {
    let (heap, now) = heap_with_clock!(NOW);
    let ledger = Ledger::new();
    heap.attach(ledger.clone()).unwrap();
    ledger.refuse_after(Some(0));
    let maintainer = heap.maintain(STILL.headroom(MIB).interval(Duration::from_secs(10))).unwrap();
    until("the first refusal", || maintainer.done().refusals == 1);
    assert_eq!(maintainer.done().sleeps, Some(Duration::from_secs(10)));
    assert_eq!((ledger.live(), heap.stats().arenas), (0, 0), "memory that was refused is not kept");
    // Who asks for a round gets an attempt.
    let done = maintainer.round();
    assert_eq!(done.refusals, 2);
    now.fetch_add(5, Relaxed);
    ledger.refuse_after(None);
    assert_eq!(maintainer.round().opened_arenas, 1);
    assert!(ledger.live_bytes() >= MIB);
}

#[test]
fn memory_that_was_refused_is_registered_as_soon_as_that_can_be_and_the_listener_is_told() {
    let (told, events) = channel();
    let listener = move |event: &Event| {
        // Not inside the allocator: it may allocate what it likes, and keep it.
        let _ = told.send(vec![format!("{event:?}"); 1000]);
    };
    let heap = Heap::builder().policy(Policy::Prefer).on_event(listener).build().unwrap();
    let ledger = Ledger::new();
    let device = heap.attach(ledger.clone()).unwrap();
    let maintainer = heap.maintain(STILL).unwrap();
    rest(&maintainer);
    ledger.refuse_after(Some(0));
    let buffer = heap.buffer(MIB).unwrap();
    assert!(device.key(buffer.as_ptr()).is_err());
    assert!(events.recv().unwrap()[999].contains("Unregistered"));
    assert_eq!(maintainer.round().registered_late, 0);
    ledger.refuse_after(None);
    assert_eq!(maintainer.round().registered_late, 1);
    assert!(device.key(buffer.as_ptr()).is_ok());
    assert_eq!(events.recv().unwrap()[0], "Registered");
    rest(&maintainer);
}

#[test]
fn there_is_one_maintainer_for_each_heap_and_it_stops() {
    let (one, two) = (Heap::builder().build().unwrap(), Heap::builder().build().unwrap());
    for _ in 0..20 {
        let maintainer = one.maintain(Maintenance::new()).unwrap();
        assert!(matches!(one.clone().maintain(Maintenance::new()), Err(MaintainError::AlreadyMaintained)));
        let other = two.maintain(Maintenance::new()).unwrap();
        // Asleep for ever, and ended all the same.
        drop(other);
        maintainer.stop();
    }
}

#[test]
fn a_maintainer_keeps_its_heap_and_the_heap_ends_after_it() {
    let ledger = Ledger::new();
    let heap = Heap::builder().build().unwrap();
    heap.attach(ledger.clone()).unwrap();
    let maintainer = heap.maintain(STILL.headroom(MIB)).unwrap();
    drop(heap);
    maintainer.round();
    assert_eq!(ledger.live(), 1);
    maintainer.stop();
    assert_eq!(ledger.live(), 0);
}

/// Rounds until there is nothing left to do, and nothing to wait for.
fn rest(maintainer: &Maintainer) {
    until("rest", || maintainer.round().sleeps.is_none());
}

#[test]
fn an_idle_program_is_left_alone_and_the_first_use_is_noticed() {
    if !is_alone() {
        return;
    }
    HEAP.set_retention(Retention::new().time(Duration::MAX));
    let maintainer = HEAP.maintain(STILL).unwrap();
    let (wake, sleep) = channel::<()>();
    let (used, uses) = channel();
    let mut own = vec![1u8; 100];
    let sleeper = thread::spawn(move || {
        let mut block = vec![1u8; 100];
        used.send(()).unwrap();
        while sleep.recv().is_ok() {
            // In the thread's cache: nothing but its own fast path.
            block = block.clone();
            used.send(()).unwrap();
        }
    });
    uses.recv().unwrap();
    rest(&maintainer);
    let rounds = maintainer.done().rounds;
    assert_eq!(maintainer.done().sleeps, None, "it wakes for nothing");
    // This thread uses its cache once.
    own = own.clone();
    until("the touch is noticed", || maintainer.done().sleeps == Some(HOUR));
    assert!(maintainer.done().rounds > rounds && own[0] == 1);
    rest(&maintainer);
    let passes = maintainer.done().passes;
    wake.send(()).unwrap();
    uses.recv().unwrap();
    until("the touch is noticed", || maintainer.done().sleeps == Some(HOUR));
    assert_eq!(maintainer.round().passes, passes + 1);
    drop(wake);
    sleeper.join().unwrap();
}

#[test]
fn blocks_that_others_free_into_sleeping_caches_are_noticed() {
    if !is_alone() {
        return;
    }
    let ledger = Ledger::new();
    HEAP.set_retention(Retention::NONE);
    HEAP.attach(ledger.clone()).unwrap();
    let maintainer = HEAP.maintain(STILL).unwrap();
    let (sender, receiver) = channel();
    for _ in 0..8 {
        let sender = sender.clone();
        thread::spawn(move || {
            let blocks: Vec<_> = (0..2000).map(|number| vec![number as u8; 1 << (4 + number % 14)]).collect();
            sender.send(blocks).unwrap();
            drop(sender);
            loop {
                thread::park();
            }
        });
    }
    drop(sender);
    let blocks: Vec<_> = receiver.iter().collect();
    rest(&maintainer);
    let full = ledger.live_bytes();
    thread::spawn(|| drop(blocks)).join().unwrap();
    until("the frees are noticed", || maintainer.done().sleeps == Some(HOUR));
    maintainer.round();
    let arenas = HEAP.arenas();
    assert!(arenas.iter().all(|arena| arena.spans > 0), "{arenas:?}");
    assert!(ledger.live_bytes() < full && ledger.live() == arenas.len());
}

#[test]
fn a_busy_program_is_maintained_while_devices_come_and_go() {
    let churn = Churn::start(6);
    HEAP.set_retention(Retention::new().bytes(0));
    let maintainer = HEAP.maintain(Maintenance::new().headroom(70 * MIB).interval(Duration::from_micros(100))).unwrap();
    for _ in 0..10 {
        let ledger = Ledger::new();
        let device = HEAP.attach(ledger.clone()).unwrap();
        maintainer.round();
        churn.wait_for(20);
        HEAP.detach(device).unwrap();
        assert_eq!(ledger.live(), 0);
    }
    assert!(maintainer.done().passes > 0);
    maintainer.stop();
    // Finds out whether a block was changed.
    churn.stop();
}

#[test]
fn a_child_of_fork_neither_waits_for_the_maintainer_nor_stops_it() {
    if !is_alone() {
        return;
    }
    let ledger = Ledger::new();
    HEAP.attach(ledger.clone()).unwrap();
    let maintainer = HEAP.maintain(STILL.headroom(MIB)).unwrap();
    rest(&maintainer);
    // SAFETY: the child allocates from the global heap, which serves children, and leaves without running anything else.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let block = vec![1u8; 40 * MIB];
        maintainer.round();
        maintainer.stop();
        // SAFETY: leaves.
        unsafe { libc::_exit(i32::from(block[MIB] != 1)) }
    }
    let mut status = 0;
    // SAFETY: waits for the child made above.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "{status:x}");
    assert!(maintainer.round().rounds > 0);
    maintainer.stop();
}
