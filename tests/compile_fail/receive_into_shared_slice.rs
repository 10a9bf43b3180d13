//! What others may be reading as a receive target.

use core::mem::MaybeUninit;
use rdmalloc::{Device, SgeMut};

pub fn receive(device: Device, shared: &[u8], also: &[MaybeUninit<u8>], post: impl Fn(SgeMut<'_>)) {
    let _ = device.sge_mut(shared).map(&post); //~ E0308
    let _ = device.sge_mut(also).map(&post); //~ E0308
}
