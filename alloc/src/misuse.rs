//! The end of a program that has misused the allocator: a message that is written without allocating, and an abort. Uses `class`
//! and the arenas.

use crate::class::{Kind, kind_of, size_of_class};
use core::alloc::Layout;
use core::fmt::{self, Write};
use rdmalloc_arenas::memory_of;

/// A message of one line, on the stack.
struct Line {
    bytes: [u8; 512],
    len: usize,
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = &mut self.bytes[self.len..];
        let count = text.len().min(room.len());
        room[..count].copy_from_slice(&text.as_bytes()[..count]);
        self.len += count;
        Ok(())
    }
}

/// Says what has happened to the block at an address, of which this is the layout as far as is known; and aborts.
#[cold]
#[inline(never)]
pub(crate) fn end(address: usize, layout: Option<Layout>, what: fmt::Arguments<'_>) -> ! {
    let mut line = Line { bytes: [0; 512], len: 0 };
    // Writing to a line does not fail.
    let _ = write!(line, "rdmalloc: the block at {address:#x} {what} (");
    let _ = match layout.map(kind_of) {
        Some(Kind::Small(class) | Kind::Medium(class)) => write!(line, "size class {}, ", size_of_class(class)),
        Some(Kind::Large(slices)) => write!(line, "{slices} slices of 64 KiB, "),
        None => Ok(()),
    };
    let _ = match memory_of(address) {
        Some(arena) => writeln!(line, "arena {:#x}..{:#x})", arena.start, arena.end),
        None => writeln!(line, "in no arena)"),
    };
    // SAFETY: the bytes are the line's.
    unsafe { libc::write(libc::STDERR_FILENO, line.bytes.as_ptr().cast(), line.len) };
    std::process::abort()
}
