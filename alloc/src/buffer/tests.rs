//! Buffers of every size, and what they know by their address.

use super::*;
use crate::Access;
use crate::class::{CLASSES, kind_of, size_of_class};
use bytes::{BufMut, Bytes};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
const GIB: usize = 1 << 30;

#[test]
fn a_buffer_is_two_words_and_so_is_an_optional_one() {
    assert_eq!((size_of::<Buffer>(), size_of::<Option<Buffer>>()), (2 * size_of::<usize>(), 2 * size_of::<usize>()));
}

/// Takes a block, and looks at it as who frees it by its address does.
fn check(core: &Core, size: usize, align: usize) {
    let layout = Layout::from_size_align(size, align).unwrap();
    let block = core.allocate(layout, false).unwrap().start;
    // SAFETY: taken above.
    let found = unsafe { block::size(block) };
    assert!(found >= size && block.addr().get().is_multiple_of(align), "{size} at {align}: {found}");
    let by_address = Layout::from_size_align(found, 1).unwrap();
    assert_eq!(kind_of(by_address), kind_of(layout), "{size} at {align}");
    // SAFETY: taken above, and of this kind.
    unsafe { pool::give_back(block) };
}

#[test]
fn a_block_is_freed_by_its_address_as_its_layout_would() {
    let heap = Heap::builder().build().unwrap();
    // Twice, so that spans are slabs, then large, then slabs of other classes.
    for _ in 0..2 {
        for class in 0..CLASSES {
            for size in [size_of_class(class), size_of_class(class) - 1] {
                (0..=22).for_each(|shift| check(heap.core, size, 1 << shift));
            }
        }
        for size in [64 * KIB + 1, 4 * MIB - 1, 4 * MIB, 4 * MIB + 1, 40 * MIB] {
            (0..=26).for_each(|shift| check(heap.core, size, 1 << shift));
        }
    }
    assert_eq!((heap.trim().stuck_arenas, heap.stats().live_bytes), (0, 0));
}

#[test]
fn buffers_of_any_size_know_their_capacity_and_give_all_of_it_back() {
    let heap = Heap::builder().build().unwrap();
    for capacity in
        [0, 1, 63, 64, 65, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 4 * MIB - 1, 4 * MIB + 1, 32 * MIB, 100 * MIB]
    {
        let buffer = heap.buffer(capacity).unwrap();
        assert!(buffer.is_empty() && buffer.capacity() >= capacity, "{capacity}: {}", buffer.capacity());
        assert!(buffer.capacity() <= (capacity + capacity / 8 + 64).next_multiple_of(64 * KIB), "{capacity}");
    }
    match heap.buffer(5 * GIB) {
        Ok(buffer) => assert_eq!(buffer.capacity(), 5 * GIB),
        Err(error) => println!("skipped: 5 GiB of address space: {error}"),
    }
    for capacity in [isize::MAX as usize, isize::MAX as usize - 63, usize::MAX, usize::MAX / 2 - 1000] {
        heap.buffer(capacity).expect_err("more than there is");
    }
    heap.trim();
    assert_eq!(heap.open_bytes(), 0);
}

#[test]
fn zeroed_is_zero_and_as_long_as_asked_whatever_lay_there() {
    for access in [Access::default(), Access::REMOTE_WRITE] {
        let heap = Heap::builder().access(access).build().unwrap();
        for len in [0, 1, 63, 4096, 64 * KIB - 1, 64 * KIB + 1, 4 * MIB - 1, 4 * MIB + 1, 33 * MIB] {
            for _ in 0..3 {
                let mut buffer = heap.buffer_zeroed(len).unwrap();
                assert_eq!(buffer.len(), len);
                assert!(buffer.iter().all(|byte| *byte == 0), "{len}");
                buffer.fill(0xa5);
            }
        }
        heap.buffer_zeroed(isize::MAX as usize).expect_err("more than there is");
    }
}

#[test]
fn an_aligned_buffer_has_whole_blocks_and_a_bad_alignment_is_told() {
    let heap = Heap::builder().build().unwrap();
    for shift in 0..=26 {
        let align = 1 << shift;
        for capacity in [0, 1, 63, 64 * KIB - 1, 64 * KIB + 1, 4 * MIB - 1, 4 * MIB + 1] {
            let buffer = heap.buffer_aligned(capacity, align).unwrap();
            assert!(buffer.as_ptr().addr().is_multiple_of(align.max(64)), "{capacity} at {align}");
            assert!(buffer.capacity().is_multiple_of(align) && buffer.capacity() >= capacity, "{capacity} at {align}");
        }
    }
    for align in [0, 3, 1000, 4095, usize::MAX] {
        let error = heap.buffer_aligned(1, align).expect_err("no power of two");
        assert!(matches!(error, TakeError::NotALayout { wanted: 1, .. }), "{error}");
        assert!(error.to_string().contains("power of two"), "{error}");
    }
    for (capacity, align) in [(isize::MAX as usize, 4096), (1, 1 << 63), (usize::MAX, 1)] {
        let error = heap.buffer_aligned(capacity, align).expect_err("more than there is").to_string();
        assert!(error.contains(&isize::MAX.to_string()), "{error}");
    }
    // A layout, but more than can be had.
    heap.buffer_aligned(1, 1 << 62).expect_err("an alignment of 4 EiB");
}

#[test]
fn nothing_writes_beyond_the_capacity() {
    use std::io::Write;
    let heap = Heap::builder().build().unwrap();
    let mut buffer = heap.buffer(100).unwrap();
    let capacity = buffer.capacity();
    buffer.put_bytes(1, capacity - 1);
    assert_eq!(buffer.try_extend_from_slice(b"ab"), Err(BufferFull { wanted: 2, room: 1 }));
    assert_eq!(core::fmt::Write::write_str(&mut buffer, "ab"), Err(core::fmt::Error));
    assert_eq!(buffer.len(), capacity - 1);
    assert_eq!(buffer.write(b"ab").unwrap(), 1);
    assert_eq!((buffer.last(), buffer.remaining_mut(), buffer.has_remaining_mut()), (Some(&b'a'), 0, false));
    assert_eq!(buffer.write_all(b"c").unwrap_err().kind(), std::io::ErrorKind::WriteZero);
    type Overfill = fn(&mut Buffer);
    let overfills: [Overfill; 4] = [
        |buffer| buffer.put_u8(1),
        |buffer| buffer.extend([1]),
        |buffer| buffer.extend(&[1]),
        // SAFETY: it must panic.
        |buffer| unsafe { buffer.advance_mut(1) },
    ];
    for overfill in overfills {
        let full = std::panic::AssertUnwindSafe(|| overfill(&mut buffer));
        std::panic::catch_unwind(full).expect_err("there is no room");
        assert_eq!(buffer.len(), capacity);
    }
    buffer.truncate(2);
    buffer.extend(&[2, 3]);
    buffer.extend([4]);
    assert_eq!(buffer, [1, 1, 2, 3, 4]);
    assert_eq!(buffer.try_resize(capacity + 1, 0), Err(BufferFull { wanted: capacity - 4, room: capacity - 5 }));
    buffer.try_resize(capacity, 0).unwrap();
    buffer.try_resize(1, 0).unwrap();
    assert_eq!(buffer, [1]);
}

#[test]
fn it_compares_hashes_and_prints_as_its_bytes() {
    let heap = Heap::builder().build().unwrap();
    let (a, b) = (heap.buffer_from_slice(b"a\n\xff").unwrap(), heap.buffer_from_slice(b"b").unwrap());
    let (text, bytes) = (String::from("b"), Bytes::from_static(b"b"));
    assert!(a < b && a < bytes && text > a && b >= text);
    let equal =
        [*b"b" == b, b == "b", "b" == b, b == *"b", b == vec![b'b'], b == text, text == b, bytes == b, b == bytes];
    assert_eq!(equal, [true; 9]);
    let other = [a == b, *b"b" == a, a == "b", "b" == a, a == text, bytes == a];
    assert_eq!(other, [false; 6]);
    assert_eq!(
        (format!("{a:?}"), format!("{a:x}"), format!("{a:X}")),
        (r#"b"a\n\xff""#.into(), "610aff".into(), "610AFF".into())
    );
    let set = std::collections::HashSet::from([a, b]);
    assert!(set.contains(&b"b"[..]) && !set.contains(&b"c"[..]));
}
