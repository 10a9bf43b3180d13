//! The workloads on snmalloc.

use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: snmalloc_rs::SnMalloc = snmalloc_rs::SnMalloc;

fn main() -> ExitCode {
    rdmalloc_workloads::program::main()
}
