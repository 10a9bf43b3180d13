//! A receive queue of a real verbs device, own or shared, that a pool keeps stocked. In the guest the device is soft-RoCE.
#![cfg(feature = "verbs")]

use bytes::Bytes;
use rdmalloc::registrar::verbs::Verbs;
use rdmalloc::{Device, Heap, ReceiveQueue, RecvError, RecvPool, RecvQueue, RestockError, SharedRecvQueue};
use rdmalloc_tests::rig::{Completion, Depth, Domain, Memory, Queue, SharedQueue, Status, domain_or_skip};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, mpsc};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);

/// Where messages are received, and memory of a peer with the messages: the n-th 4 KiB are filled with n.
struct Scene {
    domain: Domain,
    heap: Heap,
    device: Device,
    source: Memory,
}

impl Scene {
    fn new() -> Option<Scene> {
        let domain = domain_or_skip()?;
        let heap = Heap::builder().build().unwrap();
        let device = heap.attach(Verbs::new(domain.clone())).unwrap();
        let source = Memory::new(&domain, 256 << 12).unwrap();
        (0..256).for_each(|n| source.fill(n << 12, &[n as u8; 4096]));
        Some(Scene { domain, heap, device, source })
    }

    fn send(&self, peer: &Queue, byte: u8, len: u32) {
        // SAFETY: the source lives to the end of the test, and is not written.
        unsafe { peer.post_send(byte.into(), self.source.sge((byte as usize) << 12, len)) }.unwrap();
    }
}

/// What the owner's queue says: a message, if it was a receive of the pool.
fn message<Q: ReceiveQueue>(pool: &mut RecvPool<Q>, done: Completion) -> Result<Bytes, RecvError> {
    assert!(pool.owns(done.id), "{done:?}");
    // SAFETY: the completion was polled from the queue in which the pool's receives complete.
    unsafe { pool.complete(done.id, done.status.0, done.len) }
}

fn next<Q: ReceiveQueue>(pool: &mut RecvPool<Q>, queue: &Queue) -> Bytes {
    let message = message(pool, queue.wait(TIMEOUT).unwrap()).unwrap();
    pool.restock().unwrap();
    message
}

fn sent(peer: &Queue) {
    peer.wait(TIMEOUT).unwrap().ok().unwrap();
}

#[test]
fn verbs_messages_are_received_in_place_by_a_queue_pair() {
    let Some(scene) = Scene::new() else { return };
    let (own, peer) = Queue::pair(&scene.domain, Depth::default()).unwrap();
    let own = Arc::new(own);
    let builder = scene.heap.recv_pool(scene.device).size(4096).depth(8).limit(16);
    let mut pool = builder.build(RecvQueue::new(own.clone())).unwrap();
    for n in 0..200 {
        let len = if n % 3 == 0 { 16 } else { 4096 - u32::from(n) };
        scene.send(&peer, n, len);
        let message = next(&mut pool, &own);
        assert!(message[..] == vec![n; len as usize], "{n}");
        assert_eq!(scene.device.key(message.as_ptr()).is_ok(), len > 256, "where it was received, or a copy");
        sent(&peer);
    }
    let stats = pool.stats();
    assert_eq!((stats.received, stats.copied, stats.failed, stats.short), (200, 67, 0, 0));
    own.fail().unwrap();
    while pool.posted() > 0 {
        let flushed = message(&mut pool, own.wait(TIMEOUT).unwrap());
        assert_eq!(flushed, Err(RecvError::Failed { status: Status::WR_FLUSH_ERR.0, size: 4096 }));
        assert!(matches!(pool.restock(), Err(RestockError::QueueFailed { .. })));
    }
    drop(pool);
    scene.heap.detach(scene.device).unwrap();
    assert_eq!(scene.heap.trim().open_arenas, 0);
}

#[test]
fn verbs_a_pool_that_runs_dry_makes_the_peer_wait_and_recovers() {
    let Some(scene) = Scene::new() else { return };
    let (own, peer) = Queue::pair(&scene.domain, Depth::default()).unwrap();
    let (own, woken) = (Arc::new(own), Arc::new(AtomicUsize::new(0)));
    let wake = woken.clone();
    let builder = scene.heap.recv_pool(scene.device).size(4096).depth(4).limit(8);
    let builder = builder.waker(move || _ = wake.fetch_add(1, SeqCst));
    let mut pool = builder.build(RecvQueue::new(own.clone())).unwrap();
    (0..20).for_each(|n| scene.send(&peer, n, 4096));
    let mut kept: Vec<_> = (0..8).map(|_| next(&mut pool, &own)).collect();
    assert_eq!((pool.stats().posted, pool.stats().dry, pool.restock().unwrap().missing), (0, 1, 4));
    assert_eq!(own.poll().unwrap(), None, "twelve messages wait at the peer");
    assert!(kept.iter().zip(0..).all(|(message, n)| message[..] == [n; 4096]));
    let thread = std::thread::spawn(move || kept.drain(..6).count());
    assert_eq!((thread.join().unwrap(), woken.load(SeqCst)), (6, 1));
    pool.restock().unwrap();
    for n in 8..20 {
        assert!(next(&mut pool, &own)[..] == [n; 4096], "{n}");
    }
    (0..20).for_each(|_| sent(&peer));
    assert_eq!((pool.stats().received, pool.stats().failed), (20, 0));
}

#[test]
fn verbs_two_queue_pairs_take_from_one_shared_queue_and_one_fails() {
    let Some(scene) = Scene::new() else { return };
    let shared = Arc::new(SharedQueue::new(&scene.domain, 32).unwrap());
    let pair = || {
        let own = Queue::with_shared(&scene.domain, Depth::default(), shared.clone()).unwrap();
        let peer = Queue::new(&scene.domain, Depth::default()).unwrap();
        own.connect(peer.endpoint()).unwrap();
        peer.connect(own.endpoint()).unwrap();
        (own, peer)
    };
    let [first, second] = [pair(), pair()];
    let builder = scene.heap.recv_pool(scene.device).size(4096).depth(32);
    let mut pool = builder.build(SharedRecvQueue::new(shared.clone())).unwrap();
    let mut kept = Vec::new();
    for n in 0..100 {
        let (own, peer) = if n % 2 == 0 { &first } else { &second };
        scene.send(peer, n, 4096);
        let message = next(&mut pool, own);
        assert!(message[..] == [n; 4096]);
        kept.push(message);
        sent(peer);
        if kept.len() == 20 {
            kept.drain(..).rev().for_each(drop);
        }
    }
    // One queue pair fails: the other goes on.
    first.0.fail().unwrap();
    for n in 100..140 {
        scene.send(&second.1, n, 4096);
        assert!(next(&mut pool, &second.0)[..] == [n; 4096]);
        sent(&second.1);
    }
    let stats = pool.stats();
    assert_eq!((stats.received, stats.short), (140, 0));
    // A shared queue does not flush: what is posted is taken back when it is destroyed.
    let (queue, posted) = pool.close();
    assert_eq!(posted.len(), stats.posted);
    drop((queue, first, second));
    assert_eq!(Arc::strong_count(&shared), 1);
    drop(shared);
    // SAFETY: the shared queue and its queue pairs are destroyed.
    drop(unsafe { posted.reclaim() });
    scene.heap.detach(scene.device).unwrap();
    assert_eq!(scene.heap.trim().open_arenas, 0);
}

#[test]
fn verbs_other_threads_drop_messages_while_more_arrive() {
    let Some(scene) = Scene::new() else { return };
    let (own, peer) = Queue::pair(&scene.domain, Depth::default()).unwrap();
    let own = Arc::new(own);
    let (wake, woken) = mpsc::channel();
    let builder =
        scene.heap.recv_pool(scene.device).size(4096).depth(16).limit(32).waker(move || wake.send(()).unwrap());
    let mut pool = builder.build(RecvQueue::new(own.clone())).unwrap();
    let threads: Vec<_> = (0..3)
        .map(|_| {
            let (sender, receiver) = mpsc::channel::<(u8, Bytes)>();
            let check = |(n, message): (u8, Bytes)| assert!(message[..] == [n; 4096], "{n}");
            (sender, std::thread::spawn(move || receiver.iter().for_each(check)))
        })
        .collect();
    let mut ahead = 0;
    for n in 0..1000usize {
        while ahead < n + 8 {
            scene.send(&peer, ahead as u8, 4096);
            ahead += 1;
        }
        // While the pool is short, no completion need ever come.
        while pool.restock().unwrap().missing > 0 {
            woken.recv_timeout(TIMEOUT).unwrap_or_else(|_| panic!("not woken: {pool:?}"));
        }
        let message = message(&mut pool, own.wait(TIMEOUT).unwrap()).unwrap();
        threads[n % 3].0.send((n as u8, message)).unwrap();
        sent(&peer);
    }
    for (sender, thread) in threads {
        drop(sender);
        thread.join().unwrap();
    }
    println!("{:?}", pool.stats());
    assert_eq!(pool.stats().received, 1000);
}

#[test]
fn verbs_what_is_lent_outlives_pool_and_queue() {
    let Some(scene) = Scene::new() else { return };
    let (own, peer) = Queue::pair(&scene.domain, Depth::default()).unwrap();
    let own = Arc::new(own);
    let builder = scene.heap.recv_pool(scene.device).size(4096).depth(8);
    let mut pool = builder.build(RecvQueue::new(own.clone())).unwrap();
    let kept: Vec<_> = (0..8)
        .map(|n| {
            scene.send(&peer, n, 4096);
            next(&mut pool, &own)
        })
        .collect();
    let (queue, posted) = pool.close();
    assert_eq!(posted.len(), 8);
    drop((queue, own, peer));
    // SAFETY: the queue pair is destroyed.
    drop(unsafe { posted.reclaim() });
    // The heap's other users change nothing of them.
    let others: Vec<_> = (0..64).map(|_| scene.heap.buffer_zeroed(4096).unwrap()).collect();
    assert!(kept.iter().zip(0..).all(|(message, n)| message[..] == [n; 4096]));
    drop((others, kept));
    scene.heap.detach(scene.device).unwrap();
    assert_eq!(scene.heap.trim().open_arenas, 0);
}

#[test]
fn verbs_a_message_that_is_too_long_is_an_error_and_its_buffer_comes_back() {
    let Some(scene) = Scene::new() else { return };
    let (own, peer) = Queue::pair(&scene.domain, Depth::default()).unwrap();
    let own = Arc::new(own);
    let builder = scene.heap.recv_pool(scene.device).size(1024).depth(4);
    let mut pool = builder.build(RecvQueue::new(own.clone())).unwrap();
    scene.send(&peer, 1, 2048);
    let failed = message(&mut pool, own.wait(TIMEOUT).unwrap()).unwrap_err();
    assert!(failed.to_string().contains("longer than the pool's buffers, 1024 bytes"), "{failed}");
    while pool.posted() > 0 {
        assert!(message(&mut pool, own.wait(TIMEOUT).unwrap()).is_err());
    }
    assert_eq!((pool.stats().ready, pool.stats().lent, pool.stats().failed), (4, 0, 4));
}
