//! Flights as futures, as the example `async_send` has them, over a completion queue that is a test's.

#[allow(
    dead_code,
    missing_docs,
    reason = "the file is an example's: not all of it is used here, and its items are private there"
)]
#[path = "../alloc/examples/async_send/completions.rs"]
mod completions;

use completions::{Completions, Posted};
use rdmalloc::{Buffer, Device, Heap};
use rdmalloc_tests::Ledger;
use std::io::{Error, ErrorKind};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::task::{Context, Poll, Wake, Waker};

#[derive(Default)]
struct Woken(AtomicUsize);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Relaxed);
    }
}

fn heap() -> (Heap, Device, Arc<Completions>) {
    let heap = Heap::builder().build().unwrap();
    let device = heap.attach(Ledger::new()).unwrap();
    (heap, device, Arc::default())
}

/// Posts to nobody; the `wr_id` comes out.
fn send(device: Device, completions: &Arc<Completions>, buffer: Buffer) -> (Posted<Buffer>, u64) {
    let flight = device.fly(buffer).unwrap();
    let mut posted_id = 0;
    let post = |id| {
        posted_id = id;
        Ok(())
    };
    // SAFETY: there is no device, so what `arrived` is told is what has happened.
    let posted = unsafe { completions.send(flight, post) }.map_err(|(error, _)| error).unwrap();
    (posted, posted_id)
}

#[test]
fn a_future_is_woken_by_its_completion_and_has_the_value() {
    let (heap, device, completions) = heap();
    let (posted, id) = send(device, &completions, heap.buffer_from_slice(b"value").unwrap());
    let woken = Arc::new(Woken::default());
    let waker = Waker::from(woken.clone());
    let mut posted = pin!(posted);
    for _ in 0..2 {
        assert!(posted.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    }
    // SAFETY: there is no device.
    unsafe {
        assert!(!completions.arrived(id + 1, Ok(0)), "another's");
        assert!(completions.arrived(id, Ok(5)));
        assert!(!completions.arrived(id, Ok(5)), "twice");
    }
    assert_eq!(woken.0.load(Relaxed), 1);
    let Poll::Ready((outcome, value)) = posted.as_mut().poll(&mut Context::from_waker(&waker)) else { panic!() };
    assert_eq!((outcome.unwrap(), &value[..]), (5, &b"value"[..]));
    assert_eq!(device.hold_count(), 0);
}

#[test]
fn a_dropped_future_leaves_its_buffer_until_the_completion() {
    let (heap, device, completions) = heap();
    let address = |buffer: &Buffer| buffer.as_ptr().addr();
    let buffer = heap.buffer_from_slice(&[7; 5000]).unwrap();
    let place = address(&buffer);
    let (posted, id) = send(device, &completions, buffer);
    drop(posted);
    assert_eq!((device.flights().under_way, device.flights().leaked), (1, 0));
    let others: Vec<_> = (0..64).map(|_| heap.buffer(5000).unwrap()).collect();
    assert!(others.iter().all(|other| address(other) != place), "it was freed under the device");
    assert!(heap.detach(device).is_err());
    // SAFETY: there is no device.
    assert!(unsafe { completions.arrived(id, Err(ErrorKind::Other.into())) });
    assert_eq!((device.flights().under_way, device.hold_count()), (0, 0));
    let again: Vec<_> = (0..64).map(|_| heap.buffer(5000).unwrap()).collect();
    assert!(again.iter().any(|other| address(other) == place), "it is free now");
    heap.detach(device).unwrap();
}

#[test]
fn a_future_that_is_dropped_after_its_completion_frees_its_buffer() {
    let (heap, device, completions) = heap();
    let (posted, id) = send(device, &completions, heap.buffer_from_slice(b"value").unwrap());
    // SAFETY: there is no device.
    assert!(unsafe { completions.arrived(id, Ok(5)) });
    drop(posted);
    assert_eq!((device.flights().under_way, device.flights().leaked, device.hold_count()), (0, 0, 0));
}

#[test]
fn what_was_not_posted_comes_back_at_once() {
    let (heap, device, completions) = heap();
    let flight = device.fly(heap.buffer_from_slice(b"value").unwrap()).unwrap();
    // SAFETY: nothing is posted.
    let posted = unsafe { completions.send(flight, |_| Err(Error::from(ErrorKind::OutOfMemory))) };
    let Err((error, value)) = posted else { panic!("it was not posted") };
    assert_eq!((error.kind(), &value[..]), (ErrorKind::OutOfMemory, &b"value"[..]));
    assert_eq!(device.hold_count(), 0);
}
