//! The forward pass, top to bottom.

use std::time::{Duration, Instant};

use emberflow_kernels::{Cpu, Workers};
use emberflow_models::config::ModelConfig;

use crate::Error;
use crate::attention::attention;
use crate::ffn::{Ffn, FfnSeen};
use crate::input::Input;
use crate::rope::RopeTable;
use crate::scratch::Scratch;
use crate::sequence::Sequence;
use crate::weights::Weights;

/// Which positions' logits the caller wants.
pub enum Logits<'a> {
    /// The last position's; left in [`crate::Engine::logits`].
    Last,
    /// Every position's, passed to the function as `(index in chunk, logits)`.
    Each(&'a mut dyn FnMut(usize, &[f32])),
}

/// Sees every FFN after it was computed and before its sum is added.
pub type FfnObserver<'a> = dyn FnMut(&FfnSeen<'_>) + 'a;

/// The model and its working memory: everything a forward pass touches except
/// the sequence.
pub(crate) struct Decoder {
    pub cpu: Cpu,
    pub workers: Workers,
    pub config: ModelConfig,
    pub weights: Weights,
    pub ffn: Ffn,
    pub rope: RopeTable,
    pub scratch: Scratch,
    pub times: Times,
}

/// Where the time of all passes went.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Times {
    pub attention: Duration,
    pub ffn: Duration,
    pub head: Duration,
}

impl Decoder {
    /// Logits of the last position of the last pass, `[vocab]`.
    pub fn logits(&self) -> &[f32] {
        &self.scratch.logits
    }

    /// Runs one chunk of tokens, all of them valid and within the sequence's
    /// room, and advances the sequence.
    pub fn forward(
        &mut self,
        sequence: &mut Sequence,
        tokens: &[u32],
        wanted: Logits<'_>,
        mut observer: Option<&mut FfnObserver<'_>>,
    ) -> Result<(), Error> {
        let Self {
            cpu,
            workers,
            config: c,
            weights,
            ffn,
            rope,
            scratch: s,
            times,
        } = self;
        let (cpu, workers) = (*cpu, &*workers);
        let d = c.d_model as usize;
        let n = tokens.len();
        let first = sequence.len();

        // x [n × d]
        for (&token, x) in tokens.iter().zip(s.x.chunks_exact_mut(d)) {
            cpu.dequantize(weights.embed.row(token as usize), x);
        }
        rope.fill(first, n);
        let mut last = Instant::now();
        for (l, layer) in weights.layers.iter().enumerate() {
            rmsnorm_rows(cpu, &s.x, &layer.attn_norm, c.rms_eps, n, &mut s.normed);
            attention(
                cpu,
                workers,
                c,
                layer,
                l,
                rope,
                &mut sequence.kv,
                first,
                n,
                s,
            );
            add_rows(&mut s.x, &s.out, n * d);
            lap(&mut times.attention, &mut last);

            rmsnorm_rows(cpu, &s.x, &layer.ffn_norm, c.rms_eps, n, &mut s.normed);
            let input = Input::new(cpu, &s.normed[..n * d], n, &mut s.input);
            ffn.layer(cpu, workers, l as u32, input, &mut s.out)?;
            if let Some(observer) = &mut observer {
                let (gates, hidden) = ffn.recorded(n);
                observer(&FfnSeen {
                    layer: l,
                    tokens: n,
                    residual: &s.x[..n * d],
                    x: &s.normed[..n * d],
                    gates,
                    hidden,
                });
            }
            add_rows(&mut s.x, &s.out, n * d);
            lap(&mut times.ffn, &mut last);
        }

        let head = |t: usize, s: &mut Scratch| {
            let x = &s.x[t * d..(t + 1) * d];
            cpu.rmsnorm(x, &weights.final_norm, c.rms_eps, &mut s.normed[..d]);
            let input = Input::new(cpu, &s.normed[..d], 1, &mut s.input);
            let head = weights.head();
            head.matmul(cpu, workers, input, &mut [], &mut s.logits);
        };
        match wanted {
            Logits::Last => head(n - 1, s),
            Logits::Each(sink) => {
                for t in 0..n {
                    head(t, s);
                    sink(t, &s.logits);
                }
            }
        }
        lap(&mut times.head, &mut last);
        sequence.advance(tokens);
        Ok(())
    }
}

/// Adds the time since `last` to `sum` and starts the next lap.
fn lap(sum: &mut Duration, last: &mut Instant) {
    let now = Instant::now();
    *sum += now - *last;
    *last = now;
}

/// `out[t] = rmsnorm(x[t])` for `n` rows.
fn rmsnorm_rows(cpu: Cpu, x: &[f32], weight: &[f32], eps: f32, n: usize, out: &mut [f32]) {
    let d = weight.len();
    for (x, out) in x.chunks_exact(d).zip(out.chunks_exact_mut(d)).take(n) {
        cpu.rmsnorm(x, weight, eps, out);
    }
}

/// `x += y` over the first `len` elements.
fn add_rows(x: &mut [f32], y: &[f32], len: usize) {
    for (x, y) in x[..len].iter_mut().zip(y) {
        *x += y;
    }
}
