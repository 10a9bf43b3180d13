//! A reliable connected (RC) queue pair with a completion queue of its own: connect, post, poll. Uses [`Domain`].

use super::domain::check;
use super::{Completion, Domain, Endpoint, SharedQueue};
use rdma_sys::{
    ibv_access_flags as access, ibv_ack_cq_events, ibv_ah_attr, ibv_comp_channel, ibv_cq, ibv_create_comp_channel,
    ibv_create_cq, ibv_create_qp, ibv_destroy_comp_channel, ibv_destroy_cq, ibv_destroy_qp, ibv_get_cq_event, ibv_gid,
    ibv_global_route, ibv_modify_qp, ibv_mtu, ibv_poll_cq, ibv_post_recv, ibv_post_send, ibv_qp, ibv_qp_attr,
    ibv_qp_attr_mask as mask, ibv_qp_cap, ibv_qp_init_attr, ibv_qp_state, ibv_qp_type, ibv_recv_wr, ibv_req_notify_cq,
    ibv_send_flags, ibv_send_wr, ibv_sge, ibv_wc, ibv_wr_opcode,
};
use rdmalloc_arenas::registrar::verbs::AsQueuePair;
use std::hash::{BuildHasher, RandomState};
use std::io::{Error, ErrorKind, Result};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How many work requests a queue takes at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Depth {
    /// Sends, writes, reads and atomics that are posted and not completed.
    pub send: u32,
    /// Receives that are posted and not completed.
    pub recv: u32,
}

impl Default for Depth {
    fn default() -> Self {
        Depth { send: 32, recv: 32 }
    }
}

/// Memory of the peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Remote {
    /// Where it is in the peer.
    pub addr: u64,
    /// The key that the peer gave.
    pub rkey: u32,
}

/// A reliable connected queue pair, and the completion queue of both its sides.
///
/// Posting is unsafe, since the device works on the memory until the completion is polled. What every `post_` asks of its
/// caller, besides what its own text says, is called *the duty* there: until the completion of that id was taken from
/// [`poll`](Self::poll), or the queue is dropped, the bytes stay where they are and belong to the device: a source is not
/// written, a target neither read nor written. A wrong key or a wrong peer is no breach: the completion then says so.
pub struct Queue {
    /// From `ibv_create_qp`, or null while `new` is under way; destroyed before `cq`.
    pub(super) qp: *mut ibv_qp,
    /// From `ibv_create_cq`; big enough for both sides of the queue pair, so that it never overflows.
    pub(super) cq: *mut ibv_cq,
    /// From `ibv_create_comp_channel`; destroyed last. Tells of a completion to one who sleeps.
    pub(super) channel: *mut ibv_comp_channel,
    psn: u32,
    /// Where receives come from, if not from a queue of its own. Outlives the queue pair.
    shared: Option<Arc<SharedQueue>>,
    /// Outlives both, which lie in its context.
    domain: Domain,
}

// SAFETY: libibverbs is thread safe: queue pairs and completion queues may be used from, and freed by, any thread.
unsafe impl Send for Queue {}
// SAFETY: as above.
unsafe impl Sync for Queue {}

// SAFETY: the queue pair and its completion queue are destroyed by `drop` only, and `domain` keeps the protection domain.
unsafe impl AsQueuePair for Queue {
    fn as_queue_pair(&self) -> NonNull<ibv_qp> {
        NonNull::new(self.qp).expect("a queue that was made has a queue pair")
    }
}

impl Queue {
    /// Makes a queue pair, which takes receives at once and sends after [`connect`](Self::connect).
    ///
    /// # Errors
    ///
    /// The error of the verb that failed; `EINVAL` and `ENOMEM` mostly mean that the device has no such depth.
    pub fn new(domain: &Domain, depth: Depth) -> Result<Queue> {
        Queue::make(domain, depth, None)
    }

    /// The same, with receives from a shared queue; `depth.recv` is then how many may complete and not be polled.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn with_shared(domain: &Domain, depth: Depth, shared: Arc<SharedQueue>) -> Result<Queue> {
        Queue::make(domain, depth, Some(shared))
    }

    fn make(domain: &Domain, depth: Depth, shared: Option<Arc<SharedQueue>>) -> Result<Queue> {
        let entries = (depth.send + depth.recv).try_into().map_err(|_| Error::from(ErrorKind::InvalidInput))?;
        let psn = RandomState::new().hash_one(0) as u32 & 0xff_ffff;
        // `drop` destroys what exists whenever something fails.
        let mut queue =
            Queue { qp: null_mut(), cq: null_mut(), channel: null_mut(), psn, shared, domain: domain.clone() };
        // SAFETY: the context is open.
        queue.channel = unsafe { ibv_create_comp_channel(domain.context()) };
        if queue.channel.is_null() {
            return Err(Error::last_os_error());
        }
        // SAFETY: the context is open, and the channel lives in it.
        queue.cq = unsafe { ibv_create_cq(domain.context(), entries, null_mut(), queue.channel, 0) };
        if queue.cq.is_null() {
            return Err(Error::last_os_error());
        }
        let mut init = ibv_qp_init_attr {
            qp_context: null_mut(),
            send_cq: queue.cq,
            recv_cq: queue.cq,
            srq: queue.shared.as_ref().map_or(null_mut(), |shared| shared.as_ptr()),
            cap: ibv_qp_cap {
                max_send_wr: depth.send,
                max_recv_wr: depth.recv,
                max_send_sge: Queue::MAX_SEND_SGE as u32,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            qp_type: ibv_qp_type::IBV_QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: the protection domain is live, and `init` names a live completion queue of the same context.
        queue.qp = unsafe { ibv_create_qp(domain.pd(), &mut init) };
        if queue.qp.is_null() {
            return Err(Error::last_os_error());
        }
        let mut attr = attributes(ibv_qp_state::IBV_QPS_INIT);
        attr.port_num = domain.port().number;
        attr.qp_access_flags = (access::IBV_ACCESS_REMOTE_READ
            | access::IBV_ACCESS_REMOTE_WRITE
            | access::IBV_ACCESS_REMOTE_ATOMIC
            | access::IBV_ACCESS_LOCAL_WRITE)
            .0;
        queue.modify(attr, mask::IBV_QP_PKEY_INDEX | mask::IBV_QP_PORT | mask::IBV_QP_ACCESS_FLAGS)?;
        Ok(queue)
    }

    /// Two queues that are connected to each other through one device.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new) and [`connect`](Self::connect).
    pub fn pair(domain: &Domain, depth: Depth) -> Result<(Queue, Queue)> {
        let (left, right) = (Queue::new(domain, depth)?, Queue::new(domain, depth)?);
        left.connect(right.endpoint())?;
        right.connect(left.endpoint())?;
        Ok((left, right))
    }

    /// What the peer must know.
    pub fn endpoint(&self) -> Endpoint {
        let port = self.domain.port();
        // SAFETY: a live queue pair; its number never changes.
        let qpn = unsafe { (*self.qp).qp_num };
        Endpoint { qpn, psn: self.psn, gid: port.gid, lid: port.lid, mtu: port.mtu as u8 }
    }

    /// Connects to the queue that `peer` describes. Once both have done so, work flows.
    ///
    /// # Errors
    ///
    /// The error of the verb that failed; `EINVAL` also where the queue was connected before.
    pub fn connect(&self, peer: Endpoint) -> Result<()> {
        let port = self.domain.port();
        let mut attr = attributes(ibv_qp_state::IBV_QPS_RTR);
        attr.path_mtu = port.mtu.min(ibv_mtu::Type::from(peer.mtu));
        attr.dest_qp_num = peer.qpn;
        attr.rq_psn = peer.psn;
        attr.max_dest_rd_atomic = port.max_reads;
        attr.min_rnr_timer = 1; // 0.01 ms: the shortest wait of a peer that finds no receive posted
        attr.ah_attr.port_num = port.number;
        attr.ah_attr.dlid = peer.lid;
        attr.ah_attr.is_global = u8::from(port.lid == 0 || peer.lid == 0);
        attr.ah_attr.grh.dgid = ibv_gid { raw: peer.gid };
        attr.ah_attr.grh.sgid_index = port.gid_index;
        attr.ah_attr.grh.hop_limit = 64;
        let path = mask::IBV_QP_AV | mask::IBV_QP_PATH_MTU | mask::IBV_QP_DEST_QPN | mask::IBV_QP_RQ_PSN;
        self.modify(attr, path | mask::IBV_QP_MAX_DEST_RD_ATOMIC | mask::IBV_QP_MIN_RNR_TIMER)?;

        let mut attr = attributes(ibv_qp_state::IBV_QPS_RTS);
        attr.sq_psn = self.psn;
        attr.max_rd_atomic = port.max_reads;
        attr.timeout = 16; // 4.096 us * 2^16 = 0.27 s: an emulated machine stalls that long
        attr.retry_cnt = 7;
        attr.rnr_retry = 7; // for ever
        let retries = mask::IBV_QP_TIMEOUT | mask::IBV_QP_RETRY_CNT | mask::IBV_QP_RNR_RETRY;
        self.modify(attr, retries | mask::IBV_QP_SQ_PSN | mask::IBV_QP_MAX_QP_RD_ATOMIC)
    }

    fn modify(&self, mut attr: ibv_qp_attr, set: mask) -> Result<()> {
        // SAFETY: a live queue pair, and attributes of which those that `set` names are set.
        check(unsafe { ibv_modify_qp(self.qp, &mut attr, (mask::IBV_QP_STATE | set).0 as _) })
    }

    /// Brings the queue pair into the error state: what is posted completes with status 5.
    ///
    /// # Errors
    ///
    /// The error of `ibv_modify_qp`.
    pub fn fail(&self) -> Result<()> {
        self.modify(attributes(ibv_qp_state::IBV_QPS_ERR), mask(0))
    }

    /// Posts a receive: the next send of the peer lands in `target`.
    ///
    /// # Errors
    ///
    /// `ENOMEM` if the queue is full.
    ///
    /// # Safety
    ///
    /// The duty, with `target` as a target.
    pub unsafe fn post_recv(&self, id: u64, mut target: ibv_sge) -> Result<()> {
        let mut wr = ibv_recv_wr { wr_id: id, next: null_mut(), sg_list: &mut target, num_sge: 1 };
        // SAFETY: a live queue pair and one complete work request, which the call copies. The memory: by the duty.
        check(unsafe { ibv_post_recv(self.qp, &mut wr, &mut null_mut()) })
    }

    /// Posts a send: `source` lands in the peer's next receive.
    ///
    /// # Errors
    ///
    /// `ENOMEM` if the queue is full.
    ///
    /// # Safety
    ///
    /// The duty, with `source` as a source.
    pub unsafe fn post_send(&self, id: u64, source: ibv_sge) -> Result<()> {
        // SAFETY: the caller's duty.
        unsafe { self.post(id, source, ibv_wr_opcode::IBV_WR_SEND, |_| ()) }
    }

    /// Posts a send that also ends the peer's memory window of this rkey, before the peer's receive completes.
    ///
    /// # Errors
    ///
    /// `ENOMEM` if the queue is full.
    ///
    /// # Safety
    ///
    /// The duty, with `source` as a source.
    pub unsafe fn post_send_invalidate(&self, id: u64, source: ibv_sge, rkey: u32) -> Result<()> {
        let invalidate = |wr: &mut ibv_send_wr| wr.imm_data_invalidated_rkey_union.invalidated_rkey = rkey;
        // SAFETY: the caller's duty.
        unsafe { self.post(id, source, ibv_wr_opcode::IBV_WR_SEND_WITH_INV, invalidate) }
    }

    /// Posts an RDMA write: `source` lands at `target`, and the peer is not told.
    ///
    /// # Errors
    ///
    /// `ENOMEM` if the queue is full.
    ///
    /// # Safety
    ///
    /// The duty, with `source` as a source.
    pub unsafe fn post_write(&self, id: u64, source: ibv_sge, target: Remote) -> Result<()> {
        let rdma = |wr: &mut ibv_send_wr| wr.wr.rdma = rdma_sys::rdma_t { remote_addr: target.addr, rkey: target.rkey };
        // SAFETY: the caller's duty.
        unsafe { self.post(id, source, ibv_wr_opcode::IBV_WR_RDMA_WRITE, rdma) }
    }

    /// Posts an RDMA read: what lies at `source` lands in `target`.
    ///
    /// # Errors
    ///
    /// `ENOMEM` if the queue is full.
    ///
    /// # Safety
    ///
    /// The duty, with `target` as a target.
    pub unsafe fn post_read(&self, id: u64, target: ibv_sge, source: Remote) -> Result<()> {
        let rdma = |wr: &mut ibv_send_wr| wr.wr.rdma = rdma_sys::rdma_t { remote_addr: source.addr, rkey: source.rkey };
        // SAFETY: the caller's duty.
        unsafe { self.post(id, target, ibv_wr_opcode::IBV_WR_RDMA_READ, rdma) }
    }

    /// Posts a fetch-and-add on the aligned 64-bit word at `word`; its old value lands in `target`, which has 8 bytes.
    ///
    /// # Errors
    ///
    /// `ENOMEM` if the queue is full.
    ///
    /// # Safety
    ///
    /// The duty, with `target` as a target.
    pub unsafe fn post_fetch_add(&self, id: u64, target: ibv_sge, word: Remote, add: u64) -> Result<()> {
        let atomic = |wr: &mut ibv_send_wr| {
            wr.wr.atomic = rdma_sys::atomic_t { remote_addr: word.addr, compare_add: add, swap: 0, rkey: word.rkey };
        };
        // SAFETY: the caller's duty.
        unsafe { self.post(id, target, ibv_wr_opcode::IBV_WR_ATOMIC_FETCH_AND_ADD, atomic) }
    }

    /// # Safety
    ///
    /// The duty, with `local` as source or target as the operation has it.
    unsafe fn post(
        &self,
        id: u64,
        mut local: ibv_sge,
        opcode: ibv_wr_opcode::Type,
        fill: impl FnOnce(&mut ibv_send_wr),
    ) -> Result<()> {
        // SAFETY: integers, null pointers and unions of them: all of which zeroes are valid for.
        let mut wr: ibv_send_wr = unsafe { std::mem::zeroed() };
        wr.wr_id = id;
        wr.sg_list = &mut local;
        wr.num_sge = 1;
        wr.opcode = opcode;
        wr.send_flags = ibv_send_flags::IBV_SEND_SIGNALED.0;
        fill(&mut wr);
        // SAFETY: a live queue pair and one complete work request, which the call copies. The memory: by the duty.
        check(unsafe { ibv_post_send(self.qp, &mut wr, &mut null_mut()) })
    }

    /// Takes one completion, if there is one.
    ///
    /// # Errors
    ///
    /// If the device is gone.
    pub fn poll(&self) -> Result<Option<Completion>> {
        // SAFETY: integers only.
        let mut wc: ibv_wc = unsafe { std::mem::zeroed() };
        // SAFETY: a live completion queue, and room for one entry.
        match unsafe { ibv_poll_cq(self.cq, 1, &mut wc) } {
            0 => Ok(None),
            1 => Ok(Some(Completion::from_wc(&wc))),
            _ => Err(Error::other("the completion queue cannot be polled: the device is gone")),
        }
    }

    /// Waits for a completion, whatever its status: awake for a moment, then asleep, since a device made of software needs
    /// the processor.
    ///
    /// # Errors
    ///
    /// `TimedOut` after `timeout`; as [`poll`](Self::poll).
    pub fn wait(&self, timeout: Duration) -> Result<Completion> {
        const AWAKE: usize = 64;
        let deadline = Instant::now() + timeout;
        loop {
            for _ in 0..AWAKE {
                if let Some(completion) = self.poll()? {
                    return Ok(completion);
                }
                std::hint::spin_loop();
            }
            // SAFETY: a live completion queue.
            check(unsafe { ibv_req_notify_cq(self.cq, 0) })?;
            // What came before the request for a notice brings none.
            if let Some(completion) = self.poll()? {
                return Ok(completion);
            }
            self.sleep(deadline)?;
        }
    }

    /// Sleeps until there is a notice, and takes it; at the latest until `deadline`.
    fn sleep(&self, deadline: Instant) -> Result<()> {
        let left = deadline.saturating_duration_since(Instant::now());
        // SAFETY: a live channel.
        let mut ready = libc::pollfd { fd: unsafe { (*self.channel).fd }, events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid entry.
        match unsafe { libc::poll(&mut ready, 1, left.as_millis().try_into().unwrap_or(i32::MAX)) } {
            0 if left < Duration::from_millis(1) => Err(Error::new(ErrorKind::TimedOut, "no completion in time")),
            0 => Ok(()),
            1.. => {
                let (mut cq, mut context) = (null_mut(), null_mut());
                // SAFETY: a live channel, on which there is an event; it is acknowledged, or the queue could not be destroyed.
                unsafe {
                    check(ibv_get_cq_event(self.channel, &mut cq, &mut context))?;
                    ibv_ack_cq_events(cq, 1);
                }
                Ok(())
            }
            _ => match Error::last_os_error() {
                error if error.kind() == ErrorKind::Interrupted => Ok(()),
                error => Err(error),
            },
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // SAFETY: each comes from the verb that made it, once, and goes before what it points to.
        unsafe {
            if !self.qp.is_null() {
                ibv_destroy_qp(self.qp);
            }
            if !self.cq.is_null() {
                ibv_destroy_cq(self.cq);
            }
            if !self.channel.is_null() {
                ibv_destroy_comp_channel(self.channel);
            }
        }
    }
}

/// Attributes for a change to `state`, with everything else zero.
fn attributes(state: ibv_qp_state::Type) -> ibv_qp_attr {
    let zero = ibv_gid { raw: [0; 16] };
    let grh = ibv_global_route { dgid: zero, flow_label: 0, sgid_index: 0, hop_limit: 0, traffic_class: 0 };
    let ah = ibv_ah_attr { grh, dlid: 0, sl: 0, src_path_bits: 0, static_rate: 0, is_global: 0, port_num: 0 };
    // SAFETY: integers and unions of them: all of which zeroes are valid for.
    let attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
    ibv_qp_attr { qp_state: state, ah_attr: ah, ..attr }
}
