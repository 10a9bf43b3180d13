//! Tests in processes of their own: alone, or under a filter of system calls as containers have them.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// What a process finds in its environment when [`again_without_membarrier`] has started it.
const MARK: &str = "RDMALLOC_TEST_NO_MEMBARRIER";
/// What a process finds in its environment in which tests run one after the other, with nothing beside them.
const ALONE: &str = "RDMALLOC_TEST_ALONE";

fn membarrier(command: i32) -> io::Result<i64> {
    // SAFETY: membarrier touches no memory.
    let result = unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Whether the test that calls it is all that runs in its process. If not, it has been run, in a process of its own.
///
/// The harness runs tests beside each other, and allocates meanwhile; with one thread, it runs them on its own, which waits.
///
/// # Panics
///
/// When the test fails there.
#[must_use]
pub fn is_alone() -> bool {
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let thread = std::thread::current();
    let name = thread.name().expect("the harness names threads after tests");
    let mut command = Command::new(std::env::current_exe().expect("Linux tells"));
    command.args(["--exact", name, "--test-threads=1"]).env(ALONE, "1");
    let output = command.output().expect("this program runs");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("1 passed"), "{text}");
    false
}

/// Runs this test program again, all tests but `but`, in a process to which `membarrier` is forbidden. Does nothing in that process.
///
/// # Panics
///
/// When a test fails there, or the filter does not hold.
pub fn again_without_membarrier(but: &str) {
    if std::env::var_os(MARK).is_some() {
        return;
    }
    let mut command = Command::new(std::env::current_exe().expect("Linux tells"));
    command.args(["--skip", but, "--test-threads=1"]).env(MARK, "1").env(ALONE, "1");
    // SAFETY: between fork and exec, only system calls are made.
    unsafe { command.pre_exec(|| forbid(libc::SYS_membarrier)) };
    let output = match command.output() {
        Ok(output) => output,
        Err(error) => return println!("skipped: no filter of system calls: {error}"),
    };
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("test result: ok"), "{text}");
}

/// Forbids a system call to this process, and all that it starts, for ever: `EPERM`. Allocates nothing.
///
/// # Errors
///
/// Where the kernel has no such filters.
pub fn forbid(call: libc::c_long) -> io::Result<()> {
    let error = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    let (load, equal, give) =
        (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, libc::BPF_JMP | libc::BPF_JEQ, libc::BPF_RET);
    let step = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut filter = [
        step(load, 0, 0, core::mem::offset_of!(libc::seccomp_data, nr) as u32),
        step(equal | libc::BPF_K, 0, 1, call as u32),
        step(give | libc::BPF_K, 0, 0, error),
        step(give | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program outlives the call that reads it.
    unsafe {
        let bound = libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        let set = libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program);
        if bound == 0 && set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

/// Whether `membarrier` is forbidden to this process.
///
/// # Panics
///
/// In a process that [`again_without_membarrier`] has started, if it is not.
#[must_use]
pub fn is_without_membarrier() -> bool {
    let forbidden = membarrier(0).is_err_and(|error| error.raw_os_error() == Some(libc::EPERM));
    assert!(forbidden || std::env::var_os(MARK).is_none(), "the filter does not hold");
    forbidden
}
