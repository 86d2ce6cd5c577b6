//! Naming the next layer's neurons by the residual stream of this one.
//!
//! The stream changes little from one layer to the next, so the next layer's predictor is
//! mostly right about it a layer early. What it names is only read ahead, never computed:
//! a wrong guess costs a read and changes no result.

use emberflow_kernels::{Activations, Cpu, Workers};

use super::CLUSTER;
use super::predict::Predictors;
use crate::input::Input;

/// The norm before a layer's FFN.
#[derive(Clone, Copy)]
pub(crate) struct Norm<'a> {
    pub weight: &'a [f32],
    pub eps: f32,
}

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

    /// The neurons, ascending, that the predictor of `bank` names for tokens whose residual
    /// stream is `residual`.
    pub fn name(
        &mut self,
        (cpu, workers): (Cpu, &Workers),
        predictors: &mut Predictors,
        bank: u32,
        residual: &[f32],
        norm: Norm<'_>,
    ) -> &[u32] {
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
            return &[];
        }
        let wanted = &mut self.wanted[..self.neurons * tokens];
        let predictors = &*predictors;
        workers.for_each_part_mut(wanted, CLUSTER * tokens, &|_, c, wanted| {
            predictors.predict(cpu, bank, features, c * CLUSTER, wanted);
        });
        let named = |(n, pairs): (usize, &[f32])| {
            let some = pairs.iter().any(|&w| w != 0.0);
            some.then_some(n as u32)
        };
        let pairs = wanted.chunks_exact(tokens).enumerate();
        self.ids.extend(pairs.filter_map(named));
        &self.ids
    }
}
