//! Settings of the system that a test changes: in the guest only, which nobody else uses.

use std::fs;
use std::path::PathBuf;

/// A setting in `/proc/sys` or `/sys`, put back when this is dropped.
pub struct Setting {
    path: PathBuf,
    before: String,
}

impl Setting {
    /// Whether settings may be changed here; if not, it says so.
    pub fn may_be_changed() -> bool {
        let may = std::env::var_os("RDMALLOC_GUEST").is_some();
        if !may {
            println!("skipped: changes settings of the system, so only in the guest");
        }
        may
    }

    /// Sets it. `None`, said, if there is no such setting.
    ///
    /// # Panics
    ///
    /// Outside of the guest.
    pub fn set(path: &str, value: &str) -> Option<Setting> {
        assert!(Setting::may_be_changed(), "not here");
        let text = fs::read_to_string(path);
        let text = text.inspect_err(|error| println!("skipped: {path}: {error}")).ok()?;
        // Where there is a choice, the one in brackets is chosen.
        let chosen = text.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map_or(&*text, |(word, _)| word);
        let setting = Setting { path: path.into(), before: chosen.trim().to_owned() };
        fs::write(path, value).inspect_err(|error| println!("skipped: {path} cannot be {value}: {error}")).ok()?;
        Some(setting)
    }

    /// What it is now, as a number.
    ///
    /// # Panics
    ///
    /// If it is none.
    pub fn number(&self) -> u64 {
        fs::read_to_string(&self.path).expect("was there").trim().parse().expect("a number")
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        let _ = fs::write(&self.path, &self.before);
    }
}
