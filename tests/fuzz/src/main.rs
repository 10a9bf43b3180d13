//! Sequences of everything that a program may do, chosen by libFuzzer for the code that they reach. What they are and what has to
//! hold is in `../sequence`.

#![no_main]

#[path = "../../sequence/mod.rs"]
mod sequence;

use sequence::Step;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Err(error) = sequence::run(bytes) {
        panic!("{error}\nthe sequence: {:#?}", Step::read_all(bytes));
    }
});
