//! Attention of a layer on the CPU as a device: the reference of other devices.

use std::ops::Range;
use std::sync::Arc;

use emberflow_kernels::{Activations, Cpu, DType, GROUP, Row, math};
use emberflow_storage::clock::Moment;

use super::HostBytes;
use super::attend::{Attend, AttendRow, AttentionLayer, AttentionShape};
use super::on_cpu::{copied, products};
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
    quantized: Activations,
    angles: Vec<f32>,
    rows: Vec<AttendRow>,
    pub submitted: Moment,
}

/// A head's query, and its keys and values of the row's own position.
struct Query<'a> {
    q: &'a [f32],
    /// Of keys and values.
    head: usize,
    position: usize,
    key: &'a [f32],
    value: &'a [f32],
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
            x: work.input.x.to_vec(),
            quantized: copied(work.input.quantized),
            angles: work.angles.to_vec(),
            rows: work.rows.to_vec(),
            submitted: Moment::now(),
        }
    }

    /// O's results of all rows, then the keys of their positions, then their values.
    pub fn answer(self) -> Vec<f32> {
        let cpu = Cpu::detect();
        let [of_q, of_k, of_v, of_o] = &self.layer.matrices;
        let [mut q, mut k, mut v] =
            [of_q, of_k, of_v].map(|m| products(cpu, m, 0..m.rows, &self.x, &self.quantized));
        let (width, kv_width) = (self.shape.width(), self.shape.kv_width());
        let mut attended = vec![0.0; self.rows.len() * width];
        for (i, row) in self.rows.iter().enumerate() {
            let q = &mut q[i * width..][..width];
            let (k, v) = (
                &mut k[i * kv_width..][..kv_width],
                &mut v[i * kv_width..][..kv_width],
            );
            self.prepare(cpu, i, [q, k, v]);
            let [fresh_k, fresh_v] = [&*k, &*v].map(|x| self.as_stored(cpu, x));
            let out = &mut attended[i * width..][..width];
            self.row(cpu, row, q, [&fresh_k, &fresh_v], out);
        }
        let mut quantized = Activations::default();
        cpu.quantize_activations(&attended, self.rows.len(), &mut quantized);
        let mut all = products(cpu, of_o, 0..of_o.rows, &attended, &quantized);
        all.append(&mut k);
        all.append(&mut v);
        all
    }

    /// Biases, the clamp, norms, rotation and scale of row `i`.
    fn prepare(&self, cpu: Cpu, i: usize, qkv: [&mut [f32]; 3]) {
        let (s, layer) = (&self.shape, &self.layer.of);
        let mut biases = layer.biases.iter();
        let ones = vec![1.0; s.head_dim];
        let angles = self.angles.chunks_exact((2 * s.rotary).max(1)).nth(i);
        for (kind, values) in qkv.into_iter().enumerate() {
            if !layer.biases.is_empty() {
                values
                    .iter_mut()
                    .zip(&mut biases)
                    .for_each(|(x, b)| *x += b);
            }
            if let Some(clip) = s.clip {
                values.iter_mut().for_each(|x| *x = x.clamp(-clip, clip));
            }
            for head in values.chunks_exact_mut(s.head_dim) {
                match layer.norms.get(kind * s.head_dim..(kind + 1) * s.head_dim) {
                    Some(weights) => cpu.rmsnorm_inplace(head, weights, s.eps),
                    None if kind == 2 && layer.value_norm => {
                        cpu.rmsnorm_inplace(head, &ones, s.eps);
                    }
                    None => {}
                }
                if let Some(angles) = angles.filter(|_| layer.rotates && kind < 2) {
                    let (cos, sin) = angles.split_at(s.rotary);
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

    /// Attention of a row over its pages and its own position, whose keys and values are `fresh`.
    fn row(&self, cpu: Cpu, row: &AttendRow, q: &[f32], fresh: [&[f32]; 2], out: &mut [f32]) {
        let (s, window) = (&self.shape, self.layer.of.window);
        let end = row.position + 1;
        let first = match window {
            0 => 0,
            window => end.saturating_sub(window),
        };
        let heads = q.chunks_exact(s.head_dim);
        let heads = heads.zip(out.chunks_exact_mut(s.head_dim));
        for (h, (q, out)) in heads.enumerate() {
            let head = h / (s.heads / s.kv_heads);
            let [key, value] = fresh.map(|all| &all[head * s.head_dim..][..s.head_dim]);
            let query = Query {
                q,
                head,
                position: row.position,
                key,
                value,
            };
            let mut sums: Option<Sums> = None;
            for block in first / BLOCK..=row.position / BLOCK {
                let here = first.max(block * BLOCK)..end.min((block + 1) * BLOCK);
                let (next, mix) = self.block(cpu, &row.pages, &query, here);
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
        pages: &[HostBytes],
        query: &Query<'_>,
        here: Range<usize>,
    ) -> (Sums, Vec<f32>) {
        let (s, width) = (&self.shape, self.shape.value_width());
        let start = here.start / GROUP * GROUP;
        let mut scores = vec![0.0; BLOCK];
        for (p, piece) in self.pieces(here.clone()) {
            let (first, keys) = self.keys(&pages[p], query.head, piece);
            let scores = &mut scores[p * s.page + first - start..];
            cpu.key_scores(s.kv, keys, s.head_dim, query.q, scores, BLOCK);
        }
        // The row's own position is in no page yet.
        let own = (here.end == query.position + 1).then_some(query.position);
        if let Some(own) = own {
            let both = query.q.iter().zip(query.key);
            scores[own - start] = both.fold(0.0, |sum, (q, k)| q.mul_add(*k, sum));
        }
        let seen = &mut scores[here.start - start..here.end - start];
        let (max, sum) = cpu.exp_block(seen);
        let mut mix = vec![0.0; width];
        for (p, piece) in self.pieces(here.start..own.unwrap_or(here.end)) {
            let weights = &seen[p * s.page + piece.start - here.start..];
            let values = self.values(&pages[p], query.head, piece);
            cpu.mix_values(s.kv, values, width, weights, BLOCK, &mut mix);
        }
        mix.truncate(s.head_dim);
        if let Some(own) = own {
            let weight = seen[own - here.start];
            let both = mix.iter_mut().zip(query.value);
            both.for_each(|(x, v)| *x = weight.mul_add(*v, *x));
        }
        (Sums { max, sum }, mix)
    }

    /// The pages of some positions, and their places there.
    fn pieces(&self, of: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
        let page = self.shape.page;
        let pages = of.start / page..of.end.div_ceil(page);
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
