//! A shared buffer in flight as a receive target.

use rdmalloc::{Buffer, Device, Flight, SharedBuffer, StableBytesMut};
use std::sync::Arc;

fn is_target<B: StableBytesMut>() {}

pub fn receive(mut shared: Flight<SharedBuffer>, mut buffer: Flight<Buffer>) {
    let _ = shared.sge_mut(); //~ E0599
    let _ = unsafe { shared.complete(1) }; //~ E0599
    let _ = buffer.sge_mut();
}

pub fn targets() {
    is_target::<SharedBuffer>(); //~ E0277
    is_target::<Arc<[u8]>>(); //~ E0277
    is_target::<String>(); //~ E0277
    is_target::<Box<[u8]>>(); //~ E0277
    is_target::<(Buffer, SharedBuffer)>(); //~ E0277
    is_target::<(Buffer, Vec<Buffer>)>();
}

pub fn fly(device: Device, shared: SharedBuffer) -> Option<Flight<SharedBuffer>> {
    device.fly(shared).ok()
}
