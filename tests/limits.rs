//! What a heap may have registered, and what becomes of memory that is not: over a registrar without a device.

use rdmalloc::{AttachError, Budget, Event, Heap, KeyError, NotRegistered, Policy, Refusal, RegisterError, TakeError};
use rdmalloc_tests::Ledger;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

const MIB: usize = 1 << 20;

fn budget(mib: u64) -> Budget {
    Budget { bytes: mib << 20, ..Budget::NONE }
}

fn refusal<T>(result: Result<T, TakeError>) -> RegisterError {
    match result {
        Err(TakeError::Register(error)) => error,
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("not refused"),
    }
}

/// What a heap has told.
#[derive(Clone, Default)]
struct Told(Arc<Mutex<Vec<Event>>>);

impl Told {
    fn listener(&self) -> impl Fn(&Event) + Send + Sync + 'static {
        let told = self.0.clone();
        move |event| told.lock().unwrap().push(*event)
    }

    fn take(&self) -> Vec<Event> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

#[test]
fn a_budget_in_bytes_is_never_exceeded_and_the_error_has_its_numbers() {
    let ledger = Ledger::new();
    let heap = Heap::builder().budget(budget(64)).build().unwrap();
    heap.attach(ledger.clone()).unwrap();
    let mut buffers = Vec::new();
    let error = loop {
        match heap.buffer(7 * MIB) {
            Ok(buffer) => buffers.push(buffer),
            refused => break refusal(refused),
        }
        assert!(ledger.live_bytes() <= 64 * MIB);
        assert_eq!(heap.registered_bytes(), ledger.live_bytes() as u64);
    };
    assert!(buffers.len() >= 6, "{} of 9 fit: the arenas are too large for the budget", buffers.len());
    let Refusal::OverBudget { limit, registered } = error.reason else { panic!("{error}") };
    assert_eq!((limit, registered, error.devices), (64 << 20, ledger.live_bytes() as u64, 1));
    assert!(error.to_string().contains("budget is 65536 KiB") && error.to_string().contains("set_budget"), "{error}");
    let stats = heap.stats();
    assert!(stats.refused.over_budget > 0 && stats.failures.not_registered > 0 && stats.refused.by_device == 0);

    // What is freed can be had again, and what the budget is raised by.
    buffers.pop();
    buffers.push(heap.buffer(7 * MIB).unwrap());
    heap.set_budget(budget(128));
    buffers.push(heap.buffer(7 * MIB).unwrap());
}

#[test]
fn memory_counts_once_for_each_device() {
    let ledgers = [Ledger::new(), Ledger::new()];
    let heap = Heap::builder().budget(budget(32)).build().unwrap();
    let first = heap.attach(ledgers[0].clone()).unwrap();
    heap.attach(ledgers[1].clone()).unwrap();
    let _half = heap.buffer(16 * MIB).unwrap();
    assert_eq!(heap.registered_bytes(), 32 << 20);
    let Refusal::OverBudget { registered, .. } = refusal(heap.buffer(MIB * 2)).reason else { panic!("another reason") };
    assert_eq!(registered, 32 << 20);
    heap.detach(first).unwrap();
    assert_eq!(heap.registered_bytes(), 16 << 20);
    let _other = heap.buffer(16 * MIB).unwrap();
    let devices = heap.stats().devices;
    assert_eq!(devices.len(), 1);
    assert_eq!((devices[0].registered_bytes, devices[0].registrations), (32 << 20, 2));
    assert_eq!(devices[0].name.as_str(), "ledger");
}

#[test]
fn a_budget_of_registrations_counts_the_pieces_of_an_arena() {
    let ledger = Ledger::with_max_len(4 << 20);
    let heap = Heap::builder().budget(Budget { registrations: 9, ..Budget::NONE }).build().unwrap();
    heap.attach(ledger.clone()).unwrap();
    let _eight = heap.buffer(32 * MIB).unwrap();
    let Refusal::TooManyRegistrations { limit, registered } = refusal(heap.buffer(8 * MIB)).reason else {
        panic!("another reason")
    };
    assert_eq!((limit, registered, ledger.live()), (9, 8, 8));
    // The first try is half of what is open, 16 MiB, the second what is needed.
    let _one = heap.buffer(4 * MIB).unwrap();
    assert_eq!((heap.stats().registered, heap.stats().refused.over_budget), (9, 0));
}

#[test]
fn a_device_that_is_full_is_not_called_and_counts_over_all_heaps() {
    let ledger = Ledger::with_max_registrations(2);
    let heaps = [(); 2].map(|()| Heap::builder().build().unwrap());
    let devices = heaps.each_ref().map(|heap| heap.attach(ledger.clone()).unwrap());
    assert_eq!(devices[0], devices[1]);
    let [one, two] = heaps.each_ref().map(|heap| heap.buffer(100).unwrap());
    let Refusal::DeviceFull { limit, registered } = refusal(heaps[0].buffer(40 * MIB)).reason else {
        panic!("another reason")
    };
    assert_eq!((limit, registered, ledger.registrations()), (2, 2, 2));
    drop(two);
    assert_eq!(heaps[1].trim().closed_arenas, 1);
    heaps[0].buffer(40 * MIB).unwrap();
    drop(one);
}

#[test]
fn what_is_kept_without_need_is_closed_before_a_limit_refuses() {
    for policy in [Policy::Require, Policy::Prefer] {
        let ledger = Ledger::new();
        let heap = Heap::builder().budget(budget(64)).policy(policy).build().unwrap();
        let device = heap.attach(ledger.clone()).unwrap();
        drop(heap.buffer(30 * MIB).unwrap());
        drop(heap.buffer(20 * MIB).unwrap());
        let all = heap.buffer(64 * MIB).unwrap();
        assert!(device.key(all.as_ptr()).is_ok(), "{policy:?}");
        assert_eq!(ledger.live_bytes(), 64 * MIB);
    }
}

#[test]
fn memory_over_a_limit_is_served_with_the_reason_counted_told_once_and_registered_when_it_can_be() {
    let (ledger, told) = (Ledger::new(), Told::default());
    let build = Heap::builder().budget(budget(16)).policy(Policy::Prefer).on_event(told.listener());
    let heap = build.build().unwrap();
    let device = heap.attach(ledger.clone()).unwrap();
    let within = heap.buffer(12 * MIB).unwrap();
    let over = [heap.buffer(12 * MIB).unwrap(), heap.buffer(40 * MIB).unwrap()];
    assert!(device.key(within.as_ptr()).is_ok());
    let reason = NotRegistered::OverBudget { limit_kib: 16 << 10, registered_kib: 12 << 10 };
    for buffer in &over {
        let error = device.key(buffer.as_ptr()).unwrap_err();
        assert_eq!(error, KeyError::NotRegistered(reason));
        assert!(error.to_string().contains("budget of 16384 KiB"), "{error}");
    }
    let stats = heap.stats();
    assert_eq!((stats.unregistered_arenas, stats.refused.over_budget, ledger.live_bytes()), (2, 2, 12 * MIB));
    assert_eq!(stats.unregistered_bytes, stats.open_bytes - 12 * MIB);
    assert_eq!(told.take(), [], "told from inside an allocation");

    for _ in 0..3 {
        heap.trim();
    }
    let told_once = Event::Unregistered { arenas: 2, bytes: stats.unregistered_bytes, device, reason };
    assert_eq!(told.take(), [told_once]);
    assert!(told_once.to_string().contains("not registered with ledger"), "{told_once}");

    // Room for one of them only, and then for all.
    heap.set_budget(budget(30));
    assert_eq!((ledger.live_bytes(), heap.catch_up().left, told.take()), (24 * MIB, 1, vec![]));
    assert!(device.key(over[0].as_ptr()).is_ok());
    heap.set_budget(Budget::NONE);
    assert_eq!(told.take(), [Event::Registered]);
    assert!(over.iter().all(|buffer| device.key(buffer.as_ptr()).is_ok()));
    assert_eq!((heap.stats().unregistered_bytes, heap.catch_up().left), (0, 0));
    assert_eq!(heap.trim().open_arenas, 3);
}

#[test]
fn memory_over_the_memlock_limit_is_registered_as_soon_as_the_limit_is_raised() {
    let (ledger, told) = (Ledger::new(), Told::default());
    ledger.set_memlock(Some(8 << 20));
    let heap = Heap::builder().policy(Policy::Prefer).build().unwrap();
    heap.on_event(told.listener());
    let device = heap.attach(ledger.clone()).unwrap();
    let buffers = [heap.buffer(40 * MIB).unwrap(), heap.buffer(40 * MIB).unwrap()];
    let reason = NotRegistered::OverMemlock { limit_kib: 8 << 10, pinned_kib: 0 };
    let error = device.key(buffers[1].as_ptr()).unwrap_err();
    assert_eq!(error, KeyError::NotRegistered(reason));
    assert!(error.to_string().contains("8192 KiB") && error.to_string().contains("ulimit -l"), "{error}");
    assert_eq!((ledger.registrations(), heap.stats().refused.over_memlock), (0, 2), "the device was called");
    heap.trim();
    assert!(matches!(told.take()[..], [Event::Unregistered { arenas: 2, .. }]));
    ledger.set_memlock(Some(64 << 20));
    let done = heap.catch_up();
    assert_eq!((done.arenas, done.bytes, done.left, ledger.live_bytes()), (1, 40 * MIB, 1, 40 * MIB));
    assert_eq!(told.take(), []);
    ledger.set_memlock(Some(80 << 20));
    assert_eq!(heap.catch_up().left, 0);
    assert_eq!(told.take(), [Event::Registered]);

    // Required, it is an error, with what is pinned.
    heap.set_policy(Policy::Require);
    let error = refusal(heap.buffer(6 * MIB));
    assert!(error.is_memlock());
    let Refusal::OverMemlock { limit, pinned } = error.reason else { panic!("{error}") };
    assert_eq!((limit, pinned), (80 << 20, 80 << 20));
    for said in ["6144 KiB", "memlock limit 81920 KiB", "pinned 81920 KiB", "LimitMEMLOCK"] {
        assert!(error.to_string().contains(said), "{said}: {error}");
    }
}

#[test]
fn registered_memory_serves_first_and_unregistered_last() {
    // The lowest address comes first anyhow, so the unregistered arena has to be the lower one. Tests beside this one leave
    // gaps below it; a heap that fell into one fills it for the next.
    let mut fillers = Vec::new();
    let (heap, device, over, _within) = loop {
        let heap = Heap::builder().budget(budget(1)).policy(Policy::Prefer).build().unwrap();
        let device = heap.attach(Ledger::new()).unwrap();
        let over = heap.buffer(39 * MIB).unwrap();
        heap.set_budget(budget(34));
        let within = heap.buffer(25 * MIB).unwrap();
        assert!(device.key(over.as_ptr()).is_err() && device.key(within.as_ptr()).is_ok());
        if over.as_ptr() < within.as_ptr() {
            break (heap, device, over, within);
        }
        fillers.push((heap, over, within));
    };
    // Both arenas have room for it.
    let next = heap.buffer(512 << 10).unwrap();
    assert!(device.key(next.as_ptr()).is_ok());
    let last = heap.buffer(700 << 10).unwrap();
    assert_eq!(heap.stats().arenas, 2);
    assert!(device.key(last.as_ptr()).is_err());
    drop(over);
}

#[test]
fn what_a_device_refuses_is_tried_again_and_one_refusal_is_enough_for_a_pass() {
    let ledger = Ledger::new();
    let heap = Heap::builder().policy(Policy::Prefer).build().unwrap();
    let device = heap.attach(ledger.clone()).unwrap();
    ledger.refuse_after(Some(0));
    let buffers: Vec<_> = (0..3).map(|_| heap.buffer(40 * MIB).unwrap()).collect();
    let refused = || heap.stats().refused.by_device;
    assert_eq!(refused(), 3);
    assert_eq!((heap.catch_up().left, refused()), (3, 4));
    ledger.refuse_after(None);
    assert_eq!(heap.trim().open_arenas, 3);
    assert!(buffers.iter().all(|buffer| device.key(buffer.as_ptr()).is_ok()));
    assert_eq!(heap.stats().unregistered_arenas, 0);
}

#[test]
fn an_attachment_over_a_limit_is_refused_or_registers_what_it_can() {
    let told = Told::default();
    let heap = Heap::builder().budget(budget(60)).on_event(told.listener()).build().unwrap();
    let buffers = [heap.buffer(40 * MIB).unwrap(), heap.buffer(40 * MIB).unwrap()];
    let ledger = Ledger::new();
    let Err(AttachError::Register(error)) = heap.attach(ledger.clone()) else { panic!("not refused") };
    assert!(matches!(error.reason, Refusal::OverBudget { .. }), "{error}");
    assert_eq!((ledger.live(), heap.registered_bytes()), (0, 0));

    heap.set_policy(Policy::Prefer);
    let device = heap.attach(ledger.clone()).unwrap();
    assert_eq!(ledger.live_bytes(), 40 * MIB);
    assert_eq!(buffers.iter().filter(|buffer| device.key(buffer.as_ptr()).is_ok()).count(), 1);
    assert!(matches!(told.take()[..], [Event::Unregistered { arenas: 1, .. }]));
    heap.detach(device).unwrap();
    heap.trim();
    assert_eq!(told.take(), [Event::Registered], "there is nothing to be registered any more");

    // Nothing at all is not what was asked for.
    heap.set_budget(budget(1));
    let Err(AttachError::Register(error)) = heap.attach(ledger.clone()) else { panic!("not refused") };
    assert!(matches!(error.reason, Refusal::OverBudget { limit: 0x10_0000, registered: 0, .. }), "{error}");
    assert_eq!((ledger.live(), heap.registered_bytes(), heap.stats().devices.len()), (0, 0, 0));
}

#[test]
fn a_soft_limit_is_told_when_it_is_crossed_and_only_then() {
    let (ledger, told) = (Ledger::new(), Told::default());
    let heap = Heap::builder().soft_limit(50 << 20).on_event(told.listener()).build().unwrap();
    heap.attach(ledger.clone()).unwrap();
    let _first = heap.buffer(40 * MIB).unwrap();
    heap.trim();
    assert_eq!(told.take(), []);
    let second = heap.buffer(40 * MIB).unwrap();
    assert_eq!(told.take(), [], "told from inside an allocation");
    heap.catch_up();
    heap.trim();
    let (limit, registered) = (50 << 20, 80 << 20);
    assert_eq!(told.take(), [Event::AboveSoftLimit { limit, registered }]);
    drop(second);
    heap.trim();
    let registered = ledger.live_bytes() as u64;
    assert_eq!(told.take(), [Event::BelowSoftLimit { limit, registered }]);
    heap.set_soft_limit(Some(1 << 20));
    assert_eq!(told.take(), [Event::AboveSoftLimit { limit: 1 << 20, registered }]);
    heap.set_soft_limit(None);
    assert!(matches!(told.take()[..], [Event::BelowSoftLimit { .. }]));
}

#[test]
fn a_listener_may_use_the_heap_and_come_again() {
    let ledger = Ledger::new();
    let heap = Heap::builder().budget(budget(8)).policy(Policy::Prefer).build().unwrap();
    heap.attach(ledger).unwrap();
    let calls = Arc::new(AtomicU64::new(0));
    heap.on_event({
        // A handle in its own listener would keep the heap for ever.
        let (handle, calls) = (Mutex::new(Some(heap.clone())), calls.clone());
        move |_| {
            let handle = handle.lock().unwrap().take();
            if let Some(heap) = handle {
                heap.trim();
                heap.on_event(|_| {});
                drop(heap.buffer(100 * MIB).unwrap());
                heap.catch_up();
            }
            calls.fetch_add(1, Relaxed);
        }
    });
    let _over = heap.buffer(10 * MIB).unwrap();
    heap.trim();
    assert_eq!(calls.load(Relaxed), 1);
}

#[test]
fn threads_that_open_at_once_stay_within_the_budget() {
    let ledger = Ledger::new();
    let heap = Heap::builder().budget(budget(48)).policy(Policy::Prefer).build().unwrap();
    heap.attach(ledger.clone()).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (stop, heap, ledger) = (&stop, &heap, &ledger);
        let threads: Vec<_> = (0..4)
            .map(|thread| {
                scope.spawn(move || {
                    let mut buffers = Vec::new();
                    for round in 0..300usize {
                        buffers.push(heap.buffer((1 + (round * 7 + thread) % 13) * MIB).unwrap());
                        if buffers.len() > 3 {
                            buffers.swap_remove(round % 3);
                        }
                    }
                })
            })
            .collect();
        let watcher = scope.spawn(move || {
            while !stop.load(Relaxed) {
                heap.catch_up();
                heap.trim();
                assert!(ledger.live_bytes() <= 48 * MIB && heap.registered_bytes() <= 48 << 20);
                let stats = heap.stats();
                assert_eq!(stats.open_bytes, stats.live_bytes + stats.cached_bytes + stats.idle_bytes);
                std::thread::yield_now();
            }
        });
        let joined: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        stop.store(true, Relaxed);
        watcher.join().unwrap();
        joined.into_iter().for_each(|result| result.unwrap());
    });
    heap.trim();
    assert_eq!((heap.registered_bytes(), heap.stats().registered, ledger.live()), (0, 0, 0));
}

#[test]
fn figures_add_up_and_agree_with_the_device() {
    let (ledger, other) = (Ledger::new(), Ledger::with_max_len(4 << 20));
    let heap = Heap::builder().build().unwrap();
    let device = heap.attach(ledger.clone()).unwrap();
    let other_device = heap.attach(other.clone()).unwrap();
    // An arena with room for all that follows, of which the other device has eight pieces.
    drop(heap.buffer(32 << 20).unwrap());
    let (small, large) = (heap.buffer(1000).unwrap(), heap.buffer(5 << 20).unwrap());
    let spare = heap.buffer(1 << 20).unwrap();
    drop(spare);
    let stats = heap.stats();
    assert_eq!(stats.open_bytes, stats.live_bytes + stats.cached_bytes + stats.idle_bytes);
    assert_eq!((stats.live_bytes, stats.cached_bytes), ((5 << 20) + (64 << 10), 1 << 20));
    assert_eq!((stats.arenas, stats.retained_arenas, stats.unregistered_arenas), (1, 0, 0));
    assert_eq!(stats.registered_bytes, ledger.live_bytes() + other.live_bytes());
    assert_eq!(stats.registered, (ledger.live() + other.live()) as u64);
    assert_eq!((heap.registered_bytes(), heap.open_bytes()), (stats.registered_bytes as u64, stats.open_bytes as u64));
    assert_eq!((stats.opening.count, stats.closing.count, stats.refusals), (1, 0, 0));
    assert!(stats.opening.longest <= stats.opening.total);
    // In the order of their slots, which tests beside this one take and leave.
    let of = |device| stats.devices.iter().find(|stats| stats.device == device).unwrap().registering.count;
    assert_eq!([of(device), of(other_device)], [ledger.registrations(), other.registrations()]);
    assert_eq!(stats.devices.len(), 2);
    for said in ["open", "live", "cached", "idle", "ledger", "9 registrations", "opened"] {
        assert!(stats.to_string().contains(said), "{said}:\n{stats}");
    }

    drop((small, large));
    let retained = heap.stats();
    assert!(retained.cached_bytes > 0 || retained.retained_arenas == 1, "{retained}");
    let trimmed = heap.trim();
    assert_eq!((trimmed.closed_arenas, trimmed.large_blocks, trimmed.live.blocks()), (1, 0, 0));
    let stats = heap.stats();
    assert_eq!((stats.registered, stats.registered_bytes, stats.open_bytes, stats.closing.count), (0, 0, 0, 1));
    let ended = stats.devices.iter().find(|stats| stats.device == other_device).unwrap().deregistering.count;
    assert_eq!(ended, other.registrations());
    heap.detach(device).unwrap();
    assert_eq!(heap.stats().devices.len(), 1);
    assert_eq!((device.name().as_str(), stats.devices[0].name.as_str()), ("", "ledger"));
}

#[test]
fn a_heap_at_its_limit_empties_caches_each_time_and_serves_on() {
    let heap = Heap::builder().budget(budget(4)).build().unwrap();
    heap.attach(Ledger::new()).unwrap();
    for turn in 0..20 {
        // Kept spare by this thread's cache, and in the way of the next.
        heap.buffer((3 + turn % 2) * MIB).unwrap_or_else(|error| panic!("turn {turn}: {error}"));
    }
    assert_eq!((heap.arenas().len(), heap.registered_bytes()), (1, 4 << 20));
    assert_eq!(heap.stats().failures.not_registered, 0, "nobody was refused anything");
}

#[test]
fn a_heap_at_its_limit_empties_caches_before_it_serves_memory_that_is_not_registered() {
    let heap = Heap::builder().budget(budget(4)).policy(Policy::Prefer).build().unwrap();
    let device = heap.attach(Ledger::new()).unwrap();
    for turn in 0..20 {
        let buffer = heap.buffer((3 + turn % 2) * MIB).unwrap();
        assert!(device.key(buffer.as_ptr()).is_ok(), "turn {turn}");
    }
    assert_eq!((heap.arenas().len(), heap.stats().unregistered_arenas), (1, 0));
}
