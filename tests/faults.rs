//! Faults that others had, of which no other test here is the witness; `FAULTS.md` has the table of all of them. Heaps over registrars
//! that look at what they are told.

use allocator_api2::alloc::Allocator;
use rdmalloc::{Access, Budget, Buffer, Heap, Keys, Policy, Rdmalloc, Registered, Registrar};
use std::alloc::{GlobalAlloc, Layout};
use std::io;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const MIB: usize = 1 << 20;

/// What a device was told.
#[derive(Default)]
struct Told {
    live: Mutex<Vec<(u64, Range<usize>, Access)>>,
    next: AtomicU64,
    /// Registrations whose memory was not there any more when they were ended.
    ended_late: AtomicU64,
    /// Registrars that were dropped while they had registrations.
    dropped_early: AtomicU64,
    /// Somebody to wait for, in each registration.
    gate: Mutex<Option<(Sender<()>, Receiver<()>)>>,
    /// Every registration is refused.
    refuses: AtomicBool,
}

impl Told {
    fn live(&self) -> Vec<(Range<usize>, Access)> {
        self.live.lock().unwrap().iter().map(|(_, memory, access)| (memory.clone(), *access)).collect()
    }
}

/// A registrar that remembers it. One of several may be the same device.
struct Witness {
    told: Arc<Told>,
    identity: Option<NonZeroUsize>,
}

impl Witness {
    fn new() -> (Witness, Arc<Told>) {
        let told = Arc::<Told>::default();
        (Witness { told: told.clone(), identity: None }, told)
    }

    fn of(identity: usize) -> (Witness, Arc<Told>) {
        let (mut witness, told) = Witness::new();
        witness.identity = NonZeroUsize::new(identity);
        (witness, told)
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        self.told.dropped_early.fetch_add(self.told.live().len() as u64, Relaxed);
    }
}

/// Whether memory can be read, as the kernel has it.
fn is_mapped(address: usize) -> bool {
    let mut byte = 0u8;
    let one = |base: *mut libc::c_void| libc::iovec { iov_base: base, iov_len: 1 };
    let (to, from) = (one((&raw mut byte).cast()), one(std::ptr::without_provenance_mut(address)));
    // SAFETY: the kernel writes at most one byte, to `byte`, and answers EFAULT where the other is not.
    unsafe { libc::process_vm_readv(libc::getpid(), &to, 1, &from, 1, 0) == 1 }
}

// SAFETY: there is no device, so nothing touches the memory.
unsafe impl Registrar for Witness {
    unsafe fn register(&self, memory: Range<usize>, access: Access) -> io::Result<Registered> {
        if let Some((begun, go_on)) = &*self.told.gate.lock().unwrap() {
            let _ = begun.send(());
            let _ = go_on.recv();
        }
        if self.told.refuses.load(Relaxed) {
            return Err(io::Error::from_raw_os_error(libc::ENOMEM));
        }
        let handle = self.told.next.fetch_add(1, Relaxed) + 1;
        self.told.live.lock().unwrap().push((handle, memory, access));
        let key = handle as u32;
        Ok(Registered { keys: Keys { lkey: key, rkey: key }, handle })
    }

    fn deregister(&self, registered: Registered, memory: Range<usize>) -> io::Result<()> {
        let is_there = is_mapped(memory.start) && is_mapped(memory.end - 1);
        self.told.ended_late.fetch_add(u64::from(!is_there), Relaxed);
        self.told.live.lock().unwrap().retain(|(handle, ..)| *handle != registered.handle);
        Ok(())
    }

    fn identity(&self) -> Option<NonZeroUsize> {
        self.identity
    }

    fn is_memlocked(&self) -> bool {
        false
    }

    fn pins_pages(&self) -> bool {
        false
    }

    fn name(&self) -> &str {
        "witness"
    }
}

#[test]
fn memory_is_there_until_its_registration_has_ended() {
    let (witness, told) = Witness::new();
    let heap = Heap::builder().build().unwrap();
    let device = heap.attach(witness).unwrap();
    drop(heap.buffer(40 * MIB).unwrap());
    assert!(heap.trim().closed_arenas > 0);
    assert!(!is_mapped(8), "the kernel answers");
    // By the detach, by the end of the heap, and as an arena is undone that another device refuses.
    let buffer = heap.buffer(MIB).unwrap();
    heap.detach(device).unwrap();
    let (second, refusing) = (Witness::new(), Witness::new());
    heap.attach_all([second.0, refusing.0]).unwrap();
    refusing.1.refuses.store(true, Relaxed);
    heap.buffer(50 * MIB).unwrap_err();
    assert_eq!(second.1.live().len(), 1);
    drop((heap, buffer));
    for told in [told, second.1, refusing.1] {
        assert_eq!((told.ended_late.load(Relaxed), told.live().len()), (0, 0));
    }
}

#[test]
fn a_protection_domain_is_let_go_after_its_last_registration() {
    let heap = Heap::builder().build().unwrap();
    let buffers = [10 * MIB, 40 * MIB].map(|size| heap.buffer(size).unwrap());
    let (witness, detached) = Witness::new();
    let device = heap.attach(witness).unwrap();
    assert_eq!(detached.live().len(), 2);
    heap.detach(device).unwrap();
    let (witness, ended) = Witness::new();
    heap.attach(witness).unwrap();
    drop((heap, buffers));
    for told in [detached, ended] {
        assert_eq!((told.dropped_early.load(Relaxed), told.live().len()), (0, 0));
        assert_eq!(Arc::strong_count(&told), 1, "the registrar is kept");
    }
}

#[test]
fn what_is_registered_is_whole_large_pages_whatever_was_asked_for() {
    let (witness, told) = Witness::new();
    let heap = Heap::builder().build().unwrap();
    heap.attach(witness).unwrap();
    let sizes = [1, 65_537, 33 * MIB + 1, 35 * MIB - 1, 67 * MIB + 4097];
    let buffers = sizes.map(|size| heap.buffer(size).unwrap());
    let registered = told.live();
    for (memory, _) in &registered {
        assert!(memory.start.is_multiple_of(2 * MIB) && memory.end.is_multiple_of(2 * MIB), "{memory:x?}");
    }
    for buffer in &buffers {
        let (start, end) = (buffer.as_ptr().addr(), buffer.as_ptr().addr() + buffer.capacity());
        assert!(registered.iter().any(|(memory, _)| memory.start <= start && end <= memory.end));
    }
}

/// Who allocates has blocks freed by a thread that only frees, round after round: nothing may pile up.
fn hand_over<B: Send + 'static>(take: impl Fn() -> B, taken: impl Fn() -> usize) {
    let (give, blocks) = channel::<Vec<B>>();
    let (done, freed) = channel();
    let freeing = std::thread::spawn(move || {
        for blocks in blocks {
            drop(blocks);
            done.send(()).unwrap();
        }
    });
    let mut most = 0;
    for round in 0..200 {
        give.send((0..100).map(|_| take()).collect()).unwrap();
        freed.recv().unwrap();
        if round == 20 {
            most = taken();
        }
    }
    let after = taken();
    assert!(after <= most + MIB, "{} KiB are taken, after some rounds it was {}", after >> 10, most >> 10);
    drop(give);
    freeing.join().unwrap();
}

/// A block of the global heap, which is not this program's own allocator.
struct Block(*mut u8);

// SAFETY: a block is its value's alone.
unsafe impl Send for Block {}

impl Block {
    const LAYOUT: Layout = Layout::new::<[u8; 4000]>();

    fn take() -> Block {
        // SAFETY: the layout has a size.
        Block(unsafe { Rdmalloc::new().alloc(Block::LAYOUT) })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and the value's.
        unsafe { Rdmalloc::new().dealloc(self.0, Block::LAYOUT) }
    }
}

#[test]
fn blocks_that_a_thread_frees_which_never_allocates_serve_again() {
    let heap = Heap::builder().build().unwrap();
    hand_over(|| heap.buffer(4000).unwrap(), || heap.stats().taken_bytes);
    hand_over(Block::take, || Rdmalloc::new().stats().taken_bytes);
}

#[test]
fn a_heap_is_registered_for_what_it_is_and_no_other_is_because_of_it() {
    let accesses = [Access::LOCAL_WRITE, Access::REMOTE_READ, Access::REMOTE_WRITE];
    let of = |access| {
        let heap = Heap::builder().access(access).build().unwrap();
        let buffer: Buffer = heap.buffer(MIB).unwrap();
        let (witness, told) = Witness::of(0xACCE55);
        let device = heap.attach(witness).unwrap();
        (heap, buffer, device, told)
    };
    // One protection domain for all of them.
    let heaps = accesses.map(of);
    let (witness, global) = Witness::of(0xACCE55);
    let block = Block::take();
    let device = Rdmalloc::new().attach(witness).unwrap();
    for (access, (_, buffer, device, told)) in accesses.iter().zip(&heaps) {
        let registered = told.live();
        assert!(registered.iter().all(|(_, with)| with == access), "{access:?}: {registered:x?}");
        let start = buffer.as_ptr().addr();
        assert!(registered.iter().any(|(memory, _)| memory.contains(&start)) && device.key(buffer.as_ptr()).is_ok());
    }
    assert!(!global.live().is_empty() && global.live().iter().all(|(_, with)| *with == Access::LOCAL_WRITE));
    drop(block);
    Rdmalloc::new().detach(device).unwrap();
}

#[test]
fn keys_are_found_and_blocks_change_hands_while_a_device_registers() {
    let (witness, told) = Witness::new();
    let heap = Heap::builder().policy(Policy::Prefer).budget(Budget::NONE).build().unwrap();
    let device = heap.attach(witness).unwrap();
    let buffer = heap.buffer(MIB).unwrap();
    let ((begun, has_begun), (go_on, wait)) = (channel(), channel());
    *told.gate.lock().unwrap() = Some((begun, wait));
    let large = heap.clone();
    let opener = std::thread::spawn(move || large.buffer(40 * MIB).unwrap());
    has_begun.recv().unwrap();
    let (report, answer) = channel();
    let looker = std::thread::spawn(move || {
        let found = (0..1000).all(|_| device.key(buffer.as_ptr()).is_ok());
        let others: Vec<Buffer> = (0..100).map(|_| heap.buffer(1000).unwrap()).collect();
        drop((buffer, others));
        report.send(found).unwrap();
    });
    // Long enough for any machine; who waits for the device would wait for ever.
    let found = answer.recv_timeout(Duration::from_secs(60));
    go_on.send(()).unwrap();
    assert_eq!(found, Ok(true), "it waits for the device");
    looker.join().unwrap();
    drop(opener.join().unwrap());
}

#[test]
fn memory_without_a_device_is_there_only_as_it_is_touched() {
    let setting = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    if setting.contains("[always]") {
        println!("skipped: this system makes huge pages of what nobody asked to be huge");
        return;
    }
    let heap = Heap::builder().build().unwrap();
    let mut buffer = heap.buffer(24 * MIB).unwrap();
    buffer.spare_capacity_mut().iter_mut().step_by(2 * MIB).for_each(|byte| _ = byte.write(1));
    let arenas = heap.arenas();
    let resident = arenas[0].resident().unwrap();
    assert!(resident.resident < MIB && resident.huge == 0, "{resident:?} for a byte in each 2 MiB");
}

#[test]
fn a_block_that_shrank_shows_nothing_old_as_it_grows_zeroed() {
    let heap = Heap::builder().build().unwrap();
    let (mut in_place, heap) = (0, &heap);
    for (long, short) in [(1000, 600), (6000, 3500), (60_000, 40_000), (2 * MIB, 200_000), (5 * MIB, MIB)] {
        let [long, short] = [long, short].map(|size| Layout::from_size_align(size, 8).unwrap());
        // SAFETY: the block is the heap's, of the layout that it was last given; as long as what is written and read.
        unsafe {
            let block = heap.allocate(long).unwrap().cast::<u8>();
            block.write_bytes(0xff, long.size());
            let shorter = heap.shrink(block, long, short).unwrap().cast::<u8>();
            let longer = heap.grow_zeroed(shorter, short, long).unwrap().cast::<u8>();
            in_place += usize::from(block == longer);
            let all = core::slice::from_raw_parts(longer.as_ptr(), long.size());
            let old = all.iter().take_while(|byte| **byte == 0xff).count();
            assert!(old == short.size() && all[old..].iter().all(|byte| *byte == 0), "{long:?}: {old} bytes are kept");
            heap.deallocate(longer, long);
        }
    }
    assert!(in_place >= 3, "most grow where they are");
}
