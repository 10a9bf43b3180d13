//! The workloads on rdmalloc, without a device or, with `--attached`, with an io_uring.

use rdmalloc::Rdmalloc;
use rdmalloc_workloads::program;
use rdmalloc_workloads::reach::{Attached, attach};
use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: Rdmalloc = Rdmalloc::new();

fn main() -> ExitCode {
    program::main::<Attached>(|| attach(ALLOCATOR))
}
