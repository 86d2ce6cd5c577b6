//! Predicts the next layer's experts: its router is applied to the residual stream one layer early.
//!
//! The residual stream changes little from layer to layer, so most predictions are right. Predicted
//! experts are read after the needs of this layer and change no result.

use std::sync::Arc;

use emberflow_kernels::{Activations, Compute};
use emberflow_models::config::ModelConfig;

use crate::ffn::FfnBiases;
use crate::input::Input;
use crate::matrix::Matrix;
use crate::norm::{Norm, rows_or_copy};
use crate::router::{Router, Routes};
use crate::store::NeuronStore;

/// What a layer knows of the next one with an FFN, to guess what it reads.
#[derive(Debug, Clone)]
pub(crate) struct Upcoming {
    /// The norm whose output the FFN reads; `None` if it reads the residual stream.
    pub norm: Option<Arc<Norm>>,
    pub biases: Option<Arc<FfnBiases>>,
    pub router: Option<Arc<Router>>,
}

/// Buffers for one token.
pub(crate) struct RouterAhead {
    normed: Vec<f32>,
    input: Activations,
    rows: Vec<Vec<f32>>,
    routes: Routes,
    banks: Vec<u32>,
}

impl RouterAhead {
    /// `None` for a model without experts.
    pub fn new(c: &ModelConfig, threads: usize) -> Option<Self> {
        let mixture = c.mixture.as_ref()?;
        let d = c.d_model as usize;
        Some(Self {
            normed: vec![0.0; d],
            input: Activations::with_capacity(d, 1),
            rows: vec![vec![0.0; Matrix::scratch_len(d)]; threads],
            routes: Routes::new(c, 1),
            banks: Vec::with_capacity(mixture.chosen as usize),
        })
    }

    /// Bytes allocated by [`RouterAhead::new`].
    pub fn bytes_for(c: &ModelConfig, threads: usize) -> u64 {
        let d = c.d_model as usize;
        let floats = d + threads * Matrix::scratch_len(d);
        match c.mixture {
            Some(_) => (4 * floats + Activations::bytes(d, 1) + Routes::bytes_for(c, 1)) as u64,
            None => 0,
        }
    }

    /// Banks of the layer of `next` that `token` with residual stream `x` is likely to visit, most likely
    /// first; empty for a dense layer. The layer's first bank is `first`.
    fn banks(
        &mut self,
        on: &Compute,
        c: &ModelConfig,
        next: &Upcoming,
        token: u32,
        x: &[f32],
        first: u32,
    ) -> &[u32] {
        let (Some(router), Some(mixture)) = (&next.router, &c.mixture) else {
            return &[];
        };
        self.banks.clear();
        self.routes.set_tokens(std::iter::once(token));
        if let Some(chosen) = self.routes.of_token(on, router, 0) {
            (self.banks).extend(chosen.iter().map(|choice| first + choice.expert));
            return &self.banks;
        }
        let norm = router.norm.as_ref().or(next.norm.as_deref());
        let norm = norm.filter(|_| !mixture.early_router);
        rows_or_copy(norm, on.cpu, x, &mut self.normed);
        let cpu = on.cpu.pruning(false);
        let input = Input::new(cpu, &self.normed, 1, &mut self.input);
        self.routes
            .choose(on, router, mixture, input, &mut self.rows);
        let chosen = self.routes.choices(1).iter();
        self.banks
            .extend(chosen.map(|choice| first + choice.expert));
        &self.banks
    }
}

/// Banks of `next`, FFN `place`, that the token of a pass with one row, given by its residual
/// stream, is likely to visit, most likely first; empty if nothing is predicted.
pub(crate) fn likely_banks<'a>(
    ahead: &'a mut Option<RouterAhead>,
    store: &NeuronStore,
    on: &Compute,
    c: &ModelConfig,
    next: &Upcoming,
    place: usize,
    row: Option<(u32, &[f32])>,
) -> &'a [u32] {
    match (ahead, row) {
        (Some(ahead), Some((token, x))) if store.foresees(place) => {
            let first = store.layout.banks_of(place).start;
            ahead.banks(on, c, next, token, x, first)
        }
        _ => &[],
    }
}
