//! Grouped-query attention of one layer over paged keys and values.

use arrayvec::ArrayVec;
use emberflow_kernels::{Compute, Cpu, scale_by_sigmoid};
use emberflow_models::config::{HeadShape, ModelConfig};
use emberflow_models::names::Role;

use super::blockwise::{self, Layer, ScoreSizes};
use super::mix::Mix;
use super::needs::buffers;
use super::{LayerPass, Matrices, MatrixSpec, Needs};
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
    sizes: Sizes,
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
}

/// Sizes of a layer.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    /// Query heads.
    heads: usize,
    kv: HeadShape,
    /// The layer has keys and values of its own, and does not read those of another one.
    stores: bool,
    /// Outputs have gates, applied through a sigmoid.
    gated: bool,
}

impl Sizes {
    fn new(c: &ModelConfig, layer: u32) -> Self {
        Self {
            heads: c.heads as usize,
            kv: c.heads_of(layer),
            stores: c.kv_layer(layer) == layer,
            gated: c.form.output_gate,
        }
    }

    fn head_dim(self) -> usize {
        self.kv.head_dim as usize
    }

    /// Width of all queries.
    fn queries(self) -> usize {
        self.heads * self.head_dim()
    }

    /// Width of the keys, and of the values, that the layer stores.
    fn stored(self) -> usize {
        self.kv.stored() * usize::from(self.stores)
    }

    /// Whether values have a projection; otherwise they are keys before their norm.
    fn projects_values(self) -> bool {
        self.stores && !self.kv.key_is_value
    }
}

buffers! { sizes: Sizes {
    /// Mixed values.
    mixed: sizes.queries(),
    queries: sizes.queries(),
    keys: sizes.stored(),
    values: sizes.stored(),
    /// Gates of the output.
    gates: sizes.queries() * usize::from(sizes.gated),
} }

/// What layer `layer` needs.
pub(super) fn needs(c: &ModelConfig, layer: u32) -> Needs {
    let (d, sizes) = (c.d_model as usize, Sizes::new(c, layer));
    let (queries, stored) = (sizes.queries(), sizes.stored());
    let input = |role, rows, exists: bool| exists.then(|| MatrixSpec::input(role, rows, d));
    let matrices = [
        input(Role::Q, queries, true),
        input(Role::K, stored, sizes.stores),
        input(Role::V, stored, sizes.projects_values()),
        input(Role::QGate, queries, sizes.gated),
        Some(MatrixSpec::output(Role::O, d, queries)),
    ];
    Needs {
        matrices: matrices.into_iter().flatten().collect(),
        row_floats: widths(sizes).iter().sum(),
        state_floats: 0,
        input_floats: 0,
        scores: Some(ScoreSizes {
            head_dim: sizes.head_dim(),
            heads: sizes.heads,
            kv_heads: sizes.kv.kv_heads as usize,
            latent: false,
            pool: 0,
        }),
    }
}

impl Attention {
    /// Reads the weights of layer `l`.
    pub fn load(from: &Loader<'_>, c: &ModelConfig, l: u32) -> Result<Self, Error> {
        let sizes = Sizes::new(c, l);
        let (stores, hd) = (sizes.stores, sizes.head_dim());
        let (q_dim, kv_dim) = (sizes.queries(), sizes.stored());
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
            let v = if sizes.projects_values() {
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
        let o_bias = c.o_bias.then(|| vector(Role::OBias, c.d_model as usize));
        let sinks = c.form.sinks.then(|| vector(Role::Sinks, sizes.heads));
        Ok(Self {
            sizes,
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
        })
    }

    /// Queries, keys, values and gates of the rows of `input`; `scratch` as for [`Matrix::matmul`].
    fn project(
        &self,
        on: &Compute,
        matrices: &Matrices,
        input: Input<'_>,
        b: &mut Buffers<'_>,
        scratch: &mut [Vec<f32>],
    ) {
        let rows = input.tokens();
        let products = [
            (Role::Q, &mut *b.queries),
            (Role::K, &mut *b.keys),
            (Role::V, &mut *b.values),
            (Role::QGate, &mut *b.gates),
        ];
        let there = products
            .into_iter()
            .filter_map(|(role, out)| Some((matrices.get(role)?, out)));
        let mut there: ArrayVec<_, MATRICES> = there.collect();
        Matrix::matmul_all(on, &mut there, input, scratch);
        drop(there);
        if let Some(biases) = &self.qkv_bias {
            let pairs = biases
                .iter()
                .zip([&mut *b.queries, &mut *b.keys, &mut *b.values]);
            for (bias, out) in pairs.filter(|(bias, _)| !bias.is_empty()) {
                add_bias(bias, out, rows);
            }
        }
        if self.sizes.kv.key_is_value {
            b.values.copy_from_slice(b.keys);
        }
    }

    /// Appends the rows' keys and values, and mixes the values that each row sees; `partials` is [`Scratch::partials`].
    fn attend(
        &self,
        on: &Compute,
        at: LayerPass<'_>,
        spans: &mut [Span<'_>],
        b: &mut Buffers<'_>,
        partials: &mut [f32],
    ) {
        self.rotate_and_store(on, at, spans, b);
        self.mix_values(on, at, spans, b, partials);
        if self.sizes.gated {
            let (width, gates) = (self.sizes.queries(), &*b.gates);
            (on.workers).for_each_chunk_mut(b.mixed, width, &|_, row, mixed| {
                scale_by_sigmoid(on.cpu, mixed, &gates[row * width..][..width]);
            });
        }
    }

    /// Normalizes (QK norm) and rotates queries and keys, scales the queries, and stores keys and
    /// values.
    fn rotate_and_store(
        &self,
        on: &Compute,
        at: LayerPass<'_>,
        spans: &mut [Span<'_>],
        b: &mut Buffers<'_>,
    ) {
        let (c, cpu) = (at.config, on.cpu);
        let (hd, heads) = (self.sizes.head_dim(), self.sizes.heads);
        let kv_heads = self.sizes.kv.kv_heads as usize;
        let scale = (c.form.attention_scale).unwrap_or(1.0 / libm::sqrtf(hd as f32));
        let rotates = c.rotates(at.number as u32);
        let mut row = 0;
        self.norm_and_clip(on, c, b);
        for span in spans.iter_mut() {
            let first = span.sequence.len();
            let kv = &mut span.sequence.pages;
            for position in first..first + span.tokens.len() {
                let grown = (c.form.query_scale).map_or(1.0, |growth| growth.at(position, rotates));
                let scale = scale * grown;
                let angles = rotates.then(|| at.rope.at(row));
                for h in 0..heads {
                    let head = &mut b.queries[(row * heads + h) * hd..][..hd];
                    norm_and_rotate(cpu, c, head, self.norm_of(c, 0, h), angles);
                    // Once here instead of once per score.
                    head.iter_mut().for_each(|q| *q *= scale);
                }
                let mut page = kv.writer(position);
                for h in 0..kv_heads * usize::from(self.sizes.stores) {
                    let first = (row * kv_heads + h) * hd;
                    if let Some(given) = at.given {
                        let [key, value] = given.map(|all| &all[first..][..hd]);
                        page.store_key(cpu, self.place, h, key);
                        page.store_value(cpu, self.place, h, value);
                        continue;
                    }
                    let key = &mut b.keys[first..][..hd];
                    norm_and_rotate(cpu, c, key, self.norm_of(c, 1, h), angles);
                    page.store_key(cpu, self.place, h, key);
                    let value = &mut b.values[first..][..hd];
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
        let hd = self.sizes.head_dim();
        let layer_norm = !self.no_bias.is_empty();
        let first = if layer_norm { h * hd } else { 0 };
        Some(HeadNorm {
            weight: &both[which][first..first + hd],
            bias: layer_norm.then_some(&self.no_bias[..]),
        })
    }

    /// Steps before the rotation that are not per head: norms over all heads, and the clamp.
    fn norm_and_clip(&self, on: &Compute, c: &ModelConfig, b: &mut Buffers<'_>) {
        if let Some([q_norm, k_norm]) = self.qk_norm.as_ref().filter(|_| c.qk_norm_whole) {
            let both = [(&mut *b.queries, q_norm), (&mut *b.keys, k_norm)];
            for (values, norm) in both.into_iter().filter(|(_, norm)| !norm.is_empty()) {
                for row in values.chunks_exact_mut(norm.len()) {
                    on.cpu.rmsnorm_inplace(row, norm, c.rms_eps);
                }
            }
        }
        if let Some(clip) = c.clip_qkv {
            for values in [&mut *b.queries, &mut *b.keys, &mut *b.values] {
                values.iter_mut().for_each(|x| *x = x.clamp(-clip, clip));
            }
        }
    }

    /// Attention of each row over its visible positions.
    fn mix_values(
        &self,
        on: &Compute,
        at: LayerPass<'_>,
        spans: &mut [Span<'_>],
        b: &mut Buffers<'_>,
        partials: &mut [f32],
    ) {
        let c = at.config;
        let (head_dim, kv_heads) = (self.sizes.head_dim(), self.sizes.kv.kv_heads as usize);
        let layer = Layer {
            place: self.place,
            head_dim,
            value_dim: head_dim,
            kv_heads,
            group: self.sizes.heads / kv_heads,
            reach: c.reach(at.number as u32),
            pools: None,
            sinks: self.sinks.as_deref(),
            cap: c.form.attention_cap,
        };
        blockwise::run(on, spans, layer, b.queries, b.mixed, partials);
    }
}

impl Mix for Attention {
    /// Appends the rows' keys and values.
    fn run(
        &self,
        on: &Compute,
        matrices: &Matrices,
        at: LayerPass<'_>,
        spans: &mut [Span<'_>],
        s: &mut Scratch,
    ) {
        let rows = spans.iter().map(|span| span.tokens.len()).sum();
        let normed = &s.normed[..rows * at.config.d_model as usize];
        let b = &mut Buffers::split(self.sizes, rows, &mut s.block);
        let input = Input::new(on.cpu, normed, rows, &mut s.input);
        self.project(on, matrices, input, b, &mut s.rows);
        self.attend(on, at, spans, b, &mut s.partials);
        let input = Input::new(on.cpu, b.mixed, rows, &mut s.input);
        matrices[Role::O].matmul(on, input, &mut s.rows, &mut s.out);
        if let Some(bias) = &self.o_bias {
            add_bias(bias, &mut s.out, rows);
        }
    }

    fn stored<'a>(&self, rows: usize, s: &'a Scratch) -> [&'a [f32]; 2] {
        let [_, _, keys, values, _] = s.block.view(rows, widths(self.sizes));
        [keys, values]
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
