//! The guest's kernel: fetched once as Debian packages, unpacked under `target/vm/`, never installed into the system.
//!
//! Of a kernel's packages only the image and the few modules below are kept. The initial file system that the kernel
//! starts from is made anew for each boot, from busybox, those modules and `init.sh`: it takes milliseconds, and then
//! nothing can be stale.

use crate::{Error, Result, setup, shell, step};
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Which kernel a guest runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kernel {
    /// The distribution's own (Debian 12: 6.1): memory windows, pinned registrations.
    Stable,
    /// That of Debian 13's backports (7.x): on-demand paging too.
    Backports,
}

impl Kernel {
    /// The name on the command line, and of the folder.
    pub fn name(self) -> &'static str {
        match self {
            Kernel::Stable => "stable",
            Kernel::Backports => "backports",
        }
    }

    /// The kernel of that name.
    pub fn parse(name: &str) -> Result<Kernel> {
        match name {
            "stable" => Ok(Kernel::Stable),
            "backports" => Ok(Kernel::Backports),
            _ => Err(Error::Usage(format!("no kernel is called {name}: it is stable or backports"))),
        }
    }
}

/// What a guest needs: virtio and 9p to see the host's files, overlayfs to write over them, and the devices.
/// `crc32` and its like are asked for by name at run time, so no dependency lists them.
const MODULES: &[&str] = &[
    "virtio_pci",
    "virtio_console",
    "9pnet_virtio",
    "9p",
    "overlay",
    "crc32_generic",
    "crc32c_generic",
    "dummy",
    "veth",
    "ib_uverbs",
    "rdma_ucm",
    "rdma_rxe",
    "lzo_rle",
    "zram",
];

/// Raised whenever what is kept of a kernel changes, so that older folders are not taken for it.
const FORMAT: u32 = 2;

/// A kernel, ready to boot.
pub struct Image {
    /// The compressed kernel.
    pub vmlinuz: PathBuf,
    /// A static busybox, for the initial file system and to power off.
    pub busybox: PathBuf,
    /// The modules in the order in which they must be loaded.
    modules: Vec<PathBuf>,
}

impl Image {
    /// Fetches the kernel if it is not there yet.
    pub fn get(kernel: Kernel, vm: &Path) -> Result<Image> {
        fs::create_dir_all(vm)?;
        let lock = File::create(vm.join("lock"))?; // two commands at once must not both fetch it
        // SAFETY: flock takes a descriptor, which `lock` keeps open, and no pointers.
        if unsafe { libc::flock(lock.as_raw_fd(), libc::LOCK_EX) } != 0 {
            return Err(std::io::Error::last_os_error().into());
        }
        let home = vm.join(format!("{}-{FORMAT}", kernel.name()));
        if !home.exists() {
            let scratch = vm.join("unpack");
            let _ = fs::remove_dir_all(&scratch);
            fs::create_dir_all(&scratch)?;
            let debs = fetch(kernel, &scratch)?;
            let files = scratch.join("files");
            for deb in debs {
                shell::run(Command::new("dpkg").arg("-x").arg(&deb).arg(&files))?;
            }
            let kept = scratch.join("kept");
            keep(&files, &kept)?;
            fs::rename(&kept, &home)?;
            fs::remove_dir_all(&scratch)?;
        }
        let mut modules: Vec<PathBuf> =
            fs::read_dir(home.join("modules"))?.map(|e| Ok(e?.path())).collect::<Result<_>>()?;
        modules.sort();
        Ok(Image { vmlinuz: home.join("vmlinuz"), busybox: home.join("busybox"), modules })
    }

    /// Writes the initial file system: a cpio archive in the "newc" format (kernel: driver-api/early-userspace).
    pub fn write_initramfs(&self, path: &Path) -> Result<()> {
        let mut cpio = Cpio::default();
        for folder in ["bin", "dev", "proc", "sys", "modules", "lower", "over", "root"] {
            cpio.add(folder, 0o040755, &[]);
        }
        cpio.add("bin/busybox", 0o100755, &fs::read(&self.busybox)?);
        cpio.add("bin/sh", 0o120777, b"busybox");
        cpio.add("init", 0o100755, include_bytes!("init.sh"));
        for module in &self.modules {
            let name = module.file_name().unwrap_or_default().to_string_lossy();
            cpio.add(&format!("modules/{name}"), 0o100644, &fs::read(module)?);
        }
        cpio.add("TRAILER!!!", 0, &[]);
        Ok(File::create(path)?.write_all(&cpio.bytes)?)
    }
}

/// Downloads the kernel's packages and busybox into `scratch`.
fn fetch(kernel: Kernel, scratch: &Path) -> Result<Vec<PathBuf>> {
    if !setup::has_apt() {
        return Err(Error::Failed(
            "a guest's kernel comes from Debian or Ubuntu packages, and there is no apt-get here. \
             On another system use --no-guest (demo) or --host-only (test)."
                .into(),
        ));
    }
    let apt = match kernel {
        Kernel::Stable => Vec::new(),
        Kernel::Backports => setup::backports_apt(scratch)?,
    };
    let ask = |meta: &str| -> Result<Vec<String>> {
        let mut command = Command::new("apt-cache");
        command.args(&apt).args(["depends", "--recurse", "--no-recommends", "--no-suggests", "--no-conflicts"]);
        command.args(["--no-breaks", "--no-replaces", "--no-enhances", meta]);
        Ok(kernel_packages(&shell::output(&mut command).unwrap_or_default()))
    };
    let find = || -> Result<Vec<String>> {
        for meta in ["linux-image-amd64", "linux-image-generic"] {
            let found = ask(meta)?;
            if !found.is_empty() {
                return Ok(found);
            }
        }
        Ok(Vec::new())
    };
    let mut packages = find()?;
    if packages.is_empty() && kernel == Kernel::Stable {
        setup::apt_update()?; // a fresh container has no package lists at all
        packages = find()?;
    }
    if packages.is_empty() {
        return Err(Error::Failed(format!("apt-get knows no {} kernel for this machine", kernel.name())));
    }
    step!("fetching the guest's kernel ({}) into target/vm, not installing it", packages.join(", "));
    let debs = scratch.join("debs");
    fs::create_dir_all(&debs)?;
    download(&apt, &packages, &debs, kernel)?;
    download(&[], &["busybox-static".into()], &debs, Kernel::Stable)?;
    fs::read_dir(&debs)?.map(|e| Ok(e?.path())).collect()
}

fn download(apt: &[String], packages: &[String], into: &Path, kernel: Kernel) -> Result<()> {
    let get = || {
        let mut command = Command::new("apt-get");
        command.args(apt).args(["-q", "-o", "APT::Sandbox::User=root", "download"]).args(packages).current_dir(into);
        shell::quiet(&mut command)
    };
    if kernel == Kernel::Stable && get().is_err() {
        setup::apt_update()?; // the lists may name a version that the mirror has replaced
    } else if kernel == Kernel::Stable {
        return Ok(());
    }
    get()
}

/// From `apt-cache depends`: the packages that hold the image and the modules, not the tools around them.
fn kernel_packages(depends: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    for line in depends.lines().filter(|l| !l.starts_with([' ', '|'])) {
        let version = ["linux-image-", "linux-binary-", "linux-modules-extra-", "linux-modules-", "linux-base-"]
            .iter()
            .find_map(|start| line.strip_prefix(start));
        if version.is_some_and(|v| v.starts_with(|c: char| c.is_ascii_digit())) && !found.iter().any(|f| f == line) {
            found.push(line.into());
        }
    }
    found
}

/// Copies what a guest needs out of the unpacked packages, the modules numbered by the order in which to load them.
fn keep(files: &Path, kept: &Path) -> Result<()> {
    fs::create_dir_all(kept.join("modules"))?;
    let lacks = |what: &str| Error::Failed(format!("the kernel's packages hold no {what}"));
    let all = walk(files)?;
    let named =
        |start: &str| all.iter().find(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with(start)));
    let busybox = kept.join("busybox");
    fs::copy(named("busybox").ok_or_else(|| lacks("busybox"))?, &busybox)?;
    fs::copy(named("vmlinuz").ok_or_else(|| lacks("vmlinuz"))?, kept.join("vmlinuz"))?;

    let mut order: Vec<(String, Vec<u8>)> = Vec::new();
    for &name in MODULES {
        load_after(name, &all, &busybox, &mut order)?;
    }
    if !order.iter().any(|(name, _)| name == "rdma_rxe") {
        return Err(lacks("rdma_rxe module, which is the soft-RoCE device"));
    }
    for (i, (name, bytes)) in order.iter().enumerate() {
        fs::write(kept.join("modules").join(format!("{i:02}-{name}.ko")), bytes)?;
    }
    Ok(())
}

/// Adds a module behind those that it needs. One that does not exist is built into the kernel.
fn load_after(name: &str, all: &[PathBuf], busybox: &Path, order: &mut Vec<(String, Vec<u8>)>) -> Result<()> {
    if order.iter().any(|(n, _)| n == name) {
        return Ok(());
    }
    let Some(path) = all.iter().find(|p| module_name(p).as_deref() == Some(name)) else {
        return Ok(());
    };
    let bytes = match path.extension().and_then(|e| e.to_str()) {
        Some("xz") => shell::bytes(Command::new(busybox).arg("xzcat").arg(path))?,
        Some("zst") => shell::bytes(Command::new("zstd").arg("-dcq").arg(path))?,
        _ => fs::read(path)?,
    };
    for needed in depends(&bytes) {
        load_after(&needed, all, busybox, order)?;
    }
    order.push((name.into(), bytes));
    Ok(())
}

/// `…/virtio-pci.ko.xz` is the module `virtio_pci`.
fn module_name(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    let stem = [".ko", ".ko.xz", ".ko.zst"].iter().find_map(|end| name.strip_suffix(end))?;
    Some(stem.replace('-', "_"))
}

/// The modules that a module's `.modinfo` section says it needs (`depends=a,b`), which is what depmod reads too.
fn depends(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = module.windows(KEY.len()).position(|w| w == KEY) else {
        return Vec::new();
    };
    let list = module[at + KEY.len()..].split(|&b| b == 0).next().unwrap_or_default();
    let list = String::from_utf8_lossy(list);
    list.split(',').filter(|n| !n.is_empty()).map(|n| n.replace('-', "_")).collect()
}

/// All files below a folder.
fn walk(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            found.extend(walk(&entry.path())?);
        } else if entry.file_type()?.is_file() {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}

/// A cpio archive in the making.
#[derive(Default)]
struct Cpio {
    bytes: Vec<u8>,
    count: u32,
}

impl Cpio {
    fn add(&mut self, name: &str, mode: u32, data: &[u8]) {
        self.count += 1;
        let fields = [self.count, mode, 0, 0, 1, 0, data.len() as u32, 0, 0, 0, 0, name.len() as u32 + 1, 0];
        self.bytes.extend(b"070701");
        for field in fields {
            self.bytes.extend(format!("{field:08x}").bytes());
        }
        self.bytes.extend(name.bytes().chain([0]));
        self.pad();
        self.bytes.extend(data);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_around_the_kernel_are_left_out() {
        let depends = "linux-image-amd64\n  Depends: linux-image-6.1.0-57-amd64\nlinux-image-6.1.0-57-amd64\n\
                       \x20 Depends: kmod\n |Depends: initramfs-tools\nkmod\nlinux-base\nlinux-base-7.3-amd64\n";
        assert_eq!(kernel_packages(depends), ["linux-image-6.1.0-57-amd64", "linux-base-7.3-amd64"]);
    }

    #[test]
    fn a_module_is_loaded_after_what_it_needs() {
        assert_eq!(depends(b"x\0license=GPL\0depends=ib-core,ib_uverbs\0name=y\0"), ["ib_core", "ib_uverbs"]);
        assert!(depends(b"\0depends=\0").is_empty());
        assert!(depends(b"no section").is_empty());
        assert_eq!(module_name(Path::new("/a/virtio-pci.ko.xz")).as_deref(), Some("virtio_pci"));
        assert_eq!(module_name(Path::new("/a/modules.order")), None);
    }

    #[test]
    fn an_archive_keeps_every_part_aligned() {
        let mut cpio = Cpio::default();
        cpio.add("ab", 0o100644, b"12345");
        // The header is 6 + 13 * 8 = 110 bytes; with "ab" and its zero 113, padded to 116.
        assert_eq!(cpio.bytes.len(), 116 + 8);
        assert_eq!(&cpio.bytes[cpio.bytes.len() - 8..], b"12345\0\0\0");
    }
}
