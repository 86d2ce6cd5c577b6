//! Histogram of magnitudes, in logarithmic buckets.

/// Number of buckets: top bits of an f32 without its sign, 8 exponent and 4 mantissa bits, so a
/// bucket is at most 6 % wide.
pub(super) const BUCKETS: u16 = 1 << 12;

const SHIFT: u32 = 31 - 12;

/// Counts of values by magnitude, without zeros. Adding two histograms is exact.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Magnitudes {
    /// Nonempty buckets with their counts, ascending. A model fills a few hundred; memory is
    /// bounded by the number of buckets.
    counts: Vec<(u16, u64)>,
}

impl Magnitudes {
    /// Counts one value; ignores zero and non-finite values.
    #[inline]
    pub fn see(&mut self, value: f32) {
        if value != 0.0 && value.is_finite() {
            *self.count_mut(bucket(value)) += 1;
        }
    }

    /// Number of values counted.
    pub fn total(&self) -> u64 {
        self.counts.iter().fold(0, |sum, c| sum.saturating_add(c.1))
    }

    /// The magnitude below which `share` (0 to 1) of all values lie, counting `zeros` further
    /// zeros; accurate to a bucket. `None` without values.
    pub fn quantile(&self, share: f64, zeros: u64) -> Option<f32> {
        let all = self.total().saturating_add(zeros);
        if all == 0 {
            return None;
        }
        let wanted = share.clamp(0.0, 1.0) * all as f64;
        let mut below = zeros as f64;
        if below >= wanted && zeros > 0 {
            return Some(0.0);
        }
        let mut last = None;
        for (b, count) in self.filled() {
            below += count as f64;
            last = Some(upper(b));
            if below >= wanted {
                break;
            }
        }
        last
    }

    /// Nonempty buckets as (number, count), ascending.
    pub(super) fn filled(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        let known = self.counts.iter();
        known.map(|&(bucket, count)| (usize::from(bucket), count))
    }

    /// Sets one bucket to a nonzero count. `None` if there is no such bucket.
    pub(super) fn set(&mut self, bucket: usize, count: u64) -> Option<()> {
        let bucket = u16::try_from(bucket).ok().filter(|&b| b < BUCKETS)?;
        *self.count_mut(bucket) = count;
        Some(())
    }

    /// Adds another histogram. `None` if a count overflows.
    pub(super) fn merge(&mut self, other: &Self) -> Option<()> {
        for &(bucket, count) in &other.counts {
            let mine = self.count_mut(bucket);
            *mine = mine.checked_add(count)?;
        }
        Some(())
    }

    /// The count of a bucket, which the caller must make nonzero.
    #[inline]
    fn count_mut(&mut self, bucket: u16) -> &mut u64 {
        let place = self.counts.binary_search_by_key(&bucket, |c| c.0);
        let place = place.unwrap_or_else(|place| {
            self.counts.insert(place, (bucket, 0));
            place
        });
        &mut self.counts[place].1
    }
}

fn bucket(value: f32) -> u16 {
    ((value.to_bits() & 0x7fff_ffff) >> SHIFT) as u16
}

/// Upper end of a bucket.
fn upper(bucket: usize) -> f32 {
    f32::from_bits(((bucket as u32 + 1) << SHIFT) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_right_to_a_bucket() {
        let mut m = Magnitudes::default();
        for i in 1..=1000 {
            m.see(if i % 2 == 0 { i as f32 } else { -(i as f32) });
        }
        m.see(0.0);
        m.see(f32::NAN);
        assert_eq!(m.total(), 1000);
        for (share, expected) in [(0.5, 500.0), (0.9, 900.0), (1.0, 1000.0), (0.001, 1.0)] {
            let q = m.quantile(share, 0).unwrap();
            assert!((q / expected - 1.0).abs() < 0.07, "{share}: {q}");
        }
        assert_eq!(m.quantile(0.5, 1000), Some(0.0));
        assert!((m.quantile(0.75, 1000).unwrap() / 500.0 - 1.0).abs() < 0.07);
        assert_eq!(Magnitudes::default().quantile(0.5, 0), None);
    }

    #[test]
    fn every_float_has_a_bucket_that_holds_it() {
        for v in [f32::MIN_POSITIVE, 1e-45, 1.0, 3.25, f32::MAX] {
            let b = usize::from(bucket(v));
            assert!(b < usize::from(BUCKETS) && upper(b) >= v);
            assert!(b == 0 || upper(b - 1) < v);
        }
    }
}
