//! Memlock limits on an io_uring, as users without `IPC_LOCK` meet them: 0, 64 KiB, 8 MiB, 256 MiB.
#![cfg(feature = "uring")]

use io_uring::IoUring;
use rdmalloc_arenas::registrar::uring::Uring;
use rdmalloc_tests::{confined, may_pin, under_limit};
use std::sync::{Mutex, PoisonError};

fn ring() -> Option<(IoUring, Uring)> {
    let ring = IoUring::new(8).inspect_err(|error| println!("skipped: no io_uring here: {error}")).ok()?;
    let uring = Uring::new(&ring).inspect_err(|error| println!("skipped: {error}")).ok()?;
    Some((ring, uring))
}

/// One at a time: the kernel counts what a user has pinned, over all processes.
static ALONE: Mutex<()> = Mutex::new(());

fn run(test: &str, limit: u64) {
    if may_pin().is_none() {
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        return confined(test, limit, 2 * limit + (64 << 20));
    }
    // One ring: its own memory counts too, and is released a while after its end.
    if let Some((_ring, uring)) = ring() {
        under_limit(|| uring.clone(), None);
    }
}

#[test]
fn under_a_limit_of_nothing_nothing_is_registered_and_that_is_said() {
    run("under_a_limit_of_nothing_nothing_is_registered_and_that_is_said", 0);
}

#[test]
fn under_a_limit_of_64_kib_nothing_is_registered_and_that_is_said() {
    run("under_a_limit_of_64_kib_nothing_is_registered_and_that_is_said", 64 << 10);
}

#[test]
fn under_a_limit_of_8_mib_all_of_it_is_used() {
    run("under_a_limit_of_8_mib_all_of_it_is_used", 8 << 20);
}

#[test]
fn under_a_limit_of_256_mib_all_of_it_is_used() {
    run("under_a_limit_of_256_mib_all_of_it_is_used", 256 << 20);
}
