//! Margins of predictors as a part of who is evicted.
//!
//! How often a neuron fired of late says what it is worth on average; how far its score is below the
//! threshold of its predictor says more about the next tokens, as what it reads changes slowly.

use emberflow_kernels::Cpu;
use emberflow_storage::cache::Key;

use super::neurons::NeuronStore;

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
        let (neurons, squares) = (self.layout.neurons(bank), cpu.dot_f32(margins, margins));
        let scale = self.spreads[bank as usize].scale(squares, first == 0, neurons);
        let steps = margins.iter().map(|m| (m * scale) as i8);
        let key = Key::new(bank, first as u32);
        self.cold.set_margins(key, steps, consecutive);
    }
}
