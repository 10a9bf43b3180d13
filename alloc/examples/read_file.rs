//! Reads a file straight into a `Vec` by io_uring's fixed buffers: nothing is registered for it, since the allocator has done so.
//!
//! ```text
//! cargo run --example read_file --features uring -- FILE        (Linux 6.13 or newer)
//! ```

use io_uring::{IoUring, opcode, types};
use rdmalloc::{Rdmalloc, registrar::uring::Uring};
use std::fs::File;
use std::io::{Error, ErrorKind};
use std::os::fd::AsRawFd;

#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

fn main() {
    let path = std::env::args().nth(1).unwrap_or_else(|| "Cargo.toml".to_owned());
    match read(&path) {
        Ok(bytes) => println!("{path}: {} bytes, read to where they lie", bytes.len()),
        Err(error) => eprintln!("{path}: {error}"),
    }
}

fn read(path: &str) -> Result<Vec<u8>, Box<dyn std::error::Error>> {
    let mut ring = IoUring::new(8)?;
    let device = HEAP.attach(Uring::new(&ring)?)?;
    let file = File::open(path)?;
    let mut bytes: Vec<u8> = Vec::with_capacity(file.metadata()?.len().max(1).try_into()?);

    let target = device.sge_mut(bytes.spare_capacity_mut())?;
    let (place, slot) = (std::ptr::with_exposed_provenance_mut(target.addr() as usize), target.lkey().try_into()?);
    let request = opcode::ReadFixed::new(types::Fd(file.as_raw_fd()), place, target.length(), slot).build();
    // SAFETY: `bytes` and `file` stay as they are until the completion below.
    unsafe { ring.submission().push(&request)? };
    ring.submit_and_wait(1)?;

    let done = ring.completion().next().ok_or(Error::from(ErrorKind::UnexpectedEof))?.result();
    let len = usize::try_from(done).map_err(|_| Error::from_raw_os_error(-done))?;
    // SAFETY: the kernel has written as many.
    unsafe { bytes.set_len(len) };
    HEAP.detach(device)?;
    Ok(bytes)
}
