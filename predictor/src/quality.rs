//! Quality of a prediction: recall, precision and overhead.

use serde::{Deserialize, Serialize};

/// Counts over (neuron, token) pairs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quality {
    /// Pairs counted.
    pub pairs: u64,
    /// Pairs that fire.
    pub active: u64,
    /// Pairs predicted.
    pub predicted: u64,
    /// Pairs that fire and are predicted.
    pub hit: u64,
}

impl Quality {
    /// Counts one pair.
    #[inline]
    pub fn count(&mut self, fires: bool, predicted: bool) {
        self.pairs += 1;
        self.active += u64::from(fires);
        self.predicted += u64::from(predicted);
        self.hit += u64::from(fires && predicted);
    }

    /// Share of the firing pairs that are predicted; 1 if none fires.
    pub fn recall(&self) -> f64 {
        share(self.hit, self.active, 1.0)
    }

    /// Share of the predicted pairs that fire; 1 if none is predicted.
    pub fn precision(&self) -> f64 {
        share(self.hit, self.predicted, 1.0)
    }

    /// Predicted pairs per firing pair; 0 if none fires.
    pub fn overhead(&self) -> f64 {
        share(self.predicted, self.active, 0.0)
    }

    /// Share of all pairs that fire.
    pub fn active_share(&self) -> f64 {
        share(self.active, self.pairs, 0.0)
    }

    /// Share of all pairs that are predicted.
    pub fn predicted_share(&self) -> f64 {
        share(self.predicted, self.pairs, 0.0)
    }
}

impl std::ops::AddAssign for Quality {
    fn add_assign(&mut self, other: Self) {
        self.pairs += other.pairs;
        self.active += other.active;
        self.predicted += other.predicted;
        self.hit += other.hit;
    }
}

fn share(part: u64, whole: u64, none: f64) -> f64 {
    if whole == 0 {
        none
    } else {
        part as f64 / whole as f64
    }
}

#[cfg(test)]
mod tests {
    use super::Quality;

    #[test]
    fn a_hand_case() {
        let mut q = Quality::default();
        // fires, predicted: two true positives, one miss, two false positives, three true negatives
        for (fires, predicted) in [
            (true, true),
            (true, true),
            (true, false),
            (false, true),
            (false, true),
            (false, false),
            (false, false),
            (false, false),
        ] {
            q.count(fires, predicted);
        }
        assert_eq!(q.recall(), 2.0 / 3.0);
        assert_eq!(q.precision(), 0.5);
        assert_eq!(q.overhead(), 4.0 / 3.0);
        assert_eq!(q.active_share(), 3.0 / 8.0);
        assert_eq!(q.predicted_share(), 0.5);
        assert_eq!(Quality::default().recall(), 1.0);
    }
}
