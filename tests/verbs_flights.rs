//! Flights over real queue pairs. In the guest, which has two soft-RoCE devices.
#![cfg(feature = "verbs")]

use bytes::{Buf, Bytes, BytesMut};
use rdmalloc::registrar::verbs::Verbs;
use rdmalloc::{
    Access, Buffer, DetachError, Device, Flight, Gathered, Gathering, Heap, IdError, Rdmalloc, Sge, StableBytes,
    StableBytesMut,
};
use rdmalloc_tests::rig::{Depth, Domain, Memory, Queue, Remote, Status, domain_or_skip};
use std::sync::Arc;
use std::time::Duration;

#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

const TIMEOUT: Duration = Duration::from_secs(60);

fn heap(domain: &Domain) -> (Heap, Device) {
    let heap = Heap::builder().access(Access::LOCAL_WRITE).build().unwrap();
    let device = heap.attach(Verbs::new(domain.clone())).unwrap();
    (heap, device)
}

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add((i >> 8) as u8) ^ seed).collect()
}

fn filled(heap: &Heap, bytes: &[u8]) -> Buffer {
    let mut buffer = heap.buffer(bytes.len()).unwrap();
    buffer.try_extend_from_slice(bytes).unwrap();
    buffer
}

/// Posts a receive into all the room of `value`; its id.
fn receive<B: StableBytesMut>(device: Device, queue: &Queue, value: B) -> u64 {
    let mut flight = device.fly(value).unwrap();
    let sge = flight.sge_mut().unwrap().to_ibv();
    let id = flight.into_id();
    // SAFETY: the flight has the memory, until the completion.
    unsafe { queue.post_recv(id, sge) }.unwrap();
    id
}

/// Posts a send of all pieces of `value`; its id.
fn send<B: StableBytes>(device: Device, queue: &Queue, value: B) -> u64 {
    let flight = device.fly(value).unwrap();
    let list: Vec<_> = flight.sges().map(|sge| sge.unwrap().to_ibv()).collect();
    let id = flight.into_id();
    // SAFETY: as above.
    unsafe { queue.post_list(id, &list, None, true) }.unwrap();
    id
}

fn sent<B: StableBytes>(queue: &Queue, id: u64) -> B {
    assert_eq!(queue.wait(TIMEOUT).unwrap().ok().unwrap().id, id);
    // SAFETY: its one work request has completed.
    unsafe { Flight::<B>::from_id(id).unwrap().complete_send() }
}

fn received<B: StableBytesMut>(queue: &Queue, id: u64) -> B {
    let completion = queue.wait(TIMEOUT).unwrap().ok().unwrap();
    assert_eq!(completion.id, id);
    // SAFETY: its one work request has completed, and its entry was all the room.
    unsafe { Flight::<B>::from_id(id).unwrap().complete(completion.len) }.unwrap()
}

#[test]
fn verbs_every_type_is_sent_from_and_received_into_where_it_lies() {
    let Some(domain) = domain_or_skip() else { return };
    let (heap, device) = heap(&domain);
    assert_eq!(HEAP.attach(Verbs::new(domain.clone())).unwrap(), device, "one protection domain is one device");
    let (left, right) = Queue::pair(&domain, Depth::default()).unwrap();

    fn one<B: StableBytes>(device: Device, left: &Queue, right: &Queue, value: B) {
        let bytes: Vec<u8> = (0..value.pieces()).flat_map(|index| value.piece(index).to_vec()).collect();
        let place = value.piece(0).as_ptr();
        // Into each kind of target in turn.
        let targets = (Vec::<u8>::with_capacity(20_000), BytesMut::with_capacity(20_000));
        let id = receive(device, right, targets.0);
        let out = send(device, left, value);
        assert_eq!(device.flights().under_way, 2);
        assert!(received::<Vec<u8>>(right, id) == bytes);
        let value = sent::<B>(left, out);
        let id = receive(device, right, targets.1);
        let out = send(device, left, value);
        assert!(received::<BytesMut>(right, id) == bytes);
        assert!(sent::<B>(left, out).piece(0).as_ptr() == place);
    }
    let text = "text ".repeat(1000);
    let vec = pattern(5000, 1);
    one(device, &left, &right, filled(&heap, &vec));
    one(device, &left, &right, filled(&heap, &vec).freeze());
    one(device, &left, &right, vec.clone());
    one(device, &left, &right, vec.clone().into_boxed_slice());
    one(device, &left, &right, text.clone());
    one(device, &left, &right, Arc::<[u8]>::from(&vec[..]));
    one(device, &left, &right, Arc::<str>::from(&text[..]));
    one(device, &left, &right, Bytes::from(vec.clone()).slice(100..3000));
    one(device, &left, &right, BytesMut::from(&vec[..]));
    one(device, &left, &right, (filled(&heap, &vec), Bytes::from(vec.clone()), text));

    let mut target = heap.buffer(10_000).unwrap();
    target.try_extend_from_slice(b"head").unwrap();
    let id = receive(device, &right, target);
    let out = send(device, &left, vec.clone());
    let target = received::<Buffer>(&right, id);
    assert!(&target[..4] == b"head" && target[4..] == vec[..]);
    drop(sent::<Vec<u8>>(&left, out));
    HEAP.detach(device).unwrap();
    heap.detach(device).unwrap();
}

#[test]
fn verbs_a_read_lands_behind_what_is_there() {
    let Some(domain) = domain_or_skip() else { return };
    let (heap, device) = heap(&domain);
    let (left, _right) = Queue::pair(&domain, Depth::default()).unwrap();
    let from = Memory::new(&domain, 4096).unwrap();
    from.fill(0, &pattern(4096, 9));
    let mut flight = device.fly(filled(&heap, &[1; 100])).unwrap();
    let room = flight.sge_mut().unwrap().length();
    let count = room.min(28);
    let sge = flight.part_mut(0, ..count as usize).unwrap().to_ibv();
    let id = flight.into_id();
    // SAFETY: the flight has the target, and `from` is not touched until the completion.
    unsafe { left.post_read(id, sge, from.remote(5)) }.unwrap();
    left.wait(TIMEOUT).unwrap().ok().unwrap();
    // SAFETY: the read has completed, and wrote the begin of the room.
    let buffer = unsafe { Flight::<Buffer>::from_id(id).unwrap().complete(count) }.unwrap();
    assert!(buffer[..100] == [1; 100] && buffer[100..] == pattern(4096, 9)[5..5 + count as usize]);
}

#[test]
fn verbs_a_detach_waits_for_flights_and_a_dropped_one_keeps_the_device_until_it_is_reclaimed() {
    let Some(domain) = domain_or_skip() else { return };
    let (heap, device) = heap(&domain);
    let (left, right) = Queue::pair(&domain, Depth::default()).unwrap();
    // Nothing is sent to them: they stay posted.
    let ids = [(); 3].map(|()| receive(device, &right, heap.buffer(1000).unwrap()));
    let refused = heap.detach(device).unwrap_err();
    assert!(matches!(refused, DetachError::InUse { holds: 3, .. }), "{refused}");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for id in ids {
                let source = Memory::new(&domain, 100).unwrap();
                source.fill(0, &[7; 100]);
                // SAFETY: the source lives until the completion.
                unsafe { left.post_send(1, source.sge(0, 100)) }.unwrap();
                left.wait(TIMEOUT).unwrap().ok().unwrap();
                assert_eq!(received::<Buffer>(&right, id)[..], [7; 100]);
            }
        });
        heap.detach_within(device, TIMEOUT).unwrap();
    });

    // What is dropped is not freed: the device writes to it later.
    let device = heap.attach(Verbs::new(domain.clone())).unwrap();
    let mut flight = device.fly(heap.buffer(4096).unwrap()).unwrap();
    let target = flight.sge_mut().unwrap().to_ibv();
    // SAFETY: the flight has the target, for ever.
    unsafe { right.post_recv(9, target) }.unwrap();
    drop(flight);
    assert_eq!((device.flights().leaked, heap.trim().closed_arenas), (1, 0));
    let others: Vec<_> = (0..64).map(|_| filled(&heap, &[3; 4096])).collect();
    let out = send(device, &left, filled(&heap, &pattern(4096, 4)));
    right.wait(TIMEOUT).unwrap().ok().unwrap();
    drop(sent::<Buffer>(&left, out));
    assert!(others.iter().all(|other| **other == [3; 4096]), "the device wrote into somebody's buffer");
    // SAFETY: mapped, since the flight keeps it; the device is done, and nobody else has it.
    let written: &[u8] =
        unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(target.addr as usize), 4096) };
    assert!(written == pattern(4096, 4));
    let posted = receive(device, &right, heap.buffer(1000).unwrap());
    assert!(matches!(heap.detach(device), Err(DetachError::InUse { holds: 2, .. })));
    drop((left, right));
    // SAFETY: the queue pairs are destroyed.
    assert_eq!(unsafe { device.reclaim_flights() }, 2);
    assert_eq!(Flight::<Buffer>::from_id(posted).map(|_| ()), Err(IdError::Unknown { id: posted }));
    drop(others);
    heap.detach(device).unwrap();
}

#[test]
fn verbs_flushed_flights_come_back_one_by_one() {
    let Some(domain) = domain_or_skip() else { return };
    let (heap, device) = heap(&domain);
    let (left, right) = Queue::pair(&domain, Depth::default()).unwrap();
    let ids = [1u8, 2].map(|byte| receive(device, &right, filled(&heap, &[byte; 10])));
    // A write with a key that is none: the peer's queue fails, and flushes its receives.
    let mut gone = Memory::new(&domain, 64).unwrap();
    let remote = gone.remote(0);
    gone.deregister();
    let flight = device.fly(filled(&heap, &[5; 64])).unwrap();
    let list = [flight.sge().unwrap().to_ibv()];
    let failing = flight.into_id();
    // SAFETY: the flight has the source.
    unsafe { left.post_list(failing, &list, Some(remote), true) }.unwrap();
    assert_ne!(left.wait(TIMEOUT).unwrap().status, Status::SUCCESS);
    // SAFETY: it has completed, without success.
    assert_eq!(unsafe { Flight::<Buffer>::from_id(failing).unwrap().reclaim() }[..], [5; 64]);
    for (id, byte) in ids.into_iter().zip([1, 2]) {
        let flushed = right.wait(TIMEOUT).unwrap();
        assert_eq!((flushed.id, flushed.status), (id, Status::WR_FLUSH_ERR));
        // SAFETY: as above.
        assert_eq!(unsafe { Flight::<Buffer>::from_id(id).unwrap().reclaim() }[..], [byte; 10]);
    }
    heap.detach(device).unwrap();
}

#[test]
fn verbs_one_signalled_completion_retires_many() {
    const COUNT: usize = 12;
    let Some(domain) = domain_or_skip() else { return };
    let (heap, device) = heap(&domain);
    let (left, right) = Queue::pair(&domain, Depth::default()).unwrap();
    let ids = [(); COUNT].map(|()| receive(device, &right, heap.buffer(2000).unwrap()));
    let buffers: Vec<Buffer> = (0..COUNT).map(|i| filled(&heap, &pattern(2000, i as u8))).collect();
    // All are one flight, and so one hold; only the last request is signalled, and has its id.
    let flight = device.fly(buffers).unwrap();
    let list: Vec<_> = (0..COUNT).map(|piece| flight.part(piece, ..).unwrap().to_ibv()).collect();
    let id = flight.into_id();
    assert_eq!((device.hold_count(), device.flights().under_way), (COUNT + 1, COUNT + 1));
    for (at, sge) in list.iter().enumerate() {
        let last = at + 1 == COUNT;
        // SAFETY: the flight has the memory until the completion of the last, which is after the others'.
        unsafe { left.post_list(if last { id } else { 0 }, std::slice::from_ref(sge), None, last) }.unwrap();
    }
    let buffers: Vec<Buffer> = sent(&left, id);
    assert!(left.poll().unwrap().is_none(), "one completion for all");
    for (i, (id, buffer)) in ids.into_iter().zip(buffers).enumerate() {
        assert!(received::<Buffer>(&right, id) == *buffer && *buffer == pattern(2000, i as u8));
    }
    heap.detach(device).unwrap();
}

#[test]
fn verbs_one_signalled_completion_ends_flights_of_many_types() {
    let Some(domain) = domain_or_skip() else { return };
    let (heap, device) = heap(&domain);
    let (left, _right) = Queue::pair(&domain, Depth::default()).unwrap();
    let target = Memory::new(&domain, 300).unwrap();
    fn post<B: StableBytes>(device: Device, queue: &Queue, value: B, target: Remote, signalled: bool) -> u64 {
        let flight = device.fly(value).unwrap();
        let list: Vec<_> = flight.sges().map(|sge| sge.unwrap().to_ibv()).collect();
        let id = flight.into_id();
        // SAFETY: the flight has the source until the completion of the last request.
        unsafe { queue.post_list(id, &list, Some(target), signalled) }.unwrap();
        id
    }
    let ids = [
        post(device, &left, filled(&heap, &[1; 100]), target.remote(0), false),
        post(device, &left, filled(&heap, &[2; 100]).freeze(), target.remote(100), false),
        post(device, &left, [filled(&heap, &[3; 60]), filled(&heap, &[4; 40])], target.remote(200), true),
    ];
    assert_eq!(left.wait(TIMEOUT).unwrap().ok().unwrap().id, ids[2]);
    for id in ids {
        // SAFETY: the last request has completed, and so have those before it on the same queue.
        unsafe { rdmalloc::drop_flight(id) }.unwrap();
    }
    let expected = [&[1; 100][..], &[2; 100], &[3; 60], &[4; 40]].concat();
    assert!(target.to_vec(0, 300) == expected);
    assert_eq!((device.flights().under_way, heap.trim().open_arenas), (0, 0));
    heap.detach(device).unwrap();
}

#[test]
fn verbs_three_replicas_get_one_buffer_by_one_flight_or_by_three() {
    let Some(domain) = domain_or_skip() else { return };
    let (heap, device) = heap(&domain);
    let replicas = [(); 3].map(|()| Queue::pair(&domain, Depth::default()).unwrap());
    let targets = [(); 3].map(|()| Memory::new(&domain, 70_000).unwrap());
    let data = pattern(70_000, 3);
    let shared = filled(&heap, &data).freeze();

    // One flight whose id stands for three completions.
    let flight = device.fly(shared.clone()).unwrap();
    let sge = flight.sge().unwrap().to_ibv();
    let id = flight.into_id_for(3).unwrap();
    for ((queue, _), target) in replicas.iter().zip(&targets) {
        // SAFETY: the flight has the source until the last completion; the targets are looked at after theirs.
        unsafe { queue.post_write(id, sge, target.remote(0)) }.unwrap();
    }
    let mut landed = None;
    for (queue, _) in &replicas {
        assert!(landed.is_none());
        let completion = queue.wait(TIMEOUT).unwrap().ok().unwrap();
        landed = Flight::<rdmalloc::SharedBuffer>::landed(completion.id).unwrap();
    }
    // SAFETY: all three have completed.
    drop(unsafe { landed.unwrap().complete_send() });
    assert!(targets.iter().all(|target| target.to_vec(0, data.len()) == data));

    // Three flights of three owners.
    targets.iter().for_each(|target| target.fill(0, &[0; 1000]));
    let ids = [(); 3].map(|()| device.fly(shared.clone()).unwrap()).map(|flight| {
        let list = [flight.sge().unwrap().to_ibv()];
        (flight.into_id(), list)
    });
    for (((queue, _), target), (id, list)) in replicas.iter().zip(&targets).zip(&ids) {
        // SAFETY: as above.
        unsafe { queue.post_list(*id, list, Some(target.remote(0)), true) }.unwrap();
    }
    let shared = shared.try_into_buffer().unwrap_err();
    for ((queue, _), (id, _)) in replicas.iter().zip(ids) {
        drop(sent::<rdmalloc::SharedBuffer>(queue, id));
    }
    assert!(targets.iter().all(|target| target.to_vec(0, data.len()) == data));
    assert!(*shared.try_into_buffer().unwrap() == *data);
    heap.detach(device).unwrap();
}

#[test]
fn verbs_a_gathered_message_arrives_as_its_pieces() {
    let Some(domain) = domain_or_skip() else { return };
    let (heap, device) = heap(&domain);
    let (left, right) = Queue::pair(&domain, Depth::default()).unwrap();
    let body = filled(&heap, &pattern(30_000, 5)).freeze();
    let small = filled(&heap, &pattern(40, 6)).freeze();
    static FOREIGN: &[u8] = &[8; 3000];
    let stack = [9u8; 100];
    let pieces: [&[u8]; 7] = [&stack, &body[..1000], &small, FOREIGN, &body[1000..9000], b"static", &body[20_000..]];
    let message = pieces.concat();
    for max_sge in [1, 2, 3, 4, Queue::MAX_SEND_SGE] {
        for threshold in [0, Gathering::THRESHOLD, usize::MAX] {
            let gathering = Gathering::new(max_sge).threshold(threshold);
            // Borrowed: kept here until the completion.
            let id = receive(device, &right, heap.buffer(message.len()).unwrap());
            let mut header = heap.buffer(message.len()).unwrap();
            let gather = gathering.gather(device, header.spare_capacity_mut(), pieces).unwrap();
            let list: Vec<_> = gather.entries().iter().map(Sge::to_ibv).collect();
            assert!(list.len() <= max_sge);
            // SAFETY: pieces and header are borrowed until after the completion.
            unsafe { left.post_list(1, &list, None, true) }.unwrap();
            left.wait(TIMEOUT).unwrap().ok().unwrap();
            let arrived = received::<Buffer>(&right, id);
            assert!(*arrived == message, "{max_sge} entries, threshold {threshold}, {gather:?}");

            // Owned: flies.
            let id = receive(device, &right, heap.buffer(message.len() + 4).unwrap());
            let chain = (&stack[..])
                .chain(Bytes::from(body.clone()).slice(..1000))
                .chain(Bytes::from(small.clone()))
                .chain(FOREIGN)
                .chain(body.slice(1000..9000))
                .chain(Bytes::from_static(b"static"))
                .chain(body.slice(20_000..));
            let mut header = heap.buffer(message.len() + 4).unwrap();
            header.try_extend_from_slice(b"head").unwrap();
            let owned = gathering.own(device, header, chain).unwrap();
            let out = send(device, &left, owned);
            let arrived = received::<Buffer>(&right, id);
            assert!(&arrived[..4] == b"head" && arrived[4..] == message[..]);
            let (header, kept) = sent::<Gathered>(&left, out).into_parts();
            assert_eq!(header.len() + kept.iter().map(Bytes::len).sum::<usize>(), arrived.len());
        }
    }
    heap.detach(device).unwrap();
}

/// For a message of eight pieces: prints what it takes to have the device gather them, and to copy them into one entry. The
/// device is made of software, so this is about the order of things only.
#[test]
fn verbs_what_eight_entries_cost_beside_a_copy() {
    const PIECES: usize = 8;
    const MESSAGES: usize = 16;
    let Some(domain) = domain_or_skip() else { return };
    let (heap, device) = heap(&domain);
    let (left, _right) = Queue::pair(&domain, Depth::default()).unwrap();
    let target = Memory::new(&domain, PIECES * 16384).unwrap();
    let memory = filled(&heap, &pattern(1 << 20, 7));
    for len in [64, 256, 1024, 4096, 16384] {
        let pieces: Vec<&[u8]> = (0..PIECES).map(|piece| &memory[piece * 40_000..][..len]).collect();
        let [in_place, copied] = [0, usize::MAX].map(|threshold| {
            let gathering = Gathering::new(PIECES).threshold(threshold);
            let mut headers: Vec<Buffer> = (0..MESSAGES).map(|_| heap.buffer(PIECES * len).unwrap()).collect();
            let mut rounds: Vec<Duration> = (0..9)
                .map(|_| {
                    let begin = std::time::Instant::now();
                    for (at, header) in headers.iter_mut().enumerate() {
                        let room = header.spare_capacity_mut();
                        let gather = gathering.gather(device, room, pieces.iter().copied()).unwrap();
                        let list: Vec<_> = gather.entries().iter().map(Sge::to_ibv).collect();
                        let last = at + 1 == MESSAGES;
                        // SAFETY: pieces and headers live, untouched, until the completion of the last.
                        unsafe { left.post_list(1, &list, Some(target.remote(0)), last) }.unwrap();
                    }
                    left.wait(TIMEOUT).unwrap().ok().unwrap();
                    begin.elapsed() / MESSAGES as u32
                })
                .collect();
            assert!(target.to_vec(0, PIECES * len) == pieces.concat());
            target.fill(0, &vec![0; PIECES * len]);
            rounds.sort();
            rounds[rounds.len() / 2]
        });
        println!("8 pieces of {len} bytes: {in_place:.1?} a message in place, {copied:.1?} copied");
    }
    heap.detach(device).unwrap();
}
