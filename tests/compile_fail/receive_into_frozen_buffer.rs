//! A shared buffer as a receive target, or written at all.

use rdmalloc::{Device, SgeMut, SharedBuffer};

pub fn receive(device: Device, mut shared: SharedBuffer, post: impl Fn(SgeMut<'_>)) {
    let _ = device.sge_mut(shared.spare_capacity_mut()).map(&post); //~ E0599
    shared[0] = 1; //~ E0594
}
