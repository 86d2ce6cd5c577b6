//! The order of neurons on flash: packed id → original id.

/// Share of tokens from which a neuron counts as hot. Hot neurons are read as whole clusters and
/// stay in temperature order.
const HOT: f64 = 0.5;

/// Neurons may be reordered within a band whose firing counts differ by at most this ratio. So even
/// in its last band, every prefix of the order has at least half the activations of the hottest
/// neurons.
const BAND: u64 = 2;

/// Number of preceding neurons that share a read: the I/O engine merges reads over gaps of a page.
const REACH: usize = 5;

/// Neurons by descending activation count, ties by original id. Every hot/cold split is then a
/// prefix of the packed order, and the same statistics always give the same file.
pub fn by_temperature(counts: &[u64]) -> Vec<u32> {
    let mut order: Vec<u32> = (0..counts.len() as u32).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(counts[i as usize]));
    order
}

/// The order without statistics: packed id = original id.
pub fn original(neurons: usize) -> Vec<u32> {
    (0..neurons as u32).collect()
}

/// Temperature order, but within bands of similar temperature, neurons that fire together are
/// adjacent.
///
/// `fired` has one row of bits per neuron, `[neurons × width]`, one bit per sampled token. In each
/// band, the next neuron is the one with the largest share of activations in common with the union
/// of the `REACH` neurons before it, so that its reads can be merged with theirs.
pub fn by_coactivation(counts: &[u64], tokens: u64, fired: &[u64]) -> Vec<u32> {
    let mut order = by_temperature(counts);
    let width = fired.len() / counts.len().max(1);
    if width == 0 {
        return order;
    }
    let row = |i: u32| &fired[i as usize * width..(i as usize + 1) * width];
    let hot = |i: &u32| counts[*i as usize] as f64 >= HOT * tokens as f64;
    let mut first = order.iter().take_while(|i| hot(i)).count();
    while let Some(&hottest) = order.get(first) {
        let least = counts[hottest as usize].div_ceil(BAND);
        let band = order[first..]
            .iter()
            .take_while(|&&i| counts[i as usize] >= least)
            .count();
        chain(&mut order[first..first + band], row);
        first += band;
    }
    order
}

/// Orders a band so that neurons with shared activations are adjacent, starting with the first.
fn chain<'a>(band: &mut [u32], row: impl Fn(u32) -> &'a [u64]) {
    let ones = |bits: &[u64]| bits.iter().map(|w| w.count_ones()).sum::<u32>();
    let Some(&start) = band.first() else { return };
    let mut union = vec![0; row(start).len()];
    for next in 1..band.len() {
        union.fill(0);
        for &before in &band[next.saturating_sub(REACH)..next] {
            for (u, w) in union.iter_mut().zip(row(before)) {
                *u |= w;
            }
        }
        let mut best = (next, -1.0);
        for (place, &i) in band.iter().enumerate().skip(next) {
            let (mut shared, bits) = (0, row(i));
            for (u, w) in union.iter().zip(bits) {
                shared += (u & w).count_ones();
            }
            let share = f64::from(shared) / f64::from(ones(bits).max(1));
            // Ties go to the hottest.
            if share > best.1 {
                best = (place, share);
            }
        }
        // Keeps the others in temperature order.
        band[next..=best.0].rotate_right(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn hottest_first_and_stable() {
        assert_eq!(by_temperature(&[1, 5, 1, 9]), [3, 1, 0, 2]);
        assert_eq!(original(3), [0, 1, 2]);
    }

    #[test]
    fn neurons_that_fire_together_become_neighbours() {
        // 8 cold neurons of one temperature: the even ones fire together, and so do the odd ones.
        let rows: Vec<u64> = (0..8)
            .map(|i| if i % 2 == 0 { 0x0f } else { 0xf0 })
            .collect();
        let order = by_coactivation(&[10; 8], 100, &rows);
        assert_eq!(order, [0, 2, 4, 6, 1, 3, 5, 7]);
        // Hot neurons stay in place.
        assert_eq!(by_coactivation(&[90; 8], 100, &rows), original(8));
        // Without a sample all neurons stay in place.
        assert_eq!(by_coactivation(&[10; 8], 100, &[]), original(8));
    }

    proptest! {
        #[test]
        fn the_order_is_complete_and_disturbs_temperature_by_a_band_at_most(
            counts in prop::collection::vec(0u64..100, 1..60), seed: u64
        ) {
            let mut random = fastrand::Rng::with_seed(seed);
            let rows: Vec<u64> = counts.iter().map(|_| random.u64(..)).collect();
            let order = by_coactivation(&counts, 100, &rows);
            let mut all = order.clone();
            all.sort_unstable();
            prop_assert_eq!(all, original(counts.len()));
            let at = |i: usize| counts[order[i] as usize];
            let sorted = by_temperature(&counts);
            for i in 0..order.len() {
                // No neuron precedes one that is more than twice as hot.
                let after = (i..order.len()).map(at).max().unwrap_or(0);
                prop_assert!(at(i) >= after.div_ceil(BAND), "{} before {after}", at(i));
                // The hot part is exactly sorted.
                if counts[sorted[i] as usize] >= 50 {
                    prop_assert_eq!(order[i], sorted[i]);
                }
            }
        }
    }
}
