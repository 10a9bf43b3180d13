//! What must not fly: what is only borrowed, what moves with its value, what its type does not know.

use rdmalloc::{Buffer, Device, Flight};
use std::cell::Cell;

pub fn fly(device: Device, buffer: Buffer) {
    let local = vec![1u8; 100];
    let _ = device.fly(&local[..]); //~ E0597
    let _ = device.fly([0u8; 64]); //~ E0277
    let _ = device.fly(Box::new([Cell::new(0u8)])); //~ E0277
    let _ = device.fly(std::rc::Rc::<[u8]>::from([1])); //~ E0277
    let _ = device.fly(buffer);
}

pub fn another(id: u64) -> Option<Buffer> {
    let flight = Flight::<Vec<u8>>::from_id(id).ok()?;
    // SAFETY: for the sake of the argument.
    let _value: Buffer = unsafe { flight.complete_send() }; //~ E0308
    None
}
