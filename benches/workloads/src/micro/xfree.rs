//! Blocks of 64 bytes that one thread takes and another gives back, handed over in batches so that little else is measured.

use crate::Scale;
use crate::block::Block;
use crate::reach::Reach;
use std::sync::mpsc;

const BATCH: usize = 256;

pub fn run<R: Reach>(scale: Scale) -> u64 {
    // The batches go round, so that they cost nothing.
    let (full, to_free) = mpsc::sync_channel::<Vec<Block>>(16);
    let (empty, to_fill) = mpsc::sync_channel::<Vec<Block>>(32);
    (0..16).for_each(|_| empty.send(Vec::with_capacity(BATCH)).expect("room for 32"));
    std::thread::scope(|scope| {
        let freeing = scope.spawn(move || {
            let mut blocks = 0;
            for mut batch in to_free {
                blocks += batch.len() as u64;
                batch.clear();
                empty.send(batch).expect("the taking thread keeps the other end");
            }
            blocks
        });
        for turn in 0..scale.of(160) {
            let mut batch = to_fill.recv().expect("the freeing thread lives");
            batch.extend((0..BATCH).map(|serial| Block::new(64, serial as u32)));
            if turn % 1024 == 0 {
                batch.iter().for_each(|block| R::check(block.start(), block.len()));
            }
            full.send(batch).expect("the freeing thread lives");
        }
        drop(full);
        let blocks = freeing.join().expect("no panic");
        assert_eq!(blocks, (scale.of(160) * BATCH) as u64);
        blocks
    })
}
