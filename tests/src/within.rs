//! A test in a process of its own, in an environment that is made for it.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Set in such a process: the test's name.
const WITHIN: &str = "RDMALLOC_TEST_WITHIN";

/// Whether this process is one that [`within`] has started.
#[must_use]
pub fn is_within() -> bool {
    std::env::var_os(WITHIN).is_some()
}

/// Whether the test that calls it runs in its environment. If not, it has been run there; or, where the environment cannot be made,
/// it is skipped, and says so.
///
/// `make` makes it, in the new process before the program starts: it makes system calls only. `what` it is, in few words.
///
/// # Panics
///
/// When the test fails there.
#[must_use]
pub fn within(what: &str, make: impl FnMut() -> io::Result<()> + Send + Sync + 'static) -> bool {
    if is_within() {
        return true;
    }
    let thread = std::thread::current();
    let name = thread.name().expect("the harness names threads after tests");
    let mut command = Command::new(std::env::current_exe().expect("Linux tells"));
    command.args(["--exact", name, "--test-threads=1", "--nocapture"]).env(WITHIN, name);
    // SAFETY: between fork and exec, only system calls are made, as the caller sees to.
    unsafe { command.pre_exec(make) };
    let output = match command.output() {
        Ok(output) => output,
        Err(error) => {
            println!("skipped: {what} cannot be had here: {error}");
            return false;
        }
    };
    let [text, errors] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    print!("{text}");
    assert!(output.status.success() && text.contains("1 passed"), "{text}{errors}{}", output.status);
    false
}

/// Sets a limit of this process (`RLIMIT_AS` and its kind), in bytes.
///
/// # Errors
///
/// If the system refuses.
pub fn set_limit(which: libc::__rlimit_resource_t, bytes: u64) -> io::Result<()> {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    // SAFETY: the pointer is to a local of the right type.
    if unsafe { libc::setrlimit(which, &raw const limit) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Takes `/proc` from this process, which gets mounts of its own.
///
/// # Errors
///
/// Where it has not the right to do so.
pub fn hide_proc() -> io::Result<()> {
    let check = |result: libc::c_int| if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) };
    let none = core::ptr::null();
    // SAFETY: only the mounts of this process change; the strings end in zeros.
    unsafe {
        check(libc::unshare(libc::CLONE_NEWNS))?;
        check(libc::mount(none, c"/".as_ptr(), none, libc::MS_REC | libc::MS_PRIVATE, none.cast()))?;
        check(libc::mount(c"none".as_ptr(), c"/proc".as_ptr(), c"tmpfs".as_ptr(), 0, none.cast()))
    }
}
