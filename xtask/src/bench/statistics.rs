//! Medians, geometric means, and how sure a ratio is.

/// The middle of some numbers; of the two middle ones, the mean. NaN for none.
pub fn median(numbers: &[f64]) -> f64 {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        len if len % 2 == 1 => sorted[len / 2],
        len => f64::midpoint(sorted[len / 2 - 1], sorted[len / 2]),
    }
}

/// The geometric mean of some positive numbers. NaN for none.
pub fn geometric_mean(numbers: impl IntoIterator<Item = f64>) -> f64 {
    let (count, sum) = numbers.into_iter().fold((0, 0.0), |(count, sum), number| (count + 1, sum + number.ln()));
    (sum / f64::from(count)).exp()
}

/// A ratio, and between what it lies with 95 % confidence.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Ratio {
    /// The ratio of the medians.
    pub value: f64,
    /// The lower end.
    pub low: f64,
    /// The upper end.
    pub high: f64,
}

/// How often runs are drawn anew.
const DRAWS: usize = 2_000;

/// Numbers that were measured in pairs: `[i].0` and `[i].1` one shortly after the other.
pub type Pairs = Vec<(f64, f64)>;

/// The geometric mean, over some measures, of the ratio of the medians of what was measured in pairs.
///
/// How sure it is: the pairs are drawn anew, with replacement, each measure's among its own, as often as there are; so a mood of the
/// machine that hit both of a pair counts for nothing. The seed is fixed: the same figures give the same answer.
pub fn ratio(measures: &[Pairs]) -> Ratio {
    let of_medians = |pairs: &Pairs| {
        let (first, second): (Vec<f64>, Vec<f64>) = pairs.iter().copied().unzip();
        median(&first) / median(&second)
    };
    let value = geometric_mean(measures.iter().map(of_medians));
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut below = |end: usize| {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        ((u128::from(state.wrapping_mul(0x2545_f491_4f6c_dd1d)) * end as u128) >> 64) as usize
    };
    let mut drawn: Vec<f64> = (0..DRAWS)
        .map(|_| {
            geometric_mean(
                measures.iter().map(|pairs| of_medians(&(0..pairs.len()).map(|_| pairs[below(pairs.len())]).collect())),
            )
        })
        .collect();
    drawn.sort_by(f64::total_cmp);
    let at = |part: f64| drawn[((DRAWS - 1) as f64 * part).round() as usize];
    Ratio { value, low: at(0.025), high: at(0.975) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_and_the_mean() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&[]).is_nan());
        assert!((geometric_mean([1.0, 4.0]) - 2.0).abs() < 1e-12);
    }

    #[test]
    fn what_hits_both_of_a_pair_makes_a_ratio_no_less_sure() {
        // The machine is twice, three times, ... as slow in each run; the ratio is the same in each.
        let moody: Pairs = (1..=7).map(|mood| (0.8 * f64::from(mood), f64::from(mood))).collect();
        // Drawn sets of pairs have other medians, but those of both sides are of the same pair.
        let Ratio { value, low, high } = ratio(&[moody]);
        assert!([value, low, high].iter().all(|r| (r - 0.8).abs() < 1e-9), "{low} {value} {high}");
    }

    #[test]
    fn noise_widens_the_interval_and_the_same_figures_give_the_same() {
        let noisy = |spread: f64| -> Pairs { (0..7).map(|i| (1.0 + spread * f64::from(i * 5 % 7), 1.0)).collect() };
        let (calm, wild) = (ratio(&[noisy(0.01)]), ratio(&[noisy(0.1)]));
        assert!(calm.low <= calm.value && calm.value <= calm.high);
        assert!(wild.high - wild.low > 5.0 * (calm.high - calm.low));
        assert_eq!(wild, ratio(&[noisy(0.1)]));
        let several = ratio(&[vec![(2.0, 1.0); 5], vec![(1.0, 2.0); 5]]);
        assert!((several.value - 1.0).abs() < 1e-12);
    }
}
