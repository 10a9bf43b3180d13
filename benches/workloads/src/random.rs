//! Pseudo-random numbers, the same in every run.

/// A small generator (xorshift, Marsaglia 2003, with a multiplication at the end).
pub struct Random(u64);

impl Random {
    /// The generator of a number; different numbers give sequences that have nothing to do with each other.
    pub fn new(seed: u64) -> Random {
        // Two multiplications apart from 0, which would stay 0.
        Random((seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// The next number.
    #[inline]
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `end`.
    #[inline]
    pub fn below(&mut self, end: usize) -> usize {
        ((u128::from(self.next()) * end as u128) >> 64) as usize
    }

    /// A size of `2^low` to `2^high` bytes, the last not included, each doubling as likely as the next.
    #[inline]
    pub fn doubling(&mut self, low: u32, high: u32) -> usize {
        let next = self.next();
        let power = low + ((next >> 40) as u32) % (high - low);
        (1 << power) + (next as usize & ((1 << power) - 1))
    }

    /// A size of at least `least` bytes by a power law: twice as large is half as likely (Pareto, exponent 1), at most `most`.
    #[inline]
    pub fn pareto(&mut self, least: usize, most: usize) -> usize {
        let uniform = (self.next() >> 40) as usize + 1; // of 2^24
        ((least << 24) / uniform).min(most)
    }
}

#[cfg(test)]
mod tests {
    use super::Random;

    #[test]
    fn sizes_are_as_said() {
        let mut random = Random::new(0);
        for _ in 0..10_000 {
            assert!((16..8192).contains(&random.doubling(4, 13)));
            assert!((8..=4096).contains(&random.pareto(8, 4096)));
            assert!(random.below(7) < 7);
        }
        let large = (0..10_000).filter(|_| random.pareto(16, 1 << 20) >= 32).count();
        assert!((4_500..5_500).contains(&large), "{large}");
    }
}
