//! `cargo xtask demo`: builds the key-value example and runs it on a verbs device; on the host's, or on a guest's.

use crate::cargo::Cargo;
use crate::guest::Guest;
use crate::{Error, Result, Workspace, setup, step};
use std::ffi::OsString;
use std::fs::{self, File};
use std::process::Stdio;

/// What the user chose.
pub struct Options {
    /// In a guest even if the host has a device.
    pub guest: bool,
    /// Not in a guest: on io_uring where the host has no device.
    pub no_guest: bool,
    /// The small volume that an emulated guest gets.
    pub quick: bool,
    /// Passed on to the example.
    pub args: Vec<OsString>,
}

/// Runs it; the example's exit status.
pub fn run(workspace: &Workspace, options: &Options) -> Result<i32> {
    setup::ensure(setup::BUILD)?;
    step!("building the example kv");
    let cargo = Cargo::new(workspace, true)?;
    let built = cargo.build(&["build", "--release", "--package=rdmalloc", "--example=kv", "--features=verbs,uring"])?;
    let kv = built.iter().find(|e| e.kind == "example" && e.name == "kv");
    let kv = kv.ok_or_else(|| Error::Failed("cargo built no example kv".into()))?;

    let mut args = options.args.clone();
    if options.quick {
        args.extend(["--values".into(), "5000".into()]);
    }
    let device = if options.guest { None } else { verbs_device() };
    if device.is_some() || options.no_guest {
        match &device {
            Some(name) => step!("kv, on the verbs device {name} of this machine"),
            None => {
                step!("kv, on io_uring: no verbs device on this machine that we may open");
                args.push("--uring".into());
            }
        }
        if device.is_some() {
            setup::ensure(setup::DEVICE)?;
        }
        let status = kv.command().current_dir(std::env::current_dir()?).args(args).stdin(Stdio::null()).status()?;
        return Ok(crate::exit_code(status));
    }
    step!("kv, in a guest with soft-RoCE (no verbs device on this machine; --no-guest would use io_uring)");
    let mut command: Vec<OsString> = Vec::new();
    if !args.iter().any(|a| a == "--emulated") {
        // Only the guest knows whether it is emulated, and then less data has to do.
        let script = r#"[ "$RDMALLOC_GUEST" = kvm ] || set -- "$@" --emulated; exec "$@""#;
        command.extend(["sh", "-c", script, "sh"].map(Into::into));
    }
    command.push(kv.path.clone().into());
    command.extend(args);
    Guest::default().run(workspace, &command, &mut std::io::stdout(), &mut std::io::stderr())
}

/// The first verbs device of this machine, if its node may be opened.
fn verbs_device() -> Option<String> {
    let mut names: Vec<String> = fs::read_dir("/sys/class/infiniband_verbs")
        .ok()?
        .flatten()
        .filter(|entry| {
            File::options()
                .read(true)
                .write(true)
                .open(format!("/dev/infiniband/{}", entry.file_name().to_string_lossy()))
                .is_ok()
        })
        .filter_map(|entry| fs::read_to_string(entry.path().join("ibdev")).ok())
        .map(|name| name.trim().to_owned())
        .collect();
    names.sort();
    names.into_iter().next()
}
