//! Grouped-query attention of one layer over the KV cache.

use emberflow_kernels::{Cpu, Workers};
use emberflow_models::config::ModelConfig;

use crate::kv_cache::{Half, KvCache};
use crate::rope::RopeTable;
use crate::scratch::{Scratch, with_thread_buffer};
use crate::weights::Layer;

/// `scratch.out[t] = O · attention(normed[t])` for the `tokens` positions that
/// start at `first`; their keys and values are appended to `kv`.
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
    kv: &mut KvCache,
    first: usize,
    tokens: usize,
    s: &mut Scratch,
) {
    let hd = c.head_dim as usize;
    let (heads, kv_heads) = (c.heads as usize, c.kv_heads as usize);

    // q, k, v: [tokens × heads·head_dim]
    for (matrix, out) in [
        (&layer.q, &mut s.q),
        (&layer.k, &mut s.k),
        (&layer.v, &mut s.v),
    ] {
        matrix.matmul(cpu, workers, &s.normed, tokens, &mut s.rows, out);
    }
    if let Some(biases) = &layer.qkv_bias {
        for (bias, out) in biases.iter().zip([&mut s.q, &mut s.k, &mut s.v]) {
            add_bias(bias, out, tokens);
        }
    }
    for t in 0..tokens {
        let (cos, sin) = rope.at(t);
        for h in 0..heads {
            let head = &mut s.q[(t * heads + h) * hd..][..hd];
            if let Some([q_norm, _]) = &layer.qk_norm {
                cpu.rmsnorm_inplace(head, q_norm, c.rms_eps);
            }
            cpu.rope_rotate_half(head, cos, sin);
        }
        for h in 0..kv_heads {
            let at = (t * kv_heads + h) * hd;
            let key = &mut s.k[at..][..hd];
            if let Some([_, k_norm]) = &layer.qk_norm {
                cpu.rmsnorm_inplace(key, k_norm, c.rms_eps);
            }
            cpu.rope_rotate_half(key, cos, sin);
            kv.store(cpu, index, Half::Keys, h, first + t, key);
            kv.store(cpu, index, Half::Values, h, first + t, &s.v[at..][..hd]);
        }
    }

    // one (token, head) pair per work item
    let window = c.window[index] as usize;
    let scale = 1.0 / libm::sqrtf(hd as f32);
    let group = heads / kv_heads;
    let (kv, q) = (&*kv, &s.q);
    workers.for_each_chunk_mut(
        &mut s.attended[..tokens * heads * hd],
        hd,
        &|_, item, out| {
            let (t, h) = (item / heads, item % heads);
            let position = first + t;
            let from = if window == 0 {
                0
            } else {
                (position + 1).saturating_sub(window)
            };
            let query = &q[item * hd..][..hd];
            // at its full size from the start, so that a growing context allocates nothing
            with_thread_buffer(kv.capacity(), |buffer| {
                let scores = &mut buffer[..position + 1 - from];
                for (p, score) in (from..).zip(scores.iter_mut()) {
                    *score = scale * cpu.dot(kv.row(index, Half::Keys, h / group, p), query);
                }
                cpu.softmax(scores);
                out.fill(0.0);
                for (p, &score) in (from..).zip(scores.iter()) {
                    cpu.axpy(score, kv.row(index, Half::Values, h / group, p), out);
                }
            });
        },
    );

    layer
        .o
        .matmul(cpu, workers, &s.attended, tokens, &mut s.rows, &mut s.out);
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
