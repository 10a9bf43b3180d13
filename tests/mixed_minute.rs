//! A minute of programs as programs are, on eight threads, with contents checked: collections that grow, strings that append,
//! shared values freed elsewhere, sorting, threads within threads; while devices come and go and arenas are closed.

use rdmalloc::Rdmalloc;
use rdmalloc_tests::Ledger;
use std::collections::{BTreeMap, BinaryHeap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

const TIME: Duration = Duration::from_secs(60);
const THREADS: usize = 8;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.0 >> 24
    }

    fn below(&mut self, end: usize) -> usize {
        self.next() as usize % end
    }
}

impl Random {
    /// Less than a power of two that itself is below 2^bits: small numbers as often as large ones.
    fn below_about(&mut self, bits: usize) -> usize {
        let end = 1 << self.below(bits);
        self.below(end)
    }
}

/// A message whose bytes follow from its seed.
struct Message {
    seed: u64,
    body: Arc<Vec<u8>>,
}

impl Message {
    fn new(random: &mut Random) -> Message {
        let seed = random.next();
        let len = 1 + random.below_about(15) * 16;
        Message { seed, body: Arc::new((0..len).map(|at| seed as u8 ^ (at % 251) as u8).collect()) }
    }

    fn check(&self) {
        let whole = self.body.iter().enumerate().all(|(at, byte)| *byte == self.seed as u8 ^ (at % 251) as u8);
        assert!(whole, "a message of {} bytes was changed", self.body.len());
    }
}

fn maps(random: &mut Random) {
    let (mut map, mut tree) = (HashMap::new(), BTreeMap::new());
    for _ in 0..500 {
        let key = random.below(200);
        map.insert(format!("key {key}"), vec![key as u32; random.below(400)]);
        tree.insert(key, format!("value {key}").repeat(random.below(20)));
        if let Some(value) = map.remove(&format!("key {}", random.below(200))) {
            assert!(value.iter().all(|word| *word == value[0]));
        }
    }
    assert!(map.iter().all(|(key, value)| value.iter().all(|word| *key == format!("key {word}"))));
    assert!(tree.iter().all(|(key, value)| value.split("value ").skip(1).all(|part| part == key.to_string())));
}

fn strings(random: &mut Random) {
    let mut text = String::new();
    let lines = 200 + random.below(2000);
    for line in 0..lines {
        text += &format!("line {line}\n");
    }
    let numbers = text.lines().map(|line| line["line ".len()..].parse::<usize>().unwrap());
    assert!(numbers.eq(0..lines));
}

fn sorting(random: &mut Random) {
    let mut numbers: Vec<u64> = (0..random.below(20_000)).map(|_| random.next()).collect();
    let sum = numbers.iter().fold(0u64, |sum, number| sum.wrapping_add(*number));
    let mut heap: BinaryHeap<_> = numbers.iter().copied().collect();
    numbers.sort();
    assert!(numbers.iter().rev().all(|number| heap.pop() == Some(*number)));
    assert_eq!(numbers.iter().fold(0u64, |sum, number| sum.wrapping_add(*number)), sum);
}

fn growing(random: &mut Random) {
    let mut vector = Vec::new();
    let len = random.below_about(11) * 1024;
    (0..len as u64).for_each(|number| vector.push(number));
    vector.truncate(len / 2);
    vector.shrink_to_fit();
    assert!(vector.iter().copied().eq(0..len as u64 / 2));
}

fn threads(random: &mut Random) {
    let seed = random.next();
    let threads: Vec<_> = (0..3)
        .map(|number| {
            std::thread::spawn(move || {
                let mut random = Random(seed + number);
                (0..50).map(|_| Message::new(&mut random)).collect::<VecDeque<_>>()
            })
        })
        .collect();
    threads.into_iter().flat_map(|thread| thread.join().unwrap()).for_each(|message| message.check());
}

fn work(number: usize, until: Instant, senders: &[Sender<Message>], inbox: &Receiver<Message>) -> u64 {
    let mut random = Random(number as u64 * 77 + 5);
    let mut rounds = 0;
    while Instant::now() < until {
        match random.below(20) {
            0..4 => maps(&mut random),
            4..7 => strings(&mut random),
            7..9 => sorting(&mut random),
            9..12 => growing(&mut random),
            12 => threads(&mut random),
            _ => (0..50).for_each(|_| {
                let message = Message::new(&mut random);
                let other = Message { seed: message.seed, body: message.body.clone() };
                // A receiver that is at its end already lets go of it.
                let _ = senders[random.below(THREADS)].send(message);
                other.check();
            }),
        }
        inbox.try_iter().for_each(|message| message.check());
        rounds += 1;
    }
    rounds
}

#[test]
fn eight_threads_of_mixed_work_for_a_minute_change_nothing_of_each_others() {
    let until = Instant::now() + TIME;
    let (senders, inboxes): (Vec<_>, Vec<_>) = (0..THREADS).map(|_| channel()).unzip();
    let ledger = Ledger::new();
    let rounds: u64 = std::thread::scope(|scope| {
        let workers: Vec<_> = inboxes
            .into_iter()
            .enumerate()
            .map(|(number, inbox)| {
                let senders = senders.clone();
                scope.spawn(move || work(number, until, &senders, &inbox))
            })
            .collect();
        while Instant::now() < until {
            let device = HEAP.attach(ledger.clone()).unwrap();
            let block = vec![1u8; 3 << 20];
            let sge = device.sge(&block).unwrap();
            assert!(ledger.covers(sge.lkey(), block.as_ptr().addr()..block.as_ptr().addr() + block.len()));
            HEAP.trim();
            HEAP.detach(device).unwrap();
            assert_eq!(ledger.live(), 0);
        }
        workers.into_iter().map(|worker| worker.join().unwrap()).sum()
    });
    assert!(rounds > 100, "{rounds} rounds of work");
    drop(senders);
    HEAP.trim();
    let left = HEAP.stats();
    assert!(left.open_bytes <= 256 << 20, "everything was dropped, and this is left: {left:?}");
}
