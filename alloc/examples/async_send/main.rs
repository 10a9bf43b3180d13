//! Sends and receives as futures, on tokio. A receive that is given up (a timeout, a `select!`) leaves its buffer with the completion
//! queue, which the device may still write to.
//!
//! ```text
//! cargo run --example async_send --features verbs          (or with `cargo xtask vm --`, in a guest with soft-RoCE)
//! ```

mod completions;

use completions::{Completions, Posted};
use rdmalloc::registrar::verbs::Verbs;
use rdmalloc::{Buffer, Device, Heap, StableBytes};
use rdmalloc_tests::rig::{Depth, Queue, domain_or_skip};
use std::error::Error;
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::unix::AsyncFd;

fn main() -> Result<(), Box<dyn Error>> {
    run()
}

/// The descriptor of a queue's notices.
struct Notices(Arc<Queue>);

impl AsRawFd for Notices {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

/// A queue whose work requests are futures.
#[derive(Clone)]
struct Connection {
    queue: Arc<Queue>,
    completions: Arc<Completions>,
}

impl Connection {
    fn new(queue: Queue) -> Connection {
        Connection { queue: Arc::new(queue), completions: Arc::default() }
    }

    fn send<B: StableBytes>(&self, device: Device, value: B) -> Result<Posted<B>, Box<dyn Error>> {
        let flight = device.fly(value).map_err(|error| error.reason.to_string())?;
        let list = flight.sges().map(|sge| sge.map(|sge| sge.to_ibv())).collect::<Result<Vec<_>, _>>()?;
        // SAFETY: one signalled send with this id, of entries of the flight; `drive` tells of its completion.
        let posted = unsafe { self.completions.send(flight, |id| self.queue.post_list(id, &list, None, true)) };
        Ok(posted.map_err(|(error, _)| error)?)
    }

    fn receive(&self, device: Device, buffer: Buffer) -> Result<Posted<Buffer>, Box<dyn Error>> {
        let mut flight = device.fly(buffer).map_err(|error| error.reason.to_string())?;
        let room = flight.sge_mut()?.to_ibv();
        // SAFETY: one receive with this id, into the room of the flight; `drive` tells of its completion.
        let posted = unsafe { self.completions.receive(flight, |id| self.queue.post_recv(id, room)) };
        Ok(posted.map_err(|(error, _)| error)?)
    }

    /// Polls the completion queue whenever there is a notice, for ever.
    async fn drive(self) -> io::Result<()> {
        let fd = Notices(self.queue.clone());
        // SAFETY: an open descriptor; F_SETFL has no memory to do with.
        if unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is the queue's, and open as long as it lives: `fd` is an owner of it.
        let notices = unsafe { AsyncFd::register(fd) }.map_err(|error| error.into_parts().1)?;
        loop {
            self.queue.request_notice()?;
            // What came before the request brings no notice.
            while let Some(completion) = self.queue.poll()? {
                // SAFETY: the queue has just given it.
                unsafe { self.completions.arrived(completion.id, completion.ok().map(|completion| completion.len)) };
            }
            let mut ready = notices.readable().await?;
            let _ = ready.try_io(|notices| notices.get_ref().0.take_notice());
        }
    }
}

/// The whole of it, for the tests as well.
pub fn run() -> Result<(), Box<dyn Error>> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let Some(domain) = domain_or_skip() else { return Ok(()) };
        let heap = Heap::builder().build()?;
        let device = heap.attach(Verbs::new(domain.clone()))?;
        let (left, right) = Queue::pair(&domain, Depth::default())?;
        let (left, right) = (Connection::new(left), Connection::new(right));
        let drivers = [&left, &right].map(|end| tokio::spawn(end.clone().drive()));

        // One that is waited for. The send and the receive are under way at once.
        let (receive, send) =
            (right.receive(device, heap.buffer(4096)?)?, left.send(device, heap.buffer_from_slice(b"a message")?)?);
        let (outcome, message) = receive.await;
        println!("received {:?}, {} bytes", String::from_utf8_lossy(&message), outcome?);
        send.await.0?;

        // One that is given up: nothing is sent in time. Its buffer is not freed, since the device may write to it.
        let given_up = right.receive(device, heap.buffer(4096)?)?;
        let waited = tokio::time::timeout(Duration::from_millis(20), given_up).await;
        assert!(waited.is_err(), "nothing was sent");
        println!("a receive was given up; flights under way: {}", device.flights().under_way);
        assert_eq!(device.flights().under_way, 1);

        // The next message still lands in it, and the one after that in the next receive.
        let receive = right.receive(device, heap.buffer(4096)?)?;
        left.send(device, heap.buffer_from_slice(b"to nobody")?.freeze())?.await.0?;
        left.send(device, heap.buffer_from_slice(b"to somebody")?)?.await.0?;
        let (outcome, message) = receive.await;
        assert_eq!((outcome?, &message[..]), (11, &b"to somebody"[..]));
        let flights = device.flights();
        println!("all has arrived; flights under way: {}, leaked: {}", flights.under_way, flights.leaked);
        assert_eq!((flights.under_way, flights.leaked), (0, 0));
        drivers.iter().for_each(tokio::task::JoinHandle::abort);
        heap.detach(device)?;
        Ok(())
    })
}
