//! `cargo xtask test`: everything that is checked, and one line that counts it.
//!
//! The host runs the whole suite. Tests that need a verbs device have `verbs` in their name; where there is none they say
//! that they were skipped. The guest, which has two devices, then runs those once more, and what passed there has passed.

use crate::cargo::{Cargo, Executable};
use crate::guest::Guest;
use crate::kernel::Kernel;
use crate::libtest::{Outcome, Report};
use crate::{Error, Result, Workspace, setup, shell, step};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// A test program that takes longer hangs, and fails.
const HANGS: Duration = Duration::from_secs(900);

/// What the user chose.
pub struct Options {
    /// Only tests with this in their name, and no checks of the source.
    pub only: Option<String>,
    /// The kernels of the guests; none, and no guest is started.
    pub kernels: Vec<Kernel>,
}

/// Runs it all; the count, and whether nothing failed.
pub fn run(workspace: &Workspace, options: &Options) -> Result<(String, bool)> {
    setup::ensure(setup::BUILD)?;
    setup::ensure(setup::TEST)?;
    if options.only.is_none() {
        rust_components()?;
    }
    let cargo = Cargo::new(workspace, true)?;
    let mut tally = Tally::default();
    if options.only.is_none() {
        checks(&cargo, &mut tally);
    }

    step!("building the tests");
    let features = features(workspace)?.join(",");
    let programs = build(&cargo, &["test", "--workspace", "--features", &features, "--no-run"], &mut tally);
    let mut for_guest = Vec::new();
    for program in &programs {
        let names = on_host(program, options.only.as_deref(), &mut tally)?;
        if !names.is_empty() {
            for_guest.push((program, names));
        }
    }
    step!("building the tests with checks against misuse");
    for program in build(&cargo, &["test", "--package", "rdmalloc", "--all-features", "--no-run"], &mut tally) {
        on_host(&program, options.only.as_deref(), &mut tally)?;
    }
    if !programs.is_empty() {
        doc_tests(&cargo, options.only.as_deref(), &mut tally)?;
    }
    for &kernel in &options.kernels {
        for rare in [false, true] {
            let chosen = on_machine(&for_guest, rare);
            if chosen.is_empty() {
                continue;
            }
            let (nodes, gib_pages) = if rare { (2, 1) } else { (0, 0) };
            let guest = Guest { kernel, nodes, gib_pages, timeout: Duration::from_secs(1200), ..Guest::default() };
            if let Err(error) = in_guest(workspace, &guest, &chosen, &mut tally) {
                eprintln!("{error}");
                tally.record(&format!("the guest with the {} kernel", kernel.name()), Outcome::Failed);
            }
        }
    }
    if let Some(name) = options.only.as_ref().filter(|_| tally.0.is_empty()) {
        return Err(Error::Failed(format!("no test has `{name}` in its name")));
    }
    tally.list();
    Ok(tally.close())
}

/// Builds tests; none if that fails, which is recorded.
fn build(cargo: &Cargo, args: &[&str], tally: &mut Tally) -> Vec<Executable> {
    cargo.tests(args).unwrap_or_else(|error| {
        eprintln!("{error}");
        tally.record("the build of the tests", Outcome::Failed);
        Vec::new()
    })
}

/// All features of all packages, but those that change what every other test is about: `package/feature`.
fn features(workspace: &Workspace) -> Result<Vec<String>> {
    const APART: [&str; 2] = ["default", "hardened"];
    let manifest = |folder: &str| std::fs::read_to_string(workspace.root.join(folder).join("Cargo.toml"));
    let read = |folder: &str| manifest(folder).map_err(|error| Error::Failed(format!("{folder}/Cargo.toml: {error}")));
    let mut all = Vec::new();
    for folder in ["arenas", "alloc", "benches", "benches/workloads", "examples", "tests"] {
        let text = read(folder)?;
        let package = text.lines().find_map(|line| line.strip_prefix("name = \"")?.strip_suffix('"'));
        let section = text.lines().skip_while(|line| *line != "[features]").skip(1);
        let names = section.take_while(|line| !line.starts_with('[')).filter_map(|line| line.split_once(" = "));
        let names = names.map(|(name, _)| name).filter(|name| !name.starts_with('#') && !APART.contains(name));
        all.extend(names.map(|name| format!("{}/{name}", package.unwrap_or(folder))));
    }
    Ok(all)
}

/// What a toolchain with the minimal profile lacks.
fn rust_components() -> Result<()> {
    for (program, component) in [("cargo-fmt", "rustfmt"), ("cargo-clippy", "clippy")] {
        if shell::quiet(Command::new(program).arg("--version")).is_err() {
            step!("adding {component} to the Rust toolchain");
            shell::quiet(Command::new("rustup").args(["component", "add", component]))?;
        }
    }
    Ok(())
}

/// The checks of the source; each counts as one.
fn checks(cargo: &Cargo, tally: &mut Tally) {
    let clippy = ["clippy", "--workspace", "--all-targets", "--all-features", "--quiet", "--", "-D", "warnings"];
    let doc = ["doc", "--workspace", "--all-features", "--no-deps", "--quiet"];
    for (name, args) in [("formatting", &["fmt", "--all", "--check"][..]), ("clippy", &clippy), ("documentation", &doc)]
    {
        step!("{name} (cargo {})", args[0]);
        let mut command = cargo.command(args);
        if name == "documentation" {
            command.env("RUSTDOCFLAGS", "-D warnings");
        }
        let outcome = shell::run(&mut command).map_or_else(
            |error| {
                eprintln!("{error}");
                Outcome::Failed
            },
            |()| Outcome::Passed,
        );
        tally.record(name, outcome);
    }
}

/// Runs a test program; the names of its tests that the guest shall run too.
fn on_host(program: &Executable, only: Option<&str>, tally: &mut Tally) -> Result<Vec<String>> {
    step!("{}", program.label());
    let mut command = program.command();
    command.args(only).arg("--show-output").arg(format!("--test-threads={}", threads()));
    let report = follow(&mut command, &program.label(), tally)?;
    let whole = program.name.contains("verbs");
    let ignored = |o: &Outcome| matches!(o, Outcome::Skipped(reason) if reason == "marked #[ignore]");
    let chosen = report.outcomes.into_iter().filter(|(name, o)| (whole || name.contains("verbs")) && !ignored(o));
    Ok(chosen.map(|(name, _)| name).collect())
}

/// At least two, since with one thread libtest prints names and ends apart.
fn threads() -> usize {
    std::thread::available_parallelism().map_or(2, |n| n.get().max(2))
}

fn doc_tests(cargo: &Cargo, only: Option<&str>, tally: &mut Tally) -> Result<()> {
    for package in ["rdmalloc-arenas", "rdmalloc"] {
        step!("{package} doc tests");
        let mut command = cargo.command(&["test", "--doc", "--all-features", "--package", package, "--"]);
        command.args(only).arg("--show-output");
        follow(&mut command, &format!("{package} doc"), tally)?;
    }
    Ok(())
}

/// Runs a command that prints like libtest, showing each test as it ends, and counts its tests.
fn follow(command: &mut Command, label: &str, tally: &mut Tally) -> Result<Report> {
    let (reader, writer) = std::io::pipe()?;
    let started = Instant::now();
    // A process group of its own, so that what a test has started, and left, is killed with it.
    shell::die_with_us(command.process_group(0));
    let mut child = command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer).spawn()?;
    command.stdout(Stdio::null()).stderr(Stdio::null()); // drops our ends of the pipe
    let pid = child.id() as libc::pid_t;
    let (done, wait) = mpsc::channel::<()>();
    let watchdog = std::thread::spawn(move || {
        let late = wait.recv_timeout(HANGS) == Err(mpsc::RecvTimeoutError::Timeout);
        if late {
            // SAFETY: kill takes no pointers; the child has not been waited for, so its group's id is still its own.
            unsafe { libc::kill(-pid, libc::SIGKILL) };
        }
        late
    });
    let mut report = Report::default();
    for line in BufReader::new(reader).split(b'\n') {
        show(report.line(String::from_utf8_lossy(&line?).trim_end()));
    }
    drop(done);
    let late = watchdog.join().unwrap_or(false);
    let status = child.wait()?;
    let ended = if late { format!("killed after {} s", HANGS.as_secs()) } else { status.to_string() };
    tally.program(label, &report, status.success() && !late, &ended);
    if !report.outcomes.is_empty() {
        step!("{label}: {} in {:.1} s", count(report.outcomes.values()), started.elapsed().as_secs_f64());
    }
    Ok(report)
}

fn show(ended: Option<(String, Outcome)>) {
    match ended {
        Some((name, Outcome::Passed)) => println!("    ok      {name}"),
        Some((name, Outcome::Failed)) => println!("    FAILED  {name}"),
        Some((name, Outcome::Skipped(_))) => println!("    ignored {name}"),
        None => {}
    }
}

/// Those of the tests that need a machine with several memory nodes or pages of 1 GiB, or the others.
fn on_machine<'a>(tests: &[(&'a Executable, Vec<String>)], rare: bool) -> Vec<(&'a Executable, Vec<String>)> {
    let is_rare = |name: &str| ["numa", "gib_pages"].iter().any(|word| name.contains(word));
    let chosen = tests.iter().map(|(program, names)| {
        let whole = is_rare(&program.name);
        (*program, names.iter().filter(|name| (whole || is_rare(name)) == rare).cloned().collect::<Vec<_>>())
    });
    chosen.filter(|(_, names)| !names.is_empty()).collect()
}

/// Runs the chosen tests of all programs in one guest.
fn in_guest(
    workspace: &Workspace,
    guest: &Guest,
    chosen: &[(&Executable, Vec<String>)],
    tally: &mut Tally,
) -> Result<()> {
    let tests: usize = chosen.iter().map(|(_, names)| names.len()).sum();
    step!("{tests} tests on verbs, in a guest with soft-RoCE ({} kernel)", guest.kernel.name());
    let mut script = Vec::new();
    for (i, (program, names)) in chosen.iter().enumerate() {
        script.extend(format!("printf '\\n@@ begin {i}\\n'; cd ").bytes());
        script.extend(shell::quote(program.folder.as_os_str()));
        script.extend(b"\nCARGO_MANIFEST_DIR=$PWD ");
        script.extend(shell::quote(program.path.as_os_str()));
        script.extend(b" --test-threads=1 --show-output --exact");
        for name in names {
            script.push(b' ');
            script.extend(shell::quote(name.as_ref()));
        }
        script.extend(format!(" 2>&1; printf '\\n@@ end {i} %d\\n' $?\n").bytes());
    }
    let mut reports: BTreeMap<usize, (Report, Option<i32>)> = BTreeMap::new();
    let mut lines = Lines {
        buffer: Vec::new(),
        take: |line: &str| match marker(line) {
            Some(("begin", i, _)) => {
                step!("{} (guest)", chosen[i].0.label());
                reports.insert(i, Default::default());
            }
            Some((_, i, status)) => drop(reports.get_mut(&i).map(|(_, end)| *end = Some(status))),
            None => {
                if let Some((report, None)) = reports.values_mut().next_back() {
                    show(report.line(line));
                }
            }
        },
    };
    let command = ["sh".into(), "-c".into(), OsString::from_vec(script)];
    let status = guest.run(workspace, &command, &mut lines, &mut std::io::stderr())?;
    for (i, (program, _)) in chosen.iter().enumerate() {
        let label = program.label();
        match reports.get(&i) {
            None => tally.record(&format!("{label} (guest)"), Outcome::Failed),
            Some((report, None)) => {
                tally.program(&label, report, false, &format!("the guest ended meanwhile, status {status}"));
            }
            Some((report, Some(end))) => tally.program(&label, report, *end == 0, &format!("exit status {end}")),
        }
    }
    step!("guest: {}", count(reports.values().flat_map(|(r, _)| r.outcomes.values())));
    Ok(())
}

/// Our own lines among the guest's: `@@ begin I`, `@@ end I STATUS`.
fn marker(line: &str) -> Option<(&'static str, usize, i32)> {
    let mut words = line.strip_prefix("@@ ")?.split(' ');
    match (words.next()?, words.next()?.parse().ok()?, words.next()) {
        ("begin", i, None) => Some(("begin", i, 0)),
        ("end", i, Some(status)) => Some(("end", i, status.parse().ok()?)),
        _ => None,
    }
}

/// Cuts what is written to it into lines.
struct Lines<F> {
    buffer: Vec<u8>,
    take: F,
}

impl<F: FnMut(&str)> Write for Lines<F> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.buffer.extend(bytes);
        while let Some(end) = self.buffer.iter().position(|&b| b == b'\n') {
            let line: Vec<u8> = self.buffer.drain(..=end).collect();
            (self.take)(String::from_utf8_lossy(&line).trim_end());
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// All outcomes, each test once.
#[derive(Default)]
struct Tally(BTreeMap<String, Outcome>);

impl Tally {
    /// One failure anywhere is a failure; else having passed anywhere is having passed.
    fn record(&mut self, name: &str, outcome: Outcome) {
        let before = self.0.get(name);
        let after = match (before, outcome) {
            (Some(Outcome::Failed), _) | (_, Outcome::Failed) => Outcome::Failed,
            (Some(Outcome::Passed), _) | (_, Outcome::Passed) => Outcome::Passed,
            (_, skipped) => skipped,
        };
        self.0.insert(name.into(), after);
    }

    /// A test program's tests, and its failure to run them to the end.
    fn program(&mut self, label: &str, report: &Report, succeeded: bool, ended: &str) {
        for (name, outcome) in &report.outcomes {
            self.record(&format!("{label}: {name}"), outcome.clone());
            if let Outcome::Skipped(reason) = outcome {
                println!("    skipped {name}: {reason}");
            }
        }
        let told = report.outcomes.values().any(|o| *o == Outcome::Failed);
        if !report.is_libtest {
            // A program with a main of its own is one test.
            let skipped = report.noise.iter().find_map(|l| l.strip_prefix("skipped:"));
            let outcome = match (succeeded, skipped) {
                (false, _) => Outcome::Failed,
                (true, Some(reason)) => Outcome::Skipped(reason.trim().into()),
                (true, None) => Outcome::Passed,
            };
            self.record(label, outcome);
        } else if !report.finished || succeeded == told {
            let during = report.running.as_ref().map_or_else(String::new, |test| format!(" during {test}"));
            println!("    FAILED  {label} ended{during}: {ended}");
            self.record(&format!("{label}{during}: {ended}"), Outcome::Failed);
        }
        if !succeeded {
            report.noise.iter().for_each(|line| println!("    | {line}"));
        }
    }

    /// Lists what did not pass.
    fn list(&self) {
        for (name, outcome) in &self.0 {
            if let Outcome::Skipped(reason) = outcome {
                println!("skipped: {name}: {reason}");
            }
        }
        for (name, _) in self.0.iter().filter(|(_, o)| **o == Outcome::Failed) {
            println!("failed: {name}");
        }
    }

    /// Counts, and says whether nothing failed.
    fn close(&self) -> (String, bool) {
        (count(self.0.values()), !self.0.values().any(|o| *o == Outcome::Failed))
    }
}

/// `N passed, N failed, N skipped`.
fn count<'a>(outcomes: impl Iterator<Item = &'a Outcome>) -> String {
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    for outcome in outcomes {
        match outcome {
            Outcome::Passed => passed += 1,
            Outcome::Failed => failed += 1,
            Outcome::Skipped(_) => skipped += 1,
        }
    }
    format!("{passed} passed, {failed} failed, {skipped} skipped")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_counts_once_whatever_ran_it() {
        let mut tally = Tally::default();
        for (name, outcome) in [
            ("guest only", Outcome::Skipped("no device".into())),
            ("guest only", Outcome::Passed),
            ("nowhere", Outcome::Skipped("no device".into())),
            ("nowhere", Outcome::Skipped("too old".into())),
            ("worse in the guest", Outcome::Passed),
            ("worse in the guest", Outcome::Failed),
            ("better in the guest", Outcome::Failed),
            ("better in the guest", Outcome::Passed),
        ] {
            tally.record(name, outcome);
        }
        assert_eq!(tally.close(), ("1 passed, 2 failed, 1 skipped".into(), false));
    }

    fn report(text: &str) -> Report {
        let mut report = Report::default();
        text.lines().for_each(|l| drop(report.line(l)));
        report
    }

    #[test]
    fn a_program_that_dies_is_a_failure_even_if_all_its_tests_passed() {
        let whole = "running 1 test\ntest a ... ok\n\ntest result: ok. 1 passed\n";
        for (text, succeeded, count) in [
            (whole, true, "1 passed, 0 failed, 0 skipped"),
            (whole, false, "1 passed, 1 failed, 0 skipped"),
            ("running 2 tests\ntest a ... ok\ntest b ... ", false, "1 passed, 1 failed, 0 skipped"),
            ("running 2 tests\ntest a ... ok\n", true, "1 passed, 1 failed, 0 skipped"),
            ("running 1 test\ntest a ... FAILED\n\ntest result: FAILED.\n", false, "0 passed, 1 failed, 0 skipped"),
            ("my own main\n", true, "1 passed, 0 failed, 0 skipped"),
            ("skipped: no device\n", true, "0 passed, 0 failed, 1 skipped"),
            ("skipped: no device\n", false, "0 passed, 1 failed, 0 skipped"),
            ("", false, "0 passed, 1 failed, 0 skipped"),
        ] {
            let mut tally = Tally::default();
            tally.program("p", &report(text), succeeded, "signal 6");
            assert_eq!(tally.close().0, count, "{text}");
        }
    }

    #[test]
    fn markers_survive_being_cut_anywhere() {
        let mut seen = Vec::new();
        let mut lines = Lines { buffer: Vec::new(), take: |l: &str| seen.extend(marker(l)) };
        for byte in b"noise\n@@ begin 3\ntest x ... ok\n@@ end 3 101\n@@ odd\n" {
            lines.write_all(&[*byte]).unwrap();
        }
        assert_eq!(seen, [("begin", 3, 0), ("end", 3, 101)]);
    }
}
