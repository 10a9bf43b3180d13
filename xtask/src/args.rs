//! Command lines: options that are known, values for those that take one, and everything behind `--` untouched.

use crate::{Error, Result};
use std::ffi::OsString;

/// A command line that was understood.
#[derive(Debug, Default)]
pub struct Args {
    options: Vec<(&'static str, String)>,
    /// What stands behind `--`.
    pub rest: Vec<OsString>,
}

impl Args {
    /// Reads `args`. `flags` stand alone, `valued` are followed by a value (`--memory 4G` or `--memory=4G`).
    ///
    /// # Errors
    ///
    /// An argument that is neither, or a value that is missing.
    pub fn read(args: &[OsString], flags: &[&'static str], valued: &[&'static str]) -> Result<Args> {
        let mut read = Args::default();
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            if arg == "--" {
                read.rest = args.cloned().collect();
                break;
            }
            let text = arg.to_string_lossy();
            let (name, inline) = text.split_once('=').map_or((&*text, None), |(n, v)| (n, Some(v.to_owned())));
            if let (Some(flag), None) = (flags.iter().find(|f| **f == name), &inline) {
                read.options.push((flag, String::new()));
            } else if let Some(option) = valued.iter().find(|o| **o == name) {
                let next = || args.next().map(|v| v.to_string_lossy().into_owned());
                let value = inline.or_else(next).ok_or_else(|| Error::Usage(format!("{name} needs a value")))?;
                read.options.push((option, value));
            } else {
                return Err(Error::Usage(format!("unknown argument {text}")));
            }
        }
        Ok(read)
    }

    /// Whether a flag was given.
    pub fn has(&self, name: &str) -> bool {
        self.options.iter().any(|(n, _)| *n == name)
    }

    /// The values that an option was given.
    pub fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.options.iter().filter(move |(n, _)| *n == name).map(|(_, v)| v.as_str())
    }

    /// The last value that an option was given.
    pub fn last(&self, name: &str) -> Option<&str> {
        self.options.iter().rev().find(|(n, _)| *n == name).map(|(_, v)| v.as_str())
    }

    /// The same as a number above 0.
    pub fn number(&self, name: &str) -> Result<Option<u32>> {
        let number = |v: &str| v.parse().ok().filter(|&n| n > 0);
        let wrong = |v: &str| Error::Usage(format!("{name} takes a whole number above 0, not {v}"));
        self.last(name).map(|v| number(v).ok_or_else(|| wrong(v))).transpose()
    }

    /// Refuses what stands behind `--`, for tasks that pass nothing on.
    pub fn nothing_behind(self) -> Result<Args> {
        match self.rest.first() {
            None => Ok(self),
            Some(arg) => Err(Error::Usage(format!("unknown argument {}", arg.to_string_lossy()))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(words: &[&str]) -> Result<Args> {
        let words: Vec<OsString> = words.iter().map(Into::into).collect();
        Args::read(&words, &["--quick"], &["--memory", "--cpus"])
    }

    #[test]
    fn options_before_and_words_behind() {
        let args = read(&["--memory", "4G", "--quick", "--memory=2G", "--", "ls", "--quick", "a b"]).unwrap();
        assert!(args.has("--quick"));
        assert_eq!(args.last("--memory"), Some("2G"));
        assert_eq!(args.all("--memory").count(), 2);
        assert_eq!(args.rest, ["ls", "--quick", "a b"]);
        assert!(args.nothing_behind().is_err());
    }

    #[test]
    fn what_is_not_understood_is_refused() {
        for words in [&["--fast"][..], &["quick"], &["--quick=1"], &["--memory"]] {
            assert!(matches!(read(words), Err(Error::Usage(_))), "{words:?}");
        }
        assert!(read(&["--cpus", "0"]).unwrap().number("--cpus").is_err());
        assert!(read(&["--cpus", "two"]).unwrap().number("--cpus").is_err());
        assert_eq!(read(&["--cpus", "2"]).unwrap().number("--cpus").unwrap(), Some(2));
        assert_eq!(read(&[]).unwrap().number("--cpus").unwrap(), None);
    }
}
