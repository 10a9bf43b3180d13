//! The very end of threads: destructors of pthread keys that allocate, in every round that there is.

use rdmalloc::Rdmalloc;
use std::ffi::c_void;
use std::sync::OnceLock;
use std::thread;

#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

static KEY: OnceLock<libc::pthread_key_t> = OnceLock::new();

fn set(rounds_left: usize) {
    // SAFETY: the key is never deleted; the value is a number to its destructor.
    unsafe { libc::pthread_setspecific(KEY.get().copied().unwrap_or_default(), rounds_left as *const c_void) };
}

/// Bytes of the process that are in memory.
fn resident() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

/// Uses memory of several kinds, and has itself called again.
extern "C" fn late(rounds_left: *mut c_void) {
    let blocks: Vec<_> = [10, 1000, 9000, 70_000].map(|size| vec![1u8; size]).into();
    assert_eq!(blocks.iter().flatten().filter(|byte| **byte == 1).count(), 80_010);
    if rounds_left.addr() > 1 {
        set(rounds_left.addr() - 1);
    }
}

#[test]
fn destructors_of_keys_that_allocate_to_the_last_round_lose_nothing() {
    KEY.get_or_init(|| {
        let mut key = 0;
        // SAFETY: the pointer is to a local; the destructor has the signature.
        assert_eq!(unsafe { libc::pthread_key_create(&raw mut key, Some(late)) }, 0);
        key
    });
    let threads = |count| {
        for _ in 0..count {
            // The four rounds that POSIX demands, and one more than there are.
            thread::spawn(|| set(5)).join().unwrap();
        }
        HEAP.trim();
        (HEAP.stats().taken_bytes, resident())
    };
    let before = threads(20);
    let after = threads(2000);
    assert!(after.0 < before.0 + (4 << 20), "taken bytes grew from {} to {}", before.0, after.0);
    // A thread that took a cache again after its end would leave it behind: 5 KiB each.
    assert!(after.1 < before.1 + (4 << 20), "what is resident grew from {} to {}", before.1, after.1);
}
