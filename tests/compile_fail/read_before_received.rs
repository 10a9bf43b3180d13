//! Bytes that a device is still writing, and capacity that nobody has written.

use rdmalloc::{Buffer, Device, SgeError, SgeMut};

pub fn read_in_flight(device: Device, buffer: &mut Buffer, post: impl FnOnce(SgeMut<'_>)) -> Result<u8, SgeError> {
    let sge = device.sge_mut(buffer.spare_capacity_mut())?;
    let first = buffer.first().copied(); //~ E0502
    post(sge);
    let first = buffer.first().copied();
    Ok(first.unwrap_or(0))
}

pub fn read_capacity(buffer: &mut Buffer) {
    let _: u8 = buffer.spare_capacity_mut()[0]; //~ E0308
    let _: &[u8] = buffer.spare_capacity_mut(); //~ E0308
}

pub fn send_capacity(device: Device, buffer: &mut Buffer) {
    let _ = device.sge(buffer.spare_capacity_mut()); //~ E0308
}

pub fn say_that_it_was_written(buffer: &mut Buffer) {
    buffer.set_len(1); //~ E0133
}
