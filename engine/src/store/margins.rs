//! Predictor margins as an input to eviction.
//!
//! Recency and frequency give a neuron's average value. Its predictor margin says more about the
//! next tokens, because the predictor's input changes slowly.

use emberflow_kernels::Cpu;
use emberflow_storage::cache::Key;

use super::neurons::NeuronStore;

impl NeuronStore {
    /// Whether the cold region is smaller than the model and may evict.
    pub fn evicts(&self) -> bool {
        u64::from(self.cold.slots()) < self.layout.total()
    }

    /// Reports the predictor `margins` of `bank`'s neurons from `first` on, in order: eviction
    /// spares neurons close to their threshold. `consecutive`: the last report was for the previous
    /// token.
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
