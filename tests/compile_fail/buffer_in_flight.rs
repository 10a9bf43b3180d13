//! A buffer that is touched while a device works on it, and entries that outlive what they are of.

use rdmalloc::{Buffer, Device, Sge};

pub fn touch(device: Device, mut buffer: Buffer, post: impl Fn(Sge<'_>)) {
    let Ok(mut flight) = device.fly(buffer) else { return };
    buffer.clear(); //~ E0382
    let _byte = buffer[0]; //~ E0382
    let Ok(sge) = flight.sge() else { return };
    let _target = flight.sge_mut(); //~ E0502
    let _id = flight.into_id(); //~ E0505
    post(sge);
}

pub fn write_in_place(flight: rdmalloc::Flight<Buffer>) {
    flight.piece(0)[0] = 1; //~ E0594
}
