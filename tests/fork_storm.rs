//! Forks out of the middle of everything: threads that allocate and free on every kind of heap, devices that come and go slowly,
//! drain passes, maintainers. Each child must be able to go on: to free what it inherits, allocate on threads of its own, attach a
//! device of its own, trim, and exit; without a hang and without a call of its parent's device.

use rdmalloc::{
    Access, Buffer, Device, Heap, KeyError, Keys, Maintainer, Maintenance, NotRegistered, Rdmalloc, Registered,
    Registrar, Retention, TakeError,
};
use rdmalloc_tests::{Null, again_without_membarrier, is_alone, is_without_membarrier};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize};
use std::time::Duration;
use std::{io, ptr, thread};

#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
/// Milliseconds after which a child has hung: a thousand times what it takes.
const HUNG: i32 = 100_000;

/// A device that takes its time, so that forks come while it is called. It counts the calls in other processes than the one that
/// made it, where all see them.
struct Slow {
    process: u32,
    strays: &'static AtomicU32,
    next: AtomicU32,
}

impl Slow {
    fn new(strays: &'static AtomicU32) -> Slow {
        Slow { process: std::process::id(), strays, next: AtomicU32::new(1) }
    }

    fn called(&self) {
        if std::process::id() != self.process {
            self.strays.fetch_add(1, Relaxed);
        }
        // What a library does, and in it: allocate.
        drop(vec![1u8; 100]);
        thread::sleep(Duration::from_millis(1));
    }
}

// SAFETY: there is no device, so nothing touches the memory.
unsafe impl Registrar for Slow {
    unsafe fn register(&self, _: Range<usize>, _: Access) -> io::Result<Registered> {
        self.called();
        let key = self.next.fetch_add(1, Relaxed);
        Ok(Registered { keys: Keys { lkey: key, rkey: key }, handle: key.into() })
    }

    fn deregister(&self, _: Registered, _: Range<usize>) -> io::Result<()> {
        self.called();
        Ok(())
    }

    fn is_memlocked(&self) -> bool {
        false
    }

    fn pins_pages(&self) -> bool {
        false
    }

    fn name(&self) -> &str {
        "slow"
    }
}

impl Drop for Slow {
    fn drop(&mut self) {
        self.called();
    }
}

fn shared_count() -> &'static AtomicU32 {
    let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping, zero, shared with children, and never unmapped.
    unsafe {
        let page = libc::mmap(ptr::null_mut(), 4096, access, flags, -1, 0);
        assert_ne!(page, libc::MAP_FAILED);
        &*page.cast::<AtomicU32>()
    }
}

/// Numbers that look random.
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 8) as usize % end
    }

    /// Mostly small, now and then so large that arenas open and close.
    fn size(&mut self) -> usize {
        match self.below(200) {
            0 => 6 * MIB + self.below(20 * MIB),
            1..10 => 64 * KIB + self.below(MIB),
            10..40 => KIB + self.below(60 * KIB),
            _ => 1 + self.below(KIB),
        }
    }
}

/// Blocks of the global heap, and of the two others, each with its number in it.
#[derive(Default)]
struct Things {
    blocks: Vec<Vec<u8>>,
    kept: Vec<Buffer>,
    left_out: Vec<Buffer>,
}

impl Things {
    fn take(dice: &mut Dice, kept: &Heap, left_out: Option<&Heap>) -> Things {
        let mark = |size: usize| [size as u8; 1];
        let fill = |heap: &Heap, dice: &mut Dice| {
            let size = dice.size();
            let mut buffer = heap.buffer(size).unwrap();
            buffer.try_extend_from_slice(&mark(buffer.capacity())).unwrap();
            buffer
        };
        Things {
            blocks: (0..4)
                .map(|_| {
                    let mut block = Vec::with_capacity(dice.size());
                    block.extend(mark(block.capacity()));
                    block
                })
                .collect(),
            kept: (0..2).map(|_| fill(kept, dice)).collect(),
            left_out: left_out.iter().flat_map(|heap| [fill(heap, dice), fill(heap, dice)]).collect(),
        }
    }

    /// What a child can look at.
    fn check(&self) {
        assert!(self.blocks.iter().all(|block| block[0] == block.capacity() as u8));
        assert!(self.kept.iter().all(|buffer| buffer[0] == buffer.capacity() as u8));
    }

    fn check_all(&self) {
        self.check();
        assert!(self.left_out.iter().all(|buffer| buffer[0] == buffer.capacity() as u8));
    }
}

/// Where threads leave things for others.
static PLACES: [AtomicPtr<Things>; 64] = [const { AtomicPtr::new(ptr::null_mut()) }; 64];

fn swap(place: usize, things: Option<Things>) -> Option<Things> {
    let new = things.map_or(ptr::null_mut(), |things| Box::into_raw(Box::new(things)));
    let old = PLACES[place].swap(new, AcqRel);
    // SAFETY: null, or a box that was given up to the place, which the swap has taken out.
    (!old.is_null()).then(|| *unsafe { Box::from_raw(old) })
}

/// What there is to be inherited.
struct Program {
    kept: Heap,
    left_out: Heap,
    strays: &'static AtomicU32,
    stop: AtomicBool,
}

impl Program {
    fn churn(&self, seed: u64) {
        let mut dice = Dice(seed);
        while !self.stop.load(Relaxed) {
            let things = Things::take(&mut dice, &self.kept, Some(&self.left_out));
            if let Some(others) = swap(dice.below(PLACES.len()), Some(things)) {
                others.check_all();
            }
        }
    }

    /// Attaches, trims and detaches, on every heap.
    fn come_and_go(&self) {
        while !self.stop.load(Relaxed) {
            let devices = (
                HEAP.attach(Slow::new(self.strays)).unwrap(),
                self.kept.attach(Slow::new(self.strays)).unwrap(),
                self.left_out.attach(Slow::new(self.strays)).unwrap(),
            );
            HEAP.trim();
            self.kept.trim();
            self.left_out.trim();
            HEAP.detach(devices.0).unwrap();
            self.kept.detach(devices.1).unwrap();
            self.left_out.detach(devices.2).unwrap();
        }
    }

    /// What a child does, in the end of which everything that it has inherited is dropped.
    fn live_on(
        kept: Heap,
        left_out: Heap,
        device: Device,
        things: Things,
        maintainer: Option<Maintainer>,
        turn: usize,
    ) {
        let parents = KeyError::NotRegistered(NotRegistered::ForkedChild);
        let of = things.blocks[0].as_ptr();
        assert!([Err(parents), Err(KeyError::Detached)].contains(&device.key(of)), "{:?}", device.key(of));
        things.check();
        // Of other threads, freed by the child.
        (0..PLACES.len()).filter_map(|place| swap(place, None)).for_each(|things| things.check());
        assert!(matches!(left_out.buffer(100), Err(TakeError::NotInChild)));
        thread::scope(|scope| {
            let threads = [1, 2].map(|seed| {
                let kept = &kept;
                scope.spawn(move || {
                    let mut dice = Dice(seed + turn as u64);
                    for _ in 0..20 {
                        let things = Things::take(&mut dice, kept, None);
                        if let Some(others) = swap(dice.below(4), Some(things)) {
                            others.check();
                        }
                    }
                })
            });
            // Joined: the scope's end waits for what they do, not for their own end, in which they free, too, and may be met by `trim`.
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
        drop(things);
        let own = HEAP.attach(Null::default()).unwrap();
        let block = Box::new([1u8; 100]);
        assert!(own.key(block.as_ptr()).is_ok() && HEAP.devices().len() == 1);
        if turn.is_multiple_of(2) {
            HEAP.detach(own).unwrap();
        }
        (0..PLACES.len()).for_each(|place| drop(swap(place, None)));
        drop(left_out);
        kept.trim();
        let trimmed = HEAP.trim();
        assert_eq!((trimmed.busy_threads, trimmed.stuck_arenas), (0, 0));
        drop(maintainer);
        assert!(kept.maintain(Maintenance::new()).is_ok());
    }
}

/// Forks, has the child do something and exit, and waits for it.
fn in_child(action: impl FnOnce()) {
    // SAFETY: the child runs `action` and exits.
    match unsafe { libc::fork() } {
        -1 => panic!("fork: {}", io::Error::last_os_error()),
        0 => {
            let done = catch_unwind(AssertUnwindSafe(action));
            std::process::exit(i32::from(done.is_err()))
        }
        child => {
            // Looked at from outside: a child can hang before it returns from `fork`.
            // SAFETY: a descriptor of the child made above, which is waited for below; and one place for what is polled.
            let ended = unsafe {
                let descriptor = libc::syscall(libc::SYS_pidfd_open, child, 0) as i32;
                let mut wanted = libc::pollfd { fd: descriptor, events: libc::POLLIN, revents: 0 };
                let ended = descriptor < 0 || libc::poll(&raw mut wanted, 1, HUNG) != 0;
                libc::close(descriptor);
                ended || libc::kill(child, libc::SIGKILL) != 0
            };
            let mut status = 0;
            // SAFETY: waits for the child made above.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert!(ended, "the child has hung");
            assert!(!libc::WIFSIGNALED(status), "the child was ended by signal {}", libc::WTERMSIG(status));
            assert_eq!(libc::WEXITSTATUS(status), 0, "the child's exit status");
        }
    }
}

/// `FORKS` in the environment says how many.
fn forks() -> usize {
    std::env::var("FORKS").ok().and_then(|forks| forks.parse().ok()).unwrap_or(500)
}

fn storm(forks: usize) {
    const FORKERS: usize = 4;
    const CHURNERS: usize = 8;
    let strays = shared_count();
    let heap = |serves| Heap::builder().serves_children(serves).retention(Retention::NONE).build().unwrap();
    let program = Program { kept: heap(true), left_out: heap(false), strays, stop: AtomicBool::new(false) };
    HEAP.set_retention(Retention::NONE);
    let maintenance = Maintenance::new().headroom(8 * MIB).interval(Duration::from_millis(1));
    let maintainers = [HEAP.maintain(maintenance).unwrap(), program.left_out.maintain(maintenance).unwrap()];
    let done = AtomicUsize::new(0);
    // A thread that begins or ends holds a lock of the standard library's while it allocates, which no handler of a fork knows: a
    // child that is forked then can start no thread. So all have begun before the first fork, and are joined before the last.
    assert!(maintainers.iter().all(|maintainer| maintainer.round().rounds > 0));
    let begun = Barrier::new(CHURNERS + 1 + FORKERS);
    thread::scope(|scope| {
        let (program, done, begun) = (&program, &done, &begun);
        let churners = (1..=CHURNERS as u64).map(|seed| {
            scope.spawn(move || {
                begun.wait();
                program.churn(seed);
            })
        });
        let mut others: Vec<_> = churners.collect();
        others.push(scope.spawn(move || {
            begun.wait();
            program.come_and_go();
        }));
        let forkers: Vec<_> = (0..FORKERS)
            .map(|forker| {
                scope.spawn(move || {
                    begun.wait();
                    let mut dice = Dice(100 + forker as u64);
                    for turn in 0..forks / FORKERS {
                        let device = program.kept.attach(Null::default()).unwrap();
                        let things = Things::take(&mut dice, &program.kept, Some(&program.left_out));
                        let mut mine = Some((program.kept.clone(), program.left_out.clone(), things));
                        in_child(|| {
                            let (kept, left_out, things) = mine.take().unwrap();
                            Program::live_on(kept, left_out, device, things, None, turn);
                        });
                        mine.iter().for_each(|(.., things)| things.check_all());
                        program.kept.detach(device).unwrap();
                        done.fetch_add(1, Relaxed);
                    }
                })
            })
            .collect();
        let results: Vec<_> = forkers.into_iter().map(|forker| forker.join()).collect();
        program.stop.store(true, Relaxed);
        let results = results.into_iter().chain(others.into_iter().map(|other| other.join()));
        let failed: Vec<_> = results.filter_map(Result::err).collect();
        if let Some(failure) = failed.into_iter().next() {
            std::panic::resume_unwind(failure);
        }
    });
    (0..PLACES.len()).filter_map(|place| swap(place, None)).for_each(|things| things.check_all());
    // Once more from the thread that has it all, maintainers too.
    let (mut all, device) = (Some((program, maintainers)), HEAP.attach(Slow::new(strays)).unwrap());
    let things = Things { blocks: vec![vec![1]], ..Things::default() };
    let mut things = Some(things);
    in_child(|| {
        let (program, [global, other]) = all.take().unwrap();
        Program::live_on(program.kept, program.left_out, device, things.take().unwrap(), Some(global), 1);
        drop(other);
    });
    drop(all);
    HEAP.detach(device).unwrap();
    assert_eq!(strays.load(Relaxed), 0, "a child called its parent's device, or dropped it");
    println!("{} forks", done.load(Relaxed));
}

#[test]
fn children_forked_from_the_middle_of_everything_live_on_and_exit() {
    let _ = is_without_membarrier();
    // The harness's threads begin and end, too.
    if is_alone() {
        storm(forks());
    }
}

#[test]
fn without_membarrier_children_live_on_as_well() {
    again_without_membarrier("without_membarrier");
}
