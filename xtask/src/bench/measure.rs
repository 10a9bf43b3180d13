//! Runs a program once: how long it took, how much of the processors, and how much memory it had.

use super::figures::Run;
use super::programs::Subject;
use crate::{Error, Result, shell};
use memmap2::{Advice, MmapMut};
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// A run that takes longer hangs.
const HANGS: u32 = 300;

/// How a run ended.
pub enum Outcome {
    /// Well.
    Done(Run),
    /// It cannot run here, and says why.
    Skipped(String),
}

/// Runs `units` of a workload; stops it, if that takes longer than `patience`.
pub fn run(subject: &Subject, workload: &str, units: u32, patience: Option<Duration>) -> Result<Outcome> {
    let mut command = Command::new(&subject.program);
    command.arg(workload).arg(units.to_string()).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    shell::die_with_us(&mut command);
    // SAFETY: between fork and exec, all of these are async-signal-safe system calls; the limit is a local.
    unsafe {
        command.pre_exec(|| {
            libc::alarm(HANGS);
            // As much as may be pinned without asking anyone.
            let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            if libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) == 0 {
                limit.rlim_cur = limit.rlim_max;
                libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit);
            }
            Ok(())
        });
    }
    let start = Instant::now();
    let mut child = command.spawn()?;
    if let (Some(patience), Some(out)) = (patience, &child.stdout)
        && !speaks_within(out.as_fd(), patience)?
    {
        let (wall, peak) = (start.elapsed(), peak(child.id()));
        child.kill()?;
        let (_, cpu) = wait(child.id())?;
        let (wall, cpu) = (wall.as_secs_f64(), cpu.as_secs_f64());
        return Ok(Outcome::Done(Run { wall, cpu, rss: peak, result: None }));
    }
    let (mut said, mut complained) = (String::new(), String::new());
    // It says one line; what it complains of fits into a pipe, or it panics once.
    child.stdout.take().map(|mut out| out.read_to_string(&mut said)).transpose()?;
    child.stderr.take().map(|mut err| err.read_to_string(&mut complained)).transpose()?;
    let (status, cpu) = wait(child.id())?;
    let wall = start.elapsed();
    let line = said.lines().next_back().unwrap_or_default();
    if status.code() == Some(3)
        && let Some(reason) = line.strip_prefix("skipped ")
    {
        return Ok(Outcome::Skipped(reason.into()));
    }
    let done = || {
        let (result, peak) = line.strip_prefix("done ")?.split_once(' ')?;
        Some((result.to_owned(), peak.parse::<u64>().ok()?))
    };
    match done() {
        Some((result, peak)) if status.success() => {
            let (wall, cpu, rss) = (wall.as_secs_f64(), cpu.as_secs_f64(), peak as f64 * 1024.0);
            Ok(Outcome::Done(Run { wall, cpu, rss, result: Some(result) }))
        }
        _ => Err(Error::Failed(format!("{} {workload}: {status}: {}", subject.name, complained.trim()))),
    }
}

/// Whether a child says something within a time, or ends: it speaks when it is done.
fn speaks_within(out: BorrowedFd, patience: Duration) -> Result<bool> {
    let mut poll = libc::pollfd { fd: out.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let end = Instant::now() + patience;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        // SAFETY: one entry, a local.
        match unsafe { libc::poll(&raw mut poll, 1, left.as_millis() as libc::c_int) } {
            0 if left < Duration::from_millis(1) => return Ok(false),
            // Less than a millisecond may be left.
            0 => {}
            1 => return Ok(true),
            _ => match std::io::Error::last_os_error() {
                error if error.kind() == std::io::ErrorKind::Interrupted => {}
                error => return Err(error.into()),
            },
        }
    }
}

/// The peak of resident memory of a child so far, in bytes.
fn peak(pid: u32) -> f64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib: Option<f64> = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    kib.unwrap_or(0.0) * 1024.0
}

/// Touches so many bytes, twice: in huge pages, and in small ones, which are taken from elsewhere. Gives them back: what the next process gets has then been there a moment ago.
///
/// A virtual machine's host may take memory back that was free for a while (free page reporting), and then takes a millisecond for each MiB
/// that is touched again, thirty times as long as clearing it; that fell upon whoever came next, at random.
///
/// Memory that is pinned is taken from elsewhere once more, so for the form that pins its memory the program itself takes some.
pub fn warm_memory(subject: &Subject, bytes: usize) -> Result<()> {
    for advice in [Advice::HugePage, Advice::NoHugePage] {
        let mut memory = MmapMut::map_anon(bytes)?;
        // Where there are no huge pages, nobody else has any.
        let _ = memory.advise(advice);
        memory.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
    }
    if subject.is_attached() {
        let mut command = Command::new(&subject.program);
        // Whoever cannot attach says so when it is run.
        command.arg("--warm").arg((bytes >> 20).to_string()).stdin(Stdio::null()).stdout(Stdio::null()).status()?;
    }
    Ok(())
}

/// Waits for a child: how it ended, and the processor time that it took.
fn wait(pid: u32) -> Result<(ExitStatus, Duration)> {
    let mut status = 0;
    // SAFETY: all of its fields may be 0.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    loop {
        // SAFETY: both are locals; the child is ours, and nobody else waits for it.
        if unsafe { libc::wait4(pid as libc::pid_t, &raw mut status, 0, &raw mut usage) } >= 0 {
            break;
        }
        let error = std::io::Error::last_os_error();
        if error.kind() != std::io::ErrorKind::Interrupted {
            return Err(error.into());
        }
    }
    let time = |time: libc::timeval| Duration::new(time.tv_sec as u64, time.tv_usec as u32 * 1000);
    let status = std::os::unix::process::ExitStatusExt::from_raw(status);
    Ok((status, time(usage.ru_utime) + time(usage.ru_stime)))
}
