//! Attention of whole layers on a device: of the next tokens of texts, and of prompts.
//!
//! A pass goes there in pieces of some rows. The keys and values of each are stored before the next one begins, which
//! reads them from the pages.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use emberflow_kernels::Compute;
use emberflow_models::config::ModelConfig;
use emberflow_storage::trace::Tracer;

use crate::counters::nanoseconds;
use crate::device::attend::AttentionShape;
use crate::device::{
    Attend, AttendSpan, Attended, AttentionRoom, AttentionTimes, DeviceError, InUse,
};
use crate::rope::RopeTable;
use crate::scratch::Scratch;
use crate::sequence::Span;
use crate::split::{Curve, Product};
use crate::trace;

/// How much faster a device must be: less is chance.
const FASTER: f64 = 0.97;

/// Rows of a pass, as times are told apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rows {
    pub rows: usize,
    /// Positions that are seen: by the longest of next tokens, or by a row on average.
    pub positions: usize,
    /// Some text has several rows.
    pub prompts: bool,
}

impl Rows {
    /// Those of spans, `(first position, rows)`, with a window or without.
    pub fn of(spans: impl Iterator<Item = (usize, usize)> + Clone, window: usize) -> Self {
        let seen = |(first, rows): (usize, usize)| {
            let mean = first + rows.div_ceil(2);
            if window == 0 { mean } else { mean.min(window) }
        };
        let rows = spans.clone().map(|(_, rows)| rows).sum();
        let prompts = spans.clone().any(|(_, rows)| rows > 1);
        let positions = match prompts {
            false => spans.map(seen).max().unwrap_or(0),
            true => spans.map(|span| span.1 * seen(span)).sum::<usize>() / rows,
        };
        Self {
            rows,
            positions,
            prompts,
        }
    }

    /// Seconds of a layer on the CPU and on the device.
    pub fn seconds(self, times: &AttentionTimes) -> [f64; 2] {
        let both = if self.prompts {
            &times.prompts
        } else {
            &times.next
        };
        let of = Product {
            rows: self.positions.max(1),
            cols: 1,
            n: self.rows,
        };
        [both.cpu.seconds(of), both.device.seconds(of)]
    }
}

/// A layer.
#[derive(Clone, Copy)]
pub(crate) struct Layer<'a> {
    pub config: &'a ModelConfig,
    /// Its index.
    pub number: usize,
    /// Rotary angles of the rows' positions.
    pub rope: &'a RopeTable,
}

/// A device that knows the attention of all layers.
pub(crate) struct OnDevice {
    pub device: Arc<InUse>,
    pub shape: AttentionShape,
    /// The layers' numbers there.
    pub layers: Vec<usize>,
    /// It has a memory of its own, with a copy of all pages.
    pub copies: bool,
    /// Most rows of a piece of work, texts, and positions of one.
    pub room: AttentionRoom,
    /// What decides; `None` where it computes whatever it can.
    pub times: Option<AttentionTimes>,
    pub tracer: Tracer,
    pub done: AtomicU64,
    pub waited: AtomicU64,
}

impl OnDevice {
    /// Whether it is to compute a layer for such rows.
    pub fn wants(&self, of: Rows) -> bool {
        let faster = |times: &AttentionTimes| {
            let [cpu, device] = of.seconds(times);
            device < FASTER * cpu
        };
        self.times.as_ref().is_none_or(faster)
    }

    /// From how many positions on it computes layers for such rows; `None` if for none up to those of `of`.
    pub fn from(&self, of: Rows) -> Option<usize> {
        let wants = |positions| self.wants(Rows { positions, ..of });
        // Times are straight lines: where it is of use at all, it is so at one of the ends.
        let (mut without, mut with) = (1, of.positions);
        let [first, last] = [without, with].map(wants);
        if first || !last {
            return first.then_some(1);
        }
        while with - without > 1 {
            let middle = without.midpoint(with);
            match wants(middle) {
                true => with = middle,
                false => without = middle,
            }
        }
        Some(with)
    }

    /// Makes buffers for passes of so many rows.
    ///
    /// # Errors
    /// It has no memory for them.
    pub fn set_rows(&mut self, rows: usize) -> Result<(), DeviceError> {
        self.room = (self.shape).room(rows, [self.room.spans, self.room.positions], self.copies);
        match self.device.lost() {
            None => self.device.dense().make_attention_room(&self.room),
            Some(_) => Ok(()),
        }
    }

    /// Layers that it has computed.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Time that they were waited for.
    pub fn waited(&self) -> Duration {
        Duration::from_nanos(self.waited.load(Ordering::Relaxed))
    }

    /// Computes a layer of the rows `x` if that is worth it: O's results without a bias, and the rows' keys and
    /// values, which it stores. False if the CPU has to; what may be stored then are keys and values of these rows,
    /// which the CPU stores again with the same bits.
    pub fn run(
        &self,
        layer: Layer<'_>,
        on: &Compute,
        x: &[f32],
        spans: &mut [Span<'_>],
        s: &mut Scratch,
    ) -> bool {
        let window = layer.config.window[layer.number] as usize;
        let rows = (spans.iter()).map(|span| (span.sequence.len(), span.tokens.len()));
        if !self.wants(Rows::of(rows, window)) || self.device.lost().is_some() {
            return false;
        }
        let wait = Instant::now();
        let all = x.len() / self.shape.d;
        let done = (0..all).step_by(self.room.rows).all(|first| {
            let rows = first..all.min(first + self.room.rows);
            let done = self.compute(layer, x, &rows, spans, s);
            if done {
                self.store(layer, on, &rows, spans, s);
            }
            done
        });
        self.waited
            .fetch_add(nanoseconds(wait.elapsed()), Ordering::Relaxed);
        self.done.fetch_add(u64::from(done), Ordering::Relaxed);
        done
    }

    /// Has the device compute some rows, and waits. False if it was lost.
    fn compute(
        &self,
        layer: Layer<'_>,
        x: &[f32],
        rows: &Range<usize>,
        spans: &[Span<'_>],
        s: &mut Scratch,
    ) -> bool {
        let (d, kv) = (self.shape.d, self.shape.kv_width());
        let angles = match layer.config.rotates(layer.number as u32) {
            true => layer.rope.rows(rows.clone()),
            false => [&[][..]; 2],
        };
        let start = self.tracer.now();
        let begun = {
            // Held by the device alone from here on.
            let spans: Vec<AttendSpan> = (parts(spans.iter().map(|s| s.tokens.len()), rows))
                .map(|(span, places)| {
                    let sequence = &spans[span].sequence;
                    let first = sequence.len() + places.start;
                    let rows = places.len();
                    let positions = [first, first + rows];
                    let pages = (sequence.kv).shared(layer.number, positions, self.copies);
                    AttendSpan { pages, first, rows }
                })
                .collect();
            self.device.dense().attend(&Attend {
                layer: self.layers[layer.number],
                x: &x[rows.start * d..rows.end * d],
                angles,
                spans: &spans,
            })
        };
        let taken = begun.and_then(|ticket| {
            let fresh = rows.start * kv..rows.end * kv;
            let to = Attended {
                out: &mut s.out[rows.start * d..rows.end * d],
                keys: &mut s.k[fresh.clone()],
                values: &mut s.v[fresh],
            };
            self.device.dense().take_attention(ticket, to)
        });
        // Only devices with the CPU's bits are here, so that the CPU can go on.
        let Ok(Some(took)) = self.device.or_lost(taken) else {
            return false;
        };
        let values = [layer.number as u64, rows.len() as u64];
        (self.tracer).accelerator(&trace::ATTEND, values, start, nanoseconds(took));
        true
    }

    /// Stores the keys and values of some rows' positions.
    fn store(
        &self,
        layer: Layer<'_>,
        on: &Compute,
        rows: &Range<usize>,
        spans: &mut [Span<'_>],
        s: &Scratch,
    ) {
        let (hd, kv_heads) = (self.shape.head_dim, self.shape.kv_heads);
        let mut at = rows.start * kv_heads * hd;
        let mut before = 0;
        for span in spans {
            let count = span.tokens.len();
            let first = span.sequence.len();
            for place in part(before, count, rows) {
                let mut page = span.sequence.kv.writer(first + place);
                for head in 0..kv_heads {
                    page.store_key(on.cpu, layer.number, head, &s.k[at..][..hd]);
                    page.store_value(on.cpu, layer.number, head, &s.v[at..][..hd]);
                    at += hd;
                }
                if self.copies {
                    span.sequence.kv.is_copied(layer.number, first + place);
                }
            }
            before += count;
        }
    }
}

/// Which of a span's `count` rows are among `rows`, where `before` rows come before it.
fn part(before: usize, count: usize, rows: &Range<usize>) -> Range<usize> {
    let [from, to] = [rows.start, rows.end].map(|row| row.saturating_sub(before).min(count));
    from..to
}

/// The spans, of so many rows each, that have some of `rows`, and which of theirs.
fn parts(
    spans: impl Iterator<Item = usize>,
    rows: &Range<usize>,
) -> impl Iterator<Item = (usize, Range<usize>)> {
    let mut before = 0;
    let all = spans.enumerate().map(move |(span, count)| {
        let here = part(before, count, rows);
        before += count;
        (span, here)
    });
    all.filter(|(_, here)| !here.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::products::{Both, Sample, Samples};
    use crate::device::{CpuDevice, Device};
    use emberflow_kernels::DType;

    fn on(times: Option<AttentionTimes>) -> OnDevice {
        let device = Device::new(Box::new(CpuDevice::new()));
        OnDevice {
            device: Arc::new(InUse::new(device.lease().unwrap(), true)),
            shape: AttentionShape {
                d: 64,
                heads: 2,
                kv_heads: 1,
                head_dim: 32,
                rotary: 16,
                kv: DType::F16,
                page: 32,
                eps: 1e-5,
                scale: 1.0,
                clip: None,
            },
            layers: vec![0],
            copies: false,
            room: AttentionRoom {
                rows: 8,
                ..AttentionRoom::default()
            },
            times,
            tracer: Tracer::default(),
            done: AtomicU64::new(0),
            waited: AtomicU64::new(0),
        }
    }

    fn line(n: usize, launch: f64, weight: f64) -> Sample {
        Sample { n, launch, weight }
    }

    #[test]
    fn measured_times_decide_by_rows_and_positions() {
        let next = Both {
            cpu: Samples(vec![line(1, 1.0, 0.01), line(8, 8.0, 0.08)]),
            device: Samples(vec![line(1, 5.0, 0.001), line(8, 6.0, 0.01)]),
        };
        let prompts = Both {
            cpu: Samples(vec![line(8, 1.0, 0.01)]),
            device: Samples(vec![line(8, 2.0, 0.02)]),
        };
        let on_device = on(Some(AttentionTimes {
            same_bits: true,
            next,
            prompts,
        }));
        let of = |rows, positions| Rows {
            rows,
            positions,
            prompts: false,
        };
        assert!(!on_device.wants(of(1, 1)) && on_device.wants(of(8, 1)));
        assert!(on_device.wants(of(1, 1000)));
        let from = on_device.from(of(1, 2048)).unwrap();
        assert!(!on_device.wants(of(1, from - 1)) && on_device.wants(of(1, from)));
        assert_eq!(on_device.from(of(8, 2048)), Some(1));
        assert_eq!(on_device.from(of(1, 100)), None);
        // Prompts have times of their own.
        let prompt = Rows {
            prompts: true,
            ..of(8, 2048)
        };
        assert!(!on_device.wants(prompt) && on_device.from(prompt).is_none());
        assert!(on(None).wants(of(1, 1)) && on(None).wants(prompt));
    }

    #[test]
    fn pieces_have_their_parts_of_each_span() {
        let of = |rows: Range<usize>| parts([3, 1, 70].into_iter(), &rows).collect::<Vec<_>>();
        assert_eq!(of(0..3), [(0, 0..3)]);
        assert_eq!(of(2..5), [(0, 2..3), (1, 0..1), (2, 0..1)]);
        assert_eq!(of(64..74), [(2, 60..70)]);
    }

    #[test]
    fn rows_are_told_apart_by_what_they_see() {
        let of = |spans: &[(usize, usize)], window| {
            let Rows {
                rows,
                positions,
                prompts,
            } = Rows::of(spans.iter().copied(), window);
            (rows, positions, prompts)
        };
        // The longest of the next tokens.
        assert_eq!(of(&[(9, 1), (0, 1), (99, 1)], 0), (3, 100, false));
        assert_eq!(of(&[(9, 1), (0, 1), (99, 1)], 50), (3, 50, false));
        // The mean of all rows.
        assert_eq!(of(&[(0, 8)], 0), (8, 4, true));
        assert_eq!(of(&[(0, 8), (99, 1)], 0), (9, (32 + 100) / 9, true));
        assert_eq!(of(&[(96, 8)], 64), (8, 64, true));
    }
}
