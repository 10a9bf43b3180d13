//! The io_uring backend on the machine's own kernel: the bytes that its slots move, the errors of wrong use, and that a
//! registration's pages are released when the call that ends it returns.
#![cfg(feature = "uring")]

use io_uring::{IoUring, cqueue, opcode, squeue, types};
use rdmalloc_arenas::registrar::uring::{Uring, UringError};
use rdmalloc_arenas::{Access, Arenas, AttachError, Config, Policy, Registered, Registrar, SLICE};
use rdmalloc_tests::register;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::net::UnixStream;
use std::sync::{Barrier, Mutex, MutexGuard};

const PAGE: usize = 4096;
const MIB: usize = 1 << 20;
/// The grain of registrations.
const GRAIN: usize = 2 * MIB;

/// Mapped memory with bounds at multiples of 2 MiB, as a heap would register it.
struct Memory {
    map: *mut libc::c_void,
    mapped: usize,
    start: *mut u8,
    len: usize,
}

impl Memory {
    fn new(len: usize) -> Memory {
        let mapped = len + GRAIN;
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping of anonymous memory, which is nobody else's.
        let map = unsafe { libc::mmap(std::ptr::null_mut(), mapped, protection, flags, -1, 0) };
        assert_ne!(map, libc::MAP_FAILED, "{}", io::Error::last_os_error());
        let start = map.cast::<u8>().wrapping_add(map.cast::<u8>().align_offset(GRAIN));
        start.expose_provenance();
        Memory { map, mapped, start, len }
    }

    fn range(&self) -> Range<usize> {
        self.part(0, self.len)
    }

    fn part(&self, offset: usize, len: usize) -> Range<usize> {
        self.start.addr() + offset..self.start.addr() + offset + len
    }

    fn at(&self, offset: usize) -> *mut u8 {
        self.start.wrapping_add(offset)
    }

    fn write(&mut self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.len);
        // SAFETY: inside the mapping, which is readable and writable; no request is in flight while tests use this.
        unsafe { self.at(offset).copy_from(bytes.as_ptr(), bytes.len()) }
    }

    fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        assert!(offset + len <= self.len);
        // SAFETY: as above; anonymous memory is initialised.
        unsafe { std::slice::from_raw_parts(self.at(offset), len) }.to_vec()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: this value's own mapping; registrations of it pin pages, not addresses.
        unsafe { libc::munmap(self.map, self.mapped) };
    }
}

/// What is pinned counts for all of a user's rings together, so the tests that pin go one by one.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// A ring and its registrar, or a line that says why there is none.
fn ring_with(slots: u32) -> Option<(IoUring, Uring)> {
    let ring = match IoUring::new(8) {
        Ok(ring) => ring,
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM)) => {
            println!("skipped: io_uring is not allowed here: {error}");
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    match Uring::with_slots(&ring, slots) {
        Ok(uring) => Some((ring, uring)),
        Err(error @ UringError::LateRelease) => {
            println!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Submits one request and gives back its result.
fn run<S, C>(ring: &mut IoUring<S, C>, request: squeue::Entry) -> i32
where
    S: squeue::EntryMarker + From<squeue::Entry>,
    C: cqueue::EntryMarker + Into<cqueue::Entry>,
{
    // SAFETY: the callers keep descriptor and memory until this function has seen the completion.
    unsafe { ring.submission().push(&request.into()) }.unwrap();
    ring.submit_and_wait(1).unwrap();
    let completion: cqueue::Entry = ring.completion().next().expect("one completion").into();
    completion.result()
}

fn read_fixed(from: &impl AsRawFd, to: *mut u8, len: usize, slot: u32) -> squeue::Entry {
    opcode::ReadFixed::new(types::Fd(from.as_raw_fd()), to, len as u32, slot as u16).build()
}

fn write_fixed(to: &impl AsRawFd, from: *mut u8, len: usize, slot: u32) -> squeue::Entry {
    opcode::WriteFixed::new(types::Fd(to.as_raw_fd()), from, len as u32, slot as u16).build()
}

fn zeros() -> File {
    File::open("/dev/zero").unwrap()
}

fn error_of(result: io::Result<Registered>) -> UringError {
    *result.expect_err("an error").into_inner().expect("with a reason").downcast().expect("of ours")
}

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i.wrapping_mul(31) as u8) ^ (i >> 8) as u8 ^ seed).collect()
}

/// Runs `child` in a child of fork and gives back its exit status.
fn in_child(child: impl FnOnce() -> i32) -> i32 {
    // SAFETY: glibc keeps memory usable in the child, which besides makes system calls only: it neither prints nor panics
    // on purpose, so it takes no lock that another thread may have held, and it ends by _exit.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let status = child();
        // SAFETY: ends the child without running what belongs to the parent.
        unsafe { libc::_exit(status) }
    }
    assert!(pid > 0, "{}", io::Error::last_os_error());
    let mut status = 0;
    // SAFETY: waits for the child made above.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    assert!(libc::WIFEXITED(status), "{status:#x}");
    libc::WEXITSTATUS(status)
}

#[test]
fn bytes_move_through_the_middle_of_a_slot() {
    let _turn = turn();
    let Some((mut ring, uring)) = ring_with(4) else { return };
    let mut memory = Memory::new(2 * GRAIN);
    let registered = register(&uring, memory.range(), Access::LOCAL_WRITE).unwrap();
    let slot = registered.keys.lkey;

    // Out of the middle, across the boundary of 2 MiB, into a file.
    // SAFETY: a new descriptor, owned by the file alone.
    let mut file = unsafe { File::from_raw_fd(libc::memfd_create(c"bytes".as_ptr(), libc::MFD_CLOEXEC)) };
    let sent = pattern(300_001, 1);
    let from = GRAIN - 150_007;
    memory.write(from, &sent);
    assert_eq!(run(&mut ring, write_fixed(&file, memory.at(from), sent.len(), slot)), sent.len() as i32);
    let mut in_file = Vec::new();
    file.rewind().unwrap();
    file.read_to_end(&mut in_file).unwrap();
    assert!(in_file == sent, "the file has what was in the memory");

    // Back out of the file, to another place; the bytes around it stay.
    let to = 700_003;
    memory.write(to - 1, &vec![0xee; sent.len() + 2]);
    file.rewind().unwrap();
    assert_eq!(run(&mut ring, read_fixed(&file, memory.at(to), sent.len(), slot)), sent.len() as i32);
    assert!(memory.read(to, sent.len()) == sent, "the memory has what was in the file");
    assert_eq!([memory.read(to - 1, 1), memory.read(to + sent.len(), 1)], [[0xee], [0xee]]);

    // From a socket.
    let (mut near, far) = UnixStream::pair().unwrap();
    let message = pattern(4099, 2);
    near.write_all(&message).unwrap();
    assert_eq!(run(&mut ring, read_fixed(&far, memory.at(to), message.len(), slot)), message.len() as i32);
    assert!(memory.read(to, message.len()) == message, "the memory has what came by the socket");

    uring.deregister(registered, memory.range()).unwrap();
}

#[test]
fn memory_outside_a_slot_is_out_of_reach() {
    let _turn = turn();
    let Some((mut ring, uring)) = ring_with(4) else { return };
    let memory = Memory::new(2 * GRAIN);
    let registered = register(&uring, memory.part(0, GRAIN), Access::LOCAL_WRITE).unwrap();
    let zeros = zeros();
    let mut at = |offset| run(&mut ring, read_fixed(&zeros, memory.at(offset), 16, registered.keys.lkey));
    assert_eq!(at(GRAIN - 16), 16);
    assert_eq!(at(GRAIN - 15), -libc::EFAULT, "across the end");
    assert_eq!(at(GRAIN), -libc::EFAULT, "after the end");
    uring.deregister(registered, memory.part(0, GRAIN)).unwrap();
}

#[test]
fn a_deregistered_slot_moves_nothing() {
    let _turn = turn();
    let Some((mut ring, uring)) = ring_with(4) else { return };
    let mut memory = Memory::new(GRAIN);
    let zeros = zeros();
    memory.write(MIB, &[7; 16]);

    let registered = register(&uring, memory.range(), Access::default()).unwrap();
    assert_eq!(uring.registered(), 1);
    uring.deregister(registered, memory.range()).unwrap();
    assert_eq!(uring.registered(), 0);
    let slot = registered.keys.lkey;
    assert_eq!(run(&mut ring, read_fixed(&zeros, memory.at(MIB), 16, slot)), -libc::EFAULT);
    assert_eq!(memory.read(MIB, 16), [7; 16]);

    // Nor does a slot that was given to other memory reach the memory it had before.
    let other = Memory::new(GRAIN);
    let again = register(&uring, other.range(), Access::default()).unwrap();
    assert_eq!(again.keys.lkey, slot, "the lowest free slot");
    assert_eq!(run(&mut ring, read_fixed(&zeros, memory.at(MIB), 16, slot)), -libc::EFAULT);
    assert_eq!(memory.read(MIB, 16), [7; 16]);
    uring.deregister(again, other.range()).unwrap();
}

#[test]
fn slots_that_ran_out_come_back() {
    let _turn = turn();
    let Some((_ring, uring)) = ring_with(2) else { return };
    let memory = Memory::new(GRAIN);
    assert_eq!(uring.limits().max_registrations, 2);
    let register = || register(&uring, memory.range(), Access::default());
    let (first, second) = (register().unwrap(), register().unwrap());
    assert_ne!(first.keys.lkey, second.keys.lkey);
    let error = error_of(register());
    assert!(matches!(error, UringError::NoSlot { slots: 2 }), "{error}");
    assert!(error.to_string().contains("all 2 slots"), "{error}");
    uring.deregister(first, memory.range()).unwrap();
    let third = register().unwrap();
    assert!(register().is_err());
    uring.deregister(second, memory.range()).unwrap();
    uring.deregister(third, memory.range()).unwrap();
}

#[test]
fn a_slot_is_not_lost_to_a_failed_registration() {
    let _turn = turn();
    let Some((_ring, uring)) = ring_with(1) else { return };
    let unmapped = {
        let memory = Memory::new(GRAIN);
        // SAFETY: inside the mapping, and nothing uses it; `Memory` unmaps the rest.
        unsafe { libc::mprotect(memory.start.cast(), GRAIN, libc::PROT_NONE) };
        memory
    };
    let error = register(&uring, unmapped.range(), Access::default()).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EFAULT), "the system's own error: {error}");
    assert_eq!(uring.registered(), 0);
    let memory = Memory::new(GRAIN);
    let registered = register(&uring, memory.range(), Access::default()).unwrap();
    uring.deregister(registered, memory.range()).unwrap();
}

#[test]
fn a_registration_over_the_limit_is_refused_not_cut() {
    let Some((_ring, uring)) = ring_with(1) else { return };
    assert_eq!(uring.limits().max_len, 1 << 30);
    let error = error_of(register(&uring, GRAIN..GRAIN + (1 << 30) + GRAIN, Access::default()));
    assert!(matches!(error, UringError::TooLong { wanted } if wanted == (1 << 30) + GRAIN as u64), "{error}");
    assert!(error.to_string().contains("1 GiB"), "{error}");
}

#[test]
fn remote_access_is_refused() {
    let Some((_ring, uring)) = ring_with(1) else { return };
    for access in [Access::REMOTE_READ, Access::REMOTE_WRITE, Access::REMOTE_ATOMIC, Access::WINDOWS] {
        let error = error_of(register(&uring, GRAIN..2 * GRAIN, access));
        assert!(matches!(error, UringError::Remote { .. }), "{error}");
        assert!(error.to_string().contains("no peers"), "{error}");
    }
    assert_eq!(uring.registered(), 0);
}

#[test]
fn a_heap_for_peers_is_refused_when_the_ring_is_attached() {
    let Some((_ring, uring)) = ring_with(1) else { return };
    let config = Config { access: Access::WINDOWS, policy: Policy::Require, serves_children: false, tag: 0 };
    let error = Arenas::new(config).attach(Box::new(uring)).unwrap_err();
    assert!(matches!(error, AttachError::Access { .. }), "{error}");
}

#[test]
fn a_ring_that_cannot_serve_is_refused() {
    let Some((ring, uring)) = ring_with(1) else { return };
    let error = Uring::new(&ring).unwrap_err();
    assert!(matches!(error, UringError::TableExists), "{error}");
    for wanted in [0, Uring::MAX_SLOTS + 1] {
        let error = Uring::with_slots(&ring, wanted).unwrap_err();
        assert!(matches!(error, UringError::SlotCount { .. }), "{error}");
    }
    let single: IoUring = IoUring::builder().setup_single_issuer().build(8).unwrap();
    let error = Uring::new(&single).unwrap_err();
    assert!(matches!(error, UringError::SingleIssuer), "{error}");

    // The table goes with the last handle, and the ring can have another.
    let clone = uring.clone();
    drop(uring);
    assert!(Uring::new(&ring).is_err());
    drop(clone);
    Uring::with_slots(&ring, Uring::MAX_SLOTS).unwrap();
}

#[test]
fn two_threads_never_share_a_slot() {
    const EACH: usize = 24;
    let _turn = turn();
    let Some((mut ring, uring)) = ring_with(2 * EACH as u32) else { return };
    let memories = [Memory::new(GRAIN), Memory::new(GRAIN)];
    let pages = |memory: &Memory| (0..EACH).map(|i| memory.part(i * PAGE, PAGE)).collect::<Vec<_>>();
    let start = Barrier::new(2);
    let registered: Vec<_> = std::thread::scope(|scope| {
        let threads = memories.each_ref().map(|memory| {
            let pages = pages(memory);
            let (uring, start) = (&uring, &start);
            scope.spawn(move || {
                start.wait();
                let register =
                    |page: &Range<usize>| (register(uring, page.clone(), Access::default()).unwrap(), page.clone());
                for _ in 0..50 {
                    for (registered, page) in pages.iter().map(register).collect::<Vec<_>>() {
                        uring.deregister(registered, page).unwrap();
                    }
                }
                pages.iter().map(register).collect::<Vec<_>>()
            })
        });
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(uring.registered() as usize, 2 * EACH);
    let zeros = zeros();
    for (registered, page) in registered {
        // Of two pages that share a slot, one would be out of reach.
        let to = std::ptr::with_exposed_provenance_mut(page.start);
        assert_eq!(run(&mut ring, read_fixed(&zeros, to, PAGE, registered.keys.lkey)), PAGE as i32, "{registered:?}");
        uring.deregister(registered, page).unwrap();
    }
    assert_eq!(uring.registered(), 0);
}

#[test]
fn a_clone_outlives_the_ring_and_the_first_handle() {
    let _turn = turn();
    let Some((ring, uring)) = ring_with(2) else { return };
    let memory = Memory::new(GRAIN);
    let clone = uring.clone();
    assert_eq!(clone.identity(), uring.identity());
    let registered = register(&uring, memory.range(), Access::default()).unwrap();
    drop(uring);
    drop(ring);
    clone.deregister(registered, memory.range()).unwrap();
    let registered = register(&clone, memory.range(), Access::default()).unwrap();
    clone.deregister(registered, memory.range()).unwrap();

    let (_other_ring, other) = ring_with(2).unwrap();
    assert_ne!(other.identity(), clone.identity());
}

#[test]
fn a_ring_of_long_entries_serves_too() {
    let _turn = turn();
    let Some(_) = ring_with(1) else { return };
    let mut ring: IoUring<squeue::Entry128, cqueue::Entry32> = IoUring::builder().build(8).unwrap();
    let uring = Uring::new(&ring).unwrap();
    let memory = Memory::new(GRAIN);
    let registered = register(&uring, memory.range(), Access::default()).unwrap();
    assert_eq!(run(&mut ring, read_fixed(&zeros(), memory.at(MIB), 5, registered.keys.lkey)), 5);
    uring.deregister(registered, memory.range()).unwrap();
}

#[test]
fn arenas_are_reached_by_the_keys_of_their_addresses_until_they_close() {
    let _turn = turn();
    let Some((mut ring, uring)) = ring_with(8) else { return };
    let config = Config { access: Access::default(), policy: Policy::Require, serves_children: false, tag: 0 };
    let heap = Arenas::new(config);
    let before = heap.take(2, 1).unwrap();
    let device = heap.attach(Box::new(uring.clone())).unwrap();
    let after = heap.take(40, 1).unwrap();
    assert!(uring.registered() > 0);

    let zeros = zeros();
    let mut slots = Vec::new();
    for span in [before, after] {
        let len = span.slices * SLICE;
        let start: *mut u8 = std::ptr::with_exposed_provenance_mut(span.address);
        // SAFETY: the span is this test's, and no request is in flight.
        unsafe { start.write_bytes(0xaa, len) };
        let middle = start.wrapping_add(len / 2);
        let slot = device.key(middle).unwrap().lkey;
        assert_eq!(run(&mut ring, read_fixed(&zeros, middle, 1000, slot)), 1000);
        // SAFETY: as above.
        let bytes = unsafe { std::slice::from_raw_parts(start, len) };
        let zero = len / 2..len / 2 + 1000;
        assert!(bytes.iter().enumerate().all(|(i, byte)| *byte == if zero.contains(&i) { 0 } else { 0xaa }));
        slots.push((middle, slot));
    }

    for span in [before, after] {
        heap.give(span.address, span.slices);
    }
    heap.close_all_empty();
    assert_eq!(uring.registered(), 0, "closed with the last span");
    for (middle, slot) in slots {
        assert!(device.key(middle).is_err());
        assert_eq!(run(&mut ring, read_fixed(&zeros, middle, 1000, slot)), -libc::EFAULT);
    }
    heap.detach(device).unwrap();
}

#[test]
fn a_child_of_fork_leaves_the_table_to_its_parent() {
    let _turn = turn();
    let Some((mut ring, uring)) = ring_with(2) else { return };
    let memory = Memory::new(GRAIN);
    let registered = register(&uring, memory.range(), Access::default()).unwrap();
    let in_parent = uring.clone();
    let dropped = in_child(|| {
        // SAFETY: the child's copies of both handles, each ended once: the second is never used in the child again.
        unsafe { drop(std::ptr::read(&in_parent)) };
        drop(uring);
        0
    });
    assert_eq!(dropped, 0);
    let moved = run(&mut ring, read_fixed(&zeros(), memory.start, 16, registered.keys.lkey));
    assert_eq!(moved, 16, "still registered");
    in_parent.deregister(registered, memory.range()).unwrap();
}

const RELEASED: i32 = 0;
const NOT_LIMITED: i32 = 3;
const SKIPPED: i32 = 4;

/// Under a limit of 8 MiB as an ordinary user, 5 MiB can be registered again and again only if each deregistration has
/// released its pages by the time it returns. 50 times on an idle ring, and 50 times with a request in flight on another
/// slot, which on kernels before 6.13 held the pages back.
fn register_again_and_again() -> io::Result<i32> {
    let limit = libc::rlimit { rlim_cur: 8 * MIB as u64, rlim_max: 8 * MIB as u64 };
    // SAFETY: plain system calls with valid arguments, in a process with one thread.
    let limited = unsafe {
        libc::setrlimit(libc::RLIMIT_MEMLOCK, &limit) == 0
            && (libc::geteuid() != 0 || libc::setgroups(0, std::ptr::null()) == 0 && libc::setuid(65534) == 0)
    };
    if !limited {
        return Err(io::Error::last_os_error());
    }
    let Ok(mut ring) = IoUring::new(8) else { return Ok(SKIPPED) };
    let uring = match Uring::new(&ring) {
        Err(UringError::LateRelease) => return Ok(SKIPPED),
        other => other?,
    };
    let memory = Memory::new(18 * MIB);
    // Two halves, since newer kernels count a page once however often it is registered.
    let halves = [memory.part(0, 5 * MIB), memory.part(8 * MIB, 5 * MIB)];
    let page = memory.part(16 * MIB, PAGE);

    // The control: both at once do not fit.
    let first = register(&uring, halves[0].clone(), Access::default())?;
    match register(&uring, halves[1].clone(), Access::default()) {
        Ok(_) => return Ok(NOT_LIMITED),
        Err(error) if error.raw_os_error() == Some(libc::ENOMEM) => {}
        Err(error) => return Err(error),
    }
    uring.deregister(first, halves[0].clone())?;

    let busy = register(&uring, page.clone(), Access::default())?;
    let (reader, mut writer) = io::pipe()?;
    for round in 0..100 {
        if round == 50 {
            let request = read_fixed(&reader, memory.at(16 * MIB), 1, busy.keys.lkey);
            // SAFETY: descriptor and memory stay until the read has completed.
            unsafe { ring.submission().push(&request) }.map_err(io::Error::other)?;
            ring.submit()?;
        }
        let half = &halves[round % 2];
        let registered = register(&uring, half.clone(), Access::default())?;
        uring.deregister(registered, half.clone())?;
    }
    writer.write_all(&[1])?;
    ring.submit_and_wait(1)?;
    uring.deregister(busy, page)?;
    Ok(RELEASED)
}

#[test]
fn pages_are_released_when_deregister_returns() {
    let _turn = turn();
    match in_child(|| register_again_and_again().unwrap_or_else(|error| 100 + error.raw_os_error().unwrap_or(0))) {
        RELEASED => {}
        NOT_LIMITED => println!("skipped: the memlock limit does not bind here (IPC_LOCK)"),
        SKIPPED => println!("skipped: no io_uring for an ordinary user here, or a kernel before 6.13"),
        status => panic!("{}", io::Error::from_raw_os_error(status - 100)),
    }
}
