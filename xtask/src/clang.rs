//! Which libclang builds rdma-sys.
//!
//! rdma-sys 0.3 generates its bindings with bindgen 0.59, which fails with libclang 16 and newer ("not a valid Ident") and
//! works with 14 and 15. Debian 13 and Ubuntu 24.04 have only newer ones; there the build takes 14.0.6 from PyPI into
//! `target/`, and gcc's own headers, since a bare libclang brings none.

use crate::setup::{self, Need};
use crate::{Error, Result, Workspace, shell, step};
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The newest major version that bindgen 0.59 works with, and the oldest that was tried.
const GOOD: std::ops::RangeInclusive<u32> = 14..=15;

/// The environment in which cargo must build, so that rdma-sys finds a libclang that it can use. Gets one if need be.
pub fn environment(workspace: &Workspace) -> Result<Vec<(&'static str, OsString)>> {
    if std::env::var_os("LIBCLANG_PATH").is_some() {
        return Ok(Vec::new()); // the user knows better
    }
    let bundled = workspace.target.join("libclang/libclang.so");
    if let Some(environment) = choose(&installed(), &bundled)? {
        return Ok(environment);
    }
    if setup::has_apt() {
        for package in ["libclang-14-dev", "libclang-15-dev"] {
            // Not known to Debian 13 and Ubuntu 24.04, and not an error there.
            if setup::apt_has(package)? {
                step!(
                    "installing {package} (reads the verbs headers for rdma-sys, which works with libclang 14 and 15)"
                );
                setup::apt_install(&[package])?;
                if let Some(environment) = choose(&installed(), &bundled)? {
                    return Ok(environment);
                }
            }
        }
    }
    from_pypi(workspace, &bundled)?;
    choose(&[], &bundled)?.ok_or_else(|| Error::Failed("PyPI's libclang 14.0.6 holds no libclang.so".into()))
}

/// The environment for the libclangs that are there; `None` if none of them will do. If the only ones are good, the build
/// finds them by itself, and an environment that stays the same saves building rdma-sys anew.
fn choose(installed: &[(u32, PathBuf)], bundled: &Path) -> Result<Option<Vec<(&'static str, OsString)>>> {
    let good = GOOD.clone().find_map(|v| installed.iter().find(|(version, _)| *version == v));
    let Some((version, path)) = good else {
        if !bundled.exists() {
            return Ok(None);
        }
        return Ok(Some(vec![("LIBCLANG_PATH", bundled.into()), ("BINDGEN_EXTRA_CLANG_ARGS", gcc_headers()?)]));
    };
    let mut environment = Vec::new();
    if installed.iter().any(|(v, _)| !GOOD.contains(v)) {
        environment.push(("LIBCLANG_PATH", path.into()));
    }
    // The library may be installed without its headers (libclang1-14 without libclang-common-14-dev).
    let headers = path.parent().is_some_and(|lib| lib.join("clang").is_dir())
        || Path::new(&format!("/usr/lib/llvm-{version}/lib/clang")).is_dir();
    if !headers {
        environment.push(("BINDGEN_EXTRA_CLANG_ARGS", gcc_headers()?));
    }
    Ok(Some(environment))
}

/// `-I` and the folder of gcc's own headers (`stddef.h` and the like).
fn gcc_headers() -> Result<OsString> {
    let folder = shell::output(Command::new("gcc").arg("-print-file-name=include"))?;
    Ok(format!("-I{}", folder.trim()).into())
}

/// Every libclang on the machine, with its major version.
fn installed() -> Vec<(u32, PathBuf)> {
    let llvm = fs::read_dir("/usr/lib").into_iter().flatten().flatten().map(|e| e.path());
    let llvm = llvm.filter(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("llvm")));
    let mut found = Vec::new();
    for folder in llvm.map(|p| p.join("lib")).chain(setup::library_folders()) {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let is_library = name.starts_with("libclang.so") || name.starts_with("libclang-1") && name.contains(".so");
            if let (true, Ok(real)) = (is_library, entry.path().canonicalize())
                && let Some(version) = version(&entry.path()).or_else(|| version(&real))
            {
                found.push((version, entry.path()));
            }
        }
    }
    found.sort();
    found
}

/// The major version that a library's path tells: `llvm-14/lib/libclang.so`, `libclang-14.so.1`, `libclang.so.15.0.7`.
/// A lone number behind `.so` tells nothing: it has been 13 since version 13.
fn version(path: &Path) -> Option<u32> {
    let text = path.to_str()?;
    let number = |after: &str| {
        let (_, rest) = text.split_once(after)?;
        let digits = rest.split(|c: char| !c.is_ascii_digit()).next()?;
        Some((digits.parse().ok()?, rest[digits.len()..].starts_with('.')))
    };
    let named = number("/llvm-").or_else(|| number("/libclang-")).map(|(version, _)| version);
    named.or_else(|| number("/libclang.so.").filter(|&(_, dotted)| dotted).map(|(version, _)| version))
}

/// Takes libclang 14.0.6 from PyPI, which any Python can unpack.
fn from_pypi(workspace: &Workspace, bundled: &Path) -> Result<()> {
    setup::ensure(&[Need {
        found: || shell::quiet(Command::new("python3").args(["-c", "import venv, ensurepip"])).is_ok(),
        package: "python3-venv",
        why: "fetches libclang 14 from PyPI, since this system has only ones that are too new for rdma-sys",
    }])?;
    step!("fetching libclang 14.0.6 from PyPI into target/ (this system has none that rdma-sys can be built with)");
    let scratch = workspace.target.join("libclang-unpack");
    let _ = fs::remove_dir_all(&scratch);
    shell::quiet(Command::new("python3").args(["-m", "venv"]).arg(&scratch))?;
    let mut pip = Command::new(scratch.join("bin/python"));
    shell::quiet(pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "libclang==14.0.6"]))?;
    // `clang` is a package without an __init__, so it has a __path__ and no __file__.
    let find = "import clang, os; print(os.path.join(list(clang.__path__)[0], 'native', 'libclang.so'))";
    let library = shell::output(Command::new(scratch.join("bin/python")).args(["-c", find]))?;
    fs::create_dir_all(bundled.parent().unwrap_or(Path::new("/")))?;
    fs::copy(library.trim(), bundled)?;
    Ok(fs::remove_dir_all(&scratch)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_paths() {
        let of = |path: &str| version(Path::new(path));
        assert_eq!(of("/usr/lib/llvm-14/lib/libclang.so.1"), Some(14));
        assert_eq!(of("/usr/lib/x86_64-linux-gnu/libclang-16.so.1"), Some(16));
        assert_eq!(of("/usr/lib64/libclang.so.15.0.7"), Some(15));
        assert_eq!(of("/usr/lib64/libclang.so.13"), None); // the soname of 13 to 17
        assert_eq!(of("/usr/lib64/libclang.so"), None);
    }

    #[test]
    fn a_newer_libclang_beside_a_good_one_is_kept_out() {
        let none = Path::new("/nonexistent");
        let (good, new) =
            ((14, PathBuf::from("/usr/lib/llvm-14/lib/libclang.so")), (19, PathBuf::from("/x/libclang.so")));
        let both = choose(&[good.clone(), new.clone()], none).unwrap().unwrap();
        assert_eq!(both[0], ("LIBCLANG_PATH", good.1.clone().into_os_string()));
        let alone = choose(&[good], none).unwrap().unwrap();
        assert!(alone.iter().all(|(name, _)| *name != "LIBCLANG_PATH"));
        assert_eq!(choose(&[new], none).unwrap(), None);
        assert_eq!(choose(&[], none).unwrap(), None);
    }
}
