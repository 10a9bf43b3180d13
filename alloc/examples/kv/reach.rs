//! The heart of the comparison: how the memory of a message comes to be known to the device. With rdmalloc it is known since
//! long before; without, each message registers its own and ends the registration when it is done.

use crate::Result;
use crate::counted::{BY_HEAPS, BY_MESSAGES, Counted, Counter};
use crate::fabric::Place;
use rdmalloc::{Access, Device};
use rdmalloc_arenas::{Registered, Registrar};
use std::mem::MaybeUninit;
use std::ops::Range;

/// One of the two ways.
pub enum Reach {
    /// The global heap is attached to this device: looking up the key of any block is all there is to do.
    Allocator(Device),
    /// Every message registers the bytes it lies in, as if the heap were attached to nothing.
    EachMessage(Counted),
}

impl Reach {
    /// The second way, with the device of the first.
    pub fn each_message(registrar: Counted) -> Reach {
        Reach::EachMessage(Counted { counter: &BY_MESSAGES, ..registrar })
    }

    /// What the reports call it.
    pub fn name(&self) -> &'static str {
        match self {
            Reach::Allocator(_) => "rdmalloc",
            Reach::EachMessage(_) => "registering each message",
        }
    }

    /// Counts the registrations that are made for it.
    pub fn counter(&self) -> &'static Counter {
        match self {
            Reach::Allocator(_) => &BY_HEAPS,
            Reach::EachMessage(_) => &BY_MESSAGES,
        }
    }

    /// The place of bytes that the device shall read.
    ///
    /// # Safety
    ///
    /// They stay allocated until the lease is dropped.
    pub unsafe fn source(&self, bytes: &[u8]) -> Result<Lease> {
        match self {
            Reach::Allocator(device) => {
                let sge = device.sge(bytes)?;
                Ok(Lease { place: Place { addr: sge.addr(), len: sge.length(), lkey: sge.lkey() }, registration: None })
            }
            Reach::EachMessage(registrar) => {
                let Range { start, end } = bytes.as_ptr_range();
                // SAFETY: the caller's promise; and the device does no more than read.
                unsafe { Lease::register(registrar, start.addr()..end.addr(), Access::LOCAL_READ) }
            }
        }
    }

    /// The place of bytes that the device shall write.
    ///
    /// # Safety
    ///
    /// They stay allocated until the lease is dropped, and are not used before the device is done.
    pub unsafe fn target(&self, bytes: &mut [MaybeUninit<u8>]) -> Result<Lease> {
        match self {
            Reach::Allocator(device) => {
                let sge = device.sge_mut(bytes)?;
                Ok(Lease { place: Place { addr: sge.addr(), len: sge.length(), lkey: sge.lkey() }, registration: None })
            }
            Reach::EachMessage(registrar) => {
                let Range { start, end } = bytes.as_mut_ptr_range();
                // SAFETY: the caller's promise.
                unsafe { Lease::register(registrar, start.addr()..end.addr(), Access::LOCAL_WRITE) }
            }
        }
    }
}

/// A place for the time of one message, or longer. Dropped when the device is done with it.
pub struct Lease {
    pub place: Place,
    registration: Option<(Counted, Registered, Range<usize>)>,
}

impl Lease {
    /// # Safety
    ///
    /// The memory stays allocated until the lease is dropped, and nobody minds what the device does by its key.
    unsafe fn register(registrar: &Counted, memory: Range<usize>, access: Access) -> Result<Lease> {
        // SAFETY: the caller's promise.
        let registered = unsafe { registrar.register(memory.clone(), access) }?;
        let place = Place { addr: memory.start as u64, len: memory.len().try_into()?, lkey: registered.keys.lkey };
        Ok(Lease { place, registration: Some((registrar.clone(), registered, memory)) })
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some((registrar, registered, memory)) = self.registration.take() {
            // The memory is about to be used again, which must not happen under a device that may still write to it.
            registrar.deregister(registered, memory).expect("a registration of one message ends");
        }
    }
}
