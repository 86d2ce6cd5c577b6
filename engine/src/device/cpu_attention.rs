//! Attention of a layer on the CPU as a device: the reference of other devices.

use std::time::Instant;

use std::ops::Range;
use std::sync::Arc;

use emberflow_kernels::{Activations, Cpu, DType, GROUP, Row, math};

use super::HostBytes;
use super::attend::{Attend, AttendSpan, AttentionLayer, AttentionShape};
use super::on_cpu::products;
use super::products::SharedMatrix;
use crate::kv::BLOCK;

/// A layer with its matrices.
pub(super) struct Layer {
    pub of: AttentionLayer,
    pub matrices: [SharedMatrix; 4],
}

/// Copied work. The pages are held until it is done.
pub(super) struct Task {
    shape: AttentionShape,
    layer: Arc<Layer>,
    x: Vec<f32>,
    angles: [Vec<f32>; 2],
    spans: Vec<AttendSpan>,
    pub submitted: Instant,
}

/// A head's query.
struct Query<'a> {
    q: &'a [f32],
    /// Of keys and values.
    head: usize,
}

/// A span with the keys and values of its rows, as pages have them, `[rows × kv_heads·head_dim]` each.
struct Seen<'a> {
    of: &'a AttendSpan,
    keys: &'a [f32],
    values: &'a [f32],
}

/// Sums of a block, or of several: the largest score and `Σ exp(score − largest)`.
#[derive(Clone, Copy)]
struct Sums {
    max: f32,
    sum: f32,
}

impl Task {
    /// A copy of work.
    pub fn new(shape: AttentionShape, layer: Arc<Layer>, work: &Attend<'_>) -> Self {
        Self {
            shape,
            layer,
            x: work.x.to_vec(),
            angles: work.angles.map(<[f32]>::to_vec),
            spans: work.spans.to_vec(),
            submitted: Instant::now(),
        }
    }

    /// O's results of all rows, then the keys of their positions, then their values.
    pub fn answer(mut self) -> Vec<f32> {
        let cpu = Cpu::detect();
        self.norm(cpu);
        let rows = self.x.len() / self.shape.d;
        let mut quantized = Activations::default();
        cpu.quantize_activations(&self.x, rows, &mut quantized);
        let [of_q, of_k, of_v, of_o] = &self.layer.matrices;
        let [mut q, mut k, mut v] =
            [of_q, of_k, of_v].map(|m| products(cpu, m, 0..m.rows, &self.x, &quantized));
        let (width, kv_width) = (self.shape.width(), self.shape.kv_width());
        for i in 0..rows {
            let q = &mut q[i * width..][..width];
            let (k, v) = (
                &mut k[i * kv_width..][..kv_width],
                &mut v[i * kv_width..][..kv_width],
            );
            self.prepare(cpu, i, [q, k, v]);
        }
        let [keys, values] = [&k, &v].map(|x| self.as_stored(cpu, x));
        let mut attended = vec![0.0; rows * width];
        let mut row = 0;
        for of in &self.spans {
            let fresh = row * kv_width..(row + of.rows) * kv_width;
            let span = Seen {
                of,
                keys: &keys[fresh.clone()],
                values: &values[fresh],
            };
            for position in of.first..of.first + of.rows {
                let out = &mut attended[row * width..][..width];
                self.row(cpu, &span, position, &q[row * width..][..width], out);
                row += 1;
            }
        }
        cpu.quantize_activations(&attended, rows, &mut quantized);
        let mut all = products(cpu, of_o, 0..of_o.rows, &attended, &quantized);
        all.append(&mut k);
        all.append(&mut v);
        all
    }

    /// The norm before the projections.
    fn norm(&mut self, cpu: Cpu) {
        let Some(norm) = &self.layer.of.norm else {
            return;
        };
        for row in self.x.chunks_exact_mut(self.shape.d) {
            match norm.biases.is_empty() {
                true => cpu.rmsnorm_inplace(row, &norm.weights, norm.eps),
                false => cpu.layernorm_inplace(row, &norm.weights, &norm.biases, norm.eps),
            }
        }
    }

    /// Biases, norms, the clamp, rotation and scale of row `i`.
    fn prepare(&self, cpu: Cpu, i: usize, qkv: [&mut [f32]; 3]) {
        let (s, layer) = (&self.shape, &self.layer.of);
        let mut biases = layer.biases.iter();
        let ones = vec![1.0; s.head_dim];
        let angle = |kind: usize| self.angles[kind].get(i * s.rotary..(i + 1) * s.rotary);
        let angles = angle(0).zip(angle(1)).filter(|_| layer.rotates);
        let [by_head, whole] = [!layer.whole, layer.whole].map(|yes| match yes {
            true => &layer.norms[..],
            false => &[],
        });
        let mut whole = whole;
        for (kind, values) in qkv.into_iter().enumerate() {
            if !layer.biases.is_empty() {
                values
                    .iter_mut()
                    .zip(&mut biases)
                    .for_each(|(x, b)| *x += b);
            }
            if let Some((norm, rest)) = whole.split_at_checked(values.len())
                && kind < 2
            {
                cpu.rmsnorm_inplace(values, norm, s.eps);
                whole = rest;
            }
            if let Some(clip) = s.clip {
                values.iter_mut().for_each(|x| *x = x.clamp(-clip, clip));
            }
            for head in values.chunks_exact_mut(s.head_dim) {
                match by_head.get(kind * s.head_dim..(kind + 1) * s.head_dim) {
                    Some(weights) => cpu.rmsnorm_inplace(head, weights, s.eps),
                    None if kind == 2 && layer.value_norm => {
                        cpu.rmsnorm_inplace(head, &ones, s.eps);
                    }
                    None => {}
                }
                if let Some((cos, sin)) = angles.filter(|_| kind < 2) {
                    cpu.rope_rotate_half(head, cos, sin);
                }
                if kind == 0 {
                    head.iter_mut().for_each(|q| *q *= s.scale);
                }
            }
        }
    }

    /// Values as pages have them.
    fn as_stored(&self, cpu: Cpu, values: &[f32]) -> Vec<f32> {
        let mut out = values.to_vec();
        if self.shape.kv == DType::F16 {
            let mut bytes = vec![0; 2 * values.len()];
            cpu.f32_to_f16_bytes(values, &mut bytes);
            cpu.dequantize(Row::inline(DType::F16, values.len(), &bytes), &mut out);
        }
        out
    }

    /// Attention of a row over its span's pages and those of the span's rows that it sees.
    fn row(&self, cpu: Cpu, span: &Seen<'_>, position: usize, q: &[f32], out: &mut [f32]) {
        let s = &self.shape;
        let (first, end) = (self.layer.of.first_seen(position), position + 1);
        let heads = q.chunks_exact(s.head_dim);
        let heads = heads.zip(out.chunks_exact_mut(s.head_dim));
        for (h, (q, out)) in heads.enumerate() {
            let head = h / (s.heads / s.kv_heads);
            let query = Query { q, head };
            let mut sums: Option<Sums> = None;
            for block in first / BLOCK..=position / BLOCK {
                let here = first.max(block * BLOCK)..end.min((block + 1) * BLOCK);
                let (next, mix) = self.block(cpu, span, &query, here);
                sums = Some(match sums {
                    None => {
                        out.copy_from_slice(&mix);
                        next
                    }
                    Some(sums) => sums.merged(cpu, next, &mix, out),
                });
            }
            let sink = self.layer.of.sinks.get(h).copied();
            let scale = sums.map_or(0.0, |sums| sums.scale(sink));
            out.iter_mut().for_each(|x| *x *= scale);
        }
    }

    /// The sums of some positions of a block, and their mixed values.
    fn block(
        &self,
        cpu: Cpu,
        span: &Seen<'_>,
        query: &Query<'_>,
        here: Range<usize>,
    ) -> (Sums, Vec<f32>) {
        let (s, width, pages) = (&self.shape, self.shape.value_width(), &span.of.pages);
        let start = here.start / GROUP * GROUP;
        let mut scores = vec![0.0; BLOCK];
        // Positions before the span are in pages; behind them are its own.
        let border = span.of.first.clamp(here.start, here.end);
        for (p, piece) in self.pieces(here.start..border) {
            let (first, keys) = self.keys(&pages[p].bytes, query.head, piece);
            let scores = &mut scores[p * s.page + first - start..];
            cpu.key_scores(s.kv, keys, s.head_dim, query.q, scores, BLOCK);
        }
        for own in border..here.end {
            let both = query
                .q
                .iter()
                .zip(span.of_head(s, span.keys, own, query.head));
            scores[own - start] = both.fold(0.0, |sum, (q, k)| q.mul_add(*k, sum));
        }
        let seen = &mut scores[here.start - start..here.end - start];
        let (max, sum) = cpu.exp_block(seen);
        let mut mix = vec![0.0; width];
        for (p, piece) in self.pieces(here.start..border) {
            let weights = &seen[p * s.page + piece.start - here.start..];
            let values = self.values(&pages[p].bytes, query.head, piece);
            cpu.mix_values(s.kv, values, width, weights, BLOCK, &mut mix);
        }
        mix.truncate(s.head_dim);
        for own in border..here.end {
            let weight = seen[own - here.start];
            let both = mix
                .iter_mut()
                .zip(span.of_head(s, span.values, own, query.head));
            both.for_each(|(x, v)| *x = weight.mul_add(*v, *x));
        }
        (Sums { max, sum }, mix)
    }

    /// The pages of some positions, and their places there.
    fn pieces(&self, of: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
        let page = self.shape.page;
        let pages = match of.is_empty() {
            true => 0..0,
            false => of.start / page..of.end.div_ceil(page),
        };
        pages.map(move |p| {
            let first = p * page;
            let piece = of.start.max(first) - first..of.end.min(first + page) - first;
            (p, piece)
        })
    }

    /// The keys of a head at places of a page, in blocks of a group, and the first block's first place.
    fn keys<'p>(&self, page: &'p HostBytes, head: usize, of: Range<usize>) -> (usize, &'p [u8]) {
        let (s, bytes) = (&self.shape, |elements| self.shape.kv.row_bytes(elements));
        let (first, end) = (of.start / GROUP * GROUP, of.end.next_multiple_of(GROUP));
        let at = self.layer.of.first + bytes(head * s.page * s.head_dim);
        let [from, to] = [first, end].map(|place| at + bytes(place * s.head_dim));
        (first, &(**page).as_ref()[from..to])
    }

    /// The values of a head at places of a page.
    fn values<'p>(&self, page: &'p HostBytes, head: usize, of: Range<usize>) -> &'p [u8] {
        let (s, width) = (&self.shape, self.shape.value_width());
        let bytes = |elements| s.kv.row_bytes(elements);
        let before = s.page * (s.kv_heads * s.head_dim + head * width);
        let at = self.layer.of.first + bytes(before);
        let [from, to] = [of.start, of.end].map(|place| at + bytes(place * width));
        &(**page).as_ref()[from..to]
    }
}

impl Seen<'_> {
    /// A head of the keys or values of one of the span's positions.
    fn of_head<'a>(
        &self,
        s: &AttentionShape,
        all: &'a [f32],
        position: usize,
        head: usize,
    ) -> &'a [f32] {
        let at = (position - self.of.first) * s.kv_width() + head * s.head_dim;
        &all[at..][..s.head_dim]
    }
}

impl Sums {
    /// Merged with the next block's, whose mixed values go to `out`.
    fn merged(self, cpu: Cpu, next: Self, mix: &[f32], out: &mut [f32]) -> Self {
        let max = if next.max > self.max {
            next.max
        } else {
            self.max
        };
        let (a, b) = (math::exp(self.max - max), math::exp(next.max - max));
        cpu.blend(a, out, b, mix);
        Self {
            max,
            sum: b.mul_add(next.sum, a * self.sum),
        }
    }

    /// The factor that normalises, with a sink or without.
    fn scale(self, sink: Option<f32>) -> f32 {
        let Some(sink) = sink else {
            return 1.0 / self.sum;
        };
        let max = if sink > self.max { sink } else { self.max };
        let seen = math::exp(self.max - max);
        seen / seen.mul_add(self.sum, math::exp(sink - max))
    }
}
