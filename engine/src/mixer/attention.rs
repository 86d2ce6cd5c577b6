//! Grouped-query attention of one layer over paged keys and values.

use arrayvec::ArrayVec;
use emberflow_kernels::{Compute, Cpu, scale_by_sigmoid};
use emberflow_models::config::{HeadShape, ModelConfig};
use emberflow_models::names::Role;

use super::LayerPass;
use super::blockwise::{self, Layer};
use crate::error::Error;
use crate::input::Input;
use crate::lane::MATRICES;
use crate::loader::Loader;
use crate::matrix::Matrix;
use crate::scratch::Scratch;
use crate::state::Span;

/// The weights of one layer's attention.
#[derive(Debug)]
pub(crate) struct Attention {
    /// Query projection, `[heads·head_dim × d_model]`.
    pub q: Matrix,
    /// Key projection, `[kv_heads·head_dim × d_model]`; `None` in a layer that reads another
    /// layer's keys and values.
    pub k: Option<Matrix>,
    /// Value projection, of the same shape; also `None` if values are keys before their norm.
    pub v: Option<Matrix>,
    /// Output gates, applied through a sigmoid, `[heads·head_dim × d_model]`.
    pub gate: Option<Matrix>,
    /// Output projection, `[d_model × heads·head_dim]`.
    pub o: Matrix,
    /// Biases of Q, K, V.
    qkv_bias: Option<[Vec<f32>; 3]>,
    /// Bias of O.
    o_bias: Option<Vec<f32>>,
    /// RMSNorm over each head of Q and of K, or over all heads, or a LayerNorm of each head; empty for K
    /// if there is no K.
    qk_norm: Option<[Vec<f32>; 2]>,
    /// Zeros, the biases of a LayerNorm of each head; empty for RMSNorm.
    no_bias: Vec<f32>,
    /// RMSNorm over each head of V, with weights 1.
    value_norm: Option<Vec<f32>>,
    /// Attention sink: an additional logit for each query head.
    sinks: Option<Vec<f32>>,
    /// Index of the keys and values that the layer reads; it stores them if they are its own.
    place: usize,
    heads: HeadShape,
}

/// What attention makes of some rows, before its output projection.
struct HeadRows<'a> {
    /// Queries, `[rows × heads·head_dim]`.
    q: &'a mut [f32],
    /// Keys, `[rows × kv_heads·head_dim]`.
    k: &'a mut [f32],
    /// Values, of the same shape.
    v: &'a mut [f32],
    /// Output gates, `[rows × heads·head_dim]`, if the model has them.
    gate: &'a mut [f32],
    /// Mixed values, `[rows × heads·head_dim]`.
    attended: &'a mut [f32],
}

impl Attention {
    /// Elements of a row's keys, and of its values.
    pub fn stored(&self) -> usize {
        self.heads.stored()
    }

    /// Reads the weights of layer `l`.
    pub fn load(from: &Loader<'_>, c: &ModelConfig, l: u32) -> Result<Self, Error> {
        let stores = c.kv_layer(l) == l;
        let heads = c.heads_of(l);
        let [d, hd] = [c.d_model, heads.head_dim].map(|n| n as usize);
        let [q_dim, kv_dim] = [c.heads, heads.kv_heads].map(|n| n as usize * hd);
        let values = stores && !heads.key_is_value;
        let vector = |role, n| from.vector(role, l, n);
        let kv_vector = |role, n| {
            if stores {
                vector(role, n)
            } else {
                Ok(Vec::new())
            }
        };
        let biases = || -> Result<_, Error> {
            let q = vector(Role::QBias, q_dim)?;
            let v = if values {
                vector(Role::VBias, kv_dim)?
            } else {
                Vec::new()
            };
            Ok([q, kv_vector(Role::KBias, kv_dim)?, v])
        };
        let norms = || -> Result<_, Error> {
            if c.form.qk_layer_norms {
                let norm = |role, n: usize| from.rows(role, l, n / hd, hd);
                let k = stores.then(|| norm(Role::KNorm, kv_dim)).transpose()?;
                return Ok([norm(Role::QNorm, q_dim)?, k.unwrap_or_default()]);
            }
            let [q_len, k_len] = if c.qk_norm_whole {
                [q_dim, kv_dim]
            } else {
                [hd; 2]
            };
            Ok([vector(Role::QNorm, q_len)?, kv_vector(Role::KNorm, k_len)?])
        };
        let o_bias = c.o_bias.then(|| vector(Role::OBias, d));
        let sinks = c.form.sinks.then(|| vector(Role::Sinks, c.heads as usize));
        Ok(Self {
            q: from.matrix(Role::Q, l, q_dim, d)?,
            k: (stores.then(|| from.matrix(Role::K, l, kv_dim, d))).transpose()?,
            v: (values.then(|| from.matrix(Role::V, l, kv_dim, d))).transpose()?,
            gate: (c.form.output_gate)
                .then(|| from.matrix(Role::QGate, l, q_dim, d))
                .transpose()?,
            o: from.matrix(Role::O, l, d, q_dim)?,
            qkv_bias: c.qkv_bias.then(biases).transpose()?,
            o_bias: o_bias.transpose()?,
            qk_norm: if c.form.plain_qk_norm && c.rotates(l) {
                Some([vec![1.0; hd], vec![1.0; hd]])
            } else {
                c.qk_norm.then(norms).transpose()?
            },
            no_bias: vec![0.0; if c.form.qk_layer_norms { hd } else { 0 }],
            value_norm: (c.form.value_norm).then(|| vec![1.0; hd]),
            sinks: sinks.transpose()?,
            place: c.kv_place(l) as usize,
            heads,
        })
    }

    /// See [`super::Mixer::run`]. Appends the rows' keys and values.
    pub fn run(&self, on: &Compute, at: LayerPass<'_>, spans: &mut [Span<'_>], s: &mut Scratch) {
        let rows = spans.iter().map(|span| span.tokens.len()).sum();
        let normed = &s.normed[..rows * at.config.d_model as usize];
        let mut heads = HeadRows {
            q: &mut s.q,
            k: &mut s.k,
            v: &mut s.v,
            gate: &mut s.gate,
            attended: &mut s.attended,
        };
        let input = Input::new(on.cpu, normed, rows, &mut s.input);
        self.project(on, input, &mut heads, &mut s.rows);
        self.attend(on, at, spans, &mut heads, &mut s.partials);
        let mixed = &heads.attended[..rows * self.o.cols()];
        let input = Input::new(on.cpu, mixed, rows, &mut s.input);
        self.output(on, input, &mut s.rows, &mut s.out);
    }

    /// Queries, keys, values and gates of the rows of `input`; `scratch` as for [`Matrix::matmul`].
    fn project(
        &self,
        on: &Compute,
        input: Input<'_>,
        heads: &mut HeadRows<'_>,
        scratch: &mut [Vec<f32>],
    ) {
        let rows = input.tokens();
        let products = [
            (Some(&self.q), &mut *heads.q),
            (self.k.as_ref(), &mut *heads.k),
            (self.v.as_ref(), &mut *heads.v),
            (self.gate.as_ref(), &mut *heads.gate),
        ];
        let there = products
            .into_iter()
            .filter_map(|(matrix, out)| Some((matrix?, out)));
        let mut there: ArrayVec<_, MATRICES> = there.collect();
        Matrix::matmul_all(on, &mut there, input, scratch);
        drop(there);
        if let Some(biases) = &self.qkv_bias {
            let pairs = biases
                .iter()
                .zip([&mut *heads.q, &mut *heads.k, &mut *heads.v]);
            for (bias, out) in pairs.filter(|(bias, _)| !bias.is_empty()) {
                add_bias(bias, out, rows);
            }
        }
        if self.heads.key_is_value && self.k.is_some() {
            let stored = rows * self.stored();
            heads.v[..stored].copy_from_slice(&heads.k[..stored]);
        }
    }

    /// Appends the rows' keys and values, and mixes the values that each row sees; `partials` is [`Scratch::partials`].
    fn attend(
        &self,
        on: &Compute,
        at: LayerPass<'_>,
        spans: &mut [Span<'_>],
        heads: &mut HeadRows<'_>,
        partials: &mut [f32],
    ) {
        self.rotate_and_store(on, at, spans, heads);
        self.mix_values(on, at, spans, heads, partials);
        if self.gate.is_some() {
            let rows: usize = spans.iter().map(|span| span.tokens.len()).sum();
            let width = self.o.cols();
            let (mixed, gates) = (&mut heads.attended[..rows * width], &*heads.gate);
            (on.workers).for_each_chunk_mut(mixed, width, &|_, row, mixed| {
                scale_by_sigmoid(on.cpu, mixed, &gates[row * width..][..width]);
            });
        }
    }

    /// The output projection of mixed values.
    fn output(&self, on: &Compute, mixed: Input<'_>, scratch: &mut [Vec<f32>], out: &mut [f32]) {
        self.o.matmul(on, mixed, scratch, out);
        if let Some(bias) = &self.o_bias {
            add_bias(bias, out, mixed.tokens());
        }
    }

    /// Normalizes (QK norm) and rotates queries and keys, scales the queries, and stores keys and
    /// values.
    fn rotate_and_store(
        &self,
        on: &Compute,
        at: LayerPass<'_>,
        spans: &mut [Span<'_>],
        s: &mut HeadRows<'_>,
    ) {
        let (c, cpu) = (at.config, on.cpu);
        let hd = self.heads.head_dim as usize;
        let (heads, kv_heads) = (c.heads as usize, self.heads.kv_heads as usize);
        let scale = (c.form.attention_scale).unwrap_or(1.0 / libm::sqrtf(hd as f32));
        let rotates = c.rotates(at.number as u32);
        let mut row = 0;
        let rows = spans.iter().map(|span| span.tokens.len()).sum();
        self.norm_and_clip(on, c, s, rows);
        for span in spans.iter_mut() {
            let first = span.sequence.len();
            let kv = &mut span.sequence.pages;
            for position in first..first + span.tokens.len() {
                let grown = (c.form.query_scale).map_or(1.0, |growth| growth.at(position, rotates));
                let scale = scale * grown;
                let angles = rotates.then(|| at.rope.at(row));
                for h in 0..heads {
                    let head = &mut s.q[(row * heads + h) * hd..][..hd];
                    norm_and_rotate(cpu, c, head, self.norm_of(c, 0, h), angles);
                    // Once here instead of once per score.
                    head.iter_mut().for_each(|q| *q *= scale);
                }
                let mut page = kv.writer(position);
                for h in 0..kv_heads * usize::from(self.k.is_some()) {
                    let first = (row * kv_heads + h) * hd;
                    if let Some(given) = at.given {
                        let [key, value] = given.map(|all| &all[first..][..hd]);
                        page.store_key(cpu, self.place, h, key);
                        page.store_value(cpu, self.place, h, value);
                        continue;
                    }
                    let key = &mut s.k[first..][..hd];
                    norm_and_rotate(cpu, c, key, self.norm_of(c, 1, h), angles);
                    page.store_key(cpu, self.place, h, key);
                    let value = &mut s.v[first..][..hd];
                    if let Some(norm) = &self.value_norm {
                        cpu.rmsnorm_inplace(value, norm, c.rms_eps);
                    }
                    page.store_value(cpu, self.place, h, value);
                }
                row += 1;
            }
        }
    }

    /// The norm of head `h` of queries (0) or keys (1), unless it is over all heads.
    fn norm_of(&self, c: &ModelConfig, which: usize, h: usize) -> Option<HeadNorm<'_>> {
        let both = self.qk_norm.as_ref().filter(|_| !c.qk_norm_whole)?;
        let hd = self.heads.head_dim as usize;
        let layer_norm = !self.no_bias.is_empty();
        let first = if layer_norm { h * hd } else { 0 };
        Some(HeadNorm {
            weight: &both[which][first..first + hd],
            bias: layer_norm.then_some(&self.no_bias[..]),
        })
    }

    /// Steps before the rotation that are not per head: norms over all heads, and the clamp.
    fn norm_and_clip(&self, on: &Compute, c: &ModelConfig, s: &mut HeadRows<'_>, rows: usize) {
        if let Some([q_norm, k_norm]) = self.qk_norm.as_ref().filter(|_| c.qk_norm_whole) {
            let both = [(&mut *s.q, q_norm), (&mut *s.k, k_norm)];
            for (values, norm) in both.into_iter().filter(|(_, norm)| !norm.is_empty()) {
                for row in values.chunks_exact_mut(norm.len()).take(rows) {
                    on.cpu.rmsnorm_inplace(row, norm, c.rms_eps);
                }
            }
        }
        if let Some(clip) = c.clip_qkv {
            let [q, kv] = [self.q.rows(), self.stored()].map(|n| rows * n);
            for (values, len) in [(&mut *s.q, q), (&mut *s.k, kv), (&mut *s.v, kv)] {
                values[..len]
                    .iter_mut()
                    .for_each(|x| *x = x.clamp(-clip, clip));
            }
        }
    }

    /// Attention of each row over its visible positions.
    fn mix_values(
        &self,
        on: &Compute,
        at: LayerPass<'_>,
        spans: &mut [Span<'_>],
        heads: &mut HeadRows<'_>,
        partials: &mut [f32],
    ) {
        let c = at.config;
        let [head_dim, queries, kv_heads] =
            [self.heads.head_dim, c.heads, self.heads.kv_heads].map(|n| n as usize);
        let layer = Layer {
            place: self.place,
            head_dim,
            value_dim: head_dim,
            kv_heads,
            group: queries / kv_heads,
            reach: c.reach(at.number as u32),
            pools: None,
            sinks: self.sinks.as_deref(),
            cap: c.form.attention_cap,
        };
        blockwise::run(on, spans, layer, heads.q, heads.attended, partials);
    }
}

/// A norm of one head of queries or keys.
#[derive(Clone, Copy)]
struct HeadNorm<'a> {
    weight: &'a [f32],
    /// Biases of a LayerNorm; `None` for RMSNorm.
    bias: Option<&'a [f32]>,
}

impl HeadNorm<'_> {
    fn apply(self, cpu: Cpu, head: &mut [f32], eps: f32) {
        match self.bias {
            None => cpu.rmsnorm_inplace(head, self.weight, eps),
            Some(bias) => cpu.layernorm_inplace(head, self.weight, bias, eps),
        }
    }
}

/// Normalizes and rotates a head of queries or keys, if it has a norm and angles.
fn norm_and_rotate(
    cpu: Cpu,
    c: &ModelConfig,
    head: &mut [f32],
    norm: Option<HeadNorm<'_>>,
    angles: Option<(&[f32], &[f32])>,
) {
    let late = c.form.rotated_qk_norm || c.form.plain_qk_norm;
    if let Some(norm) = norm.filter(|_| !late) {
        norm.apply(cpu, head, c.rms_eps);
    }
    if let Some((cos, sin)) = angles {
        cpu.rope_rotate_half(head, cos, sin);
    }
    if let Some(norm) = norm.filter(|_| late) {
        norm.apply(cpu, head, c.rms_eps);
    }
}

/// Adds `bias` to each of the first `count` rows.
fn add_bias(bias: &[f32], rows: &mut [f32], count: usize) {
    for row in rows.chunks_exact_mut(bias.len()).take(count) {
        for (y, b) in row.iter_mut().zip(bias) {
            *y += b;
        }
    }
}
