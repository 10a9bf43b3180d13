//! A process of its own, so that the second device gets the column that the first has left.

use rdmalloc_arenas::{Access, Arenas, Config, KeyError, Keys, NotRegistered, Policy, Registered, Registrar};
use std::io;
use std::ops::Range;

/// Refuses, or does not.
struct Refusing(bool);

// SAFETY: no device, so nothing ever touches the memory.
unsafe impl Registrar for Refusing {
    unsafe fn register(&self, _: Range<usize>, _: Access) -> io::Result<Registered> {
        let registered = Registered { keys: Keys { lkey: 1, rkey: 1 }, handle: 1 };
        if self.0 { Err(io::Error::from_raw_os_error(libc::ENOMEM)) } else { Ok(registered) }
    }
    fn deregister(&self, _: Registered, _: Range<usize>) -> io::Result<()> {
        Ok(())
    }
    fn name(&self) -> &str {
        "refusing"
    }
}

#[test]
fn a_refusal_is_not_told_of_the_next_device() {
    let config = Config { access: Access::LOCAL_WRITE, policy: Policy::Prefer, serves_children: false, tag: 2 };
    let (heap, other) = (Arenas::new(config), Arenas::new(config));
    let refusing = heap.attach(Box::new(Refusing(true))).unwrap();
    let span = heap.take(1, 1).unwrap();
    let refused = KeyError::NotRegistered(NotRegistered::Refused { code: libc::ENOMEM });
    assert_eq!(refusing.key_of_address(span.address), Err(refused));
    heap.detach(refusing).unwrap();
    let next = other.attach(Box::new(Refusing(false))).unwrap();
    assert_eq!(next.slot(), refusing.slot());
    assert_eq!(next.key_of_address(span.address), Err(KeyError::NotRegistered(NotRegistered::OtherHeap)));
    other.detach(next).unwrap();
}
