//! The guest: a small machine in QEMU that has soft-RoCE devices, whatever the host has.
//!
//! Its root is the host's file system, read-only beneath a layer in memory, so that programs built on the host run in it
//! as they are. `target/` is shared for writing. The command's output comes out of two virtio ports, its exit status
//! out of a file, so neither a terminal nor a standard input is needed. Uses `kernel` for what it boots.

use crate::kernel::{Image, Kernel};
use crate::{Error, Result, Workspace, setup, shell, step};
use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long KVM may take until the guest's second stage runs (it takes about 2 s), before it is thought not to work.
const KVM_BOOT: Duration = Duration::from_secs(20);
/// The same under emulation (about 10 s on an idle machine), before the guest is thought to be broken.
const TCG_BOOT: Duration = Duration::from_secs(300);

/// A guest to be started for one command.
pub struct Guest {
    /// The kernel it runs.
    pub kernel: Kernel,
    /// Its memory, as QEMU takes it (`4G`).
    pub memory: String,
    /// Its processors.
    pub cpus: u32,
    /// Its memory nodes, among which memory and processors are divided; 0: it knows none.
    pub nodes: u32,
    /// Pages of 1 GiB that its kernel sets aside while it boots; later there may be none in one piece.
    pub gib_pages: u32,
    /// Whether the command runs without `CAP_IPC_LOCK`, so that the 8 MiB limit on locked memory binds even root.
    pub user_limits: bool,
    /// Folders of the host that it may write to, besides the target folder.
    pub writable: Vec<PathBuf>,
    /// When it is killed.
    pub timeout: Duration,
}

impl Default for Guest {
    fn default() -> Self {
        Guest {
            kernel: Kernel::Stable,
            memory: "4G".into(),
            cpus: 2,
            nodes: 0,
            gib_pages: 0,
            user_limits: false,
            writable: Vec::new(),
            timeout: Duration::from_secs(900),
        }
    }
}

/// What executes the guest's instructions.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Accelerator {
    Kvm,
    Emulation,
}

/// How a start ended.
enum End {
    Exited(i32),
    TimedOut,
    /// The kernel did not come up, and the command was not run.
    NotBooted(String),
    /// It came up, and then failed.
    Broken(String),
}

/// A command in a guest: what all attempts to start it share.
struct Run<'a> {
    guest: &'a Guest,
    image: Image,
    command: &'a [OsString],
    /// The folder through which host and guest tell each other things.
    folder: PathBuf,
    /// The folders that the guest may write to.
    shares: Vec<PathBuf>,
}

impl Guest {
    /// Runs `command` in a new guest, and gives back its exit status; 124 if it was killed for being late.
    ///
    /// # Errors
    ///
    /// When the command could not be run at all, or the guest broke under it.
    pub fn run(
        &self,
        workspace: &Workspace,
        command: &[OsString],
        out: &mut (dyn Write + Send),
        err: &mut (dyn Write + Send),
    ) -> Result<i32> {
        let shares = self.shares(workspace)?;
        setup::ensure(setup::GUEST)?;
        let vm = workspace.target.join("vm");
        let image = Image::get(self.kernel, &vm)?;
        clear_remains(&vm);
        let run = Run { guest: self, image, command, folder: vm.join(format!("run-{}", std::process::id())), shares };
        fs::create_dir_all(&run.folder)?;
        let end = run.start_somehow(&vm.join("kvm-fails"), out, err);
        let console = fs::read(run.folder.join("console")).unwrap_or_default();
        let _ = fs::remove_dir_all(&run.folder);
        match end? {
            End::Exited(status) => Ok(status),
            End::TimedOut => {
                step!("the guest was killed: not done after {} s (see --timeout)", self.timeout.as_secs());
                Ok(124)
            }
            End::NotBooted(why) | End::Broken(why) => {
                Err(Error::Failed(format!("the guest failed: {why}\n{}", tail(&console))))
            }
        }
    }

    fn shares(&self, workspace: &Workspace) -> Result<Vec<PathBuf>> {
        let mut shares = vec![workspace.target.clone()];
        for folder in &self.writable {
            let wrong = |e| Error::Usage(format!("--write {}: {e}; the folder must exist", folder.display()));
            shares.push(folder.canonicalize().map_err(wrong)?);
        }
        if shares.iter().any(|s| s.as_os_str().as_bytes().contains(&b'\n')) {
            return Err(Error::Usage(
                "a folder that the guest may write to must not have a line break in its path".into(),
            ));
        }
        Ok(shares)
    }
}

impl Run<'_> {
    /// Starts it with KVM if that may work, else, or then, under emulation. That KVM failed is remembered in `memory`
    /// until the host boots anew, so that a /dev/kvm that cannot start a stock kernel costs its 20 s once.
    fn start_somehow(&self, memory: &Path, out: &mut (dyn Write + Send), err: &mut (dyn Write + Send)) -> Result<End> {
        let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let known_bad = !boot_id.is_empty() && fs::read_to_string(memory).is_ok_and(|m| m == boot_id);
        let openable = fs::File::options().read(true).write(true).open("/dev/kvm").is_ok();
        if openable && !known_bad {
            let end = self.start(Accelerator::Kvm, out, err)?;
            if !matches!(end, End::NotBooted(_)) {
                return Ok(end);
            }
            step!("/dev/kvm does not start the guest: emulating it, which is slower");
            fs::write(memory, boot_id)?;
        }
        self.start(Accelerator::Emulation, out, err)
    }

    fn start(
        &self,
        accelerator: Accelerator,
        out: &mut (dyn Write + Send),
        err: &mut (dyn Write + Send),
    ) -> Result<End> {
        let file = |name: &str| self.folder.join(name);
        for name in ["booted", "status", "trouble", "console"] {
            let _ = fs::remove_file(file(name));
        }
        let list: Vec<u8> = self.shares.iter().flat_map(|s| [s.as_os_str().as_bytes(), b"\n"].concat()).collect();
        fs::write(file("shares"), list)?;
        fs::write(file("busybox"), self.image.busybox.as_os_str().as_bytes())?;
        fs::write(file("stage.sh"), include_str!("stage.sh"))?;
        fs::write(file("command.sh"), script(self.command, self.guest.user_limits, accelerator)?)?;
        self.image.write_initramfs(&file("initramfs"))?;

        let started = Instant::now();
        let spawned = self.qemu(accelerator).spawn();
        let mut child = spawned.map_err(|e| Error::Failed(format!("cannot start qemu-system-x86_64: {e}")))?;
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let in_time = std::thread::scope(|scope| {
            scope.spawn(|| copy(stdout, out, || true));
            // QEMU's own words come here too, and those about a KVM that does not work would only confuse.
            scope.spawn(|| copy(stderr, err, || accelerator == Accelerator::Emulation || file("booted").exists()));
            self.wait(&mut child, accelerator, started)
        })?;
        let read = |name: &str| fs::read_to_string(file(name)).ok();
        Ok(match (read("trouble"), read("status").and_then(|s| s.trim().parse().ok())) {
            (Some(trouble), _) => End::Broken(trouble.trim().into()),
            (None, Some(status)) => End::Exited(status),
            (None, None) if file("booted").exists() && in_time => {
                End::Broken("it ended before the command did; its console said last:".into())
            }
            (None, None) if file("booted").exists() => End::TimedOut,
            _ => End::NotBooted(format!("its kernel did not come up in {} s", started.elapsed().as_secs())),
        })
    }

    /// Waits for the guest's end; kills it, and says false, when it takes too long.
    fn wait(&self, child: &mut Child, accelerator: Accelerator, started: Instant) -> Result<bool> {
        let boot_limit = if accelerator == Accelerator::Kvm { KVM_BOOT } else { TCG_BOOT }.min(self.guest.timeout);
        let booted = self.folder.join("booted");
        let mut up = false;
        loop {
            if child.try_wait()?.is_some() {
                return Ok(true);
            }
            up = up || booted.exists();
            if started.elapsed() > if up { self.guest.timeout } else { boot_limit } {
                child.kill()?;
                child.wait()?;
                return Ok(false);
            }
            std::thread::sleep(Duration::from_millis(20)); // a process's end cannot be waited for with a limit
        }
    }

    fn qemu(&self, accelerator: Accelerator) -> Command {
        let Run { guest, image, folder, shares, .. } = self;
        let mut qemu = Command::new("qemu-system-x86_64");
        qemu.args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-monitor", "none"]);
        qemu.args(match accelerator {
            Accelerator::Kvm => ["-accel", "kvm", "-cpu", "host"],
            Accelerator::Emulation => ["-accel", "tcg,thread=multi", "-cpu", "max"],
        });
        qemu.args(["-M", "q35", "-m", &guest.memory, "-smp", &guest.cpus.to_string()]);
        for node in 0..guest.nodes {
            let mib = mebibytes(&guest.memory) / u64::from(guest.nodes);
            qemu.arg("-object").arg(format!("memory-backend-ram,id=memory{node},size={mib}M"));
            let cpus = (node..guest.cpus).step_by(guest.nodes as usize).map(|cpu| format!(",cpus={cpu}"));
            qemu.arg("-numa").arg(format!("node,nodeid={node},memdev=memory{node}{}", cpus.collect::<String>()));
        }
        qemu.arg("-kernel").arg(&image.vmlinuz).arg("-initrd").arg(folder.join("initramfs"));
        let mut hex = String::new();
        for byte in folder.as_os_str().as_bytes() {
            let _ = write!(hex, "{byte:02x}");
        }
        // Mitigations mean a flush of all translations per system call, which emulation pays dearly for.
        let line = "console=ttyS0 quiet panic=-1 mitigations=off tsc=reliable no_timer_check random.trust_cpu=on";
        let pages = match guest.gib_pages {
            0 => String::new(),
            count => format!("hugepagesz=1G hugepages={count} "),
        };
        qemu.arg("-append").arg(format!("{line} {pages}xtask.run={hex}"));
        qemu.arg("-serial").arg(option("file:", &folder.join("console"), ""));
        qemu.args(["-device", "virtio-serial-pci"]);
        for (name, descriptor) in [("out", "1"), ("err", "2")] {
            qemu.arg("-chardev").arg(format!("file,id={name},path=/dev/fd/{descriptor},append=on"));
            qemu.arg("-device").arg(format!("virtserialport,chardev={name},name=xtask.{name}"));
        }
        let mut share = |id: &str, path: &Path, readonly: &str| {
            let rest = format!(",security_model=none,multidevs=remap,id={id}{readonly}");
            qemu.arg("-fsdev").arg(option("local,path=", path, &rest));
            qemu.arg("-device").arg(format!("virtio-9p-pci,fsdev={id},mount_tag={id}"));
        };
        share("root", Path::new("/"), ",readonly=on");
        for (i, path) in shares.iter().enumerate() {
            share(&format!("share{i}"), path, "");
        }
        qemu.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        shell::die_with_us(&mut qemu);
        qemu
    }
}

/// What the guest's shell runs: folder, environment, command, each word as it was given.
fn script(command: &[OsString], user_limits: bool, accelerator: Accelerator) -> Result<Vec<u8>> {
    let mut script = b"cd ".to_vec();
    script.extend(shell::quote(std::env::current_dir()?.as_os_str()));
    script.extend(b" || exit 126\n");
    for (name, value) in std::env::vars_os().filter(|(name, _)| passes_through(name)) {
        script.extend([b"export ", name.as_bytes(), b"=", &shell::quote(&value), b"\n"].concat());
    }
    // Programs that move much, or measure, want to know how fast the guest is.
    let how = if accelerator == Accelerator::Kvm { "kvm" } else { "emulated" };
    script.extend(format!("export RDMALLOC_GUEST={how}\nexec").bytes());
    if user_limits {
        script.extend(b" setpriv --bounding-set=-ipc_lock --inh-caps=-ipc_lock --");
    }
    for word in command {
        script.push(b' ');
        script.extend(shell::quote(word));
    }
    script.push(b'\n');
    Ok(script)
}

/// A size as QEMU takes it (`512M`, `4G`), in MiB.
fn mebibytes(size: &str) -> u64 {
    let number = |digits: &str| digits.parse().unwrap_or(0);
    size.strip_suffix('G').map_or_else(|| number(size.trim_end_matches('M')), |digits| number(digits) << 10)
}

/// The variables of the host that the command sees.
fn passes_through(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    let shell_can_name_it = name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    let ours = name.starts_with("RDMALLOC_") && name != "RDMALLOC_GUEST";
    shell_can_name_it
        && (ours || ["PATH", "HOME", "LANG", "RUST_BACKTRACE", "RUST_LOG", "LD_LIBRARY_PATH"].contains(&&*name))
}

/// A QEMU option with a path in it: commas, which end a value, are doubled.
fn option(start: &str, path: &Path, rest: &str) -> OsString {
    let path: Vec<u8> = path.as_os_str().as_bytes().iter().flat_map(|&b| vec![b; 1 + usize::from(b == b',')]).collect();
    let mut option = OsString::from(start);
    option.push(OsStr::from_bytes(&path));
    option.push(rest);
    option
}

/// Removes what runs left behind that were killed. An hour's grace, since another container may share the folder, whose
/// processes are not seen here.
fn clear_remains(vm: &Path) {
    for entry in fs::read_dir(vm).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let ended = name.strip_prefix("run-").is_some_and(|pid| !Path::new("/proc").join(pid).exists());
        let age = entry.metadata().and_then(|m| m.modified()).ok().and_then(|modified| modified.elapsed().ok());
        if ended && age.is_some_and(|age| age > Duration::from_secs(3600)) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Passes output on as it comes, once `open` says so; what came before is held, and dropped if that is never.
/// Goes on reading when nobody listens any more, or the guest would stall.
fn copy(from: Option<impl Read>, to: &mut (dyn Write + Send), open: impl Fn() -> bool) {
    let Some(mut from) = from else { return };
    let (mut buffer, mut held) = ([0; 16 << 10], Vec::new());
    while let Ok(n @ 1..) = from.read(&mut buffer) {
        held.extend(&buffer[..n]);
        if open() {
            let _ = to.write_all(&held).and_then(|()| to.flush());
            held.clear();
        }
    }
}

/// The last lines of a console.
fn tail(console: &[u8]) -> String {
    let text = String::from_utf8_lossy(console);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(15)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comma_in_a_path_does_not_end_the_option() {
        assert_eq!(option("file:", Path::new("/a,b/c"), ",x=1"), "file:/a,,b/c,x=1");
    }

    #[test]
    fn sizes_are_read_as_qemu_reads_them() {
        assert_eq!((mebibytes("512M"), mebibytes("4G")), (512, 4096));
    }

    #[test]
    fn the_script_keeps_every_word_apart() {
        let script = script(&["echo".into(), "a b'c".into()], true, Accelerator::Emulation).unwrap();
        let script = String::from_utf8(script).unwrap();
        let end = r"exec setpriv --bounding-set=-ipc_lock --inh-caps=-ipc_lock -- 'echo' 'a b'\''c'";
        assert!(script.trim_end().ends_with(end), "{script}");
        assert!(script.contains("RDMALLOC_GUEST=emulated"));
    }

    #[test]
    fn only_our_variables_reach_the_guest() {
        assert!(passes_through(OsStr::new("RDMALLOC_SIZE")) && passes_through(OsStr::new("RUST_BACKTRACE")));
        assert!(!passes_through(OsStr::new("CARGO_HOME")) && !passes_through(OsStr::new("RDMALLOC_A-B")));
    }
}
