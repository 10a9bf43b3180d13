//! The client: asks for every value once, in a scattered order, and uploads a new one between every few. What it asks for
//! arrives in vectors of its own heap, and what it uploads leaves from there.

use crate::fabric::{Done, Link, Remote};
use crate::message::{ANSWER_LEN, DEPTH, Request};
use crate::plan::Operation;
use crate::reach::{Lease, Reach};
use crate::{Result, values};
use std::ops::AddAssign;

/// What one loop did.
#[derive(Clone, Copy, Default)]
pub struct Tally {
    pub operations: u64,
    pub bytes: u64,
    /// Values that did not have the hash they should have.
    pub wrong: u64,
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Tally) {
        self.operations += other.operations;
        self.bytes += other.bytes;
        self.wrong += other.wrong;
    }
}

/// One of the requests in flight. The fields are in the order in which they must be dropped: leases before their memory.
struct Slot {
    request_lease: Lease,
    request: Box<[u8; Request::LEN]>,
    answer_lease: Lease,
    answer: Vec<u8>,
    flight: Option<Flight>,
}

struct Flight {
    /// Of `value`.
    lease: Lease,
    /// The value that is received or uploaded. Until the flight has ended it belongs to the device.
    value: Vec<u8>,
    seed: u64,
    is_upload: bool,
    /// How many work requests of this flight are not done yet.
    pending: u32,
    /// How many bytes came in answer.
    received: usize,
}

/// Marks the ids of receives; the rest of an id is the slot.
const RECEIVE: u64 = 1 << 32;

/// Runs one loop over one link. The link is the first field: when it has been dropped, after an error too, the device is done
/// with the others.
pub struct Client<'a> {
    link: Box<dyn Link + 'a>,
    slots: Vec<Slot>,
    reach: &'a Reach,
    hashes: &'a [u64],
    uploads: &'a [Remote],
    tally: Tally,
}

impl<'a> Client<'a> {
    /// Makes ready. `hashes` are those that the server's values should have, by seed; `uploads` is where the server wants the
    /// upload of each slot.
    pub fn new(
        link: Box<dyn Link + 'a>,
        reach: &'a Reach,
        hashes: &'a [u64],
        uploads: &'a [Remote],
    ) -> Result<Client<'a>> {
        let mut slots = Vec::with_capacity(DEPTH);
        for _ in 0..DEPTH {
            let request = Box::new([0; Request::LEN]);
            let mut answer = Vec::with_capacity(ANSWER_LEN);
            // SAFETY: a slot drops the leases first.
            let request_lease = unsafe { reach.source(&request[..]) }?;
            // SAFETY: as above; and answers are looked at after a receive only.
            let answer_lease = unsafe { reach.target(&mut answer.spare_capacity_mut()[..ANSWER_LEN]) }?;
            slots.push(Slot { request_lease, request, answer_lease, answer, flight: None });
        }
        Ok(Client { link, slots, reach, hashes, uploads, tally: Tally::default() })
    }

    /// Does all that, always with as many requests in flight as there are slots.
    pub fn run(mut self, mut operations: impl Iterator<Item = Operation>) -> Result<Tally> {
        for slot in 0..DEPTH {
            self.start(slot, operations.next())?;
        }
        while self.slots.iter().any(|slot| slot.flight.is_some()) {
            let done = self.link.wait()?;
            let slot = (done.id & !RECEIVE) as usize;
            if self.finish(slot, done)? {
                self.start(slot, operations.next())?;
            }
        }
        Ok(self.tally)
    }

    /// Sends the next request, if there is one, from a slot without a flight.
    fn start(&mut self, index: usize, operation: Option<Operation>) -> Result<()> {
        let (link, slot, id) = (&mut self.link, &mut self.slots[index], index as u64);
        // All that is posted here belongs to the slot, whose memory stays until `finish` has counted every completion, or
        // the link was dropped.
        match operation {
            None => return Ok(()),
            Some(Operation::Get(seed)) => {
                // The client knows what it asks for, here by rule; other programs have an index.
                let len = values::len(seed);
                let mut value = Vec::with_capacity(len);
                // SAFETY: a flight drops the lease first, and nobody looks at the value before `finish`.
                let lease = unsafe { self.reach.target(&mut value.spare_capacity_mut()[..len]) }?;
                let place = lease.place;
                slot.flight = Some(Flight { lease, value, seed, is_upload: false, pending: 2, received: 0 });
                Request::Get { key: values::key(seed) }.write(&mut slot.request);
                // SAFETY: as above; `value` is the target and not touched before `finish`.
                unsafe { link.post_recv(id | RECEIVE, place) }?;
            }
            Some(Operation::Put(seed)) => {
                let value = values::make(seed);
                // SAFETY: a flight drops the lease first.
                let lease = unsafe { self.reach.source(&value) }?;
                let place = lease.place;
                let (len, hash) = (value.len(), values::hash(&value));
                slot.flight = Some(Flight { lease, value, seed, is_upload: true, pending: 3, received: 0 });
                Request::Put { key: values::key(seed), upload: index, len, hash }.write(&mut slot.request);
                slot.answer.clear();
                // SAFETY: as above; `answer` is the target, and `value` the source.
                unsafe {
                    link.post_recv(id | RECEIVE, slot.answer_lease.place)?;
                    link.post_upload(id, place, self.uploads[index])?;
                }
            }
        }
        // SAFETY: as above; `request` is the source.
        unsafe { link.post_send(id, slot.request_lease.place) }
    }

    /// Counts a completion; with the last one of its flight, looks at what came and answers `true`.
    fn finish(&mut self, index: usize, done: Done) -> Result<bool> {
        let slot = &mut self.slots[index];
        let flight = slot.flight.as_mut().ok_or("a completion without a request")?;
        if done.id & RECEIVE != 0 {
            flight.received = done.len as usize;
        }
        flight.pending -= 1;
        if flight.pending > 0 {
            return Ok(false);
        }
        let Some(Flight { lease, mut value, seed, is_upload, received, .. }) = slot.flight.take() else {
            unreachable!()
        };
        drop(lease);
        let right = if is_upload {
            // SAFETY: so many bytes have arrived, and not more than there was room for.
            unsafe { slot.answer.set_len(received) };
            slot.answer[..] == values::hash(&value).to_le_bytes()
        } else {
            // SAFETY: as above.
            unsafe { value.set_len(received) };
            values::hash(&value) == self.hashes[seed as usize]
        };
        self.tally.operations += 1;
        self.tally.bytes += value.len() as u64;
        self.tally.wrong += u64::from(!right);
        Ok(true)
    }
}
