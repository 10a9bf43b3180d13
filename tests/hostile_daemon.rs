//! A process of its own: it forks before any device is attached, as a daemon does, and attaches in the child; and so do its
//! children, to devices of their own.

use rdmalloc::{KeyError, NotRegistered, Rdmalloc};
use rdmalloc_tests::Ledger;

#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

#[test]
fn a_daemon_attaches_after_its_fork_and_its_children_to_devices_of_their_own() {
    let block = vec![1u8; 1000];
    // SAFETY: the child leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: no preconditions.
        unsafe { libc::alarm(20) };
        let attached = std::panic::catch_unwind(|| {
            let device = HEAP.attach(Ledger::new()).unwrap();
            assert!(device.key(block.as_ptr()).is_ok());
            // SAFETY: as above.
            let grandchild = unsafe { libc::fork() };
            if grandchild == 0 {
                let mine = HEAP.attach(Ledger::new()).unwrap();
                let parents = KeyError::NotRegistered(NotRegistered::ForkedChild);
                let is_right = (device.key(block.as_ptr()), mine.key(block.as_ptr()).is_ok()) == (Err(parents), true);
                // SAFETY: no preconditions.
                unsafe { libc::_exit(if is_right && HEAP.detach(mine).is_ok() { 0 } else { 1 }) };
            }
            let mut status = 0;
            // SAFETY: waits for the child made above.
            unsafe { libc::waitpid(grandchild, &raw mut status, 0) };
            assert_eq!(status, 0, "the grandchild's wait status");
        });
        // SAFETY: no preconditions.
        unsafe { libc::_exit(if attached.is_ok() { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child's wait status");
}
