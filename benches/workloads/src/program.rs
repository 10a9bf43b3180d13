//! The command line of a program with one allocator.
//!
//! ```text
//! PROGRAM --list                         the workloads: name, group, what it does; separated by tabs
//! PROGRAM WORKLOAD UNITS [--attached]    one run; prints `done`, its result, and its peak of resident memory in KiB
//! ```
//!
//! Exit status 3 and `skipped REASON`: it cannot run here. With `--attached`, memory that is not registered is not served at
//! all, so such a run ends rather than go on unregistered.

use crate::reach::{Local, Reach};
use crate::{Scale, Workload, all};
use std::process::ExitCode;

/// What makes the attached form of the program's allocator, if it has one; why it cannot.
pub type Attach = fn() -> Result<(), String>;

/// Runs what the command line says, with the workloads of `A` where `--attached` is given.
#[must_use]
pub fn main<A: Reach>(attach: Attach) -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let (workloads, name, units) = match args[..] {
        ["--list"] => {
            for Workload { name, group, about, .. } in all::<Local>() {
                println!("{name}\t{}\t{about}", group.name());
            }
            return ExitCode::SUCCESS;
        }
        [name, units] => (all::<Local>(), name, units),
        [name, units, "--attached"] => {
            if let Err(reason) = attach() {
                println!("skipped {reason}");
                return ExitCode::from(3);
            }
            (all::<A>(), name, units)
        }
        _ => {
            eprintln!("usage: --list, or WORKLOAD UNITS [--attached]");
            return ExitCode::from(2);
        }
    };
    let workload = workloads.iter().find(|workload| workload.name == name);
    let (Some(workload), Ok(units)) = (workload, units.parse()) else {
        eprintln!("no workload {name}, or {units} is not a number of units");
        return ExitCode::from(2);
    };
    let result = (workload.run)(Scale(units));
    println!("done {result:016x} {}", peak());
    ExitCode::SUCCESS
}

/// [`main`] of a program whose allocator has no attached form.
#[must_use]
pub fn alone() -> ExitCode {
    main::<Local>(|| Err("this allocator has no attached form".into()))
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
