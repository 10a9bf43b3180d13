//! What a fork costs the parent, with much on a device: in the global heap, in a heap that is left out of children, in one that is not;
//! and what starting a program costs. The figures in README.md are of 1 GiB: `FORK_MIB=1024` in the environment.

use rdmalloc::{Buffer, Device, Heap, Rdmalloc, Registrar};
use rdmalloc_tests::{Null, is_alone};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

const PIECE: usize = 64 << 20;

/// How many pieces are on the device.
fn pieces() -> usize {
    let mib = std::env::var("FORK_MIB").ok().and_then(|mib| mib.parse().ok()).unwrap_or(128);
    (mib << 20) / PIECE
}

/// The least time that a fork takes in the parent, of so many.
fn fork(times: usize) -> Duration {
    let one = || {
        let begin = Instant::now();
        // SAFETY: the child leaves at once.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: no preconditions.
            unsafe { libc::_exit(0) };
        }
        let time = begin.elapsed();
        assert!(child > 0, "fork: {}", std::io::Error::last_os_error());
        let mut status = 0;
        // SAFETY: waits for the child made above.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(status, 0);
        time
    };
    (0..times).map(|_| one()).min().unwrap()
}

/// The least time in which a program is started, of so many.
fn start(forks: bool, times: usize) -> Duration {
    let one = || {
        let mut command = Command::new("/bin/true");
        if forks {
            // SAFETY: does nothing. That there is something makes the standard library fork.
            unsafe { command.pre_exec(|| Ok(())) };
        }
        let begin = Instant::now();
        let mut child = command.spawn().unwrap();
        let time = begin.elapsed();
        assert!(child.wait().unwrap().success());
        time
    };
    (0..times).map(|_| one()).min().unwrap()
}

fn on_heap(heap: &Heap, registrar: impl Registrar) -> (Device, Vec<Buffer>) {
    let device = heap.attach(registrar).unwrap();
    let buffers: Vec<_> = (0..pieces()).map(|_| heap.buffer_zeroed(PIECE).unwrap()).collect();
    assert!(buffers.iter().all(|buffer| device.key(buffer.as_ptr()).is_ok()));
    (device, buffers)
}

/// Prints what each costs with a device, and shows that what copies nothing is not slowed down by what is pinned.
fn measure<R: Registrar>(name: &str, device: impl Fn() -> R) {
    let (bare, mib) = (fork(5), (pieces() * PIECE) >> 20);
    println!("{name}: fork with nothing pinned {bare:?}, program started {:?}", start(false, 5));
    {
        let heap = Heap::builder().build().unwrap();
        let _held = on_heap(&heap, device());
        let left_out = fork(5);
        println!("{name}: {mib} MiB in a heap that is left out of children: fork {left_out:?}");
        // A tenth of a copy, at 10 GB/s.
        assert!(left_out < bare + Duration::from_millis(50), "it is copied, or its page tables are");
    }
    {
        let heap = Heap::builder().serves_children(true).build().unwrap();
        let _held = on_heap(&heap, device());
        println!("{name}: {mib} MiB in a heap that children have: fork {:?}", fork(1));
    }
    let attached = HEAP.attach(device()).unwrap();
    let blocks: Vec<_> = (0..pieces()).map(|_| vec![1u8; PIECE]).collect();
    assert!(blocks.iter().all(|block| attached.key(block.as_ptr()).is_ok()));
    let (copied, spawned, forked) = (fork(1), start(false, 5), start(true, 1));
    println!(
        "{name}: {mib} MiB in the global heap: fork {copied:?}, program started by posix_spawn {spawned:?}, by fork {forked:?}"
    );
    // Without a pinning device, page tables are copied, no more: nothing to compare with.
    assert!(spawned * 4 < copied || copied < Duration::from_millis(50), "starting a program copies");
    drop(blocks);
    HEAP.trim();
    HEAP.detach(attached).unwrap();
}

#[test]
fn starting_a_program_and_heaps_left_out_of_children_copy_nothing() {
    if is_alone() {
        measure("nothing pins", Null::default);
    }
}

#[cfg(feature = "uring")]
#[test]
fn with_an_io_uring_starting_a_program_and_heaps_left_out_of_children_copy_nothing() {
    use io_uring::IoUring;
    use rdmalloc::registrar::uring::Uring;
    let ring = match IoUring::new(8) {
        Ok(ring) => ring,
        Err(error) => return println!("skipped: no io_uring here: {error}"),
    };
    let uring = match Uring::new(&ring) {
        Ok(uring) => uring,
        Err(error) => return println!("skipped: {error}"),
    };
    if is_alone() {
        measure("io_uring", || uring.clone());
    }
}

#[cfg(feature = "verbs")]
#[test]
fn verbs_starting_a_program_and_heaps_left_out_of_children_copy_nothing() {
    use rdmalloc::registrar::verbs::Verbs;
    let Some(domain) = rdmalloc_tests::rig::domain_or_skip() else { return };
    if is_alone() {
        measure(domain.name(), || Verbs::new(domain.clone()));
    }
}
