//! What a heap has to do under a memlock limit, on whatever device: the same for verbs and io_uring.

use crate::{may_pin, set_memlock};
use rdmalloc_arenas::{
    Access, Arenas, AttachError, Config, Event, KeyError, NotRegistered, Policy, Registrar, SLICE, TakeError,
};
use std::sync::{Arc, Mutex};

const MIB: u64 = 1 << 20;

fn heap(policy: Policy) -> Arenas {
    Arenas::new(Config { access: Access::LOCAL_WRITE, policy, serves_children: false, tag: 0 })
}

/// Fills heaps under the limit of this process, and beyond it.
///
/// `device` makes a device; `pinned` asks the kernel what is pinned. `None`: it does not tell, and others may count as well.
///
/// # Panics
///
/// If a limit is exceeded, not used, or not explained.
pub fn under_limit<R: Registrar>(device: impl Fn() -> R, pinned: Option<fn() -> u64>) {
    let limit = may_pin().expect("this process is confined");
    let (exact, pinned) = (pinned.is_some(), pinned.unwrap_or(|| 0));
    let before = pinned();
    required(limit, device(), exact, pinned);
    assert_eq!(pinned(), before, "something stays pinned");
    preferred(limit, device(), exact, pinned);
    assert_eq!(pinned(), before, "something stays pinned");
    if limit < 2 * MIB {
        nothing(device());
    }
}

/// Where not even the smallest arena can be pinned, attaching to a heap that has one is an error.
fn nothing(device: impl Registrar) {
    let heap = heap(Policy::Prefer);
    let span = heap.take(1, 1).expect("there is memory");
    let Err(AttachError::Register(error)) = heap.attach(Box::new(device)) else { panic!("nothing is registered") };
    assert!(error.is_memlock() && error.to_string().contains("ulimit -l"), "{error}");
    heap.give(span.address, span.slices);
    heap.close_all_empty();
}

fn required(limit: u64, device: impl Registrar, exact: bool, pinned: fn() -> u64) {
    let (heap, before) = (heap(Policy::Require), pinned());
    let device = heap.attach(Box::new(device)).expect("an empty heap needs nothing");
    // 1 MiB at a time, until no more is to be had.
    let mut spans = Vec::new();
    let error = loop {
        match heap.take(16, 1) {
            Ok(span) => spans.push(span),
            Err(TakeError::Register(error)) => break error,
            Err(error) => panic!("{error}"),
        }
        assert!(heap.registered_bytes() <= limit && pinned() - before <= limit);
    };
    assert!(spans.iter().all(|span| device.key_of_address(span.address).is_ok()));
    assert!(error.is_memlock() || !exact, "{error}");
    let memlock = error.memlock.expect("the device counts");
    assert_eq!((memlock.limit, memlock.pinned), (Some(limit), heap.registered_bytes()), "{error}");
    let said = error.to_string();
    for part in [format!("memlock limit {} KiB", limit >> 10), "ulimit -l".into(), "LimitMEMLOCK".into()] {
        assert!(said.contains(&part), "{part}: {said}");
    }
    // All of it was of use, but for what is less than an arena (2 MiB).
    let whole = limit / (2 * MIB) * 2 * MIB;
    let stats = heap.stats();
    assert_eq!(stats.failures.not_registered, 1);
    if exact {
        assert_eq!((heap.registered_bytes(), stats.refused.by_device), (whole, 0), "{said}");
    } else {
        assert!(heap.registered_bytes() >= whole / 2, "{said}");
    }
    println!("{} KiB: {} spans of 1 MiB, then: {said}", limit >> 10, spans.len());
    spans.iter().for_each(|span| heap.give(span.address, span.slices));
    heap.close_all_empty();
    heap.detach(device).expect("nothing is left");
}

fn preferred(limit: u64, registrar: impl Registrar, exact: bool, pinned: fn() -> u64) {
    let (heap, told) = (heap(Policy::Prefer), Arc::new(Mutex::new(Vec::new())));
    let before = pinned();
    heap.set_listener(Some({
        let told = told.clone();
        Arc::new(move |event: &Event| told.lock().expect("nobody fails with it").push(*event))
    }));
    let told = || std::mem::take(&mut *told.lock().expect("nobody fails with it"));
    let device = heap.attach(Box::new(registrar)).expect("an empty heap needs nothing");
    // Half as much again as may be pinned, 1 MiB at a time.
    let spans: Vec<_> = (0..limit / MIB * 3 / 2 + 4).map(|_| heap.take(16, 1).expect("served all the same")).collect();
    assert!(pinned() - before <= limit);
    assert!(told().is_empty(), "told from inside an allocation");
    let (mut with, mut without) = (0, 0);
    for span in &spans {
        // SAFETY: the span is this function's.
        unsafe { core::ptr::with_exposed_provenance_mut::<u8>(span.address).write_bytes(7, span.slices * SLICE) };
        match device.key_of_address(span.address) {
            Ok(_) => with += 1,
            Err(KeyError::NotRegistered(NotRegistered::OverMemlock { limit_kib, pinned_kib })) => {
                assert!(u64::from(limit_kib) == limit >> 10 && pinned_kib <= limit_kib);
                without += 1;
            }
            Err(KeyError::NotRegistered(NotRegistered::Refused { .. })) if !exact => without += 1,
            Err(error) => panic!("{error}"),
        }
    }
    assert!(with >= limit / MIB / 3 && without > 0, "{with} registered, {without} not");
    heap.tell();
    heap.register_what_was_refused();
    heap.tell();
    let events = told();
    assert!(matches!(events[..], [Event::Unregistered { .. }]), "{events:?}");
    println!("{} KiB: {with} spans of 1 MiB registered, {without} not: {}", limit >> 10, events[0]);

    let raised = set_memlock(u64::MAX);
    let done = heap.register_what_was_refused();
    heap.tell();
    if raised < heap.open_bytes() {
        println!("not seen: registered at last; the limit can only be raised to {} KiB here", raised >> 10);
        assert!(raised == limit || done.arenas > 0 || raised < 32 * MIB, "{done:?}");
        assert!(heap.registered_bytes() <= raised && told().is_empty());
    } else {
        assert!(done.arenas > 0 && done.left == 0, "{done:?}");
        assert_eq!(told(), [Event::Registered]);
        assert!(spans.iter().all(|span| device.key_of_address(span.address).is_ok()));
        assert_eq!(heap.stats().unregistered_bytes, 0);
    }
    assert!(heap.stats().refused.by_device == 0 || !exact, "the device was called in vain");
    spans.iter().for_each(|span| heap.give(span.address, span.slices));
    heap.close_all_empty();
    assert_eq!(heap.registered_bytes(), 0);
    heap.detach(device).expect("nothing is left");
    // As it was, for what comes next.
    set_memlock(limit);
}
