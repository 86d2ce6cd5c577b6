//! Grouped-query attention of one layer over the KV cache.

mod pass;
#[cfg(test)]
mod tests;

use emberflow_kernels::{Cpu, Workers};
use emberflow_models::config::ModelConfig;

use crate::forward::Span;
use crate::input::Input;
use crate::rope::RopeTable;
use crate::scratch::Scratch;
use crate::weights::Layer;

use pass::Pass;
pub(crate) use pass::thread_floats;

/// `scratch.out[t] = O · attention(normed[t])` for the `tokens` rows of the spans, each over
/// its own sequence; their keys and values are appended there.
#[expect(
    clippy::too_many_arguments,
    reason = "the parts of the engine, each borrowed apart"
)]
pub(crate) fn attention(
    cpu: Cpu,
    workers: &Workers,
    c: &ModelConfig,
    layer: &Layer,
    index: usize,
    rope: &RopeTable,
    spans: &mut [Span<'_>],
    tokens: usize,
    s: &mut Scratch,
) {
    let hd = c.head_dim as usize;
    let (heads, kv_heads) = (c.heads as usize, c.kv_heads as usize);

    // q, k, v: [tokens × heads·head_dim]
    let d = c.d_model as usize;
    let input = Input::new(cpu, &s.normed[..tokens * d], tokens, &mut s.input);
    for (matrix, out) in [
        (&layer.q, &mut s.q),
        (&layer.k, &mut s.k),
        (&layer.v, &mut s.v),
    ] {
        matrix.matmul(cpu, workers, input, &mut s.rows, out);
    }
    if let Some(biases) = &layer.qkv_bias {
        for (bias, out) in biases.iter().zip([&mut s.q, &mut s.k, &mut s.v]) {
            add_bias(bias, out, tokens);
        }
    }
    let scale = 1.0 / libm::sqrtf(hd as f32);
    let mut t = 0;
    for span in spans.iter_mut() {
        let first = span.sequence.len();
        let kv = &mut span.sequence.kv;
        for position in first..first + span.tokens.len() {
            let (cos, sin) = rope.at(t);
            for h in 0..heads {
                let head = &mut s.q[(t * heads + h) * hd..][..hd];
                if let Some([q_norm, _]) = &layer.qk_norm {
                    cpu.rmsnorm_inplace(head, q_norm, c.rms_eps);
                }
                cpu.rope_rotate_half(head, cos, sin);
                // Here once, and not in every score.
                head.iter_mut().for_each(|q| *q *= scale);
            }
            for h in 0..kv_heads {
                let at = (t * kv_heads + h) * hd;
                let key = &mut s.k[at..][..hd];
                if let Some([_, k_norm]) = &layer.qk_norm {
                    cpu.rmsnorm_inplace(key, k_norm, c.rms_eps);
                }
                cpu.rope_rotate_half(key, cos, sin);
                kv.store_key(cpu, index, h, position, key);
                kv.store_value(cpu, index, h, position, &s.v[at..][..hd]);
            }
            t += 1;
        }
    }

    let width = heads * hd;
    let pass = |kv, row: usize, first, tokens| Pass {
        cpu,
        kv,
        queries: &s.q[row * width..],
        head_dim: hd,
        kv_heads,
        group: heads / kv_heads,
        first,
        tokens,
        window: c.window[index] as usize,
    };
    let attended = &mut s.attended[..tokens * width];
    if spans.len() == tokens && pass::enough_rows(workers, tokens * kv_heads) {
        let spans = &*spans;
        let one = |row: usize| {
            let sequence = &*spans[row].sequence;
            pass(sequence.kv.layer(index), row, sequence.len(), 1)
        };
        pass::run_rows(workers, kv_heads, attended, one);
    } else {
        let mut row = 0;
        for span in spans {
            let (first, n) = (span.sequence.len(), span.tokens.len());
            let (kv, partials) = span.sequence.kv.parts(index);
            let out = &mut attended[row * width..(row + n) * width];
            pass(kv, row, first, n).run(workers, out, partials);
            row += n;
        }
    }

    let attended = &s.attended[..tokens * heads * hd];
    let input = Input::new(cpu, attended, tokens, &mut s.input);
    layer.o.matmul(cpu, workers, input, &mut s.rows, &mut s.out);
    if let Some(bias) = &layer.o_bias {
        add_bias(bias, &mut s.out, tokens);
    }
}

fn add_bias(bias: &[f32], rows: &mut [f32], tokens: usize) {
    for row in rows.chunks_exact_mut(bias.len()).take(tokens) {
        for (y, b) in row.iter_mut().zip(bias) {
            *y += b;
        }
    }
}
