//! The fabric for machines without a verbs device: Unix sockets, read and written by the kernel straight from and into the
//! heap with io_uring's READ_FIXED and WRITE_FIXED.
//!
//! Nothing here is about rdmalloc either. Messages go over one socket, uploads over a second one; a socket is a stream of
//! bytes, so each direction of each works on one transfer at a time, and what is posted meanwhile waits in a queue.

use crate::Result;
use crate::fabric::{Done, Fabric, Link, Place, Remote};
use crate::peer::{PATIENCE, Peer};
use io_uring::{IoUring, opcode, types};
use rdmalloc::Access;
use rdmalloc_arenas::Registrar;
use rdmalloc_arenas::registrar::uring::Uring;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// A ring, with the table of fixed buffers that the heap registers in.
pub struct Sockets {
    ring: RefCell<IoUring>,
    uring: Uring,
}

impl Sockets {
    pub fn open() -> Result<Sockets> {
        let ring = IoUring::new(8)?;
        let uring = Uring::new(&ring)?;
        Ok(Sockets { ring: RefCell::new(ring), uring })
    }
}

impl Fabric for Sockets {
    fn describe(&self) -> String {
        "io_uring (READ_FIXED and WRITE_FIXED on Unix sockets)".into()
    }

    fn registrar(&self) -> Arc<dyn Registrar> {
        Arc::new(self.uring.clone())
    }

    fn upload_access(&self) -> Access {
        Access::LOCAL_WRITE // Nobody else reaches this memory: the server's own kernel writes the uploads.
    }

    fn connect(&self, peer: &mut Peer) -> Result<Box<dyn Link + '_>> {
        let (messages, uploads) = (peer.stream()?, peer.stream()?);
        let lanes = [Lane::new(false), Lane::new(true), Lane::new(!peer.is_server())];
        Ok(Box::new(SocketLink { ring: &self.ring, messages, uploads, lanes, finished: VecDeque::new() }))
    }
}

const RECV: usize = 0;
const SEND: usize = 1;
const UPLOAD: usize = 2;

/// One direction of one socket.
struct Lane {
    writes: bool,
    /// The first is under way in the kernel if `busy`.
    transfers: VecDeque<Transfer>,
    busy: bool,
}

struct Transfer {
    done: Done,
    /// What is still to be moved.
    rest: Place,
}

impl Lane {
    fn new(writes: bool) -> Lane {
        Lane { writes, transfers: VecDeque::new(), busy: false }
    }
}

struct SocketLink<'a> {
    ring: &'a RefCell<IoUring>,
    messages: UnixStream,
    uploads: UnixStream,
    lanes: [Lane; 3],
    finished: VecDeque<Done>,
}

impl SocketLink<'_> {
    fn post(&mut self, lane: usize, id: u64, place: Place) -> Result<()> {
        self.lanes[lane].transfers.push_back(Transfer { done: Done { id, len: place.len }, rest: place });
        self.start(lane)
    }

    /// Hands the kernel the first transfer of a lane, if there is one and none is under way.
    fn start(&mut self, index: usize) -> Result<()> {
        let socket = if index == UPLOAD { &self.uploads } else { &self.messages };
        let lane = &mut self.lanes[index];
        if lane.busy {
            return Ok(());
        }
        let Some(Transfer { rest, .. }) = lane.transfers.front() else { return Ok(()) };
        let (fd, start, slot) = (types::Fd(socket.as_raw_fd()), rest.addr as *mut u8, rest.lkey as u16);
        let entry = if lane.writes {
            opcode::WriteFixed::new(fd, start, rest.len, slot).build()
        } else {
            opcode::ReadFixed::new(fd, start, rest.len, slot).build()
        };
        let mut ring = self.ring.borrow_mut();
        // SAFETY: the poster's duty keeps the memory there and to ourselves until the transfer is finished or `drop` has
        // seen the lane idle. At most one entry a lane is in the queue, which has room for 8.
        unsafe { ring.submission().push(&entry.user_data(index as u64)) }?;
        lane.busy = true;
        ring.submit()?;
        Ok(())
    }

    /// Waits for one piece of one transfer, and goes on with its lane.
    fn turn(&mut self) -> Result<()> {
        let Some((index, result)) = self.complete()? else { return Err("the other process is silent".into()) };
        let lane = &mut self.lanes[index];
        let Some(transfer) = lane.transfers.front_mut() else {
            return Err("a completion that nobody asked for".into());
        };
        match result {
            0 => return Err("the other process has closed its socket".into()),
            1.. => {
                transfer.rest.addr += result as u64;
                transfer.rest.len -= result as u32;
                if transfer.rest.len == 0 {
                    self.finished.push_back(transfer.done);
                    lane.transfers.pop_front();
                }
            }
            _ => {
                let error = std::io::Error::from_raw_os_error(-result);
                if error.kind() != std::io::ErrorKind::Interrupted {
                    return Err(format!("the kernel could not move the bytes: {error}").into());
                }
            }
        }
        self.start(index)
    }

    /// The next completion: its lane and result. `None` if there is none for a long time.
    fn complete(&mut self) -> Result<Option<(usize, i32)>> {
        let mut ring = self.ring.borrow_mut();
        let patience = types::Timespec::from(PATIENCE);
        loop {
            if let Some(entry) = ring.completion().next() {
                let index = entry.user_data() as usize;
                self.lanes[index].busy = false;
                return Ok(Some((index, entry.result())));
            }
            match ring.submitter().submit_with_args(1, &types::SubmitArgs::new().timespec(&patience)) {
                Err(error) if error.raw_os_error() == Some(libc::ETIME) => return Ok(None),
                Err(error) if error.kind() != std::io::ErrorKind::Interrupted => return Err(error.into()),
                _ => {}
            }
        }
    }
}

impl Link for SocketLink<'_> {
    unsafe fn post_send(&mut self, id: u64, source: Place) -> Result<()> {
        self.post(SEND, id, source)
    }

    unsafe fn post_recv(&mut self, id: u64, target: Place) -> Result<()> {
        self.post(RECV, id, target)
    }

    unsafe fn post_upload(&mut self, id: u64, source: Place, _target: Remote) -> Result<()> {
        self.post(UPLOAD, id, source)
    }

    unsafe fn land_upload(&mut self, target: Place) -> Result<()> {
        const LANDED: u64 = u64::MAX;
        self.post(UPLOAD, LANDED, target)?;
        while self.finished.back().is_none_or(|done| done.id != LANDED) {
            self.turn()?;
        }
        self.finished.pop_back();
        Ok(())
    }

    fn wait(&mut self) -> Result<Done> {
        loop {
            if let Some(done) = self.finished.pop_front() {
                return Ok(done);
            }
            self.turn()?;
        }
    }
}

impl Drop for SocketLink<'_> {
    /// The link's promise: once it is dropped, the kernel is done with all memory.
    fn drop(&mut self) {
        for socket in [&self.messages, &self.uploads] {
            let _ = socket.shutdown(Shutdown::Both); // What is under way ends at once.
        }
        while self.lanes.iter().any(|lane| lane.busy) {
            // Without knowing that, going on would let the kernel write into freed memory.
            self.complete().ok().flatten().expect("transfers on a closed socket end");
        }
    }
}
