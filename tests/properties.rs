//! Random sequences of everything that a program may do, against a simple reference (`sequence`): by proptest, which makes a
//! failing one short, and the corpus that the fuzzer in `fuzz` has found, which reaches what random bytes seldom do.
//!
//! The allocator is called directly and is not this program's own, so that after the last free of a sequence nothing is left.
//! The same sequences are run every time. `RDMALLOC_SEQUENCES=100000 RDMALLOC_SEED=7` runs more, and others.

mod sequence;

use proptest::collection::vec;
use proptest::prelude::any;
use proptest::test_runner::{Config, RngSeed, TestCaseError, TestRunner};
use sequence::Step;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::{env, fs};

/// One test at a time: they count what the one global heap has.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn number(variable: &str, default: u64) -> u64 {
    env::var(variable).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{variable}={text}: a number")))
}

#[test]
fn whatever_a_program_does_its_memory_is_its_own_and_registered() {
    let _alone = alone();
    let (sequences, seed) = (number("RDMALLOC_SEQUENCES", 600), number("RDMALLOC_SEED", 1));
    let config = Config {
        cases: u32::try_from(sequences).expect("fewer than 2^32 sequences"),
        rng_seed: RngSeed::Fixed(seed),
        failure_persistence: None,
        max_shrink_iters: 4000,
        ..Config::default()
    };
    let steps = vec(any::<[u8; Step::BYTES]>(), 1..160);
    let outcome = TestRunner::new(config).run(&steps, |steps| {
        let bytes = steps.as_flattened();
        sequence::run(bytes).map_err(|error| {
            let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            TestCaseError::fail(format!("{error}\nthe sequence: {:#?}\nits bytes: {hex}", Step::read_all(bytes)))
        })
    });
    if let Err(error) = outcome {
        panic!("RDMALLOC_SEED={seed}: {error}");
    }
}

#[test]
fn what_the_fuzzer_has_found_holds() {
    let _alone = alone();
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus");
    let mut files: Vec<_> =
        fs::read_dir(&corpus).expect("the corpus is there").map(|file| file.unwrap().path()).collect();
    files.sort();
    assert!(!files.is_empty(), "nothing in {}", corpus.display());
    for file in files {
        let bytes = fs::read(&file).unwrap();
        sequence::run(&bytes)
            .unwrap_or_else(|error| panic!("{}: {error}: {:#?}", file.display(), Step::read_all(&bytes)));
    }
}
