//! What every type that is bytes can do, as the types of the crate `bytes` do it: comparing, hashing, printing, being lent.
//! Uses nothing below it.

/// Implements it for a type that derefs to `[u8]`.
macro_rules! bytes_like {
    ($type:ty) => {
        impl AsRef<[u8]> for $type {
            #[inline]
            fn as_ref(&self) -> &[u8] {
                self
            }
        }

        // Equal, ordered and hashed as the slice is.
        impl core::borrow::Borrow<[u8]> for $type {
            fn borrow(&self) -> &[u8] {
                self
            }
        }

        impl core::hash::Hash for $type {
            fn hash<H: core::hash::Hasher>(&self, state: &mut H) {
                self[..].hash(state);
            }
        }

        impl PartialEq for $type {
            fn eq(&self, other: &$type) -> bool {
                self[..] == other[..]
            }
        }

        impl Eq for $type {}

        impl PartialOrd for $type {
            fn partial_cmp(&self, other: &$type) -> Option<core::cmp::Ordering> {
                Some(self.cmp(other))
            }
        }

        impl Ord for $type {
            fn cmp(&self, other: &$type) -> core::cmp::Ordering {
                self[..].cmp(&other[..])
            }
        }

        impl<'a, T: ?Sized> PartialEq<&'a T> for $type
        where
            $type: PartialEq<T>,
        {
            fn eq(&self, other: &&'a T) -> bool {
                *self == **other
            }
        }

        impl<const N: usize> PartialEq<[u8; N]> for $type {
            fn eq(&self, other: &[u8; N]) -> bool {
                self[..] == other[..]
            }
        }

        impl<const N: usize> PartialEq<$type> for [u8; N] {
            fn eq(&self, other: &$type) -> bool {
                self[..] == other[..]
            }
        }

        impl PartialEq<$type> for &[u8] {
            fn eq(&self, other: &$type) -> bool {
                **self == other[..]
            }
        }

        impl PartialEq<$type> for &str {
            fn eq(&self, other: &$type) -> bool {
                *self.as_bytes() == other[..]
            }
        }

        $crate::bytes_like::like!($type: [u8], str, Vec<u8>, String, bytes::Bytes, bytes::BytesMut);

        /// As a byte string literal: all of them.
        impl core::fmt::Debug for $type {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                write!(f, "b\"{}\"", self.escape_ascii())
            }
        }

        impl core::fmt::LowerHex for $type {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                self.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }

        impl core::fmt::UpperHex for $type {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                self.iter().try_for_each(|byte| write!(f, "{byte:02X}"))
            }
        }

        impl<'a> IntoIterator for &'a $type {
            type Item = &'a u8;
            type IntoIter = core::slice::Iter<'a, u8>;
            fn into_iter(self) -> Self::IntoIter {
                self.iter()
            }
        }
    };
}

/// Comparing with other types that are bytes.
macro_rules! like {
    ($type:ty: $($other:ty),*) => {
        $(
            impl PartialEq<$other> for $type {
                fn eq(&self, other: &$other) -> bool {
                    self[..] == *AsRef::<[u8]>::as_ref(other)
                }
            }

            impl PartialEq<$type> for $other {
                fn eq(&self, other: &$type) -> bool {
                    *AsRef::<[u8]>::as_ref(self) == other[..]
                }
            }

            impl PartialOrd<$other> for $type {
                fn partial_cmp(&self, other: &$other) -> Option<core::cmp::Ordering> {
                    self[..].partial_cmp(AsRef::<[u8]>::as_ref(other))
                }
            }

            impl PartialOrd<$type> for $other {
                fn partial_cmp(&self, other: &$type) -> Option<core::cmp::Ordering> {
                    AsRef::<[u8]>::as_ref(self).partial_cmp(&other[..])
                }
            }
        )*
    };
}

pub(crate) use {bytes_like, like};
