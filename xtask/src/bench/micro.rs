//! `cargo xtask bench --micro` and `--verbs`: the criterion benches, on the host or, for those on verbs, in the guest.

use crate::cargo::Cargo;
use crate::guest::Guest;
use crate::{Error, Result, Workspace, setup, shell, step};
use std::ffi::OsString;

/// Runs them; the first exit status that is not 0. `quick` measures each for a moment only.
pub fn run(workspace: &Workspace, quick: bool, verbs: bool) -> Result<i32> {
    let quick = quick.then_some("--quick");
    if !verbs {
        setup::ensure(&setup::BUILD[..2])?; // the linker; io_uring needs no library
        let cargo = Cargo::new(workspace, false)?;
        let mut command =
            cargo.command(&["bench", "--package=rdmalloc-benches", "--features=uring", "--benches", "--"]);
        return Ok(crate::exit_code(command.args(quick).status()?));
    }
    setup::ensure(setup::BUILD)?;
    step!("building the benches on verbs");
    let cargo = Cargo::new(workspace, true)?;
    let built =
        cargo.build(&["bench", "--package=rdmalloc-benches", "--features=verbs,uring", "--benches", "--no-run"])?;
    let mut script: Vec<u8> = Vec::new();
    for bench in built.iter().filter(|e| e.kind == "bench" && e.name.contains("verbs")) {
        let words = [bench.path.as_os_str(), "--bench".as_ref()].into_iter().chain(quick.map(AsRef::as_ref));
        script.extend(words.flat_map(|w| [shell::quote(w), b" ".to_vec()].concat()));
        script.extend(b"|| exit\n");
    }
    if script.is_empty() {
        return Err(Error::Failed("no bench of rdmalloc-benches has verbs in its name".into()));
    }
    step!("the benches on verbs, in a guest with soft-RoCE");
    let command = ["sh".into(), "-c".into(), <OsString as std::os::unix::ffi::OsStringExt>::from_vec(script)];
    let timeout = std::time::Duration::from_secs(3600);
    Guest { timeout, ..Guest::default() }.run(workspace, &command, &mut std::io::stdout(), &mut std::io::stderr())
}
