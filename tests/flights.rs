//! Flights without a device: who has the bytes when, and what is counted.

use bytes::{Bytes, BytesMut};
use rdmalloc::{
    Access, Buffer, DetachError, Device, Flight, Grounded, Heap, HoldError, IdError, KeyError, Rdmalloc, SgeError,
    StableBytes,
};
use rdmalloc_tests::Ledger;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

fn heap() -> (Heap, Ledger, Device) {
    let (heap, ledger) = (Heap::builder().build().unwrap(), Ledger::new());
    let device = heap.attach(ledger.clone()).unwrap();
    (heap, ledger, device)
}

fn filled(heap: &Heap, byte: u8, len: usize) -> Buffer {
    let mut buffer = heap.buffer(len).unwrap();
    buffer.try_extend_from_slice(&vec![byte; len]).unwrap();
    buffer
}

/// Ends the flight of an id; there is no device, so nothing works on it.
fn end<B: StableBytes>(id: u64) -> Result<B, IdError> {
    // SAFETY: there is no device.
    Flight::<B>::from_id(id).map(|flight| unsafe { flight.complete_send() })
}

/// What a device would do: writes `bytes` to the begin of the room of a piece.
fn receive<B: rdmalloc::StableBytesMut>(flight: &mut Flight<B>, piece: usize, bytes: &[u8]) {
    let sge = flight.part_mut(piece, ..bytes.len()).unwrap();
    let place = std::ptr::with_exposed_provenance_mut::<u8>(sge.addr() as usize);
    // SAFETY: the entry is so long, and borrowed.
    unsafe { place.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) }
}

fn exposed(buffer: &mut Buffer) {
    let _ = buffer.as_mut_ptr().expose_provenance();
}

#[test]
fn a_value_comes_back_from_its_id_once_and_only_as_what_it_is() {
    let (heap, ledger, device) = heap();
    let buffer = filled(&heap, 1, 5000);
    let place = buffer.as_ptr();
    let flight = device.fly(buffer).unwrap();
    let sge = flight.sge().unwrap();
    assert_eq!((sge.addr(), sge.length()), (place.addr() as u64, 5000));
    assert!(ledger.covers(sge.lkey(), place.addr()..place.addr() + 5000));
    assert_eq!(flight.piece(0), [1; 5000]);
    let id = flight.into_id();
    assert!(id != 0 && id >> 48 == 0);
    assert!(matches!(Flight::<Vec<u8>>::from_id(id), Err(IdError::OtherType { .. })));
    // The program's own tag does not matter.
    let buffer = end::<Buffer>(id | 0xbeef << 48).unwrap();
    assert!(buffer.as_ptr() == place && *buffer == [1; 5000]);
    assert_eq!(end::<Buffer>(id).unwrap_err(), IdError::Unknown { id });
    // The slot's next flight has another id.
    let next = device.fly(buffer).unwrap().into_id();
    assert!(next != id && end::<Buffer>(id).is_err());
    drop(end::<Buffer>(next).unwrap());
    for id in [0, 1, u64::MAX, next + 1, next ^ 1 << 30] {
        assert_eq!(end::<Buffer>(id).unwrap_err(), IdError::Unknown { id });
    }
    assert_eq!(heap.stats().devices[0].flights, device.flights());
    assert_eq!((device.flights().under_way, device.hold_count()), (0, 0));
}

#[test]
fn each_type_flies_and_comes_back_as_it_was() {
    let device = HEAP.attach(Ledger::new()).unwrap();
    fn fly<B: StableBytes + PartialEq + std::fmt::Debug + Clone>(device: Device, value: B) {
        let copy = value.clone();
        let places: Vec<_> = (0..value.pieces()).map(|index| value.piece(index).as_ptr()).collect();
        let flight = device.fly(value).unwrap();
        for (index, place) in places.iter().enumerate() {
            assert_eq!((flight.piece(index).as_ptr(), flight.piece(index)), (*place, copy.piece(index)));
            assert_eq!(flight.part(index, ..).unwrap().addr(), place.addr() as u64);
        }
        assert_eq!(flight.sges().map(|sge| sge.unwrap().length() as usize).sum::<usize>(), 3000 * places.len());
        assert_eq!(end::<B>(flight.into_id()).unwrap(), copy);
    }
    let text = "abc".repeat(1000);
    let vec = text.clone().into_bytes();
    fly(device, text.clone());
    fly(device, vec.clone());
    fly(device, vec.clone().into_boxed_slice());
    fly(device, text.clone().into_boxed_str());
    fly(device, Arc::<[u8]>::from(&vec[..]));
    fly(device, Arc::<str>::from(&text[..]));
    fly(device, Arc::new(vec.clone()));
    fly(device, Bytes::from(vec.clone()));
    fly(device, BytesMut::from(&vec[..]));
    fly(device, &*vec.clone().leak());
    fly(device, (text.clone(), Bytes::from(vec.clone())));
    fly(device, [vec.clone(), vec.clone(), vec.clone(), vec.clone()]);
    fly(device, vec![Bytes::from(vec.clone()); 5]);
    HEAP.detach(device).unwrap();
}

#[test]
fn what_devices_only_read_is_no_target_and_fails_no_queue() {
    let heap = Heap::builder().access(Access::LOCAL_READ).build().unwrap();
    let device = heap.attach(Ledger::new()).unwrap();
    let mut flight = device.fly([filled(&heap, 1, 10), heap.buffer(100).unwrap()]).unwrap();
    assert_eq!(flight.sge().unwrap().length(), 10);
    assert_eq!(flight.part_mut(1, ..50).unwrap_err(), SgeError::NotWritable);
    assert!(flight.part_mut(1, ..50).unwrap_err().to_string().contains("LOCAL_WRITE"));
    drop(end::<[Buffer; 2]>(flight.into_id()).unwrap());
    let mut flight = device.fly(heap.buffer(100).unwrap()).unwrap();
    assert_eq!(flight.sge_mut().unwrap_err(), SgeError::NotWritable);
    drop(end::<Buffer>(flight.into_id()).unwrap());
    let mut buffer = heap.buffer(100).unwrap();
    let mut list = device.sges_mut([buffer.spare_capacity_mut()]);
    assert_eq!(
        (list.next().map(|entry| entry.map(|_| ())), list.next().is_none()),
        (Some(Err(SgeError::NotWritable)), true)
    );
    // What brings local writing with it is written.
    for access in
        [Access::LOCAL_WRITE, Access::REMOTE_ATOMIC, Access::WINDOWS, Access::REMOTE_READ | Access::LOCAL_WRITE]
    {
        let heap = Heap::builder().access(access).build().unwrap();
        let device = heap.attach(Ledger::new()).unwrap();
        let mut flight = device.fly(heap.buffer(100).unwrap()).unwrap();
        assert!(flight.sge_mut().is_ok(), "{access:?}");
        drop(end::<Buffer>(flight.into_id()).unwrap());
    }
}

#[test]
fn what_does_not_fly_comes_back_with_the_reason() {
    let (heap, _, device) = heap();
    let error = device.fly(Bytes::from_static(b"static")).unwrap_err();
    assert_eq!(error.reason, Grounded::Key { piece: 0, pieces: 1, error: KeyError::Foreign });
    assert!(error.to_string().starts_with("the value is not within"), "{error}");
    assert_eq!(error.value, b"static"[..]);
    let other = Heap::builder().build().unwrap();
    let error = device.fly((filled(&heap, 1, 10), filled(&other, 2, 10))).unwrap_err();
    assert!(matches!(error.reason, Grounded::Key { piece: 1, error: KeyError::NotRegistered(_), .. }), "{error}");
    assert!(error.to_string().starts_with("piece 1 of 2 "), "{error}");
    // Whose memory it is decides where to attach the device.
    assert!(error.to_string().contains("a heap of the program's"), "{error}");
    let global = device.fly(vec![0u8; 100]).unwrap_err();
    assert!(global.to_string().contains("the global heap") && !global.to_string().contains("piece"), "{global}");
    assert_eq!(device.hold_count(), 0);
    heap.detach(device).unwrap();
    let error = device.fly(error.value.0).unwrap_err();
    assert_eq!((error.reason, &error.value[..]), (Grounded::Hold(HoldError::Detached), &[1; 10][..]));
}

#[test]
fn what_was_received_is_there_and_more_than_the_room_is_an_error_with_the_value() {
    let (heap, _, device) = heap();
    let mut buffer = heap.buffer(64).unwrap();
    exposed(&mut buffer);
    buffer.try_extend_from_slice(b"head").unwrap();
    let room = buffer.capacity() - 4;
    let mut flight = device.fly(buffer).unwrap();
    let sge = flight.sge_mut().unwrap();
    assert_eq!(sge.length() as usize, room);
    receive(&mut flight, 0, b" and body");
    // Not yet: what is being written is not shown.
    assert_eq!(flight.piece(0), b"head");
    let id = flight.into_id();
    // SAFETY: so much was written.
    let buffer = unsafe { Flight::<Buffer>::from_id(id).unwrap().complete(9) }.unwrap();
    assert_eq!(&buffer[..], b"head and body");

    let mut flight = device.fly(buffer).unwrap();
    let end = flight.sge_mut().unwrap().length() as usize;
    assert_eq!(flight.part_mut(0, end..=end).unwrap_err(), SgeError::OutOfRange { end: end + 1, len: end });
    assert_eq!(flight.part_mut(0, end..).unwrap_err(), SgeError::Empty);
    assert_eq!(flight.part(0, 14..).unwrap_err(), SgeError::OutOfRange { end: 14, len: 13 });
    assert_eq!(flight.part(0, 1..4).unwrap().length(), 3);
    // SAFETY: nothing works on it.
    let overrun = unsafe { flight.complete(room as u32 + 100) }.unwrap_err();
    assert_eq!((overrun.room, &overrun.value[..]), (room - 9, &b"head and body"[..]));
    assert_eq!(device.hold_count(), 0);
}

#[test]
fn what_was_received_fills_the_rooms_of_several_pieces_in_order() {
    let (heap, _, device) = heap();
    let mut buffers = vec![heap.buffer(64).unwrap(), heap.buffer(64).unwrap(), heap.buffer(64).unwrap()];
    buffers.iter_mut().for_each(exposed);
    let room = buffers[0].capacity();
    let mut flight = device.fly(buffers).unwrap();
    receive(&mut flight, 0, &vec![1; room]);
    receive(&mut flight, 1, &[2; 5]);
    // SAFETY: so much was written.
    let buffers = unsafe { flight.complete(room as u32 + 5) }.unwrap();
    assert_eq!(buffers.iter().map(|buffer| buffer.len()).collect::<Vec<_>>(), [room, 5, 0]);
    assert!(buffers[0].iter().all(|byte| *byte == 1) && *buffers[1] == [2; 5]);
}

#[test]
fn a_detach_is_refused_with_the_number_of_flights_and_waits_for_them() {
    let (heap, ledger, device) = heap();
    let ids = [(); 3].map(|()| device.fly(filled(&heap, 1, 100)).unwrap().into_id());
    let kept = device.fly(filled(&heap, 2, 100)).unwrap();
    assert!(matches!(heap.detach(device), Err(DetachError::InUse { holds: 4, .. })));
    let stats = heap.stats().devices[0];
    assert_eq!((stats.holds, stats.flights.under_way, stats.flights.leaked), (4, 4, 0));
    assert!(heap.stats().to_string().contains("4 flights"), "{}", heap.stats());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            ids.into_iter().for_each(|id| drop(end::<Buffer>(id).unwrap()));
            // SAFETY: there is no device.
            drop(unsafe { kept.reclaim() });
        });
        heap.detach_within(device, Duration::from_secs(60)).unwrap();
    });
    assert_eq!(ledger.live(), 0);
}

#[test]
fn a_dropped_flight_keeps_its_memory_and_the_device_until_it_is_reclaimed() {
    static DROPS: AtomicUsize = AtomicUsize::new(0);
    struct Counted(Buffer);
    impl Drop for Counted {
        fn drop(&mut self) {
            DROPS.fetch_add(1, Relaxed);
        }
    }
    // SAFETY: the buffer's promise.
    unsafe impl StableBytes for Counted {
        fn piece(&self, index: usize) -> &[u8] {
            self.0.piece(index)
        }
    }
    let (heap, ledger, device) = heap();
    let place = filled(&heap, 7, 1 << 20);
    let address = place.as_ptr().addr();
    drop(device.fly(Counted(place)).unwrap());
    let id = device.fly([Counted(filled(&heap, 8, 100)), Counted(filled(&heap, 9, 100))]).unwrap().into_id();
    let aboard = device.fly(Counted(filled(&heap, 10, 100))).unwrap();
    assert_eq!((device.flights().under_way, device.flights().leaked, DROPS.load(Relaxed)), (2, 1, 0));
    heap.trim();
    let again: Vec<_> = (0..8).map(|_| heap.buffer(1 << 20).unwrap()).collect();
    assert!(again.iter().all(|buffer| buffer.as_ptr().addr().abs_diff(address) >= 1 << 20), "its memory is used anew");
    let error = heap.detach(device).unwrap_err();
    assert!(matches!(error, DetachError::InUse { holds: 3, flights, .. } if flights == device.flights()), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("2 flight(s) under way, 1 leaked, 0 for") && text.contains("reclaim_flights"), "{text}");
    assert!(ledger.live() > 0);
    // SAFETY: there is no device.
    assert_eq!(unsafe { device.reclaim_flights() }, 2);
    assert_eq!(DROPS.load(Relaxed), 3);
    assert_eq!(Flight::<[Counted; 2]>::from_id(id).map(|_| ()), Err(IdError::Unknown { id }));
    assert_eq!((aboard.piece(0), device.hold_count()), (&[10; 100][..], 1));
    // SAFETY: as above.
    drop(unsafe { aboard.reclaim() });
    heap.detach(device).unwrap();
}

#[test]
fn a_lost_device_is_detached_and_its_flights_are_counted_until_they_are_reclaimed() {
    let (heap, _, device) = heap();
    let ids = [1, 2].map(|byte| device.fly(filled(&heap, byte, 100)).unwrap().into_id());
    let flight = device.fly(filled(&heap, 3, 100)).unwrap();
    device.mark_lost();
    assert_eq!(flight.sge().unwrap_err(), SgeError::Key(KeyError::Lost));
    let error = device.fly(filled(&heap, 4, 100)).unwrap_err();
    assert_eq!(error.reason, Grounded::Hold(HoldError::Lost));
    heap.detach(device).unwrap();
    assert_eq!((device.flights().under_way, device.hold_count()), (3, 3));
    let other = heap.attach(Ledger::new()).unwrap();
    assert_eq!((other.flights().under_way, other.hold_count()), (0, 0));
    assert_eq!(end::<Buffer>(ids[0]).unwrap()[..], [1; 100]);
    drop(flight);
    // SAFETY: there is no device.
    assert_eq!((device.flights().leaked, unsafe { device.reclaim_flights() }), (1, 2));
    assert_eq!(device.hold_count(), 0);
}

#[test]
fn one_flight_of_several_completions_lands_with_the_last() {
    let (heap, _, device) = heap();
    let flight = device.fly(filled(&heap, 5, 100)).unwrap();
    let flight = flight.into_id_for(0).unwrap_err().into_id_for(u16::MAX).unwrap_err();
    let id = flight.into_id_for(3).unwrap();
    for left in [3, 2] {
        // Who asks for the wrong thing has not counted what is to come.
        let several = [(); 2].map(|()| Flight::<Buffer>::from_id(id).map(|_| ()));
        assert_eq!(several, [Err(IdError::Several { left }); 2]);
        assert!(Flight::<Buffer>::landed(id).unwrap().is_none());
    }
    let flight = Flight::<Buffer>::landed(id).unwrap().unwrap();
    assert_eq!(Flight::<Buffer>::landed(id).map(|_| ()), Err(IdError::Unknown { id }));
    // SAFETY: there is no device.
    assert_eq!(unsafe { flight.complete_send() }[..], [5; 100]);
    // The last completion is one like any other.
    let id = device.fly(filled(&heap, 6, 100)).unwrap().into_id_for(2).unwrap();
    assert!(Flight::<Buffer>::landed(id).unwrap().is_none());
    assert_eq!(end::<Buffer>(id).unwrap()[..], [6; 100]);
}

#[test]
fn one_completion_ends_flights_of_many_types() {
    let (heap, _, device) = heap();
    let ids = [
        device.fly(filled(&heap, 1, 100)).unwrap().into_id(),
        device.fly(filled(&heap, 2, 100).freeze()).unwrap().into_id(),
        device.fly([filled(&heap, 3, 100), filled(&heap, 4, 100), filled(&heap, 5, 100)]).unwrap().into_id(),
    ];
    let twice = device.fly(filled(&heap, 6, 100)).unwrap().into_id_for(2).unwrap();
    // SAFETY: there is no device.
    unsafe {
        ids.iter().for_each(|id| rdmalloc::drop_flight(*id).unwrap());
        assert_eq!(rdmalloc::drop_flight(ids[1]), Err(IdError::Unknown { id: ids[1] }));
        assert_eq!(rdmalloc::drop_flight(twice), Err(IdError::MoreToCome { left: 1 }));
        assert_eq!(rdmalloc::drop_flight(twice), Ok(()));
    }
    assert_eq!((device.flights().under_way, device.hold_count()), (0, 0));
    assert_eq!(heap.trim().open_arenas, 0, "all was freed");
}

#[test]
fn flights_of_many_threads_are_each_one_s_own() {
    const EACH: usize = 20_000;
    let (heap, _, device) = heap();
    let (post, completions) = std::sync::mpsc::sync_channel::<(u64, u8)>(256);
    std::thread::scope(|scope| {
        for thread in 0..3u8 {
            let (heap, post) = (&heap, post.clone());
            scope.spawn(move || {
                for _ in 0..EACH {
                    let id = device.fly(filled(heap, thread, 64)).unwrap().into_id();
                    post.send((id, thread)).unwrap();
                }
            });
        }
        drop(post);
        for (id, thread) in completions {
            assert_eq!(end::<Buffer>(id).unwrap()[..], [thread; 64]);
        }
    });
    assert_eq!((device.flights().under_way, device.flights().leaked, device.hold_count()), (0, 0, 0));
}
