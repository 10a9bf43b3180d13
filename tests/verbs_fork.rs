//! Forks of a program with a real verbs device under traffic: the parent's transfers stay right, its keys and its pinned memory stay,
//! whatever its children free, drop and exit from.
#![cfg(feature = "verbs")]

use rdmalloc::registrar::verbs::{Verbs, rdma_sys::ibv_sge};
use rdmalloc::{Access, Buffer, Device, Heap, HoldError, KeyError, NotRegistered, Rdmalloc, TakeError};
use rdmalloc_tests::rig::{Depth, Domain, Queue, Remote, domain_or_skip};
use rdmalloc_tests::{is_alone, pinned_bytes};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
const TIMEOUT: Duration = Duration::from_secs(60);

/// Runs `action` in a child that exits; fails unless it returns in a hundred seconds.
fn in_child(action: impl FnOnce()) {
    // SAFETY: the child runs `action` and exits.
    match unsafe { libc::fork() } {
        -1 => panic!("fork: {}", std::io::Error::last_os_error()),
        0 => {
            // SAFETY: no preconditions.
            unsafe { libc::alarm(100) };
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(action));
            std::process::exit(i32::from(done.is_err()))
        }
        child => {
            let mut status = 0;
            // SAFETY: waits for the child made above.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!(status, 0, "the child's wait status");
        }
    }
}

/// Everything that belongs to the device, to be dropped by a child.
struct Program {
    queues: (Queue, Queue),
    pool: Heap,
    devices: (Device, Device),
    domain: Domain,
    /// In the global heap, and read by the device.
    source: Vec<u8>,
    /// In the pool, and written by it.
    target: Buffer,
    /// What the device must not touch.
    beside: Vec<Buffer>,
}

impl Program {
    fn new(domain: Domain) -> Program {
        let pool = Heap::builder().access(Access::REMOTE_WRITE).build().unwrap();
        let devices =
            (HEAP.attach(Verbs::new(domain.clone())).unwrap(), pool.attach(Verbs::new(domain.clone())).unwrap());
        let queues = Queue::pair(&domain, Depth::default()).unwrap();
        let (source, target) = (vec![0; 128 * KIB], pool.buffer_zeroed(128 * KIB).unwrap());
        let beside = (0..20).map(|size| pool.buffer_zeroed(100 << (size % 10)).unwrap()).collect();
        Program { queues, pool, devices, domain, source, target, beside }
    }

    /// The device reads one and writes the other, where they lie, by the keys that are looked up now; and the bytes are compared.
    fn transfer(&mut self, turn: usize) {
        let len = 1 + (turn * 7919) % self.source.len();
        self.source[..len].iter_mut().enumerate().for_each(|(at, byte)| *byte = (at * 31 + turn) as u8);
        let sge: ibv_sge = self.devices.0.sge(&self.source[..len]).unwrap().to_ibv();
        let rkey = self.devices.1.key(self.target.as_ptr()).unwrap().rkey;
        let remote = Remote { addr: self.target.as_ptr().addr() as u64, rkey };
        // SAFETY: both live, untouched, until the completion below.
        unsafe { self.queues.0.post_write(turn as u64, sge, remote) }.unwrap();
        let done = self.queues.0.wait(TIMEOUT).unwrap().ok().unwrap();
        assert_eq!(done.id, turn as u64);
        assert!(self.target[..len] == self.source[..len], "turn {turn}: the device has moved something else");
        assert!(self.beside.iter().all(|buffer| buffer.iter().all(|byte| *byte == 0)));
    }

    /// What a child does with it.
    fn live_on(self) {
        let of = (self.source.as_ptr(), self.target.as_ptr());
        let parents = Err(KeyError::NotRegistered(NotRegistered::ForkedChild));
        assert_eq!((self.devices.0.key(of.0), self.devices.1.key(of.1)), (parents, parents));
        assert_eq!(self.devices.0.hold().err(), Some(HoldError::Detached));
        assert!(matches!(self.pool.buffer(100), Err(TakeError::NotInChild)));
        assert!(self.source.iter().take(1).count() == 1 && HEAP.devices().is_empty());
        let Program { queues, pool, devices, domain, source, target, beside } = self;
        drop((source, target, beside));
        HEAP.detach(devices.0).unwrap();
        pool.detach(devices.1).unwrap();
        pool.trim();
        drop(pool);
        thread::scope(|scope| {
            (0..2).for_each(|_| {
                drop(scope.spawn(|| drop((0..100).map(|size| vec![1u8; size * KIB]).collect::<Vec<_>>())))
            });
        });
        HEAP.trim();
        // The queue pairs are the program's own, and so is the duty not to destroy them: it would destroy the parent's.
        std::mem::forget(queues);
        drop(domain);
    }
}

#[test]
fn verbs_transfers_keys_and_pins_of_the_parent_stay_whatever_children_do() {
    let Some(domain) = domain_or_skip() else { return };
    if !is_alone() {
        return;
    }
    let mut program = Some(Program::new(domain));
    program.as_mut().unwrap().transfer(0);
    let pinned = pinned_bytes();
    for turn in 1..20 {
        in_child(|| program.take().unwrap().live_on());
        let program = program.as_mut().unwrap();
        assert_eq!(pinned_bytes(), pinned, "after child {turn}");
        program.transfer(turn);
    }
    assert_eq!(
        pinned as usize,
        HEAP.stats().registered_bytes + program.as_ref().unwrap().pool.stats().registered_bytes
    );
}

#[test]
fn verbs_a_busy_program_forks_and_its_traffic_stays_right() {
    const FORKS: usize = 40;
    let Some(domain) = domain_or_skip() else { return };
    if !is_alone() {
        return;
    }
    let unpinned = pinned_bytes();
    let mut program = Program::new(domain.clone());
    let other = Heap::builder().build().unwrap();
    other.attach(Verbs::new(domain)).unwrap();
    let (stop, transfers) = (AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|scope| {
        // Arenas are opened, registered, deregistered and closed meanwhile.
        for seed in 1..5 {
            let (stop, pool) = (&stop, &other);
            scope.spawn(move || {
                let mut state = seed * 977;
                while !stop.load(Relaxed) {
                    state = (state * 7919 + 13) % (12 * MIB);
                    let size = state >> (state % 12);
                    let (block, buffer) = (vec![size as u8; size + 1], pool.buffer(size + 1).unwrap());
                    assert!(buffer.capacity() > size && block[size] == size as u8);
                    if size % 50 == 0 {
                        HEAP.trim();
                        pool.trim();
                    }
                }
            });
        }
        let traffic = scope.spawn(|| {
            while !stop.load(Relaxed) {
                program.transfer(1 + transfers.load(Relaxed));
                transfers.fetch_add(1, Relaxed);
            }
        });
        for _ in 0..FORKS {
            let before = transfers.load(Relaxed);
            let mut mine = Some((vec![vec![5u8; 1000]; 100], other.buffer(1000).unwrap()));
            in_child(|| {
                drop(mine.take());
                drop((0..100).map(|size| vec![1u8; size * KIB]).collect::<Vec<_>>());
                HEAP.trim();
            });
            // Some traffic between two forks.
            while transfers.load(Relaxed) < before + 2 && !traffic.is_finished() {
                thread::yield_now();
            }
        }
        stop.store(true, Relaxed);
    });
    println!("{} transfers over {FORKS} forks", transfers.load(Relaxed));
    HEAP.trim();
    let registered =
        HEAP.stats().registered_bytes + program.pool.stats().registered_bytes + other.stats().registered_bytes;
    assert_eq!(pinned_bytes() - unpinned, registered as u64);
}
