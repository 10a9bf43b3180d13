//! Devices come and go, are held, and get lost, over registrars that keep books and break on demand. The same on real verbs is
//! in `verbs_devices.rs`.

use rdmalloc::{
    Access, AttachError, DetachError, Device, Heap, HoldError, KeyError, Keys, NotRegistered, Rdmalloc, Registered,
    Registrar,
};
use rdmalloc_tests::{Brittle, Churn, Ledger};
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

/// Longer than anything takes that is not stuck.
const LONG: Duration = Duration::from_secs(60);
const MIB: usize = 1 << 20;

/// One test at a time: they share the columns of the process.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[track_caller]
fn assert_in_use(result: Result<(), DetachError>, expected: usize) -> Duration {
    match result {
        Err(DetachError::InUse { holds, waited, .. }) if holds == expected => waited,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_detach_is_refused_with_the_number_of_holds_and_waits_as_long_as_it_may() {
    let _alone = alone();
    let (heap, ledger) = (Heap::builder().build().unwrap(), Ledger::new());
    let device = heap.attach(ledger.clone()).unwrap();
    let buffer = heap.buffer(100).unwrap();
    let mut holds: Vec<_> = (0..3).map(|_| device.hold().unwrap()).collect();
    assert_eq!((device.hold_count(), holds[0].device()), (3, device));
    assert_in_use(heap.detach(device), 3);
    let patience = Duration::from_millis(30);
    let result = heap.detach_within(device, patience);
    assert!(result.as_ref().unwrap_err().to_string().contains("3 hold(s)"), "{result:?}");
    assert!(assert_in_use(result, 3) >= patience);
    assert!(device.key(buffer.as_ptr()).is_ok(), "nothing has changed");
    holds.push(device.hold().unwrap());

    std::thread::scope(|scope| {
        // Two at once: one of them does it.
        let detachers = [(); 2].map(|()| scope.spawn(|| heap.detach_within(device, LONG)));
        // As soon as one waits, nobody gets a hold any more.
        while device.hold().is_ok() {
            std::thread::yield_now();
        }
        assert_eq!(device.hold(), Err(HoldError::Detaching));
        assert!(device.key(buffer.as_ptr()).is_ok(), "what is under way goes on");
        assert_eq!(ledger.live(), 1);
        // The heap goes on too: an arena is opened, and registered, while the detach waits.
        drop(heap.buffer(100 * MIB).unwrap());
        drop(holds);
        let results = detachers.map(|detacher| detacher.join().unwrap());
        assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 1, "{results:?}");
        assert!(results.iter().any(|result| matches!(result, Err(DetachError::NotAttached))), "{results:?}");
    });
    assert_eq!((ledger.live(), device.hold_count()), (0, 0));
    assert_eq!(device.hold(), Err(HoldError::Detached));
    assert_eq!(device.key(buffer.as_ptr()), Err(KeyError::Detached));
    assert!(matches!(heap.detach(device), Err(DetachError::NotAttached)));
}

#[test]
fn the_end_of_a_heap_does_not_wait_for_holds_and_they_are_counted_on() {
    let _alone = alone();
    let heaps = [(); 2].map(|()| Heap::builder().build().unwrap());
    let brittle = Brittle::of_identity(0x1000);
    let [device, same] = heaps.each_ref().map(|heap| heap.attach(brittle.clone()).unwrap());
    assert_eq!(device, same);
    let hold = device.hold().unwrap();
    let [first, second] = heaps;
    assert_in_use(first.detach(device), 1);
    drop(first);
    assert!(device.hold().is_ok(), "the second heap has it");
    drop(second);
    assert!(brittle.is_let_go());
    assert_eq!((device.hold(), device.hold_count()), (Err(HoldError::Detached), 1));

    // Another device does not get the place of one that is held: its holds would be counted together.
    let heap = Heap::builder().build().unwrap();
    let next = heap.attach(Ledger::new()).unwrap();
    assert_ne!(next.slot(), device.slot());
    heap.detach(next).unwrap();
    drop(hold);
    assert_eq!(device.hold_count(), 0);
    let next = heap.attach(Ledger::new()).unwrap();
    heap.detach(next).unwrap();
}

#[test]
fn an_attach_that_fails_on_any_arena_of_any_device_undoes_what_it_did() {
    let _alone = alone();
    const ARENAS: usize = 4;
    let heap = Heap::builder().build().unwrap();
    let first = Ledger::new();
    let attached = heap.attach(first.clone()).unwrap();
    let buffers: Vec<_> = (0..ARENAS).map(|_| heap.buffer(40 * MIB).unwrap()).collect();
    assert_eq!(first.live(), ARENAS);
    for fails_on in 0..ARENAS {
        for failing in 0..3 {
            let ledgers = [Ledger::new(), Ledger::with_max_len(3 << 20), Ledger::new()];
            // The second registers each arena in pieces of 2 MiB; it fails in the middle of one.
            let count = if failing == 1 { fails_on * 20 + 7 } else { fails_on };
            ledgers[failing].refuse_after(Some(count as u64));
            let error = heap.attach_all(ledgers.clone()).unwrap_err();
            let AttachError::Register(error) = error else { panic!("{error}") };
            assert_eq!((error.wanted, error.devices), (40 * MIB, 4));
            assert_eq!(ledgers.each_ref().map(Ledger::live), [0; 3], "device {failing}, arena {fails_on}");
        }
    }
    assert_eq!(first.live(), ARENAS, "who was attached before stays so");
    assert!(buffers.iter().all(|buffer| attached.key(buffer.as_ptr()).is_ok()));
    let devices = heap.attach_all([Ledger::new(), Ledger::new()]).unwrap();
    assert!(devices.iter().all(|device| buffers.iter().all(|buffer| device.key(buffer.as_ptr()).is_ok())));
    for device in devices.into_iter().chain([attached]) {
        heap.detach(device).unwrap();
    }
}

#[test]
fn one_that_cannot_be_attached_among_several_leaves_none_attached() {
    let _alone = alone();
    let heap = Heap::builder().build().unwrap();
    let all = [Brittle::new(), Brittle::of_identity(7), Brittle::of_identity(7), Brittle::new()];
    assert!(matches!(heap.attach_all(all.clone()), Err(AttachError::AlreadyAttached { .. })));
    assert!(all.iter().all(Brittle::is_let_go));
    let device = heap.attach(all[1].clone()).unwrap();
    heap.detach(device).unwrap();
    assert!(heap.attach_all(Vec::<Ledger>::new()).unwrap().is_empty());
}

/// From so many bytes on, devices register at once.
const AT_ONCE: usize = 128 * MIB;

/// A device that registers, and deregisters, large arenas only while all of its fellows do; and allocates meanwhile, as
/// libraries do.
#[derive(Clone)]
struct Fellow(Arc<Meeting>);

#[derive(Default)]
struct Meeting {
    fellows: usize,
    alone: AtomicBool,
    arrived: Mutex<usize>,
    complete: Condvar,
    calls: AtomicU32,
    /// The addresses that were allocated during the calls.
    allocated: Mutex<Vec<usize>>,
}

impl Fellow {
    fn fellows(count: usize) -> Vec<Fellow> {
        vec![Fellow(Arc::new(Meeting { fellows: count, ..Meeting::default() })); count]
    }

    fn meet(&self, memory: &Range<usize>) -> io::Result<()> {
        let blocks: Vec<_> = (0..23).map(|shift| vec![1u8; 1 << shift]).collect();
        self.0.allocated.lock().unwrap().extend(blocks.iter().map(|block| block.as_ptr().addr()));
        let Meeting { fellows, alone, arrived, complete, .. } = &*self.0;
        if memory.len() < AT_ONCE || alone.load(Relaxed) {
            return Ok(());
        }
        let mut arrived = arrived.lock().unwrap();
        *arrived += 1;
        let all = (*arrived).next_multiple_of(*fellows);
        complete.notify_all();
        let (arrived, _) = complete.wait_timeout_while(arrived, LONG, |arrived| *arrived < all).unwrap();
        if *arrived < all { Err(io::Error::from_raw_os_error(libc::ETIMEDOUT)) } else { Ok(()) }
    }
}

// SAFETY: there is no device, so nothing touches the memory.
unsafe impl Registrar for Fellow {
    unsafe fn register(&self, memory: Range<usize>, _: Access) -> io::Result<Registered> {
        self.meet(&memory)?;
        let handle = self.0.calls.fetch_add(1, Relaxed);
        Ok(Registered { keys: Keys { lkey: handle, rkey: handle }, handle: handle.into() })
    }

    fn deregister(&self, _: Registered, memory: Range<usize>) -> io::Result<()> {
        self.meet(&memory)
    }

    fn is_memlocked(&self) -> bool {
        false
    }

    fn name(&self) -> &str {
        "fellow"
    }
}

#[test]
fn devices_register_at_once_and_what_they_allocate_meanwhile_is_not_of_the_heap() {
    let _alone = alone();
    let (churn, stuck) = (Churn::start(2), HEAP.stats().stuck_arenas);
    let before = vec![1u8; 160 * MIB];
    let fellows = Fellow::fellows(3);
    // On the global heap: were what they allocate of it, they would wait for the arena that they are to register.
    let devices = HEAP.attach_all(fellows.clone()).unwrap();
    let is_reached = |block: &[u8]| devices.iter().all(|device| device.key(block).is_ok());
    assert!(is_reached(&before));
    let opened = vec![2u8; 200 * MIB];
    assert!(is_reached(&opened));
    for address in std::mem::take(&mut *fellows[0].0.allocated.lock().unwrap()) {
        let key = devices[0].key_of_address(address);
        let free = [KeyError::NotRegistered(NotRegistered::OtherHeap), KeyError::Foreign];
        assert!(key.is_err_and(|error| free.contains(&error)), "{key:?}");
    }
    drop((before, opened));
    assert_eq!(HEAP.trim().stuck_arenas, stuck);
    fellows[0].0.alone.store(true, Relaxed);
    devices.into_iter().for_each(|device| HEAP.detach(device).unwrap());
    churn.stop();
}

#[test]
fn a_lost_device_ends_its_keys_on_all_heaps_and_the_rest_goes_on() {
    let _alone = alone();
    let heaps = [(); 2].map(|()| Heap::builder().build().unwrap());
    let (brittle, whole) = (Brittle::of_identity(0x2000), Ledger::new());
    let [lost, _] = heaps.each_ref().map(|heap| heap.attach(brittle.clone()).unwrap());
    let other = heaps[0].attach(whole.clone()).unwrap();
    let buffers = heaps.each_ref().map(|heap| heap.buffer(100).unwrap());
    let flights = [lost.hold().unwrap(), lost.hold().unwrap()];
    let offered = brittle.offered();

    lost.mark_lost();
    assert!(lost.is_lost() && !other.is_lost());
    assert!(buffers.iter().all(|buffer| lost.key(buffer.as_ptr()) == Err(KeyError::Lost)));
    assert_eq!((lost.hold(), lost.hold_count()), (Err(HoldError::Lost), 2));
    assert!(other.key(buffers[0].as_ptr()).is_ok());
    // A heap that serves only registered memory goes on without the lost device.
    let more = heaps.each_ref().map(|heap| heap.buffer(100 * MIB).unwrap());
    assert_eq!(brittle.offered(), offered, "new arenas are not offered to it");
    assert_eq!(lost.key(more[0].as_ptr()), Err(KeyError::Lost));
    assert!(other.key(more[0].as_ptr()).is_ok());
    // Nor is it attached anew as it is.
    let third = Heap::builder().build().unwrap();
    assert!(matches!(third.attach(brittle.clone()), Err(AttachError::Lost { .. })));

    // It still lets go of what it had, so the memory goes; and its flights, which never end, are not waited for.
    let registered = brittle.ledger.live();
    assert_eq!(registered, 2);
    let [first, second] = buffers;
    drop(second);
    heaps[1].trim();
    assert_eq!(brittle.ledger.live(), 1);
    heaps.iter().for_each(|heap| heap.detach(lost).unwrap());
    assert_eq!((brittle.ledger.live(), brittle.is_let_go()), (0, true));
    assert_eq!((lost.key(first.as_ptr()), lost.hold_count()), (Err(KeyError::Detached), 2));
    assert!(other.key(first.as_ptr()).is_ok());
    drop(flights);
    assert_eq!(lost.hold_count(), 0);
    // What was opened anew is another device.
    let anew = heaps[0].attach(Brittle::of_identity(0x2000)).unwrap();
    assert!(anew != lost && !anew.is_lost() && anew.key(first.as_ptr()).is_ok());
}

#[test]
fn a_detach_that_waits_is_done_when_the_device_is_lost() {
    let _alone = alone();
    let heap = Heap::builder().build().unwrap();
    let device = heap.attach(Brittle::new()).unwrap();
    let flight = device.hold().unwrap();
    std::thread::scope(|scope| {
        let detacher = scope.spawn(|| heap.detach_within(device, LONG));
        while device.hold().is_ok() {
            std::thread::yield_now();
        }
        device.mark_lost();
        detacher.join().unwrap().unwrap();
    });
    assert_eq!(device.hold_count(), 1);
    drop(flight);
}

#[test]
fn an_error_of_a_device_that_says_it_is_lost_ends_its_keys_and_one_of_another_is_a_refusal() {
    let _alone = alone();
    let (heap, brittle) = (Heap::builder().build().unwrap(), Brittle::new());
    let device = heap.attach(brittle.clone()).unwrap();
    let buffer = heap.buffer(100).unwrap();
    brittle.fail(false);
    let refused = heap.buffer(100 * MIB).unwrap_err();
    assert!(refused.to_string().contains("not registered with brittle0"), "{refused}");
    assert!(device.key(buffer.as_ptr()).is_ok() && !device.is_lost());
    let whole = heap.attach(Ledger::new()).unwrap();
    brittle.fail(true);
    let opened = heap.buffer(100 * MIB).unwrap();
    assert!(device.is_lost());
    assert!(whole.key(opened.as_ptr()).is_ok(), "the next device was not asked");
    assert_eq!(device.key(buffer.as_ptr()), Err(KeyError::Lost));
    heap.detach(device).unwrap();

    // The global heap, which serves what was refused, and one that finds out at the detach or the close.
    let brittle = Brittle::new();
    let device = HEAP.attach(brittle.clone()).unwrap();
    brittle.fail(true);
    brittle.cling();
    let large = vec![1u8; 100 * MIB];
    assert_eq!(device.key(large.as_ptr()), Err(KeyError::Lost));
    let Err(DetachError::Kept { .. }) = HEAP.detach(device) else { panic!("it let go") };
    let (heap, brittle) = (Heap::builder().build().unwrap(), Brittle::new());
    let device = heap.attach(brittle.clone()).unwrap();
    let buffer = heap.buffer(100).unwrap();
    drop(heap.buffer(100 * MIB).unwrap());
    brittle.fail(true);
    brittle.cling();
    assert_eq!(heap.trim().stuck_arenas, 1);
    assert_eq!(device.key(buffer.as_ptr()), Err(KeyError::Lost));
}

#[test]
fn what_a_lost_device_does_not_let_go_of_is_kept_with_its_registrar() {
    let _alone = alone();
    let (heap, brittle) = (Heap::builder().build().unwrap(), Brittle::new());
    let device = heap.attach(brittle.clone()).unwrap();
    let (closed, open) = (heap.buffer(40 * MIB).unwrap(), heap.buffer(40 * MIB).unwrap());
    let opened = heap.stats().open_bytes;
    device.mark_lost();
    brittle.cling();
    drop(closed);
    assert_eq!(heap.trim().stuck_arenas, 1);
    // The arena that was closed counts as well, though there is nothing to try again.
    let Err(DetachError::Kept { arenas, bytes, .. }) = heap.detach(device) else { panic!("it let go") };
    assert_eq!((arenas, bytes), (2, opened));
    assert!(!brittle.is_let_go(), "the protection domain is needed by what is left");
    // New memory is apart from what is kept, and all that is kept can still be written by the device.
    let address = open.as_ptr().addr();
    drop(open);
    assert_eq!(heap.trim().open_arenas, 0);
    let next = heap.buffer(100).unwrap();
    assert!(next.as_ptr().addr().abs_diff(address) >= 40 * MIB);
}

#[test]
fn what_a_device_keeps_is_registered_with_others_only_as_long_as_something_is_in_it() {
    let _alone = alone();
    let (heap, brittle) = (Heap::builder().build().unwrap(), Brittle::new());
    let device = heap.attach(brittle.clone()).unwrap();
    let buffer = heap.buffer(MIB).unwrap();
    brittle.cling();
    let Err(DetachError::Kept { arenas: 1, .. }) = heap.detach(device) else { panic!("it let go") };
    let attach = || {
        let ledger = Ledger::new();
        (heap.attach(ledger.clone()).unwrap(), ledger.live())
    };
    let (device, registrations) = attach();
    assert!(device.key(buffer.as_ptr()).is_ok() && registrations == 1);
    heap.detach(device).unwrap();
    drop(buffer);
    heap.trim();
    assert_eq!(attach().1, 0, "memory that is nobody's is pinned once more");
}

#[test]
fn a_device_is_kept_if_only_a_closed_arena_is() {
    let _alone = alone();
    let (heap, brittle) = (Heap::builder().build().unwrap(), Brittle::new());
    let device = heap.attach(brittle.clone()).unwrap();
    drop(heap.buffer(100).unwrap());
    brittle.cling();
    assert_eq!(heap.trim().stuck_arenas, 1);
    assert_eq!(heap.stats().arenas, 0);
    let Err(DetachError::Kept { arenas: 1, .. }) = heap.detach(device) else { panic!("it let go") };
    assert!(!brittle.is_let_go());
}

#[test]
fn devices_come_go_are_held_and_get_lost_while_eight_threads_allocate() {
    let _alone = alone();
    let churn = Churn::start(8);
    let heaps = [(); 2].map(|()| Heap::builder().build().unwrap());
    let (stop, flown) = (AtomicBool::new(false), AtomicU64::new(0));
    let current: Mutex<Option<Device>> = Mutex::new(None);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !stop.load(Relaxed) {
                    let device = *current.lock().unwrap_or_else(PoisonError::into_inner);
                    let Some(hold) = device.and_then(|device| device.hold().ok()) else {
                        std::thread::yield_now();
                        continue;
                    };
                    // A flight: while it is held, an attached device that is not lost has keys.
                    let buffer = heaps[0].buffer(3000).unwrap();
                    let key = hold.device().key(buffer.as_ptr());
                    assert!(key.is_ok() || hold.device().is_lost(), "{key:?}");
                    drop(hold);
                    flown.fetch_add(1, Relaxed);
                }
            });
        }
        let deadline = Instant::now() + LONG;
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for round in 0..12usize {
                let brittle = Brittle::of_identity(0x3000 + round % 2);
                let device = heaps[0].attach(brittle.clone()).unwrap();
                assert_eq!(heaps[1].attach(brittle.clone()).unwrap(), device);
                assert_eq!(HEAP.attach(brittle.clone()).unwrap(), device);
                let other = heaps[0].attach(Ledger::with_max_len(2 << 20)).unwrap();
                *current.lock().unwrap() = Some(device);
                let seen = flown.load(Relaxed);
                while flown.load(Relaxed) < seen + 20 {
                    assert!(Instant::now() < deadline, "no flights");
                    std::thread::yield_now();
                }
                churn.wait_for(300);
                if round % 3 == 2 {
                    device.mark_lost();
                }
                heaps[0].trim();
                heaps[0].detach_within(other, LONG).unwrap();
                heaps[1].detach_within(device, LONG).unwrap();
                HEAP.detach_within(device, LONG).unwrap();
                heaps[0].detach_within(device, LONG).unwrap();
                assert_eq!(brittle.ledger.live(), 0);
                assert!(brittle.is_let_go());
            }
        }));
        stop.store(true, Relaxed);
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
    churn.stop();
    heaps.iter().for_each(|heap| assert_eq!(heap.trim().open_arenas, 0));
}
