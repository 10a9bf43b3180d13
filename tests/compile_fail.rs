//! Misuses that must not compile: each file in `compile_fail/` has some, on lines that end in `//~ E0502` or another code.
//!
//! The compiler must give exactly these errors on exactly these lines; and without the lines the file must compile, so that
//! nothing else in it is what fails. Codes have a meaning of their own, and so outlive the compiler's releases; the text of
//! messages does not. That is why this is no `trybuild`, which compares the text, and no `compile_fail` doc test, which does not
//! look at codes on the stable compiler. The compiler is called with the library that was built for this test.

use serde_json::Value;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// An error: its line, and its code, or its text if it has none.
type Error = (usize, String);

const MARK: &str = "//~ ";

/// The library of this name that was built last. What this test was built with is no older than its sources, so that one is
/// of the same sources.
fn newest(directory: &Path, name: &str) -> Option<PathBuf> {
    let files = fs::read_dir(directory).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let is_it = |path: &PathBuf| {
        let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        path.extension().is_some_and(|extension| extension == "rlib") && stem.starts_with(&format!("lib{name}-"))
    };
    files.filter(is_it).max_by_key(|path| path.metadata().and_then(|metadata| metadata.modified()).ok())
}

struct Compiler {
    rustc: PathBuf,
    /// Where the libraries are.
    deps: PathBuf,
    library: PathBuf,
    out: PathBuf,
}

impl Compiler {
    fn find() -> Result<Compiler, String> {
        let rustc = std::env::var_os("RUSTC").map_or_else(|| PathBuf::from("rustc"), PathBuf::from);
        let version = Command::new(&rustc).arg("--version").output().map_err(|error| format!("no rustc: {error}"))?;
        assert!(version.status.success(), "{version:?}");
        let this = std::env::current_exe().expect("a program has a path");
        let deps = this.parent().expect("a program lies somewhere").to_owned();
        let library = newest(&deps, "rdmalloc").ok_or("the library is not beside this test")?;
        let out = std::env::temp_dir().join(format!("rdmalloc-compile-fail-{}", std::process::id()));
        fs::create_dir_all(&out).map_err(|error| format!("no room for what is compiled: {error}"))?;
        Ok(Compiler { rustc, deps, library, out })
    }

    fn errors(&self, source: &str) -> Vec<Error> {
        let mut child = Command::new(&self.rustc)
            .args(["--edition=2024", "--crate-type=lib", "--crate-name=case", "--emit=metadata", "--error-format=json"])
            .arg("-Awarnings")
            .arg(format!("-Ldependency={}", self.deps.display()))
            .arg(format!("--extern=rdmalloc={}", self.library.display()))
            .arg(format!("--out-dir={}", self.out.display()))
            .arg("-")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("rustc was there");
        child.stdin.take().expect("piped").write_all(source.as_bytes()).expect("rustc reads");
        let output = child.wait_with_output().expect("rustc ends");
        let text = String::from_utf8(output.stderr).expect("rustc writes UTF-8");
        let errors: Vec<Error> = text.lines().filter_map(error).collect();
        assert_eq!(output.status.success(), errors.is_empty(), "{text}");
        errors
    }
}

impl Drop for Compiler {
    fn drop(&mut self) {
        // Only litter, should it stay.
        let _ = fs::remove_dir_all(&self.out);
    }
}

/// The error that a line of the compiler's is about, if it is about one.
fn error(line: &str) -> Option<Error> {
    let message: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    if message["level"] != "error" {
        return None;
    }
    let span = message["spans"].as_array()?.iter().find(|span| span["is_primary"] == true)?;
    let what = message["code"]["code"].as_str().or(message["message"].as_str())?;
    Some((span["line_start"].as_u64()? as usize, what.to_owned()))
}

fn check(compiler: &Compiler, path: &Path) {
    let source = fs::read_to_string(path).expect("a case is text");
    let marked = |line: &str| line.split_once(MARK).map(|(_, code)| code.trim().to_owned());
    let expected: Vec<Error> =
        source.lines().zip(1..).filter_map(|(line, number)| Some((number, marked(line)?))).collect();
    assert!(!expected.is_empty(), "{}: no line is marked", path.display());
    // Errors come in phases, and some phase ends compilation; so each misuse is tried alone.
    for misuse in &expected {
        let alone: Vec<_> = source
            .lines()
            .zip(1..)
            .map(|(line, at)| if marked(line).is_some() && at != misuse.0 { "" } else { line })
            .collect();
        assert_eq!(compiler.errors(&alone.join("\n")), core::slice::from_ref(misuse), "{}", path.display());
    }
    let without: Vec<_> = source.lines().map(|line| if marked(line).is_some() { "" } else { line }).collect();
    assert_eq!(compiler.errors(&without.join("\n")), [], "{} without the misuses", path.display());
}

#[test]
fn misuses_do_not_compile() {
    let compiler = match Compiler::find() {
        Ok(compiler) => compiler,
        Err(reason) => return println!("skipped: {reason}"),
    };
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("compile_fail");
    let mut cases: Vec<_> =
        fs::read_dir(directory).expect("there are cases").map(|case| case.unwrap().path()).collect();
    cases.sort();
    cases.iter().for_each(|case| check(&compiler, case));
    println!("{} files of misuses", cases.len());
}
