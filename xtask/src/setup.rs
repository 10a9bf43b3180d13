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
    pub found: fn() -> bool,
    /// The Debian and Ubuntu package that brings it.
    pub package: &'static str,
    /// What it is for.
    pub why: &'static str,
}

/// To build everything, verbs too (libclang apart: see `clang`).
pub const BUILD: &[Need] = &[
    Need { found: || shell::has("cc") && shell::has("gcc"), package: "gcc", why: "links programs" },
    Need { found: || Path::new("/usr/include/stdio.h").exists(), package: "libc6-dev", why: "links programs" },
    Need { found: || shell::has("pkg-config"), package: "pkg-config", why: "finds the verbs libraries" },
    Need { found: || pkg_config("libibverbs"), package: "libibverbs-dev", why: "the verbs library" },
    Need { found: || pkg_config("librdmacm"), package: "librdmacm-dev", why: "rdma-sys links it" },
];

/// To build and run the tests.
pub const TEST: &[Need] = &[
    Need { found: || shell::has("valgrind"), package: "valgrind", why: "counts the fast path's instructions" },
    Need { found: || shell::has("cmake"), package: "cmake", why: EXAMPLES },
    Need { found: || shell::has("make"), package: "make", why: EXAMPLES },
    Need { found: || shell::has("python3"), package: "python3", why: EXAMPLES },
];

const EXAMPLES: &str = "builds the crates sideway and ibverbs for the examples";

/// For the guest.
pub const GUEST: &[Need] = &[
    Need {
        found: || shell::has("qemu-system-x86_64"),
        package: "qemu-system-x86",
        why: "runs the guest with soft-RoCE",
    },
    Need { found: || shell::has("ip") && shell::has("rdma"), package: "iproute2", why: "makes the guest's devices" },
    PROVIDERS,
];

/// To use a verbs device from a program.
pub const DEVICE: &[Need] = &[PROVIDERS];

const PROVIDERS: Need =
    Need { found: || has_provider("librxe"), package: "ibverbs-providers", why: "the drivers of verbs devices" };

fn pkg_config(library: &str) -> bool {
    shell::quiet(Command::new("pkg-config").args(["--exists", library])).is_ok()
}

/// Whether the libraries of libibverbs have a driver of that name.
fn has_provider(name: &str) -> bool {
    library_folders()
        .iter()
        .filter_map(|f| fs::read_dir(f.join("libibverbs")).ok())
        .flatten()
        .flatten()
        .any(|entry| entry.file_name().to_string_lossy().starts_with(name))
}

/// Where shared libraries lie.
pub fn library_folders() -> Vec<std::path::PathBuf> {
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
    apt_install(&missing.iter().map(|n| n.package).collect::<Vec<_>>())?;
    match needs.iter().find(|n| !(n.found)()) {
        None => Ok(()),
        Some(n) => Err(Error::Missing(format!(
            "{} was installed, and what it is for is still not there: {}",
            n.package, n.why
        ))),
    }
}

/// Installs packages, fetching the package lists first if they are too old for it, or not there.
pub fn apt_install(packages: &[&str]) -> Result<()> {
    if !is_root() && !shell::has("sudo") {
        return Err(Error::Missing(format!(
            "we are not root, and there is no sudo. As root: apt-get install --no-install-recommends {}",
            packages.join(" ")
        )));
    }
    let install = || {
        let mut command = as_root("apt-get");
        shell::quiet(command.args(["-y", "-q", "--no-install-recommends", "install"]).args(packages))
    };
    install().or_else(|_| {
        // One foreign source that does not answer fails the update, and need not matter here.
        let update = apt_update();
        install().map_err(|error| update.err().unwrap_or(error))
    })
}

/// Whether the package lists have a package, which they may only tell once they are fetched.
pub fn apt_has(package: &str) -> Result<bool> {
    let show = |package: &str| shell::quiet(Command::new("apt-cache").args(["show", "--quiet=2", package])).is_ok();
    if !show("libc6") {
        apt_update()?;
    }
    Ok(show(package))
}

/// Fetches the package lists.
pub fn apt_update() -> Result<()> {
    step!("fetching the package lists (apt-get update)");
    shell::quiet(as_root("apt-get").args(["-q", "update"]))
}

/// A command as root, with sudo where we are not; packages do not ask questions.
fn as_root(program: &str) -> Command {
    let mut command = Command::new(if is_root() { "env" } else { "sudo" });
    command.args(if is_root() { &[][..] } else { &["env"] }).args(["DEBIAN_FRONTEND=noninteractive", program]);
    command
}

fn is_root() -> bool {
    // SAFETY: geteuid takes nothing and cannot fail.
    unsafe { libc::geteuid() == 0 }
}

/// Options that make apt see Debian 13's backports and nothing else, and leave the system's own sources alone: a private
/// source list and private package lists in `scratch`, signed by Debian's archive keys.
pub fn backports_apt(scratch: &Path) -> Result<Vec<String>> {
    const KEYS: &str = "usr/share/keyrings/debian-archive-keyring.gpg";
    let mut keys = Path::new("/").join(KEYS);
    if !keys.exists() {
        // Not a Debian. Ubuntu carries Debian's keys as a package, signed by its own, so the trust has no gap.
        let mut command = Command::new("apt-get");
        command.args(["-q", "-o", "APT::Sandbox::User=root", "download", "debian-archive-keyring"]);
        shell::quiet(command.current_dir(scratch))?;
        shell::quiet(Command::new("sh").args(["-c", "dpkg -x debian-archive-keyring*.deb keys"]).current_dir(scratch))?;
        keys = scratch.join("keys").join(KEYS);
    }
    let targets = shell::output(Command::new("apt-get").args(["indextargets", "--format", "$(REPO_URI)"]))?;
    let mirror = std::env::var("RDMALLOC_DEBIAN_MIRROR").ok().or_else(|| debian_mirror(&targets)).ok_or_else(|| {
        Error::Failed(
            "the backports kernel is Debian's, and this system's package sources name no Debian mirror: \
             set RDMALLOC_DEBIAN_MIRROR to the address of one (…/debian)"
                .into(),
        )
    })?;
    let (list, lists) = (scratch.join("sources.list"), scratch.join("lists"));
    fs::create_dir_all(lists.join("partial"))?;
    fs::write(&list, format!("deb [signed-by={}] {mirror} trixie-backports main\n", keys.display()))?;
    let mut options = Vec::new();
    for option in [
        format!("Dir::Etc::sourcelist={}", list.display()),
        "Dir::Etc::sourceparts=-".into(),
        format!("Dir::State::Lists={}", lists.display()),
        "Dir::Cache::pkgcache=".into(),
        "Dir::Cache::srcpkgcache=".into(),
        "APT::Sandbox::User=root".into(),
    ] {
        options.extend(["-o".into(), option]);
    }
    step!("fetching the package list of Debian 13's backports (into target/vm, the system's sources stay as they are)");
    shell::quiet(Command::new("apt-get").args(&options).args(["-q", "update"]))?;
    Ok(options)
}

/// Among the addresses of the system's package sources, that of a whole Debian mirror.
fn debian_mirror(addresses: &str) -> Option<String> {
    addresses.lines().map(|a| a.trim_end_matches('/')).find(|a| a.ends_with("/debian")).map(Into::into)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn security_and_foreign_sources_are_no_mirror() {
        let addresses = "http://a.example/debian-security/\nhttp://b.example/tool\nhttp://c.example/debian/\n";
        assert_eq!(debian_mirror(addresses).as_deref(), Some("http://c.example/debian"));
        assert_eq!(debian_mirror("http://u.example/ubuntu/\n"), None);
    }
}
