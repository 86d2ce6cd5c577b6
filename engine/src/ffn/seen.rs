//! Observation of an FFN, and its buffers.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use super::units::Choice;
use crate::cluster::CLUSTER;

/// One FFN of a pass, as an observer sees it.
pub struct FfnSeen<'a> {
    /// Index of the layer among those with an FFN.
    pub layer: usize,
    /// Tokens of the chunk.
    pub tokens: usize,
    /// The residual stream before the FFN's norm, `[tokens × d_model]`; equal to `x` if experts have another width.
    pub residual: &'a [f32],
    /// The same after the norm, the input of Gate and Up, `[tokens × bundle_width]`.
    pub x: &'a [f32],
    /// Input of a dense FFN in parallel with the experts, if it differs; empty otherwise.
    pub dense: &'a [f32],
    /// The experts of each token, the largest share first, `[tokens × chosen]`; empty for a dense
    /// FFN.
    pub choices: &'a [Choice],
    /// Activated gates, `[neurons × tokens]`, in packed order; zero where a gate does not fire.
    /// Empty unless [`Lab::observe`](crate::Lab::observe) is set.
    pub gates: &'a [f32],
    /// Hidden values `gate × up`, the input of Down, `[neurons × tokens]`. With a ReLU on Up a
    /// firing neuron may be zero here. Empty unless [`Lab::observe`](crate::Lab::observe) is set.
    pub hidden: &'a [f32],
}

/// Gates and hidden values of one layer and chunk.
pub(super) struct Record {
    gates: Vec<f32>,
    hidden: Vec<f32>,
}

/// One cluster's part of a [`Record`], `[neurons × tokens]` each.
pub(super) struct ClusterRecord<'a> {
    gates: &'a mut [f32],
    hidden: &'a mut [f32],
}

impl Record {
    /// Buffers for `values` (neuron, token) pairs.
    pub fn new(values: usize) -> Self {
        Self {
            gates: vec![0.0; values],
            hidden: vec![0.0; values],
        }
    }

    /// Bytes that [`Record::new`] allocates.
    pub fn bytes_for(values: usize) -> u64 {
        8 * values as u64
    }

    /// Clears the values of the previous layer.
    pub fn clear(&mut self, values: usize) {
        self.gates[..values].fill(0.0);
        self.hidden[..values].fill(0.0);
    }

    /// Gates and hidden values of the last layer.
    pub fn values(&self, values: usize) -> (&[f32], &[f32]) {
        (&self.gates[..values], &self.hidden[..values])
    }

    /// Gates of `values` pairs from `first` on.
    pub fn gates(&self, first: usize, values: usize) -> &[f32] {
        &self.gates[first..first + values]
    }

    /// The parts of consecutive clusters, each filled by the thread that computes it.
    pub fn clusters(
        &mut self,
        values: Range<usize>,
        tokens: usize,
    ) -> Vec<Mutex<ClusterRecord<'_>>> {
        let gates = self.gates[values.clone()].chunks_mut(CLUSTER * tokens);
        let hidden = self.hidden[values].chunks_mut(CLUSTER * tokens);
        gates
            .zip(hidden)
            .map(|(gates, hidden)| Mutex::new(ClusterRecord { gates, hidden }))
            .collect()
    }
}

/// Stores the values of a cluster's computed neurons: `gates` and `hidden` are `[ids × tokens]`,
/// `ids` the neuron indices inside the cluster.
pub(super) fn keep(
    record: &Mutex<ClusterRecord<'_>>,
    ids: impl Iterator<Item = usize>,
    tokens: usize,
    gates: &[f32],
    hidden: &[f32],
) {
    let mut record = record.lock().unwrap_or_else(PoisonError::into_inner);
    let rows = gates.chunks_exact(tokens).zip(hidden.chunks_exact(tokens));
    for (id, (gate, hidden)) in ids.zip(rows) {
        let to = id * tokens..(id + 1) * tokens;
        record.gates[to.clone()].copy_from_slice(gate);
        record.hidden[to].copy_from_slice(hidden);
    }
}
