//! Scale of a bank's predictor margins: their root mean square (rms).

/// Eviction steps per rms of the margins: four doublings of the use count. In simulated caches of 25,
/// 50 and 75 % on margins of the synthetic 7B model, 3 to 8 doublings have nearly equal miss rates.
pub(crate) const STEPS: u16 = 64;

/// Running root mean square of a bank's margins.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Spread {
    /// `1 / rms` of the previous pass.
    scale: f32,
    /// Sum of squares in the current pass.
    squares: f32,
}

impl Spread {
    /// Adds `squares`, a sum of squared margins. `first`: these are the first margins of a pass
    /// over a bank of `neurons` neurons. Returns the factor from margins to steps.
    pub fn scale(&mut self, squares: f32, first: bool, neurons: usize) -> f32 {
        if first {
            self.scale = (self.squares / neurons as f32).sqrt().recip();
            self.squares = 0.0;
        }
        self.squares += squares;
        f32::from(STEPS) * self.scale
    }
}
