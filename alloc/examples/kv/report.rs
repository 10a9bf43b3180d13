//! What is shown, and what the process looks like from outside.

use crate::client::Tally;
use std::fs::File;
use std::io::Write;
use std::mem::ManuallyDrop;
use std::os::fd::FromRawFd;
use std::time::{Duration, Instant};

/// Prints a line. Not `println!`, whose buffer is a heap block for the rest of the process: at the end of the demo, every
/// block is to be gone.
#[macro_export]
macro_rules! say {
    ($($part:tt)*) => { $crate::report::write_line(format!($($part)*)) };
}

/// Writes a line to standard output, in one piece, so that two processes can share it.
pub fn write_line(mut line: String) {
    line.push('\n');
    // SAFETY: standard output stays open, and is not closed by a `File` that is never dropped.
    let mut out = ManuallyDrop::new(unsafe { File::from_raw_fd(libc::STDOUT_FILENO) });
    let _ = out.write_all(line.as_bytes()); // Nobody reads: nothing to be done about it.
}

/// Tells every second how a loop gets on.
pub struct Progress {
    name: &'static str,
    operations: u64,
    started: Instant,
    next: Instant,
}

const PERIOD: Duration = Duration::from_secs(1);

impl Progress {
    pub fn new(name: &'static str, operations: u64) -> Progress {
        let now = Instant::now();
        Progress { name, operations, started: now, next: now + PERIOD }
    }

    pub fn show(&mut self, tally: &Tally) {
        let now = Instant::now();
        if now >= self.next {
            self.next = now + PERIOD;
            let (rate, Progress { name, operations, .. }) = (rate(tally, now - self.started), self);
            say!("    {name}: {} of {operations}, {rate}", tally.operations);
        }
    }
}

/// Operations and bytes a second.
pub fn rate(tally: &Tally, time: Duration) -> String {
    let seconds = time.as_secs_f64().max(1e-9);
    format!("{:.0} operations/s, {:.1} MiB/s", tally.operations as f64 / seconds, mib(tally.bytes) / seconds)
}

pub fn mib(bytes: u64) -> f64 {
    bytes as f64 / (1 << 20) as f64
}

/// What this process has pinned, in KiB: `VmPin` of /proc/self/status.
pub fn pinned_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmPin:"));
    line.and_then(|line| line.trim().strip_suffix(" kB")?.parse().ok()).expect("/proc/self/status has VmPin")
}
