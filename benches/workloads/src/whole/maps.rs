//! A hash map and an ordered map of strings and bytes, which change: entries come, grow and go.

use crate::Scale;
use crate::random::Random;
use crate::reach::Reach;
use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, DefaultHasher};

/// Different keys.
const KEYS: usize = 20_000;

/// With fixed keys, unlike the standard one, so that each run is the same.
type Hashed = HashMap<String, Vec<u8>, BuildHasherDefault<DefaultHasher>>;

pub fn run<R: Reach>(scale: Scale) -> u64 {
    let mut random = Random::new(31);
    let mut hashed = Hashed::default();
    let mut ordered: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    for step in 0..scale.of(3_000) {
        let number = random.below(KEYS);
        let key = format!("object/{number:08}/{}", number % 97);
        match random.below(8) {
            0..4 => {
                let value = vec![step as u8; random.pareto(24, 2_048)];
                if step % 4096 == 0 {
                    R::check(value.as_ptr(), value.len());
                    R::check(key.as_ptr(), key.len());
                }
                ordered.insert(key.clone(), value.clone());
                hashed.insert(key, value);
            }
            4..6 => assert_eq!(hashed.remove(&key), ordered.remove(&key)),
            6 => {
                let piece = [step as u8; 100];
                for value in [hashed.get_mut(&key), ordered.get_mut(&key)].into_iter().flatten() {
                    value.extend_from_slice(&piece);
                }
            }
            _ => {
                // Some that follow each other leave together.
                let gone: Vec<String> = ordered.range(key..).take(4).map(|(key, _)| key.clone()).collect();
                gone.iter().for_each(|key| assert_eq!(ordered.remove(key), hashed.remove(key)));
            }
        }
    }
    assert_eq!(hashed.len(), ordered.len());
    let bytes = ordered.iter().map(|(key, value)| {
        assert!(hashed.get(key) == Some(value), "{key}");
        R::check(value.as_ptr(), value.len());
        (key.len() + value.len()) as u64
    });
    bytes.sum()
}
