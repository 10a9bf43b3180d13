//! A buffer that is written, or read, after it became a shared one.

use rdmalloc::{Buffer, SharedBuffer};

pub fn write(mut buffer: Buffer) -> SharedBuffer {
    let shared = buffer.freeze();
    buffer[0] = 1; //~ E0382
    shared
}

pub fn read(buffer: Buffer) -> SharedBuffer {
    let shared = buffer.freeze();
    println!("{buffer:?}"); //~ E0382
    shared
}
