//! Bounce buffers: a few registered buffers through which every message is copied.

use core::ops::Range;
use core::ptr;
use rdmalloc_arenas::{Access, Keys, Registered, Registrar};
use std::alloc::{GlobalAlloc, Layout, System};
use std::io;
use std::sync::Mutex;

/// Registrations are made of whole huge pages.
const GRAIN: usize = 2 << 20;

/// A pool of registered buffers of one size, in one registration.
pub struct Bounce<R: Registrar> {
    registrar: R,
    registered: Registered,
    memory: *mut u8,
    layout: Layout,
    /// The addresses of the free buffers; a stack, so that the warmest is used first.
    free: Mutex<Vec<usize>>,
}

impl<R: Registrar> Bounce<R> {
    /// Allocates and registers `count` buffers of `size` bytes.
    ///
    /// # Errors
    ///
    /// The registrar's.
    pub fn new(registrar: R, count: usize, size: usize) -> io::Result<Bounce<R>> {
        let len = (count * size).next_multiple_of(GRAIN);
        let layout = Layout::from_size_align(len, GRAIN).expect("a size below isize::MAX");
        // SAFETY: the size is not zero, being a positive multiple of the grain (count and size are positive).
        let memory = unsafe { System.alloc_zeroed(layout) };
        assert!(!memory.is_null(), "out of memory for {len} bytes");
        let range = range(memory, len);
        // SAFETY: just allocated, and freed in `drop` after it was deregistered.
        let registered = unsafe { registrar.register(range, Access::LOCAL_WRITE) }?;
        let free = (0..count).map(|i| memory.addr() + i * size).collect();
        Ok(Bounce { registrar, registered, memory, layout, free: Mutex::new(free) })
    }

    /// Copies the message into a free buffer, passes it and its keys to `send`, and takes the buffer back.
    ///
    /// # Panics
    ///
    /// If the pool ran dry. The message must fit into a buffer.
    pub fn send<T>(&self, message: &[u8], send: impl FnOnce(*mut u8, Keys) -> T) -> T {
        let address = self.free.lock().expect("not poisoned").pop().expect("a free bounce buffer");
        let buffer = self.memory.with_addr(address);
        // SAFETY: a buffer of the pool is at least as long as the message, and taken by this call alone.
        unsafe { ptr::copy_nonoverlapping(message.as_ptr(), buffer, message.len()) };
        let result = send(buffer, self.registered.keys);
        self.free.lock().expect("not poisoned").push(address);
        result
    }
}

impl<R: Registrar> Drop for Bounce<R> {
    fn drop(&mut self) {
        if self.registrar.deregister(self.registered, range(self.memory, self.layout.size())).is_ok() {
            // SAFETY: allocated in `new` with this layout, and no longer registered.
            unsafe { System.dealloc(self.memory, self.layout) }
        }
    }
}

fn range(start: *mut u8, len: usize) -> Range<usize> {
    start.expose_provenance()..start.addr() + len
}
