//! [`Gathering`]: a message of many pieces as one list of scatter-gather entries. Uses the arenas' entries and flights.
//!
//! ```text
//! pieces    [40 B] [12 B] [64 KiB, ours] [20 B, a static] [8 KiB, foreign] [4 KiB, ours]
//! header    [40 + 12]                    [20 + 8 KiB]
//! entries   header 52     in place       header           in place
//! ```
//!
//! A piece that the device reaches, and that is not too small, is sent from where it lies; the rest is copied behind one another
//! into a header buffer that the device reaches. So any memory can be sent, and what is not ours costs a copy. What is copied
//! one after the other is one entry.

mod owned;

use bytes::Buf;
use core::fmt;
use core::mem::{MaybeUninit, take};
use core::slice;
pub use owned::Gathered;
use rdmalloc_arenas::{Device, KeyError, Sge, SgeError};
use std::io::IoSlice;

/// The most entries of a list: what ConnectX and soft-RoCE take is 30 and 32.
const MOST: usize = 32;
/// How many chunks of a `Buf` are looked at.
const CHUNKS: usize = 64;

/// How messages are gathered; what depends on the queue pair, not on the message.
///
/// ```
/// use rdmalloc::{Gathering, Heap};
/// # fn example(device: rdmalloc::Device, heap: &Heap, body: &[u8]) -> Result<(), Box<dyn std::error::Error>> {
/// let gathering = Gathering::new(4); // the max_send_sge of the queue pair
/// let mut header = heap.buffer(4096)?; // `heap` is one to which the device is attached
/// let message = gathering.gather(device, header.spare_capacity_mut(), [&b"a static"[..], body, b"and another"])?;
/// for sge in message.entries() {
///     // sge.addr(), sge.length(), sge.lkey(), for the work request; with verbs, `message.sg_list()`.
/// }
/// // `header` and `body` are borrowed, and must live until the completion. `own` makes a message that flies.
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub struct Gathering {
    max_sge: usize,
    threshold: usize,
    max_message: usize,
}

/// A message as a list of entries, which borrows its pieces and the header.
pub struct Gather<'a> {
    entries: [MaybeUninit<Sge<'a>>; MOST],
    filled: usize,
    len: usize,
    copied: usize,
}

/// Why a message was not gathered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum GatherError {
    /// What has to be copied does not fit the header: pieces that are small or foreign, and those for which there is no
    /// entry left. Take a larger header, or allow more entries.
    HeaderFull {
        /// The bytes that were to be in it, so far.
        wanted: usize,
        /// The bytes that fit.
        room: usize,
    },
    /// The message is longer than allowed. Send it in parts.
    TooLong {
        /// Its bytes, so far.
        len: usize,
        /// [`Gathering::max_message`].
        limit: usize,
    },
    /// The `Buf` does not show all of its bytes at once (`Buf::chunks_vectored`), or in more than 64 chunks. [`Gathering::own`]
    /// takes it.
    NotAtOnce {
        /// Bytes that it shows.
        shown: usize,
        /// Bytes that it has.
        remaining: usize,
    },
    /// The device does not reach the header, or only by several registrations. Take the spare capacity of a buffer that it reaches.
    Header(SgeError),
    /// The device is gone.
    Sge(SgeError),
}

impl fmt::Display for GatherError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HeaderFull { wanted, room } => {
                write!(
                    f,
                    "at least {wanted} bytes, so far, have to be copied, but the header has room for {room}; take a larger one"
                )
            }
            Self::TooLong { len, limit } => {
                write!(f, "a message of {len} bytes or more exceeds {limit}; send it in parts")
            }
            Self::NotAtOnce { shown, remaining } => {
                write!(f, "the Buf shows {shown} of its {remaining} bytes at once; gather it by value (`own`)")
            }
            Self::Header(SgeError::Key(KeyError::Foreign)) => f.write_str(
                "the header: the memory is not rdmalloc's; take the spare capacity of a Vec or Buffer that the device reaches",
            ),
            Self::Header(error) => write!(f, "the header: {error}"),
            Self::Sge(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for GatherError {}

impl Gathering {
    /// From how many bytes on a piece is sent in place, unless said.
    ///
    /// An entry takes the processor 5 ns. Copying takes as long for 512 bytes that are in its cache, and longer for 64 bytes that
    /// are not (`cargo bench -p rdmalloc-benches --bench flight`). What an entry costs the adapter comes on top: small pieces that
    /// are often in the cache are better copied, which this does.
    pub const THRESHOLD: usize = 512;

    /// For a queue pair that takes so many entries in a work request (`max_send_sge`, as it was created with). More than 32
    /// are not used, and 0 is taken as 1.
    pub const fn new(max_sge: usize) -> Gathering {
        let max_sge = if max_sge > MOST { MOST } else { max_sge };
        let max_sge = if max_sge == 0 { 1 } else { max_sge };
        Gathering { max_sge, threshold: Gathering::THRESHOLD, max_message: 1 << 31 }
    }

    /// From how many bytes on a piece is sent in place if the device reaches it. 0: always; `usize::MAX`: never, all is copied.
    pub const fn threshold(self, bytes: usize) -> Gathering {
        Gathering { threshold: bytes, ..self }
    }

    /// How long a message may be; 2 GiB unless said, which is what InfiniBand allows. A port may allow less (`max_msg_sz`).
    pub const fn max_message(self, bytes: usize) -> Gathering {
        Gathering { max_message: bytes, ..self }
    }

    /// Gathers a message whose pieces are borrowed, in their order. `header` is memory that the device reaches, such as the spare
    /// capacity of a buffer; what is copied goes to its front.
    ///
    /// Pieces are sent in place in their order as long as there are entries: one that finds none left is copied, however long it
    /// is, and so are those behind it. The last entry is kept for that, unless nothing follows. So a message of long
    /// pieces, more than there are entries, costs copies: put the long ones first, or send in parts.
    ///
    /// # Errors
    ///
    /// [`GatherError`].
    pub fn gather<'a>(
        &self,
        device: Device,
        header: &'a mut [MaybeUninit<u8>],
        pieces: impl IntoIterator<Item = &'a [u8]>,
    ) -> Result<Gather<'a>, GatherError> {
        let mut list = List { device, header, run: 0, gather: Gather::new() };
        let mut plan = Plan::new(*self, device);
        let mut pieces = pieces.into_iter().filter(|piece| !piece.is_empty()).peekable();
        while let Some(piece) = pieces.next() {
            match plan.place(piece, pieces.peek().is_some())? {
                Some(InPlace { first: Some(sge), .. }) => {
                    list.end_run()?;
                    list.gather.push(sge);
                }
                Some(InPlace { first: None, .. }) => {
                    list.end_run()?;
                    list.push_in_place(piece)?;
                }
                None => list.copy(piece)?,
            }
        }
        list.end_run()?;
        list.gather.len = plan.len;
        Ok(list.gather)
    }

    /// Gathers the slices of vectored I/O; see [`gather`](Self::gather).
    ///
    /// # Errors
    ///
    /// As there.
    pub fn gather_slices<'a>(
        &self,
        device: Device,
        header: &'a mut [MaybeUninit<u8>],
        slices: &'a [IoSlice<'a>],
    ) -> Result<Gather<'a>, GatherError> {
        self.gather(device, header, slices.iter().map(|slice| &**slice))
    }

    /// Gathers a `Buf` that shows all its bytes at once, which those of the crate `bytes` do; see [`gather`](Self::gather). It is
    /// not advanced.
    ///
    /// # Errors
    ///
    /// As there, and [`GatherError::NotAtOnce`].
    pub fn gather_buf<'a>(
        &self,
        device: Device,
        header: &'a mut [MaybeUninit<u8>],
        buf: &'a impl Buf,
    ) -> Result<Gather<'a>, GatherError> {
        let mut slices = [IoSlice::new(&[]); CHUNKS];
        let filled = buf.chunks_vectored(&mut slices);
        let (shown, remaining) = (slices[..filled].iter().map(|slice| slice.len()).sum(), buf.remaining());
        if shown != remaining {
            return Err(GatherError::NotAtOnce { shown, remaining });
        }
        // SAFETY: an `IoSlice<'a>` borrows its bytes for 'a, wherever it lies itself.
        let bytes = |slice: &IoSlice<'a>| -> &'a [u8] { unsafe { slice::from_raw_parts(slice.as_ptr(), slice.len()) } };
        self.gather(device, header, slices[..filled].iter().map(bytes))
    }
}

/// A piece that is sent in place: how many entries it takes, and the first, if that is all.
struct InPlace<'p> {
    entries: usize,
    first: Option<Sge<'p>>,
}

/// What is decided piece by piece.
///
/// `used <= max_sge`, and `used < max_sge || copying` as long as pieces follow: so there is always room to copy.
struct Plan {
    gathering: Gathering,
    device: Device,
    /// Entries so far, with that of the run of copies that is under way.
    used: usize,
    copying: bool,
    len: usize,
}

impl Plan {
    fn new(gathering: Gathering, device: Device) -> Plan {
        Plan { gathering, device, used: 0, copying: false, len: 0 }
    }

    /// How the next piece, which is not empty, is sent in place, if it is. It is counted.
    fn place<'p>(&mut self, piece: &'p [u8], more: bool) -> Result<Option<InPlace<'p>>, GatherError> {
        self.count(piece.len())?;
        let in_place = self.in_place(piece, more)?;
        match &in_place {
            Some(InPlace { entries, .. }) => self.stay(*entries),
            None => self.copy(),
        }
        Ok(in_place)
    }

    fn count(&mut self, len: usize) -> Result<(), GatherError> {
        let limit = self.gathering.max_message;
        self.len = self.len.saturating_add(len);
        if self.len > limit { Err(GatherError::TooLong { len: self.len, limit }) } else { Ok(()) }
    }

    /// Whether nothing can follow: all entries are used, since it was said that the last piece was the last.
    fn is_full(&self) -> bool {
        self.used >= self.gathering.max_sge && !self.copying
    }

    /// The next piece is sent in place.
    fn stay(&mut self, entries: usize) {
        (self.used, self.copying) = (self.used + entries, false);
    }

    /// The next piece is copied.
    fn copy(&mut self) {
        self.used += usize::from(!self.copying);
        self.copying = true;
    }

    /// How to send the piece in place, if that is to be done.
    fn in_place<'p>(&self, piece: &'p [u8], more: bool) -> Result<Option<InPlace<'p>>, GatherError> {
        let left = self.gathering.max_sge - self.used - usize::from(more && self.used < self.gathering.max_sge);
        if piece.len() < self.gathering.threshold || left == 0 {
            return Ok(None);
        }
        let entries = match self.device.sge(piece) {
            Ok(sge) => Ok(InPlace { entries: 1, first: Some(sge) }),
            Err(SgeError::Straddles { .. } | SgeError::TooLong { .. }) => {
                let mut sges = self.device.sges([piece]).take(left + 1);
                let entries = sges.try_fold(0, |count, sge| sge.map(|_| count + 1));
                entries.map(|entries| InPlace { entries, first: None })
            }
            Err(error) => Err(error),
        };
        match entries {
            Ok(in_place) => Ok((in_place.entries <= left).then_some(in_place)),
            Err(SgeError::Key(KeyError::Foreign | KeyError::NotRegistered(_))) => Ok(None),
            Err(error) => Err(GatherError::Sge(error)),
        }
    }
}

/// The list while it is made.
struct List<'a> {
    device: Device,
    /// What is left of the header, and how many bytes at its front are written and without an entry.
    header: &'a mut [MaybeUninit<u8>],
    run: usize,
    gather: Gather<'a>,
}

impl<'a> List<'a> {
    fn copy(&mut self, piece: &[u8]) -> Result<(), GatherError> {
        let (copied, room) = (self.gather.copied, self.gather.copied - self.run + self.header.len());
        let full = GatherError::HeaderFull { wanted: copied + piece.len(), room };
        let place = self.header.get_mut(self.run..self.run + piece.len()).ok_or(full)?;
        place.write_copy_of_slice(piece);
        self.run += piece.len();
        self.gather.copied += piece.len();
        Ok(())
    }

    /// What was copied so far gets its entry.
    fn end_run(&mut self) -> Result<(), GatherError> {
        if self.run > 0 {
            let (run, rest) = take(&mut self.header).split_at_mut(take(&mut self.run));
            self.header = rest;
            // SAFETY: `copy` has written these bytes.
            self.gather.push(self.device.sge(unsafe { run.assume_init_ref() }).map_err(GatherError::Header)?);
        }
        Ok(())
    }

    fn push_in_place(&mut self, piece: &'a [u8]) -> Result<(), GatherError> {
        self.device.sges([piece]).try_for_each(|sge| {
            self.gather.push(sge.map_err(GatherError::Sge)?);
            Ok(())
        })
    }
}

impl<'a> Gather<'a> {
    fn new() -> Gather<'a> {
        Gather { entries: [const { MaybeUninit::uninit() }; MOST], filled: 0, len: 0, copied: 0 }
    }

    fn push(&mut self, sge: Sge<'a>) {
        // The plan gives no more entries than there are.
        self.entries[self.filled].write(sge);
        self.filled += 1;
    }

    /// The entries, in the order of the message; none if it is empty.
    #[must_use]
    pub fn entries(&self) -> &[Sge<'a>] {
        // SAFETY: `push` has written the first `filled` ones.
        unsafe { self.entries[..self.filled].assume_init_ref() }
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

    /// `sg_list` and `num_sge` of a work request, which reads them while it is posted.
    #[cfg(feature = "verbs")]
    #[must_use]
    pub fn sg_list(&self) -> (*mut rdma_sys::ibv_sge, i32) {
        // `Sge` is laid out as `ibv_sge`, which posting does not write; at most 32 of them.
        (self.entries.as_ptr().cast_mut().cast(), self.filled as i32)
    }
}

impl fmt::Debug for Gather<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { len, copied, .. } = self;
        f.debug_struct("Gather").field("entries", &self.entries()).field("len", len).field("copied", copied).finish()
    }
}
