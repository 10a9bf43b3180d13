//! The fabric of RDMA verbs: a protection domain, and a reliable connected queue pair for each link.
//!
//! Nothing here is about rdmalloc. A program that adopts it has code like this already, over rdma-sys, ibverbs, sideway or
//! C; here it is the small rig that the project's tests use as well.

use crate::Result;
use crate::fabric::{Done, Fabric, Link, Place, Remote};
use crate::message::DEPTH;
use crate::peer::{PATIENCE, Peer};
use rdma_sys::ibv_sge;
use rdmalloc::Access;
use rdmalloc_arenas::Registrar;
use rdmalloc_arenas::registrar::verbs::Verbs;
use rdmalloc_tests::rig::{self, Depth, Domain, Queue};
use std::sync::Arc;

/// A device and a protection domain on it.
pub struct Rdma(Domain);

impl Rdma {
    /// Opens the device of that name, or the first.
    pub fn open(name: Option<&str>) -> Result<Rdma> {
        Ok(Rdma(Domain::open(name)?))
    }
}

impl Fabric for Rdma {
    fn describe(&self) -> String {
        format!("{} (RDMA verbs, RC queue pairs)", self.0.name())
    }

    fn registrar(&self) -> Arc<dyn Registrar> {
        Arc::new(Verbs::new(self.0.clone()))
    }

    fn upload_access(&self) -> Access {
        Access::REMOTE_WRITE
    }

    fn connect(&self, peer: &mut Peer) -> Result<Box<dyn Link + '_>> {
        // A client sends an upload and a request for each message in flight; a server has twice as many receives posted.
        let queue = Queue::new(&self.0, Depth { send: 2 * DEPTH as u32, recv: 2 * DEPTH as u32 })?;
        let endpoint = rig::exchange(&mut peer.control, queue.endpoint())?;
        queue.connect(endpoint)?;
        Ok(Box::new(queue))
    }
}

impl From<Place> for ibv_sge {
    fn from(place: Place) -> ibv_sge {
        ibv_sge { addr: place.addr, length: place.len, lkey: place.lkey }
    }
}

impl Link for Queue {
    unsafe fn post_send(&mut self, id: u64, source: Place) -> Result<()> {
        // SAFETY: the caller's duty is the same.
        Ok(unsafe { Queue::post_send(self, id, source.into()) }?)
    }

    unsafe fn post_recv(&mut self, id: u64, target: Place) -> Result<()> {
        // SAFETY: the caller's duty is the same.
        Ok(unsafe { Queue::post_recv(self, id, target.into()) }?)
    }

    unsafe fn post_upload(&mut self, id: u64, source: Place, target: Remote) -> Result<()> {
        let target = rig::Remote { addr: target.addr, rkey: target.rkey };
        // SAFETY: the caller's duty is the same.
        Ok(unsafe { self.post_write(id, source.into(), target) }?)
    }

    unsafe fn land_upload(&mut self, _target: Place) -> Result<()> {
        Ok(()) // The write came before the message that told of it, on the same reliable connection.
    }

    fn wait(&mut self) -> Result<Done> {
        let completion = Queue::wait(self, PATIENCE)?.ok()?;
        Ok(Done { id: completion.id, len: completion.len })
    }
}
