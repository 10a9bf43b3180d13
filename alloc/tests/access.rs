//! What a heap was made for is asked of the device when it is attached, not when the first buffer is wanted.

use rdmalloc::{Access, AttachError, Heap, Keys, Registered, Registrar};
use std::io;
use std::ops::Range;

/// A device without peers.
struct Alone;

// SAFETY: nothing reaches the memory, registered or not.
unsafe impl Registrar for Alone {
    unsafe fn register(&self, memory: Range<usize>, _: Access) -> io::Result<Registered> {
        Ok(Registered { keys: Keys { lkey: (memory.start >> 21) as u32, rkey: 0 }, handle: 0 })
    }

    fn deregister(&self, _: Registered, _: Range<usize>) -> io::Result<()> {
        Ok(())
    }

    fn supports(&self, access: Access) -> bool {
        !access.needs_peers()
    }

    fn name(&self) -> &str {
        "alone"
    }
}

#[test]
fn a_heap_for_peers_does_not_attach_to_a_device_that_has_none() {
    for access in [Access::REMOTE_READ, Access::REMOTE_WRITE, Access::REMOTE_ATOMIC, Access::WINDOWS] {
        let heap = Heap::builder().access(access).build().unwrap();
        let error = heap.attach(Alone).unwrap_err();
        assert!(
            matches!(&error, AttachError::Access { device, access: wanted } if device == "alone" && *wanted == access)
        );
        assert!(error.to_string().contains(&format!("alone cannot register memory with {access:?}, ")), "{error}");
        assert!(heap.devices().is_empty());
    }
    for access in [Access::LOCAL_READ, Access::LOCAL_WRITE, Access::RELAXED_ORDERING, Access::READ_TARGET] {
        Heap::builder().access(access).build().unwrap().attach(Alone).unwrap();
    }
}
