//! Memory that is registered on demand, on a real verbs device: soft-RoCE of Linux 7, page by page, with a path MTU of 4096 (with
//! anything else its data is wrong). Where the device cannot, that is an error that says so.
#![cfg(feature = "verbs")]

use rdma_sys::ibv_sge;
use rdmalloc_arenas::registrar::verbs::Verbs;
use rdmalloc_arenas::{
    Access, ArenaInfo, Arenas, AttachError, Config, Device, NoOnDemand, Operations, Pinning, Policy, Registrar, SLICE,
    Span,
};
use rdmalloc_tests::rig::{Depth, Domain, Memory, Queue, domain_or_skip};
use rdmalloc_tests::{Swap, confined, may_pin, pinned_bytes};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

const PAGE: usize = 4096;
const MIB: usize = 1 << 20;

/// A heap that pins nothing, and all that moves its bytes.
struct Rig {
    heap: Arenas,
    device: Device,
    domain: Domain,
    queue: Queue,
    _peer: Queue,
    other: Memory,
    _alone: MutexGuard<'static, ()>,
}

fn heap(pinning: Pinning) -> Arenas {
    let heap =
        Arenas::new(Config { access: Access::LOCAL_WRITE, policy: Policy::Require, serves_children: false, tag: 80 });
    heap.set_pinning(pinning);
    heap
}

fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `None`, said, where the device has no on-demand paging.
fn rig() -> Option<Rig> {
    let (domain, alone) = (domain_or_skip()?, alone());
    let heap = heap(Pinning::OnDemand);
    let device = match heap.attach(Box::new(Verbs::new(domain.clone()))) {
        Ok(device) => device,
        Err(error @ AttachError::OnDemand { .. }) => {
            println!("skipped: {error}");
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    // An arena of 32 MiB, with room for all that most tests take; else each span might have its own.
    let all = heap.take(512, 1).unwrap();
    heap.give(all.address, all.slices);
    // What was taken counts as touched.
    heap.purge_all();
    let (queue, peer) = Queue::pair(&domain, Depth::default()).unwrap();
    // Pinned, and so not what is counted below.
    let other = Memory::new(&domain, MIB).unwrap();
    Some(Rig { heap, device, queue, _peer: peer, other, domain, _alone: alone })
}

impl Rig {
    fn entry(&self, address: usize, length: usize) -> ibv_sge {
        let lkey = self.device.key(std::ptr::with_exposed_provenance::<u8>(address)).unwrap().lkey;
        ibv_sge { addr: address as u64, length: length as u32, lkey }
    }

    fn done(&self) {
        self.queue.wait(Duration::from_secs(60)).unwrap().ok().unwrap();
    }

    /// What the device finds at this address.
    fn read_by_device(&self, address: usize, length: usize) -> Vec<u8> {
        // SAFETY: both memories live, untouched, until the completion.
        unsafe { self.queue.post_write(1, self.entry(address, length), self.other.remote(0)) }.unwrap();
        self.done();
        self.other.to_vec(0, length)
    }

    /// The device writes there.
    fn write_by_device(&self, address: usize, bytes: &[u8]) {
        self.other.fill(0, bytes);
        // SAFETY: as above.
        unsafe { self.queue.post_read(2, self.entry(address, bytes.len()), self.other.remote(0)) }.unwrap();
        self.done();
    }

    fn give(&self, span: Span) {
        self.heap.give(span.address, span.slices);
        self.heap.close_all_empty();
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert_eq!(self.heap.close_all_empty().stuck, 0);
            self.heap.detach(self.device).unwrap();
        }
    }
}

fn bytes_of(span: Span) -> &'static mut [u8] {
    // SAFETY: the span is the test's, which looks at it only while no request is under way.
    unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(span.address), span.slices * SLICE) }
}

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| ((at / 7 + at * seed) % 251) as u8).collect()
}

fn arena_of(heap: &Arenas, span: Span) -> ArenaInfo {
    heap.arenas().into_iter().find(|arena| arena.memory.contains(&span.address)).unwrap()
}

#[test]
fn verbs_on_demand_nothing_is_pinned_or_faulted_in_and_data_is_right() {
    let Some(rig) = rig() else { return };
    let pinned = pinned_bytes();
    let span = rig.heap.take(16, 1).unwrap();
    let arena = arena_of(&rig.heap, span);
    assert_eq!((arena.keys.len(), arena.pinned), (1, false));
    assert_eq!(pinned_bytes(), pinned, "on-demand memory is pinned");
    assert!(arena.resident().unwrap().resident < MIB, "on-demand memory is faulted in");
    let sent = pattern(MIB, 3);
    bytes_of(span).copy_from_slice(&sent);
    assert!(rig.read_by_device(span.address, MIB) == sent);
    // Into pages that are not there yet as well.
    let (other, received) = (rig.heap.take(16, 1).unwrap(), pattern(MIB, 5));
    rig.write_by_device(other.address, &received);
    assert!(bytes_of(other) == received);
    assert!(bytes_of(span) == sent);
    assert_eq!(pinned_bytes(), pinned);
    rig.give(span);
    rig.give(other);
}

#[test]
fn verbs_on_demand_data_is_right_after_the_kernel_paged_it_out() {
    let Some(rig) = rig() else { return };
    let Some(_swap) = Swap::on(256 * MIB) else { return };
    let (from, to) = (rig.heap.take(16, 1).unwrap(), rig.heap.take(16, 1).unwrap());
    let out = |span: Span| {
        let before = arena_of(&rig.heap, span).resident().unwrap().swapped;
        // SAFETY: contents are kept.
        let result = unsafe { libc::madvise(bytes_of(span).as_mut_ptr().cast(), MIB, libc::MADV_PAGEOUT) };
        assert_eq!(result, 0);
        let swapped = arena_of(&rig.heap, span).resident().unwrap().swapped - before;
        println!("{} of 1024 KiB are paged out", swapped >> 10);
        assert!(swapped > MIB / 2, "the kernel has paged out {swapped} bytes");
    };
    for round in 1..4 {
        let sent = pattern(MIB, round);
        bytes_of(from).copy_from_slice(&sent);
        bytes_of(to).fill(0xee);
        // The device knows all of these pages now.
        assert!(rig.read_by_device(from.address, MIB) == sent);
        assert!(rig.read_by_device(to.address, MIB) == bytes_of(to));
        out(from);
        assert!(rig.read_by_device(from.address, MIB) == sent, "round {round}: what was paged out reads wrong");
        out(to);
        rig.write_by_device(to.address, &sent);
        assert!(bytes_of(to) == sent, "round {round}: what was paged out is written wrong");
    }
    rig.give(from);
    rig.give(to);
}

#[test]
fn verbs_on_demand_free_memory_is_purged_and_the_device_sees_what_is_there_then() {
    let Some(rig) = rig() else { return };
    let (keep, span) = (rig.heap.take(1, 1).unwrap(), rig.heap.take(256, 1).unwrap());
    let old = pattern(MIB, 1);
    bytes_of(span).chunks_mut(MIB).for_each(|chunk| chunk.copy_from_slice(&old));
    assert!(rig.read_by_device(span.address, MIB) == old);
    let pages = |rig: &Rig| arena_of(&rig.heap, keep).resident().unwrap().resident;
    let before = pages(&rig);
    rig.heap.give(span.address, span.slices);
    assert_eq!(rig.heap.purge_all(), 256 * SLICE);
    assert!(pages(&rig) <= before - 15 * MIB, "{before} bytes were in memory, now {}", pages(&rig));
    let again = rig.heap.take(256, 1).unwrap();
    assert_eq!((again.address, again.zero), (span.address, true));
    // By the key from before: it was never deregistered.
    assert!(rig.read_by_device(again.address, MIB) == vec![0; MIB], "the device reads what was purged");
    let new = pattern(MIB, 2);
    bytes_of(again)[..MIB].copy_from_slice(&new);
    assert!(rig.read_by_device(again.address, MIB) == new, "the device reads another page than the program writes");
    rig.write_by_device(again.address + 2 * MIB, &new);
    assert!(bytes_of(again)[2 * MIB..3 * MIB] == new, "the program reads another page than the device writes");
    assert_eq!(rig.heap.stats().deregistrations, 0);
    rig.heap.give(again.address, again.slices);
    rig.give(keep);
}

#[test]
fn verbs_memory_that_one_device_pins_and_one_does_not_is_pinned_as_long_as_both_are_there() {
    let Some(rig) = rig() else { return };
    let (keep, span) = (rig.heap.take(1, 1).unwrap(), rig.heap.take(64, 1).unwrap());
    let dirty = |span: Span| {
        bytes_of(span).fill(1);
        rig.heap.give(span.address, span.slices);
    };
    dirty(span);
    assert_eq!(rig.heap.purge_all(), 64 * SLICE);
    let pinned = pinned_bytes();
    rig.heap.set_pinning(Pinning::Pinned);
    let second = rig.heap.attach(Box::new(Verbs::open(Some(rig.domain.name())).unwrap())).unwrap();
    let arena = arena_of(&rig.heap, keep);
    assert_eq!((arena.keys.len(), arena.pinned), (2, true));
    assert_eq!(pinned_bytes() - pinned, arena.memory.len() as u64, "one of the two pins it");
    dirty(rig.heap.take(64, 1).unwrap());
    assert_eq!(rig.heap.purge_all(), 0, "pinned memory was purged");
    let (also, sent) = (rig.heap.take(16, 1).unwrap(), pattern(MIB, 9));
    bytes_of(also).copy_from_slice(&sent);
    assert!(rig.read_by_device(also.address, MIB) == sent);
    rig.heap.detach(second).unwrap();
    assert_eq!((pinned_bytes(), arena_of(&rig.heap, keep).pinned), (pinned, false));
    rig.heap.give(also.address, also.slices);
    assert!(rig.heap.purge_all() > 0);
    rig.give(keep);
}

#[test]
fn verbs_on_demand_arenas_stay_under_the_length_that_the_device_takes() {
    let Some(rig) = rig() else { return };
    // More than soft-RoCE takes in one registration; none of it is there.
    let span = rig.heap.take((2 << 30) / SLICE, 1).unwrap();
    let arena = arena_of(&rig.heap, span);
    assert!(arena.memory.len() >= 2 << 30 && rig.heap.stats().registered >= 2);
    let sent = pattern(MIB, 4);
    for at in [0, (1 << 30) - MIB, 1 << 30, (2 << 30) - MIB] {
        bytes_of(span)[at..at + MIB].copy_from_slice(&sent);
        assert!(rig.read_by_device(span.address + at, MIB) == sent, "at {at:#x}");
    }
    rig.give(span);
}

#[test]
fn verbs_on_demand_memory_does_not_count_against_the_memlock_limit() {
    let name = "verbs_on_demand_memory_does_not_count_against_the_memlock_limit";
    if may_pin().is_none() {
        if rig().is_some() {
            confined(name, 2 << 20, 2 << 20);
        }
        return;
    }
    let domain = domain_or_skip().unwrap();
    let heap = heap(Pinning::OnDemand);
    let device = heap.attach(Box::new(Verbs::new(domain))).unwrap();
    let span = heap.take(64 * MIB / SLICE, 1).unwrap();
    assert!(device.key(std::ptr::with_exposed_provenance::<u8>(span.address)).is_ok());
    assert_eq!((heap.stats().refusals, pinned_bytes()), (0, 0));
    heap.give(span.address, span.slices);
    heap.close_all_empty();
    heap.detach(device).unwrap();
}

#[test]
fn verbs_what_a_device_can_on_demand_is_asked_and_auto_stays_away_from_soft_roce() {
    let (Some(domain), _alone) = (domain_or_skip(), alone()) else { return };
    let registrar = Verbs::new(domain.clone());
    let can = registrar.on_demand();
    println!("{}: {can:?}", registrar.name());
    if !registrar.name().starts_with("rxe") {
        return println!("skipped: about soft-RoCE");
    }
    let refused = heap(Pinning::OnDemand).attach(Box::new(Verbs::new(domain.clone())));
    match can {
        None => {
            let error = refused.expect_err("it cannot");
            assert!(matches!(error, AttachError::OnDemand { why: NoOnDemand::Unsupported, .. }), "{error}");
            println!("{error}");
        }
        Some(can) => {
            assert!(!can.is_proven && can.operations.contains(Operations::needed_by(Access::REMOTE_ATOMIC)));
            assert!(refused.is_ok());
        }
    }
    let pinned = pinned_bytes();
    let heap = heap(Pinning::Auto);
    let device = heap.attach(Box::new(registrar)).unwrap();
    let span = heap.take(1, 1).unwrap();
    let arena = arena_of(&heap, span);
    assert_eq!((arena.pinned, pinned_bytes() - pinned), (true, arena.memory.len() as u64));
    assert_eq!(span.address % PAGE, 0);
    heap.give(span.address, 1);
    heap.close_all_empty();
    heap.detach(device).unwrap();
}
