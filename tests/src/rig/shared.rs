//! A shared receive queue (SRQ): several queue pairs take from it. Uses [`Domain`].

use super::Domain;
use rdma_sys::{ibv_create_srq, ibv_destroy_srq, ibv_srq, ibv_srq_attr, ibv_srq_init_attr};
use rdmalloc_arenas::registrar::verbs::AsSharedReceiveQueue;
use std::io::{Error, Result};
use std::ptr::{NonNull, null_mut};

/// A shared receive queue, destroyed when dropped; the queues that take from it keep it.
pub struct SharedQueue {
    srq: NonNull<ibv_srq>,
    /// Outlives it.
    _domain: Domain,
}

// SAFETY: libibverbs is thread safe: queues may be used from, and freed by, any thread.
unsafe impl Send for SharedQueue {}
// SAFETY: as above.
unsafe impl Sync for SharedQueue {}

// SAFETY: destroyed by `drop` only, and the domain is kept.
unsafe impl AsSharedReceiveQueue for SharedQueue {
    fn as_shared_receive_queue(&self) -> NonNull<ibv_srq> {
        self.srq
    }
}

impl SharedQueue {
    /// Makes a queue for so many receives.
    ///
    /// # Errors
    ///
    /// The error of `ibv_create_srq`.
    pub fn new(domain: &Domain, depth: u32) -> Result<SharedQueue> {
        let attr = ibv_srq_attr { max_wr: depth, max_sge: 1, srq_limit: 0 };
        let mut init = ibv_srq_init_attr { srq_context: null_mut(), attr };
        // SAFETY: the protection domain is live.
        let srq = NonNull::new(unsafe { ibv_create_srq(domain.pd(), &mut init) }).ok_or_else(Error::last_os_error)?;
        Ok(SharedQueue { srq, _domain: domain.clone() })
    }

    pub(super) fn as_ptr(&self) -> *mut ibv_srq {
        self.srq.as_ptr()
    }
}

impl Drop for SharedQueue {
    fn drop(&mut self) {
        // SAFETY: from `ibv_create_srq`, once; queue pairs that take from it are gone, since they keep this.
        unsafe { ibv_destroy_srq(self.srq.as_ptr()) };
    }
}
