//! Scatter-gather entries that borrow the memory they describe. Uses `device` and `arena`.
//!
//! An entry is laid out as `struct ibv_sge` (`infiniband/verbs.h`), so a slice of entries is what a work request wants.

use crate::arena::Arena;
use crate::device::Device;
use crate::error::KeyError;
use core::fmt;
use core::marker::PhantomData;
use core::mem::MaybeUninit;

/// The three fields of `struct ibv_sge`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Raw {
    addr: u64,
    length: u32,
    lkey: u32,
}

/// A scatter-gather entry whose memory the device reads: a source of sends and RDMA writes.
///
/// Borrows the memory, so it cannot be freed, moved by growing, or written by safe code as long as the entry is there.
///
/// ```compile_fail
/// # fn post(_: rdmalloc_arenas::Sge<'_>) {}
/// # fn f(device: rdmalloc_arenas::Device, mut message: Vec<u8>) -> Result<(), rdmalloc_arenas::SgeError> {
/// let sge = device.sge(&message)?;
/// message.push(0); // may move the bytes
/// post(sge);
/// # Ok(()) }
/// ```
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub struct Sge<'a>(Raw, PhantomData<&'a [u8]>);

/// A scatter-gather entry whose memory the device writes: a target of receives and RDMA reads.
///
/// ```compile_fail
/// # fn f(device: rdmalloc_arenas::Device, shared: &[u8]) {
/// device.sge_mut(shared); // a shared slice is no target
/// # }
/// ```
#[repr(transparent)]
#[derive(Debug)]
pub struct SgeMut<'a>(Raw, PhantomData<&'a mut [MaybeUninit<u8>]>);

macro_rules! fields {
    ($type:ident) => {
        impl $type<'_> {
            /// Where the memory begins.
            #[must_use]
            pub fn addr(&self) -> u64 {
                self.0.addr
            }

            /// How many bytes it has: 1 to `u32::MAX`.
            #[must_use]
            pub fn length(&self) -> u32 {
                self.0.length
            }

            /// By which key the device reaches it; for io_uring the index of the fixed buffer.
            #[must_use]
            pub fn lkey(&self) -> u32 {
                self.0.lkey
            }

            /// The entry as verbs have it, for the `sg_list` of a work request. Whoever posts it keeps the memory until
            /// the completion.
            #[cfg(feature = "verbs")]
            #[must_use]
            pub fn to_ibv(&self) -> rdma_sys::ibv_sge {
                rdma_sys::ibv_sge { addr: self.0.addr, length: self.0.length, lkey: self.0.lkey }
            }
        }
    };
}

fields!(Sge);
fields!(SgeMut);

// The promise of the layout, checked where ibv_sge is known.
#[cfg(feature = "verbs")]
const _: () = {
    use core::mem::offset_of;
    use rdma_sys::ibv_sge;
    assert!(size_of::<Raw>() == size_of::<ibv_sge>() && align_of::<Raw>() == align_of::<ibv_sge>());
    assert!(offset_of!(Raw, addr) == offset_of!(ibv_sge, addr));
    assert!(offset_of!(Raw, length) == offset_of!(ibv_sge, length));
    assert!(offset_of!(Raw, lkey) == offset_of!(ibv_sge, lkey));
};

/// Why there is no scatter-gather entry for some memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum SgeError {
    /// It is empty. An entry of length 0 means 2^31 bytes to some adapters, so there is none: leave it out of the list.
    Empty,
    /// It is longer than the 32 bits of `ibv_sge::length`. Split it.
    TooLong {
        /// Its bytes.
        len: usize,
    },
    /// It crosses from one registration into the next: a block that is longer than what the device registers as one. Split
    /// it at multiples of the device's limit.
    Straddles {
        /// Its bytes.
        len: usize,
    },
    /// It is a part of something shorter.
    OutOfRange {
        /// Where the part was to end.
        end: usize,
        /// How many bytes there are.
        len: usize,
    },
    /// It is to be written, and its heap was made without [`Access::LOCAL_WRITE`](crate::Access::LOCAL_WRITE): the device would refuse,
    /// and the queue pair fail.
    NotWritable,
    /// The device cannot reach it.
    Key(KeyError),
}

impl fmt::Display for SgeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str(
                "an empty slice has no scatter-gather entry (length 0 means 2^31 to some adapters); leave it out",
            ),
            Self::TooLong { len } => {
                write!(f, "{len} bytes do not fit the 32-bit length of a scatter-gather entry; split them")
            }
            Self::Straddles { len } => {
                write!(f, "the {len} bytes lie in more than one registration of the device; split them")
            }
            Self::OutOfRange { end, len } => write!(f, "a part that ends at {end} is not within {len} bytes"),
            Self::NotWritable => f.write_str(
                "the memory is of a heap made without Access::LOCAL_WRITE, which devices only read: receive into memory of a heap \
                 made with it, which is the default",
            ),
            Self::Key(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for SgeError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            // It is printed already.
            Self::Key(error) => error.source(),
            _ => None,
        }
    }
}

impl From<KeyError> for SgeError {
    fn from(error: KeyError) -> Self {
        Self::Key(error)
    }
}

impl Device {
    /// A scatter-gather entry for the device to read `bytes`.
    ///
    /// # Errors
    ///
    /// [`SgeError`], when they are empty, too long, or not registered.
    #[inline]
    pub fn sge(self, bytes: &[u8]) -> Result<Sge<'_>, SgeError> {
        Ok(Sge(self.entry(bytes.as_ptr().addr(), bytes.len())?, PhantomData))
    }

    /// A scatter-gather entry for the device to write `bytes`: a `Vec`'s `spare_capacity_mut()`, say.
    ///
    /// Of a heap that was made with [`Access::LOCAL_WRITE`](crate::Access::LOCAL_WRITE), as heaps are unless said: that is not checked
    /// here, where only keys are looked up. Of another, the work request fails, and its queue pair with it.
    /// [`sges_mut`](Self::sges_mut) and [`Flight::sge_mut`](crate::Flight::sge_mut) check it.
    ///
    /// # Errors
    ///
    /// [`SgeError`], when they are empty, too long, or not registered.
    #[inline]
    pub fn sge_mut(self, bytes: &mut [MaybeUninit<u8>]) -> Result<SgeMut<'_>, SgeError> {
        Ok(SgeMut(self.entry(bytes.as_ptr().addr(), bytes.len())?, PhantomData))
    }

    /// An entry for the device to read the bytes at `address`, or to write them, as the caller's borrow `'a` allows.
    #[inline]
    pub(crate) fn sge_at<'a>(self, address: usize, len: usize) -> Result<Sge<'a>, SgeError> {
        Ok(Sge(self.entry(address, len)?, PhantomData))
    }

    /// As [`sge_at`](Self::sge_at), for the device to write, if the heap allows it.
    #[inline]
    pub(crate) fn sge_mut_at<'a>(self, address: usize, len: usize) -> Result<SgeMut<'a>, SgeError> {
        let entry = self.entry(address, len)?;
        // It has keys, so it is registered: an arena's, of one heap from end to end.
        match Arena::of(address) {
            Some(arena) if !arena.is_writable() => Err(SgeError::NotWritable),
            _ => Ok(SgeMut(entry, PhantomData)),
        }
    }

    #[inline]
    fn entry(self, address: usize, len: usize) -> Result<Raw, SgeError> {
        if len == 0 {
            return Err(SgeError::Empty);
        }
        let length = u32::try_from(len).map_err(|_| SgeError::TooLong { len })?;
        let keys = self.key_of_address(address)?;
        if !self.is_one_registration(address, address + (len - 1)) {
            return Err(SgeError::Straddles { len });
        }
        Ok(Raw { addr: address as u64, length, lkey: keys.lkey })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AttachError, Refusal, RegisterError, TakeError};
    use std::error::Error;
    use std::io;

    /// What a program prints that walks along the sources.
    fn chain(error: &dyn Error) -> Vec<String> {
        let mut texts = vec![error.to_string()];
        texts.extend(error.source().map(chain).into_iter().flatten());
        texts
    }

    #[test]
    fn an_error_that_prints_the_one_beneath_it_does_not_give_it_to_be_printed_again() {
        let refused = || RegisterError {
            device: "mlx5_0".into(),
            wanted: 4096,
            devices: 1,
            memlock: None,
            reason: Refusal::Device(io::Error::from_raw_os_error(libc::EIO)),
        };
        let io = io::Error::from_raw_os_error(libc::EIO).to_string();
        assert_eq!(chain(&AttachError::Register(refused())), [refused().to_string(), io.clone()]);
        assert_eq!(chain(&TakeError::Register(refused())), [refused().to_string(), io]);
        assert_eq!(chain(&SgeError::Key(KeyError::Foreign)), [KeyError::Foreign.to_string()]);
    }
}
