//! How long a pass takes: the work of each layer at the machine's rates, beside the reads at the
//! device's.
//!
//! ```text
//! attention │ gates, first piece │ other gates, sums of what is there │ last sums │
//!           │                    │ reads of what is missing ·········→│           │   on demand
//! reads ahead, up to the buffers │ reads of the other clusters ······→│           │   scan
//! ```
//!
//! What overlaps takes the longer of both times; the first piece of the gates, the latency of the
//! first read and the sums of the last cluster do not overlap.

use emberflow_kernels::DType;
use emberflow_storage::profile::{Pattern, ReadCost};
use serde::Serialize;

use super::PredictorNeeds;
use super::firing::Firing;
use super::rates::ThreadRates;
use crate::ffn::{CLUSTER, GATE_PIECES};
use crate::memory::{MemoryPlan, Residency};
use crate::weights::ROWS_PER_CHUNK;

/// Nanoseconds to look at a neuron's gates and, if it fires, to note it: a loop of one thread.
const NAME_NS: f64 = 2.0;

/// What of a model decides how long a pass takes.
#[derive(Debug, Clone)]
pub struct Shape {
    /// Decoder layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub d: usize,
    /// Rows of the head.
    pub vocab: usize,
    /// Neurons of a layer.
    pub neurons: usize,
    /// Format of the neurons.
    pub ffn: DType,
    /// Format of the attention matrices.
    pub attention: DType,
    /// Format of the head.
    pub head: DType,
    /// Rows of a layer's attention matrices, and their bytes.
    pub attention_rows: f64,
    /// See `attention_rows`.
    pub attention_bytes: f64,
    /// Bytes of keys and values of one position in one layer.
    pub kv_bytes: f64,
    /// Bytes of a Gate row, and of Up and Down.
    pub gate_len: f64,
    /// See `gate_len`.
    pub rest_len: f64,
    /// Bytes that are read for a Gate part alone, for Up and Down alone, and for a cluster.
    pub gate_read: u64,
    /// See `gate_read`.
    pub rest_read: u64,
    /// See `gate_read`.
    pub cluster_read: u64,
    /// Every neuron is computed, firing or not.
    pub dense: bool,
}

/// The resource that limits a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Limit {
    /// Reading weights from memory.
    #[serde(rename = "memory bandwidth")]
    Memory,
    /// Arithmetic and bookkeeping.
    #[serde(rename = "compute")]
    Compute,
    /// Reads of single neurons.
    #[serde(rename = "random reads")]
    RandomReads,
    /// Reads of whole clusters.
    #[serde(rename = "sequential reads")]
    SequentialReads,
}

impl std::fmt::Display for Limit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Memory => "memory bandwidth",
            Self::Compute => "compute",
            Self::RandomReads => "random reads",
            Self::SequentialReads => "sequential reads",
        })
    }
}

/// What a pass is expected to take.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Forecast {
    /// Tokens of the pass.
    pub tokens: usize,
    /// Tokens per second.
    pub tokens_per_s: f64,
    /// What limits it.
    pub limit: Limit,
    /// Milliseconds of the pass.
    pub ms: f64,
    /// Milliseconds in which something is computed.
    pub compute_ms: f64,
    /// Milliseconds in which the device reads.
    pub io_ms: f64,
    /// Milliseconds in which the computation waits for reads.
    pub wait_ms: f64,
    /// Bytes read from the device.
    pub bytes_read: f64,
    /// Reads asked for.
    pub reads: f64,
    /// Share of the needed neurons outside the hot region that are found in the cold one.
    pub cold_hit_rate: f64,
}

/// Everything a forecast depends on.
pub struct Pass<'a> {
    /// The model.
    pub shape: &'a Shape,
    /// Which neurons fire.
    pub firing: &'a Firing,
    /// The machine, with the threads that compute.
    pub rates: &'a ThreadRates,
    /// 10^9 bytes per second of checksums.
    pub check_gb_per_s: f64,
    /// Nanoseconds to find and release a neuron of the cold region.
    pub lookup_ns: f64,
    /// Nanoseconds of a number that is normalised, quantised and added.
    pub element_ns: f64,
    /// Cores of the machine.
    pub cores: f64,
    /// The device with many reads under way.
    pub device: &'a ReadCost,
    /// The device with few.
    pub stream: &'a ReadCost,
    /// What names the neurons.
    pub predictor: PredictorNeeds,
    /// Clusters that can be under way at once.
    pub stream_buffers: u32,
    /// Gate parts are read first where gates are not resident.
    pub two_phases: bool,
}

/// What is read of one layer.
#[derive(Default, Clone, Copy)]
struct Reads {
    /// Reads, and nanoseconds of the device.
    count: f64,
    ns: f64,
    bytes: f64,
    /// Nanoseconds of processor time.
    cpu_ns: f64,
    /// Nanoseconds until the first one is there.
    latency_ns: f64,
    /// Neurons that are needed outside the hot region, and those of them that miss.
    asked: f64,
    missed: f64,
}

impl Pass<'_> {
    /// The forecast for passes of `tokens` tokens after `positions` others.
    /// `hot` is the first neuron of each layer outside the hot region, `missing` the neurons of each
    /// that a token misses.
    pub fn forecast(
        &self,
        plan: &MemoryPlan,
        hot: &[usize],
        missing: &[f64],
        tokens: usize,
        positions: usize,
    ) -> Forecast {
        let s = self.shape;
        let predicts = self.predictor.bytes > 0 && !s.dense;
        let bundles = plan.residency == Residency::Bundles;
        let scan = s.dense || bundles && !predicts;
        let on_demand = !s.dense && (!scan || self.two_phases);
        let t = tokens as f64;
        let mut sum = Forecast {
            tokens,
            tokens_per_s: 0.0,
            limit: Limit::Compute,
            ms: 0.0,
            compute_ms: 0.0,
            io_ms: 0.0,
            wait_ms: 0.0,
            bytes_read: 0.0,
            reads: 0.0,
            cold_hit_rate: 1.0,
        };
        let set = self.working_set();
        let (mut asked, mut missed, mut memory_bytes) = (0.0, 0.0, 0.0);
        for layer in 0..s.layers {
            let first = hot.get(layer).copied().unwrap_or_default();
            let all_hot = first >= s.neurons;
            let fires = if s.dense {
                s.neurons as f64
            } else {
                self.firing.fires(layer, 0, tokens)
            };
            let outside = if all_hot {
                0.0
            } else if s.dense {
                (s.neurons - first) as f64
            } else {
                self.firing.fires(layer, first, tokens)
            };
            let reads = match () {
                () if all_hot => Reads::default(),
                () if !scan => {
                    let one = missing.get(layer).copied().unwrap_or_default();
                    let each = self.firing.fires(layer, first, 1).max(1e-9);
                    self.on_demand(first, outside, one / each * outside, bundles)
                }
                () if on_demand => self.gates_first(plan, first, outside),
                () => self.scan(first),
            };
            asked += reads.asked;
            missed += reads.missed;
            let attention = self.attention(t, positions as f64, set);
            let named = match predicts {
                true => (fires * self.predictor.named).min(s.neurons as f64),
                false => s.neurons as f64,
            };
            let naming_ahead = self.predictor.bytes as f64 / s.layers as f64;
            let gates = self.gates(t, named, set) + naming_ahead / self.rates.read.at(set);
            let names = s.neurons as f64 * NAME_NS;
            let naming = if scan {
                names
            } else {
                names + (outside - reads.missed).max(0.0) * self.lookup_ns
            };
            let sums = self.sums(t, fires, set);
            let handled = if scan && !on_demand {
                0.0
            } else {
                reads.missed
            };
            let arriving = reads.bytes / self.check_gb_per_s + handled * 4.0 * self.lookup_ns;
            // With a thread on every core the I/O thread takes its time from them.
            let busy = f64::from(self.rates.threads);
            let stolen = reads.cpu_ns / self.cores * (busy / self.cores).min(1.0);
            // Clusters of a scan come one at a time, and one thread computes each.
            let alone = if scan && !on_demand {
                let share = reads.missed / s.neurons.max(1) as f64;
                (gates + sums) * share * (busy - 1.0) + reads.count * self.rates.section_ns
            } else {
                0.0
            };
            let work = gates + naming + sums + arriving + stolen + alone;
            let (head, ns) = if scan && !on_demand {
                let ahead =
                    reads.ns * (f64::from(self.stream_buffers) / (reads.count.max(1.0))).min(1.0);
                (0.0, reads.ns - ahead.min(attention))
            } else {
                ((gates + naming) / GATE_PIECES as f64, reads.ns)
            };
            let cluster = (sums + arriving) / s.neurons.div_ceil(CLUSTER) as f64;
            let io = if reads.count > 0.0 {
                ns + reads.latency_ns
            } else {
                0.0
            };
            let tail = if io > 0.0 {
                cluster + self.rates.section_ns
            } else {
                0.0
            };
            let ffn = work.max(head + io + tail);
            let ms = 1e-6;
            sum.ms += (attention + ffn) * ms;
            sum.compute_ms += (attention + work) * ms;
            sum.io_ms += reads.ns * ms;
            sum.wait_ms += (ffn - work) * ms;
            sum.bytes_read += reads.bytes;
            sum.reads += reads.count;
            memory_bytes += s.attention_bytes + s.neurons as f64 * s.gate_len + fires * s.rest_len;
        }
        let head = self.head(set);
        sum.ms += head * 1e-6;
        sum.compute_ms += head * 1e-6;
        sum.cold_hit_rate = if asked > 0.0 {
            1.0 - missed / asked
        } else {
            1.0
        };
        sum.tokens_per_s = 1e3 * t / sum.ms.max(1e-9);
        memory_bytes += s.vocab as f64 * s.head.row_bytes(s.d) as f64;
        let reading = memory_bytes / self.rates.read.at(set) * 1e-6;
        sum.limit = match () {
            () if sum.wait_ms > 0.25 * sum.ms && scan && !on_demand => Limit::SequentialReads,
            () if sum.wait_ms > 0.25 * sum.ms => Limit::RandomReads,
            () if reading > 0.5 * sum.compute_ms => Limit::Memory,
            () => Limit::Compute,
        };
        sum
    }

    /// Bytes of memory that a token walks through.
    fn working_set(&self) -> f64 {
        let s = self.shape;
        let fires = if s.dense { 1.0 } else { self.firing.share() };
        let neuron = s.gate_len + s.rest_len * fires;
        let layer = s.attention_bytes + s.neurons as f64 * neuron;
        s.layers as f64 * layer + (s.vocab * s.head.row_bytes(s.d)) as f64
    }

    /// Nanoseconds of rows times `tokens` tokens.
    fn products(&self, dtype: DType, rows: f64, bytes: f64, tokens: f64, set: f64) -> f64 {
        let Some(kernel) = self.rates.kernel(dtype) else {
            return bytes / self.rates.read.at(set);
        };
        let one = kernel.dot.ns(rows, bytes, set);
        if tokens <= 1.0 {
            return one;
        }
        let elements = bytes / dtype.row_bytes(32) as f64 * 32.0;
        one.max(elements * tokens / kernel.gemm_at(tokens))
    }

    /// What a section that takes `ns` for `items` pieces of work waits for the last one: half a piece
    /// of one thread on average, for every thread but that.
    fn end(&self, ns: f64, items: f64) -> f64 {
        ns / items.max(1.0) * (f64::from(self.rates.threads) - 1.0) / 2.0
    }

    fn attention(&self, tokens: f64, positions: f64, set: f64) -> f64 {
        let s = self.shape;
        let matrices = self.products(
            s.attention,
            s.attention_rows,
            s.attention_bytes,
            tokens,
            set,
        );
        let pairs = tokens * (positions + tokens / 2.0);
        let kv = pairs * s.kv_bytes / self.rates.read.at(set);
        let elements = 8.0 * s.d as f64 * tokens * self.element_ns;
        let items = (s.attention_rows / ROWS_PER_CHUNK as f64).max(1.0);
        let ends = 4.0 * self.end(matrices, items);
        matrices + ends + kv + elements + 6.0 * self.rates.section_ns
    }

    fn gates(&self, tokens: f64, rows: f64, set: f64) -> f64 {
        let s = self.shape;
        let pieces = GATE_PIECES as f64 * self.rates.section_ns;
        let products = self.products(s.ffn, rows, rows * s.gate_len, tokens, set);
        products + self.end(products, rows / CLUSTER as f64) + pieces
    }

    /// Products, sums of `fires` neurons, and of the clusters' sums.
    fn sums(&self, tokens: f64, fires: f64, set: f64) -> f64 {
        let s = self.shape;
        let bytes = fires * s.rest_len;
        let one = match self.rates.kernel(s.ffn) {
            Some(kernel) => kernel.neuron.ns(2.0 * fires, bytes, set),
            None => bytes / self.rates.read.at(set),
        };
        let all = one.max(self.products(s.ffn, 2.0 * fires, bytes, tokens, set));
        let clusters = (s.neurons.div_ceil(CLUSTER) as f64).min(fires);
        let all = all + self.end(all, clusters);
        let partials = clusters * tokens * 4.0 * s.d as f64;
        all + partials / self.rates.read.at(partials) + 3.0 * self.rates.section_ns
    }

    fn head(&self, set: f64) -> f64 {
        let s = self.shape;
        let rows = s.vocab as f64;
        let bytes = rows * s.head.row_bytes(s.d) as f64;
        self.products(s.head, rows, bytes, 1.0, set)
            + rows * 2.0 * self.element_ns
            + self.rates.section_ns
    }

    /// Up and Down of `missed` neurons behind the first `first` ones, or all of what a predictor
    /// names.
    fn on_demand(&self, first: usize, asked: f64, missed: f64, bundles: bool) -> Reads {
        let s = self.shape;
        let behind = (s.neurons - first) as u64;
        let (len, named) = match bundles {
            true => (s.gate_read + s.rest_read, self.predictor.named.max(1.0)),
            false => (s.rest_read, 1.0),
        };
        self.picks(behind, len, missed * named, asked * named)
    }

    fn picks(&self, units: u64, len: u64, missed: f64, asked: f64) -> Reads {
        if missed <= 0.0 {
            return Reads {
                asked,
                ..Reads::default()
            };
        }
        Reads {
            count: missed,
            ns: self.device.picks_ns(units as f64, len, missed),
            bytes: missed * len as f64,
            cpu_ns: missed * self.device.cpu_ns(len),
            latency_ns: self.device.latency_ns(len),
            asked,
            missed,
        }
    }

    /// Gate parts of all neurons that are not resident, then Up and Down of those that fire.
    fn gates_first(&self, plan: &MemoryPlan, first: usize, fires: f64) -> Reads {
        let s = self.shape;
        let behind = (s.neurons - first) as f64;
        let all: f64 = s.neurons as f64 * s.layers as f64;
        let held = (plan.slots as f64 / all.max(1.0)).min(1.0);
        let missing = behind * (1.0 - held);
        let gates = self.picks(behind as u64, s.gate_read, missing, missing);
        let rest = self.picks(behind as u64, s.rest_read, fires * (1.0 - held), fires);
        Reads {
            count: gates.count + rest.count,
            ns: gates.ns + rest.ns,
            bytes: gates.bytes + rest.bytes,
            cpu_ns: gates.cpu_ns + rest.cpu_ns,
            latency_ns: gates.latency_ns + rest.latency_ns,
            asked: behind,
            missed: missing,
        }
    }

    /// Every cluster behind the first `first` neurons.
    fn scan(&self, first: usize) -> Reads {
        let s = self.shape;
        let behind = s.neurons - first;
        let clusters = (behind as f64 / CLUSTER as f64).ceil();
        let bytes = s.cluster_read as f64 * behind as f64 / CLUSTER as f64;
        Reads {
            count: clusters,
            ns: bytes / s.cluster_read as f64
                * self.stream.read_ns(s.cluster_read, Pattern::Sequential),
            bytes,
            cpu_ns: clusters * self.device.cpu_ns(s.cluster_read),
            latency_ns: 0.0,
            asked: behind as f64,
            missed: behind as f64,
        }
    }
}
