//! Room in the internal heap, seen to before it is needed. Uses `global` and `heap`.
//!
//! What a thread allocates inside the arenas comes from the internal heap: lists of arenas, boxes of registrars, the text of an
//! error, whatever a registrar wants. The standard library ends the program where such an allocation fails. So who is about to call
//! devices first sees to it that the internal heap has room, and is told, as an error, if it has not.

use crate::global::INTERNAL;
use crate::thread;
use rdmalloc_arenas::TakeError;

/// So many slices are free, 1 MiB: a slab for each of 16 sizes.
const SLICES: usize = 16;

/// Sees to it that the internal heap has room for what devices need.
///
/// # Errors
///
/// When there is no memory for it.
pub(crate) fn see_to_room() -> Result<(), TakeError> {
    thread::inside(|| {
        INTERNAL.see_to_shard()?;
        while !INTERNAL.arenas.has_free(SLICES) {
            // It has one of so many slices then; and perhaps another thread takes them.
            let span = INTERNAL.arenas.take(SLICES, 1)?;
            INTERNAL.arenas.give(span.address, span.slices);
        }
        Ok(())
    })
}
