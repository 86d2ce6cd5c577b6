//! The scale of a bank's margins: their root mean square, the unit in which they are reported.

/// Steps per root mean square: four doublings of uses. In simulated caches of 25, 50 and 75 % on
/// margins of the synthetic 7B model, 3 to 8 doublings have about equally low miss rates.
pub(crate) const STEPS: f32 = 64.0;

/// Root mean square of a bank's margins.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Spread {
    /// `1 / rms` of the previous pass.
    scale: f32,
    /// Sum of squares so far.
    squares: f32,
}

impl Spread {
    /// Adds `squares`, a sum of squared margins; `first` marks the first margins of a pass over a
    /// bank of `neurons` neurons. Returns the factor from margins to steps.
    pub fn scale(&mut self, squares: f32, first: bool, neurons: usize) -> f32 {
        if first {
            self.scale = (self.squares / neurons as f32).sqrt().recip();
            self.squares = 0.0;
        }
        self.squares += squares;
        STEPS * self.scale
    }
}
