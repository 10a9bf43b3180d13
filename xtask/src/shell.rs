//! Other programs: run them, take their output, quote for a shell. Every failure names the command that failed.

use crate::{Error, Result};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Output, Stdio};

/// Runs a command whose output the user sees.
pub fn run(command: &mut Command) -> Result<()> {
    let status = command.stdin(Stdio::null()).status().map_err(|e| cannot_start(command, &e))?;
    if status.success() { Ok(()) } else { Err(Error::Failed(format!("{}: {status}", describe(command)))) }
}

/// Runs a command whose output is shown only when it fails.
pub fn quiet(command: &mut Command) -> Result<()> {
    bytes(command).map(drop)
}

/// What a command prints, as text.
pub fn output(command: &mut Command) -> Result<String> {
    bytes(command).map(|b| String::from_utf8_lossy(&b).into_owned())
}

/// What a command prints.
pub fn bytes(command: &mut Command) -> Result<Vec<u8>> {
    let Output { status, stdout, stderr } =
        command.stdin(Stdio::null()).output().map_err(|e| cannot_start(command, &e))?;
    if status.success() {
        return Ok(stdout);
    }
    let said = String::from_utf8_lossy(&stderr);
    Err(Error::Failed(format!("{}: {status}\n{said}", describe(command)).trim_end().into()))
}

/// Whether a program of that name is in `PATH`, or where system programs lie that a user's `PATH` may leave out.
pub fn has(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/local/sbin", "/usr/sbin", "/sbin"].map(std::path::PathBuf::from);
    std::env::split_paths(&path).chain(system).any(|folder| folder.join(program).is_file())
}

/// Makes a command end with this process, however it ends.
pub fn die_with_us(command: &mut Command) {
    // SAFETY: between fork and exec, prctl is async-signal-safe (one system call), and takes no pointers here.
    unsafe {
        command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
}

/// Quotes one word for `sh`, whatever bytes it has.
pub fn quote(word: &OsStr) -> Vec<u8> {
    let mut quoted = vec![b'\''];
    for &byte in word.as_bytes() {
        match byte {
            b'\'' => quoted.extend(br"'\''"),
            _ => quoted.push(byte),
        }
    }
    quoted.push(b'\'');
    quoted
}

/// The command line, for people.
pub fn describe(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|w| w.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

fn cannot_start(command: &Command, error: &std::io::Error) -> Error {
    Error::Failed(format!("cannot start {}: {error}", command.get_program().to_string_lossy()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quoted_words_survive_a_shell() {
        for word in ["", "a b", "it's", "\"$HOME\" `id` \\", "*", "a\nb", "'"] {
            let mut script = b"printf %s ".to_vec();
            script.extend(quote(OsStr::new(word)));
            let said = output(Command::new("sh").arg("-c").arg(OsStr::from_bytes(&script))).unwrap();
            assert_eq!(said, word);
        }
    }

    #[test]
    fn a_failure_names_its_command() {
        let error = output(Command::new("sh").args(["-c", "echo why >&2; exit 3"])).unwrap_err().to_string();
        assert!(error.contains("exit 3") && error.contains("why"), "{error}");
    }
}
