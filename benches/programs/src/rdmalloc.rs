//! The workloads on rdmalloc, without a device.

use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: rdmalloc::Rdmalloc = rdmalloc::Rdmalloc::new();

fn main() -> ExitCode {
    rdmalloc_workloads::program::main()
}
