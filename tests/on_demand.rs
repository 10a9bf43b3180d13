//! Memory that is registered on demand, as heaps treat it, by devices that only say what they can: on any machine.

use rdmalloc::{Access, AttachError, Heap, NoOnDemand, OnDemand, Operations, Pinning};
use rdmalloc_arenas::{Keys, Memlock, Registered, Registrar};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Registers nothing, and counts how it was asked: bit 0, to pin; bit 1, on demand. Nothing may be pinned here.
struct Says(Option<OnDemand>, Arc<AtomicU64>);

// SAFETY: there is no device, so nothing touches the memory.
unsafe impl Registrar for Says {
    unsafe fn register(&self, memory: Range<usize>, access: Access) -> io::Result<Registered> {
        self.1.fetch_or(if access.is_on_demand() { 2 } else { 1 }, Relaxed);
        Ok(Registered { keys: Keys { lkey: 1, rkey: 1 }, handle: memory.start as u64 })
    }
    fn deregister(&self, _: Registered, _: Range<usize>) -> io::Result<()> {
        Ok(())
    }
    fn on_demand(&self) -> Option<OnDemand> {
        self.0
    }
    fn memlock(&self) -> Option<Memlock> {
        Some(Memlock { limit: Some(64 << 10), pinned: 0 })
    }
    fn name(&self) -> &str {
        "says"
    }
}

fn can(operations: u32, is_proven: bool) -> Option<OnDemand> {
    Some(OnDemand { max_len: 8 << 20, operations: Operations::from_bits(operations), is_proven })
}

/// How a heap asked a device that can so much to register; or why it did not attach it.
fn asked(pinning: Pinning, access: Access, can: Option<OnDemand>) -> Result<u64, AttachError> {
    let heap = Heap::builder().pinning(pinning).access(access).build().unwrap();
    let how = Arc::new(AtomicU64::new(0));
    let device = heap.attach(Says(can, how.clone()))?;
    // What is to be pinned exceeds the limit, and is therefore not even asked for.
    let buffer = heap.buffer(20 << 20);
    match how.load(Relaxed) {
        0 => assert!(buffer.is_err()),
        _ => {
            let arena = &heap.arenas()[0];
            assert!(!arena.pinned && arena.resident().unwrap().resident < 1 << 20, "{arena:?}");
            assert!(device.key(buffer.unwrap().as_ptr()).is_ok());
            assert!(heap.stats().registered >= 3, "longer than the device takes at once");
        }
    }
    heap.trim();
    heap.detach(device).unwrap();
    Ok(how.load(Relaxed))
}

#[test]
fn memory_is_registered_on_demand_where_the_heap_wants_it_and_the_device_can_all_of_it() {
    let local = Access::LOCAL_WRITE;
    assert_eq!(asked(Pinning::OnDemand, local, can(0b1111, false)).unwrap(), 2);
    assert_eq!(asked(Pinning::Auto, local, can(0b1111, true)).unwrap(), 2);
    assert_eq!(asked(Pinning::Auto, local, can(0b1111, false)).unwrap(), 0, "not proven, so to be pinned");
    assert_eq!(asked(Pinning::Auto, local, can(0b0111, true)).unwrap(), 0, "no reads, so to be pinned");
    assert_eq!(asked(Pinning::Auto, local, None).unwrap(), 0);
    assert_eq!(asked(Pinning::Pinned, local, can(0b1111, true)).unwrap(), 0);
}

#[test]
fn a_device_that_cannot_on_demand_is_refused_with_what_it_lacks() {
    for (access, can, lacks) in [
        (Access::LOCAL_WRITE, None, NoOnDemand::Unsupported),
        (Access::LOCAL_WRITE, can(0b1101, true), NoOnDemand::Operations { missing: Operations::RECV }),
        (Access::REMOTE_ATOMIC, can(0b1111, true), NoOnDemand::Operations { missing: Operations::ATOMIC }),
        (Access::WINDOWS, can(0b1_1111, true), NoOnDemand::Windows),
    ] {
        let error = asked(Pinning::OnDemand, access, can).unwrap_err();
        let AttachError::OnDemand { why, .. } = &error else { panic!("{error}") };
        assert_eq!(*why, lacks);
        assert!(error.to_string().contains("Pinning::Auto"), "{error}");
    }
}
