//! Division of memory between hot clusters and cold neurons: pure arithmetic, also used by
//! simulations.

/// Neurons per cluster: about a megabyte for a 7B model, enough for one efficient sequential read,
/// yet small enough that one miss delays little.
pub const CLUSTER: usize = 128;

/// Fewest stream buffers for whole clusters: some are in flight while one is computed.
pub const LEAST_BUFFERS: u32 = 4;

/// Smallest share of tokens for which a hot cluster's neurons fire. An LRU cache would keep such
/// neurons anyway; in a cluster they need no lookup each, and a miss costs one sequential read
/// instead of many.
pub(crate) const HOT: f64 = 0.5;

/// Length of the longest prefix of clusters in which `mean(1 − (1 − count/passes)^times) ≥ ½`: the
/// average neuron fires in at least half of the passes with `times` times as many tokens. Tokens of a
/// batch belong to different sequences and are assumed to be independent.
pub fn hot_prefix(counts: &[u64], passes: u64, times: f64) -> u32 {
    let rests = |count: u64| libm::pow(1.0 - count as f64 / passes as f64, times);
    let is_hot = |cluster: &&[u64]| {
        let rest: f64 = cluster.iter().map(|&c| rests(c)).sum();
        passes > 0 && rest <= (1.0 - HOT) * cluster.len() as f64
    };
    counts.chunks(CLUSTER).take_while(is_hot).count() as u32
}

/// Divides `units` hot clusters among the banks in proportion to `wanted`, limited to `clusters` of
/// each bank. If all clusters fit, every bank gets all of its own.
pub fn prefixes(units: u64, wanted: &[u32], clusters: &[u32]) -> Vec<u32> {
    let sum = |counts: &[u32]| counts.iter().map(|&n| u64::from(n)).sum::<u64>();
    if units >= sum(clusters) {
        return clusters.to_vec();
    }
    let all = sum(wanted);
    if units >= all {
        return wanted.to_vec();
    }
    let mut prefix: Vec<u32> = wanted
        .iter()
        .map(|&w| (u64::from(w) * units / all) as u32)
        .collect();
    let mut left = units - sum(&prefix);
    for (p, &w) in prefix.iter_mut().zip(wanted) {
        if left > 0 && *p < w {
            *p += 1;
            left -= 1;
        }
    }
    prefix
}

/// Divides `left` bytes into at most `hot_clusters` hot clusters of `unit` bytes and at least
/// `min_slots` cold slots of `slot` bytes. The cold region adapts to the text, so it gets at least
/// half of the bytes, or what remains after `always` clusters that every token needs.
pub fn split(
    left: u64,
    [unit, slot]: [u64; 2],
    [hot_clusters, always]: [u64; 2],
    min_slots: u64,
) -> (u64, u64) {
    let unit = unit.max(1);
    let without_min_slots = left.saturating_sub(min_slots.saturating_mul(slot));
    let most = (left / 2 / unit).max(always);
    let hot = hot_clusters.min(most).min(without_min_slots / unit);
    (hot, (left - hot * unit) / slot.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hot_is_the_leading_run_of_clusters_that_fire_half_the_time() {
        let mut counts = vec![90; CLUSTER];
        counts.extend(vec![50; CLUSTER]);
        counts.extend(vec![49; CLUSTER]);
        counts.extend(vec![80; 10]);
        assert_eq!(hot_prefix(&counts, 100, 1.0), 2);
        assert_eq!(hot_prefix(&counts[..100], 100, 1.0), 1);
        assert_eq!(hot_prefix(&counts, 1000, 1.0), 0);
        assert_eq!(hot_prefix(&[], 10, 1.0), 0);
        assert_eq!(hot_prefix(&[0; 10], 0, 1.0), 0);
        // 1 − 0.51² = 74 %; 1 − 0.91⁷ = 48 %, 1 − 0.91⁸ = 53 %.
        assert_eq!(hot_prefix(&counts, 100, 2.0), 4);
        assert_eq!(hot_prefix(&counts, 1000, 7.0), 0);
        assert_eq!(hot_prefix(&counts, 1000, 8.0), 1);
    }

    #[test]
    fn units_are_divided_in_proportion_without_loss() {
        assert_eq!(prefixes(10, &[4, 4, 4], &[8; 3]), [4, 3, 3]);
        assert_eq!(prefixes(12, &[4, 4, 4], &[8; 3]), [4, 4, 4]);
        assert_eq!(prefixes(20, &[4, 4, 4], &[8; 3]), [4, 4, 4]);
        assert_eq!(prefixes(24, &[4, 0, 4], &[8; 3]), [8, 8, 8]);
        assert_eq!(prefixes(3, &[6, 0, 3], &[8; 3]), [2, 0, 1]);
        assert_eq!(prefixes(0, &[0, 0], &[8; 2]), [0, 0]);
    }

    #[test]
    fn the_cold_region_gets_half_and_its_minimum() {
        let split = |left, hot, min_slots| split(left, [100, 10], hot, min_slots);
        assert_eq!(split(1000, [3, 0], 0), (3, 70));
        assert_eq!(split(1000, [9, 0], 0), (5, 50));
        assert_eq!(split(1000, [9, 0], 80), (2, 80));
        assert_eq!(split(90, [9, 0], 9), (0, 9));
        // Clusters needed by every token go first.
        assert_eq!(split(1000, [9, 7], 0), (7, 30));
        assert_eq!(split(1000, [9, 7], 50), (5, 50));
    }
}
