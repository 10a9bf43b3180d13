//! Vectors that grow by pushing, and strings that are appended to: what `realloc` is for.

use crate::Scale;
use crate::reach::Reach;

/// Numbers in a vector; 512 KiB.
const NUMBERS: u64 = 64 << 10;
/// Strings that grow side by side, and to what length.
const STRINGS: usize = 64;
const LENGTH: usize = 4 << 10;
const WORD: &str = "registered, ";
/// A body that comes in pieces: 4 MiB.
const BODY: usize = 4 << 20;
const PIECE: [u8; 16 << 10] = [7; 16 << 10];

pub fn run<R: Reach>(scale: Scale) -> u64 {
    let mut sum = 0u64;
    for round in 0..scale.of(4) {
        let mut numbers = Vec::new();
        for number in 0..NUMBERS {
            numbers.push(number ^ round as u64);
        }
        R::check(numbers.as_ptr().cast(), size_of_val(&*numbers));
        sum = sum.wrapping_add(numbers.iter().sum::<u64>());

        let mut strings = [const { String::new() }; STRINGS];
        while strings[0].len() < LENGTH {
            for string in &mut strings {
                string.push_str(WORD);
            }
        }
        assert!(
            strings.iter().all(|string| string.len() == LENGTH.next_multiple_of(WORD.len()) && string.ends_with(WORD))
        );
        sum = sum.wrapping_add(strings.iter().map(|string| string.len() as u64).sum());

        if round % 4 == 0 {
            let mut body = Vec::new();
            while body.len() < BODY {
                body.extend_from_slice(&PIECE);
            }
            R::check(body.as_ptr(), body.len());
            sum += body.iter().step_by(1024).map(|byte| u64::from(*byte)).sum::<u64>();
        }
    }
    sum
}
