//! The server: a `HashMap<String, Vec<u8>>` on the global heap, whose values are sent from where they lie, and a few buffers
//! of a heap with remote access, into which uploads arrive.

use crate::client::Tally;
use crate::fabric::{Link, Place};
use crate::message::{ANSWER_LEN, DEPTH, Request};
use crate::reach::{Lease, Reach};
use crate::report::Progress;
use crate::{Result, values};
use rdmalloc::Buffer;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// The values by key. An ordinary collection: nothing in it knows of devices.
pub type Store = HashMap<String, Vec<u8>>;

/// The bytes of all values.
pub fn bytes(store: &Store) -> u64 {
    store.values().map(|value| value.len() as u64).sum()
}

/// Where one upload arrives at a time.
pub struct Upload {
    pub buffer: Buffer,
    /// The whole of the buffer.
    pub place: Place,
}

/// Receives one request and sends its answer. The fields are in the order in which they must be dropped.
struct Slot {
    request_lease: Lease,
    request: Vec<u8>,
    answer_lease: Lease,
    answer: Box<[u8; ANSWER_LEN]>,
    /// Of the value that is being sent.
    value_lease: Option<Lease>,
    state: State,
}

enum State {
    Receiving,
    Answering,
}

/// Serves one loop over one link. The link is the first field: when it has been dropped, after an error too, the device is done
/// with the others.
pub struct Server<'a> {
    link: Box<dyn Link + 'a>,
    slots: Vec<Slot>,
    reach: &'a Reach,
    store: &'a mut Store,
    uploads: &'a mut [Upload],
    /// How many requests will come, and for how many of them no receive is posted yet.
    operations: u64,
    to_receive: u64,
    tally: Tally,
}

impl<'a> Server<'a> {
    /// Makes ready for that many requests.
    pub fn new(
        link: Box<dyn Link + 'a>,
        reach: &'a Reach,
        store: &'a mut Store,
        uploads: &'a mut [Upload],
        operations: u64,
    ) -> Result<Server<'a>> {
        let (slots, tally) = (Vec::with_capacity(2 * DEPTH), Tally::default());
        let mut server = Server { link, slots, reach, store, uploads, operations, to_receive: operations, tally };
        // Twice as many as the client has requests in flight: it may send the next one before our device has told us that
        // the last answer has arrived.
        for index in 0..2 * DEPTH {
            let mut request = Vec::with_capacity(Request::LEN);
            let answer = Box::new([0; ANSWER_LEN]);
            // SAFETY: a slot drops the leases first; and requests are looked at after a receive only.
            let request_lease = unsafe { reach.target(&mut request.spare_capacity_mut()[..Request::LEN]) }?;
            // SAFETY: a slot drops the leases first.
            let answer_lease = unsafe { reach.source(&answer[..]) }?;
            let state = State::Receiving;
            server.slots.push(Slot { request_lease, request, answer_lease, answer, value_lease: None, state });
            server.receive(index)?;
        }
        Ok(server)
    }

    /// Answers all of them.
    pub fn run(mut self, mut progress: Progress) -> Result<Tally> {
        while self.tally.operations < self.operations {
            let done = self.link.wait()?;
            let slot = done.id as usize;
            match self.slots[slot].state {
                State::Receiving => self.answer(slot, done.len as usize)?,
                State::Answering => {
                    self.slots[slot].value_lease = None;
                    self.tally.operations += 1;
                    progress.show(&self.tally);
                    self.receive(slot)?;
                }
            }
        }
        Ok(self.tally)
    }

    /// Makes room for a request, if there will be one.
    fn receive(&mut self, index: usize) -> Result<()> {
        if self.to_receive == 0 {
            return Ok(());
        }
        self.to_receive -= 1;
        let slot = &mut self.slots[index];
        slot.state = State::Receiving;
        slot.request.clear();
        // SAFETY: `request` is the target; it belongs to the slot, and is not touched before the completion.
        unsafe { self.link.post_recv(index as u64, slot.request_lease.place) }
    }

    /// Does what the request in a slot asks for, which has arrived with that length.
    fn answer(&mut self, index: usize, len: usize) -> Result<()> {
        let slot = &mut self.slots[index];
        slot.state = State::Answering;
        // SAFETY: so many bytes have arrived, and not more than there was room for.
        unsafe { slot.request.set_len(len) };
        let place = match Request::read(&slot.request).ok_or("a request that is none")? {
            Request::Get { key } => {
                let value =
                    self.store.get(&key).ok_or_else(|| format!("the client asks for {key}, which is not there"))?;
                // SAFETY: the store outlives the slots, and nothing is removed from it while it is served.
                let lease = unsafe { self.reach.source(value) }?;
                self.tally.bytes += value.len() as u64;
                slot.value_lease.insert(lease).place
            }
            Request::Put { key, upload, len, hash } => {
                let upload = self.uploads.get_mut(upload).ok_or("there is no such upload buffer")?;
                let value = land(&mut *self.link, upload, len)?;
                let found = values::hash(&value);
                self.tally.bytes += value.len() as u64;
                self.tally.wrong += u64::from(found != hash);
                *slot.answer = found.to_le_bytes();
                match self.store.entry(key) {
                    Entry::Vacant(entry) => entry.insert(value),
                    // Replacing would free a value that may be on its way to the client.
                    Entry::Occupied(entry) => return Err(format!("{} is there already", entry.key()).into()),
                };
                slot.answer_lease.place
            }
        };
        // SAFETY: a source that stays as it is: `answer` belongs to the slot. A value belongs to the store, from which
        // nothing is removed while it is served; its bytes stay where they are when the map grows.
        unsafe { self.link.post_send(index as u64, place) }
    }
}

/// Takes an upload of that length out of its buffer.
fn land(link: &mut dyn Link, upload: &mut Upload, len: usize) -> Result<Vec<u8>> {
    if len == 0 || len > upload.place.len as usize {
        return Err(format!("an upload of {len} bytes does not fit").into());
    }
    // SAFETY: the buffer is empty to us, so that nothing else uses its memory.
    unsafe { link.land_upload(Place { len: len as u32, ..upload.place }) }?;
    // SAFETY: inside the capacity, and written by the device. The client may write again by its rkey whenever it wants to, and
    // a rogue one could do so while this copies: then the hash is wrong.
    unsafe { upload.buffer.set_len(len) };
    let value = upload.buffer[..].to_vec();
    upload.buffer.clear();
    Ok(value)
}
