//! A test in a process of its own, as a user who may pin little.

use std::os::unix::process::CommandExt;
use std::process::Command;

/// Set in such a process: what it may pin, in bytes.
const CONFINED: &str = "RDMALLOC_TEST_MAY_PIN";

/// What this process may pin, in bytes, if it is one of [`confined`].
pub fn may_pin() -> Option<u64> {
    std::env::var(CONFINED).ok()?.parse().ok()
}

/// Runs the test of this name (of the test program that calls it) in a process that lacks the capability `IPC_LOCK` and whose
/// memlock limit is `bytes`, and may be raised to `most`. Passes its output on.
///
/// # Panics
///
/// If the test fails there.
pub fn confined(test: &str, bytes: u64, most: u64) {
    // A hard limit is only raised with the capability SYS_RESOURCE (24).
    let hard = if has_capability(24) { u64::MAX } else { memlock().rlim_max };
    if hard < bytes {
        return println!("skipped: the memlock limit can be set to {} KiB here, not to {}", hard >> 10, bytes >> 10);
    }
    let most = most.max(bytes).min(hard);
    let mut command = Command::new(std::env::current_exe().expect("the test program has a name"));
    command.args(["--exact", test, "--include-ignored", "--nocapture"]).env(CONFINED, bytes.to_string());
    // SAFETY: between fork and exec, only system calls are made.
    unsafe {
        command.pre_exec(move || {
            let limit = libc::rlimit { rlim_cur: bytes, rlim_max: most };
            // Root gets on exec whatever its bounding set has: without IPC_LOCK (14) the limit counts for it too. An ordinary
            // user has no capability to begin with, and may not drop any.
            let dropped = libc::geteuid() != 0 || libc::prctl(libc::PR_CAPBSET_DROP, 14, 0, 0, 0) == 0;
            let limited = libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) == 0;
            if dropped && limited { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        });
    }
    let output = command.output().expect("the test program starts again");
    let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    said[0].lines().filter(|line| line.starts_with("skipped: ")).for_each(|line| println!("{line}"));
    assert!(output.status.success(), "{}{}", said[0], said[1]);
}

/// Sets the memlock limit of this process, at most to what it may be raised to: the limit then.
///
/// # Panics
///
/// If the system refuses.
pub fn set_memlock(bytes: u64) -> u64 {
    let mut limit = memlock();
    limit.rlim_cur = bytes.min(limit.rlim_max);
    // SAFETY: the pointer is to a local of the right type.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) }, 0);
    limit.rlim_cur
}

fn has_capability(number: u32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    line.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok()).is_some_and(|set| set >> number & 1 != 0)
}

fn memlock() -> libc::rlimit {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointer is to a local of the right type.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) }, 0);
    limit
}
