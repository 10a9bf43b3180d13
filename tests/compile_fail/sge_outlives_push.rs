//! A vector that may move its bytes while an entry describes them.

use rdmalloc::{Device, Sge, SgeError};

pub fn send(device: Device, mut message: Vec<u8>, post: impl FnOnce(Sge<'_>)) -> Result<(), SgeError> {
    let sge = device.sge(&message)?;
    message.push(0); //~ E0502
    post(sge);
    Ok(())
}
