//! Sizes by a power law, places too (as OLogN's alloc-test has it): most steps are about few, small objects, and some lie for long.

use crate::Scale;
use crate::block::Block;
use crate::random::Random;
use crate::reach::Reach;

const PLACES: usize = 16 << 10;
const MOST: usize = 64 << 10;

pub fn run<R: Reach>(scale: Scale) -> u64 {
    let steps = scale.of(40_000);
    let bytes = crate::on_two(|lane| {
        let mut random = Random::new(20 + lane);
        let mut places: Vec<Option<Block>> = (0..PLACES).map(|_| None).collect();
        let mut bytes = 0;
        for step in 0..steps {
            // Small numbers are likelier: half of the steps are in the first 128 places.
            let place = &mut places[random.pareto(64, PLACES) - 1];
            if place.take().is_none() {
                let block = Block::new(random.pareto(16, MOST), step as u32);
                bytes += block.len() as u64;
                if step % 65_536 == 0 {
                    R::check(block.start(), block.len());
                }
                *place = Some(block);
            }
        }
        bytes
    });
    bytes[0] + bytes[1]
}
