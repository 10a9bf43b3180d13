//! Random sizes in random places, a share of them freed by the other thread (as rpmalloc's benchmark has it).

use crate::Scale;
use crate::block::Block;
use crate::random::Random;
use crate::reach::Reach;
use std::sync::Mutex;

/// Places of each thread.
const PLACES: usize = 4_000;
/// Replaced in a turn, and how many of these go to the other thread.
const TURN: usize = 1_000;
const SHARE: usize = 8;
const MOST: usize = 8_000;

pub fn run<R: Reach>(scale: Scale) -> u64 {
    let mailboxes: [Mutex<Vec<Block>>; 2] = Default::default();
    let turns = scale.of(6);
    let bytes = crate::on_two(|lane| {
        let mut random = Random::new(10 + lane);
        let mut bytes = 0;
        let mut block = |serial: usize| {
            let size = random.doubling(4, 13).min(MOST);
            bytes += size as u64;
            (random.below(PLACES), Block::new(size, serial as u32))
        };
        let mut places: Vec<Block> = (0..PLACES).map(|serial| block(serial).1).collect();
        for _ in 0..turns {
            let mut outgoing = Vec::with_capacity(TURN / SHARE);
            for serial in 0..TURN {
                let (at, new) = block(serial);
                let old = core::mem::replace(&mut places[at], new);
                if serial % SHARE == 0 {
                    outgoing.push(old);
                }
            }
            R::check(places[0].start(), places[0].len());
            mailboxes[1 - lane as usize].lock().expect("not poisoned").append(&mut outgoing);
            let incoming = core::mem::take(&mut *mailboxes[lane as usize].lock().expect("not poisoned"));
            drop(incoming);
        }
        bytes
    });
    bytes[0] + bytes[1]
}
