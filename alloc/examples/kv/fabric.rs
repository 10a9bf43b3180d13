//! What moves the bytes, behind one face: [`Fabric`] is a device, [`Link`] a connection to the peer. [`rdma`](crate::rdma)
//! does it with verbs, [`sockets`](crate::sockets) with an io_uring. All the rest of the program knows only these two.

use crate::Result;
use crate::peer::Peer;
use rdmalloc::Access;
use rdmalloc_arenas::Registrar;
use std::sync::Arc;

/// Registered memory, as the device names it in a work request.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    pub addr: u64,
    pub len: u32,
    pub lkey: u32,
}

/// Registered memory of the peer.
#[derive(Clone, Copy, Debug)]
pub struct Remote {
    pub addr: u64,
    pub rkey: u32,
}

/// A device that memory can be registered with, and that connects this process with its peer.
pub trait Fabric {
    /// For people: the device, and what runs over it.
    fn describe(&self) -> String;

    /// What a heap is attached to.
    fn registrar(&self) -> Arc<dyn Registrar>;

    /// What the heap must allow in which uploads arrive.
    fn upload_access(&self) -> Access;

    /// Connects to the peer, which must do so at the same time. Receives can be posted at once; sends when the peer has made
    /// ready too.
    fn connect(&self, peer: &mut Peer) -> Result<Box<dyn Link + '_>>;
}

/// Something posted that is done.
#[derive(Clone, Copy, Debug)]
pub struct Done {
    /// The number with which it was posted.
    pub id: u64,
    /// How many bytes arrived, if it was a receive.
    pub len: u32,
}

/// A connection. Messages arrive whole and in order; each lands in the receive that was posted first.
///
/// Posting is unsafe, for the device works on the memory after the call. The caller's duty: until the id came back from
/// [`wait`](Self::wait), or the link was dropped, the place stays registered and allocated; nothing writes to a source,
/// and nothing reads or writes a target.
pub trait Link {
    /// Sends a message.
    ///
    /// # Safety
    ///
    /// The duty, for a source.
    unsafe fn post_send(&mut self, id: u64, source: Place) -> Result<()>;

    /// Makes room for a message of that length, or a shorter one.
    ///
    /// # Safety
    ///
    /// The duty, for a target.
    unsafe fn post_recv(&mut self, id: u64, target: Place) -> Result<()>;

    /// Moves bytes into the peer's memory (an RDMA WRITE), ahead of all messages that are sent later.
    ///
    /// # Safety
    ///
    /// The duty, for a source.
    unsafe fn post_upload(&mut self, id: u64, source: Place, target: Remote) -> Result<()>;

    /// Returns once the peer's next upload lies in `target`, the memory that the peer was told. A message of the peer has
    /// said that it is under way.
    ///
    /// # Safety
    ///
    /// Nothing else uses the target during the call.
    unsafe fn land_upload(&mut self, target: Place) -> Result<()>;

    /// Waits for something posted to be done. An error is final: the link can only be dropped.
    fn wait(&mut self) -> Result<Done>;
}
