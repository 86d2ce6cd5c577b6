//! Attention of whole layers on a device, for rows that are the next tokens of texts.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use emberflow_kernels::Compute;
use emberflow_models::config::ModelConfig;
use emberflow_storage::clock::Moment;
use emberflow_storage::trace::Tracer;

use crate::counters::nanoseconds;
use crate::device::attend::AttentionShape;
use crate::device::products::Samples;
use crate::device::{Attend, AttendRow, Attended, InUse};
use crate::input::Input;
use crate::rope::RopeTable;
use crate::scratch::Scratch;
use crate::sequence::Span;
use crate::split::{Curve, Product};
use crate::trace;

/// How much faster a device must be: less is chance.
const FASTER: f64 = 0.97;

/// Times of a layer's attention by rows and the positions that each sees.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Times {
    /// Of the CPU's threads, with the products that a device takes from them.
    pub cpu: Samples,
    /// Of the device alone.
    pub device: Samples,
}

impl Times {
    /// Seconds of the CPU and of the device.
    pub fn seconds(&self, rows: usize, positions: usize) -> [f64; 2] {
        let of = Product {
            rows: positions.max(1),
            cols: 1,
            n: rows,
        };
        [self.cpu.seconds(of), self.device.seconds(of)]
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
    /// Most rows of a pass.
    pub rows: usize,
    /// What decides; `None` where it computes whatever it can.
    pub times: Option<Times>,
    pub tracer: Tracer,
    pub done: AtomicU64,
    pub waited: AtomicU64,
}

impl OnDevice {
    /// Whether it is to compute a layer for so many rows, the longest of which sees so many positions.
    pub fn wants(&self, rows: usize, positions: usize) -> bool {
        let faster = |times: &Times| {
            let [cpu, device] = times.seconds(rows, positions);
            device < FASTER * cpu
        };
        rows <= self.rows && self.times.as_ref().is_none_or(faster)
    }

    /// From how many positions on it computes layers for so many rows; `None` if for none up to `context`.
    pub fn from(&self, rows: usize, context: usize) -> Option<usize> {
        // Times are straight lines: where it is of use at all, it is so at one of the ends.
        let [first, last] = [1, context].map(|positions| self.wants(rows, positions));
        if first || !last {
            return first.then_some(1);
        }
        let (mut without, mut with) = (1, context);
        while with - without > 1 {
            let middle = without.midpoint(with);
            match self.wants(rows, middle) {
                true => with = middle,
                false => without = middle,
            }
        }
        Some(with)
    }

    /// Layers that it has computed.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Time that they were waited for.
    pub fn waited(&self) -> Duration {
        Duration::from_nanos(self.waited.load(Ordering::Relaxed))
    }

    /// Computes a layer if that is worth it: O's results without a bias, and the rows' keys and values, which it
    /// stores. False if the CPU has to; nothing has changed then.
    pub fn run(
        &self,
        layer: Layer<'_>,
        on: &Compute,
        spans: &mut [Span<'_>],
        s: &mut Scratch,
    ) -> bool {
        let window = layer.config.window[layer.number] as usize;
        let seen = spans.iter().map(|span| match window {
            0 => span.sequence.len() + 1,
            window => window.min(span.sequence.len() + 1),
        });
        let one = spans.iter().all(|span| span.tokens.len() == 1);
        let wanted = one && self.wants(spans.len(), seen.max().unwrap_or(0));
        if !wanted || self.device.lost().is_some() {
            return false;
        }
        let wait = Moment::now();
        let done = self.compute(layer, on, spans, s);
        self.waited
            .fetch_add(nanoseconds(wait.elapsed()), Ordering::Relaxed);
        if done {
            self.done.fetch_add(1, Ordering::Relaxed);
            self.store(layer, on, spans, s);
        }
        done
    }

    /// Has the device compute, and waits. False if it was lost.
    fn compute(&self, layer: Layer<'_>, on: &Compute, spans: &[Span<'_>], s: &mut Scratch) -> bool {
        let (n, shape) = (spans.len(), &self.shape);
        let (out, kv) = (n * shape.d, n * shape.kv_width());
        let input = Input::new(on.cpu, &s.normed[..out], n, &mut s.input);
        let mut angles = Vec::new();
        if layer.config.rotates(layer.number as u32) {
            for row in 0..n {
                let (cos, sin) = layer.rope.at(row);
                angles.extend_from_slice(cos);
                angles.extend_from_slice(sin);
            }
        }
        let row = |span: &Span<'_>| {
            let position = span.sequence.len();
            AttendRow {
                pages: span.sequence.kv.shared(position + 1),
                position,
            }
        };
        let start = self.tracer.now();
        let begun = {
            // Held by the device alone from here on.
            let rows: Vec<AttendRow> = spans.iter().map(row).collect();
            self.device.dense().attend(&Attend {
                layer: self.layers[layer.number],
                input,
                angles: &angles,
                rows: &rows,
            })
        };
        let taken = begun.and_then(|ticket| {
            let to = Attended {
                out: &mut s.out[..out],
                keys: &mut s.k[..kv],
                values: &mut s.v[..kv],
            };
            self.device.dense().take_attention(ticket, to)
        });
        // Only devices with the CPU's bits are here, so that the CPU can go on.
        let Ok(Some(took)) = self.device.or_lost(taken) else {
            return false;
        };
        let values = [layer.number as u64, n as u64];
        (self.tracer).accelerator(&trace::ATTEND, values, start, nanoseconds(took));
        true
    }

    /// Stores the keys and values of the rows' positions.
    fn store(&self, layer: Layer<'_>, on: &Compute, spans: &mut [Span<'_>], s: &Scratch) {
        let (hd, kv_heads) = (self.shape.head_dim, self.shape.kv_heads);
        for (row, span) in spans.iter_mut().enumerate() {
            let position = span.sequence.len();
            let mut page = span.sequence.kv.writer(position);
            for head in 0..kv_heads {
                let at = (row * kv_heads + head) * hd;
                page.store_key(on.cpu, layer.number, head, &s.k[at..][..hd]);
                page.store_value(on.cpu, layer.number, head, &s.v[at..][..hd]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::products::Sample;
    use crate::device::{CpuDevice, Device};
    use emberflow_kernels::DType;

    fn on(times: Option<Times>) -> OnDevice {
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
            rows: 8,
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
        let times = Times {
            cpu: Samples(vec![line(1, 1.0, 0.01), line(8, 8.0, 0.08)]),
            device: Samples(vec![line(1, 5.0, 0.001), line(8, 6.0, 0.01)]),
        };
        let on_device = on(Some(times));
        assert!(!on_device.wants(1, 1) && on_device.wants(8, 1));
        assert!(on_device.wants(1, 1000));
        let from = on_device.from(1, 2048).unwrap();
        assert!(!on_device.wants(1, from - 1) && on_device.wants(1, from));
        assert_eq!(on_device.from(8, 2048), Some(1));
        assert_eq!(on_device.from(1, 100), None);
        // More than its buffers hold.
        assert!(!on_device.wants(9, 1) && on_device.from(9, 2048).is_none());
        assert!(on(None).wants(1, 1));
    }
}
