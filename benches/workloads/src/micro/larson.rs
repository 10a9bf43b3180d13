//! A server's objects (Larson and Krishnan, 1998): each thread replaces objects at random in what it was handed, then ends, and
//! a new thread goes on with the objects of another.

use crate::block::Block;
use crate::random::Random;
use crate::reach::Reach;
use crate::{Scale, on_two};
use std::sync::Mutex;

/// Objects of each thread, and their sizes.
const OBJECTS: usize = 2_000;
const SIZES: core::ops::Range<usize> = 8..1_000;
/// How many a thread replaces in its life.
const LIFE: usize = 25_000;

fn object(random: &mut Random, serial: usize) -> Block {
    Block::new(SIZES.start + random.below(SIZES.len()), serial as u32)
}

pub fn run<R: Reach>(scale: Scale) -> u64 {
    let mut random = Random::new(2);
    let mut fill = || Mutex::new((0..OBJECTS).map(|serial| object(&mut random, serial)).collect::<Vec<Block>>());
    let shares = [fill(), fill()];
    let mut bytes = 0;
    for generation in 0..scale.of(1) as u64 {
        let taken = on_two(|lane| {
            // What was the other lane's in the last generation.
            let mut share = shares[(lane + generation) as usize % 2].lock().expect("not poisoned");
            let mut random = Random::new(generation * 2 + lane);
            let mut bytes = 0;
            for serial in 0..LIFE {
                let new = object(&mut random, serial);
                bytes += new.len() as u64;
                share[random.below(OBJECTS)] = new;
            }
            R::check(share[0].start(), share[0].len());
            bytes
        });
        bytes += taken.iter().sum::<u64>();
    }
    bytes
}
