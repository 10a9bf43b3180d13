//! What pages back registered memory, on a real verbs device: under each of the system's settings of transparent huge pages,
//! and with pages of the hugetlb pool, as far as it has some.
#![cfg(feature = "verbs")]

use rdma_sys::ibv_sge;
use rdmalloc_arenas::registrar::verbs::Verbs;
use rdmalloc_arenas::{Access, ArenaInfo, Arenas, Config, Device, Fallback, Pages, Policy, SLICE, Span};
use rdmalloc_tests::rig::{Depth, Domain, Memory, Queue, domain_or_skip};
use rdmalloc_tests::{Setting, pinned_bytes};
use std::fs;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

const MIB: usize = 1 << 20;
const THP: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

/// A device, and nobody beside who changes settings or pins memory.
fn alone() -> Option<(Domain, MutexGuard<'static, ()>)> {
    static ALONE: Mutex<()> = Mutex::new(());
    let domain = domain_or_skip().filter(|_| Setting::may_be_changed())?;
    Some((domain, ALONE.lock().unwrap_or_else(PoisonError::into_inner)))
}

fn pool(kib: usize) -> String {
    format!("/sys/kernel/mm/hugepages/hugepages-{kib}kB/nr_hugepages")
}

fn free_pages(kib: usize) -> usize {
    fs::read_to_string(pool(kib).replace("nr_", "free_")).unwrap().trim().parse().unwrap()
}

fn heap(pages: Pages) -> Arenas {
    let heap =
        Arenas::new(Config { access: Access::LOCAL_WRITE, policy: Policy::Require, serves_children: false, tag: 77 });
    heap.set_pages(pages);
    heap
}

/// Has the heap open an arena of 32 MiB, with room for all that a test takes; else each span might have its own.
fn open_one(heap: &Arenas) {
    let all = heap.take(512, 1).unwrap();
    heap.give(all.address, all.slices);
}

fn arena_of(heap: &Arenas, span: Span) -> ArenaInfo {
    heap.arenas().into_iter().find(|arena| arena.memory.contains(&span.address)).unwrap()
}

/// The device moves a whole span's bytes to another span, in messages that begin anywhere in a page.
fn moved_by_device(domain: &Domain, device: Device, from: Span, to: Span) {
    let (queue, _peer) = Queue::pair(domain, Depth::default()).unwrap();
    let (len, back) = (from.slices * SLICE, Memory::new(domain, MIB).unwrap());
    let bytes = |span: Span| std::ptr::with_exposed_provenance_mut::<u8>(span.address);
    for at in 0..len {
        // SAFETY: within the span, which is the test's, and no request is under way.
        unsafe { bytes(from).add(at).write(((at * 31) >> 3) as u8) };
    }
    let entry = |span: Span, at: usize, length: usize| {
        let address = span.address + at;
        let lkey = device.key(std::ptr::with_exposed_provenance::<u8>(address)).unwrap().lkey;
        ibv_sge { addr: address as u64, length: length as u32, lkey }
    };
    for at in (0..len).step_by(MIB) {
        let length = MIB.min(len - at);
        // SAFETY: all three memories live, untouched, until the completions.
        unsafe {
            queue.post_write(1, entry(from, at, length), back.remote(0)).unwrap();
            queue.wait(Duration::from_secs(60)).unwrap().ok().unwrap();
            queue.post_read(2, entry(to, at, length), back.remote(0)).unwrap();
            queue.wait(Duration::from_secs(60)).unwrap().ok().unwrap();
        }
    }
    // SAFETY: both spans are the test's and as long, and no request is under way.
    let same = unsafe { std::slice::from_raw_parts(bytes(from), len) == std::slice::from_raw_parts(bytes(to), len) };
    assert!(same, "the device has moved something else");
}

/// The mean time of a registration and a deregistration since the heap was made, in microseconds.
fn times(heap: &Arenas) -> String {
    let stats = &heap.device_stats()[0];
    let micros = |time: Duration| time.as_secs_f64() * 1e6;
    format!(
        "registered in {:.0} us, deregistered in {:.0} us",
        micros(stats.registering.mean()),
        micros(stats.deregistering.mean())
    )
}

#[test]
fn verbs_memory_is_right_under_each_setting_of_transparent_huge_pages() {
    let Some((domain, _alone)) = alone() else { return };
    for (setting, advised) in [("always", true), ("madvise", true), ("never", false)] {
        let Some(_setting) = Setting::set(THP, setting) else { return };
        for (pages, huge) in [(Pages::Transparent, advised), (Pages::Base, false)] {
            let unpinned = pinned_bytes();
            let heap = heap(pages);
            let device = heap.attach(Box::new(Verbs::new(domain.clone()))).unwrap();
            open_one(&heap);
            let (from, to) = (heap.take(100, 1).unwrap(), heap.take(100, 1).unwrap());
            let arena = arena_of(&heap, from);
            assert_eq!((arena.pages, arena.fallback), (pages, None));
            assert_eq!(pinned_bytes() - unpinned, arena.memory.len() as u64);
            moved_by_device(&domain, device, from, to);
            let found = arena.resident().unwrap();
            println!("{setting}, {pages:?}: {found:?}");
            assert!(found.resident >= arena.memory.len(), "all of it is pinned, so all is in memory");
            // Memory of the guest may be in pieces, so not each of them must be huge.
            assert!(if huge { found.huge > arena.memory.len() / 2 } else { found.huge == 0 }, "{found:?}");
            heap.give(from.address, from.slices);
            heap.give(to.address, to.slices);
            assert_eq!(heap.close_all_empty().stuck, 0);
            assert_eq!(pinned_bytes(), unpinned);
            heap.detach(device).unwrap();
        }
    }
}

/// With so many pages in the pool: memory is in them, right, and the pool has them again afterwards.
fn hugetlb(pages: Pages, kib: usize, count: usize) {
    let Some((domain, _alone)) = alone() else { return };
    let Some(setting) = Setting::set(&pool(kib), &count.to_string()) else { return };
    if setting.number() < count as u64 {
        return println!("skipped: the system finds {} of {count} pages of {kib} KiB", setting.number());
    }
    let unpinned = pinned_bytes();
    let heap = heap(pages);
    let device = heap.attach(Box::new(Verbs::new(domain.clone()))).unwrap();
    open_one(&heap);
    let (from, to) = (heap.take(100, 1).unwrap(), heap.take(100, 1).unwrap());
    let arena = arena_of(&heap, from);
    assert_eq!((arena.pages, arena.fallback), (pages, None), "{:?}", heap.arenas());
    assert_eq!((arena.memory.start % (kib << 10), arena.memory.len() % (kib << 10)), (0, 0), "whole pages");
    assert_eq!(pinned_bytes() - unpinned, arena.memory.len() as u64);
    assert_eq!(free_pages(kib), count - arena.memory.len() / (kib << 10));
    assert_eq!(heap.stats().hugetlb_bytes, heap.stats().open_bytes);
    let found = arena.resident().unwrap();
    assert_eq!((found.of, found.huge), (arena.memory.len(), arena.memory.len()), "{found:?}");
    moved_by_device(&domain, device, from, to);
    heap.give(from.address, from.slices);
    heap.give(to.address, to.slices);
    assert_eq!(heap.close_all_empty().stuck, 0);
    assert_eq!((free_pages(kib), pinned_bytes()), (count, unpinned));
    println!("{pages:?}: {} MiB {}", arena.memory.len() / MIB, times(&heap));
    heap.detach(device).unwrap();
}

#[test]
fn verbs_2_mib_pages_back_registered_memory_and_go_back_to_the_pool() {
    hugetlb(Pages::Huge2M, 2 << 10, 16);
}

#[test]
fn verbs_1_gib_pages_back_registered_memory_and_go_back_to_the_pool() {
    hugetlb(Pages::Huge1G, 1 << 20, 1);
}

#[test]
fn verbs_a_pool_that_runs_dry_is_said_and_the_heap_goes_on() {
    let Some((domain, _alone)) = alone() else { return };
    // One arena's worth and a half.
    let Some(setting) = Setting::set(&pool(2 << 10), "24") else { return };
    assert_eq!(setting.number(), 24);
    let heap = heap(Pages::Huge2M);
    let device = heap.attach(Box::new(Verbs::new(domain.clone()))).unwrap();
    let (from, to) = (heap.take(512, 1).unwrap(), heap.take(512, 1).unwrap());
    let (first, second) = (arena_of(&heap, from), arena_of(&heap, to));
    assert_eq!((first.pages, first.fallback), (Pages::Huge2M, None));
    assert_eq!((second.pages, second.fallback), (Pages::Transparent, Some(Fallback::System(libc::ENOMEM))));
    println!("{}", second.fallback.unwrap());
    assert!(second.fallback.unwrap().to_string().contains("vm.nr_hugepages"));
    assert_eq!((heap.stats().fallen_back_arenas, heap.stats().stuck_arenas), (1, 0));
    moved_by_device(&domain, device, from, to);
    // Where there are no pages of 1 GiB, those of 2 MiB serve.
    heap.give(from.address, from.slices);
    heap.close_all_empty();
    heap.set_pages(Pages::Huge1G);
    let third = heap.take(512, 1).unwrap();
    let arena = arena_of(&heap, third);
    assert!(arena.pages == Pages::Huge1G || arena.fallback.is_some(), "{arena:?}");
    for span in [to, third] {
        heap.give(span.address, span.slices);
    }
    heap.close_all_empty();
    heap.detach(device).unwrap();
}

#[test]
fn verbs_hugetlb_memory_is_not_purged_so_what_is_called_zero_is() {
    let Some((_domain, _alone)) = alone() else { return };
    let Some(_setting) = Setting::set(&pool(2 << 10), "16") else { return };
    let heap = heap(Pages::Huge2M);
    open_one(&heap);
    // No device: memory that is free and dirty would be purged, in runs of slices that are no whole huge pages.
    let spans: Vec<Span> = (0..25).map(|_| heap.take(20, 1).unwrap()).collect();
    assert_eq!(arena_of(&heap, spans[0]).pages, Pages::Huge2M);
    for span in &spans {
        // SAFETY: within the span, which is the test's.
        unsafe { std::ptr::with_exposed_provenance_mut::<u8>(span.address).write_bytes(1, span.slices * SLICE) };
    }
    let last = *spans.last().unwrap();
    spans.iter().rev().skip(1).for_each(|span| heap.give(span.address, span.slices));
    assert_eq!((heap.purge_all(), heap.stats().purged_bytes), (0, 0));
    let mut spans = vec![last];
    while let Ok(span) = heap.take(1, 1) {
        if arena_of(&heap, span).memory != arena_of(&heap, last).memory {
            heap.give(span.address, 1);
            break;
        }
        // SAFETY: within the span, which is the test's.
        let first = unsafe { std::ptr::with_exposed_provenance::<u8>(span.address).read() };
        assert!(!span.zero || first == 0, "{span:?} is said to be zero, and is not");
        spans.push(span);
    }
    spans.iter().for_each(|span| heap.give(span.address, span.slices));
    assert_eq!(heap.close_all_empty().stuck, 0);
}

#[test]
fn verbs_registering_64_mib_by_pages() {
    let Some((domain, _alone)) = alone() else { return };
    let Some(_pool) = Setting::set(&pool(2 << 10), "32") else { return };
    for pages in [Pages::Base, Pages::Transparent, Pages::Huge2M] {
        let heap = heap(pages);
        let device = heap.attach(Box::new(Verbs::new(domain.clone()))).unwrap();
        let mut kind = pages;
        for _ in 0..16 {
            let span = heap.take(64 * MIB / SLICE, 1).unwrap();
            kind = arena_of(&heap, span).pages;
            heap.give(span.address, span.slices);
            heap.close_all_empty();
        }
        println!("64 MiB in {pages:?} (have {kind:?}): {}", times(&heap));
        heap.detach(device).unwrap();
    }
}
