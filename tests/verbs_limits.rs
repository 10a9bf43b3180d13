//! Memlock limits on a real verbs device, as users without `IPC_LOCK` meet them: 0, 64 KiB, 8 MiB, 256 MiB.
#![cfg(feature = "verbs")]

use rdmalloc::registrar::verbs::Verbs;
use rdmalloc::{AttachError, Event, KeyError, NotRegistered, Rdmalloc};
use rdmalloc_tests::rig::domain_or_skip;
use rdmalloc_tests::{confined, may_pin, pinned_bytes, set_memlock, under_limit};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

fn run(test: &str, limit: u64) {
    if may_pin().is_some() {
        return under_limit(|| Verbs::open(None).unwrap(), Some(pinned_bytes));
    }
    if domain_or_skip().is_some() {
        confined(test, limit, 2 * limit + (64 << 20));
    }
}

#[test]
fn verbs_under_a_limit_of_nothing_nothing_is_registered_and_that_is_said() {
    run("verbs_under_a_limit_of_nothing_nothing_is_registered_and_that_is_said", 0);
}

#[test]
fn verbs_under_a_limit_of_64_kib_nothing_is_registered_and_that_is_said() {
    run("verbs_under_a_limit_of_64_kib_nothing_is_registered_and_that_is_said", 64 << 10);
}

#[test]
fn verbs_under_a_limit_of_8_mib_all_of_it_is_used() {
    run("verbs_under_a_limit_of_8_mib_all_of_it_is_used", 8 << 20);
}

#[test]
fn verbs_under_a_limit_of_256_mib_all_of_it_is_used() {
    run("verbs_under_a_limit_of_256_mib_all_of_it_is_used", 256 << 20);
}

#[test]
fn verbs_a_program_goes_on_over_its_limit_and_its_memory_is_reached_when_the_limit_is_raised() {
    static UNREGISTERED: AtomicU32 = AtomicU32::new(0);
    static REGISTERED: AtomicU32 = AtomicU32::new(0);
    if may_pin().is_none() {
        if domain_or_skip().is_some() {
            let name = "verbs_a_program_goes_on_over_its_limit_and_its_memory_is_reached_when_the_limit_is_raised";
            confined(name, 8 << 20, 256 << 20);
        }
        return;
    }
    HEAP.on_event(|event| {
        // It may allocate.
        println!("{}", event.to_string() + "!");
        let count = if matches!(event, Event::Registered) { &REGISTERED } else { &UNREGISTERED };
        count.fetch_add(1, Relaxed);
    });
    let told = || (UNREGISTERED.load(Relaxed), REGISTERED.load(Relaxed));
    let device = HEAP.attach(Verbs::open(None).unwrap()).unwrap();
    let (within, over) = (vec![1u8; 100_000], vec![2u8; 20 << 20]);
    assert!(device.sge(&within).is_ok());
    let Err(KeyError::NotRegistered(reason)) = device.key(over.as_ptr()) else { panic!("registered") };
    assert!(matches!(reason, NotRegistered::OverMemlock { limit_kib: 8192, .. }), "{reason}");
    assert!(pinned_bytes() <= 8 << 20);
    assert_eq!(told(), (0, 0), "told from inside an allocation");
    for _ in 0..3 {
        HEAP.trim();
    }
    assert_eq!(told(), (1, 0));
    println!("{}", HEAP.stats());
    assert_eq!(HEAP.stats().refused.by_device, 0);
    set_memlock(256 << 20);
    let done = HEAP.catch_up();
    assert!(done.bytes >= over.len() && done.left == 0, "{done:?}");
    assert_eq!((told(), HEAP.stats().unregistered_bytes), ((1, 1), 0));
    assert!(device.sge(&over).is_ok());
    assert_eq!(pinned_bytes(), HEAP.registered_bytes());
    HEAP.detach(device).unwrap();

    // Where not even the smallest arena can be pinned, that is said at once.
    set_memlock(64 << 10);
    let Err(AttachError::Register(error)) = HEAP.attach(Verbs::open(None).unwrap()) else { panic!("attached") };
    assert!(error.is_memlock() && error.to_string().contains("memlock limit 64 KiB, pinned 0 KiB"), "{error}");
}
