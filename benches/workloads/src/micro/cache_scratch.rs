//! Passive false sharing (as Hoard's benchmark of the name has it): one thread takes small objects that lie side by side and gives
//! each to another, who frees it, and from then on takes one of the size, writes it many times, and frees it. An allocator that
//! serves each from where the first lay lets them share a line for ever.

use crate::Scale;
use crate::block::Block;
use crate::reach::Reach;
use std::hint::black_box;
use std::sync::Mutex;

const SIZE: usize = 16;
/// Writes to an object in its life.
const WRITES: u64 = 50;

pub fn run<R: Reach>(scale: Scale) -> u64 {
    let objects = [0, 1].map(|serial| Mutex::new(Some(Block::new(SIZE, serial))));
    let lives = scale.of(24 << 10);
    let sums = crate::on_two(|lane| {
        drop(objects[lane as usize].lock().expect("not poisoned").take());
        let mut sum = 0u64;
        for life in 0..lives {
            let mut object = Box::new([life as u64, lane]);
            for write in 0..WRITES {
                let object = black_box(&mut *object);
                object[0] = object[0].wrapping_add(write);
            }
            sum = sum.wrapping_add(object[0]);
            if life % 16_384 == 0 {
                R::check(object.as_ptr().cast(), SIZE);
            }
        }
        sum
    });
    let lives = lives as u64;
    let expected = lives * (lives - 1) / 2 + lives * (WRITES * (WRITES - 1) / 2);
    assert_eq!(sums, [expected; 2]);
    expected
}
