//! What a command needs on the machine, and how to get it: apt-get on Debian and Ubuntu, a list of names elsewhere.
//!
//! Nothing is installed, and no package list fetched, when everything is there; the check takes milliseconds.

use crate::{Error, Result, shell, step};
use std::fs;
use std::path::Path;
use std::process::Command;

/// Something that must be on the machine.
pub struct Need {
    /// How it is recognised.
    found: fn() -> bool,
    /// The Debian and Ubuntu package that brings it.
    package: &'static str,
    /// What it is for.
    why: &'static str,
}

/// For the guest.
pub const GUEST: &[Need] = &[
    Need { found: || shell::has("qemu-system-x86_64"), package: "qemu-system-x86", why: "runs the guest with soft-RoCE" },
    Need { found: || shell::has("ip") && shell::has("rdma"), package: "iproute2", why: "makes the guest's devices" },
    Need { found: || has_provider("librxe"), package: "ibverbs-providers", why: "drives soft-RoCE from a program" },
];

/// Whether the libraries of libibverbs have a driver of that name.
fn has_provider(name: &str) -> bool {
    library_folders().iter().filter_map(|f| fs::read_dir(f.join("libibverbs")).ok()).flatten().flatten()
        .any(|entry| entry.file_name().to_string_lossy().starts_with(name))
}

fn library_folders() -> Vec<std::path::PathBuf> {
    let arch = format!("/usr/lib/{}-linux-gnu", std::env::consts::ARCH);
    [arch.as_str(), "/usr/lib64", "/usr/lib", "/usr/local/lib"].map(Into::into).to_vec()
}

/// Whether this is a system of apt-get.
pub fn has_apt() -> bool {
    shell::has("apt-get") && shell::has("dpkg")
}

/// Installs those of `needs` that are missing; says which, and why, first.
pub fn ensure(needs: &[Need]) -> Result<()> {
    let missing: Vec<&Need> = needs.iter().filter(|n| !(n.found)()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let list: Vec<String> = missing.iter().map(|n| format!("{} ({})", n.package, n.why)).collect();
    if !has_apt() {
        return Err(Error::Missing(format!(
            "this machine lacks what these Debian packages bring; install your system's own: {}",
            list.join(", ")
        )));
    }
    step!("installing {}", list.join(", "));
    let install = || {
        let mut command = as_root("apt-get");
        command.args(["-y", "-q", "--no-install-recommends", "install"]).args(missing.iter().map(|n| n.package));
        shell::quiet(&mut command)
    };
    if install().is_err() {
        apt_update()?;
        install()?;
    }
    match needs.iter().find(|n| !(n.found)()) {
        None => Ok(()),
        Some(n) => Err(Error::Missing(format!("{} was installed, and what it is for is still not there: {}", n.package, n.why))),
    }
}

/// Fetches the package lists.
pub fn apt_update() -> Result<()> {
    step!("fetching the package lists (apt-get update)");
    shell::quiet(as_root("apt-get").args(["-q", "update"]))
}

/// A command as root, with sudo where we are not; packages do not ask questions.
fn as_root(program: &str) -> Command {
    // SAFETY: geteuid takes nothing and cannot fail.
    let root = unsafe { libc::geteuid() } == 0;
    let mut command = Command::new(if root { "env" } else { "sudo" });
    command.args(["DEBIAN_FRONTEND=noninteractive", program]);
    command
}

/// Options for apt that make it see Debian's backports only, and leave the system's own sources alone.
pub fn backports_apt(_scratch: &Path) -> Result<Vec<String>> {
    Err(Error::Failed("not yet".into()))
}
