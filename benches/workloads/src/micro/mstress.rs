//! Generations of threads (as mimalloc's stress test has them): each takes objects, keeps some for a while, exchanges some with
//! whoever comes by, and dies; what it leaves in the exchange is the next generation's to free.

use crate::block::Block;
use crate::random::Random;
use crate::reach::Reach;
use crate::{Scale, on_two};
use std::sync::Mutex;

/// Places in which objects wait for another thread.
const PLACES: usize = 1_000;
/// Steps of a thread's life.
const LIFE: usize = 20_000;

pub fn run<R: Reach>(scale: Scale) -> u64 {
    let exchange: Vec<Mutex<Option<Block>>> = (0..PLACES).map(|_| Mutex::new(None)).collect();
    let mut bytes = 0;
    for generation in 0..scale.of(1).div_ceil(2) as u64 {
        let taken = on_two(|lane| {
            let mut random = Random::new(generation * 2 + lane);
            let mut kept: Vec<Block> = Vec::new();
            let mut bytes = 0;
            for serial in 0..LIFE {
                // Mostly small; one in 256 is a hundred times as large.
                let size = random.pareto(16, 2_048) * if random.below(256) == 0 { 100 } else { 1 };
                bytes += size as u64;
                let block = Block::new(size, serial as u32);
                match random.below(8) {
                    0..4 => kept.push(block),
                    4 => {
                        let mut place = exchange[random.below(PLACES)].lock().expect("not poisoned");
                        let other = place.replace(block);
                        drop(place);
                        kept.extend(other);
                    }
                    _ => drop(block),
                }
                // As many go as are kept, above a few hundred.
                let chosen = random.below(512);
                if chosen < kept.len() {
                    kept.swap_remove(chosen);
                }
            }
            kept.iter().take(8).for_each(|block| R::check(block.start(), block.len()));
            bytes
        });
        bytes += taken.iter().sum::<u64>();
        // A generation's leavings that nobody wants.
        if generation % 16 == 15 {
            exchange.iter().for_each(|place| drop(place.lock().expect("not poisoned").take()));
        }
    }
    bytes
}
