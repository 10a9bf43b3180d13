//! What a program does with the allocator, in short: blocks of every kind on the global heap and on one of its own, devices,
//! threads that come and go, the end of all that. Every step may be refused, by an error that was promised; the script goes on
//! then, and cleans up.
//!
//! It asks for memory only by calls that can say no: the standard library ends the program where the others are refused.

use crate::hooks::{self, Kind};
use core::alloc::{GlobalAlloc, Layout};
use core::ffi::c_void;
use core::ptr;
use core::sync::atomic::{AtomicPtr, AtomicU8, AtomicUsize, Ordering::SeqCst};
use rdmalloc::{
    Access, AttachError, Budget, Buffer, BuildError, DetachError, Device, Heap, KeyError, Keys, Limits, Memlock,
    Rdmalloc, Refusal, RegisterError, Registered, Registrar, TakeError,
};
use rdmalloc_tests::Ledger;
use std::io;
use std::ops::Range;

const HEAP: Rdmalloc = Rdmalloc::new();
const MIB: usize = 1 << 20;

/// How a device fails, if not by an error: no memory, or busy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Manner {
    /// By a panic.
    Panics = 1,
    /// It registers, and hands out keys that cannot be.
    Lies,
    /// It is gone then, for ever, and what it had registered with it.
    Vanishes,
}

static MANNER: AtomicU8 = AtomicU8::new(0);

impl Manner {
    /// Has all devices fail so from now on.
    pub fn set(self) {
        MANNER.store(self as u8, SeqCst);
    }

    fn is(self) -> bool {
        MANNER.load(SeqCst) == self as u8
    }
}

/// A device whose calls fail when `hooks` says so.
#[derive(Clone)]
pub struct Faulty(pub Ledger);

// SAFETY: there is no device, so nothing touches the memory.
unsafe impl Registrar for Faulty {
    unsafe fn register(&self, memory: Range<usize>, access: Access) -> io::Result<Registered> {
        let fails = hooks::fails(Kind::Register);
        assert!(!fails || !Manner::Panics.is(), "a registrar that panics");
        if fails && !Manner::Lies.is() {
            let code = if Manner::Vanishes.is() { libc::EIO } else { libc::ENOMEM };
            return Err(io::Error::from_raw_os_error(code));
        }
        // SAFETY: the caller's promise.
        let registered = unsafe { self.0.register(memory, access) }?;
        let keys = if fails { Keys { lkey: u32::MAX, rkey: u32::MAX } } else { registered.keys };
        Ok(Registered { keys, ..registered })
    }

    fn deregister(&self, registered: Registered, memory: Range<usize>) -> io::Result<()> {
        if hooks::fails(Kind::Deregister) {
            assert!(!Manner::Panics.is(), "a registrar that panics");
            return Err(io::Error::from_raw_os_error(libc::EBUSY));
        }
        self.0.deregister(registered, memory)
    }

    fn limits(&self) -> Limits {
        self.0.limits()
    }

    fn memlock(&self) -> Option<Memlock> {
        None
    }

    fn is_memlocked(&self) -> bool {
        false
    }

    fn is_lost(&self) -> bool {
        Manner::Vanishes.is() && hooks::has_failed(Kind::Register)
    }

    fn name(&self) -> &str {
        "faulty"
    }
}

/// What the script was refused.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Refused {
    pub blocks: usize,
    pub heaps: usize,
    pub attaches: usize,
    pub detaches: usize,
    pub threads: usize,
    /// Blocks that a device does not reach.
    pub keys: usize,
}

/// Ends the faults, and the test.
#[track_caller]
fn broken(what: &str, error: &dyn core::fmt::Display) -> ! {
    hooks::disarm();
    hooks::let_go();
    panic!("{what}: {error}")
}

fn is_of_memory(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::OutOfMemory || error.raw_os_error() == Some(libc::ENOMEM)
}

fn check_register(error: &RegisterError) {
    let is_told = match &error.reason {
        Refusal::Device(source) if Manner::Panics.is() => source.to_string().contains("panicked"),
        Refusal::Device(source) if Manner::Lies.is() => source.kind() == io::ErrorKind::InvalidData,
        Refusal::Device(source) if Manner::Vanishes.is() => source.raw_os_error() == Some(libc::EIO),
        Refusal::Device(source) => is_of_memory(source),
        // What devices do not let go of counts still.
        Refusal::OverBudget { limit, registered } => hooks::has_failed(Kind::Deregister) && registered <= limit,
        _ => false,
    };
    if !is_told || error.device != "faulty" || error.wanted == 0 || error.devices == 0 {
        broken("not the error of a device that is out of memory", error);
    }
}

fn check_take(error: &TakeError) {
    match error {
        TakeError::NoMemory { wanted, source } if *wanted > 0 && is_of_memory(source) => {}
        TakeError::Register(error) => check_register(error),
        other => broken("not the error of a block", other),
    }
}

fn check_attach(error: &AttachError) {
    match error {
        AttachError::NoMemory(source) if is_of_memory(source) => {}
        AttachError::Register(error) => check_register(error),
        other => broken("not the error of an attachment", other),
    }
}

/// A block of the global heap, or none.
struct Block {
    start: AtomicPtr<u8>,
    layout: Layout,
    mark: u8,
}

impl Block {
    fn new(size: usize, align: usize, mark: u8, zeroed: bool) -> Block {
        let layout = Layout::from_size_align(size, align).expect("a constant");
        // SAFETY: the size is not 0.
        let start = unsafe { if zeroed { HEAP.alloc_zeroed(layout) } else { HEAP.alloc(layout) } };
        let block = Block { start: AtomicPtr::new(start), layout, mark };
        if !start.is_null() {
            if !start.addr().is_multiple_of(align) {
                broken("a block", &"is not aligned");
            }
            // SAFETY: the block is this one's.
            let bytes = unsafe { core::slice::from_raw_parts_mut(start, size) };
            if zeroed && bytes.iter().any(|byte| *byte != 0) {
                broken("a block", &"is not zero");
            }
            bytes.fill(mark);
        }
        block
    }

    fn start(&self) -> *mut u8 {
        self.start.load(SeqCst)
    }

    fn is_none(&self) -> bool {
        self.start().is_null()
    }

    fn check(&self, len: usize) {
        if !self.is_none() {
            // SAFETY: the block is this one's, at least this long.
            let bytes = unsafe { core::slice::from_raw_parts(self.start(), len) };
            if bytes.iter().any(|byte| *byte != self.mark) {
                broken("a block", &"was changed");
            }
        }
    }

    /// Grows or shrinks it; whether that was to be had. If not, it is as it was.
    fn resize(&mut self, size: usize) -> bool {
        if self.is_none() {
            return false;
        }
        let kept = size.min(self.layout.size());
        // SAFETY: the block is this one's, of this layout.
        let start = unsafe { HEAP.realloc(self.start(), self.layout, size) };
        if start.is_null() {
            self.check(self.layout.size());
            return false;
        }
        self.start.store(start, SeqCst);
        self.layout = Layout::from_size_align(size, self.layout.align()).expect("a constant");
        self.check(kept);
        // SAFETY: the block is this one's.
        unsafe { start.write_bytes(self.mark, size) };
        true
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.check(self.layout.size());
        if !self.is_none() {
            // SAFETY: the block is this one's, of this layout.
            unsafe { HEAP.dealloc(self.start(), self.layout) };
        }
    }
}

/// Blocks of every kind that the global heap has.
const SIZES: [usize; 12] = [1, 64, 500, 1024, 3000, 8000, 20_000, 50_000, 65_536, 200_000, MIB, 5 * MIB / 2];

struct Script<'a> {
    ledgers: &'a [Ledger; 3],
    refused: Refused,
    devices: [Option<Device>; 2],
}

/// Runs it. `ledgers`: the books of the devices.
pub fn run(ledgers: &[Ledger; 3]) -> Refused {
    let mut script = Script { ledgers, refused: Refused::default(), devices: [None; 2] };
    script.run();
    script.refused
}

impl Script<'_> {
    fn run(&mut self) {
        let before = self.blocks(1);
        self.devices[0] = self.attach(|device| HEAP.attach(device), 0);
        let between = self.blocks(2);
        self.look(&before, 0);
        self.look(&between, 0);
        self.own_heap();
        self.devices[1] = self.attach(|device| HEAP.attach(device), 1);
        let after = self.blocks(3);
        let mut growing = self.block(100, 8, 4, false);
        for size in [3000, 70_000, 9 * MIB / 2, 7 * MIB, 100_000, 10] {
            let done = growing.is_none() || growing.resize(size);
            self.refused.blocks += usize::from(!done);
        }
        for blocks in [&before, &between, &after] {
            self.look(blocks, 0);
            self.look(blocks, 1);
        }
        drop(between);
        HEAP.trim();
        self.threads();
        drop((before, growing));
        self.detach(|device| HEAP.detach(device), 0);
        HEAP.trim();
        drop(after);
        self.detach(|device| HEAP.detach(device), 1);
        HEAP.trim();
    }

    fn block(&mut self, size: usize, align: usize, mark: u8, zeroed: bool) -> Block {
        let block = Block::new(size, align, mark, zeroed);
        self.refused.blocks += usize::from(block.is_none());
        block
    }

    fn blocks(&mut self, mark: u8) -> [Block; SIZES.len()] {
        let mut index = 0;
        SIZES.map(|size| {
            index += 1;
            self.block(size, 1 << (index % 8), mark, index % 2 == 0)
        })
    }

    /// Counts those that a device does not reach.
    fn look(&mut self, blocks: &[Block], device: usize) {
        if let Some(device) = self.devices[device] {
            let missed = blocks.iter().filter(|block| !block.is_none() && device.key(block.start()).is_err());
            self.refused.keys += missed.count();
        }
    }

    fn attach(&mut self, attach: impl FnOnce(Faulty) -> Result<Device, AttachError>, ledger: usize) -> Option<Device> {
        let result = attach(Faulty(self.ledgers[ledger].clone()));
        self.refused.attaches += usize::from(result.is_err());
        result.inspect_err(check_attach).ok()
    }

    fn detach(&mut self, detach: impl FnOnce(Device) -> Result<(), DetachError>, device: usize) {
        let Some(device) = self.devices[device].take() else { return };
        match detach(device) {
            Ok(()) => {}
            Err(DetachError::Kept { arenas, bytes, .. }) if arenas > 0 && bytes > 0 => self.refused.detaches += 1,
            Err(other) => broken("not the error of a detach", &other),
        }
    }

    fn own_heap(&mut self) {
        for access in [Access::LOCAL_WRITE, Access::REMOTE_WRITE] {
            // So little that arenas are small.
            let budget = Budget { bytes: 40 << 20, ..Budget::NONE };
            let heap = match Heap::builder().access(access).budget(budget).build() {
                Ok(heap) => heap,
                Err(BuildError::NoMemory(source)) if is_of_memory(&source) => {
                    self.refused.heaps += 1;
                    continue;
                }
                Err(other) => broken("not the error of a heap", &other),
            };
            let early = self.buffer(&heap, 3 * MIB);
            let device = self.attach(|device| heap.attach(device), 2);
            let buffers = SIZES.map(|size| self.buffer(&heap, size));
            for buffer in buffers.iter().flatten() {
                let key = device.map_or(Ok(()), |device| device.key(buffer.as_ptr()).map(drop));
                if key.is_err() && !(Manner::Vanishes.is() && key == Err(KeyError::Lost)) {
                    broken("a buffer", &"has no key, and was handed out");
                }
            }
            let (kept, gone) = buffers.split_at(6);
            heap.trim();
            drop(heap);
            let _ = (kept, gone, early);
        }
    }

    fn buffer(&mut self, heap: &Heap, size: usize) -> Option<Buffer> {
        let buffer = if size.is_multiple_of(2) { heap.buffer(size) } else { heap.buffer_zeroed(size) };
        self.refused.blocks += usize::from(buffer.is_err());
        buffer.inspect_err(check_take).ok()
    }

    /// Two threads, one after the other: the second frees what the first has left.
    fn threads(&mut self) {
        let left: [Block; 4] = [100, 3000, 50_000, 200_000].map(|size| self.block(size, 8, 9, false));
        let work = Work { left: &left, refused: AtomicUsize::new(0) };
        for _ in 0..2 {
            let mut thread = 0;
            // SAFETY: the thread is waited for, so what it is given outlives it.
            let started = unsafe {
                let argument = (&raw const work).cast_mut().cast();
                libc::pthread_create(&raw mut thread, ptr::null(), work_there, argument)
            };
            if started == 0 {
                // SAFETY: started above, and not waited for yet.
                unsafe { libc::pthread_join(thread, ptr::null_mut()) };
            } else {
                self.refused.threads += 1;
            }
        }
        self.refused.blocks += work.refused.load(SeqCst);
    }
}

struct Work<'a> {
    left: &'a [Block; 4],
    refused: AtomicUsize,
}

/// Frees what is there, and leaves blocks of its own in place of it.
extern "C" fn work_there(argument: *mut c_void) -> *mut c_void {
    // SAFETY: who started the thread waits for it.
    let work = unsafe { &*argument.cast::<Work<'_>>() };
    for place in work.left {
        // SAFETY: the block is of this layout, and this thread's meanwhile.
        unsafe {
            let old = place.start();
            place.check(place.layout.size());
            if !old.is_null() {
                HEAP.dealloc(old, place.layout);
            }
            let new = HEAP.alloc(place.layout);
            if new.is_null() {
                work.refused.fetch_add(1, SeqCst);
            } else {
                new.write_bytes(place.mark, place.layout.size());
            }
            place.start.store(new, SeqCst);
        }
    }
    ptr::null_mut()
}
