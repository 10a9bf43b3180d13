//! Cargo, started in the environment in which everything builds, and what it says it has built.

use crate::{Result, Workspace, clang, shell};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Starts cargo commands.
pub struct Cargo<'a> {
    workspace: &'a Workspace,
    environment: Vec<(&'static str, OsString)>,
}

/// A program that cargo has built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Executable {
    /// The program.
    pub path: PathBuf,
    /// The folder of its package, in which cargo would run it.
    pub folder: PathBuf,
    /// What it was built from: `lib`, `bin`, `test`, `bench`, `example`.
    pub kind: String,
    /// The name of that.
    pub name: String,
    /// Whether it was built to test.
    test: bool,
}

impl Executable {
    /// A short name: `arenas lib`, `tests lifecycle`.
    pub fn label(&self) -> String {
        let package = self.folder.file_name().unwrap_or_default().to_string_lossy();
        let what = if ["test", "bench", "example"].contains(&&*self.kind) { &self.name } else { &self.kind };
        format!("{package} {what}")
    }

    /// A command that runs it as cargo would.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.path);
        command.current_dir(&self.folder).env("CARGO_MANIFEST_DIR", &self.folder);
        command
    }
}

impl<'a> Cargo<'a> {
    /// Cargo for builds with or without verbs; gets a libclang for the former if need be.
    pub fn new(workspace: &'a Workspace, verbs: bool) -> Result<Cargo<'a>> {
        let environment = if verbs { clang::environment(workspace)? } else { Vec::new() };
        Ok(Cargo { workspace, environment })
    }

    /// Sets one more environment variable for all that cargo runs.
    pub fn set(&mut self, name: &'static str, value: OsString) {
        self.environment.push((name, value));
    }

    /// A cargo command.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        command.args(args).current_dir(&self.workspace.root).stdin(Stdio::null());
        command.env("CARGO_TARGET_DIR", &self.workspace.target).envs(self.environment.iter().cloned());
        command
    }

    /// Builds, and tells what was built. The compiler's messages are shown.
    pub fn build(&self, args: &[&str]) -> Result<Vec<Executable>> {
        let mut command = self.command(args);
        command.arg("--message-format=json-render-diagnostics").stderr(Stdio::inherit());
        Ok(shell::output(&mut command)?.lines().filter_map(executable).collect())
    }

    /// The programs of tests among what was built.
    pub fn tests(&self, args: &[&str]) -> Result<Vec<Executable>> {
        Ok(self.build(args)?.into_iter().filter(|e| e.test).collect())
    }
}

/// Reads a line of cargo's JSON messages. The few fields needed are strings that occur once, so no parser is.
fn executable(line: &str) -> Option<Executable> {
    if !line.starts_with(r#"{"reason":"compiler-artifact""#) {
        return None;
    }
    let (_, target) = line.split_once(r#""target":{"#)?;
    let (_, profile) = line.split_once(r#""profile":{"#)?;
    Some(Executable {
        path: string(line, r#""executable":"#)?.into(),
        folder: Path::new(&string(line, r#""manifest_path":"#)?).parent()?.into(),
        kind: string(target, r#""kind":["#)?,
        name: string(target, r#""name":"#)?,
        test: profile.split('}').next()?.contains(r#""test":true"#),
    })
}

/// The JSON string behind a key; `None` if it is no string (an artifact without a program has `null`).
fn string(json: &str, key: &str) -> Option<String> {
    let (_, rest) = json.split_once(key)?;
    let mut text = String::new();
    let mut characters = rest.strip_prefix('"')?.chars();
    loop {
        match characters.next()? {
            '"' => return Some(text),
            '\\' => text.push(characters.next()?),
            other => text.push(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = r#"{"reason":"compiler-artifact","package_id":"path+file:///w/tests#rdmalloc-tests@0.1.0","manifest_path":"/w/tests/Cargo.toml","target":{"kind":["test"],"crate_types":["bin"],"name":"life","src_path":"/w/tests/life.rs","edition":"2024","doc":false,"doctest":false,"test":true},"profile":{"opt_level":"0","debuginfo":2,"debug_assertions":true,"overflow_checks":true,"test":true},"features":[],"filenames":["/w/t/life-1"],"executable":"/w/t/li\"fe-1","fresh":true}"#;

    #[test]
    fn a_test_program_is_found() {
        let found = executable(LINE).unwrap();
        assert_eq!(found.label(), "tests life");
        assert_eq!(found.path, Path::new("/w/t/li\"fe-1"));
        assert_eq!(found.folder, Path::new("/w/tests"));
        assert!(found.test);
    }

    #[test]
    fn a_library_and_a_plain_program_are_no_tests() {
        assert_eq!(executable(&LINE.replace(r#""/w/t/li\"fe-1""#, "null")), None);
        assert_eq!(executable(r#"{"reason":"build-finished","success":true}"#), None);
        let plain = LINE.replace(r#""overflow_checks":true,"test":true"#, r#""overflow_checks":true,"test":false"#);
        assert!(!executable(&plain).unwrap().test);
    }
}
