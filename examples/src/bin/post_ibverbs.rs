//! Posting beside ibverbs 0.9, as far as its types allow.
//!
//! ibverbs keeps its `ibv_pd`, `ibv_cq` and `ibv_qp` to itself, and its queue pairs post only what its own `MemoryRegion`
//! allocated and registered. So rdmalloc cannot be attached to its `ProtectionDomain`, and its `QueuePair` cannot post an entry
//! of rdmalloc; it has no RDMA write or read either. What works, and is shown here:
//!
//! - its raw layer, the crate ibverbs-sys, posts what rdmalloc allocates, on a protection domain that rdmalloc opened (the C
//!   structs are the same in all crates, so their pointers are cast);
//! - its safe layer is the peer: queue pairs of either kind connect, since the fields of endpoints are public;
//! - its `MemoryRegion` takes its memory from the global allocator, so from rdmalloc, and such memory has entries on
//!   rdmalloc's devices. (ibverbs registers it once more, by itself, open to all peers.)

use ibverbs::{QueuePairEndpoint, ibv_qp_type::IBV_QPT_RC, ibv_wc};
use ibverbs_sys::{ibv_gid, ibv_qp, ibv_recv_wr, ibv_send_flags, ibv_send_wr, ibv_sge, ibv_wr_opcode};
use rdmalloc::registrar::verbs::{ProtectionDomain, Verbs};
use rdmalloc::{Rdmalloc, Sge, SgeMut};
use rdmalloc_examples::{Address, Queue};
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // This end: a protection domain that rdmalloc opened.
    let domain = Arc::new(ProtectionDomain::open(None)?);
    let device = HEAP.attach(Verbs::new(Arc::clone(&domain)))?;
    let queue = Queue::new(&domain)?;
    let mine = queue.address();

    // The peer: ibverbs' safe layer on the same device, with a protection domain of its own. It is reached by the same GID.
    let devices = ibverbs::devices()?;
    let named = |d: &ibverbs::Device<'_>| d.name().is_some_and(|n| n.to_bytes() == domain.device_name().as_bytes());
    let context = devices.iter().find(named).ok_or("ibverbs does not see the device")?.open()?;
    let (completions, peers_domain) = (context.create_cq(4, 0)?, context.alloc_pd()?);
    let gid = ibverbs::Gid::from(ibv_gid { raw: mine.gid });
    let entry = context.gid_table().iter().find(|e| e.gid == gid).ok_or("the port lost its address")?;
    let mut builder = peers_domain.create_qp(&completions, &completions, IBV_QPT_RC);
    let peer = builder.set_gid_index(entry.gid_index).set_timeout(16).set_min_rnr_timer(1).build()?;
    queue.connect(Address { qpn: peer.endpoint().num, ..mine })?;
    let mut peer = peer.handshake(QueuePairEndpoint { num: mine.qpn, lid: mine.lid, gid: Some(gid) })?;

    // From a String of rdmalloc, into memory of ibverbs.
    let request: String = (0..1000).map(|n| format!("{n} ")).collect();
    let mut region = peers_domain.allocate::<u8>(8192)?;
    // SAFETY: both live until their completions are here, below; nobody touches them before.
    unsafe {
        peer.post_receive(&mut region, .., 1)?;
        send(&queue, 2, &device.sge(request.as_bytes())?)?;
    }
    let len = completion(&completions, 1)?;
    assert_eq!((queue.completion()?.wr_id, &region[..len]), (2, request.as_bytes()));

    // And back, into the room of a Vec of rdmalloc.
    let mut reply: Vec<u8> = Vec::with_capacity(8192);
    // SAFETY: as above.
    unsafe {
        receive(&queue, 3, &device.sge_mut(reply.spare_capacity_mut())?)?;
        peer.post_send(&mut region, ..len, 4)?;
    }
    let received = queue.completion()?;
    assert_eq!((received.wr_id, completion(&completions, 4).is_ok()), (3, true));
    // SAFETY: the device wrote so many bytes, which fit, since the receive succeeded.
    unsafe { reply.set_len(received.byte_len as usize) };
    assert_eq!(reply, request.as_bytes());

    // ibverbs' memory lies in rdmalloc's arenas, so this end can send it, too.
    let mut copy = peers_domain.allocate::<u8>(len)?;
    // SAFETY: as above.
    unsafe {
        peer.post_receive(&mut copy, .., 5)?;
        send(&queue, 6, &device.sge(&region[..len])?)?;
    }
    assert_eq!((completion(&completions, 5)?, queue.completion()?.wr_id), (len, 6));
    assert_eq!(copy[..], region[..len]);
    println!("sent and received {len} bytes, and back, and again");

    HEAP.detach(device)?; // nothing is under way any more
    Ok(())
}

/// Posts a send with ibverbs-sys.
///
/// # Safety
///
/// Until the completion, the memory lives and is not written.
unsafe fn send(queue: &Queue, id: u64, sge: &Sge<'_>) -> std::io::Result<()> {
    let qp: *mut ibv_qp = queue.qp().cast();
    let sg_list = &mut ibv_sge { addr: sge.addr(), length: sge.length(), lkey: sge.lkey() };
    let mut wr = ibv_send_wr { wr_id: id, sg_list, num_sge: 1, ..Default::default() };
    (wr.opcode, wr.send_flags) = (ibv_wr_opcode::IBV_WR_SEND, ibv_send_flags::IBV_SEND_SIGNALED.0);
    // SAFETY: a live queue pair, whose context has this call, and a complete work request, which is copied. The memory: the
    // caller's duty.
    match unsafe { (*(*qp).context).ops.post_send.unwrap()(qp, &mut wr, &mut null_mut()) } {
        0 => Ok(()),
        errno => Err(std::io::Error::from_raw_os_error(errno)),
    }
}

/// Posts a receive with ibverbs-sys.
///
/// # Safety
///
/// Until the completion, the memory lives and is not touched.
unsafe fn receive(queue: &Queue, id: u64, sge: &SgeMut<'_>) -> std::io::Result<()> {
    let qp: *mut ibv_qp = queue.qp().cast();
    let sg_list = &mut ibv_sge { addr: sge.addr(), length: sge.length(), lkey: sge.lkey() };
    let mut wr = ibv_recv_wr { wr_id: id, sg_list, num_sge: 1, next: null_mut() };
    // SAFETY: as in `send`.
    match unsafe { (*(*qp).context).ops.post_recv.unwrap()(qp, &mut wr, &mut null_mut()) } {
        0 => Ok(()),
        errno => Err(std::io::Error::from_raw_os_error(errno)),
    }
}

/// The bytes of the peer's next completion, which must be that of the work request `id`; waits ten seconds at most.
fn completion(queue: &ibverbs::CompletionQueue<'_>, id: u64) -> Result<usize, Box<dyn std::error::Error>> {
    let late = Instant::now() + Duration::from_secs(10);
    let mut entry = [ibv_wc::default()];
    while queue.poll(&mut entry)?.is_empty() {
        if Instant::now() > late {
            return Err("no completion within ten seconds".into());
        }
        std::thread::yield_now();
    }
    match entry[0].error() {
        None if entry[0].wr_id() == id => Ok(entry[0].len()),
        error => Err(format!("work request {} ended, with error {error:?}", entry[0].wr_id()).into()),
    }
}
