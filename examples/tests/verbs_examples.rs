//! Runs the examples: they check by themselves the bytes that the device moved, so ending well is what is asked of them, and
//! having said that they moved some.

use rdmalloc::registrar::verbs::devices;
use std::process::Command;

/// Runs an example to its end, which must be a good one, after it has said all of `words`.
fn run(program: &str, arguments: &[&str], words: &[&str]) {
    if devices().is_empty() {
        println!("skipped: no verbs device");
        return;
    }
    let output = Command::new(program).args(arguments).output().unwrap();
    let (said, complained) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}: {said}{complained}", output.status);
    for word in words {
        assert!(said.contains(word), "`{word}` is not among what it said: {said}");
    }
}

#[test]
fn verbs_rdma_sys_posts_what_rdmalloc_allocates() {
    run(env!("CARGO_BIN_EXE_post_rdma_sys"), &[], &["sent and received 3890 bytes", "wrote and read back 50000 bytes"]);
}

#[cfg(feature = "sideway")]
#[test]
fn verbs_sideway_posts_what_rdmalloc_allocates() {
    run(env!("CARGO_BIN_EXE_post_sideway"), &[], &["sent and received 3890 bytes"]);
}

#[cfg(feature = "ibverbs")]
#[test]
fn verbs_ibverbs_receives_what_rdmalloc_allocates() {
    run(env!("CARGO_BIN_EXE_post_ibverbs"), &[], &["sent and received 3890 bytes, and back, and again"]);
}

#[test]
fn verbs_three_replicas_have_what_the_file_has() {
    // In the target folder, since the guest's own file system has no O_DIRECT.
    let file = concat!(env!("CARGO_TARGET_TMPDIR"), "/storage_write");
    run(
        env!("CARGO_BIN_EXE_storage_write"),
        &[file],
        &["8 blocks of 262144 bytes on 3 replicas, as they are in the file"],
    );
}

#[test]
fn verbs_calls_are_answered_into_windows() {
    run(env!("CARGO_BIN_EXE_rpc_echo"), &[], &["20 calls were answered, with 1 window"]);
}

#[test]
fn examples_do_not_grow_beyond_150_lines() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/bin");
    for file in std::fs::read_dir(folder).unwrap() {
        let path = file.unwrap().path();
        let lines = std::fs::read_to_string(&path).unwrap().lines().count();
        assert!(lines < 150, "{} has {lines}", path.display());
    }
}
