//! The workloads on rpmalloc.

use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: rpmalloc::RpMalloc = rpmalloc::RpMalloc;

fn main() -> ExitCode {
    rdmalloc_workloads::program::main()
}
