//! A pool that keeps a receive queue stocked, over a queue without a device: what is posted, lent, dropped, short, failed.

use bytes::Bytes;
use rdmalloc::{
    Budget, Device, Heap, PostFailed, Receive, ReceiveQueue, RecvError, RecvPool, RecvPoolBuilder, RecvPoolError,
    RestockError, Stock,
};
use rdmalloc_tests::Ledger;
use std::collections::{HashSet, VecDeque};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Instant;

/// A receive queue with room for some, and the device behind it.
#[derive(Clone)]
struct Fake(Arc<Mutex<Inner>>);

#[derive(Default)]
struct Inner {
    posted: VecDeque<Receive>,
    room: usize,
    calls: usize,
}

impl Fake {
    fn with_room(room: usize) -> Fake {
        Fake(Arc::new(Mutex::new(Inner { room, ..Inner::default() })))
    }

    /// The device receives a message of `len` bytes, which begins with `byte`: the completion's id.
    fn deliver(&self, byte: u8, len: usize) -> Option<u64> {
        let receive = self.0.lock().unwrap().posted.pop_front()?;
        let start = std::ptr::with_exposed_provenance_mut::<u8>(receive.addr as usize);
        // SAFETY: what was posted is the device's until the completion.
        unsafe { start.write_bytes(byte, len.min(receive.len as usize)) };
        Some(receive.id)
    }

    fn posted(&self) -> usize {
        self.0.lock().unwrap().posted.len()
    }
}

// SAFETY: what does not fit is not kept.
unsafe impl ReceiveQueue for Fake {
    unsafe fn post(&mut self, receives: &[Receive]) -> Result<(), PostFailed> {
        let mut inner = self.0.lock().unwrap();
        inner.calls += 1;
        let posted = receives.len().min(inner.room - inner.posted.len());
        inner.posted.extend(&receives[..posted]);
        if posted == receives.len() {
            return Ok(());
        }
        Err(PostFailed { posted, source: io::Error::from_raw_os_error(libc::ENOMEM) })
    }
}

struct Shared(Fake);

// SAFETY: as above.
unsafe impl ReceiveQueue for Shared {
    unsafe fn post(&mut self, receives: &[Receive]) -> Result<(), PostFailed> {
        // SAFETY: the caller's promise.
        unsafe { self.0.post(receives) }
    }

    fn is_shared(&self) -> bool {
        true
    }
}

fn heap() -> (Heap, Device) {
    let heap = Heap::builder().build().unwrap();
    let device = heap.attach(Ledger::new()).unwrap();
    (heap, device)
}

/// Buffers of 4096 bytes, 4 posted, more at 2, at most 8.
fn four(heap: &Heap, device: Device) -> RecvPoolBuilder {
    heap.recv_pool(device).size(4096).depth(4).low(2).limit(8)
}

fn receive<Q: ReceiveQueue>(pool: &mut RecvPool<Q>, fake: &Fake, byte: u8, len: usize) -> Bytes {
    let id = fake.deliver(byte, len).expect("a receive is posted");
    assert!(pool.owns(id) && id >> 63 == 1);
    // SAFETY: the device has just done so.
    unsafe { pool.complete(id, 0, len as u32) }.unwrap()
}

fn fail<Q: ReceiveQueue>(pool: &mut RecvPool<Q>, fake: &Fake, status: u32) {
    let id = fake.0.lock().unwrap().posted.pop_front().unwrap().id;
    // SAFETY: the device is done with it.
    assert_eq!(unsafe { pool.complete(id, status, 0) }, Err(RecvError::Failed { status, size: 4096 }));
}

#[test]
fn a_message_is_where_it_was_received_and_its_buffer_is_posted_again_after_it_is_dropped() {
    let ((heap, device), fake) = (heap(), Fake::with_room(4));
    let mut pool = four(&heap, device).build(fake.clone()).unwrap();
    assert_eq!((fake.posted(), pool.posted()), (4, 4));
    let at = fake.0.lock().unwrap().posted[0].addr;
    let message = receive(&mut pool, &fake, 7, 3000);
    assert_eq!((message.as_ptr() as u64, &message[..]), (at, &[7; 3000][..]));
    let slice = message.slice(10..20);
    drop(message);
    pool.restock().unwrap();
    assert_eq!((pool.stats().lent, pool.posted()), (1, 3), "a slice lives, and the low mark is not reached");
    drop(slice);
    drop(receive(&mut pool, &fake, 8, 3000));
    assert_eq!(pool.restock().unwrap().added, 2);
    assert_eq!((pool.stats().lent, pool.stats().ready, pool.posted()), (0, 0, 4));
    let posted: HashSet<_> = fake.0.lock().unwrap().posted.iter().map(|receive| receive.addr).collect();
    assert!(posted.contains(&at) && posted.len() == 4);
    assert_eq!((pool.stats().received, pool.stats().received_bytes, pool.stats().copied), (2, 6000, 0));
}

#[test]
fn a_short_message_that_is_kept_keeps_no_buffer() {
    let ((heap, device), fake) = (heap(), Fake::with_room(4));
    let mut pool = four(&heap, device).copy_up_to(16).build(fake.clone()).unwrap();
    let kept: Vec<_> = (0..100)
        .map(|n| {
            let message = receive(&mut pool, &fake, n, 16);
            pool.restock().unwrap();
            message
        })
        .collect();
    assert_eq!((pool.stats().copied, pool.stats().lent, pool.stats().short), (100, 0, 0));
    assert!(kept.iter().zip(0..).all(|(message, n)| message[..] == [n; 16]));
    let longer = receive(&mut pool, &fake, 1, 17);
    assert_eq!((pool.stats().lent, longer.len()), (1, 17));
}

#[test]
fn a_pool_that_runs_dry_says_so_takes_no_more_than_its_limit_and_recovers() {
    let ((heap, device), fake) = (heap(), Fake::with_room(4));
    let woken = Arc::new(AtomicUsize::new(0));
    let wake = woken.clone();
    let builder = four(&heap, device).waker(move || _ = wake.fetch_add(1, SeqCst));
    let mut pool = builder.build(fake.clone()).unwrap();
    let mut kept = Vec::new();
    while fake.posted() > 0 {
        kept.push(receive(&mut pool, &fake, kept.len() as u8, 4096));
        pool.restock().unwrap();
    }
    assert_eq!((kept.len(), pool.stats().lent), (8, 8), "the limit");
    assert_eq!(pool.restock().unwrap().missing, 4);
    let stats = pool.stats();
    assert_eq!((stats.short, stats.dry, stats.posted), (1, 1, 0));
    assert_eq!(woken.load(SeqCst), 0);
    assert!(kept.iter().zip(0..).all(|(message, n)| message[..] == [n; 4096]));
    kept.pop();
    kept.pop();
    assert_eq!(woken.load(SeqCst), 1, "the first that comes back wakes");
    let stock = pool.restock().unwrap();
    assert_eq!((stock.posted, stock.added, stock.missing), (2, 2, 2), "short, but not dry");
    kept.clear();
    assert_eq!(woken.load(SeqCst), 2);
    let Stock { posted, missing, .. } = pool.restock().unwrap();
    assert_eq!((posted, missing), (4, 0));
    assert_eq!((pool.stats().short, pool.stats().dry, pool.stats().ready), (1, 1, 4));
    // It runs dry again: another time.
    let _kept: Vec<_> = (0..8)
        .map(|_| {
            let message = receive(&mut pool, &fake, 1, 4096);
            pool.restock().unwrap();
            message
        })
        .collect();
    assert_eq!((pool.stats().short, pool.stats().dry), (2, 2));
}

#[test]
fn what_other_threads_drop_comes_back_once_each() {
    let ((heap, device), fake) = (heap(), Fake::with_room(64));
    let mut pool = heap.recv_pool(device).size(1024).depth(64).limit(256).copy_up_to(0).build(fake.clone()).unwrap();
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let (sender, receiver) = mpsc::channel::<(u8, Bytes)>();
            let thread = std::thread::spawn(move || {
                receiver.iter().for_each(|(byte, message)| assert!(message[..] == [byte; 1024]));
            });
            (sender, thread)
        })
        .collect();
    for n in 0..20_000usize {
        while fake.posted() == 0 {
            pool.restock().unwrap();
            std::thread::yield_now();
        }
        let message = receive(&mut pool, &fake, n as u8, 1024);
        threads[n % 4].0.send((n as u8, message)).unwrap();
        pool.restock().unwrap();
    }
    for (sender, thread) in threads {
        drop(sender);
        thread.join().unwrap();
    }
    pool.restock().unwrap();
    let stats = pool.stats();
    assert_eq!(stats.received, 20_000);
    // With the low mark not reached, some may not have been taken back yet.
    while pool.stats().lent > 0 {
        drop(receive(&mut pool, &fake, 0, 1024));
        pool.restock().unwrap();
    }
    let posted: HashSet<_> = fake.0.lock().unwrap().posted.iter().map(|receive| receive.addr).collect();
    assert_eq!(posted.len(), fake.posted(), "a buffer is posted twice");
}

#[test]
fn what_is_lent_outlives_the_pool_and_then_goes_to_the_heap() {
    let ((heap, device), fake) = (heap(), Fake::with_room(4));
    let mut pool = four(&heap, device).build(fake.clone()).unwrap();
    let (early, late) = (receive(&mut pool, &fake, 1, 4096), receive(&mut pool, &fake, 2, 4096));
    drop(early); // in the list when the pool ends
    while fake.posted() > 0 {
        fail(&mut pool, &fake, 5);
    }
    drop(pool);
    assert_eq!(device.hold_count(), 0);
    assert_eq!(heap.trim().open_arenas, 1);
    let others: Vec<_> = (0..64).map(|_| heap.buffer_zeroed(4096).unwrap()).collect();
    assert!(late[..] == [2; 4096], "its memory is nobody else's");
    drop((late, others));
    assert_eq!(heap.trim().open_arenas, 0);
    heap.detach(device).unwrap();
}

#[test]
fn what_is_posted_when_the_pool_ends_is_kept_until_it_is_reclaimed() {
    let ((heap, device), fake) = (heap(), Fake::with_room(4));
    drop(four(&heap, device).build(fake.clone()).unwrap());
    assert_eq!((device.hold_count(), heap.trim().open_arenas), (1, 1));
    let mut inner = fake.0.lock().unwrap();
    let kept: Vec<_> = inner.posted.drain(..).map(|receive| receive.addr).collect();
    drop(inner);
    let others: Vec<_> = (0..64).map(|_| heap.buffer(4096).unwrap()).collect();
    assert!(others.iter().all(|buffer| !kept.contains(&(buffer.as_ptr() as u64))));
    drop(others);

    let (queue, posted) = four(&heap, device).build(fake).unwrap().close();
    assert_eq!((posted.len(), device.hold_count()), (4, 2));
    drop(queue);
    // SAFETY: the queue is gone, and its device never was.
    assert_eq!(unsafe { posted.reclaim() }.len(), 4);
    assert_eq!(device.hold_count(), 1);
}

#[test]
fn a_queue_that_is_too_short_loses_no_buffer() {
    let ((heap, device), fake) = (heap(), Fake::with_room(3));
    let error = four(&heap, device).build(fake.clone()).unwrap_err();
    assert!(error.to_string().contains("shorter than the pool's depth"), "{error}");
    let RecvPoolError::Stock { posted, .. } = error else { panic!() };
    assert_eq!((posted.len(), device.hold_count()), (3, 1));
    fake.0.lock().unwrap().posted.clear();
    // SAFETY: nothing is posted any more.
    assert_eq!((unsafe { posted.reclaim() }.len(), device.hold_count()), (3, 0));

    let fake = Fake::with_room(100);
    let mut pool = heap.recv_pool(device).size(64).depth(100).low(99).copy_up_to(0).build(fake.clone()).unwrap();
    let kept: Vec<_> = (0..50).map(|n| receive(&mut pool, &fake, n, 64)).collect();
    fake.0.lock().unwrap().room = 90;
    let RestockError::Post(failed) = pool.restock().unwrap_err() else { panic!() };
    assert_eq!((failed.posted, pool.posted(), pool.stats().ready), (40, 90, 10));
    fake.0.lock().unwrap().room = 100;
    assert_eq!(pool.restock().unwrap().added, 10);
    assert_eq!((pool.posted(), pool.stats().ready, kept.len()), (100, 0, 50));
}

#[test]
fn after_a_failure_of_its_queue_pair_nothing_is_posted_until_it_is_resumed() {
    let ((heap, device), fake) = (heap(), Fake::with_room(4));
    let mut pool = four(&heap, device).build(fake.clone()).unwrap();
    (0..4).for_each(|_| fail(&mut pool, &fake, 5));
    let error = pool.restock().unwrap_err();
    assert!(
        matches!(error, RestockError::QueueFailed { posted: 0 }) && error.to_string().contains("resume()"),
        "{error}"
    );
    assert_eq!((pool.posted(), pool.stats().ready, pool.stats().failed), (0, 4, 4));
    pool.resume();
    assert_eq!(pool.restock().unwrap().added, 4);
    assert_eq!(pool.stats().short, 0);
    (0..4).for_each(|_| fail(&mut pool, &fake, 5));
    drop(pool);
    assert_eq!((device.hold_count(), heap.trim().open_arenas), (0, 0));

    // A shared queue goes on for its other queue pairs.
    let fake = Fake::with_room(4);
    let mut pool = four(&heap, device).build(Shared(fake.clone())).unwrap();
    (0..2).for_each(|_| fail(&mut pool, &fake, 5));
    assert_eq!(pool.restock().unwrap().added, 2);
}

#[test]
fn a_failed_receive_names_its_status_and_how_long_a_message_may_be() {
    let text = |status| RecvError::Failed { status, size: 4096 }.to_string();
    for (status, name) in [(1, "IBV_WC_LOC_LEN_ERR"), (2, "IBV_WC_LOC_QP_OP_ERR")] {
        let text = text(status);
        assert!(text.contains(name) && text.contains("longer than the pool's buffers, 4096 bytes"), "{text}");
    }
    assert!(text(5).contains("IBV_WC_WR_FLUSH_ERR") && !text(5).contains("4096"));
    assert!(text(99).contains("99"));
}

#[test]
fn an_id_that_is_not_posted_gives_no_message() {
    let ((heap, device), fake) = (heap(), Fake::with_room(4));
    let mut pool = four(&heap, device).build(fake.clone()).unwrap();
    let other = four(&heap, device).build(Fake::with_room(4)).unwrap();
    assert!(other.ids().start >= pool.ids().end || pool.ids().start >= other.ids().end);
    let id = fake.deliver(1, 4096).unwrap();
    // SAFETY: the device has just done so; the others are refused.
    unsafe {
        pool.complete(id, 0, 4096).unwrap();
        for wrong in [id, 0, 1 << 48, other.ids().start, pool.ids().end, pool.ids().end - 1, u64::MAX] {
            assert_eq!(pool.complete(wrong, 0, 4096), Err(RecvError::NotPosted { id: wrong }), "{wrong:#x}");
        }
    }
    assert_eq!(pool.stats().received, 1);
}

#[test]
fn a_length_that_a_device_makes_up_reads_nothing_beyond_the_buffer() {
    let ((heap, device), fake) = (heap(), Fake::with_room(4));
    let mut pool = four(&heap, device).build(fake.clone()).unwrap();
    let id = fake.deliver(1, 4096).unwrap();
    // SAFETY: the message is the whole buffer; the length is a lie.
    assert_eq!(unsafe { pool.complete(id, 0, u32::MAX) }.unwrap().len(), 4096);
}

#[test]
fn a_heap_that_gives_no_more_is_an_error_and_the_pool_goes_on() {
    let (heap, fake) =
        (Heap::builder().budget(Budget { bytes: 32 << 20, ..Budget::NONE }).build().unwrap(), Fake::with_room(4));
    let device = heap.attach(Ledger::new()).unwrap();
    let mut pool = heap.recv_pool(device).size(6 << 20).depth(4).low(3).limit(8).build(fake.clone()).unwrap();
    let first = receive(&mut pool, &fake, 1, 6 << 20);
    assert_eq!(pool.restock().unwrap().added, 1);
    let second = receive(&mut pool, &fake, 2, 6 << 20);
    let error = pool.restock().unwrap_err();
    assert!(matches!(error, RestockError::Heap(_)), "{error}");
    assert_eq!((pool.stats().refused > 0, pool.posted(), pool.stats().short), (true, 3, 1));
    drop(first);
    assert_eq!(pool.restock().unwrap().posted, 4);
    assert!(second[..].iter().all(|byte| *byte == 2));
}

#[test]
fn after_a_peak_the_surplus_goes_back_to_the_heap() {
    let ((heap, device), fake) = (heap(), Fake::with_room(4));
    let mut pool = four(&heap, device).limit(64).build(fake.clone()).unwrap();
    let kept: Vec<_> = (0..40)
        .map(|_| {
            let message = receive(&mut pool, &fake, 1, 4096);
            pool.restock().unwrap();
            message
        })
        .collect();
    drop(kept);
    (0..2).for_each(|_| drop(receive(&mut pool, &fake, 1, 4096)));
    pool.restock().unwrap();
    assert_eq!((pool.posted(), pool.stats().ready, pool.stats().lent), (4, 4, 0));
}

/// Takes what it is given, and panics before it says so, from its second call on.
struct Panics(Fake);

// SAFETY: what it takes is what it was given.
unsafe impl ReceiveQueue for Panics {
    unsafe fn post(&mut self, receives: &[Receive]) -> Result<(), PostFailed> {
        // SAFETY: the caller's promise.
        unsafe { self.0.post(receives) }?;
        assert!(self.0.0.lock().unwrap().calls < 2, "the queue panics");
        Ok(())
    }
}

#[test]
fn what_a_queue_has_taken_before_it_panics_is_not_freed() {
    let ((heap, device), fake) = (heap(), Fake::with_room(4));
    let mut pool = four(&heap, device).build(Panics(fake.clone())).unwrap();
    (0..2).for_each(|_| drop(receive(&mut pool, &fake, 1, 4096)));
    catch_unwind(AssertUnwindSafe(|| pool.restock())).expect_err("the queue panics");
    assert_eq!((fake.posted(), pool.posted(), pool.stats().ready), (4, 4, 0));
    assert_eq!(receive(&mut pool, &fake, 2, 4096), [2; 4096][..]);
    let (_, posted) = pool.close();
    assert_eq!(posted.len(), 3);
    // SAFETY: the device was never more than this test.
    drop(unsafe { posted.reclaim() });
}

#[test]
fn receives_are_posted_in_batches_and_a_restock_with_nothing_to_do_does_not_call() {
    let ((heap, device), fake) = (heap(), Fake::with_room(128));
    let mut pool = heap.recv_pool(device).size(64).depth(128).low(64).build(fake.clone()).unwrap();
    assert_eq!(fake.0.lock().unwrap().calls, 4);
    for _ in 0..63 {
        drop(receive(&mut pool, &fake, 1, 64));
        pool.restock().unwrap();
    }
    assert_eq!(fake.0.lock().unwrap().calls, 4);
    drop(receive(&mut pool, &fake, 1, 64));
    assert_eq!(pool.restock().unwrap().added, 64);
    assert_eq!(fake.0.lock().unwrap().calls, 6);
}

/// Prints what decided the default of `copy_up_to`, the least of some rounds; asserts nothing of it, since the machine may be busy.
#[test]
fn what_lending_and_copying_cost() {
    let (heap, device) = heap();
    let fakes = [(); 2].map(|()| Fake::with_room(64));
    let pool = |copied, fake: &Fake| heap.recv_pool(device).size(4096).depth(64).copy_up_to(copied).build(fake.clone());
    let mut pools = [pool(0, &fakes[0]).unwrap(), pool(4096, &fakes[1]).unwrap()];
    for len in [16, 64, 128, 256, 512, 1024, 4096] {
        let mut least = [u128::MAX; 2];
        for _ in 0..40 {
            for ((pool, fake), least) in pools.iter_mut().zip(&fakes).zip(&mut least) {
                let begin = Instant::now();
                for _ in 0..500 {
                    let id = fake.0.lock().unwrap().posted.pop_front().unwrap().id;
                    // SAFETY: the buffer was written by `deliver`, or is not looked at.
                    drop(unsafe { pool.complete(id, 0, len) }.unwrap());
                    pool.restock().unwrap();
                }
                *least = (*least).min(begin.elapsed().as_nanos() / 500);
            }
        }
        println!("{len} bytes received and dropped: lent {} ns, copied {} ns", least[0], least[1]);
    }
}
