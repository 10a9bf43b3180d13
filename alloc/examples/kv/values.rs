//! The data: keys, values whose length and content follow from a seed, and the hash by which both sides compare them.

/// The shortest value in bytes.
pub const SHORTEST: usize = 64;
/// The longest value in bytes.
pub const LONGEST: usize = 1 << 20;

/// The key of value `seed`.
pub fn key(seed: u64) -> String {
    format!("value-{seed:010}")
}

/// The length of value `seed`: mostly short and sometimes long, as values are. One in 32 lies between 4 KiB and 1 MiB, the
/// others below, evenly over the orders of magnitude; the mean is about 6.7 KiB.
pub fn len(seed: u64) -> usize {
    match seed {
        0 => SHORTEST,
        1 => LONGEST,
        _ => {
            let random = mix(seed);
            let fraction = (random >> 11) as f64 / (1u64 << 53) as f64;
            let (from, doublings) = if random.is_multiple_of(32) { (4096.0, 8.0) } else { (SHORTEST as f64, 6.0) };
            (from * (doublings * fraction).exp2()) as usize
        }
    }
}

/// Value `seed`, in a vector of the global heap like any other.
pub fn make(seed: u64) -> Vec<u8> {
    let len = len(seed);
    let mut value = Vec::with_capacity(len.next_multiple_of(8));
    for word in 0..len.div_ceil(8) as u64 {
        value.extend_from_slice(&mix(seed << 32 | word).to_le_bytes());
    }
    value.truncate(len);
    value
}

/// The hash of a value: FNV-1a by words of 8 bytes, with a rotation so that high bits come down again. Fast, since it is part of
/// what is measured, and good enough against accidents.
pub fn hash(bytes: &[u8]) -> u64 {
    let step = |hash: u64, word: [u8; 8]| {
        (hash ^ u64::from_le_bytes(word)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
    };
    let (words, rest) = bytes.as_chunks::<8>();
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    mix(step(words.iter().fold(bytes.len() as u64, |hash, word| step(hash, *word)), last))
}

/// The finalizer of splitmix64 over a Weyl step: every seed gives a number that looks random.
fn mix(seed: u64) -> u64 {
    let mut x = seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}
