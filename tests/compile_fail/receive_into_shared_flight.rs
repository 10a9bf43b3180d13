//! A shared buffer in flight as a receive target.

use rdmalloc::{Buffer, Device, Flight, SharedBuffer, StableBytesMut};
use std::sync::Arc;

fn target<B: StableBytesMut>(_: Flight<B>) {}

pub fn receive(device: Device, buffer: Buffer, shared: SharedBuffer, bytes: Arc<[u8]>, text: String) {
    let _ = device.fly(shared.clone()).map(|mut flight| drop(flight.sge_mut())); //~ E0599
    let _ = device.fly(shared.clone()).map(|flight| drop(unsafe { flight.complete(1) })); //~ E0599
    let _ = device.fly(shared).map(target); //~ E0277
    let _ = device.fly(bytes).map(target); //~ E0277
    let _ = device.fly(text).map(target); //~ E0277
    let _ = device.fly(buffer).map(target);
}
