//! Reads what a test program prints (libtest's human format, with `--show-output`).
//!
//! libtest knows no skipping at run time, so a test that lacks a device prints `skipped: REASON` and returns. With
//! `--show-output` what a passed test printed stands in a section of its own, headed by its name, so a skip is always
//! laid to the right test, however many run at once.

use std::collections::BTreeMap;

/// How a test ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// It ran and passed.
    Passed,
    /// It did not pass.
    Failed,
    /// It could not run, and says why.
    Skipped(String),
}

/// What was read so far.
#[derive(Default)]
pub struct Report {
    /// The tests that ended.
    pub outcomes: BTreeMap<String, Outcome>,
    /// The test that was begun last, as a program with one test thread prints before it runs it.
    pub running: Option<String>,
    /// Whether this is libtest's output at all: other test programs are judged by their exit status.
    pub is_libtest: bool,
    /// Whether libtest came to its end.
    pub finished: bool,
    /// What is worth showing when something failed.
    pub noise: Vec<String>,
    section: Option<String>,
    in_successes: bool,
}

impl Report {
    /// Takes the next line, without its line break. Says which test it told the outcome of.
    pub fn line(&mut self, line: &str) -> Option<(String, Outcome)> {
        if line.starts_with("running ") && (line.ends_with(" tests") || line.ends_with(" test")) {
            self.is_libtest = true;
            self.finished = false;
            return None;
        }
        if let Some(rest) = line.strip_prefix("test result: ") {
            self.finished = !rest.is_empty();
            (self.in_successes, self.section) = (false, None);
            return None;
        }
        if let Some(name) = line.strip_prefix("---- ").and_then(|l| l.strip_suffix(" stdout ----")) {
            self.section = Some(plain(name));
            self.note(line);
            return None;
        }
        match line {
            "successes:" | "failures:" => (self.in_successes, self.section) = (line == "successes:", None),
            _ => {}
        }
        if let Some(name) = &self.section {
            if let (Some(reason), Some(outcome @ Outcome::Passed)) =
                (line.strip_prefix("skipped:"), self.outcomes.get_mut(name))
            {
                *outcome = Outcome::Skipped(reason.trim().into());
            }
            self.note(line);
            return None;
        }
        if let Some((name, end)) = line.strip_prefix("test ").and_then(|l| l.split_once(" ... ")) {
            self.running = Some(plain(name));
            return self.end(end);
        }
        if self.running.is_some() {
            // A child process may have written between a test's name and its end.
            let ended = self.end(line);
            if ended.is_some() {
                return ended;
            }
        }
        self.note(line);
        None
    }

    /// The end of the running test, if that is what this is.
    fn end(&mut self, word: &str) -> Option<(String, Outcome)> {
        let outcome = match word.trim_end() {
            "ok" => Outcome::Passed,
            "FAILED" => Outcome::Failed,
            "ignored" => Outcome::Skipped("marked #[ignore]".into()),
            other => Outcome::Skipped(other.strip_prefix("ignored, ")?.into()),
        };
        let name = self.running.take()?;
        self.outcomes.insert(name.clone(), outcome.clone());
        Some((name, outcome))
    }

    fn note(&mut self, line: &str) {
        if !self.in_successes && !line.is_empty() {
            self.noise.push(line.into());
        }
    }
}

/// A test's name without what libtest and rustdoc say about it.
fn plain(name: &str) -> String {
    let ends = [" - should panic", " - compile fail", " - compile"];
    ends.iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use Outcome::{Failed, Passed, Skipped};

    fn read(text: &str) -> Report {
        let mut report = Report::default();
        text.lines().for_each(|l| drop(report.line(l)));
        report
    }

    const PARALLEL: &str = "
running 5 tests
test a::one ... ok
test verbs_two ... ok
test three - should panic ... ok
test four ... FAILED
test five ... ignored, needs a week

successes:

---- verbs_two stdout ----
skipped: no verbs device
---- a::one stdout ----
the word skipped: in the middle is no skip

successes:
    a::one
    verbs_two

failures:

---- four stdout ----
skipped: not, it failed
thread 'four' panicked

failures:
    four

test result: FAILED. 3 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s
";

    #[test]
    fn a_skip_is_laid_to_the_test_that_printed_it() {
        let report = read(PARALLEL);
        let outcome = |name: &str| report.outcomes[name].clone();
        assert_eq!(outcome("a::one"), Passed);
        assert_eq!(outcome("verbs_two"), Skipped("no verbs device".into()));
        assert_eq!(outcome("three"), Passed);
        assert_eq!(outcome("four"), Failed);
        assert_eq!(outcome("five"), Skipped("needs a week".into()));
        assert!(report.is_libtest && report.finished);
        assert!(report.noise.iter().any(|l| l.contains("panicked")));
        assert!(!report.noise.iter().any(|l| l.contains("in the middle")));
    }

    #[test]
    fn output_between_a_name_and_its_end_does_not_lose_the_test() {
        let report = read("running 2 tests\ntest one ... a child speaks\nand again\nok\ntest two ... ");
        assert_eq!(report.outcomes["one"], Passed);
        assert_eq!(report.running.as_deref(), Some("two"));
        assert!(!report.finished);
    }

    #[test]
    fn another_kind_of_program_is_told_apart() {
        assert!(!read("all is well\nskipped: no device\n").is_libtest);
    }
}
