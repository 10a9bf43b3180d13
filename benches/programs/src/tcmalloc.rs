//! The workloads on TCMalloc, Google's of today.

use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: tcmalloc_better::TCMalloc = tcmalloc_better::TCMalloc;

fn main() -> ExitCode {
    rdmalloc_workloads::program::main()
}
