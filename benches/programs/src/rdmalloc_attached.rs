//! The workloads on rdmalloc, with an io_uring attached.

use rdmalloc::Rdmalloc;
use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: Rdmalloc = Rdmalloc::new();

fn main() -> ExitCode {
    rdmalloc_workloads::program::main_attached(ALLOCATOR)
}
