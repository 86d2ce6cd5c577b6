//! Filters over candidates: (logit or weight, token).

/// Drops candidates more than `n` standard deviations of the logits below the largest one.
/// Forbidden tokens are not counted.
pub(super) fn keep_within_sigma(candidates: &mut Vec<(f32, u32)>, n: f32) {
    let logits = || {
        candidates
            .iter()
            .map(|c| f64::from(c.0))
            .filter(|l| l.is_finite())
    };
    let count = logits().count().max(1) as f64;
    let mean = logits().sum::<f64>() / count;
    let variance = logits().map(|l| (l - mean) * (l - mean)).sum::<f64>() / count;
    let most = logits().fold(f64::NEG_INFINITY, f64::max);
    let least = most - f64::from(n) * libm::sqrt(variance);
    candidates.retain(|c| f64::from(c.0) >= least);
}

/// Keeps the candidates (weights in descending order) whose surprise is closest to its mean, until
/// they have the share `p` of the weight; at least one.
pub(super) fn keep_typical(candidates: &mut Vec<(f32, u32)>, p: f32) {
    let sum: f64 = candidates.iter().map(|c| f64::from(c.0)).sum();
    let surprise = |weight: f32| -libm::log(f64::from(weight) / sum);
    let mean = |c: &(f32, u32)| {
        if c.0 > 0.0 {
            f64::from(c.0) / sum * surprise(c.0)
        } else {
            0.0
        }
    };
    let entropy: f64 = candidates.iter().map(mean).sum();
    let far = |c: &(f32, u32)| (surprise(c.0) - entropy).abs();
    candidates.sort_unstable_by(|a, b| far(a).total_cmp(&far(b)).then(a.1.cmp(&b.1)));
    let mut mass = 0.0;
    let reached = candidates.iter().position(|c| {
        mass += f64::from(c.0);
        mass >= f64::from(p) * sum
    });
    let kept = reached.map_or(candidates.len(), |at| at + 1);
    candidates.truncate(kept);
    candidates.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
}

/// Of the candidates (weights in descending order) with at least the share `threshold` of the
/// weight, drops all but the last.
pub(super) fn drop_likely(candidates: &mut Vec<(f32, u32)>, threshold: f32) {
    let sum: f32 = candidates.iter().map(|c| c.0).sum();
    let likely = candidates
        .iter()
        .take_while(|c| c.0 >= threshold * sum)
        .count();
    candidates.drain(..likely.saturating_sub(1));
}

/// Bits per digit of [`sort_descending`].
const DIGIT: u32 = 11;

/// Maps logits to integers in reverse order.
fn descending(logit: f32) -> u32 {
    let bits = logit.to_bits();
    if logit.is_sign_negative() {
        bits
    } else {
        !bits & !(1 << 31)
    }
}

/// Sorts candidates, given in token order, by descending logit, ties by token. Radix sort: a third
/// of the time of a comparison sort. Afterwards `spare` has the same length.
pub(super) fn sort_descending(candidates: &mut Vec<(f32, u32)>, spare: &mut Vec<(f32, u32)>) {
    const DIGITS: usize = u32::BITS.div_ceil(DIGIT) as usize;
    let digit = |logit: f32, place: usize| {
        (descending(logit) >> (place as u32 * DIGIT)) as usize % (1 << DIGIT)
    };
    let mut starts = [[0u32; 1 << DIGIT]; DIGITS];
    for &(logit, _) in &*candidates {
        for (place, counts) in starts.iter_mut().enumerate() {
            counts[digit(logit, place)] += 1;
        }
    }
    spare.resize(candidates.len(), (0.0, 0));
    for (place, starts) in starts.iter_mut().enumerate() {
        let mut sum = 0;
        for start in starts.iter_mut() {
            sum += std::mem::replace(start, sum);
        }
        for &candidate in &*candidates {
            let next = &mut starts[digit(candidate.0, place)];
            spare[*next as usize] = candidate;
            *next += 1;
        }
        std::mem::swap(candidates, spare);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Expected sets, computed in Python from the definitions.
    #[test]
    fn rarer_filters_keep_what_they_should() {
        let ids = |c: &[(f32, u32)]| c.iter().map(|c| c.1).collect::<Vec<u32>>();
        // Mean 0.2, standard deviation 2.2045: 3 and 2 are above 3 - 2.2045.
        let mut c: Vec<(f32, u32)> = [3.0, 2.0, 0.5, -1.5, -3.0].into_iter().zip(0..).collect();
        keep_within_sigma(&mut c, 1.0);
        assert_eq!(ids(&c), [0, 1]);
        // Shares 0.5, 0.3, 0.15, 0.05: entropy 1.1421; distances 0.449, 0.062, 0.755, 1.854.
        let shares = || vec![(0.5f32, 7u32), (0.3, 5), (0.15, 2), (0.05, 1)];
        let mut c = shares();
        keep_typical(&mut c, 0.25);
        assert_eq!(ids(&c), [5]);
        let mut c = shares();
        keep_typical(&mut c, 0.6);
        assert_eq!(ids(&c), [7, 5]);
        let mut c = shares();
        drop_likely(&mut c, 0.1);
        assert_eq!(ids(&c), [2, 1]);
        let mut c = shares();
        drop_likely(&mut c, 0.4);
        assert_eq!(ids(&c), [7, 5, 2, 1]);
    }

    proptest! {
        #[test]
        fn sorting_by_digits_equals_comparing(
            logits in prop::collection::vec(prop_oneof![
                -5f32..5.0, Just(0.0), Just(-0.0), Just(f32::INFINITY), Just(f32::NEG_INFINITY),
                any::<f32>().prop_filter("a number", |l| !l.is_nan()),
            ], 0..200),
        ) {
            let mut sorted: Vec<(f32, u32)> = logits.iter().copied().zip(0..).collect();
            let mut expected = sorted.clone();
            expected.sort_by(|a, b| b.0.total_cmp(&a.0));
            sort_descending(&mut sorted, &mut Vec::new());
            prop_assert_eq!(sorted, expected);
        }
    }
}
