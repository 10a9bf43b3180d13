//! A document of records, 20 MB of it in a full run: written, read as it is declared, read as any document, written again.

use crate::Scale;
use crate::random::Random;
use crate::reach::Reach;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// For each unit; each takes some 560 bytes of text.
const RECORDS: usize = 45;

#[derive(Serialize, Deserialize, PartialEq, Debug)]
struct Document {
    version: u32,
    records: Vec<Record>,
}

#[derive(Serialize, Deserialize, PartialEq, Debug)]
struct Record {
    id: u64,
    name: String,
    mail: String,
    active: bool,
    score: f64,
    tags: Vec<String>,
    address: Address,
    events: Vec<Event>,
    note: Option<String>,
    attributes: BTreeMap<String, String>,
}

#[derive(Serialize, Deserialize, PartialEq, Debug)]
struct Address {
    street: String,
    city: String,
    code: String,
}

#[derive(Serialize, Deserialize, PartialEq, Debug)]
struct Event {
    at: u64,
    what: String,
    amount: i64,
}

fn word(random: &mut Random) -> String {
    const SYLLABLES: [&str; 16] =
        ["ka", "lo", "mi", "ren", "sta", "vu", "ti", "nor", "bel", "da", "fis", "gu", "hal", "jo", "per", "\u{e9}t"];
    (0..2 + random.below(3)).map(|_| SYLLABLES[random.below(SYLLABLES.len())]).collect()
}

fn record(id: u64, random: &mut Random) -> Record {
    let name = format!("{} {}", word(random), word(random));
    let event = |random: &mut Random| Event {
        at: 1_700_000_000 + random.below(100_000_000) as u64,
        what: word(random),
        amount: random.below(2_000_000) as i64 - 1_000_000,
    };
    Record {
        id,
        mail: format!("{}@{}.example", name.replace(' ', "."), word(random)),
        name,
        active: random.below(2) == 1,
        score: random.below(4_000) as f64 / 4.0,
        tags: (0..random.below(6)).map(|_| word(random)).collect(),
        address: Address {
            street: format!("{} {}", word(random), 1 + random.below(200)),
            city: word(random),
            code: format!("{:05}", random.below(100_000)),
        },
        events: (0..random.below(6)).map(|_| event(random)).collect(),
        note: (random.below(3) == 0).then(|| (0..12).map(|_| word(random) + " \"").collect()),
        attributes: (0..random.below(5)).map(|_| (word(random), word(random))).collect(),
    }
}

pub fn run<R: Reach>(scale: Scale) -> u64 {
    let mut random = Random::new(30);
    let records = (0..scale.of(RECORDS) as u64).map(|id| record(id, &mut random)).collect();
    let document = Document { version: 3, records };

    let text = serde_json::to_string(&document).expect("written");
    R::check(text.as_ptr(), text.len());
    let again: Document = serde_json::from_str(&text).expect("read");
    assert!(document == again, "what was read is not what was written");
    drop(document);

    let any: Value = serde_json::from_str(&text).expect("read");
    assert_eq!(any["records"].as_array().map(Vec::len), Some(again.records.len()));
    if let Some(name) = any["records"][0]["name"].as_str() {
        R::check(name.as_ptr(), name.len());
    }
    drop(again);
    let other = serde_json::to_vec(&any).expect("written");
    assert_eq!(other.len(), text.len(), "the same fields in another order");
    drop(any);

    let last: Document = serde_json::from_slice(&other).expect("read");
    let events = last.records.iter().flat_map(|record| &record.events);
    events.fold(text.len() as u64, |sum, event| sum.wrapping_add(event.at ^ event.amount as u64))
}
