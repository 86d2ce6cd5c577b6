//! Margins of predictors as a part of who is evicted.
//!
//! How often a neuron fired of late says what it is worth on average; how far its score is below the
//! threshold of its predictor says more about the next tokens, as what it reads changes slowly.

use emberflow_kernels::Cpu;
use emberflow_storage::cache::Key;

use super::neurons::NeuronStore;

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

impl NeuronStore {
    /// Whether the cold region may have to evict: it has not room for all neurons.
    pub fn evicts(&self) -> bool {
        u64::from(self.cold.slots()) < self.layout.total()
    }

    /// The neurons of `bank` from `first` on, in order, are `margins` above their thresholds: the
    /// cold region keeps those longer that are near. `consecutive`: the report before was for the
    /// token before.
    pub fn set_margins(
        &mut self,
        cpu: Cpu,
        bank: u32,
        first: usize,
        margins: &[f32],
        consecutive: bool,
    ) {
        let neurons = self.layout.neurons(bank) as f32;
        let spread = &mut self.spreads[bank as usize];
        if first == 0 {
            spread.scale = (spread.squares / neurons).sqrt().recip();
            spread.squares = 0.0;
        }
        spread.squares += cpu.dot_f32(margins, margins);
        let scale = STEPS * spread.scale;
        let steps = margins.iter().map(|m| (m * scale) as i8);
        let key = Key::new(bank, first as u32);
        self.cold.set_margins(key, steps, consecutive);
    }
}
