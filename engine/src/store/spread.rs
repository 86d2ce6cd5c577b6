//! How wide a bank's margins are spread, which is the unit they are reported in.

/// Steps of a margin as large as the root of the mean square of a bank's margins: four doublings of
/// uses. By simulation of caches of 25, 50 and 75 % on margins of the synthetic 7B model, 3 to 8
/// doublings miss about as little.
pub(crate) const STEPS: f32 = 64.0;

/// How wide a bank's margins are spread.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Spread {
    /// Of the pass before: one over the root of their mean square.
    scale: f32,
    /// Sum of squares so far.
    squares: f32,
}

impl Spread {
    /// Takes in margins whose squares add up to `squares`, the `first` ones of a pass over a bank of
    /// `neurons` neurons or others. Returns what a margin is multiplied with to be steps.
    pub fn scale(&mut self, squares: f32, first: bool, neurons: usize) -> f32 {
        if first {
            self.scale = (self.squares / neurons as f32).sqrt().recip();
            self.squares = 0.0;
        }
        self.squares += squares;
        STEPS * self.scale
    }
}
