//! A gathered message whose pieces or header are written, or gone, before it is posted.

use rdmalloc::{Buffer, Device, Gather, Gathering};

pub fn send(device: Device, mut header: Buffer, mut piece: Vec<u8>, post: impl Fn(&Gather<'_>)) {
    let gathering = Gathering::new(4);
    let Ok(message) = gathering.gather(device, header.spare_capacity_mut(), [&piece[..]]) else { return };
    piece.push(1); //~ E0502
    header.clear(); //~ E0499
    drop(piece); //~ E0505
    post(&message);
}
