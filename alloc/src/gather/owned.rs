//! [`Gathered`]: a message that owns its pieces, so that it can fly. Uses the plan of `gather`.

use super::{GatherError, Gathering, InPlace, Plan};
use crate::buffer::Buffer;
use bytes::{Buf, Bytes};
use core::fmt;
use core::ops::Range;
use rdmalloc_arenas::{Device, StableBytes, StableBytesMut};

/// A message that owns its pieces: those that are sent in place as `Bytes`, and the header. It flies: the pieces of the flight
/// are the parts of the message, and `Flight::sges` its entries.
///
/// ```
/// # use rdmalloc::{Device, Flight, Gathered, Gathering, Heap, Buffer};
/// # fn example(device: Device, heap: &Heap, body: bytes::Bytes) -> Result<(), Box<dyn std::error::Error>> {
/// use bytes::Buf;
///
/// let mut header = heap.buffer(4096)?;
/// header.try_extend_from_slice(b"length and kind")?; // what is in the header is the begin of the message
/// let message = Gathering::new(4).own(device, header, body.chain(&b"a trailer"[..]))?;
/// let flight = device.fly(message)?;
/// let list: Vec<_> = flight.sges().collect::<Result<_, _>>()?;
/// // ... post it with the entries of `list`
/// let id = flight.into_id();
/// // ... and after the completion:
/// // SAFETY: it was the one work request of this flight.
/// let (header, pieces) = unsafe { Flight::<Gathered>::from_id(id)?.complete_send() }.into_parts();
/// # Ok(()) }
/// ```
pub struct Gathered<H: StableBytesMut = Buffer> {
    header: H,
    pieces: Vec<Bytes>,
    parts: Vec<Part>,
    len: usize,
    copied: usize,
}

/// A part of the message.
enum Part {
    /// These bytes of the header.
    Header(Range<usize>),
    /// The piece of this index.
    Piece(usize),
}

impl Gathering {
    /// Gathers a `Buf`, all of it, into a message that owns its pieces. What is in `header` already is the begin of the
    /// message, and what is copied goes behind it; the device has to reach it.
    ///
    /// Chunks are sent in place as [`gather`](Self::gather) does, if the `Buf` gives them out as `Bytes` (`Buf::copy_to_bytes`) without
    /// copying, as `Bytes` itself and chains of it do. Of another `Buf`, chunks that would be sent in place are copied, once, to memory of
    /// the global allocator, and from there to the header if that is not registered either.
    ///
    /// # Errors
    ///
    /// [`GatherError`]; what was given is dropped then.
    pub fn own<H: StableBytesMut>(
        &self,
        device: Device,
        header: H,
        mut buf: impl Buf,
    ) -> Result<Gathered<H>, GatherError> {
        let mut plan = Plan::new(*self, device);
        let begin = header.piece(0).len();
        let mut message = Gathered { header, pieces: Vec::new(), parts: Vec::new(), len: 0, copied: 0 };
        if begin > 0 {
            plan.count(begin)?;
            plan.copy();
            message.parts.push(Part::Header(0..begin));
        }
        while buf.has_remaining() {
            let chunk = buf.chunk();
            let (len, more) = (chunk.len(), buf.remaining() > chunk.len());
            // Only a `Buf` that breaks its promises does either.
            if len == 0 || plan.is_full() {
                let remaining = plan.len.saturating_add(buf.remaining());
                return Err(GatherError::NotAtOnce { shown: plan.len, remaining });
            }
            plan.count(len)?;
            if plan.in_place(chunk, more)?.is_some() {
                let piece = buf.copy_to_bytes(len);
                // It may have been copied.
                if let Some(InPlace { entries, .. }) = plan.in_place(&piece, more)? {
                    plan.stay(entries);
                    message.parts.push(Part::Piece(message.pieces.len()));
                    message.pieces.push(piece);
                    continue;
                }
                plan.copy();
                message.copy(&piece)?;
            } else {
                plan.copy();
                message.copy(chunk)?;
                buf.advance(len);
            }
        }
        message.len = plan.len;
        // Each part is to be one entry, as it was counted.
        for part in &message.parts {
            if let Part::Header(range) = part {
                device.sge(&message.header.piece(0)[range.clone()]).map_err(GatherError::Header)?;
            }
        }
        Ok(message)
    }
}

impl<H: StableBytesMut> Gathered<H> {
    fn copy(&mut self, bytes: &[u8]) -> Result<(), GatherError> {
        let (begin, room) = (self.header.piece(0).len(), self.header.room(0));
        if bytes.len() > room.len() {
            return Err(GatherError::HeaderFull { wanted: begin + bytes.len(), room: begin + room.len() });
        }
        // SAFETY: the room is the header's alone, and so long; `bytes` are somebody else's.
        unsafe {
            room.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            self.header.fill(0, bytes.len());
        }
        self.copied += bytes.len();
        let end = begin + bytes.len();
        match self.parts.last_mut() {
            Some(Part::Header(run)) if run.end == begin => run.end = end,
            _ => self.parts.push(Part::Header(begin..end)),
        }
        Ok(())
    }

    /// How many bytes the message has.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How many of its bytes were copied.
    #[must_use]
    pub fn copied(&self) -> usize {
        self.copied
    }

    /// The header, with what is copied, and the pieces that are sent in place.
    #[must_use]
    pub fn into_parts(self) -> (H, Vec<Bytes>) {
        (self.header, self.pieces)
    }
}

// SAFETY: the bytes are those of the header and of `Bytes`, which stay as they promise; nothing changes them but `own`.
unsafe impl<H: StableBytesMut> StableBytes for Gathered<H> {
    const SINGLE: bool = false;

    fn pieces(&self) -> usize {
        self.parts.len()
    }

    fn piece(&self, index: usize) -> &[u8] {
        match self.parts.get(index) {
            Some(Part::Header(range)) => &self.header.piece(0)[range.clone()],
            Some(Part::Piece(piece)) => &self.pieces[*piece],
            None => &[],
        }
    }
}

impl<H: StableBytesMut> fmt::Debug for Gathered<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { len, copied, .. } = self;
        f.debug_struct("Gathered").field("parts", &self.parts.len()).field("len", len).field("copied", copied).finish()
    }
}
