//! Medians and ranges of measurements.

use serde::Serialize;

/// Median and quartiles.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Spread {
    /// Median.
    pub median: f64,
    /// First quartile.
    pub low: f64,
    /// Third quartile.
    pub high: f64,
}

impl Spread {
    /// Sorts the values and computes their quartiles; zeros if there are none.
    pub fn of(values: &mut [f64]) -> Self {
        values.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let last = values.len().saturating_sub(1) as f64;
            let place = (share * last).round() as usize;
            values.get(place).copied().unwrap_or_default()
        };
        Self {
            median: at(0.5),
            low: at(0.25),
            high: at(0.75),
        }
    }
}

/// Median, minimum and maximum.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Range {
    /// Median.
    pub median: f64,
    /// Minimum.
    pub min: f64,
    /// Maximum.
    pub max: f64,
}

impl Range {
    /// Sorts the values and computes their median (the mean of the middle two for an even number) and range; zeros if
    /// there are none.
    pub fn of(values: &mut [f64]) -> Self {
        values.sort_by(f64::total_cmp);
        let at = |i: usize| values.get(i).copied().unwrap_or_default();
        let last = values.len().saturating_sub(1);
        Self {
            median: (at(last / 2) + at(last.div_ceil(2))) / 2.0,
            min: at(0),
            max: at(last),
        }
    }

    /// Applies `f` to all three.
    pub fn map(self, f: impl Fn(f64) -> f64) -> Self {
        Self {
            median: f(self.median),
            min: f(self.min),
            max: f(self.max),
        }
    }

    /// Formats the median, and the range if it is not empty.
    pub fn show(self, digits: usize) -> String {
        let Self { median, min, max } = self;
        if min == max {
            format!("{median:.digits$}")
        } else {
            format!("{median:.digits$} ({min:.digits$} to {max:.digits$})")
        }
    }
}

/// Nearest-rank percentile of ascending values; 0 if there are none.
pub fn percentile(sorted: &[f64], p: f64) -> f64 {
    let rank = (p * sorted.len() as f64).ceil() as usize;
    let value = sorted.get(rank.saturating_sub(1));
    value.copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::{Range, Spread, percentile};

    #[test]
    fn quarters_of_known_values() {
        let s = Spread::of(&mut [5.0, 1.0, 3.0, 2.0, 4.0]);
        assert_eq!((s.low, s.median, s.high), (2.0, 3.0, 4.0));
        assert_eq!(Spread::of(&mut []).median, 0.0);
    }

    #[test]
    fn ends_and_percentiles_of_known_values() {
        let r = Range::of(&mut [4.0, 1.0, 2.0, 9.0]);
        assert_eq!((r.min, r.median, r.max), (1.0, 3.0, 9.0));
        assert_eq!(r.show(1), "3.0 (1.0 to 9.0)");
        assert_eq!(Range::of(&mut [2.0]).show(0), "2");
        assert_eq!(Range::of(&mut []), Range::default());
        let hundred: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!(percentile(&hundred, 0.99), 99.0);
        assert_eq!(percentile(&hundred, 0.5), 50.0);
        assert_eq!(percentile(&[], 0.5), 0.0);
    }
}
