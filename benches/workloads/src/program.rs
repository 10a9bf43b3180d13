//! The command line of a program with one allocator.
//!
//! ```text
//! PROGRAM --list               the workloads: name, group, what it does; separated by tabs
//! PROGRAM WORKLOAD UNITS       one run; prints `done`, its result, and its peak of resident memory in KiB
//! PROGRAM --warm MIB           takes so much memory, and ends: what the next process gets was there a moment ago
//! ```
//!
//! Exit status 3 and `skipped REASON`: it cannot run here.

use crate::reach::{Local, Reach};
use crate::{Scale, Workload, all};
use std::process::ExitCode;

/// Runs what the command line says.
#[must_use]
pub fn main() -> ExitCode {
    main_with::<Local>(|| Ok(()))
}

/// The same with an io_uring attached to the program's allocator. Memory that is not registered is not served at all, so a run ends
/// rather than go on unregistered.
#[cfg(feature = "attached")]
#[must_use]
pub fn main_attached(heap: rdmalloc::Rdmalloc) -> ExitCode {
    use crate::reach::{Attached, attach};
    main_with::<Attached>(|| attach(heap))
}

/// `prepare` comes before a run, and says why there can be none.
///
/// Not for programs to call: the workloads are instantiated in this crate in each form, or the compiler inlines other calls in one
/// than in the other.
fn main_with<R: Reach>(prepare: impl FnOnce() -> Result<(), String>) -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let (name, units) = match args[..] {
        ["--list"] => {
            for Workload { name, group, about, .. } in all::<R>() {
                println!("{name}\t{}\t{about}", group.name());
            }
            return ExitCode::SUCCESS;
        }
        ["--warm", mib] => {
            let mib: usize = mib.parse().unwrap_or(0);
            return match prepare() {
                Ok(()) => {
                    std::hint::black_box(vec![1u8; mib << 20]);
                    ExitCode::SUCCESS
                }
                Err(_) => ExitCode::from(3),
            };
        }
        [name, units] => (name, units),
        _ => {
            eprintln!("usage: --list, WORKLOAD UNITS, or --warm MIB");
            return ExitCode::from(2);
        }
    };
    let workload = all::<R>().into_iter().find(|workload| workload.name == name);
    let (Some(workload), Ok(units)) = (workload, units.parse()) else {
        eprintln!("no workload {name}, or {units} is not a number of units");
        return ExitCode::from(2);
    };
    if let Err(reason) = prepare() {
        println!("skipped {reason}");
        return ExitCode::from(3);
    }
    let result = (workload.run)(Scale(units));
    println!("done {result:016x} {}", peak());
    ExitCode::SUCCESS
}

/// The program's peak of resident memory in KiB.
///
/// Asked of /proc rather than of the parent's `wait4`: what that tells includes the parent itself, which was there between fork
/// and exec.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}
