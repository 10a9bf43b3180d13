//! One thread allocates, the other frees (Lever and Boreham, 2000): blocks of many sizes, and the lists in which they go.

use crate::Scale;
use crate::block::Block;
use crate::random::Random;
use crate::reach::Reach;
use std::sync::mpsc;

const BATCH: usize = 100;

pub fn run<R: Reach>(scale: Scale) -> u64 {
    let (give, take) = mpsc::sync_channel::<Vec<Block>>(32);
    std::thread::scope(|scope| {
        let freeing = scope.spawn(move || take.into_iter().flatten().map(|block| block.len() as u64).sum::<u64>());
        let mut random = Random::new(3);
        let mut bytes = 0;
        for turn in 0..scale.of(400) {
            // Not reserved: lists grow as lists do.
            let mut batch = Vec::new();
            for serial in 0..BATCH {
                let block = Block::new(random.pareto(16, 4096), serial as u32);
                bytes += block.len() as u64;
                batch.push(block);
            }
            if turn % 1024 == 0 {
                batch.iter().for_each(|block| R::check(block.start(), block.len()));
            }
            give.send(batch).expect("the freeing thread lives");
        }
        drop(give);
        assert_eq!(freeing.join().expect("no panic"), bytes);
        bytes
    })
}
