//! Bit mask of the wanted (neuron, row) pairs of a bank, cluster by cluster.
//!
//! ```text
//! words of a cluster   CLUSTER × rows / 64, bit n × rows + r for its n-th neuron and row r
//! ```
//!
//! The functions take the words of one cluster; `n` is a neuron's index in it.

use crate::cluster::CLUSTER;

/// Words per cluster.
pub(crate) const fn words(rows: usize) -> usize {
    CLUSTER * rows / 64
}

const _: () = assert!(CLUSTER.is_multiple_of(64));

/// Sets the bit of each pair with margin ≥ 0 and clears the others, for `margins [neurons × rows]`
/// of at most one cluster. Returns the number of set bits.
pub(crate) fn set_wanted(words: &mut [u64], margins: &[f32]) -> u64 {
    let mut count = 0;
    for (word, margins) in words.iter_mut().zip(margins.chunks(64)) {
        *word = 0;
        for (bit, &margin) in margins.iter().enumerate() {
            *word |= u64::from(margin >= 0.0) << bit;
        }
        count += u64::from(word.count_ones());
    }
    let used = margins.len().div_ceil(64);
    words[used..].fill(0);
    count
}

/// A mask of the lowest `bits` bits, at most 64.
fn below(bits: usize) -> u64 {
    match bits {
        64.. => u64::MAX,
        bits => (1 << bits) - 1,
    }
}

/// Whether a pair is wanted.
#[inline]
pub(crate) fn has(words: &[u64], rows: usize, n: usize, row: usize) -> bool {
    let bit = n * rows + row;
    words[bit / 64] >> (bit % 64) & 1 == 1
}

/// Number of rows that want neuron `n`.
#[inline]
pub(crate) fn count(words: &[u64], rows: usize, n: usize) -> u32 {
    let (start, end) = (n * rows, (n + 1) * rows);
    let mut count = 0;
    for at in start / 64..end.div_ceil(64) {
        let from = start.saturating_sub(64 * at);
        let word = words.get(at).copied().unwrap_or(0);
        count += (word & below(end - 64 * at) & !below(from)).count_ones();
    }
    count
}

/// Calls `then` for each of the first `neurons` neurons that any row wants, ascending.
pub(crate) fn for_each_wanted(
    words: &[u64],
    rows: usize,
    neurons: usize,
    mut then: impl FnMut(usize),
) {
    if rows == 1 {
        for (i, &word) in words.iter().enumerate() {
            let mut word = word;
            while word != 0 {
                then(64 * i + word.trailing_zeros() as usize);
                word &= word - 1;
            }
        }
        return;
    }
    for n in 0..neurons {
        if count(words, rows, n) > 0 {
            then(n);
        }
    }
}

/// Zeroes the values of neuron `n`, one per row, whose pair is not wanted.
pub(crate) fn keep_wanted(words: &[u64], n: usize, values: &mut [f32]) {
    let rows = values.len();
    for (row, value) in values.iter_mut().enumerate() {
        if !has(words, rows, n, row) {
            *value = 0.0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn masks_match_a_list_of_pairs(
            rows in 1..70usize, neurons in 1..=CLUSTER, seed: u64, dirt: u64
        ) {
            let wanted = |pair: usize| (pair as u64 ^ seed).wrapping_mul(0x9E37_79B9) >> 16 & 3 == 0;
            let margins: Vec<f32> = (0..neurons * rows)
                .map(|pair| if wanted(pair) { 0.0 } else { -0.5 })
                .collect();
            let mut bits = vec![dirt; words(rows)];
            let set = set_wanted(&mut bits, &margins);
            prop_assert_eq!(set, (0..neurons * rows).filter(|&p| wanted(p)).count() as u64);
            let mut listed = Vec::new();
            for_each_wanted(&bits, rows, neurons, |n| listed.push(n));
            for n in 0..neurons {
                let of = |row: usize| wanted(n * rows + row);
                let mut values = vec![7.0; rows];
                keep_wanted(&bits, n, &mut values);
                for (row, &value) in values.iter().enumerate() {
                    prop_assert_eq!(has(&bits, rows, n, row), of(row));
                    prop_assert_eq!(value, if of(row) { 7.0 } else { 0.0 });
                }
                let number = (0..rows).filter(|&row| of(row)).count();
                prop_assert_eq!(count(&bits, rows, n) as usize, number);
                prop_assert_eq!(listed.contains(&n), number > 0);
            }
        }
    }

    #[test]
    fn nan_margins_are_not_wanted() {
        let mut bits = [u64::MAX; 2];
        assert_eq!(
            set_wanted(&mut bits, &[f32::NAN, 0.0, -0.0, f32::NEG_INFINITY]),
            2
        );
        assert_eq!(bits, [0b110, 0]);
    }
}
