//! What is out: a buffer with a message, which comes back when the last of its `Bytes` is dropped. Uses `returned`.

use super::returned::Returned;
use crate::buffer::Buffer;
use core::mem::ManuallyDrop;
use std::sync::Arc;

/// The owner of the `Bytes`.
pub(super) struct Lent {
    buffer: ManuallyDrop<Buffer>,
    place: u32,
    returned: Arc<Returned<Buffer>>,
}

impl Lent {
    /// # Safety
    ///
    /// The buffer is the place's, which is empty until it comes back.
    pub(super) unsafe fn new(buffer: Buffer, place: u32, returned: Arc<Returned<Buffer>>) -> Lent {
        Lent { buffer: ManuallyDrop::new(buffer), place, returned }
    }
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        &self.buffer
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // SAFETY: dropped once, and not used again.
        let mut buffer = unsafe { ManuallyDrop::take(&mut self.buffer) };
        buffer.clear();
        // SAFETY: promised to `new`. When the pool is gone, the buffer goes to its heap.
        let _ = unsafe { self.returned.bring(self.place, buffer) };
    }
}
