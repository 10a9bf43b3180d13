//! Builds the programs of `benches/programs`; who takes part, and why others do not.

use super::figures::{Group, Workload};
use crate::cargo::{Cargo, Executable};
use crate::setup::{self, Need};
use crate::{Error, Result, Workspace, shell, step};
use std::path::PathBuf;
use std::process::Command;

/// Ours, without a device and with one.
pub const OURS: &str = "rdmalloc";
/// Its attached form.
pub const ATTACHED: &str = "rdmalloc-attached";

/// All allocators, as their crates are called, with the names that a table has room for.
const ALLOCATORS: [(&str, &str); 9] = [
    (ATTACHED, "attached"),
    (OURS, "rdmalloc"),
    ("rusty_alloc-api", "rusty"),
    ("snmalloc-rs", "snmalloc"),
    ("mimalloc", "mimalloc"),
    ("tikv-jemallocator", "jemalloc"),
    ("rpmalloc", "rpmalloc"),
    ("tcmalloc-better", "tcmalloc"),
    ("glibc", "glibc"),
];

/// What the peers' own builds run.
const NEEDS: &[Need] = &[
    Need { found: || shell::has("c++") && shell::has("g++"), package: "g++", why: "builds snmalloc and TCMalloc" },
    Need { found: || shell::has("make"), package: "make", why: "builds jemalloc" },
];

/// One who takes part.
#[derive(Clone, Debug)]
pub struct Subject {
    /// As in the CSV.
    pub name: &'static str,
    /// As in the table.
    pub short: &'static str,
    /// The program.
    pub program: PathBuf,
}

impl Subject {
    /// Whether it is one of our two forms.
    pub fn is_ours(&self) -> bool {
        self.name == OURS || self.is_attached()
    }

    /// Whether a device is attached.
    pub fn is_attached(&self) -> bool {
        self.name == ATTACHED
    }
}

/// What was built.
pub struct Programs {
    /// Who takes part.
    pub subjects: Vec<Subject>,
    /// Who does not, and why.
    pub left_out: Vec<(&'static str, String)>,
}

/// Builds the programs of the chosen allocators; of all, if none are. One that does not build is left out, unless it is ours.
pub fn build(workspace: &Workspace, chosen: &[String]) -> Result<Programs> {
    if let Some(name) = chosen.iter().find(|name| !ALLOCATORS.iter().any(|(n, short)| n == name || short == name)) {
        let names: Vec<_> = ALLOCATORS.iter().map(|(name, _)| *name).collect();
        return Err(Error::Usage(format!("there is no allocator {name}; there are {}", names.join(", "))));
    }
    let is_chosen = |name: &str, short: &str| chosen.is_empty() || chosen.iter().any(|c| c == name || c == short);
    let allocators: Vec<_> = ALLOCATORS.iter().filter(|(name, short)| is_chosen(name, short)).collect();
    setup::ensure(&setup::BUILD[..2])?;
    if let Err(error) = setup::ensure(NEEDS) {
        step!("{error}");
    }
    // Each is the name of a program, and of its feature.
    let names: Vec<&str> = allocators.iter().map(|(name, _)| *name).collect();
    step!("building {} programs (the first time this takes some minutes: the peers are C and C++)", names.len());
    let (built, failed) = match cargo(workspace, &names) {
        Ok(built) => (built, Vec::new()),
        // Once more, one by one, to see whose fault it is.
        Err(_) if names.len() > 1 => one_by_one(workspace, &names)?,
        Err(error) => return Err(error),
    };
    let (mut subjects, mut left_out) = (Vec::new(), Vec::new());
    for &&(name, short) in &allocators {
        match built.iter().find(|executable| executable.kind == "bin" && executable.name == name) {
            Some(executable) => subjects.push(Subject { name, short, program: executable.path.clone() }),
            None => {
                let why = failed.iter().find(|(failed, _)| *failed == name).map(|(_, why)| &**why);
                left_out.push((name, why.unwrap_or("cargo built no such program").to_owned()));
            }
        }
    }
    Ok(Programs { subjects, left_out })
}

type Failures<'a> = Vec<(&'a str, String)>;

fn one_by_one<'a>(workspace: &Workspace, names: &[&'a str]) -> Result<(Vec<Executable>, Failures<'a>)> {
    let (mut built, mut failed) = (Vec::new(), Vec::new());
    for name in names {
        match cargo(workspace, &[name]) {
            Ok(executables) => built.extend(executables),
            Err(error) if [OURS, ATTACHED].contains(name) => return Err(error),
            Err(_) => failed.push((*name, "it does not build here; cargo's messages are above".to_owned())),
        }
    }
    Ok((built, failed))
}

fn cargo(workspace: &Workspace, names: &[&str]) -> Result<Vec<Executable>> {
    let manifest = workspace.root.join("benches/programs/Cargo.toml");
    let target = workspace.target.join("suite");
    let features = names.join(",");
    let (manifest, target) = (manifest.to_string_lossy(), target.to_string_lossy());
    let args = ["build", "--release", "--manifest-path", &manifest, "--target-dir", &target];
    // snmalloc's build by the compiler alone leaves its assertions in; its usual one, with cmake, does not.
    let mut cargo = Cargo::new(workspace, false)?;
    for flags in ["CFLAGS", "CXXFLAGS"] {
        let mut value = std::env::var_os(flags).unwrap_or_default();
        value.push(" -DNDEBUG");
        cargo.set(flags, value);
    }
    cargo.build(&[&args[..], &["--features", &features]].concat())
}

impl Programs {
    /// The workloads that the programs have, of those that were chosen; and whether that is all of them.
    pub fn workloads(&self, only: &[String]) -> Result<(Vec<Workload>, bool)> {
        let subject = self.subjects.first().ok_or_else(|| Error::Failed("no program was built".into()))?;
        let list = shell::output(Command::new(&subject.program).arg("--list"))?;
        let workload = |line: &str| {
            let mut words = line.split('\t').map(str::to_owned);
            let (name, group, about) = (words.next()?, words.next()?, words.next()?);
            Some(Workload { name, group: Group::parse(&group)?, about })
        };
        let all: Vec<Workload> = list.lines().filter_map(workload).collect();
        let is_meant = |workload: &Workload, name: &String| workload.name == *name || workload.group.name() == name;
        if let Some(name) = only.iter().find(|name| !all.iter().any(|workload| is_meant(workload, name))) {
            let names: Vec<_> = all.iter().map(|workload| &*workload.name).collect();
            return Err(Error::Usage(format!(
                "there is no workload {name}; there are {}, and the groups bound, part, whole",
                names.join(", ")
            )));
        }
        let count = all.len();
        let is_chosen = |workload: &Workload| only.is_empty() || only.iter().any(|name| is_meant(workload, name));
        let chosen: Vec<Workload> = all.into_iter().filter(is_chosen).collect();
        let is_whole = chosen.len() == count;
        Ok((chosen, is_whole))
    }
}
