//! What a device needs to know of memory, where one is attached; nothing where none is.

/// A scatter-gather entry, as it is put into a work request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    /// Where the bytes begin.
    pub address: u64,
    /// How many there are.
    pub length: u32,
    /// By which key the device reaches them; 0 without a device.
    pub key: u32,
}

/// How memory is reached. A type rather than a value, so that nothing is measured that a program would not have.
pub trait Reach: 'static {
    /// The entry of some bytes.
    fn entry(bytes: &[u8]) -> Entry;

    /// Ends the program if the device does not reach the block.
    ///
    /// Workloads ask this of a few blocks in many. That all are reached, the heap's policy sees to: memory that is not
    /// registered is not served.
    fn check(start: *const u8, len: usize);
}

/// No device: every allocator, and ours without one.
pub struct Local;

impl Reach for Local {
    #[inline]
    fn entry(bytes: &[u8]) -> Entry {
        Entry { address: bytes.as_ptr().addr() as u64, length: bytes.len() as u32, key: 0 }
    }

    fn check(start: *const u8, len: usize) {
        look(start, len);
    }
}

/// Nothing to see, but a call: as with a device, so that the compiler makes the same of what is around it.
#[cold]
#[inline(never)]
extern "C" fn look(start: *const u8, len: usize) {
    std::hint::black_box((start, len));
}

#[cfg(feature = "attached")]
pub use attached::{Attached, attach};

#[cfg(feature = "attached")]
mod attached {
    use super::{Entry, Reach};
    use io_uring::IoUring;
    use rdmalloc::registrar::uring::Uring;
    use rdmalloc::{Device, Memlock, Policy, Rdmalloc};
    use std::sync::OnceLock;

    static DEVICE: OnceLock<Device> = OnceLock::new();

    /// What a run may need to pin, in bytes.
    const WANTED: u64 = 2 << 30;

    /// rdmalloc with an io_uring attached. [`attach`] comes first.
    pub struct Attached;

    impl Reach for Attached {
        #[inline]
        fn entry(bytes: &[u8]) -> Entry {
            let device = DEVICE.get().expect("attached");
            let sge = device.sge(bytes).expect("registered");
            Entry { address: sge.addr(), length: sge.length(), key: sge.lkey() }
        }

        fn check(start: *const u8, len: usize) {
            look(start, len);
        }
    }

    /// Ends the program if the device does not reach the block. Not by a panic that could unwind, which would make more code that drops
    /// blocks.
    #[cold]
    #[inline(never)]
    extern "C" fn look(start: *const u8, len: usize) {
        let device = DEVICE.get().expect("attached");
        let end = start.wrapping_add(len - 1);
        for place in [start, end] {
            if let Err(why) = device.key(place) {
                panic!("{len} bytes at {start:?} are not registered: {why}");
            }
        }
        assert!(device.is_one_registration(start.addr(), end.addr()), "{len} bytes in two registrations");
    }

    /// Attaches an io_uring to the global heap, which from now on serves no memory that is not registered.
    ///
    /// # Errors
    ///
    /// Why that cannot be done here, and what would help.
    pub fn attach(heap: Rdmalloc) -> Result<(), String> {
        let limit = Memlock::now();
        if limit.allows() < WANTED {
            return Err(format!(
                "{limit}, and {} KiB may be needed: raise it (ulimit -l unlimited, LimitMEMLOCK=infinity, docker --ulimit \
                 memlock=-1), or run as root",
                WANTED >> 10
            ));
        }
        let ring = IoUring::new(8).map_err(|error| format!("no io_uring: {error}"))?;
        let uring = Uring::new(&ring).map_err(|error| error.to_string())?;
        heap.set_policy(Policy::Require);
        let device = heap.attach(uring).map_err(|error| error.to_string())?;
        DEVICE.set(device).map_err(|_| "attached already".to_owned())
    }
}
