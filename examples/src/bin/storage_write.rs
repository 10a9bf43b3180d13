//! A storage write path: each block of a file is read once, past the page cache, and written to three replicas from that buffer.
//!
//! `buffer_aligned` is memory that both `O_DIRECT` and the adapter take, so no byte is copied. A block is one flight with three
//! completions: nobody touches it before the last of them has come, and then it is the program's again. Afterwards every block
//! is read back from every replica, and compared.

use rdmalloc::registrar::verbs::rdma_sys::{self, ibv_send_flags, ibv_send_wr, ibv_sge, ibv_wr_opcode, rdma_t};
use rdmalloc::registrar::verbs::{ProtectionDomain, Verbs};
use rdmalloc::{Access, Buffer, Device, Flight, Heap, RemoteSlice};
use rdmalloc_examples::Queue;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;

/// What is read and written at once, and how many of them there are.
const BLOCK: usize = 256 << 10;
const BLOCKS: usize = 8;

/// A replica: another machine, most often. Here it shares the process, and little else.
struct Replica {
    heap: Heap,
    device: Device,
    store: Buffer,
    /// Its end of the connection, which takes writes and reads by itself.
    _queue: Queue,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args_os().nth(1).map_or_else(|| std::env::temp_dir().join("storage_write"), Into::into);
    fs::write(&path, (0..BLOCK * BLOCKS).map(|n| (n * n / 509) as u8).collect::<Vec<u8>>())?;
    let direct = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(&path);
    let file = match direct {
        Ok(file) => file,
        Err(error) => {
            println!("{}: the file system has no O_DIRECT ({error}); through the page cache", path.display());
            File::open(&path)?
        }
    };

    let domain = Arc::new(ProtectionDomain::open(None)?);
    let heap = Heap::builder().build()?; // peers do not reach it
    let device = heap.attach(Verbs::new(Arc::clone(&domain)))?;
    let (mut replicas, mut links) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        let queue = Queue::new(&domain)?;
        let (mut replica, end) = Replica::new(&queue)?;
        queue.connect(end)?;
        // Told over the wire, in 20 bytes.
        let told = RemoteSlice::from_bytes(replica.store.remote_mut(replica.device)?.to_bytes());
        links.push((queue, told));
        replicas.push(replica);
    }

    // Each block is read once, and written to all.
    for block in 0..BLOCKS {
        let mut buffer = heap.buffer_aligned(BLOCK, 4096)?;
        assert_eq!(buffer.read_at(&file, BLOCK, (block * BLOCK) as u64)?, BLOCK);
        let flight = device.fly(buffer)?;
        let sge = flight.sge()?.to_ibv();
        let id = flight.into_id_for(links.len() as u16).map_err(|_| "no replica, or too many")?;
        for (queue, told) in &links {
            let place = told.slice((block * BLOCK) as u64..)?;
            // SAFETY: the flight keeps the block as it is until all completions of its id have come.
            unsafe { post(queue, id, ibv_wr_opcode::IBV_WR_RDMA_WRITE, sge, place)? };
        }
    }
    // Whichever replica is last brings a block back.
    let mut written = Vec::new();
    for _ in 0..BLOCKS {
        for (queue, _) in &links {
            if let Some(flight) = Flight::<Buffer>::landed(queue.completion()?.wr_id)? {
                // SAFETY: three work requests were posted, and three completions have come.
                written.push(unsafe { flight.complete_send() });
            }
        }
    }
    assert_eq!((written.len(), device.flights().under_way), (BLOCKS, 0));

    // Back, into memory of the same kind.
    let original = fs::read(&path)?;
    for (queue, told) in &links {
        for (block, expected) in original.chunks(BLOCK).enumerate() {
            let mut flight = device.fly(heap.buffer_aligned(BLOCK, 4096)?)?;
            let sge = flight.part_mut(0, ..BLOCK)?.to_ibv();
            let (id, place) = (flight.into_id(), told.slice((block * BLOCK) as u64..)?);
            // SAFETY: the flight keeps the buffer until the completion.
            unsafe { post(queue, id, ibv_wr_opcode::IBV_WR_RDMA_READ, sge, place)? };
            let flight = Flight::<Buffer>::from_id(queue.completion()?.wr_id)?;
            // SAFETY: the only work request has completed; a READ that succeeds fills the whole entry.
            let buffer = unsafe { flight.complete(BLOCK as u32) }?;
            assert!(buffer == expected, "block {block}");
        }
    }
    println!("{BLOCKS} blocks of {BLOCK} bytes on {} replicas, as they are in the file", links.len());

    // Connections first; then nobody works on anything any more.
    drop(links);
    heap.detach(device)?;
    replicas.into_iter().try_for_each(|Replica { heap, device, _queue, .. }| heap.detach(device))?;
    Ok(fs::remove_file(&path)?)
}

impl Replica {
    /// A replica that is connected to `peer`, and its address for the peer.
    fn new(peer: &Queue) -> Result<(Replica, rdmalloc_examples::Address), Box<dyn std::error::Error>> {
        let domain = Arc::new(ProtectionDomain::open(None)?);
        let heap = Heap::builder().access(Access::REMOTE_WRITE | Access::REMOTE_READ).build()?;
        let device = heap.attach(Verbs::new(Arc::clone(&domain)))?;
        let (store, queue) = (heap.buffer_zeroed(BLOCK * BLOCKS)?, Queue::new(&domain)?);
        queue.connect(peer.address())?;
        let address = queue.address();
        Ok((Replica { heap, device, store, _queue: queue }, address))
    }
}

/// Posts an RDMA write or read.
///
/// # Safety
///
/// Until the completion, the memory lives: a source is not written, a target not touched at all.
unsafe fn post(queue: &Queue, id: u64, opcode: u32, mut sge: ibv_sge, remote: RemoteSlice) -> io::Result<()> {
    // SAFETY: integers, null pointers and unions of them: zeros are valid.
    let mut wr: ibv_send_wr = unsafe { std::mem::zeroed() };
    (wr.wr_id, wr.sg_list, wr.num_sge, wr.opcode) = (id, &mut sge, 1, opcode);
    wr.send_flags = ibv_send_flags::IBV_SEND_SIGNALED.0;
    wr.wr.rdma = rdma_t { remote_addr: remote.addr, rkey: remote.rkey };
    // SAFETY: a live queue pair, and a complete work request, which is copied. The memory: the caller's duty.
    match unsafe { rdma_sys::ibv_post_send(queue.qp(), &mut wr, &mut std::ptr::null_mut()) } {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}
