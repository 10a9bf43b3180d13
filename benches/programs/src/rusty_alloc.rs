//! The workloads on rusty_alloc.

use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: rusty_alloc_api::RustyAlloc = rusty_alloc_api::RustyAlloc;

fn main() -> ExitCode {
    rdmalloc_workloads::program::main()
}
