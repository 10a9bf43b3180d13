//! Memlock limits on a real verbs device, as users without `IPC_LOCK` meet them: 64 KiB, 8 MiB, 256 MiB.
#![cfg(feature = "verbs")]

use rdmalloc_arenas::registrar::verbs::Verbs;
use rdmalloc_tests::rig::domain_or_skip;
use rdmalloc_tests::{confined, may_pin, pinned_bytes, under_limit};

fn run(test: &str, limit: u64) {
    if may_pin().is_some() {
        return under_limit(|| Verbs::open(None).unwrap(), Some(pinned_bytes));
    }
    if domain_or_skip().is_some() {
        confined(test, limit, 2 * limit + (64 << 20));
    }
}

#[test]
fn verbs_under_a_limit_of_64_kib_nothing_is_registered_and_that_is_said() {
    run("verbs_under_a_limit_of_64_kib_nothing_is_registered_and_that_is_said", 64 << 10);
}

#[test]
fn verbs_under_a_limit_of_8_mib_all_of_it_is_used() {
    run("verbs_under_a_limit_of_8_mib_all_of_it_is_used", 8 << 20);
}

#[test]
fn verbs_under_a_limit_of_256_mib_all_of_it_is_used() {
    run("verbs_under_a_limit_of_256_mib_all_of_it_is_used", 256 << 20);
}
