//! The k-th call of each kind fails, or all from the k-th on, or it stalls; for every k of a script (`script`): the program does
//! not end, every refusal is an error that was promised, and when the fault is over, all is as before, but for what is reported.

mod hooks;
mod runner;
mod script;

use hooks::{Fault, Kind};
use rdmalloc::Rdmalloc;
use script::Manner;

#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

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
    a_protection_that_fails: Mprotect Once;
    advice_that_fails: Madvise Once;
    advice_that_fails_from_there_on: Madvise FromThere;
    a_barrier_that_fails: Barrier Once;
    barriers_that_fail_from_there_on: Barrier FromThere;
    a_key_that_fails: Key Once;
    keys_that_fail_from_there_on: Key FromThere;
    a_thread_that_fails: Thread Once;
    memory_that_fails_once: Memory Once;
    memory_that_is_exhausted: Memory FromThere;
    a_registration_that_fails: Register Once;
    registrations_that_fail_from_there_on: Register FromThere;
    a_deregistration_that_fails: Deregister Once;
    deregistrations_that_fail_from_there_on: Deregister FromThere;
}

macro_rules! devices {
    ($($name:ident: $manner:ident $kind:ident $fault:ident;)*) => {
        $(#[test]
        fn $name() {
            Manner::$manner.set();
            runner::every_call(Kind::$kind, Fault::$fault);
        })*
    };
}

devices! {
    a_registration_that_panics: Panics Register Once;
    a_deregistration_that_panics: Panics Deregister Once;
    a_registration_without_keys: Lies Register Once;
    registrations_without_keys_from_there_on: Lies Register FromThere;
    devices_that_vanish: Vanishes Register FromThere;
}

macro_rules! stalls {
    ($($name:ident: $kind:ident;)*) => {
        $(#[test]
        fn $name() {
            runner::every_stall(Kind::$kind);
        })*
    };
}

stalls! {
    a_mapping_that_stalls: Mmap;
    a_protection_that_stalls: Mprotect;
    advice_that_stalls: Madvise;
    a_barrier_that_stalls: Barrier;
    a_registration_that_stalls: Register;
    a_deregistration_that_stalls: Deregister;
}
