//! Guesses the neurons of the next layer that fire, from its resident Gate rows, one layer early.
//!
//! The residual stream changes little from layer to layer, so most of the neurons whose gates are
//! above zero for this layer's residual stream also fire for the next one's. The guess needs no
//! training and no additional memory. It takes the time of a layer's gates, so it pays off if the
//! reads that it starts early take longer. Models with predictors look ahead with those instead
//! (`lookahead.rs`). A wrong guess costs a read and changes no result.

use std::time::{Duration, Instant};

use emberflow_kernels::{Activations, Compute};

use super::gates::GateWork;
use super::lookahead::Upcoming;
use crate::activation::Gating;
use crate::bundle::NeuronFormat;
use crate::cluster::CLUSTER;
use crate::input::Input;
use crate::norm::rows_or_copy;
use crate::store::Resident;

/// Buffers for one token.
pub(super) struct GatesAhead {
    normed: Vec<f32>,
    input: Activations,
    gates: Vec<f32>,
    ids: Vec<u32>,
    /// Duration of the last guess.
    took: Duration,
}

/// Source of the gates.
pub(super) struct GateRows<'a> {
    pub resident: &'a Resident,
    pub format: NeuronFormat,
    pub gating: Gating,
    /// Rows of the bank.
    pub neurons: usize,
}

impl GatesAhead {
    /// For `d` elements and banks of up to `neurons` neurons.
    pub fn new(d: usize, neurons: usize) -> Self {
        Self {
            normed: vec![0.0; d],
            input: Activations::with_capacity(d, 1),
            gates: vec![0.0; neurons],
            ids: Vec::with_capacity(neurons),
            took: Duration::ZERO,
        }
    }

    /// Bytes that [`GatesAhead::new`] allocates.
    pub fn bytes_for(d: usize, neurons: usize) -> u64 {
        (4 * (d + 2 * neurons) + Activations::bytes(d, 1)) as u64
    }

    /// `self` if a guess takes less time than it may `save`. Otherwise its recorded time decays
    /// with each call, so that an interrupted measurement is repeated.
    pub fn if_it_pays(&mut self, save: Duration) -> Option<&mut Self> {
        if self.took < save {
            return Some(self);
        }
        self.took = self.took * 15 / 16;
        None
    }

    /// Passes the ids of the neurons that would fire for the residual stream of one token,
    /// ascending, to `then`. Returns the duration.
    pub fn name(
        &mut self,
        on: &Compute,
        rows: &GateRows<'_>,
        next: &Upcoming<'_>,
        then: &mut dyn FnMut(&[u32]),
    ) -> Duration {
        let start = Instant::now();
        rows_or_copy(next.norm, on.cpu, next.residual, &mut self.normed);
        // Whether the next layer prunes outliers decides no guess.
        let cpu = on.cpu.pruning(false);
        let work = GateWork {
            cpu,
            format: rows.format,
            gating: rows.gating,
            input: Input::new(cpu, &self.normed, 1, &mut self.input),
            bias: next.bias,
            cutoffs: &[],
        };
        let gates = &mut self.gates[..rows.neurons];
        let part = rows.neurons.div_ceil(CLUSTER * on.threads()) * CLUSTER;
        (on.workers).for_each_chunk_mut(gates, part, &|_, i, gates| {
            for (c, gates) in gates.chunks_mut(CLUSTER).enumerate() {
                let first = i * part + c * CLUSTER;
                let neurons = first..first + gates.len();
                work.resident(rows.resident, next.bank, neurons, gates);
            }
        });
        self.ids.clear();
        let fires = |(id, gate): (u32, &f32)| (*gate != 0.0).then_some(id);
        self.ids.extend((0..).zip(gates.iter()).filter_map(fires));
        self.took = start.elapsed();
        then(&self.ids);
        start.elapsed()
    }
}
