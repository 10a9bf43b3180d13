//! The workloads on mimalloc, version 3.

use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    rdmalloc_workloads::program::main()
}
