//! The rig itself: that bytes cross a device before anything else is built on it.
#![cfg(feature = "verbs")]

use rdmalloc_tests::rig::{Completion, Depth, Domain, Memory, Queue, Status, domain_or_skip, exchange};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(10);

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add((i >> 8) as u8) ^ seed).collect()
}

fn done(queue: &Queue, id: u64) -> Completion {
    let completion = queue.wait(TIMEOUT).unwrap().ok().unwrap();
    assert_eq!(completion.id, id);
    completion
}

#[test]
fn verbs_send_write_read_and_add_between_two_queues() {
    let Some(domain) = domain_or_skip() else { return };
    let (left, right) = Queue::pair(&domain, Depth::default()).unwrap();
    let len = 100_000; // many packets, and no multiple of any of their sizes
    let (here, there) = (Memory::new(&domain, 1 << 20).unwrap(), Memory::new(&domain, 1 << 20).unwrap());

    here.fill(3, &pattern(len, 1));
    // SAFETY: both memories live until the end of the test, and are touched after the completions only.
    unsafe {
        right.post_recv(1, there.sge(5, 200_000)).unwrap();
        left.post_send(2, here.sge(3, len as u32)).unwrap();
    }
    done(&left, 2);
    assert_eq!(done(&right, 1).len, len as u32);
    assert_eq!(there.to_vec(5, len), pattern(len, 1));

    here.fill(0, &pattern(len, 2));
    // SAFETY: as above.
    unsafe { left.post_write(3, here.sge(0, len as u32), there.remote(300_001)) }.unwrap();
    done(&left, 3);
    assert_eq!(there.to_vec(300_001, len), pattern(len, 2));

    there.fill(7, &pattern(len, 3));
    // SAFETY: as above.
    unsafe { left.post_read(4, here.sge(500_000, len as u32), there.remote(7)) }.unwrap();
    done(&left, 4);
    assert_eq!(here.to_vec(500_000, len), pattern(len, 3));

    there.fill(800_000, &40u64.to_ne_bytes());
    // SAFETY: as above.
    unsafe { left.post_fetch_add(5, here.sge(0, 8), there.remote(800_000), 2) }.unwrap();
    done(&left, 5);
    assert_eq!(here.to_vec(0, 8), 40u64.to_ne_bytes());
    assert_eq!(there.to_vec(800_000, 8), 42u64.to_ne_bytes());
    assert!(left.poll().unwrap().is_none() && right.poll().unwrap().is_none());
}

#[test]
fn verbs_stale_rkey_is_a_remote_access_error() {
    let Some(domain) = domain_or_skip() else { return };
    let (left, right) = Queue::pair(&domain, Depth::default()).unwrap();
    let (here, mut there) = (Memory::new(&domain, 4096).unwrap(), Memory::new(&domain, 4096).unwrap());
    here.fill(0, b"gone");
    // SAFETY: both memories live until the end of the test, and are touched after the completions only.
    unsafe {
        left.post_write(1, here.sge(0, 4), there.remote(0)).unwrap();
        right.post_recv(2, here.sge(0, 4096)).unwrap();
    }
    done(&left, 1);
    assert_eq!(there.to_vec(0, 4), b"gone");

    there.deregister();
    there.fill(0, b"kept");
    // SAFETY: as above.
    unsafe { left.post_write(3, here.sge(0, 4), there.remote(0)) }.unwrap();
    let failed = left.wait(TIMEOUT).unwrap();
    assert_eq!((failed.id, failed.status), (3, Status::REM_ACCESS_ERR));
    assert!(failed.ok().unwrap_err().to_string().contains("status 10"));
    assert_eq!(there.to_vec(0, 4), b"kept");
    // The peer's queue fails with it, and hands back its receive.
    let flushed = right.wait(TIMEOUT).unwrap();
    assert_eq!((flushed.id, flushed.status), (2, Status::WR_FLUSH_ERR));
}

#[test]
fn verbs_queues_connect_over_a_byte_stream() {
    let Some(domain) = domain_or_skip() else { return };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (mut peer_stream, _) = listener.accept().unwrap();
    let peer_domain = domain.clone();
    let peer = std::thread::spawn(move || {
        let (queue, memory) =
            (Queue::new(&peer_domain, Depth::default()).unwrap(), Memory::new(&peer_domain, 4096).unwrap());
        // SAFETY: the memory lives until the completion below.
        unsafe { queue.post_recv(1, memory.sge(0, 4096)) }.unwrap();
        queue.connect(exchange(&mut peer_stream, queue.endpoint()).unwrap()).unwrap();
        let len = done(&queue, 1).len;
        memory.to_vec(0, len as usize)
    });
    let (queue, memory) = (Queue::new(&domain, Depth::default()).unwrap(), Memory::new(&domain, 4096).unwrap());
    queue.connect(exchange(&mut stream, queue.endpoint()).unwrap()).unwrap();
    memory.fill(0, b"over the stream");
    // SAFETY: the memory lives until the completion below.
    unsafe { queue.post_send(2, memory.sge(0, 15)) }.unwrap();
    done(&queue, 2);
    assert_eq!(peer.join().unwrap(), b"over the stream");
}

#[test]
fn verbs_unknown_device_is_not_found() {
    let error = Domain::open(Some("no-such-device")).err().unwrap();
    assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
    assert!(error.to_string().starts_with("there is no RDMA device"), "{error}");
}
