//! The forward pass, top to bottom.

use std::ops::Range;
use std::time::{Duration, Instant};

use emberflow_kernels::{Cpu, Workers};
use emberflow_models::config::ModelConfig;

use crate::Error;
use crate::attention::attention;
use crate::embedding::Embedding;
use crate::ffn::{Ffn, FfnSeen, Norm};
use crate::input::Input;
use crate::rope::RopeTable;
use crate::scratch::Scratch;
use crate::sequence::Sequence;
use crate::trace;
use crate::weights::Weights;

/// A part of a pass: tokens at the end of one sequence.
pub struct Span<'a> {
    /// The sequence, which the tokens are added to.
    pub sequence: &'a mut Sequence,
    /// Tokens that follow each other, at least one.
    pub tokens: &'a [u32],
}

/// Which rows' logits the caller wants. A pass has one row for every token, span after span.
pub enum Logits<'a> {
    /// The last row's; left in [`crate::Engine::logits`].
    Last,
    /// Every row's, passed to the function as `(row, logits)`.
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
    /// Where it is not the head, too.
    pub embedding: Option<Embedding>,
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
    /// Logits of the last row of the last pass, `[vocab]`.
    pub fn logits(&self) -> &[f32] {
        self.row_logits(0)
    }

    /// The `row`-th of the logits computed together last.
    pub fn row_logits(&self, row: usize) -> &[f32] {
        let vocab = self.config.vocab as usize;
        &self.scratch.logits[row * vocab..(row + 1) * vocab]
    }

    /// Runs one chunk of tokens, all of them valid and within their sequences'
    /// room, and advances the sequences. A row's results depend on the tokens of
    /// its own sequence alone.
    pub fn forward(
        &mut self,
        spans: &mut [Span<'_>],
        wanted: Logits<'_>,
        mut observer: Option<&mut FfnObserver<'_>>,
    ) -> Result<(), Error> {
        let Self {
            cpu,
            workers,
            config: c,
            weights,
            embedding,
            ffn,
            rope,
            scratch: s,
            times,
        } = self;
        let (cpu, workers) = (*cpu, &*workers);
        let d = c.d_model as usize;
        ffn.store.step_border()?;
        ffn.begin(spans.iter().map(|span| span.tokens.len()));

        // x [n × d]
        let mut n = 0;
        for span in &*spans {
            let first = span.sequence.len();
            for i in 0..span.tokens.len() {
                rope.fill(n, first + i);
                n += 1;
            }
        }
        ffn.store.tracer().section(&trace::EMBEDDING, [0; 2]);
        let tokens = spans.iter().flat_map(|span| span.tokens).copied();
        match embedding {
            Some(embedding) => embedding.rows(cpu, &mut ffn.store, tokens, &mut s.x)?,
            None => {
                for (token, x) in tokens.zip(s.x.chunks_exact_mut(d)) {
                    cpu.dequantize(weights.head.row(token as usize), x);
                }
            }
        }
        let mut last = Instant::now();
        for (l, layer) in weights.layers.iter().enumerate() {
            (ffn.store.tracer()).section(&trace::ATTENTION, [l as u64, 0]);
            rmsnorm_rows(cpu, &s.x, &layer.attn_norm, c.rms_eps, n, &mut s.normed);
            attention(cpu, workers, c, layer, l, rope, spans, n, s);
            add_rows(&mut s.x, &s.out, n * d);
            lap(&mut times.attention, &mut last);

            rmsnorm_rows(cpu, &s.x, &layer.ffn_norm, c.rms_eps, n, &mut s.normed);
            let input = Input::new(cpu, &s.normed[..n * d], n, &mut s.input);
            let next = weights.layers.get(l + 1).map(|next| Norm {
                weight: &next.ffn_norm,
                eps: c.rms_eps,
            });
            let (bank, residual) = (l as u32, &s.x[..n * d]);
            ffn.layer(cpu, workers, bank, input, residual, next, &mut s.out)?;
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

        ffn.store.tracer().section(&trace::HEAD, [0; 2]);
        // As many rows at once as the buffer holds: the head's weights are read once for them.
        let vocab = c.vocab as usize;
        let head = |rows: Range<usize>, s: &mut Scratch| {
            let (x, count) = (&s.x[rows.start * d..rows.end * d], rows.len());
            rmsnorm_rows(cpu, x, &weights.final_norm, c.rms_eps, count, &mut s.normed);
            let input = Input::new(cpu, &s.normed[..count * d], count, &mut s.input);
            let logits = &mut s.logits[..count * vocab];
            (weights.head).matmul(cpu, workers, input, &mut s.rows, logits);
        };
        match wanted {
            Logits::Last => head(n - 1..n, s),
            Logits::Each(sink) => {
                let at_once = s.logits.len() / vocab;
                for first in (0..n).step_by(at_once) {
                    let rows = first..(first + at_once).min(n);
                    head(rows.clone(), s);
                    for (t, logits) in rows.zip(s.logits.chunks_exact(vocab)) {
                        sink(t, logits);
                    }
                }
            }
        }
        lap(&mut times.head, &mut last);
        for span in spans {
            span.sequence.advance(span.tokens);
        }
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
