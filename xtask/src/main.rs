//! `cargo xtask`: the tasks of this workspace. This file is the command line; each task has a file of its own.

mod guest;
mod kernel;
mod setup;
mod shell;

use guest::Guest;
use kernel::Kernel;
use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Says what is being done, on standard error: standard output belongs to the commands that are run.
#[macro_export]
macro_rules! step {
    ($($words:tt)*) => { eprintln!("==> {}", format_args!($($words)*)) };
}

/// Why a task did not end well.
#[derive(Debug)]
pub enum Error {
    /// The command line is wrong.
    Usage(String),
    /// The machine lacks something that we cannot install.
    Missing(String),
    /// Anything else.
    Failed(String),
}

/// What tasks return.
pub type Result<T> = std::result::Result<T, Error>;

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Error::Usage(why) | Error::Missing(why) | Error::Failed(why)) = self;
        f.write_str(why)
    }
}

impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Self {
        Error::Failed(error.to_string())
    }
}

/// Where the workspace and what is built from it lie.
pub struct Workspace {
    /// The folder of the workspace's `Cargo.toml`.
    pub root: PathBuf,
    /// Cargo's target folder.
    pub target: PathBuf,
}

impl Workspace {
    fn find() -> Result<Workspace> {
        let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).canonicalize()?;
        let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
        std::fs::create_dir_all(&target)?;
        Ok(Workspace { root, target: target.canonicalize()? })
    }
}

fn vm(args: &[OsString]) -> Result<u8> {
    let mut guest = Guest::default();
    let mut args = args.iter();
    let command: Vec<OsString> = loop {
        let Some(arg) = args.next() else { break Vec::new() };
        let text = arg.to_string_lossy();
        let mut value = || -> Result<String> {
            let value = args.next().ok_or_else(|| Error::Usage(format!("{text} needs a value")))?;
            Ok(value.to_string_lossy().into_owned())
        };
        match &*text {
            "--kernel" => guest.kernel = Kernel::parse(&value()?)?,
            "--memory" => guest.memory = value()?,
            "--cpus" => guest.cpus = number(&text, &value()?)?,
            "--timeout" => guest.timeout = Duration::from_secs(number(&text, &value()?)?.into()),
            "--write" => guest.writable.push(value()?.into()),
            "--user-limits" => guest.user_limits = true,
            "--" => break args.cloned().collect(),
            _ => return Err(Error::Usage(format!("unknown argument {text} (the command comes behind --)"))),
        }
    };
    if command.is_empty() {
        return Err(Error::Usage("which command? cargo xtask vm -- COMMAND [ARGS]".into()));
    }
    let status = guest.run(&Workspace::find()?, &command, &mut std::io::stdout(), &mut std::io::stderr())?;
    Ok(status as u8)
}

fn number(option: &str, text: &str) -> Result<u32> {
    text.parse().ok().filter(|&n| n > 0).ok_or_else(|| Error::Usage(format!("{option} takes a number above 0, not {text}")))
}

fn main() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    let result = match args.first().and_then(|a| a.to_str()) {
        Some("vm") => vm(&args[1..]),
        _ => Err(Error::Usage("which task?".into())),
    };
    match result {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::from(2)
        }
    }
}
