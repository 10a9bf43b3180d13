//! What a queue does beside single entries and blocking waits: lists of entries, unsignalled requests, notices. Uses `queue`.

use super::domain::check;
use super::{Queue, Remote};
use rdma_sys::{
    ibv_ack_cq_events, ibv_get_cq_event, ibv_post_send, ibv_req_notify_cq, ibv_send_flags, ibv_send_wr, ibv_sge,
    ibv_wr_opcode, rdma_t,
};
use std::io::Result;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::null_mut;

impl Queue {
    /// How many entries a send or write takes.
    pub const MAX_SEND_SGE: usize = 8;

    /// Posts a send of several entries, or, to a `target`, an RDMA write. If it is not `signalled`, the completion of a later
    /// one on this queue is its own, too.
    ///
    /// # Errors
    ///
    /// `ENOMEM` if the queue is full; `EINVAL` for too many entries.
    ///
    /// # Safety
    ///
    /// The duty, with the entries as sources.
    pub unsafe fn post_list(
        &self,
        id: u64,
        sources: &[ibv_sge],
        target: Option<Remote>,
        signalled: bool,
    ) -> Result<()> {
        // SAFETY: integers, null pointers and unions of them: all of which zeroes are valid for.
        let mut wr: ibv_send_wr = unsafe { std::mem::zeroed() };
        wr.wr_id = id;
        // Posting does not write the list.
        wr.sg_list = sources.as_ptr().cast_mut();
        wr.num_sge = sources.len() as i32;
        wr.opcode = ibv_wr_opcode::IBV_WR_SEND;
        if let Some(Remote { addr, rkey }) = target {
            wr.opcode = ibv_wr_opcode::IBV_WR_RDMA_WRITE;
            wr.wr.rdma = rdma_t { remote_addr: addr, rkey };
        }
        wr.send_flags = if signalled { ibv_send_flags::IBV_SEND_SIGNALED.0 } else { 0 };
        // SAFETY: a live queue pair and one complete work request, which the call copies. The memory: by the duty.
        check(unsafe { ibv_post_send(self.qp, &mut wr, &mut null_mut()) })
    }

    /// Asks for a notice at the next completion. Completions that came before bring none, so poll after it.
    ///
    /// # Errors
    ///
    /// If the device is gone.
    pub fn request_notice(&self) -> Result<()> {
        // SAFETY: a live completion queue.
        check(unsafe { ibv_req_notify_cq(self.cq, 0) })
    }

    /// Takes a notice; there is one when [`as_fd`](AsFd::as_fd) is readable. Otherwise it waits, or is refused where the
    /// descriptor was set not to block.
    ///
    /// # Errors
    ///
    /// `WouldBlock`.
    pub fn take_notice(&self) -> Result<()> {
        let (mut cq, mut context) = (null_mut(), null_mut());
        // SAFETY: a live channel; what comes is acknowledged, or the queue could not be destroyed.
        unsafe {
            if ibv_get_cq_event(self.channel, &mut cq, &mut context) != 0 {
                return Err(std::io::Error::last_os_error());
            }
            ibv_ack_cq_events(cq, 1);
        }
        Ok(())
    }
}

/// Readable when there is a notice.
impl AsFd for Queue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: a live channel has an open descriptor, which is closed with the queue.
        unsafe { BorrowedFd::borrow_raw((*self.channel).fd) }
    }
}
