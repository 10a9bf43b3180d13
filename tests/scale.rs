//! Heaps of a size that no test machine has: address space only, with devices that register nothing. What is counted is
//! checked; what takes time is printed (`--nocapture`), since the machine decides it.

use rdmalloc::Heap;
use rdmalloc_arenas::{Access, Arenas, Config, Device, MAX_DEVICES, Policy, SLICE};
use rdmalloc_tests::Null;
use std::hint::black_box;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

const GIB: usize = 1 << 30;
/// Spans of 2 MiB.
const SPAN: usize = 32;
/// The first span that is given up, as is each second after it: those before it have arenas to themselves, which would be empty.
const ODD: usize = 9;

/// One test at a time, for the sake of the times and of resident memory.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn arenas() -> Arenas {
    Arenas::new(Config { access: Access::LOCAL_WRITE, policy: Policy::Require, serves_children: false, tag: 77 })
}

/// How long one of `count` calls takes.
fn each<T>(count: usize, mut call: impl FnMut(usize) -> T) -> Duration {
    let start = Instant::now();
    for number in 0..count {
        black_box(call(number));
    }
    start.elapsed() / count as u32
}

fn once<T>(call: impl FnOnce() -> T) -> (Duration, T) {
    let start = Instant::now();
    let result = call();
    (start.elapsed(), result)
}

/// Spans of 2 MiB that fill a heap of so many bytes; `false` where the system does not give so much address space.
fn fill(arenas: &Arenas, bytes: usize, spans: &mut Vec<usize>) -> bool {
    while spans.len() * SPAN * SLICE < bytes {
        match arenas.take(SPAN, 1) {
            Ok(span) => spans.push(span.address),
            Err(error) => {
                println!("skipped: {} GiB: {error}", bytes / GIB);
                return false;
            }
        }
    }
    true
}

fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

fn look_up(device: Device, spans: &[usize]) -> Duration {
    let mut at = 1usize;
    each(1_000_000, |_| {
        at = at.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        device.key_of_address(spans[(at >> 32) % spans.len()] + 4096).unwrap()
    })
}

#[test]
fn heaps_up_to_a_tebibyte() {
    let _alone = alone();
    println!("GiB   arenas  fill/span  attach     lookup  take+give  no fit   pass       close      tables");
    for gib in [1, 16, 256, 1024] {
        let heap = arenas();
        let device = heap.attach(Box::new(Null::default())).unwrap();
        let mut spans = Vec::with_capacity(gib * GIB / SLICE / SPAN);
        spans.resize(spans.capacity(), 1);
        spans.clear();
        let before = resident();
        let (filled, all) = once(|| fill(&heap, gib * GIB, &mut spans));
        if !all {
            break;
        }
        let stats = heap.stats();
        assert!(gib > 256 || stats.registrations < 100, "{} registrations", stats.registrations);
        assert!(stats.arenas < 200, "{} arenas", stats.arenas);
        let tables = resident().saturating_sub(before);
        let lookup = look_up(device, &spans);
        heap.detach(device).unwrap();
        let (attach, device) = once(|| heap.attach(Box::new(Null::default())).unwrap());

        // Only the last arena has room.
        while let Some(span) = heap.try_take_lasting(SPAN, 1) {
            spans.push(span.address);
        }
        heap.give(spans.pop().unwrap(), SPAN);
        let pair = each(10_000, |_| {
            let span = heap.take(1, 1).unwrap();
            heap.give(span.address, 1);
        });
        for span in spans.iter().skip(ODD).step_by(2) {
            assert!(heap.shrink(*span, SPAN, 1));
        }
        let opened = heap.stats().opened;
        let mut next = spans.iter().skip(ODD).step_by(2);
        // All have holes, but none is as long as this; and before each search one becomes longer.
        let no_fit = each(100, |_| {
            let hole = *next.next().unwrap();
            heap.give(hole, 1);
            assert_eq!(heap.try_take_lasting(3 * SPAN, 1), None);
        });
        let (pass, closed) = once(|| {
            heap.choose_draining();
            heap.close_all_empty()
        });
        assert_eq!((closed.arenas, heap.stats().opened), (0, opened));

        let (close, ()) = once(|| {
            spans.iter().take(ODD).for_each(|span| heap.give(*span, SPAN));
            spans.iter().skip(ODD + 1).step_by(2).for_each(|span| heap.give(*span, SPAN));
            spans.iter().skip(ODD + 200).step_by(2).for_each(|span| heap.give(*span, 1));
            let closed = heap.close_all_empty();
            assert_eq!(closed.stuck, 0);
        });
        let stats = heap.stats();
        assert_eq!((stats.arenas, stats.spans, stats.registered_bytes), (0, 0, 0));
        assert_eq!(stats.registrations, stats.deregistrations);
        println!(
            "{gib:<5} {:<7} {:<10.0?} {attach:<10.1?} {lookup:<7.1?} {pair:<10.0?} {no_fit:<8.1?} {pass:<10.1?} \
             {close:<10.1?} {} KiB",
            stats.opened,
            filled / spans.len() as u32,
            tables >> 10
        );
        heap.detach(device).unwrap();
    }
}

#[test]
fn as_many_devices_as_there_can_be() {
    let _alone = alone();
    let heap = arenas();
    let mut spans = Vec::new();
    fill(&heap, 16 * GIB, &mut spans);
    let before = resident();
    let (attach, devices) = once(|| {
        let attach = |_| heap.attach(Box::new(Null::default())).unwrap();
        (0..MAX_DEVICES).map(attach).collect::<Vec<_>>()
    });
    let tables = resident().saturating_sub(before);
    let open = heap.stats().arenas;
    assert_eq!(heap.stats().registered_bytes, heap.stats().open_bytes * MAX_DEVICES);
    let lookup = look_up(devices[MAX_DEVICES - 1], &spans);
    let (one, span) = once(|| heap.take(4 << 14, 1).unwrap());
    heap.give(span.address, 4 << 14);
    spans.iter().for_each(|span| heap.give(*span, SPAN));
    let (close, closed) = once(|| heap.close_all_empty());
    assert_eq!(closed.arenas, open + 1);
    assert_eq!(heap.stats().registrations, heap.stats().deregistrations);
    println!(
        "{MAX_DEVICES} devices, 16 GiB: attach {attach:.1?}, lookup {lookup:.1?}, one arena of 4 GiB more {one:.1?}, close \
         {close:.1?}, tables {} KiB",
        tables >> 10
    );
    devices.into_iter().for_each(|device| heap.detach(device).unwrap());
}

#[test]
fn a_thousand_heaps_on_one_device() {
    let _alone = alone();
    let before = resident();
    let (made, heaps) = once(|| (0..1000).map(|_| Heap::builder().build().unwrap()).collect::<Vec<_>>());
    let device = std::num::NonZeroUsize::new(0x1000).unwrap();
    let (attached, devices) = once(|| {
        let attach = |heap: &Heap| heap.attach(Null::of(device)).unwrap();
        heaps.iter().map(attach).collect::<Vec<_>>()
    });
    let (filled, mut buffers) = once(|| {
        let buffer = |heap: &Heap| heap.buffer(100 << 10).unwrap();
        heaps.iter().map(buffer).collect::<Vec<_>>()
    });
    buffers.iter_mut().for_each(|buffer| buffer.try_extend_from_slice(b"x").unwrap());
    for (device, buffer) in devices.iter().zip(&buffers) {
        device.key(buffer.as_ptr()).unwrap();
    }
    let tables = resident().saturating_sub(before);
    let (ended, ()) = once(|| drop((heaps, buffers)));
    println!(
        "1000 heaps: made {made:.1?}, attached {attached:.1?}, a buffer each {filled:.1?}, ended {ended:.1?}; resident {} KiB",
        tables >> 10
    );
}

#[test]
fn arenas_that_open_and_close_for_months_leave_nothing() {
    let _alone = alone();
    const ROUNDS: usize = 100_000;
    let heap = arenas();
    let device = heap.attach(Box::new(Null::default())).unwrap();
    let mut round = |_| {
        let span = heap.take(SPAN, 1).unwrap();
        heap.give(span.address, SPAN);
        assert_eq!(heap.close_all_empty().arenas, 1);
    };
    (0..10).for_each(&mut round);
    let before = resident();
    let time = each(ROUNDS, round);
    let grown = resident().saturating_sub(before);
    let stats = heap.stats();
    assert_eq!((stats.arenas, stats.registrations, stats.deregistrations), (0, stats.opened, stats.opened));
    assert!(grown < 1 << 20, "{grown} bytes more after {ROUNDS} arenas");
    println!("{ROUNDS} arenas opened, registered, deregistered and closed: {time:.1?} each");
    heap.detach(device).unwrap();
}
