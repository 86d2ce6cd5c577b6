//! Grouped-query attention of one layer over paged keys and values.

mod pass;
#[cfg(test)]
mod tests;

use arrayvec::ArrayVec;
use emberflow_kernels::Compute;
use emberflow_models::config::ModelConfig;

use crate::device::products::TOGETHER;
use crate::input::Input;
use crate::matrix::Matrix;
use crate::norm::rows_or_copy;
use crate::rope::RopeTable;
use crate::scratch::Scratch;
use crate::sequence::Span;
use crate::weights::LayerWeights;

use pass::Pass;
pub(crate) use pass::thread_floats;

/// One layer's attention.
#[derive(Clone, Copy)]
pub(crate) struct AttentionLayer<'a> {
    pub config: &'a ModelConfig,
    pub weights: &'a LayerWeights,
    /// Index of the layer.
    pub number: usize,
    /// Rotary angles of the rows' positions.
    pub rope: &'a RopeTable,
    /// What is stored instead of its keys and values, `[rows × kv_heads·head_dim]` each.
    pub given: Option<[&'a [f32]; 2]>,
}

impl AttentionLayer<'_> {
    /// `scratch.out[row] = O · attention(norm(x[row]))` for the rows of the spans, each over its own
    /// sequence. Appends their keys and values.
    pub fn run(&self, on: &Compute, x: &[f32], spans: &mut [Span<'_>], s: &mut Scratch) {
        let (c, layer) = (self.config, self.weights);
        // q, k, v: [rows × heads·head_dim]
        let d = c.d_model as usize;
        let rows = x.len() / d;
        rows_or_copy(layer.attn_norm.as_ref(), on.cpu, x, &mut s.normed);
        let input = Input::new(on.cpu, &s.normed[..rows * d], rows, &mut s.input);
        let all = [
            (Some(&layer.q), &mut s.q),
            (layer.k.as_ref(), &mut s.k),
            (layer.v.as_ref(), &mut s.v),
        ];
        let there = all
            .into_iter()
            .filter_map(|(matrix, out)| Some((matrix?, &mut out[..])));
        let mut there: ArrayVec<_, TOGETHER> = there.collect();
        Matrix::matmul_all(on, &mut there, input, &mut s.rows);
        drop(there);
        if let Some(biases) = &layer.qkv_bias {
            let all = biases.iter().zip([&mut s.q, &mut s.k, &mut s.v]);
            for (bias, out) in all.filter(|(bias, _)| !bias.is_empty()) {
                add_bias(bias, out, rows);
            }
        }
        self.rotate_and_store(on, spans, s);
        self.attend(on, spans, rows, s);
        let width = c.heads as usize * c.head_dim as usize;
        let input = Input::new(on.cpu, &s.attended[..rows * width], rows, &mut s.input);
        layer.o.matmul(on, input, &mut s.rows, &mut s.out);
        if let Some(bias) = &layer.o_bias {
            add_bias(bias, &mut s.out, rows);
        }
    }

    /// Normalizes (QK norm) and rotates queries and keys, scales the queries, and stores keys and
    /// values.
    fn rotate_and_store(&self, on: &Compute, spans: &mut [Span<'_>], s: &mut Scratch) {
        let (c, layer, cpu) = (self.config, self.weights, on.cpu);
        let hd = c.head_dim as usize;
        let (heads, kv_heads) = (c.heads as usize, c.kv_heads as usize);
        let scale = (c.form.attention_scale).unwrap_or(1.0 / libm::sqrtf(hd as f32));
        let rotates = c.rotates(self.number as u32);
        let mut row = 0;
        self.norm_and_clip(on, s, spans.iter().map(|span| span.tokens.len()).sum());
        let by_head = layer.qk_norm.as_ref().filter(|_| !c.qk_norm_whole);
        for span in spans.iter_mut() {
            let first = span.sequence.len();
            let kv = &mut span.sequence.kv;
            for position in first..first + span.tokens.len() {
                let (cos, sin) = match rotates {
                    true => self.rope.at(row),
                    false => (&[][..], &[][..]),
                };
                for h in 0..heads {
                    let head = &mut s.q[(row * heads + h) * hd..][..hd];
                    if let Some([q_norm, _]) = by_head {
                        cpu.rmsnorm_inplace(head, q_norm, c.rms_eps);
                    }
                    if rotates {
                        cpu.rope_rotate_half(head, cos, sin);
                    }
                    // Once here instead of once per score.
                    head.iter_mut().for_each(|q| *q *= scale);
                }
                let mut page = kv.writer(position);
                for h in 0..kv_heads * usize::from(layer.k.is_some()) {
                    let at = (row * kv_heads + h) * hd;
                    if let Some(given) = self.given {
                        let [key, value] = given.map(|all| &all[at..][..hd]);
                        page.store_key(cpu, self.number, h, key);
                        page.store_value(cpu, self.number, h, value);
                        continue;
                    }
                    let key = &mut s.k[at..][..hd];
                    if let Some([_, k_norm]) = by_head {
                        cpu.rmsnorm_inplace(key, k_norm, c.rms_eps);
                    }
                    if rotates {
                        cpu.rope_rotate_half(key, cos, sin);
                    }
                    page.store_key(cpu, self.number, h, key);
                    let value = &mut s.v[at..][..hd];
                    if let Some(norm) = &layer.value_norm {
                        cpu.rmsnorm_inplace(value, norm, c.rms_eps);
                    }
                    page.store_value(cpu, self.number, h, value);
                }
                row += 1;
            }
        }
    }

    /// What comes before the rotation and is not by head: norms over all heads, and the clamp.
    fn norm_and_clip(&self, on: &Compute, s: &mut Scratch, rows: usize) {
        let (c, layer) = (self.config, self.weights);
        if let Some([q_norm, k_norm]) = layer.qk_norm.as_ref().filter(|_| c.qk_norm_whole) {
            let both = [(&mut s.q, q_norm), (&mut s.k, k_norm)];
            for (values, norm) in both.into_iter().filter(|(_, norm)| !norm.is_empty()) {
                for row in values.chunks_exact_mut(norm.len()).take(rows) {
                    on.cpu.rmsnorm_inplace(row, norm, c.rms_eps);
                }
            }
        }
        if let Some(clip) = c.clip_qkv {
            let [q, kv] = [c.heads, c.kv_heads].map(|n| rows * n as usize * c.head_dim as usize);
            for (values, len) in [(&mut s.q, q), (&mut s.k, kv), (&mut s.v, kv)] {
                values[..len]
                    .iter_mut()
                    .for_each(|x| *x = x.clamp(-clip, clip));
            }
        }
    }

    /// Attention of each row over its visible positions.
    fn attend(&self, on: &Compute, spans: &mut [Span<'_>], rows: usize, s: &mut Scratch) {
        let c = self.config;
        let (hd, heads, kv_heads) = (c.head_dim as usize, c.heads as usize, c.kv_heads as usize);
        let width = heads * hd;
        let pass = |kv, row: usize, first, tokens| Pass {
            cpu: on.cpu,
            kv,
            queries: &s.q[row * width..],
            head_dim: hd,
            kv_heads,
            group: heads / kv_heads,
            first,
            tokens,
            window: c.window[self.number] as usize,
            sinks: self.weights.sinks.as_deref(),
            cap: c.form.attention_cap,
        };
        // whose keys and values it reads
        let source = c.kv_layer(self.number as u32) as usize;
        let attended = &mut s.attended[..rows * width];
        if spans.len() == rows && pass::enough_rows(&on.workers, rows * kv_heads) {
            let spans = &*spans;
            let one = |row: usize| {
                let sequence = &*spans[row].sequence;
                pass(sequence.kv.layer(source), row, sequence.len(), 1)
            };
            pass::run_rows(&on.workers, kv_heads, attended, one);
            return;
        }
        let mut row = 0;
        for span in spans {
            let (first, n) = (span.sequence.len(), span.tokens.len());
            let kv = span.sequence.kv.layer(source);
            let out = &mut attended[row * width..(row + n) * width];
            pass(kv, row, first, n).run(&on.workers, out, &mut s.partials);
            row += n;
        }
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
