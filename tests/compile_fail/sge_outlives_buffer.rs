//! A buffer that goes back to its heap while an entry describes it.

use rdmalloc::{Buffer, Device, Sge, SgeError};

pub fn send(device: Device, message: Buffer, post: impl FnOnce(Sge<'_>)) -> Result<(), SgeError> {
    let sge = device.sge(&message)?;
    drop(message); //~ E0505
    post(sge);
    Ok(())
}
