//! An RPC that echoes: requests are gathered, received by a pool, and answered by RDMA into a memory window.
//!
//! A request is 28 bytes of header and a body, which is sent from where it lies. The header tells of a window: the buffer for
//! the reply, and all of the client that the server can reach. It writes the body there from where it was received, and says so
//! by a short message; the client ends the window, and has the reply.

use bytes::{Buf, BufMut, Bytes};
use rdmalloc::registrar::verbs::rdma_sys::{self, ibv_send_flags, ibv_send_wr, ibv_sge, ibv_wr_opcode, rdma_t};
use rdmalloc::registrar::verbs::{ProtectionDomain, Verbs};
use rdmalloc::{Access, Buffer, Device, Flight, Gathered, Gathering, Heap, Rdmalloc};
use rdmalloc::{RecvPool, RecvQueue, RemoteSlice, Windows};
use rdmalloc_examples::{MAX_SGE, Queue};
use std::error::Error;
use std::sync::Arc;

/// Bodies lie in collections of the program, so these come from rdmalloc as well.
#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

const CALLS: u64 = 20;
/// The id of what is done with a window. Those of flights are below 2^48, those of receive pools have bit 63 set.
const WINDOW: u64 = 1 << 48;

/// One end of the connection.
struct End {
    device: Device,
    heap: Heap,
    received: RecvPool<RecvQueue<Arc<Queue>>>,
    queue: Arc<Queue>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let domain = Arc::new(ProtectionDomain::open(None)?);
    let device = HEAP.attach(Verbs::new(Arc::clone(&domain)))?;
    let (client, server) = Queue::pair(&domain)?;
    let (mut client, server) = (End::new(&domain, client)?, End::new(&domain, server)?);
    let serving = std::thread::spawn(|| serve(server).expect("calls are answered"));

    // Of this heap, peers reach what a window shows, as long as it does.
    let replies = Heap::builder().access(Access::WINDOWS).build()?;
    let windows = Windows::new(replies.attach(Verbs::new(Arc::clone(&domain)))?, Arc::clone(&client.queue))?;
    for call in 0..CALLS {
        let body: Bytes = format!("call {call}, ").repeat(1 + 97 * call as usize).into();
        let reply = client.call(call, body.clone(), replies.buffer_zeroed(body.len())?, &windows)?;
        assert_eq!(reply, body);
    }
    println!("{CALLS} calls were answered, with {} window(s)", windows.stats().made);
    serving.join().map_err(|_| "the server has failed")?;
    drop(windows); // they keep the queue pair
    client.close()?;
    Ok(HEAP.detach(device)?) // nobody uses it any more
}

/// Answers so many calls.
fn serve(mut end: End) -> Result<(), Box<dyn Error>> {
    let mut answered = 0;
    while answered < CALLS {
        let done = end.queue.completion()?;
        if !end.received.owns(done.wr_id) {
            // SAFETY: the completion of the flight's last work request.
            drop(unsafe { Flight::<(Bytes, Buffer)>::from_id(done.wr_id)?.complete_send() });
            end.received.restock()?; // the request was in it
            answered += 1;
            continue;
        }
        // SAFETY: polled from the queue's completion queue.
        let mut body = unsafe { end.received.complete(done.wr_id, done.status, done.byte_len) }?;
        let (mut told, mut answer) = ([0; RemoteSlice::BYTES], end.heap.buffer(8)?);
        body.try_copy_to_slice(&mut told)?;
        answer.put_u64_le(body.try_get_u64_le()?);
        let place = RemoteSlice::from_bytes(told).slice(..body.len() as u64)?;
        // Two work requests, one flight: the later completes the earlier of the same queue.
        let flight = end.device.fly((body, answer))?;
        let (mut body, mut answer) = ([flight.part(0, ..)?.to_ibv()], [flight.part(1, ..)?.to_ibv()]);
        let id = flight.into_id();
        // SAFETY: the flight keeps both until the completion.
        unsafe {
            end.post(id, &mut body, Some(place))?;
            end.post(id, &mut answer, None)?;
        }
    }
    end.close()
}

impl End {
    fn new(domain: &Arc<ProtectionDomain>, queue: Queue) -> Result<End, Box<dyn Error>> {
        let (heap, queue) = (Heap::builder().build()?, Arc::new(queue));
        let device = heap.attach(Verbs::new(Arc::clone(domain)))?;
        let received = heap.recv_pool(device).size(32 << 10).depth(8).build(RecvQueue::new(Arc::clone(&queue)))?;
        Ok(End { device, heap, received, queue })
    }

    /// Sends a request, and waits for the reply, which comes into the given buffer.
    fn call(&mut self, call: u64, body: Bytes, reply: Buffer, windows: &Windows) -> Result<Buffer, Box<dyn Error>> {
        let binding = windows.expose(reply, Access::REMOTE_WRITE, WINDOW)?;
        let mut header = self.heap.buffer(4096)?; // has room for bodies that are short, or not ours
        header.put_slice(&binding.remote().to_bytes());
        header.put_u64_le(call);
        let flight = self.device.fly(Gathering::new(MAX_SGE as usize).own(self.device, header, body)?)?;
        let mut list = flight.sges().map(|sge| sge.map(|sge| sge.to_ibv())).collect::<Result<Vec<_>, _>>()?;
        // SAFETY: the flight keeps the message. It goes out behind the bind, since on the same queue pair.
        unsafe { self.post(flight.into_id(), &mut list, None)? };
        let (mut binding, mut exposed, mut answer) = (Some(binding), None, None);
        for _ in 0..3 {
            let done = self.queue.completion()?;
            // SAFETY: each is told of its own completion, and once.
            unsafe {
                match done.wr_id {
                    WINDOW => exposed = binding.take().map(|binding| binding.bound(done.status)).transpose()?,
                    id if !self.received.owns(id) => drop(Flight::<Gathered>::from_id(id)?.complete_send()),
                    id => answer = Some(self.received.complete(id, done.status, done.byte_len)?),
                }
            }
        }
        self.received.restock()?;
        assert_eq!(answer.ok_or("no answer")?.get_u64_le(), call);
        let ending = exposed.ok_or("no window")?.revoke(WINDOW)?;
        // SAFETY: the only work request under way. From here on the window's rkey is dead.
        Ok(unsafe { ending.revoked(self.queue.completion()?.status) }?)
    }

    /// Posts a send, which is signalled, or a write to `place`, which is not.
    ///
    /// # Safety
    ///
    /// The memory of the list lives, and is not written, until the completion: of this, or of a later one that is signalled.
    unsafe fn post(&self, id: u64, list: &mut [ibv_sge], place: Option<RemoteSlice>) -> Result<(), Box<dyn Error>> {
        // SAFETY: integers, null pointers and unions of them: zeros are valid.
        let mut wr: ibv_send_wr = unsafe { std::mem::zeroed() };
        (wr.wr_id, wr.sg_list, wr.num_sge) = (id, list.as_mut_ptr(), list.len() as i32);
        (wr.opcode, wr.send_flags) = (ibv_wr_opcode::IBV_WR_SEND, ibv_send_flags::IBV_SEND_SIGNALED.0);
        if let Some(place) = place {
            (wr.opcode, wr.send_flags) = (ibv_wr_opcode::IBV_WR_RDMA_WRITE, 0);
            wr.wr.rdma = rdma_t { remote_addr: place.addr, rkey: place.rkey };
        }
        // SAFETY: a live queue pair, and a complete work request, which is copied. The memory: the caller's duty.
        let errno = unsafe { rdma_sys::ibv_post_send(self.queue.qp(), &mut wr, &mut std::ptr::null_mut()) };
        if errno == 0 { Ok(()) } else { Err(std::io::Error::from_raw_os_error(errno).into()) }
    }

    /// Ends the connection, and takes the receives back that are still posted. The heap closes with its last buffer.
    fn close(self) -> Result<(), Box<dyn Error>> {
        let (_, posted) = self.received.close();
        drop(Arc::into_inner(self.queue).ok_or("the queue pair is still used")?);
        // SAFETY: the queue pair is destroyed: that was its last owner.
        drop(unsafe { posted.reclaim() });
        Ok(())
    }
}
