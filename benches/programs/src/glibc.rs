//! The workloads on what the C library has.

use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: std::alloc::System = std::alloc::System;

fn main() -> ExitCode {
    rdmalloc_workloads::program::main()
}
