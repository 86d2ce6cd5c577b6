//! The sliding window of LLM in a flash: only the neurons of the last tokens stay resident.

use std::collections::VecDeque;

use emberflow_storage::cache::{Key, SlotCache};

use crate::ablation::{Ablation, Keep, WINDOW};

/// Active sets of the last tokens, by bank.
pub(super) struct Window {
    banks: Vec<VecDeque<Vec<u32>>>,
}

impl Window {
    /// For `banks` banks; empty unless the ablation uses it.
    pub fn new(banks: usize, ablation: Ablation) -> Self {
        let banks = match ablation.keep() {
            Keep::Window => vec![VecDeque::new(); banks],
            Keep::All | Keep::Nothing => Vec::new(),
        };
        Self { banks }
    }

    /// Appends a bank's active set `ids` and evicts neurons that only the oldest token needed.
    pub fn slide(&mut self, bank: u32, ids: &[u32], cold: &mut SlotCache) {
        let Some(window) = self.banks.get_mut(bank as usize) else {
            return;
        };
        window.push_back(ids.to_vec());
        if window.len() <= WINDOW {
            return;
        }
        let Some(oldest) = window.pop_front() else {
            return;
        };
        for neuron in oldest {
            let used = window.iter().any(|ids| ids.binary_search(&neuron).is_ok());
            if !used {
                cold.remove(Key { bank, neuron });
            }
        }
    }
}
