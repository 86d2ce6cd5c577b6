//! Medians and spreads of measurements.

use serde::Serialize;

/// The middle of some measurements.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Spread {
    /// Median.
    pub median: f64,
    /// A quarter of the values are at most this.
    pub low: f64,
    /// Three quarters of the values are at most this.
    pub high: f64,
}

impl Spread {
    /// Sorts the values and takes their middle; zeros without values.
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

#[cfg(test)]
mod tests {
    use super::Spread;

    #[test]
    fn quarters_of_known_values() {
        let s = Spread::of(&mut [5.0, 1.0, 3.0, 2.0, 4.0]);
        assert_eq!((s.low, s.median, s.high), (2.0, 3.0, 4.0));
        assert_eq!(Spread::of(&mut []).median, 0.0);
    }
}
