//! What may fly: [`StableBytes`], and what may be received into: [`StableBytesMut`]. Uses nothing above it.
//!
//! # Why a value may move while a device works on its bytes
//!
//! A device knows addresses, and nothing of values. So what matters is that the bytes stay: that moving the value does not move
//! them (they are on the heap, or static), and that nobody frees or changes them, which a flight sees to by having the value.
//!
//! A source is only read by the device. That a moved `Box` is taken for the only way to its bytes lets the compiler move reads
//! and writes of the program's own; it has no write left to move past the post: the value lies in a static table by then, and
//! a post is a call that may look there for all that the compiler knows. Reads by somebody else change nothing.
//!
//! A target is written by the device behind the compiler's back. So it is never in a `Box`, and no reference to it is kept: it is
//! the room behind the bytes of a value that has a raw pointer (`Vec`, `BytesMut`, a buffer of a heap), which nobody reads or
//! writes before the completion.

use bytes::{Bytes, BytesMut};
use core::mem::MaybeUninit;
use core::ptr;
use std::sync::Arc;

/// Bytes that stay where they are, and what they are, as long as nobody but their owner does anything with them: a flight may have
/// them as the source of sends and RDMA writes.
///
/// Such a value is one piece, or several: arrays, tuples and `Vec`s of such values are such values, for one completion that
/// retires many.
///
/// # Safety
///
/// - The bytes of a piece are initialised, and neither change nor go away while the value exists and is not touched but
///   through this trait; also when the value is moved, and when clones of it elsewhere are used and dropped. (So: no bytes
///   inside the value itself, no interior mutability.)
/// - `piece` gives the same for an index each time; what is there for an index that is not below `pieces` is empty.
pub unsafe trait StableBytes: Send + 'static {
    /// Whether every value is one piece.
    const SINGLE: bool = true;

    /// How many pieces it is.
    fn pieces(&self) -> usize {
        1
    }

    /// The bytes of a piece.
    fn piece(&self, index: usize) -> &[u8];
}

/// Bytes with room behind them that belongs to their owner alone: a device may write there, for receives and RDMA reads.
///
/// What is shared is no target: it has no room that is one owner's.
///
/// ```compile_fail
/// fn target<B: rdmalloc_arenas::StableBytesMut>() {}
/// target::<bytes::Bytes>();
/// ```
///
/// ```compile_fail
/// fn target<B: rdmalloc_arenas::StableBytesMut>() {}
/// target::<std::sync::Arc<[u8]>>();
/// ```
///
/// # Safety
///
/// - The room begins behind the bytes of the piece. Nobody else has it, and it stays where it is, as [`StableBytes`] asks of the
///   bytes; `room` neither reads nor writes it, and keeps no reference to it.
/// - `fill` makes the first bytes of the room bytes of the piece.
pub unsafe trait StableBytesMut: StableBytes {
    /// The room behind the bytes of a piece; empty for an index that is not below `pieces`.
    fn room(&mut self, index: usize) -> *mut [MaybeUninit<u8>];

    /// Says that the first `len` bytes of the room were written: they are bytes of the piece now.
    ///
    /// # Safety
    ///
    /// They were, and there are so many.
    unsafe fn fill(&mut self, index: usize, len: usize);
}

/// The piece of a value that is one.
macro_rules! source {
    ($type:ty, $bytes:expr) => {
        // SAFETY: the bytes lie on the heap or are static, so they do not move with the value; and the type lets nobody
        // write them who has not `&mut` of the value, or while others share them.
        unsafe impl StableBytes for $type {
            fn piece(&self, index: usize) -> &[u8] {
                let bytes: fn(&Self) -> &[u8] = $bytes;
                if index == 0 { bytes(self) } else { &[] }
            }
        }
    };
}

source!(Vec<u8>, |vec| vec);
source!(Box<[u8]>, |bytes| bytes);
source!(String, |text| text.as_bytes());
source!(Box<str>, |text| text.as_bytes());
source!(Arc<[u8]>, |bytes| bytes);
source!(Arc<str>, |text| text.as_bytes());
source!(Arc<Vec<u8>>, |vec| vec);
source!(Bytes, |bytes| bytes);
source!(BytesMut, |bytes| bytes);
source!(&'static [u8], |bytes| bytes);
source!(&'static str, |text| text.as_bytes());

const NO_ROOM: *mut [MaybeUninit<u8>] = ptr::slice_from_raw_parts_mut(ptr::dangling_mut(), 0);

// SAFETY: a Vec owns the room between length and capacity alone, by a raw pointer.
unsafe impl StableBytesMut for Vec<u8> {
    fn room(&mut self, index: usize) -> *mut [MaybeUninit<u8>] {
        if index > 0 {
            return NO_ROOM;
        }
        let room = self.capacity() - self.len();
        // SAFETY: within the capacity, or at its end.
        ptr::slice_from_raw_parts_mut(unsafe { self.as_mut_ptr().add(self.len()) }.cast(), room)
    }

    unsafe fn fill(&mut self, index: usize, len: usize) {
        debug_assert!(index == 0 && len <= self.capacity() - self.len());
        // SAFETY: the caller's word.
        unsafe { self.set_len(self.len() + len) }
    }
}

// SAFETY: a BytesMut has the room between its length and its capacity alone, by a raw pointer, whatever it shares the rest of
// its block with.
unsafe impl StableBytesMut for BytesMut {
    fn room(&mut self, index: usize) -> *mut [MaybeUninit<u8>] {
        if index > 0 {
            return NO_ROOM;
        }
        self.spare_capacity_mut()
    }

    unsafe fn fill(&mut self, index: usize, len: usize) {
        debug_assert!(index == 0 && len <= self.capacity() - self.len());
        // SAFETY: the caller's word.
        unsafe { self.set_len(self.len() + len) }
    }
}

/// Which value of several the piece is in, and which of its pieces it is.
fn locate<B: StableBytes>(values: &[B], index: usize) -> Option<(usize, usize)> {
    if B::SINGLE {
        return (index < values.len()).then_some((index, 0));
    }
    let mut left = index;
    for (at, value) in values.iter().enumerate() {
        match left.checked_sub(value.pieces()) {
            None => return Some((at, left)),
            Some(rest) => left = rest,
        }
    }
    None
}

macro_rules! batch {
    ([$($generics:tt)*] $type:ty) => {
        // SAFETY: each value's bytes stay, as it promises; and where each is found does not change while nobody touches the batch.
        unsafe impl<B: StableBytes $($generics)*> StableBytes for $type {
            const SINGLE: bool = false;

            fn pieces(&self) -> usize {
                if B::SINGLE { self.len() } else { self.iter().map(StableBytes::pieces).sum() }
            }

            fn piece(&self, index: usize) -> &[u8] {
                locate(self, index).map_or(&[], |(at, piece)| self[at].piece(piece))
            }
        }

        // SAFETY: as above.
        unsafe impl<B: StableBytesMut $($generics)*> StableBytesMut for $type {
            fn room(&mut self, index: usize) -> *mut [MaybeUninit<u8>] {
                locate(self, index).map_or(NO_ROOM, |(at, piece)| self[at].room(piece))
            }

            unsafe fn fill(&mut self, index: usize, len: usize) {
                if let Some((at, piece)) = locate(self, index) {
                    // SAFETY: the caller's word, for the value that has the piece.
                    unsafe { self[at].fill(piece, len) }
                }
            }
        }
    };
}

batch!([] Vec<B>);
batch!([, const N: usize] [B; N]);

macro_rules! tuple {
    ($($type:ident $field:tt),+) => {
        // SAFETY: each value's bytes stay, as it promises.
        unsafe impl<$($type: StableBytes),+> StableBytes for ($($type,)+) {
            const SINGLE: bool = false;

            fn pieces(&self) -> usize {
                0 $(+ self.$field.pieces())+
            }

            fn piece(&self, index: usize) -> &[u8] {
                let mut left = index;
                $(match left.checked_sub(self.$field.pieces()) {
                    None => return self.$field.piece(left),
                    Some(rest) => left = rest,
                })+
                let _ = left;
                &[]
            }
        }

        // SAFETY: as above.
        unsafe impl<$($type: StableBytesMut),+> StableBytesMut for ($($type,)+) {
            fn room(&mut self, index: usize) -> *mut [MaybeUninit<u8>] {
                let mut left = index;
                $(match left.checked_sub(self.$field.pieces()) {
                    None => return self.$field.room(left),
                    Some(rest) => left = rest,
                })+
                let _ = left;
                NO_ROOM
            }

            unsafe fn fill(&mut self, index: usize, len: usize) {
                let mut left = index;
                $(match left.checked_sub(self.$field.pieces()) {
                    // SAFETY: the caller's word, for the value that has the piece.
                    None => return unsafe { self.$field.fill(left, len) },
                    Some(rest) => left = rest,
                })+
                let _ = left;
            }
        }
    };
}

tuple!(A 0, B 1);
tuple!(A 0, B 1, C 2);
tuple!(A 0, B 1, C 2, D 3);

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(value: &impl StableBytes) -> Vec<&[u8]> {
        assert!(value.piece(value.pieces()).is_empty());
        (0..value.pieces()).map(|index| value.piece(index)).collect()
    }

    #[test]
    fn every_piece_of_a_batch_is_found_where_it_is() {
        let batch =
            (String::from("ab"), vec![(Bytes::from_static(b"c"), "d"), (Bytes::new(), "e")], [vec![6u8], vec![6]]);
        let all: [&[u8]; 7] = [b"ab", b"c", b"d", b"", b"e", &[6], &[6]];
        assert_eq!(pieces(&batch), all);
        assert_eq!(pieces(&vec![Arc::<[u8]>::from([1]), Arc::from([2])]), [[1], [2]]);
        assert_eq!(Vec::<Vec<u8>>::new().pieces(), 0);
    }

    #[test]
    fn room_is_behind_the_bytes_and_what_fills_it_becomes_bytes() {
        let mut batch = (vec![Vec::<u8>::with_capacity(8), vec![1, 2]], [BytesMut::with_capacity(16)]);
        batch.1[0].extend_from_slice(b"xy");
        batch.0[1].shrink_to_fit();
        for (index, len) in [(0, 3), (2, 4)] {
            let (room, bytes) = (batch.room(index), batch.piece(index).as_ptr_range());
            assert!(room.len() >= len && room.cast::<u8>().cast_const() == bytes.end);
            // SAFETY: the room is the batch's alone, and so long.
            unsafe {
                room.cast::<u8>().write_bytes(7, len);
                batch.fill(index, len);
            }
        }
        let all: [&[u8]; 3] = [&[7, 7, 7], &[1, 2], b"xy\x07\x07\x07\x07"];
        assert_eq!(pieces(&batch), all);
        assert_eq!((batch.room(1).len(), batch.room(3).len()), (0, 0));
    }
}
