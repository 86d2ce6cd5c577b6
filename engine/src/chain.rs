//! Passes whose layers a device computes one after the other: all weights are there, and the host waits once.
//!
//! Only where layers are plain (norm, attention, sum, norm, FFN, sum) and the device has a memory of its own. The first
//! passes are computed both ways: other bits are told and refused, and the faster way stays.

use std::time::Instant;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use emberflow_kernels::Cpu;
use emberflow_models::config::{ModelConfig, Parallel};

use crate::attention::on_device::OnDevice;
use crate::counters::nanoseconds;
use crate::device::attend::AttentionShape;
use crate::device::{AttendSpan, Chain, ChainLayer, ChainRoom, Chained, DeviceError, InUse, Taken};
use crate::error::Error;
use crate::ffn::Ffn;
use crate::kv::KvPages;
use crate::options::{DeviceAttention, Options};
use crate::pass::Pass;
use crate::rope::Ropes;
use crate::sequence::Span;
use crate::trace;
use crate::weights::Weights;

/// Passes that are computed both ways, of which the fastest count.
const TRIALS: usize = 3;

/// Most rows: next tokens of so many texts.
const ROWS: usize = 8;

/// How it stands with the device's way.
enum State {
    /// So many passes were computed both ways, in so many seconds at best: layer by layer, one after the other.
    Tried(usize, [f64; 2]),
    On,
    Off,
}

/// What a device computes one after the other.
pub(crate) struct Layers {
    device: Arc<InUse>,
    state: State,
    /// Times do not decide.
    forced: bool,
    rows: usize,
    /// Results of a pass: the residual stream; keys and values as pages have them.
    x: Vec<f32>,
    stored: Vec<f32>,
    /// Passes that were computed so.
    pub passes: u64,
}

/// Bytes of host memory for the layers of a model whose texts are so many, staging memory included.
pub(crate) fn host_bytes(layers: u32, shape: &AttentionShape, texts: usize) -> u64 {
    let kv = 2 * layers as usize * shape.kv_width();
    let floats = texts.clamp(1, ROWS) * (3 * shape.d + 2 * kv);
    (size_of::<f32>() * floats) as u64
}

/// What layers are computed with.
pub(crate) struct With<'a> {
    pub config: &'a ModelConfig,
    pub weights: &'a Weights,
    pub ffn: &'a mut Ffn,
    pub rope: &'a Ropes,
    pub cpu: Cpu,
    /// The device, which knows the attention of all layers.
    pub of: &'a OnDevice,
}

impl With<'_> {
    /// Whether layers add nothing but attention and a dense FFN to the residual stream.
    fn is_plain(&self) -> bool {
        let (c, form) = (self.config, &self.config.form);
        let plain = self.weights.layers.iter().all(|layer| {
            let post = layer.attn_post_norm.is_some() || layer.ffn_post_norm.is_some();
            let biases = layer.o_bias.is_some() || layer.ffn_bias.is_some();
            let norms = layer.attn_norm.is_some() && layer.ffn_norm.is_some();
            norms && !post && !biases && layer.router.is_none()
        });
        let sums = form.residual_scale == 1.0 && form.parallel == Parallel::No;
        plain && sums && c.mixture.is_none() && form.streams.is_none() && self.ffn.is_exact()
    }
}

impl Layers {
    /// Buffers for a model's layers, if the device computes them so.
    pub fn new(with: &With<'_>, options: &Options) -> Option<Self> {
        let of = with.of;
        let mut dense = of.device.dense();
        if !(dense.chains() && with.is_plain()) {
            return None;
        }
        let layout = with.ffn.store.layout();
        let layers = with.weights.layers.len();
        let banks = (0..layers).map(|layer| layout.banks_of(layer).start);
        let room = ChainRoom {
            rows: options.batch.clamp(1, ROWS),
            layers,
            clusters: banks.map(|bank| layout.clusters(bank)).max()?,
        };
        if let Err(e) = dense.make_chain_room(&room) {
            tracing::info!(error = %e, "layers are computed one by one");
            return None;
        }
        let (d, kv) = (of.shape.d, of.shape.kv_width());
        Some(Self {
            device: Arc::clone(&of.device),
            state: State::Tried(0, [f64::INFINITY; 2]),
            forced: options.device_attention == DeviceAttention::On,
            rows: room.rows,
            x: vec![0.0; room.rows * d],
            stored: vec![0.0; 2 * room.rows * layers * kv],
            passes: 0,
        })
    }

    /// Takes note of a pass that was computed both ways.
    fn compare(&mut self, same: bool, seconds: [f64; 2]) {
        let State::Tried(count, best) = &mut self.state else {
            return;
        };
        if !same {
            tracing::warn!(
                "layers one after the other give other bits: they are computed one by one"
            );
            self.state = State::Off;
            return;
        }
        *count += 1;
        for (best, seconds) in best.iter_mut().zip(seconds) {
            *best = best.min(seconds);
        }
        let enough = self.forced || *count == TRIALS;
        let [one_by_one, chained] = *best;
        if enough {
            tracing::info!(one_by_one, chained, "seconds of a pass");
            self.state = match self.forced || chained < one_by_one {
                true => State::On,
                false => State::Off,
            };
        }
    }
}

/// A head of a layer at a position.
#[derive(Clone, Copy)]
struct Place {
    position: usize,
    layer: usize,
    head: usize,
}

/// Sees the key and the value of a head.
type Heads<'a> = dyn FnMut(&mut KvPages, Place, [&[f32]; 2]) + 'a;

/// What became of a pass.
pub(crate) enum Whole {
    /// It is done.
    Done,
    /// It was computed in so many seconds, but layers have to be computed too, for comparison.
    Compare(f64),
    /// Layers have to be computed.
    No,
}

impl Layers {
    /// Has the device compute the layers of a pass, if it has them all.
    ///
    /// # Errors
    /// The device's, where the CPU cannot go on.
    pub fn compute(
        &mut self,
        with: &mut With<'_>,
        pass: &mut Pass,
        spans: &mut [Span<'_>],
    ) -> Result<Whole, Error> {
        let off = matches!(self.state, State::Off) || self.device.lost().is_some();
        if off || pass.rows > self.rows {
            return Ok(Whole::No);
        }
        let (start, of) = (Instant::now(), with.of);
        let begun = with.ffn.store.tracer().now();
        // The device writes these positions of its copy at once.
        for span in spans.iter_mut() {
            let first = span.sequence.len();
            (first..first + span.tokens.len()).for_each(|p| span.sequence.kv.will_change(p));
        }
        let Some(taken) = self.run(with, pass, spans) else {
            return Ok(Whole::No);
        };
        let Some(taken) = self.device.or_lost(taken)? else {
            return Ok(Whole::No);
        };
        self.store(with, spans);
        if matches!(self.state, State::Tried(..)) {
            return Ok(Whole::Compare(start.elapsed().as_secs_f64()));
        }
        let count = with.weights.layers.len() as u64;
        let (tracer, took) = (with.ffn.store.tracer(), nanoseconds(taken.took));
        tracer.accelerator(&trace::LAYERS, [count, pass.rows as u64], begun, took);
        let len = pass.rows * of.shape.d;
        pass.x[..len].copy_from_slice(&self.x[..len]);
        with.ffn.count_whole(pass.rows, taken.fired);
        self.passes += 1;
        of.done.fetch_add(count, Ordering::Relaxed);
        of.waited
            .fetch_add(nanoseconds(start.elapsed()), Ordering::Relaxed);
        Ok(Whole::Done)
    }

    /// Has the device compute all layers, and waits; `None` if it does not have them.
    fn run(
        &mut self,
        with: &With<'_>,
        pass: &Pass,
        spans: &[Span<'_>],
    ) -> Option<Result<Taken, DeviceError>> {
        let (store, of) = (&with.ffn.store, with.of);
        let (count, rows) = (with.weights.layers.len(), pass.rows);
        let parts = (0..count).map(|n| store.whole_on_device(store.layout().banks_of(n).start));
        let parts: Vec<_> = parts.collect::<Option<_>>()?;
        let of_layer = |number: usize| -> Vec<AttendSpan> {
            let of_text = |span: &Span<'_>| {
                let (first, rows) = (span.sequence.len(), span.tokens.len());
                let positions = [first, first + rows];
                let pages = span.sequence.kv.shared(number, positions, of.copies);
                AttendSpan { pages, first, rows }
            };
            spans.iter().map(of_text).collect()
        };
        let spans: Vec<_> = (0..count).map(of_layer).collect();
        let all: Vec<ChainLayer<'_>> = (spans.iter().zip(parts).enumerate())
            .map(|(number, (spans, part))| ChainLayer {
                attention: of.layers[number],
                angles: match with.config.rotates(number as u32) {
                    true => with.rope.of(number).rows(0..rows),
                    false => [&[]; 2],
                },
                spans,
                part,
            })
            .collect();
        let (d, kv) = (of.shape.d, of.shape.kv_width());
        let mut dense = self.device.dense();
        let ticket = dense.chain(&Chain {
            x: &pass.x[..rows * d],
            layers: &all,
        });
        let to = Chained {
            x: &mut self.x[..rows * d],
            stored: &mut self.stored[..2 * count * rows * kv],
        };
        Some(ticket.and_then(|ticket| dense.take_chain(ticket, to)))
    }

    /// Stores keys and values of all layers, which the device has put into its copy of the pages.
    fn store(&self, with: &With<'_>, spans: &mut [Span<'_>]) {
        let (cpu, last) = (with.cpu, with.of.shape.kv_heads - 1);
        self.each_stored(with, spans, &mut |kv, at, both| {
            let mut page = kv.writer(at.position);
            page.store_key(cpu, at.layer, at.head, both[0]);
            page.store_value(cpu, at.layer, at.head, both[1]);
            if at.head == last {
                kv.is_copied(at.layer, at.position);
            }
        });
    }

    /// Compares a pass that was computed both ways, `seconds` long.
    pub fn compare_with(
        &mut self,
        with: &With<'_>,
        pass: &Pass,
        spans: &mut [Span<'_>],
        seconds: [f64; 2],
    ) {
        let x = &pass.x[..pass.rows * with.of.shape.d];
        let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
        let mut all_same = x.iter().zip(&self.x).all(same);
        self.each_stored(with, spans, &mut |kv, at, both| {
            all_same &= kv
                .writer(at.position)
                .has(with.cpu, at.layer, at.head, both);
        });
        self.compare(all_same, seconds);
        if all_same {
            // The device has put the same into its copy.
            self.each_stored(with, spans, &mut |kv, at, _| {
                if at.head == 0 {
                    kv.is_copied(at.layer, at.position);
                }
            });
        }
    }

    /// Shows `then` the key and value of each head of each layer and position.
    fn each_stored(&self, with: &With<'_>, spans: &mut [Span<'_>], then: &mut Heads<'_>) {
        let (hd, kv) = (with.of.shape.head_dim, with.of.shape.kv_width());
        let rows: usize = spans.iter().map(|span| span.tokens.len()).sum();
        let mut row = 0;
        for span in spans {
            let first = span.sequence.len();
            for position in first..first + span.tokens.len() {
                for layer in 0..with.weights.layers.len() {
                    let both = &self.stored[2 * kv * (layer * rows + row)..][..2 * kv];
                    let (keys, values) = both.split_at(kv);
                    let heads = keys.chunks_exact(hd).zip(values.chunks_exact(hd));
                    for (head, (key, value)) in heads.enumerate() {
                        let place = Place {
                            position,
                            layer,
                            head,
                        };
                        then(&mut span.sequence.kv, place, [key, value]);
                    }
                }
                row += 1;
            }
        }
    }
}
