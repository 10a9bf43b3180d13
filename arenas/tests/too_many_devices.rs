//! A process of its own, since devices are counted over the process.

use core::ops::Range;
use rdmalloc_arenas::{Access, Arenas, AttachError, Config, Device, Keys, MAX_DEVICES, Policy, Registered, Registrar};
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

static LIVE: AtomicI64 = AtomicI64::new(0);

struct Counting;

// SAFETY: no device, so nothing ever touches the memory.
unsafe impl Registrar for Counting {
    unsafe fn register(&self, _: Range<usize>, _: Access) -> std::io::Result<Registered> {
        LIVE.fetch_add(1, Relaxed);
        Ok(Registered { keys: Keys { lkey: 1, rkey: 1 }, handle: 1 })
    }
    fn deregister(&self, _: Registered, _: Range<usize>) -> std::io::Result<()> {
        LIVE.fetch_sub(1, Relaxed);
        Ok(())
    }
    fn name(&self) -> &str {
        "counting"
    }
}

#[test]
fn more_devices_than_fit_are_refused_and_nothing_is_lost() {
    static HEAP: Arenas =
        Arenas::new(Config { access: Access::LOCAL_WRITE, policy: Policy::Require, serves_children: false, tag: 0 });
    let span = HEAP.take(1, 1).unwrap();
    for _ in 0..2 {
        let devices: Vec<Device> = (0..MAX_DEVICES).map(|_| HEAP.attach(Box::new(Counting)).unwrap()).collect();
        let refused = HEAP.attach(Box::new(Counting)).unwrap_err();
        assert!(matches!(refused, AttachError::TooManyDevices { limit: MAX_DEVICES }));
        assert!(refused.to_string().contains("64 devices"), "{refused}");
        assert!(devices.iter().all(|device| device.key_of_address(span.address).is_ok()));
        assert_eq!(LIVE.load(Relaxed), MAX_DEVICES as i64);
        devices.into_iter().for_each(|device| HEAP.detach(device).unwrap());
        assert_eq!(LIVE.load(Relaxed), 0);
    }
}
