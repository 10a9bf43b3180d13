//! Lists of scatter-gather entries: slices are split where a registration, or the length of an entry, ends. Uses `sge` and
//! `device`.
//!
//! Nothing is allocated: [`Sges`] and [`SgesMut`] are iterators, which the caller collects into what he has, an array
//! ([`Sges::fill`]), a `SmallVec`, a `Vec`.

use crate::device::Device;
use crate::sge::{Sge, SgeError, SgeMut};
use core::fmt;
use core::mem::MaybeUninit;
use core::slice;

/// What is left of the slice that is being split: address and length.
#[derive(Clone, Copy, Debug, Default)]
struct Rest {
    address: usize,
    len: usize,
}

impl Rest {
    /// Takes what fits one entry off the front; the rest is not empty.
    fn split(&mut self, device: Device, most: u32) -> Rest {
        let len = device.reach(self.address, self.len.min(most as usize));
        let first = Rest { address: self.address, len };
        *self = Rest { address: self.address + len, len: self.len - len };
        first
    }
}

/// Iterates over the entries of slices that the device reads; see [`Device::sges`]. After an error it is at its end.
#[derive(Clone, Debug)]
#[must_use]
pub struct Sges<I> {
    device: Device,
    /// `None` after an error.
    slices: Option<I>,
    rest: Rest,
    most: u32,
}

/// Iterates over the entries of slices that the device writes; see [`Device::sges_mut`]. After an error it is at its end.
#[derive(Debug)]
#[must_use]
pub struct SgesMut<I> {
    device: Device,
    slices: Option<I>,
    rest: Rest,
    most: u32,
}

/// Why a list of entries was not made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum SgesError {
    /// A slice has no entry.
    Sge(SgeError),
    /// There are more entries than there is room for. Make the room larger, or send in two work requests.
    TooMany {
        /// How many there is room for.
        room: usize,
    },
}

impl fmt::Display for SgesError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sge(error) => error.fmt(f),
            Self::TooMany { room } => {
                write!(
                    f,
                    "the slices need more than the {room} entries that there is room for; make room, or send in parts"
                )
            }
        }
    }
}

impl std::error::Error for SgesError {}

impl Device {
    /// The entries for the device to read `slices`, in their order, and as they are: no byte is copied, no two slices are
    /// joined, empty ones are left out. A slice that lies in several registrations, or is longer than an entry can be (see
    /// [`Sges::max_len`]), gives several entries.
    ///
    /// The list may come out longer than a work request takes (`max_send_sge`); a gather of the crate `rdmalloc` copies
    /// where this refuses.
    ///
    /// ```
    /// # use rdmalloc_arenas::{Device, Sge, SgesError};
    /// # fn example(device: Device, head: &[u8], body: &[u8]) -> Result<(), Box<dyn std::error::Error>> {
    /// let list: Vec<Sge<'_>> = device.sges([head, body]).collect::<Result<_, _>>()?;
    /// // Or into an array, for at most four:
    /// let mut room = [const { std::mem::MaybeUninit::uninit() }; 4];
    /// let list: &mut [Sge<'_>] = device.sges([head, body]).fill(&mut room)?;
    /// # Ok(()) }
    /// ```
    pub fn sges<'a, I: IntoIterator<Item = &'a [u8]>>(self, slices: I) -> Sges<I::IntoIter> {
        Sges { device: self, slices: Some(slices.into_iter()), rest: Rest::default(), most: u32::MAX }
    }

    /// The entries for the device to write `slices`, as [`sges`](Self::sges) has them for reading. Of a heap that devices
    /// only read there is none ([`SgeError::NotWritable`]).
    pub fn sges_mut<'a, I: IntoIterator<Item = &'a mut [MaybeUninit<u8>]>>(self, slices: I) -> SgesMut<I::IntoIter> {
        SgesMut { device: self, slices: Some(slices.into_iter()), rest: Rest::default(), most: u32::MAX }
    }
}

/// Fills the front of `room`, and returns what was filled.
fn fill<T>(
    mut entries: impl Iterator<Item = Result<T, SgeError>>,
    room: &mut [MaybeUninit<T>],
) -> Result<&mut [T], SgesError> {
    let most = room.len();
    let mut filled = 0;
    for (place, entry) in room.iter_mut().zip(&mut entries) {
        place.write(entry.map_err(SgesError::Sge)?);
        filled += 1;
    }
    if filled == most && entries.next().transpose().map_err(SgesError::Sge)?.is_some() {
        return Err(SgesError::TooMany { room: most });
    }
    // SAFETY: the first `filled` places were written above; entries need no drop.
    Ok(unsafe { slice::from_raw_parts_mut(room.as_mut_ptr().cast(), filled) })
}

macro_rules! entries {
    ($iterator:ident, $entry:ident, $slice:ty, $at:ident) => {
        impl<'a, I: Iterator<Item = $slice>> $iterator<I> {
            /// Sets how long an entry may be; `u32::MAX` bytes unless said, which is what its length field holds. 0 is taken as 1.
            pub fn max_len(self, bytes: u32) -> Self {
                Self { most: bytes.max(1), ..self }
            }

            /// Writes the entries to the front of `room`, and returns them.
            ///
            /// # Errors
            ///
            /// [`SgesError`]: a slice has no entry, or `room` is too short.
            pub fn fill<'r>(self, room: &'r mut [MaybeUninit<$entry<'a>>]) -> Result<&'r mut [$entry<'a>], SgesError> {
                fill(self, room)
            }
        }

        impl<'a, I: Iterator<Item = $slice>> Iterator for $iterator<I> {
            type Item = Result<$entry<'a>, SgeError>;

            fn next(&mut self) -> Option<Self::Item> {
                while self.rest.len == 0 {
                    let slice = self.slices.as_mut()?.next()?;
                    self.rest = Rest { address: slice.as_ptr().addr(), len: slice.len() };
                }
                let Rest { address, len } = self.rest.split(self.device, self.most);
                // The slice was borrowed for 'a, and this part of it is given out once.
                let entry = self.device.$at(address, len);
                if entry.is_err() {
                    (self.slices, self.rest) = (None, Rest::default());
                }
                Some(entry)
            }
        }
    };
}

entries!(Sges, Sge, &'a [u8], sge_at);
entries!(SgesMut, SgeMut, &'a mut [MaybeUninit<u8>], sge_mut_at);
