//! The mission on a real verbs device: what the program allocates is reached by the device, as long as it lives and no
//! longer. In the guest the device is soft-RoCE.
#![cfg(feature = "verbs")]

use rdmalloc::registrar::verbs::Verbs;
use rdmalloc::{Access, AttachError, Device, Heap, KeyError, Rdmalloc};
use rdmalloc_tests::rig::{Completion, Depth, Domain, Memory, Queue, Remote, Status, domain_or_skip};
use rdmalloc_tests::{Churn, Garden, pinned_bytes};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;

#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

const TIMEOUT: Duration = Duration::from_secs(60);

fn done(queue: &Queue, id: u64) -> Completion {
    let completion = queue.wait(TIMEOUT).unwrap().ok().unwrap();
    assert_eq!(completion.id, id);
    completion
}

/// The device reads `bytes` where they lie, by their lkey, and writes them into `to`.
fn read_by_device(queue: &Queue, device: Device, bytes: &[u8], to: &Memory) -> Vec<u8> {
    let sge = device.sge(bytes).unwrap();
    // SAFETY: bytes and target live, untouched, until the completion below.
    unsafe { queue.post_write(1, sge.to_ibv(), to.remote(0)) }.unwrap();
    done(queue, 1);
    to.to_vec(0, bytes.len())
}

/// Bytes that can be written over the wire, from plain registered memory.
fn source(domain: &Domain, bytes: &[u8]) -> Memory {
    let memory = Memory::new(domain, bytes.len()).unwrap();
    memory.fill(0, bytes);
    memory
}

#[test]
fn verbs_while_a_block_lives_its_arena_is_reached_and_afterwards_not() {
    let Some(domain) = domain_or_skip() else { return };
    let heap = Heap::builder().access(Access::REMOTE_READ | Access::REMOTE_WRITE).build().unwrap();
    let device = heap.attach(Verbs::new(domain.clone())).unwrap();
    let (word, back) = (source(&domain, b"from a peer"), Memory::new(&domain, 11).unwrap());
    let (peer, _own) = Queue::pair(&domain, Depth::default()).unwrap();
    let unpinned = pinned_bytes();
    let (mut one, two) = (heap.buffer(1 << 20).unwrap(), heap.buffer(1 << 20).unwrap());
    let arenas = heap.arenas();
    assert_eq!(arenas.len(), 1, "both blocks are in one arena");
    assert_eq!(pinned_bytes(), unpinned + arenas[0].memory.len() as u64);

    // A peer writes into the block and reads it back, by the arena's rkey.
    let keys = device.key(one.as_ptr()).unwrap();
    let remote = Remote { addr: one.as_ptr().addr() as u64, rkey: keys.rkey };
    let write_and_read = |id| {
        // SAFETY: the memories live until the completions; the block is not looked at before.
        unsafe {
            peer.post_write(id, word.sge(0, 11), remote).unwrap();
            done(&peer, id);
            peer.post_read(id + 1, back.sge(0, 11), remote).unwrap();
        }
        done(&peer, id + 1);
        assert_eq!(back.to_vec(0, 11), b"from a peer");
    };
    write_and_read(1);
    drop(two);
    assert_eq!(heap.trim().closed_arenas, 0, "a block lives");
    write_and_read(3);
    // SAFETY: the peer has written as many.
    unsafe { one.set_len(11) };
    assert_eq!(&one[..], b"from a peer");

    drop(one);
    let trimmed = heap.trim();
    assert_eq!((trimmed.closed_arenas, trimmed.closed_bytes), (1, arenas[0].memory.len()));
    assert_eq!(pinned_bytes(), unpinned, "the arena is not pinned any more");
    // SAFETY: the source lives until the completion; that the target is gone is the point.
    unsafe { peer.post_write(5, word.sge(0, 11), remote) }.unwrap();
    let failed = peer.wait(TIMEOUT).unwrap();
    assert_eq!((failed.id, failed.status), (5, Status::REM_ACCESS_ERR));
}

#[test]
fn verbs_a_local_key_ends_with_its_arena() {
    let Some(domain) = domain_or_skip() else { return };
    let device = HEAP.attach(Verbs::new(domain.clone())).unwrap();
    let (queue, _peer) = Queue::pair(&domain, Depth::default()).unwrap();
    let to = Memory::new(&domain, 4096).unwrap();
    HEAP.trim();
    let pinned = pinned_bytes();
    // More than is free in any open arena, so in one of its own.
    let block = vec![5u8; 80 << 20];
    assert_eq!(pinned_bytes(), pinned + (80 << 20));
    assert_eq!(read_by_device(&queue, device, &block[(40 << 20)..][..4096], &to), [5; 4096]);
    let stale = device.sge(&block[..4096]).unwrap().to_ibv();
    drop(block);
    HEAP.trim();
    assert_eq!(pinned_bytes(), pinned);
    // SAFETY: the device must refuse the key, and touches nothing.
    unsafe { queue.post_write(2, stale, to.remote(0)) }.unwrap();
    let failed = queue.wait(TIMEOUT).unwrap();
    assert!([2, 4, 5].contains(&failed.status.0), "{failed:?}");
    HEAP.detach(device).unwrap();
}

#[test]
fn verbs_blocks_from_before_attach_are_read_by_the_device() {
    let Some(domain) = domain_or_skip() else { return };
    let churn = Churn::start(8);
    let ended = std::thread::spawn(|| Garden::plant(1, 40 << 20)).join().unwrap();
    let (sender, receiver) = mpsc::channel();
    let (wake, sleep) = mpsc::channel::<()>();
    let sleeper = std::thread::spawn(move || {
        sender.send(Garden::plant(2, 40 << 20)).unwrap();
        let _ = sleep.recv();
    });
    let gardens = [ended, receiver.recv().unwrap(), Garden::plant(3, 40 << 20)];

    let device = HEAP.attach(Verbs::new(domain.clone())).unwrap();
    let (queue, _peer) = Queue::pair(&domain, Depth::default()).unwrap();
    let to = Memory::new(&domain, 64 << 10).unwrap();
    for garden in &gardens {
        for (from, part) in garden.parts() {
            let seen = read_by_device(&queue, device, part, &to);
            let whole = seen.iter().enumerate().all(|(at, byte)| *byte == Garden::byte(garden.seed(), from + at));
            assert!(whole && seen == part, "{} bytes from {from}", part.len());
        }
    }
    churn.wait_for(100);
    drop(wake);
    sleeper.join().unwrap();
    churn.stop();
    HEAP.detach(device).unwrap();
    assert_eq!(device.key(gardens[0].blocks[0].as_ptr()), Err(KeyError::Detached));
}

#[test]
fn verbs_the_protection_domain_is_released_after_its_last_region() {
    let Some(domain) = domain_or_skip() else { return };
    drop(domain);
    let open_files = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = (open_files(), pinned_bytes());
    let heap = Heap::builder().build().unwrap();
    let device = heap.attach(Verbs::open(None).unwrap()).unwrap();
    let buffer = heap.buffer(100).unwrap();
    drop(heap);
    assert!(device.key(buffer.as_ptr()).is_ok(), "a buffer keeps its heap");
    assert_ne!((open_files(), pinned_bytes()), before);
    let address = buffer.as_ptr();
    drop(buffer);
    assert_eq!((open_files(), pinned_bytes()), before, "the domain is closed, the arena unpinned");
    assert_eq!(device.key(address), Err(KeyError::Detached));
}

#[test]
fn verbs_the_same_protection_domain_twice_is_refused() {
    let Some(domain) = domain_or_skip() else { return };
    let heap = Heap::builder().build().unwrap();
    let device = heap.attach(Verbs::new(domain.clone())).unwrap();
    let refused = heap.attach(Verbs::new(domain.clone())).unwrap_err();
    assert!(matches!(refused, AttachError::AlreadyAttached { .. }));
    assert!(refused.to_string().starts_with(&format!("{} is attached", domain.name())), "{refused}");
    let other = Heap::builder().build().unwrap();
    assert_eq!(other.attach(Verbs::new(domain)).unwrap(), device, "one device, on two heaps");
}

#[test]
fn verbs_two_devices_have_keys_of_their_own() {
    let Some(domain) = domain_or_skip() else { return };
    let other = Domain::open(None).unwrap();
    let heap = Heap::builder().build().unwrap();
    let buffer = {
        let mut buffer = heap.buffer(4096).unwrap();
        buffer.try_extend_from_slice(&[3; 4096]).unwrap();
        buffer
    };
    let devices = [&domain, &other].map(|domain| heap.attach(Verbs::new(domain.clone())).unwrap());
    assert_ne!(devices[0], devices[1]);
    for (domain, device) in [&domain, &other].into_iter().zip(devices) {
        let (queue, _peer) = Queue::pair(domain, Depth::default()).unwrap();
        let to = Memory::new(domain, 4096).unwrap();
        assert_eq!(read_by_device(&queue, device, &buffer, &to), [3; 4096]);
    }
}

/// Runs one of the tests below in a process of its own, as a user who may pin 8 MiB.
fn limited(test: &str) -> std::process::Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--include-ignored", "--nocapture"]).env("RDMALLOC_TEST_LIMITED", "1");
    // SAFETY: between fork and exec, only system calls are made.
    unsafe {
        command.pre_exec(|| {
            let limit = libc::rlimit { rlim_cur: 8 << 20, rlim_max: 8 << 20 };
            // Root gets on exec whatever its bounding set has: without IPC_LOCK (14) the limit counts for it too.
            let dropped = libc::prctl(libc::PR_CAPBSET_DROP, 14, 0, 0, 0);
            let limited = libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit);
            if dropped == 0 && limited == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        });
    }
    command.output().unwrap()
}

#[test]
fn verbs_a_memlock_limit_that_is_too_small_is_explained() {
    if std::env::var_os("RDMALLOC_TEST_LIMITED").is_none() {
        let Some(_domain) = domain_or_skip() else { return };
        let output = limited("verbs_a_memlock_limit_that_is_too_small_is_explained");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    // What fits is attached; the first arena is small where little may be pinned.
    let verbs = || Verbs::open(None).unwrap();
    let device = HEAP.attach(verbs()).unwrap();
    assert!(device.key(&*Box::new(1)).is_ok());
    HEAP.detach(device).unwrap();

    let heap = Heap::builder().build().unwrap();
    let large = heap.buffer(20 << 20).unwrap();
    let error = heap.attach(verbs()).unwrap_err();
    let AttachError::Register(refused) = &error else { panic!("{error}") };
    let memlock = refused.memlock.unwrap();
    assert!(refused.is_memlock());
    assert_eq!((refused.wanted, refused.devices, memlock.limit, memlock.pinned), (20 << 20, 1, Some(8 << 20), 0));
    for said in ["20480 KiB", "1 device", "memlock limit 8192 KiB", "pinned 0 KiB", "ulimit -l", "LimitMEMLOCK"] {
        assert!(error.to_string().contains(said), "{said}: {error}");
    }
    assert_eq!(pinned_bytes(), 0);
    drop(large);
    heap.trim();
    let device = heap.attach(verbs()).unwrap();
    // Nothing is served that the device cannot reach.
    let refused = heap.buffer(20 << 20).unwrap_err();
    assert!(refused.to_string().contains("memlock limit"), "{refused}");
    assert!(device.key(heap.buffer(100).unwrap().as_ptr()).is_ok());
}
