//! `cargo xtask`: the tasks of this workspace. This file is the command line; each task has a file of its own.

mod args;
mod bench;
mod cargo;
mod clang;
mod demo;
mod guest;
mod kernel;
mod libtest;
mod setup;
mod shell;
mod suite;

use args::Args;
use guest::Guest;
use kernel::Kernel;
use std::ffi::OsString;
use std::fmt;
use std::os::unix::process::ExitStatusExt;
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

const HELP: &str = "\
The tasks of this workspace. What a task needs on the machine, and is missing, it installs (Debian, Ubuntu) or names.

    cargo xtask demo     the allocator at work: a key-value server and client over RDMA
    cargo xtask test     every check and test, on this machine and in a guest with soft-RoCE devices
    cargo xtask bench    whole programs on this allocator and on others, compared
    cargo xtask vm       runs a command in a guest with soft-RoCE devices

    cargo xtask TASK --help says more.";

const DEMO: &str = "\
cargo xtask demo [--guest | --no-guest] [--quick] [-- ARGS]

Builds the example kv and runs it: two processes that send each other what lies on their heaps, over RDMA. It runs on
this machine's verbs device if there is one, else in a guest with soft-RoCE.

    --guest       in a guest, even if there is a device
    --no-guest    not in a guest: where there is no device, on io_uring
    --quick       with a tenth of the values
    -- ARGS       passed on to kv (--device NAME, --uring, --emulated)";

const TEST: &str = "\
cargo xtask test [--host-only] [--kernel stable|backports|both] [--only NAME]

Formatting, clippy, documentation, then all tests on this machine, then those that need verbs in a guest with soft-RoCE;
of these, those with `numa` or `gib_pages` in their name in one with two memory nodes and a page of 1 GiB.
The last line counts: N passed, N failed, N skipped. The exit status is 1 if any failed.

    --host-only   no guest: tests that need a verbs device are skipped, unless this machine has one
    --kernel K    the guest's kernel (stable if not given)
    --only NAME   only tests with NAME in their name, and none of the other checks";

const BENCH: &str = "\
cargo xtask bench [--quick] [--only NAME]... [--allocators LIST] [--runs N]
cargo xtask bench --micro | --verbs [--quick]

Whole programs, one for each allocator, each with the allocator as its global one, run in turn and compared: time, processor
time, peak memory. Writes target/bench/summary.csv, runs.csv and summary.svg, and prints a table and what of the bars is reached.
rdmalloc takes part twice: without a device, and with an io_uring attached, so that all its memory is registered (Linux 6.13
or newer, and a memlock limit of 2 GiB or more, or root).

    --quick             an eighth of the work: within three minutes on two processors, once built
    --only NAME         only this workload or group of them (bound, part, whole); may be given more than once
    --allocators LIST   only these, separated by commas: rdmalloc-attached, rdmalloc, rusty_alloc-api, snmalloc-rs, mimalloc,
                        tikv-jemallocator, rpmalloc, tcmalloc-better, glibc
    --runs N            how often each program runs each workload, 5 or more (7 if not given; with --quick 5)
    --micro             the criterion benches of benches/ instead; those that register do it with io_uring
    --verbs             those on verbs, in a guest with soft-RoCE";

const VM: &str = "\
cargo xtask vm [OPTIONS] -- COMMAND [ARGS]

Runs a command in a guest that has two soft-RoCE devices: rxe0 (10.9.0.1) and rxe1 (10.9.1.1). It sees this machine's
files; what it writes is lost, but for the target folder. Output and exit status are the command's own. It needs neither
KVM nor a terminal nor an installed kernel; the kernel is fetched once, into target/vm.

    --kernel stable|backports   the distribution's kernel (the default), or that of Debian 13's backports
    --memory SIZE               4G if not given
    --cpus N                    2 if not given
    --numa N                    with N memory nodes, among which memory and processors are divided
    --gib-pages N               N pages of 1 GiB in its hugetlb pool, set aside while it boots
    --user-limits               without CAP_IPC_LOCK, so that the limit on locked memory (8 MiB) binds the command
    --write FOLDER              one more folder of this machine that the guest may write to
    --timeout SECONDS           when the guest is killed, with exit status 124; 900 if not given

The environment variables RUST_BACKTRACE, RUST_LOG, RDMALLOC_*, PATH, HOME, LANG and LD_LIBRARY_PATH reach the command;
RDMALLOC_GUEST is `kvm` or `emulated`. If the guest itself fails, the exit status is 125.";

fn demo(args: &[OsString]) -> Result<i32> {
    let args = Args::read(args, &["--guest", "--no-guest", "--quick"], &[])?;
    let (guest, no_guest) = (args.has("--guest"), args.has("--no-guest"));
    if guest && no_guest {
        return Err(Error::Usage("--guest and --no-guest exclude each other".into()));
    }
    demo::run(&Workspace::find()?, &demo::Options { guest, no_guest, quick: args.has("--quick"), args: args.rest })
}

fn test(args: &[OsString]) -> Result<i32> {
    let args = Args::read(args, &["--host-only"], &["--kernel", "--only"])?.nothing_behind()?;
    let kernels = match args.last("--kernel") {
        _ if args.has("--host-only") => Vec::new(),
        Some("both") => vec![Kernel::Stable, Kernel::Backports],
        name => vec![Kernel::parse(name.unwrap_or("stable"))?],
    };
    let options = suite::Options { only: args.last("--only").map(Into::into), kernels };
    let (count, good) = suite::run(&Workspace::find()?, &options)?;
    println!("{count}");
    Ok(i32::from(!good))
}

fn bench(args: &[OsString]) -> Result<i32> {
    let flags = ["--quick", "--micro", "--verbs"];
    let args = Args::read(args, &flags, &["--only", "--allocators", "--runs"])?.nothing_behind()?;
    let list = |name| args.all(name).flat_map(|names| names.split(',')).map(Into::into).collect::<Vec<String>>();
    let (quick, only, allocators, runs) =
        (args.has("--quick"), list("--only"), list("--allocators"), args.number("--runs")?);
    let workspace = Workspace::find()?;
    if args.has("--micro") || args.has("--verbs") {
        if !only.is_empty() || !allocators.is_empty() || runs.is_some() {
            return Err(Error::Usage("--micro and --verbs take only --quick".into()));
        }
        return bench::micro::run(&workspace, quick, args.has("--verbs"));
    }
    bench::run(&workspace, &bench::Options { quick, only, allocators, runs })
}

fn vm(args: &[OsString]) -> Result<i32> {
    let valued = ["--kernel", "--memory", "--cpus", "--numa", "--gib-pages", "--write", "--timeout"];
    let args = Args::read(args, &["--user-limits"], &valued)?;
    let mut guest = Guest { user_limits: args.has("--user-limits"), ..Guest::default() };
    if let Some(name) = args.last("--kernel") {
        guest.kernel = Kernel::parse(name)?;
    }
    if let Some(size) = args.last("--memory") {
        let digits = size.trim_end_matches(['M', 'G']);
        if digits.parse::<u32>().is_err() || size.len() != digits.len() + 1 {
            return Err(Error::Usage(format!("--memory takes a size such as 512M or 4G, not {size}")));
        }
        guest.memory = size.into();
    }
    guest.cpus = args.number("--cpus")?.unwrap_or(guest.cpus);
    guest.nodes = args.number("--numa")?.unwrap_or(guest.nodes);
    guest.gib_pages = args.number("--gib-pages")?.unwrap_or(guest.gib_pages);
    if let Some(seconds) = args.number("--timeout")? {
        guest.timeout = Duration::from_secs(seconds.into());
    }
    guest.writable = args.all("--write").map(PathBuf::from).collect();
    if args.rest.is_empty() {
        return Err(Error::Usage("which command? cargo xtask vm -- COMMAND [ARGS]".into()));
    }
    let (mut out, mut err) = (std::io::stdout(), std::io::stderr());
    guest.run(&Workspace::find()?, &args.rest, &mut out, &mut err).or_else(|error| match error {
        Error::Failed(why) => {
            eprintln!("xtask: {why}");
            Ok(125)
        }
        other => Err(other),
    })
}

/// The exit status of a program as a shell would tell it: 128 and the signal, if one ended it.
pub fn exit_code(status: std::process::ExitStatus) -> i32 {
    status.code().or(status.signal().map(|signal| 128 + signal)).unwrap_or(1)
}

/// A task: its help, and what runs it.
type Task = (&'static str, fn(&[OsString]) -> Result<i32>);

fn main() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    let (help, task): Task = match args.first().and_then(|a| a.to_str()) {
        Some("demo") => (DEMO, demo),
        Some("test") => (TEST, test),
        Some("bench") => (BENCH, bench),
        Some("vm") => (VM, vm),
        Some("--help" | "-h" | "help") => {
            println!("{HELP}");
            return ExitCode::SUCCESS;
        }
        other => {
            eprintln!("{}{HELP}", other.map(|o| format!("xtask: there is no task {o}\n\n")).unwrap_or_default());
            return ExitCode::from(2);
        }
    };
    if args[1..].iter().take_while(|a| *a != "--").any(|a| a == "--help" || a == "-h") {
        println!("{help}");
        return ExitCode::SUCCESS;
    }
    let code = match task(&args[1..]) {
        Ok(code) => code,
        Err(Error::Usage(why)) => {
            eprintln!("xtask: {why}\n\n{help}");
            2
        }
        Err(Error::Missing(why)) => {
            eprintln!("xtask: {why}");
            2
        }
        Err(Error::Failed(why)) => {
            eprintln!("xtask: {why}");
            1
        }
    };
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}
