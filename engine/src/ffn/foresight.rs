//! Naming the next layer's neurons by the residual stream of this one.
//!
//! The stream changes little from one layer to the next, so the next layer's predictor is
//! mostly right about it a layer early. What it names is only read ahead, never computed:
//! a wrong guess costs a read and changes no result.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use emberflow_kernels::{Activations, Cpu, Workers};

use super::predict::Predictors;
use super::{CLUSTER, GATE_PIECES, list_needed, nanoseconds};
use crate::input::Input;

/// The norm before a layer's FFN.
#[derive(Clone, Copy)]
pub(crate) struct Norm<'a> {
    pub weight: &'a [f32],
    pub eps: f32,
}

/// A bank to look ahead to: its number, the residual stream of the one before, and its norm.
pub(super) type Next<'a> = (u32, &'a [f32], Norm<'a>);

/// Memory for looking one layer ahead, for a few tokens.
pub(super) struct Foresight {
    neurons: usize,
    normed: Vec<f32>,
    input: Activations,
    wanted: Vec<f32>,
    ids: Vec<u32>,
}

impl Foresight {
    pub fn new(d: usize, neurons: usize, tokens: usize) -> Self {
        Self {
            neurons,
            normed: vec![0.0; d * tokens],
            input: Activations::with_capacity(d, tokens),
            wanted: vec![0.0; neurons * tokens],
            ids: Vec::with_capacity(neurons),
        }
    }

    /// Bytes that [`Foresight::new`] allocates.
    pub fn bytes_for(d: usize, neurons: usize, tokens: usize) -> u64 {
        let floats = d * tokens + neurons * tokens + neurons;
        (4 * floats + Activations::bytes(d, tokens)) as u64
    }

    /// Hands the neurons, ascending, that the predictor of `bank` names for tokens whose
    /// residual stream is `residual`, to `then`, some at a time while others are named. Returns
    /// the nanoseconds of naming alone, by thread.
    pub fn name(
        &mut self,
        (cpu, workers): (Cpu, &Workers),
        predictors: &mut Predictors,
        (bank, residual, norm): Next<'_>,
        then: &mut (dyn FnMut(&[u32]) + Send),
    ) -> u64 {
        let start = Instant::now();
        self.ids.clear();
        let d = norm.weight.len();
        let tokens = residual.len() / d;
        let normed = &mut self.normed[..residual.len()];
        for (x, out) in residual.chunks_exact(d).zip(normed.chunks_exact_mut(d)) {
            cpu.rmsnorm(x, norm.weight, norm.eps, out);
        }
        let input = Input::new(cpu, normed, tokens, &mut self.input);
        let features = input.features(residual);
        if !predictors.prepare(cpu, workers, bank, features) {
            return nanoseconds(start.elapsed());
        }
        let (together, alone) = (start.elapsed(), AtomicU64::new(0));
        let wanted = &mut self.wanted[..self.neurons * tokens];
        let (predictors, ids) = (&*predictors, &mut self.ids);
        let clusters = self.neurons.div_ceil(CLUSTER);
        workers.for_each_part_then(
            wanted,
            (
                CLUSTER * tokens,
                clusters.div_ceil(GATE_PIECES * workers.threads()),
            ),
            &|c, wanted| {
                let start = Instant::now();
                predictors.predict(cpu, bank, features, c * CLUSTER, wanted);
                alone.fetch_add(nanoseconds(start.elapsed()), Ordering::Relaxed);
            },
            &mut |c, wanted| {
                let start = ids.len();
                for (c, wanted) in (c..).zip(wanted.chunks(CLUSTER * tokens)) {
                    list_needed(c * CLUSTER, wanted, tokens, ids);
                }
                then(&ids[start..]);
            },
        );
        nanoseconds(together) + alone.into_inner() / workers.threads() as u64
    }
}
