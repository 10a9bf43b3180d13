//! An RPC that echoes: requests are gathered, received by a pool, and answered by RDMA into a memory window.
//!
//! A request is 28 bytes of header and a body, which is sent from where it lies. The header tells the server of a window: the
//! buffer for the reply, which nothing else of the client's memory is reached by. The server writes the body there from where it
//! was received, and says so by a short message; the client ends the window, and has the reply.

use bytes::{Buf, BufMut, Bytes};
use rdmalloc::registrar::verbs::rdma_sys::{self, ibv_send_flags, ibv_send_wr, ibv_sge, ibv_wr_opcode, rdma_t};
use rdmalloc::registrar::verbs::{ProtectionDomain, Verbs};
use rdmalloc::{Access, Buffer, Device, Flight, Gathered, Gathering, Heap, Rdmalloc};
use rdmalloc::{RecvPool, RecvQueue, RemoteSlice, Windows};
use rdmalloc_examples::{MAX_SGE, Queue};
use std::error::Error;
use std::sync::Arc;
use std::thread;

/// Bodies lie in collections of the program, so these come from rdmalloc as well.
#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

const CALLS: u64 = 20;
/// The ids of binding and ending a window. Those of flights are below 2^48, those of receive pools have bit 63 set.
const BIND: u64 = 1 << 48;
const END: u64 = 2 << 48;

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
    let serving = thread::spawn(move || serve(server).map_err(|error| error.to_string()));

    // Only what a window shows of this heap is reached by peers, as long as the window is there.
    let replies = Heap::builder().access(Access::WINDOWS).build()?;
    let windows = Windows::new(replies.attach(Verbs::new(Arc::clone(&domain)))?, Arc::clone(&client.queue))?;
    for call in 0..CALLS {
        let body: Bytes = format!("call {call}, ").repeat(1 + 97 * call as usize).into();
        let reply = client.call(call, body.clone(), replies.buffer_zeroed(body.len())?, &windows)?;
        assert_eq!(reply, body);
    }
    println!("{CALLS} calls were answered; windows: {:?}", windows.stats());
    serving.join().map_err(|_| "the server has panicked")??;
    Ok(HEAP.detach(device)?)
}

/// Answers so many calls.
fn serve(mut end: End) -> Result<(), Box<dyn Error>> {
    let (mut answered, mut under_way) = (0, 0);
    while answered < CALLS || under_way > 0 {
        let done = end.queue.completion()?;
        if !end.received.owns(done.wr_id) {
            // SAFETY: the completion of the last work request of the flight.
            drop(unsafe { Flight::<(Bytes, Buffer)>::from_id(done.wr_id)?.complete_send() });
            under_way -= 1;
            end.received.restock()?; // the flight had a received message
            continue;
        }
        // SAFETY: just polled from the queue's completion queue.
        let mut message = unsafe { end.received.complete(done.wr_id, done.status, done.byte_len) }?;
        let place =
            RemoteSlice::try_from(&message.split_to(RemoteSlice::BYTES)[..])?.slice(..message.len() as u64 - 8)?;
        let mut answer = end.heap.buffer(8)?;
        answer.put_u64_le(message.get_u64_le());
        // Two work requests, one flight: what comes later on a queue pair completes what came before.
        let flight = end.device.fly((message, answer))?;
        let (mut body, mut answer) = ([flight.part(0, ..)?.to_ibv()], [flight.part(1, ..)?.to_ibv()]);
        let id = flight.into_id();
        // SAFETY: the flight keeps both until the completion.
        unsafe {
            end.post(id, ibv_wr_opcode::IBV_WR_RDMA_WRITE, &mut body, place, false)?;
            end.post(id, ibv_wr_opcode::IBV_WR_SEND, &mut answer, place, true)?;
        }
        (answered, under_way) = (answered + 1, under_way + 1);
    }
    Ok(())
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
        let binding = windows.expose(reply, Access::REMOTE_WRITE, BIND)?;
        let mut header = self.heap.buffer(4096)?; // also for bodies that are short, or not ours
        let place = RemoteSlice { addr: binding.addr(), len: binding.len() as u64, rkey: binding.rkey() };
        header.put_slice(&place.to_bytes());
        header.put_u64_le(call);
        let flight = self.device.fly(Gathering::new(MAX_SGE as usize).own(self.device, header, body)?)?;
        let mut list = flight.sges().map(|sge| sge.map(|sge| sge.to_ibv())).collect::<Result<Vec<_>, _>>()?;
        // SAFETY: the flight keeps the message. The request goes out behind the bind, on the same queue pair.
        unsafe { self.post(flight.into_id(), ibv_wr_opcode::IBV_WR_SEND, &mut list, place, true)? };

        let (mut binding, mut exposed, mut sent, mut answer) = (Some(binding), None, false, None);
        while !(sent && exposed.is_some() && answer.is_some()) {
            let done = self.queue.completion()?;
            // SAFETY: each is told of its own completion, and once.
            unsafe {
                match done.wr_id {
                    BIND => exposed = binding.take().map(|binding| binding.bound(done.status)).transpose()?,
                    id if self.received.owns(id) => {
                        answer = Some(self.received.complete(id, done.status, done.byte_len)?)
                    }
                    id => sent = !Flight::<Gathered>::from_id(id)?.complete_send().is_empty(),
                }
            }
        }
        self.received.restock()?;
        assert_eq!(answer.ok_or("no answer")?.get_u64_le(), call);
        let ending = exposed.ok_or("no window")?.revoke(END)?;
        let done = self.queue.completion()?;
        assert_eq!(done.wr_id, END);
        // SAFETY: the completion of ending the window. From here on its rkey is dead.
        Ok(unsafe { ending.revoked(done.status) }?)
    }

    /// Posts a send, or a write to `remote`.
    ///
    /// # Safety
    ///
    /// The memory of the list lives, and is not written, until the completion: of this, or of a later one that is signalled.
    unsafe fn post(
        &self,
        id: u64,
        opcode: u32,
        list: &mut [ibv_sge],
        remote: RemoteSlice,
        signalled: bool,
    ) -> std::io::Result<()> {
        // SAFETY: integers, null pointers and unions of them: zeros are valid.
        let mut wr: ibv_send_wr = unsafe { std::mem::zeroed() };
        (wr.wr_id, wr.sg_list, wr.num_sge, wr.opcode) = (id, list.as_mut_ptr(), list.len() as i32, opcode);
        wr.send_flags = if signalled { ibv_send_flags::IBV_SEND_SIGNALED.0 } else { 0 };
        wr.wr.rdma = rdma_t { remote_addr: remote.addr, rkey: remote.rkey };
        // SAFETY: a live queue pair, and a complete work request, which is copied. The memory: the caller's duty.
        match unsafe { rdma_sys::ibv_post_send(self.queue.qp(), &mut wr, &mut std::ptr::null_mut()) } {
            0 => Ok(()),
            errno => Err(std::io::Error::from_raw_os_error(errno)),
        }
    }
}
