//! As `failing_calls`, where nothing has been allocated yet: the region, the tables and the caches are made while calls fail.
//!
//! The program has the system's allocator, so it can go on where rdmalloc has no memory at all.

mod hooks;
mod runner;
mod script;

use hooks::{Fault, Kind};
use script::Manner;

macro_rules! tests {
    ($($name:ident: $kind:ident $fault:ident;)*) => {
        $(#[test]
        fn $name() {
            runner::every_call(Kind::$kind, Fault::$fault);
        })*
    };
}

tests! {
    a_mapping_that_fails: Mmap Once;
    mappings_that_fail_from_there_on: Mmap FromThere;
    a_protection_that_fails: Mprotect Once;
    protections_that_fail_from_there_on: Mprotect FromThere;
    advice_that_fails: Madvise Once;
    a_key_that_fails: Key Once;
    memory_that_is_exhausted: Memory FromThere;
    a_registration_that_fails: Register Once;
    a_deregistration_that_fails: Deregister Once;
}

/// Devices that fail in other ways than by an error.
#[test]
fn a_registration_that_goes_wrong() {
    for (manner, fault) in
        [(Manner::Panics, Fault::Once), (Manner::Lies, Fault::Once), (Manner::Vanishes, Fault::FromThere)]
    {
        manner.set();
        runner::every_call(Kind::Register, fault);
    }
}

#[test]
fn a_protection_that_stalls() {
    runner::every_stall(Kind::Mprotect);
}
