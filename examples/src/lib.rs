//! What each verbs program needs before its first work request, whatever allocates its memory: a queue pair that is connected.
//!
//! Shared by the programs in `bin/` that use rdma-sys, so that they show posting and memory only. A [`Queue`] is a reliable
//! queue pair with a completion queue of its own; two of them exchange [`Address`]es, by any means, to be connected.
#![cfg(feature = "verbs")]

use rdma_sys::*;
use rdmalloc::registrar::verbs::{AsQueuePair, ProtectionDomain, fixes, rdma_sys};
use std::io::{Error, Result};
use std::mem::zeroed;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The port that is used, as in most programs: the first.
const PORT: u8 = 1;
/// How many sends, and how many receives, are under way at most.
const DEPTH: u32 = 64;
/// How many pieces of memory a work request gathers at most. Every adapter has as many.
pub const MAX_SGE: u32 = 4;

/// A reliable connected queue pair and its completion queue.
pub struct Queue {
    qp: NonNull<ibv_qp>,
    cq: NonNull<ibv_cq>,
    gid: (u8, [u8; 16]),
    port: ibv_port_attr,
    domain: Arc<ProtectionDomain>, // outlives both
}

// SAFETY: verbs objects may be used from any thread, at once (ibv_alloc_td(3)).
unsafe impl Send for Queue {}
// SAFETY: as above.
unsafe impl Sync for Queue {}

// SAFETY: the queue pair is destroyed when the value is dropped, its protection domain and context are closed later.
unsafe impl AsQueuePair for Queue {
    fn as_queue_pair(&self) -> NonNull<ibv_qp> {
        self.qp
    }
}

/// What the other end must know to connect.
#[derive(Clone, Copy)]
pub struct Address {
    /// The number of the queue pair.
    pub qpn: u32,
    /// The port's local identifier; 0 on Ethernet.
    pub lid: u16,
    /// The port's address.
    pub gid: [u8; 16],
}

impl Queue {
    /// Makes a queue pair. It takes receives now, and sends once it is connected.
    ///
    /// # Errors
    ///
    /// Of the verb that failed.
    pub fn new(domain: &Arc<ProtectionDomain>) -> Result<Queue> {
        let context = domain.context();
        // SAFETY: the context is open as long as the domain lives, and that is as long as this value.
        unsafe {
            let (port, gid) = (fixes::query_port(context, PORT)?, gid(context.as_ptr(), domain.device_name())?);
            let cq = some(ibv_create_cq(context.as_ptr(), 2 * DEPTH as i32, null_mut(), null_mut(), 0))?;
            let mut init: ibv_qp_init_attr = zeroed();
            (init.send_cq, init.recv_cq, init.qp_type) = (cq.as_ptr(), cq.as_ptr(), ibv_qp_type::IBV_QPT_RC);
            (init.cap.max_send_wr, init.cap.max_recv_wr) = (DEPTH, DEPTH);
            (init.cap.max_send_sge, init.cap.max_recv_sge) = (MAX_SGE, MAX_SGE);
            let qp =
                some(ibv_create_qp(domain.as_ptr(), &mut init)).inspect_err(|_| _ = ibv_destroy_cq(cq.as_ptr()))?;
            let queue = Queue { qp, cq, gid, port, domain: Arc::clone(domain) };
            let mut attr: ibv_qp_attr = zeroed();
            (attr.qp_state, attr.port_num) = (ibv_qp_state::IBV_QPS_INIT, PORT);
            attr.qp_access_flags =
                (ibv_access_flags::IBV_ACCESS_REMOTE_READ | ibv_access_flags::IBV_ACCESS_REMOTE_WRITE).0;
            use ibv_qp_attr_mask as set;
            queue.modify(&mut attr, set::IBV_QP_PKEY_INDEX | set::IBV_QP_PORT | set::IBV_QP_ACCESS_FLAGS)?;
            Ok(queue)
        }
    }

    /// Both ends of a connection in one program: the device loops back.
    ///
    /// # Errors
    ///
    /// Of the verb that failed.
    pub fn pair(domain: &Arc<ProtectionDomain>) -> Result<(Queue, Queue)> {
        let (left, right) = (Queue::new(domain)?, Queue::new(domain)?);
        left.connect(right.address())?;
        right.connect(left.address())?;
        Ok((left, right))
    }

    /// What the other end must know.
    pub fn address(&self) -> Address {
        // SAFETY: the queue pair lives.
        Address { qpn: unsafe { self.qp.as_ref().qp_num }, lid: self.port.lid, gid: self.gid.1 }
    }

    /// Connects to the other end, which has to do so as well.
    ///
    /// # Errors
    ///
    /// Of the verb that failed.
    pub fn connect(&self, peer: Address) -> Result<()> {
        use ibv_qp_attr_mask as set;
        let dgid = ibv_gid { raw: peer.gid };
        // SAFETY: integers and unions of them, for all of which zeros are valid.
        let mut attr: ibv_qp_attr = unsafe { zeroed() };
        (attr.qp_state, attr.dest_qp_num, attr.path_mtu) = (ibv_qp_state::IBV_QPS_RTR, peer.qpn, self.port.active_mtu);
        (attr.max_dest_rd_atomic, attr.min_rnr_timer) = (4, 1); // 1: the sender tries again after 0.01 ms
        (attr.ah_attr.port_num, attr.ah_attr.dlid, attr.ah_attr.is_global) = (PORT, peer.lid, 1);
        (attr.ah_attr.grh.dgid, attr.ah_attr.grh.sgid_index, attr.ah_attr.grh.hop_limit) = (dgid, self.gid.0, 64);
        let path = set::IBV_QP_AV | set::IBV_QP_PATH_MTU | set::IBV_QP_DEST_QPN | set::IBV_QP_RQ_PSN;
        self.modify(&mut attr, path | set::IBV_QP_MAX_DEST_RD_ATOMIC | set::IBV_QP_MIN_RNR_TIMER)?;
        (attr.qp_state, attr.max_rd_atomic) = (ibv_qp_state::IBV_QPS_RTS, 4);
        (attr.timeout, attr.retry_cnt, attr.rnr_retry) = (16, 7, 7); // 0.27 s; 7 times; for ever
        let retry = set::IBV_QP_TIMEOUT | set::IBV_QP_RETRY_CNT | set::IBV_QP_RNR_RETRY;
        self.modify(&mut attr, retry | set::IBV_QP_SQ_PSN | set::IBV_QP_MAX_QP_RD_ATOMIC)
    }

    /// The queue pair. It lives as long as this value.
    pub fn qp(&self) -> *mut ibv_qp {
        self.qp.as_ptr()
    }

    /// Waits for the next completion: at most ten seconds, and awake, as a program does that has a core for it.
    ///
    /// # Errors
    ///
    /// The work request failed (the text says how), or nothing was completed.
    pub fn completion(&self) -> Result<ibv_wc> {
        let late = Instant::now() + Duration::from_secs(10);
        while Instant::now() < late {
            // SAFETY: integers, for which zeros are valid.
            let mut wc: ibv_wc = unsafe { zeroed() };
            // SAFETY: the completion queue lives, and there is room for one.
            match unsafe { ibv_poll_cq(self.cq.as_ptr(), 1, &mut wc) } {
                0 => std::thread::yield_now(),
                1 if wc.status == ibv_wc_status::IBV_WC_SUCCESS => return Ok(wc),
                1 => return Err(Error::other(format!("work request {:#x} ended with status {}", wc.wr_id, wc.status))),
                _ => return Err(Error::other("the completion queue cannot be polled")),
            }
        }
        Err(Error::other("no completion within ten seconds"))
    }

    fn modify(&self, attr: &mut ibv_qp_attr, set: ibv_qp_attr_mask) -> Result<()> {
        // SAFETY: the queue pair lives; what `set` names is set, and the rest is zero.
        match unsafe { ibv_modify_qp(self.qp.as_ptr(), attr, (ibv_qp_attr_mask::IBV_QP_STATE | set).0 as i32) } {
            0 => Ok(()),
            errno => Err(Error::from_raw_os_error(errno)),
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // SAFETY: both were made in `new`, and nobody else destroys them; the queue pair first, as it uses the other.
        unsafe { _ = (ibv_destroy_qp(self.qp.as_ptr()), ibv_destroy_cq(self.cq.as_ptr())) };
        let _ = &self.domain; // goes after this
    }
}

/// The port's address that routers know: that of RoCE v2 with an IPv4 address, or else the first there is.
///
/// # Safety
///
/// `context` is open.
unsafe fn gid(context: *mut ibv_context, device: &str) -> Result<(u8, [u8; 16])> {
    let folder = format!("/sys/class/infiniband/{device}/ports/{PORT}/gid_attrs/types");
    let routed = |index: &u8| {
        let v2 = std::fs::read_to_string(format!("{folder}/{index}")).is_ok_and(|kind| kind.trim() == "RoCE v2");
        let v4 = std::fs::read_to_string(format!("{folder}/../../gids/{index}"));
        v2 && v4.is_ok_and(|gid| gid.starts_with("0000:0000:0000:0000:0000:ffff:"))
    };
    let index = (0..=u8::MAX).find(routed).unwrap_or(0);
    let mut gid = ibv_gid { raw: [0; 16] };
    // SAFETY: the context is open, by the caller's word.
    if unsafe { ibv_query_gid(context, PORT, index.into(), &mut gid) } == 0 {
        // SAFETY: every address is so many bytes.
        Ok((index, unsafe { gid.raw }))
    } else {
        Err(Error::last_os_error())
    }
}

fn some<T>(pointer: *mut T) -> Result<NonNull<T>> {
    NonNull::new(pointer).ok_or_else(Error::last_os_error)
}
