//! On which memory node registered memory lies, in a guest with two of them: what the kernel answers for each page (move_pages) is
//! the witness.
#![cfg(feature = "verbs")]

use rdmalloc_arenas::registrar::verbs::Verbs;
use rdmalloc_arenas::{
    Access, ArenaInfo, Arenas, Config, Keys, Limits, Node, Pages, Placed, Policy, Registered, Registrar, SLICE, Span,
};
use rdmalloc_tests::Setting;
use rdmalloc_tests::rig::domain_or_skip;
use std::ops::Range;
use std::{fs, io};

const POOL: &str = "/sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages";

fn heap(node: Node, pages: Pages) -> Arenas {
    let heap =
        Arenas::new(Config { access: Access::LOCAL_WRITE, policy: Policy::Require, serves_children: false, tag: 79 });
    heap.set_node(node);
    heap.set_pages(pages);
    heap
}

/// A device that says on which node it is.
struct Near(Verbs, Option<u32>);

// SAFETY: all that registers and deregisters is another registrar's.
unsafe impl Registrar for Near {
    unsafe fn register(&self, memory: Range<usize>, access: Access) -> io::Result<Registered> {
        // SAFETY: the caller's promise.
        unsafe { self.0.register(memory, access) }
    }
    fn deregister(&self, registered: Registered, memory: Range<usize>) -> io::Result<()> {
        self.0.deregister(registered, memory)
    }
    fn limits(&self) -> Limits {
        self.0.limits()
    }
    fn node(&self) -> Option<u32> {
        self.1
    }
    fn name(&self) -> &str {
        self.0.name()
    }
}

/// A device near that node, if this is the machine for it: two nodes with memory, and this thread on a processor of the first.
fn near(node: Option<u32>) -> Option<Box<Near>> {
    let nodes = fs::read_to_string("/sys/devices/system/node/has_memory").unwrap_or_default();
    if nodes.trim() != "0-1" {
        println!("skipped: needs memory nodes 0-1, here are {}", nodes.trim());
        return None;
    }
    // SAFETY: zeros are an empty set, and a processor of the first node is put into it.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(0, &mut set);
        assert_eq!(libc::sched_setaffinity(0, size_of_val(&set), &raw const set), 0);
    }
    Some(Box::new(Near(Verbs::new(domain_or_skip()?), node)))
}

fn arena_of(heap: &Arenas, span: Span) -> ArenaInfo {
    heap.arenas().into_iter().find(|arena| arena.memory.contains(&span.address)).unwrap()
}

fn touch(span: Span) {
    // SAFETY: the span is the test's.
    unsafe { std::ptr::with_exposed_provenance_mut::<u8>(span.address).write_bytes(5, span.slices * SLICE) };
}

/// What the kernel says of each page, asked here and by the arena itself.
fn assert_all_on(arena: &ArenaInfo, node: u32) {
    assert_eq!(arena.nodes().unwrap(), [(node, arena.memory.len())], "{arena:?}");
    let maps = fs::read_to_string("/proc/self/numa_maps").unwrap();
    let start = format!("{:x} ", arena.memory.start);
    if let Some(line) = maps.lines().find(|line| line.starts_with(&start)) {
        println!("{line}");
        assert!(!line.contains(&format!(" N{}=", 1 - node)), "{line}");
    }
}

#[test]
fn verbs_numa_arenas_lie_on_the_node_that_was_asked_for() {
    for (node, pages) in [
        (0, Pages::Transparent),
        (1, Pages::Transparent),
        (0, Pages::Base),
        (1, Pages::Base),
        (0, Pages::Huge2M),
        (1, Pages::Huge2M),
    ] {
        let Some(device) = near(None) else { return };
        let _pool = Setting::set("/proc/sys/vm/nr_hugepages", "64");
        let heap = heap(Node::Fixed(node), pages);
        let device = heap.attach(device).unwrap();
        let span = heap.take(1, 1).unwrap();
        let arena = arena_of(&heap, span);
        assert_eq!((arena.placed, arena.pages), (Placed::On(node), pages));
        assert_eq!(arena.keys.len(), 1);
        assert_all_on(&arena, node);
        heap.give(span.address, 1);
        assert_eq!(heap.close_all_empty().stuck, 0);
        heap.detach(device).unwrap();
    }
}

#[test]
fn verbs_numa_memory_from_before_attach_moves_to_the_node_of_the_device() {
    let Some(device) = near(Some(1)) else { return };
    let heap = heap(Node::OfDevice, Pages::Transparent);
    let span = heap.take(256, 1).unwrap();
    touch(span);
    let arena = arena_of(&heap, span);
    assert_eq!((arena.placed, arena.nodes().unwrap()), (Placed::Unknown, vec![(0, 256 * SLICE)]));
    let device = heap.attach(device).unwrap();
    let arena = arena_of(&heap, span);
    assert_eq!(arena.placed, Placed::On(1));
    assert_all_on(&arena, 1);
    // SAFETY: the span is the test's, and written.
    let bytes =
        unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance::<u8>(span.address), 256 * SLICE) };
    assert!(bytes.iter().all(|byte| *byte == 5), "what moves stays as it is");
    heap.give(span.address, 256);
    heap.close_all_empty();
    heap.detach(device).unwrap();
}

#[test]
fn verbs_numa_of_devices_on_different_nodes_the_first_decides_while_it_is_there() {
    let (Some(unknown), Some(first), Some(second)) = (near(None), near(Some(1)), near(Some(0))) else { return };
    let heap = heap(Node::OfDevice, Pages::Transparent);
    let placed = |heap: &Arenas| {
        let span = heap.take(1, 1).unwrap();
        let arena = arena_of(heap, span);
        if let Placed::On(node) = arena.placed {
            assert_all_on(&arena, node);
        }
        heap.give(span.address, 1);
        heap.close_all_empty();
        arena.placed
    };
    assert_eq!(placed(&heap), Placed::Unknown);
    let unknown = heap.attach(unknown).unwrap();
    assert_eq!(placed(&heap), Placed::Unknown);
    let first = heap.attach(first).unwrap();
    let second = heap.attach(second).unwrap();
    assert_eq!(placed(&heap), Placed::On(1));
    heap.detach(first).unwrap();
    assert_eq!(placed(&heap), Placed::On(0));
    heap.detach(second).unwrap();
    heap.detach(unknown).unwrap();
}

#[test]
fn verbs_numa_a_node_without_free_pages_is_no_failure() {
    let Some(device) = near(None) else { return };
    // The first node has all pages of the pool. Were the second forced, touching them would be a signal.
    let Some(_pool) = Setting::set(POOL, "16") else { return };
    let heap = heap(Node::Fixed(1), Pages::Huge2M);
    let device = heap.attach(device).unwrap();
    let span = heap.take(1, 1).unwrap();
    let arena = arena_of(&heap, span);
    assert_eq!((arena.pages, arena.fallback, arena.placed), (Pages::Huge2M, None, Placed::On(1)));
    assert_eq!(arena.nodes().unwrap(), [(0, arena.memory.len())]);
    heap.give(span.address, 1);
    heap.close_all_empty();
    heap.detach(device).unwrap();
}

#[test]
fn verbs_a_device_of_software_says_no_node() {
    let Some(domain) = domain_or_skip() else { return };
    if domain.name().starts_with("rxe") {
        assert_eq!(Verbs::new(domain).node(), None);
    }
}

/// Registers nothing; on any machine.
struct Nobody;

// SAFETY: there is no device, so nothing touches the memory.
unsafe impl Registrar for Nobody {
    unsafe fn register(&self, memory: Range<usize>, _: Access) -> io::Result<Registered> {
        let number = memory.start as u64;
        Ok(Registered { keys: Keys { lkey: 1, rkey: 1 }, handle: number })
    }
    fn deregister(&self, _: Registered, _: Range<usize>) -> io::Result<()> {
        Ok(())
    }
    fn name(&self) -> &str {
        "nobody"
    }
}

#[test]
fn a_node_that_is_not_there_is_said_and_the_heap_works() {
    let heap = heap(Node::Fixed(1000), Pages::Transparent);
    let device = heap.attach(Box::new(Nobody)).unwrap();
    let span = heap.take(16, 1).unwrap();
    touch(span);
    let arena = arena_of(&heap, span);
    let Placed::Refused { node: 1000, code } = arena.placed else { panic!("{arena:?}") };
    println!("{}", arena.placed);
    assert!([libc::EINVAL, libc::ENOSYS, libc::EPERM].contains(&code), "{}", arena.placed);
    heap.give(span.address, 16);
    assert_eq!(heap.close_all_empty().stuck, 0);
    heap.detach(device).unwrap();
}
