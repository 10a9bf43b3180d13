//! Names of devices in a place of fixed size, so that they can be read anywhere and at any time. Uses nothing below it.

use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

const WORDS: usize = 4;
const LEN: usize = WORDS * 8;

/// The name of a device: up to 32 bytes of what its registrar calls itself.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Name([u8; LEN]);

impl Name {
    /// What of `text` fits.
    pub(crate) fn new(text: &str) -> Name {
        let mut bytes = [0; LEN];
        let fits = text.floor_char_boundary(LEN);
        bytes[..fits].copy_from_slice(&text.as_bytes()[..fits]);
        Name(bytes)
    }

    /// The text; empty if the device is gone.
    #[must_use]
    pub fn as_str(&self) -> &str {
        let end = self.0.iter().position(|byte| *byte == 0).unwrap_or(LEN);
        core::str::from_utf8(&self.0[..end]).unwrap_or("")
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

#[cfg(feature = "serde")]
impl serde::Serialize for Name {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

/// A place for a name. Who reads one while it is written has to find out by himself.
#[derive(Debug)]
pub(crate) struct NamePlace([AtomicU64; WORDS]);

impl NamePlace {
    /// No name.
    pub(crate) const fn new() -> NamePlace {
        NamePlace([const { AtomicU64::new(0) }; WORDS])
    }

    /// Writes it.
    pub(crate) fn set(&self, name: Name) {
        for (place, bytes) in self.0.iter().zip(name.0.chunks_exact(8)) {
            place.store(u64::from_ne_bytes(bytes.try_into().unwrap_or_default()), Relaxed);
        }
    }

    /// Reads it.
    pub(crate) fn get(&self) -> Name {
        let mut bytes = [0; LEN];
        for (place, bytes) in self.0.iter().zip(bytes.chunks_exact_mut(8)) {
            bytes.copy_from_slice(&place.load(Relaxed).to_ne_bytes());
        }
        Name(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_cut_between_characters() {
        let place = NamePlace::new();
        for (text, kept) in [("mlx5_0", "mlx5_0"), ("", ""), (&"é".repeat(17), &"é".repeat(16)[..])] {
            place.set(Name::new(text));
            assert_eq!(place.get().as_str(), kept);
        }
        place.set(Name::new(&format!("x{}", "é".repeat(16))));
        assert_eq!(place.get().as_str().chars().count(), 16);
    }
}
