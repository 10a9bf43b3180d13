//! The arenas over a registrar that only keeps books, and refuses on demand.

use super::*;
use crate::registrar::{Keys, Limits, Registered, Registrar};
use crate::{AttachError, DetachError, KeyError, NotRegistered, Refusal};
use core::num::NonZeroUsize;
use core::ops::Range;
use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What the fake device knows: its registrations by handle.
#[derive(Default)]
struct Books {
    live: BTreeMap<u64, Range<usize>>,
    made: u64,
    refuse_from: Option<u64>,
    refuse_end: bool,
    panic: bool,
    same_keys: Option<Keys>,
}

#[derive(Clone, Default)]
struct Fake(Arc<Mutex<Books>>, Option<NonZeroUsize>, Option<u64>);

/// A device in a machine that has 64 MiB to give.
struct Poor(Fake);

// SAFETY: no device, as the fake.
unsafe impl Registrar for Poor {
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
    fn name(&self) -> &str {
        self.0.name()
    }
    fn is_memlocked(&self) -> bool {
        false
    }
    fn available(&self) -> Option<u64> {
        Some(64 << 20)
    }
}

// SAFETY: no device, so nothing ever touches the memory.
unsafe impl Registrar for Fake {
    unsafe fn register(&self, memory: Range<usize>, _: Access) -> io::Result<Registered> {
        let mut books = self.0.lock().unwrap();
        if books.panic {
            drop(books);
            panic!("the test asked for it");
        }
        if books.refuse_from.is_some_and(|from| books.made >= from) {
            return Err(io::Error::from_raw_os_error(libc::ENOMEM));
        }
        assert!(memory.start.is_multiple_of(CHUNK) && memory.end.is_multiple_of(CHUNK));
        assert!(books.live.values().all(|other| other.end <= memory.start || memory.end <= other.start));
        books.made += 1;
        let handle = books.made;
        books.live.insert(handle, memory);
        let keys = Keys { lkey: handle as u32, rkey: handle as u32 + 1000 };
        Ok(Registered { keys: books.same_keys.unwrap_or(keys), handle })
    }

    fn deregister(&self, registered: Registered, memory: Range<usize>) -> io::Result<()> {
        let mut books = self.0.lock().unwrap();
        if books.refuse_end {
            return Err(io::Error::from_raw_os_error(libc::EBUSY));
        }
        assert_eq!(books.live.remove(&registered.handle), Some(memory), "not a live registration");
        Ok(())
    }

    fn limits(&self) -> Limits {
        Limits { max_len: self.2.unwrap_or(u64::MAX), ..Limits::NONE }
    }

    fn identity(&self) -> Option<NonZeroUsize> {
        self.1
    }

    fn is_memlocked(&self) -> bool {
        false
    }

    fn name(&self) -> &str {
        "fake0"
    }
}

impl Fake {
    fn live(&self) -> usize {
        self.0.lock().unwrap().live.len()
    }

    fn of_identity(identity: usize) -> Fake {
        Fake(Arc::default(), NonZeroUsize::new(identity), None)
    }
}

fn heap(require: bool) -> &'static Arenas {
    let (access, policy) = (Access::LOCAL_WRITE, if require { Policy::Require } else { Policy::Prefer });
    Box::leak(Box::new(Arenas::new(Config { access, policy, serves_children: false, tag: 9 })))
}

#[test]
fn arenas_opened_before_and_after_attach_are_registered() {
    let (heap, fake) = (heap(true), Fake::default());
    let before = heap.take(1, 1).unwrap();
    let device = heap.attach(Box::new(fake.clone())).unwrap();
    assert_eq!(device.key_of_address(before.address).unwrap(), Keys { lkey: 1, rkey: 1001 });
    let huge = heap.take((64 << 20) / SLICE, 1).unwrap();
    let last = huge.address + huge.slices * SLICE - 1;
    assert_eq!(device.key_of_address(last).unwrap().lkey, 2);
    assert!(device.is_one_registration(huge.address, last));
    assert!(!device.is_one_registration(before.address, last));
    assert_eq!(tag_of(last), Some(9));
    heap.give(before.address, 1);
    heap.give(huge.address, huge.slices);
    heap.detach(device).unwrap();
    assert_eq!(fake.live(), 0);
}

#[test]
fn an_arena_is_closed_after_its_last_span_and_never_before() {
    let (heap, fake) = (heap(true), Fake::default());
    let device = heap.attach(Box::new(fake.clone())).unwrap();
    let (a, b) = (heap.take(3, 1).unwrap(), heap.take(1, 1).unwrap());
    heap.give(a.address, 3);
    assert_eq!(heap.close_all_empty(), Closed::default());
    assert!(device.key_of_address(b.address).is_ok());
    heap.give(b.address, 1);
    let closed = heap.close_all_empty();
    assert_eq!((closed.arenas, closed.stuck, fake.live()), (1, 0, 0));
    assert_eq!(heap.stats().arenas, 0);
    // Foreign, unless another test of this process has opened an arena there meanwhile.
    let gone = [KeyError::Foreign, KeyError::NotRegistered(NotRegistered::OtherHeap)];
    assert!(gone.contains(&device.key_of_address(b.address).unwrap_err()));
}

#[test]
fn any_address_may_be_asked_for() {
    let heap = heap(true);
    let device = heap.attach(Box::new(Fake::default())).unwrap();
    let span = heap.take(1, 1).unwrap();
    let local = 0u8;
    for foreign in [0, 1, 8, usize::MAX, (&raw const local).addr()] {
        assert_eq!(device.key_of_address(foreign), Err(KeyError::Foreign), "{foreign:#x}");
    }
    assert!(device.key_of_address(span.address + SLICE).is_ok(), "a free slice of an open arena");
    let other = self::heap(true).take(1, 1).unwrap();
    assert_eq!(device.key_of_address(other.address), Err(KeyError::NotRegistered(NotRegistered::OtherHeap)));
    heap.detach(device).unwrap();
    assert_eq!(device.key_of_address(span.address), Err(KeyError::Detached));
    assert!(matches!(heap.detach(device), Err(DetachError::NotAttached)));
}

#[test]
fn an_attach_that_fails_undoes_what_it_did() {
    let (heap, fake) = (heap(true), Fake::default());
    let spans: Vec<_> = (0..3).map(|_| heap.take((40 << 20) / SLICE, 1).unwrap()).collect();
    fake.0.lock().unwrap().refuse_from = Some(2);
    let Err(AttachError::Register(error)) = heap.attach(Box::new(fake.clone())) else { panic!("not refused") };
    assert_eq!((error.wanted, error.devices, error.device.as_str()), (40 << 20, 1, "fake0"));
    assert_eq!((fake.live(), fake.0.lock().unwrap().made), (0, 2));
    assert_eq!(Arc::strong_count(&fake.0), 1, "the registrar is dropped");
    fake.0.lock().unwrap().refuse_from = None;
    let device = heap.attach(Box::new(fake.clone())).unwrap();
    assert!(spans.iter().all(|span| device.key_of_address(span.address).is_ok()));
}

#[test]
fn a_refused_arena_is_served_with_a_reason_or_not_at_all() {
    for require in [true, false] {
        let (heap, fake) = (heap(require), Fake::default());
        let device = heap.attach(Box::new(fake.clone())).unwrap();
        fake.0.lock().unwrap().refuse_from = Some(0);
        let span = heap.take(1, 1);
        assert_eq!(fake.live(), 0);
        if require {
            assert!(matches!(span, Err(TakeError::Register(_))));
            assert_eq!(heap.stats().open_bytes, 0);
            continue;
        }
        let refused = NotRegistered::Refused { code: libc::ENOMEM };
        let span = span.unwrap();
        assert_eq!(device.key_of_address(span.address), Err(KeyError::NotRegistered(refused)));
        heap.give(span.address, 1);
        assert_eq!(heap.close_all_empty().arenas, 1);
        fake.0.lock().unwrap().refuse_from = None;
        let span = heap.take(1, 1).unwrap();
        assert!(device.key_of_address(span.address).is_ok());
    }
}

#[test]
fn memory_that_a_device_will_not_let_go_of_is_kept_and_never_handed_out() {
    let (heap, fake) = (heap(true), Fake::default());
    let device = heap.attach(Box::new(fake.clone())).unwrap();
    let span = heap.take(1, 1).unwrap();
    fake.0.lock().unwrap().refuse_end = true;
    let Err(DetachError::Kept { arenas: 1, .. }) = heap.detach(device) else { panic!("let go") };
    let next = heap.take(1, 1).unwrap();
    assert!(next.address.abs_diff(span.address) >= CHUNK, "taken from a kept arena");
    heap.give(span.address, 1);
    heap.give(next.address, 1);
    assert_eq!(heap.close_all_empty().arenas, 1);
    assert_eq!(heap.stats().stuck_arenas, 1);
    // SAFETY: the span was this test's; it stays mapped.
    unsafe { core::ptr::with_exposed_provenance_mut::<u8>(span.address).write_volatile(1) };

    let device = heap.attach(Box::new(Fake::default())).unwrap();
    heap.detach(device).unwrap();
}

#[test]
fn an_empty_arena_that_a_device_keeps_is_stuck() {
    let (heap, fake) = (heap(true), Fake::default());
    heap.attach(Box::new(fake.clone())).unwrap();
    let span = heap.take(1, 1).unwrap();
    heap.give(span.address, 1);
    fake.0.lock().unwrap().refuse_end = true;
    assert_eq!(heap.close_all_empty(), Closed { arenas: 0, bytes: 0, stuck: 1 });
    assert_eq!(heap.close_all_empty(), Closed::default());
    let next = heap.take(1, 1).unwrap();
    assert!(next.address.abs_diff(span.address) >= CHUNK, "taken from a stuck arena");
}

#[test]
fn a_panic_in_a_registrar_is_a_refusal() {
    let (heap, fake) = (heap(true), Fake::default());
    heap.attach(Box::new(fake.clone())).unwrap();
    fake.0.lock().unwrap().panic = true;
    assert!(matches!(heap.take(1, 1), Err(TakeError::Register(_))));
    fake.0.lock().unwrap().panic = false;
    heap.take(1, 1).unwrap();
}

#[test]
fn keys_that_look_like_none_are_refused() {
    let (heap, fake) = (heap(true), Fake::default());
    fake.0.lock().unwrap().same_keys = Some(Keys { lkey: u32::MAX, rkey: u32::MAX });
    heap.attach(Box::new(fake.clone())).unwrap();
    assert!(matches!(heap.take(1, 1), Err(TakeError::Register(_))));
    assert_eq!(fake.live(), 0);
}

#[test]
fn a_device_with_a_length_limit_gets_pieces_and_no_short_span_crosses_one() {
    let (heap, fake) = (heap(true), Fake(Arc::default(), None, Some((5 << 20) - 1)));
    let device = heap.attach(Box::new(fake.clone())).unwrap();
    let span = heap.take((9 << 20) / SLICE, 1).unwrap();
    assert!(fake.0.lock().unwrap().live.values().all(|piece| piece.len() <= 4 << 20));
    let keys: Vec<_> = (0..9).map(|mib| device.key_of_address(span.address + (mib << 20)).unwrap().lkey).collect();
    assert!(keys.windows(2).all(|pair| pair[0] <= pair[1]));
    assert!(!device.is_one_registration(span.address, span.address + (9 << 20) - 1));
    heap.give(span.address, span.slices);
    heap.close_all_empty();
    assert_eq!(fake.live(), 0);

    let short = Fake(Arc::default(), None, Some((2 << 20) - 1));
    assert!(matches!(heap.attach(Box::new(short)), Err(AttachError::LengthLimit { .. })));
}

#[test]
fn the_same_protection_domain_twice_is_refused_on_one_heap_and_shared_between_two() {
    let (a, b) = (heap(true), heap(true));
    let fake = Fake::of_identity(0xabc);
    let device = a.attach(Box::new(fake.clone())).unwrap();
    assert!(matches!(a.attach(Box::new(fake.clone())), Err(AttachError::AlreadyAttached { .. })));
    assert_eq!(b.attach(Box::new(fake.clone())).unwrap(), device);
    let (in_a, in_b) = (a.take(1, 1).unwrap(), b.take(1, 1).unwrap());
    assert!(device.key_of_address(in_a.address).is_ok() && device.key_of_address(in_b.address).is_ok());
    a.detach(device).unwrap();
    assert_eq!(device.key_of_address(in_a.address), Err(KeyError::NotRegistered(NotRegistered::OtherHeap)));
    assert!(device.key_of_address(in_b.address).is_ok());
    b.detach(device).unwrap();
    assert_eq!(device.key_of_address(in_b.address), Err(KeyError::Detached));
}

#[test]
fn unpinned_free_memory_is_purged_and_pinned_memory_never() {
    static NOW: AtomicU64 = AtomicU64::new(1000);
    let heap = heap(true);
    assert!(heap.set_clock(|| Duration::from_millis(NOW.load(Relaxed))));
    let slices = (32 << 20) / SLICE;
    let fill = |span: Span| {
        // SAFETY: the span is this test's.
        unsafe { core::ptr::with_exposed_provenance_mut::<u8>(span.address).write_bytes(1, span.slices * SLICE) };
    };
    let span = heap.take(slices, 1).unwrap();
    let keep = heap.take(1, 1).unwrap();
    fill(span);
    heap.give(span.address, span.slices);
    assert_eq!(heap.stats().purged_bytes, 0, "what is given may be taken again soon");
    let span = heap.take(slices, 1).unwrap();
    NOW.fetch_add(250, Relaxed);
    heap.give(span.address, span.slices);
    assert_eq!(heap.stats().purged_bytes, (slices * SLICE) as u64);
    let again = heap.take(slices, 1).unwrap();
    assert_eq!((again.address, again.zero), (span.address, true));
    // SAFETY: as above.
    assert_eq!(unsafe { core::ptr::with_exposed_provenance_mut::<u8>(span.address).read() }, 0);
    fill(again);
    let device = heap.attach(Box::new(Fake::default())).unwrap();
    NOW.fetch_add(250, Relaxed);
    heap.give(again.address, again.slices);
    assert_eq!((heap.purge_all(), heap.stats().purged_bytes), (0, (slices * SLICE) as u64), "purged pinned memory");
    assert!(!heap.take(slices, 1).unwrap().zero);
    heap.detach(device).unwrap();
    heap.give(again.address, again.slices);
    assert_eq!(heap.stats().purged_bytes, 2 * (slices * SLICE) as u64, "unpinned again, so purged again");
    heap.give(keep.address, 1);
    assert_eq!(heap.purge_all(), SLICE, "who asks gets the last page back");
}

#[test]
fn memory_that_is_not_there_is_refused_and_not_pinned() {
    let much = (100 << 20) / SLICE;
    for requires in [true, false] {
        let heap = heap(requires);
        let device = heap.attach(Box::new(Poor(Fake::default()))).unwrap();
        let (small, large) = (heap.take(1, 1).unwrap(), heap.take(much, 1));
        assert!(device.key_of_address(small.address).is_ok());
        if requires {
            let Err(TakeError::Register(error)) = large else { panic!("{large:?}") };
            assert!(
                matches!(error.reason, Refusal::OutOfMemory { wanted, available } if wanted == 100 << 20 && available == 64 << 20)
            );
            assert!(error.to_string().contains("65536 KiB of memory are available"), "{error}");
        } else {
            let span = large.unwrap();
            let reason = NotRegistered::OutOfMemory { wanted_kib: 100 << 10, available_kib: 64 << 10 };
            assert_eq!(device.key_of_address(span.address), Err(KeyError::NotRegistered(reason)));
            heap.give(span.address, span.slices);
        }
        assert_eq!(heap.stats().refused.out_of_memory, 1);
        heap.give(small.address, 1);
        heap.detach(device).unwrap();
        heap.close_all_empty();
    }
}

#[test]
fn arenas_are_small_under_a_memlock_limit_and_few_beyond_it() {
    let size = |open: usize, memlocked, allows: u64| {
        policy_size(usual_size(1 << 44, open << 20), open << 20, memlocked, allows << 20) >> 20
    };
    assert_eq!([size(0, 0, 1 << 40), size(1024, 0, 1 << 40), size(1 << 20, 3, 1 << 40)], [2, 128, 16 << 10]);
    assert_eq!([2, 4, 8, 16, 32, 64, 256, 272].map(|open| size(open, 0, 1 << 40)), [2, 2, 4, 8, 16, 32, 32, 34]);
    assert_eq!([size(0, 0, 8), size(4, 0, 8), size(4, 0, 24), size(0, 0, 0)], [2, 2, 2, 2]);
    assert_eq!([size(8, 0, 8), size(1024, 0, 8)], [4, 128], "thousands of arenas in a program that has no device");
    assert_eq!([size(64, 1, 64), size(64, 2, 64), size(64, 2, 3)], [16, 8, 32]);
    assert_eq!(usual_size(64 << 20, 40 << 20), 8 << 20);
}

#[test]
fn memory_that_a_peer_could_write_is_never_called_zero() {
    let access = Access::REMOTE_WRITE;
    let config = Config { access, policy: Policy::Require, serves_children: false, tag: 0 };
    let heap: &'static Arenas = Box::leak(Box::new(Arenas::new(config)));
    assert!(!heap.take(1, 1).unwrap().zero);
}

#[test]
fn spans_grow_and_shrink_in_place_only_within_their_arena() {
    let heap = heap(true);
    let span = heap.take(2, 1).unwrap();
    assert_eq!(heap.grow(span.address, 2, 8), Some(true));
    let next = heap.take(1, 1).unwrap();
    assert_eq!(heap.grow(span.address, 8, 9), None);
    assert!(heap.shrink(span.address, 8, 2));
    let between = heap.take(6, 1).unwrap();
    assert_eq!((between.address, between.zero), (span.address + 2 * SLICE, false));
    assert_eq!(heap.grow(next.address, 1, SLICES_PER_CHUNK), None);
    for (span, slices) in [(span, 2), (next, 1), (between, 6)] {
        heap.give(span.address, slices);
    }
    assert_eq!(heap.close_all_empty().arenas, 1);
}

#[test]
fn a_span_shortened_in_place_does_not_cross_a_piece() {
    let heap = heap(true);
    let piece = PIECE / SLICE;
    let whole = heap.take(3 * piece, 1).unwrap();
    heap.give(whole.address, whole.slices);
    let before = heap.take(piece - 1, 1).unwrap();
    let long = heap.take(piece + 1, 1).unwrap();
    assert_eq!((before.address, long.address), (whole.address, whole.address + PIECE - SLICE));
    assert!(!heap.shrink(long.address, long.slices, 2), "crosses, and is no longer than a piece");
    assert!(heap.shrink(long.address, long.slices, 1));
    heap.give(before.address, before.slices);
    heap.give(long.address, 1);
    assert_eq!(heap.close_all_empty().arenas, 1);
}

#[test]
fn alignments_beyond_a_chunk_hold() {
    let heap = heap(true);
    for shift in 0..=10 {
        let span = heap.take(3, 1 << shift).unwrap();
        assert!(span.address.is_multiple_of(SLICE << shift));
    }
}

#[test]
fn requests_beyond_the_region_are_refused_with_its_size() {
    let heap = heap(true);
    assert!(matches!(heap.take(usize::MAX, 1), Err(TakeError::AddressSpace { .. })));
    assert!(matches!(heap.take(1, 1 << 40), Err(TakeError::AddressSpace { .. })));
}

#[test]
fn threads_take_and_give_while_devices_come_and_go_and_arenas_close() {
    let (heap, fake) = (heap(true), Fake::default());
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            scope.spawn(move || {
                let mut random = thread + 1;
                for round in 0..400 {
                    random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    let slices = 1 + (random >> 40) as usize % 300;
                    let span = heap.take(slices, 1).unwrap();
                    let first = core::ptr::with_exposed_provenance_mut::<u64>(span.address);
                    // SAFETY: the span is this thread's until it is given back.
                    unsafe {
                        first.write_volatile(thread << 32 | round);
                        std::thread::yield_now();
                        assert_eq!(first.read_volatile(), thread << 32 | round, "two have the same span");
                    }
                    heap.give(span.address, slices);
                }
            });
        }
        for _ in 0..100 {
            let device = heap.attach(Box::new(fake.clone())).unwrap();
            heap.close_all_empty();
            heap.detach(device).unwrap();
        }
    });
    heap.close_all_empty();
    assert_eq!((heap.stats().arenas, heap.stats().spans, fake.live()), (0, 0, 0));
}
