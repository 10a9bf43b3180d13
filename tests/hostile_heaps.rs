//! Heaps that end while their last buffers go, on several threads at once.

use rdmalloc::{Access, Heap, KeyError, Rdmalloc};
use rdmalloc_tests::Ledger;
use std::sync::{Arc, Barrier};
use std::thread;

#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

const THREADS: usize = 4;

#[test]
fn every_heap_ends_whoever_drops_its_last_buffer() {
    let ledger = Ledger::new();
    for round in 0..400 {
        let heap = Heap::builder().access(Access::REMOTE_WRITE).build().unwrap();
        let device = heap.attach(ledger.clone()).unwrap();
        // Each thread's buffers come from several threads' shards, of every kind.
        let capacities = [64, 3000, 20_000, 70_000, 5 << 20];
        let buffer = |index: usize| heap.buffer(capacities[(index + round) % capacities.len()]).unwrap();
        let taken = thread::scope(|scope| {
            let threads: Vec<_> =
                (0..THREADS).map(|first| scope.spawn(move || Vec::from_iter((first..first + 8).map(buffer)))).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        let place = taken[0].as_ptr().addr();
        let mut hands: Vec<Vec<_>> = (0..THREADS).map(|_| Vec::new()).collect();
        taken.into_iter().enumerate().for_each(|(index, buffer)| hands[index % THREADS].push(buffer));
        let begin = Arc::new(Barrier::new(THREADS + 1));
        let threads: Vec<_> = hands
            .into_iter()
            .map(|buffers| {
                let begin = begin.clone();
                thread::spawn(move || {
                    begin.wait();
                    drop(buffers);
                })
            })
            .collect();
        begin.wait();
        drop(heap);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(ledger.live(), 0, "round {round}: an arena is open still");
        assert_eq!(device.key_of_address(place), Err(KeyError::Detached), "round {round}: the heap has not ended");
    }
}

#[test]
fn threads_take_and_drop_buffers_while_heaps_come_and_go() {
    let ledger = Ledger::new();
    thread::scope(|scope| {
        for first in 0..THREADS {
            let ledger = &ledger;
            scope.spawn(move || {
                for round in 0..300 {
                    let heap = Heap::builder().build().unwrap();
                    let device = heap.attach(ledger.clone()).unwrap();
                    let mut buffers: Vec<_> =
                        (0..10).map(|index| heap.buffer(1 << ((first + round + index) % 20)).unwrap()).collect();
                    for (mark, buffer) in buffers.iter_mut().enumerate() {
                        let bytes = vec![mark as u8; buffer.capacity()];
                        buffer.try_extend_from_slice(&bytes).unwrap();
                        assert!(device.sge(buffer).is_ok());
                    }
                    drop(heap);
                    for (mark, buffer) in buffers.into_iter().enumerate() {
                        assert!(buffer.iter().all(|byte| *byte == mark as u8), "two have the same buffer");
                    }
                }
            });
        }
    });
    assert_eq!(ledger.live(), 0);
}
