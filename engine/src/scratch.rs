//! Working memory of a forward pass, allocated once.

use std::cell::RefCell;
use std::sync::atomic::{AtomicUsize, Ordering};

use emberflow_kernels::Activations;
use emberflow_models::config::ModelConfig;

use crate::attention::thread_floats;
use crate::ffn;
use crate::weights::Matrix;

thread_local! {
    static BUFFER: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Length that every thread's buffer takes at its first use, so that it grows once
/// and the token path does not allocate.
static BUFFER_LEN: AtomicUsize = AtomicUsize::new(0);

/// Runs `f` with this thread's buffer of at least `len` floats. The buffer is kept.
/// Contents are whatever the last use left.
pub(crate) fn with_thread_buffer<R>(len: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    BUFFER.with_borrow_mut(|buffer| {
        if buffer.len() < len {
            buffer.resize(len.max(BUFFER_LEN.load(Ordering::Relaxed)), 0.0);
        }
        f(&mut buffer[..len])
    })
}

/// Floats of a thread's buffer for chunks of `chunk` tokens.
fn thread_buffer_len(c: &ModelConfig, chunk: usize) -> usize {
    let group = c.heads as usize / c.kv_heads.max(1) as usize;
    let attention = thread_floats(c.head_dim as usize, group, chunk);
    attention.max(ffn::thread_floats(c.d_model as usize, chunk))
}

/// Buffers for chunks of up to `chunk` tokens.
#[derive(Debug)]
pub struct Scratch {
    /// Residual stream, `[chunk × d_model]`.
    pub x: Vec<f32>,
    /// Normalised input of a block, `[chunk × d_model]`.
    pub normed: Vec<f32>,
    /// Output of a block, `[chunk × d_model]`.
    pub out: Vec<f32>,
    /// Queries, `[chunk × heads·head_dim]`.
    pub q: Vec<f32>,
    /// Keys, `[chunk × kv_heads·head_dim]`.
    pub k: Vec<f32>,
    /// Values, `[chunk × kv_heads·head_dim]`.
    pub v: Vec<f32>,
    /// Attention output before the projection, `[chunk × heads·head_dim]`.
    pub attended: Vec<f32>,
    /// Decoded rows of multi-token matrix products, one buffer per thread.
    pub rows: Vec<Vec<f32>>,
    /// The input of a matrix, quantised.
    pub input: Activations,
    /// Logits of one token of each sequence, `[batch × vocab]`.
    pub logits: Vec<f32>,
}

impl Scratch {
    /// Allocates for a model, a chunk length, logits of `batch` tokens and a thread count.
    pub fn new(c: &ModelConfig, chunk: usize, batch: usize, threads: usize) -> Self {
        let [d, q, kv, vocab] = widths(c);
        BUFFER_LEN.fetch_max(thread_buffer_len(c, chunk), Ordering::Relaxed);
        Self {
            x: vec![0.0; chunk * d],
            normed: vec![0.0; chunk * d],
            out: vec![0.0; chunk * d],
            q: vec![0.0; chunk * q],
            k: vec![0.0; chunk * kv],
            v: vec![0.0; chunk * kv],
            attended: vec![0.0; chunk * q],
            rows: vec![vec![0.0; Matrix::scratch_len(d.max(q))]; threads],
            input: Activations::with_capacity(d.max(q), chunk),
            logits: vec![0.0; batch * vocab],
        }
    }

    /// Bytes that [`Scratch::new`] allocates, and the per-thread buffers.
    pub fn bytes_for(c: &ModelConfig, chunk: usize, batch: usize, threads: usize) -> u64 {
        let [d, q, kv, vocab] = widths(c);
        let shared = chunk * (3 * d + 2 * q + 2 * kv) + batch * vocab;
        let per_thread = thread_buffer_len(c, chunk) + Matrix::scratch_len(d.max(q));
        let input = Activations::bytes(d.max(q), chunk);
        (4 * (shared + threads * per_thread) + input) as u64
    }
}

fn widths(c: &ModelConfig) -> [usize; 4] {
    [
        c.d_model as usize,
        c.heads as usize * c.head_dim as usize,
        c.kv_heads as usize * c.head_dim as usize,
        c.vocab as usize,
    ]
}
