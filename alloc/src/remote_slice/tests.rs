//! The wire form, ranges that a peer may have made up, and buffers that peers cannot reach.

use super::*;
use crate::Heap;
use rdmalloc_tests::Ledger;

const SLICE: RemoteSlice = RemoteSlice { addr: 0x0102_0304_0506_0708, len: 0x1112_1314_1516_1718, rkey: 0x2122_2324 };

#[test]
fn the_wire_form_is_the_same_on_every_machine() {
    let bytes = [8, 7, 6, 5, 4, 3, 2, 1, 0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11, 0x24, 0x23, 0x22, 0x21];
    assert_eq!(SLICE.to_bytes(), bytes);
    assert_eq!(RemoteSlice::from_bytes(bytes), SLICE);
    assert_eq!(RemoteSlice::try_from(&bytes[..]), Ok(SLICE));
    for len in [0, 19, 21] {
        assert_eq!(RemoteSlice::try_from(&[0; 21][..len]), Err(NotARemoteSlice { len }));
    }
    assert_eq!(
        format!("{SLICE:?}"),
        "RemoteSlice { addr: 0x102030405060708, len: 1230066625199609624, rkey: 0x21222324 }"
    );
}

#[test]
fn no_range_reaches_beyond_what_was_told_or_around_the_address_space() {
    let slice = RemoteSlice { addr: 1000, len: 100, rkey: 7 };
    let at = |addr, len| Ok(RemoteSlice { addr, len, rkey: 7 });
    assert_eq!(slice.slice(..), at(1000, 100));
    assert_eq!((slice.slice(10..=19), slice.slice(100..), slice.slice(..0)), (at(1010, 10), at(1100, 0), at(1000, 0)));
    assert_eq!(slice.split_at(100).unwrap()[1], at(1100, 0).unwrap());
    let error = |start, end| Err(RemoteRangeError { start, end, of: slice });
    assert_eq!((slice.slice(..101), slice.slice(101..)), (error(0, 101), error(101, 100)));
    #[expect(clippy::reversed_empty_ranges)]
    let reversed = slice.slice(3..2);
    assert_eq!((reversed, slice.split_at(101)), (error(3, 2), Err(error(0, 101).unwrap_err())));
    assert_eq!(slice.slice(..=u64::MAX), error(u64::MAX, u64::MAX));
    assert_eq!(slice.slice((Bound::Excluded(u64::MAX), Bound::Unbounded)), error(u64::MAX, u64::MAX));
    assert!(error(0, 101).unwrap_err().to_string().contains("within the peer's 100 bytes"));
    // Made up by a peer.
    let around = RemoteSlice { addr: u64::MAX - 10, len: 100, rkey: 7 };
    assert_eq!(around.slice(..10).unwrap().addr, u64::MAX - 10);
    let error = around.slice(5..12).unwrap_err();
    assert!(error.to_string().contains("beyond any address"), "{error}");
    let all = RemoteSlice { addr: 0, len: u64::MAX, rkey: 7 };
    assert_eq!(all.slice(..=u64::MAX).unwrap_err().of, all);
    assert_eq!(all.slice(u64::MAX..).unwrap().addr, u64::MAX);
}

#[test]
fn a_buffer_is_told_of_only_where_its_key_opens_something() {
    let device_of = |access| {
        let heap = Heap::builder().access(access).build().unwrap();
        let device = heap.attach(Ledger::new()).unwrap();
        (heap, device)
    };
    let (heap, device) = device_of(Access::REMOTE_READ | Access::REMOTE_WRITE);
    let mut buffer = heap.buffer(1000).unwrap();
    buffer.try_extend_from_slice(b"read me").unwrap();
    let (addr, rkey) = (buffer.as_ptr().addr() as u64, device.key(buffer.as_ptr()).unwrap().rkey);
    assert_eq!(buffer.remote(device), Ok(RemoteSlice { addr, len: 7, rkey }));
    let capacity = buffer.capacity() as u64;
    assert_eq!(buffer.remote_mut(device), Ok(RemoteSlice { addr, len: capacity, rkey }));
    let part = buffer.freeze().slice(5..);
    assert_eq!(part.remote(device), Ok(RemoteSlice { addr: addr + 5, len: 2, rkey }));
    // Another heap's device.
    let (other, foreign) = device_of(Access::REMOTE_READ);
    assert!(matches!(part.remote(foreign), Err(RemoteError::Key(KeyError::NotRegistered(_)))));
    let mut read_only = other.buffer(1).unwrap();
    assert!(read_only.remote(foreign).is_ok());
    assert!(matches!(read_only.remote_mut(foreign), Err(RemoteError::NoAccess { .. })));
    for access in [Access::LOCAL_READ, Access::LOCAL_WRITE, Access::WINDOWS, Access::READ_TARGET] {
        let (heap, device) = device_of(access);
        let mut buffer = heap.buffer(1).unwrap();
        let error = buffer.remote(device).unwrap_err();
        assert_eq!(error, RemoteError::NoAccess { wanted: Access::REMOTE_READ, heap: access });
        assert!(error.to_string().contains("no REMOTE_READ; "), "{error}");
        let error = buffer.remote_mut(device).unwrap_err().to_string();
        // What lacks, and how to get it, in both ways; nothing else.
        assert!(error.contains("no REMOTE_WRITE; ") && error.contains(".access(Access::REMOTE_WRITE)"), "{error}");
        assert!(error.contains("Windows::expose") && !error.contains("LOCAL"), "{error}");
    }
    heap.detach(device).unwrap();
    assert_eq!(part.remote(device), Err(RemoteError::Key(KeyError::Detached)));
}

#[test]
fn a_buffer_across_two_registrations_is_not_told_with_the_key_of_one() {
    const LIMIT: usize = 4 << 20;
    let heap = Heap::builder().access(Access::REMOTE_WRITE).build().unwrap();
    let device = heap.attach(Ledger::with_max_len(LIMIT as u64)).unwrap();
    let mut long = heap.buffer(2 * LIMIT).unwrap();
    let error = long.remote_mut(device).unwrap_err();
    assert_eq!(error, RemoteError::Straddles { len: 2 * LIMIT });
    assert!(heap.buffer(LIMIT / 2).unwrap().remote_mut(device).is_ok());
}

#[cfg(feature = "serde")]
#[test]
fn by_serde_it_is_fields_to_people_and_twenty_bytes_to_machines() {
    let json = serde_json::to_string(&SLICE).unwrap();
    assert_eq!(json, r#"{"addr":72623859790382856,"len":1230066625199609624,"rkey":555885348}"#);
    assert_eq!(serde_json::from_str::<RemoteSlice>(&json).unwrap(), SLICE);
    let mut bytes = [0; 64];
    let written = postcard::to_slice(&SLICE, &mut bytes).unwrap();
    assert_eq!(*written, SLICE.to_bytes());
    assert_eq!(postcard::from_bytes::<RemoteSlice>(written).unwrap(), SLICE);
    postcard::from_bytes::<RemoteSlice>(&SLICE.to_bytes()[..19]).unwrap_err();
}
