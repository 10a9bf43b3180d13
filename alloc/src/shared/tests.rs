//! Parts of a buffer, who has them, and who gets it back.

use super::*;
use crate::{Access, Heap};
use core::ops::Bound;
use rdmalloc_arenas::tag_of;

fn frozen(heap: &Heap, len: usize) -> SharedBuffer {
    let mut buffer = heap.buffer(len).unwrap();
    buffer.extend((0..len).map(|index| index as u8));
    buffer.freeze()
}

#[test]
fn how_many_owners_there_are_is_not_counted_where_a_peer_writes() {
    let heap = Heap::builder().access(Access::REMOTE_WRITE).build().unwrap();
    for len in [0, 1, 64, 4096, 100 << 10] {
        let shared = frozen(&heap, len);
        let (bytes, count) = (shared.start.addr().get(), Arc::as_ptr(&shared.owner).addr());
        assert_eq!(tag_of(bytes), Some(heap.core.arenas.config().tag));
        assert_ne!(tag_of(count), tag_of(bytes));
    }
}

#[test]
fn the_block_goes_back_with_the_last_part_and_not_before() {
    let heap = Heap::builder().build().unwrap();
    let mut rest = frozen(&heap, 1 << 20);
    let first = rest.split_to(10);
    let middle = rest.slice(100..200);
    let bytes = Bytes::from(middle.clone());
    let direct = Bytes::from(heap.buffer_from_slice(b"direct").unwrap());
    drop(heap.clone());
    drop((rest, middle));
    heap.trim();
    assert!(heap.open_bytes() > 0 && first[9] == 9 && bytes[0] == 110 && direct == "direct");
    drop((first, direct));
    heap.trim();
    assert!(heap.open_bytes() > 0 && bytes.iter().eq((110..210).collect::<Vec<u8>>().iter()));
    std::thread::spawn(move || drop(bytes)).join().unwrap();
    heap.trim();
    assert_eq!(heap.open_bytes(), 0);
}

#[test]
fn the_buffer_comes_back_whole_once_and_only_to_the_last_owner() {
    let heap = Heap::builder().build().unwrap();
    let whole = frozen(&heap, 1000);
    let (at, part, bytes) = (whole.as_ptr(), whole.slice(10..20), Bytes::from(whole.slice(5..)));
    assert!(!whole.is_unique() && !part.is_unique());
    let whole = whole.try_into_buffer().expect_err("shared");
    assert_eq!((whole.len(), whole.as_ptr()), (1000, at));
    drop(whole);
    let part = Buffer::try_from(part).expect_err("the Bytes are there");
    assert_eq!(part[..3], [10, 11, 12]);
    drop(bytes);
    assert!(part.is_unique());
    let mut buffer = Buffer::try_from(part).unwrap();
    assert_eq!((buffer.as_ptr(), buffer.len(), buffer[999]), (at, 1000, 999_usize as u8));
    buffer[0] = 77;
    assert_eq!(buffer.freeze()[0], 77);
}

#[test]
fn of_threads_that_are_the_last_owners_at_once_one_gets_the_buffer() {
    let heap = Heap::builder().build().unwrap();
    for _ in 0..200 {
        let shared = frozen(&heap, 64);
        let owners = [shared.clone(), shared];
        let got: Vec<Buffer> = std::thread::scope(|scope| {
            let threads = owners.map(|owner| scope.spawn(move || owner.into_last()));
            threads.into_iter().filter_map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(got.len(), 1);
        assert_eq!(got[0][63], 63);
    }
}

#[test]
fn parts_are_cut_as_slices_are_and_never_reach_beyond() {
    let heap = Heap::builder().build().unwrap();
    let whole = frozen(&heap, 100);
    assert_eq!(whole.slice(..), whole);
    assert_eq!(whole.slice(10..=12), [10, 11, 12]);
    assert!(whole.slice(100..).is_empty() && whole.slice(..0).is_empty() && frozen(&heap, 0).slice(..).is_empty());
    let middle = whole.slice(40..60);
    assert_eq!(middle.slice(5..7), [45, 46]);
    assert_eq!(whole.slice_ref(&middle[1..3]), [41, 42]);
    assert_eq!(middle.slice_ref(&whole[40..41]), [40]);
    let (mut a, mut b) = (middle.clone(), middle.clone());
    assert_eq!((a.split_off(15), a.len()), (whole.slice(55..60), 15));
    assert_eq!((b.split_to(20), b.len()), (middle.clone(), 0));
    let mut reader = middle.clone();
    assert_eq!((reader.get_u8(), reader.copy_to_bytes(2), reader.remaining()), (40, Bytes::from(vec![41, 42]), 17));
    let mut cut = middle.clone();
    cut.truncate(30);
    cut.truncate(2);
    assert_eq!(cut, [40, 41]);
    type Beyond = fn(&SharedBuffer);
    let beyond: [Beyond; 9] = [
        |part| drop(part.slice(..21)),
        |part| drop(part.slice(21..)),
        #[expect(clippy::reversed_empty_ranges)]
        |part| drop(part.slice(3..2)),
        |part| drop(part.slice(..=usize::MAX)),
        |part| drop(part.slice((Bound::Excluded(usize::MAX), Bound::Unbounded))),
        |part| drop(part.clone().split_to(21)),
        |part| drop(part.clone().split_off(21)),
        |part| part.clone().advance(21),
        |part| drop(part.slice_ref(b"elsewhere")),
    ];
    for (index, cut) in beyond.into_iter().enumerate() {
        let cut = std::panic::AssertUnwindSafe(|| cut(&middle));
        std::panic::catch_unwind(cut).expect_err(&format!("cut {index}"));
    }
    for neighbour in [&whole[39..41], &whole[59..61], &whole[..]] {
        let cut = std::panic::AssertUnwindSafe(|| drop(middle.slice_ref(neighbour)));
        std::panic::catch_unwind(cut).expect_err("beyond the part");
    }
}
