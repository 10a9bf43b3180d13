//! Posting with sideway: its device, protection domain and queue pairs, memory of rdmalloc.
//!
//! A registrar needs to keep the protection domain alive, which sideway's `Arc` does: so one `unsafe impl` for a newtype is all
//! that joins them. An entry's fields are what `setup_sge` takes. (`setup_sge_list` takes `ibv_sge`s of rdma-mummy-sys, the
//! crate below sideway, which a program that gathers depends on as well.)
//!
//! sideway loads libibverbs when the program starts, and its functions of the same names also serve rdma-sys, on which
//! rdmalloc is built: both are in one program, and use the same library.

use rdmalloc::registrar::verbs::{AsProtectionDomain, Verbs, rdma_sys::ibv_pd};
use rdmalloc::{Rdmalloc, Sge, SgeMut};
use sideway::ibverbs::AccessFlags;
use sideway::ibverbs::address::{AddressHandleAttribute, GidEntry, GidType};
use sideway::ibverbs::completion::{BasicCompletionQueue, GenericCompletionQueue, WorkCompletionStatus};
use sideway::ibverbs::device::DeviceList;
use sideway::ibverbs::device_context::{DeviceContext, Mtu};
use sideway::ibverbs::protection_domain::ProtectionDomain;
use sideway::ibverbs::queue_pair::{
    BasicQueuePair, PostSendGuard, QueuePair, QueuePairAttribute, QueuePairState, SetScatterGatherEntry,
    WorkRequestFlags,
};
use std::error::Error;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

/// Keeps sideway's protection domain for rdmalloc.
struct Domain(Arc<ProtectionDomain>);

// SAFETY: the Arc keeps the domain, which keeps its context; the pointer is the same at every call.
unsafe impl AsProtectionDomain for Domain {
    fn as_protection_domain(&self) -> NonNull<ibv_pd> {
        // SAFETY: the pointer is used as long as `self` lives. Both crates name the same C struct.
        unsafe { self.0.pd() }.cast()
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let context = DeviceList::new()?.iter().next().ok_or("there is no verbs device")?.open()?;
    let domain = context.alloc_pd()?;
    let device = HEAP.attach(Verbs::new(Domain(Arc::clone(&domain))))?;

    let (mut client, sent) = queue(&context, &domain)?;
    let (mut server, received) = queue(&context, &domain)?;
    let gid = gid(&context)?;
    let (to_server, to_client) = (server.qp_number(), client.qp_number());
    connect(&mut client, to_server, &gid)?;
    connect(&mut server, to_client, &gid)?;

    // From a String, into the room of a Vec.
    let request: String = (0..1000).map(|n| format!("{n} ")).collect();
    let mut inbox: Vec<u8> = Vec::with_capacity(8192);
    let (source, target) = (device.sge(request.as_bytes())?, device.sge_mut(inbox.spare_capacity_mut())?);
    // SAFETY: both live until their completions are here, below; nobody touches them before.
    unsafe {
        receive(&mut server, 1, &target)?;
        send(&mut client, 2, &source)?;
    }
    let (id, len) = completion(&received)?;
    assert_eq!((id, completion(&sent)?.0), (1, 2));
    // SAFETY: the device wrote so many bytes, which fit, since the receive succeeded.
    unsafe { inbox.set_len(len as usize) };
    assert_eq!(inbox, request.as_bytes());
    println!("sent and received {len} bytes");

    HEAP.detach(device)?; // nothing is under way any more
    Ok(())
}

/// # Safety
///
/// Until the completion, the memory lives and is not written.
unsafe fn send(queue: &mut BasicQueuePair, id: u64, sge: &Sge<'_>) -> Result<(), Box<dyn Error>> {
    let mut guard = queue.start_post_send();
    let request = guard.construct_wr(id, WorkRequestFlags::Signaled).setup_send();
    // SAFETY: the caller's duty.
    unsafe { request.setup_sge(sge.lkey(), sge.addr(), sge.length()) };
    Ok(guard.post()?)
}

/// # Safety
///
/// Until the completion, the memory lives and is not touched.
unsafe fn receive(queue: &mut BasicQueuePair, id: u64, sge: &SgeMut<'_>) -> Result<(), Box<dyn Error>> {
    let mut guard = queue.start_post_recv();
    let request = guard.construct_wr(id);
    // SAFETY: the caller's duty.
    unsafe { request.setup_sge(sge.lkey(), sge.addr(), sge.length()) };
    Ok(guard.post()?)
}

/// The next completion's id and bytes; waits ten seconds at most.
fn completion(queue: &BasicCompletionQueue) -> Result<(u64, u32), Box<dyn Error>> {
    let late = Instant::now() + Duration::from_secs(10);
    while Instant::now() < late {
        match queue.start_poll().ok().and_then(|mut poller| poller.next()) {
            Some(done) if done.status() == WorkCompletionStatus::Success as u32 => {
                return Ok((done.wr_id(), done.byte_len()));
            }
            Some(done) => return Err(format!("{} ended with status {}", done.wr_id(), done.status()).into()),
            None => std::thread::yield_now(),
        }
    }
    Err("no completion within ten seconds".into())
}

/// A queue pair, which takes receives now, with a completion queue of its own.
fn queue(
    context: &Arc<DeviceContext>,
    domain: &Arc<ProtectionDomain>,
) -> Result<(BasicQueuePair, Arc<BasicCompletionQueue>), Box<dyn Error>> {
    // A poll takes up to 32 completions out of the queue; `completion` keeps one. So no more are ever under way.
    let completions = context.create_cq_builder().setup_cqe(2).build()?;
    let mut builder = domain.create_qp_builder();
    let both = GenericCompletionQueue::from(Arc::clone(&completions));
    let mut queue = builder.setup_send_cq(both.clone()).setup_recv_cq(both).setup_max_send_wr(1).build()?;
    let mut init = QueuePairAttribute::new();
    init.setup_state(QueuePairState::Init).setup_pkey_index(0).setup_port(1);
    queue.modify(init.setup_access_flags(AccessFlags::LocalWrite))?;
    Ok((queue, completions))
}

/// Connects a reliable queue pair to the one with that number behind that address.
fn connect(queue: &mut BasicQueuePair, peer: u32, gid: &GidEntry) -> Result<(), Box<dyn Error>> {
    let mut address = AddressHandleAttribute::new();
    address.setup_port(1).setup_grh_src_gid_index(gid.gid_index() as u8);
    address.setup_grh_dest_gid(&gid.gid()).setup_grh_hop_limit(64);
    let mut ready = QueuePairAttribute::new();
    ready.setup_state(QueuePairState::ReadyToReceive).setup_path_mtu(Mtu::Mtu1024).setup_dest_qp_num(peer);
    ready.setup_rq_psn(0).setup_max_dest_read_atomic(1).setup_min_rnr_timer(1);
    queue.modify(ready.setup_address_vector(&address))?;
    let mut ready = QueuePairAttribute::new();
    ready.setup_state(QueuePairState::ReadyToSend).setup_sq_psn(0).setup_max_read_atomic(1);
    Ok(queue.modify(ready.setup_timeout(16).setup_retry_cnt(7).setup_rnr_retry(7))?)
}

/// The address of the port that routers know: RoCE v2, IPv4.
fn gid(context: &DeviceContext) -> Result<GidEntry, Box<dyn Error>> {
    let all = context.query_gid_table()?;
    let routed = |entry: &&GidEntry| entry.gid_type() == GidType::RoceV2 && !entry.gid().is_unicast_link_local();
    Ok(*all.iter().find(routed).or(all.first()).ok_or("the port has no address")?)
}
