//! Posting with rdma-sys: a `String` is sent from where it lies, a `Vec` receives it, and a peer's memory is written and read.
//!
//! The scatter-gather entries of [`Device::sge`](rdmalloc::Device::sge) become `ibv_sge`s by `to_ibv`. They borrow what they
//! describe; the work request does not, so what is posted lives, and is not touched, until its completion.

use rdmalloc::registrar::verbs::rdma_sys::{self, ibv_recv_wr, ibv_send_wr, ibv_sge, ibv_wr_opcode};
use rdmalloc::registrar::verbs::{ProtectionDomain, Verbs};
use rdmalloc::{Access, Heap, Rdmalloc, RemoteSlice};
use rdmalloc_examples::Queue;
use std::mem::zeroed;
use std::ptr::null_mut;
use std::sync::Arc;

/// All collections of the program lie in memory that devices reach.
#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let domain = Arc::new(ProtectionDomain::open(None)?);
    let device = HEAP.attach(Verbs::new(Arc::clone(&domain)))?;
    let (client, server) = Queue::pair(&domain)?;

    // SEND: from a String, into the room of a Vec.
    let request: String = (0..1000).map(|n| format!("{n} ")).collect();
    let mut inbox: Vec<u8> = Vec::with_capacity(8192);
    let (source, target) = (device.sge(request.as_bytes())?, device.sge_mut(inbox.spare_capacity_mut())?);
    // SAFETY: both live until their completions are here, below; nobody touches them before.
    unsafe {
        post_receive(&server, 1, target.to_ibv())?;
        post(&client, 2, source.to_ibv(), ibv_wr_opcode::IBV_WR_SEND, None)?;
    }
    let received = server.completion()?;
    assert_eq!((received.wr_id, client.completion()?.wr_id), (1, 2));
    // SAFETY: the device wrote so many bytes, which fit, since the receive succeeded.
    unsafe { inbox.set_len(received.byte_len as usize) };
    assert_eq!(inbox, request.as_bytes());
    println!("sent and received {} bytes", inbox.len());

    // WRITE and READ: peers reach only heaps that ask for it. The same protection domain serves all heaps.
    let pool = Heap::builder().access(Access::REMOTE_WRITE | Access::REMOTE_READ).build()?;
    let reached = pool.attach(Verbs::new(Arc::clone(&domain)))?;
    let mut shelf = pool.buffer(64 << 10)?;
    let remote = shelf.remote_mut(reached)?; // what the peer is told: address, length and rkey, 20 bytes
    let goods: Vec<u8> = (0..50_000u32).map(|n| (n * n / 128) as u8).collect();
    // SAFETY: `goods` is neither changed nor dropped, and `shelf` not touched, before the completion.
    unsafe { post(&client, 3, device.sge(&goods)?.to_ibv(), ibv_wr_opcode::IBV_WR_RDMA_WRITE, Some(remote))? };
    assert_eq!(client.completion()?.wr_id, 3);
    // SAFETY: so many bytes were written.
    unsafe { shelf.set_len(goods.len()) };
    assert!(shelf[..] == goods[..]);

    let mut copy: Vec<u8> = Vec::with_capacity(goods.len());
    let target = device.sge_mut(&mut copy.spare_capacity_mut()[..goods.len()])?;
    // SAFETY: as above, with `copy`.
    unsafe { post(&client, 4, target.to_ibv(), ibv_wr_opcode::IBV_WR_RDMA_READ, Some(remote))? };
    assert_eq!(client.completion()?.wr_id, 4);
    // SAFETY: a READ that succeeds fills the whole entry.
    unsafe { copy.set_len(goods.len()) };
    assert!(copy == goods);
    println!("wrote and read back {} bytes", copy.len());

    // No work request is under way any more, so the devices can go. The buffer and the collections live on.
    pool.detach(reached)?;
    HEAP.detach(device)?;
    assert!(device.sge(&goods).is_err());
    Ok(())
}

/// Posts a send, or a write to or a read from `remote`.
///
/// # Safety
///
/// Until the completion, the memory lives: a source is not written, a target not touched at all.
unsafe fn post(
    queue: &Queue,
    id: u64,
    mut sge: ibv_sge,
    opcode: u32,
    remote: Option<RemoteSlice>,
) -> std::io::Result<()> {
    // SAFETY: integers, null pointers and unions of them: zeros are valid.
    let mut wr: ibv_send_wr = unsafe { zeroed() };
    (wr.wr_id, wr.sg_list, wr.num_sge, wr.opcode) = (id, &mut sge, 1, opcode);
    wr.send_flags = rdma_sys::ibv_send_flags::IBV_SEND_SIGNALED.0;
    if let Some(remote) = remote {
        wr.wr.rdma = rdma_sys::rdma_t { remote_addr: remote.addr, rkey: remote.rkey };
    }
    // SAFETY: a live queue pair, and a complete work request, which is copied. The memory: the caller's duty.
    match unsafe { rdma_sys::ibv_post_send(queue.qp(), &mut wr, &mut null_mut()) } {
        0 => Ok(()),
        errno => Err(std::io::Error::from_raw_os_error(errno)),
    }
}

/// Posts a receive.
///
/// # Safety
///
/// Until the completion, the memory lives and is not touched.
unsafe fn post_receive(queue: &Queue, id: u64, mut sge: ibv_sge) -> std::io::Result<()> {
    let mut wr = ibv_recv_wr { wr_id: id, next: null_mut(), sg_list: &mut sge, num_sge: 1 };
    // SAFETY: as in `post`.
    match unsafe { rdma_sys::ibv_post_recv(queue.qp(), &mut wr, &mut null_mut()) } {
        0 => Ok(()),
        errno => Err(std::io::Error::from_raw_os_error(errno)),
    }
}
