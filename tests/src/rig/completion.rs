//! What a completion queue says of a work request. Uses the status numbers of rdma-sys.

use rdma_sys::{ibv_wc, ibv_wc_flags, ibv_wc_status};
use std::fmt;
use std::io::{Error, Result};

/// The end of one work request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completion {
    /// The `wr_id` that it was posted with.
    pub id: u64,
    /// How it went.
    pub status: Status,
    /// How many bytes arrived, where it was a receive or a read that went well; otherwise meaningless.
    pub len: u32,
    /// The rkey that the peer's send has invalidated, where it was a receive of one.
    pub invalidated: Option<u32>,
    /// The device's own word on an error, for its manual.
    pub vendor_error: u32,
}

impl Completion {
    /// The completion, if the work request succeeded.
    ///
    /// # Errors
    ///
    /// Names the work request and its status.
    pub fn ok(self) -> Result<Completion> {
        if self.status == Status::SUCCESS {
            return Ok(self);
        }
        Err(Error::other(format!("work request {:#x} failed: {} (vendor {})", self.id, self.status, self.vendor_error)))
    }

    pub(super) fn from_wc(wc: &ibv_wc) -> Completion {
        let with_inv = wc.status == ibv_wc_status::IBV_WC_SUCCESS && wc.wc_flags & ibv_wc_flags::IBV_WC_WITH_INV.0 != 0;
        // SAFETY: both fields of the union are 32-bit numbers.
        let invalidated = with_inv.then_some(unsafe { wc.imm_data_invalidated_rkey_union.invalidated_rkey });
        let (id, status, len, vendor_error) = (wc.wr_id, Status(wc.status), wc.byte_len, wc.vendor_err);
        Completion { id, status, len, invalidated, vendor_error }
    }
}

/// The status of a completion: the number of `ibv_wc_status`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Status(pub u32);

impl Status {
    /// 0: done.
    pub const SUCCESS: Status = Status(ibv_wc_status::IBV_WC_SUCCESS);
    /// 2: the local queue pair refused the request.
    pub const LOC_QP_OP_ERR: Status = Status(ibv_wc_status::IBV_WC_LOC_QP_OP_ERR);
    /// 4: the lkey does not open the local memory.
    pub const LOC_PROT_ERR: Status = Status(ibv_wc_status::IBV_WC_LOC_PROT_ERR);
    /// 5: the queue pair failed before the request was begun.
    pub const WR_FLUSH_ERR: Status = Status(ibv_wc_status::IBV_WC_WR_FLUSH_ERR);
    /// 10: the rkey does not open the peer's memory.
    pub const REM_ACCESS_ERR: Status = Status(ibv_wc_status::IBV_WC_REM_ACCESS_ERR);
    /// 12: the peer does not answer.
    pub const RETRY_EXC_ERR: Status = Status(ibv_wc_status::IBV_WC_RETRY_EXC_ERR);
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // SAFETY: any number is allowed, and the answer is a constant C string.
        let text = unsafe { std::ffi::CStr::from_ptr(rdma_sys::ibv_wc_status_str(self.0)) };
        write!(f, "{} (status {})", text.to_string_lossy(), self.0)
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
