//! The sliding window of LLM in a flash: the neurons of the last tokens are kept, and
//! nothing else.

use std::collections::VecDeque;

use emberflow_storage::cache::{Key, SlotCache};

use crate::ablation::{Ablation, Keep, WINDOW};

/// Which neurons the last tokens needed, by bank.
pub(super) struct Window {
    banks: Vec<VecDeque<Vec<u32>>>,
}

impl Window {
    /// Of `banks` banks; empty and never filled unless the ablation asks for it.
    pub fn new(banks: usize, ablation: Ablation) -> Self {
        let banks = match ablation.keep() {
            Keep::Window => vec![VecDeque::new(); banks],
            Keep::All | Keep::Nothing => Vec::new(),
        };
        Self { banks }
    }

    /// After a bank was computed with `ids`: forgets what only an older token needed.
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
