//! What `tests/fast_path.rs` takes apart and counts: single operations on the global heap, and on one that a program makes, each in
//! a function of its own, with sizes that the compiler knows, as in most programs.
//!
//! `fast_path NAME COUNT` runs the operation NAME that often.

use core::ops::Range;
use core::ptr;
use rdmalloc::{Access, Buffer, Device, Heap, Keys, Rdmalloc, Registered, Registrar};
use std::alloc::{Layout, alloc, dealloc, realloc};
use std::hint::black_box;
use std::io;

#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

/// A device that takes everything and does nothing.
struct Null;

// SAFETY: nothing ever reaches the memory.
unsafe impl Registrar for Null {
    unsafe fn register(&self, _memory: Range<usize>, _access: Access) -> io::Result<Registered> {
        Ok(Registered { keys: Keys { lkey: 1, rkey: 2 }, handle: 0 })
    }

    fn deregister(&self, _registered: Registered, _memory: Range<usize>) -> io::Result<()> {
        Ok(())
    }

    fn is_memlocked(&self) -> bool {
        false
    }

    fn name(&self) -> &str {
        "null"
    }
}

const fn layout(size: usize) -> Layout {
    match Layout::from_size_align(size, 8) {
        Ok(layout) => layout,
        Err(_) => panic!("no such size"),
    }
}

/// The functions of one size.
macro_rules! operations {
    ($size:literal, $alloc:ident, $dealloc:ident, $pair:ident) => {
        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $alloc() -> *mut u8 {
            // SAFETY: the size is not zero.
            unsafe { alloc(const { layout($size) }) }
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        unsafe extern "C" fn $dealloc(block: *mut u8) {
            // SAFETY: the caller's block is of this layout.
            unsafe { dealloc(block, const { layout($size) }) }
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $pair(count: usize) {
            for _ in 0..count {
                let layout = const { layout($size) };
                // SAFETY: the size is not zero, and the block goes with its layout. (`black_box` keeps the pair.)
                unsafe { dealloc(black_box(alloc(layout)), layout) };
            }
        }
    };
}

operations!(16, alloc_16, dealloc_16, pair_16);
operations!(256, alloc_256, dealloc_256, pair_256);
operations!(4096, alloc_4096, dealloc_4096, pair_4096);
operations!(65536, alloc_65536, dealloc_65536, pair_65536);
operations!(4194304, alloc_4m, dealloc_4m, pair_4m);

/// The size is not known to the compiler here.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn alloc_any(size: usize) -> *mut u8 {
    // SAFETY: no caller asks for no bytes.
    unsafe { alloc(Layout::from_size_align_unchecked(size, 8)) }
}

#[unsafe(no_mangle)]
#[inline(never)]
unsafe extern "C" fn dealloc_any(block: *mut u8, size: usize) {
    // SAFETY: the caller's block is of this layout.
    unsafe { dealloc(block, Layout::from_size_align_unchecked(size, 8)) }
}

/// Within a class: nothing to do.
#[unsafe(no_mangle)]
#[inline(never)]
unsafe extern "C" fn realloc_in_place(block: *mut u8, size: usize) -> *mut u8 {
    // SAFETY: the caller's block is of the first layout.
    unsafe { realloc(block, const { layout(250) }, size) }
}

#[unsafe(no_mangle)]
#[inline(never)]
fn key(device: Device, block: *const u8) -> u64 {
    device.key(block).map_or(0, |keys| keys.lkey.into())
}

/// The size of buffers is not known to the compiler in most programs.
#[unsafe(no_mangle)]
#[inline(never)]
fn take_buffer(heap: &Heap, size: usize) -> Option<Buffer> {
    heap.buffer(size).ok()
}

#[unsafe(no_mangle)]
#[inline(never)]
fn drop_buffer(buffer: Buffer) {
    drop(buffer);
}

/// A buffer taken, its key looked up, given back.
#[unsafe(no_mangle)]
#[inline(never)]
fn buffer_65536(heap: &Heap, device: Device, count: usize) {
    for _ in 0..count {
        if let Ok(buffer) = heap.buffer(64 << 10) {
            black_box(device.key(buffer.as_ptr()).is_ok());
            drop(black_box(buffer));
        }
    }
}

/// As above, of a span of its own.
#[unsafe(no_mangle)]
#[inline(never)]
fn buffer_1m(heap: &Heap, device: Device, count: usize) {
    for _ in 0..count {
        if let Ok(buffer) = heap.buffer(1 << 20) {
            black_box(device.key(buffer.as_ptr()).is_ok());
            drop(black_box(buffer));
        }
    }
}

/// A heap with that access, and a device.
fn heap(access: Access) -> (Heap, Device) {
    let heap = Heap::builder().access(access).build().expect("a heap");
    let device = heap.attach(Null).expect("nothing can fail");
    (heap, device)
}

/// A thousand out, then in, each by a call.
fn batch(count: usize, alloc: extern "C" fn() -> *mut u8, dealloc: unsafe extern "C" fn(*mut u8)) {
    const AT_ONCE: usize = 1000;
    let (alloc, dealloc) = (black_box(alloc), black_box(dealloc));
    let mut blocks = [ptr::null_mut(); AT_ONCE];
    for _ in 0..count / AT_ONCE {
        blocks.iter_mut().for_each(|block| *block = alloc());
        // SAFETY: each is of this layout, and was just taken.
        blocks.iter().for_each(|block| unsafe { dealloc(*block) });
    }
}

/// Pairs of 16 bytes to 1 KiB, each by a call.
fn any(count: usize) {
    for turn in 0..count {
        let size = 16 + (turn & 127) * 8;
        // SAFETY: the block is of this layout, and was just taken.
        unsafe { dealloc_any(alloc_any(size), size) };
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, name, count] = &arguments[..] else { panic!("usage: fast_path NAME COUNT") };
    let count = count.parse().expect("COUNT is a number");
    let block = alloc_256();
    match &name[..] {
        "pair_16" => pair_16(count),
        "pair_256" => pair_256(count),
        "pair_4096" => pair_4096(count),
        "pair_65536" => pair_65536(count),
        "pair_4m" => pair_4m(count),
        "pair_any" => any(count),
        "batch_16" => batch(count, alloc_16, dealloc_16),
        "batch_256" => batch(count, alloc_256, dealloc_256),
        "batch_4096" => batch(count, alloc_4096, dealloc_4096),
        "batch_65536" => batch(count, alloc_65536, dealloc_65536),
        "batch_4m" => batch(count, alloc_4m, dealloc_4m),
        // SAFETY: the block is of 256 bytes, or of 250, which is in the same class.
        "realloc" => (0..count).for_each(|_| assert!(unsafe { realloc_in_place(block, black_box(256)) } == block)),
        "key" => {
            let device = HEAP.attach(Null).expect("nothing can fail");
            (0..count).for_each(|_| assert_eq!(key(device, block), 1));
        }
        "buffer_65536" => {
            let (heap, device) = heap(Access::LOCAL_WRITE);
            buffer_65536(&heap, device, count);
        }
        "buffer_65536_remote" => {
            let (heap, device) = heap(Access::REMOTE_WRITE);
            buffer_65536(&heap, device, count);
        }
        "buffer_1m" => {
            let (heap, device) = heap(Access::LOCAL_WRITE);
            buffer_1m(&heap, device, count);
        }
        "buffer_any" => {
            let (heap, _) = heap(Access::LOCAL_WRITE);
            for turn in 0..count {
                take_buffer(&heap, 64 + (turn & 127) * 512).into_iter().for_each(drop_buffer);
            }
        }
        _ => panic!("no operation {name}"),
    }
    // SAFETY: of this layout.
    unsafe { dealloc_256(block) };
}
