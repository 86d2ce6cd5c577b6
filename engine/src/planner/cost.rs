//! Time of a pass: compute work of each layer, overlapped with reads.
//!
//! ```text
//! attention │ first gates │ other gates, sums of hits │ last sums │
//!           │             │ reads of misses ········→│           │   on demand
//! prefetch, up to buffers │ reads of other clusters →│           │   scan
//! ```
//!
//! Overlapping parts take `E[max(work, reads)]`, which exceeds the maximum of the means because the
//! number of misses varies between tokens. Not overlapped: the first piece of the gates, the
//! latency of the first read, the hand-over to and from the I/O thread, and the sums of the last
//! cluster. `reads.rs` counts the reads. An expert read whole is either resident or missing, so a
//! layer's time is the mean over the number of missing experts.

use emberflow_kernels::DType;
use emberflow_storage::profile::Pattern;

use super::firing::Absent;
use super::pass::{CostModel, Forecast, Limit};
use super::rates::ThreadRates;
use super::reads::{LayerReads, VARIANCE_RATIO};
use crate::cluster::CLUSTER;
use crate::ffn::GATE_PIECES;
use crate::matrix::ROWS_PER_CHUNK;
use crate::memory::MemoryPlan;
use crate::tiles::TileSizes;

/// A matrix: number of rows, and their bytes.
struct MatrixSize {
    rows: f64,
    bytes: f64,
}

/// A layer whose weights are all resident.
#[derive(Clone, Copy)]
pub struct ResidentLayer {
    /// Layer index.
    pub layer: usize,
    /// Rows of the pass.
    pub rows: usize,
}

/// Mode of a pass.
#[derive(Clone, Copy)]
struct Mode {
    /// Tokens of the pass; positions before them.
    tokens: f64,
    positions: f64,
    /// A predictor determines the active set.
    predicts: bool,
    /// Missing neurons are read as whole bundles: Gate rows are not resident.
    bundles: bool,
    /// Every neuron is needed or tested, in bundle order. `streams`: in one phase, as whole
    /// clusters.
    scan: bool,
    streams: bool,
    /// Prefetches start one layer ahead.
    foresees: bool,
    /// Bytes of memory touched per token (the working set).
    set: f64,
}

/// Compute times of an FFN, in nanoseconds.
struct LayerTimes {
    /// Attention before the FFN, overlapped with prefetches.
    attention: f64,
    /// All compute work.
    work: f64,
    /// Until the active set is complete; until its first piece is (`head`).
    gates: f64,
    head: f64,
    /// After the last read has completed.
    last: f64,
}

impl CostModel<'_> {
    /// Forecast of a pass of `tokens` tokens at position `positions`. `hot`: first neuron of each
    /// layer outside the hot region. `absent`: miss rates of the cold region.
    pub fn forecast(
        &self,
        plan: &MemoryPlan,
        hot: &[usize],
        absent: &Absent,
        tokens: usize,
        positions: usize,
    ) -> Forecast {
        let s = self.shape;
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
        let (mut asked, mut missed, mut memory_bytes) = (0.0, 0.0, 0.0);
        for layer in 0..s.layers {
            let first = hot.get(layer).copied().unwrap_or_default();
            let mode = self.mode(plan, layer, tokens, positions);
            let fires = self.fires(layer, self.own(tokens));
            let reads = match () {
                () if first >= s.neurons => LayerReads::default(),
                () if mode.streams => self.scan(first),
                () if mode.scan => {
                    self.gates_first(plan, first, self.firing.fires(layer, first, tokens))
                }
                () => self.on_demand(layer, first, tokens, absent, mode.bundles),
            };
            asked += reads.asked;
            missed += reads.missed;
            self.add_layer(&mut sum, mode, reads, fires);
            memory_bytes += s.attention_bytes + s.neurons as f64 * s.gate_len + fires * s.rest_len;
        }
        let set = self.working_set();
        let head = self.head(set);
        sum.ms += head * 1e-6;
        sum.compute_ms += head * 1e-6;
        sum.cold_hit_rate = if asked > 0.0 {
            1.0 - missed / asked
        } else {
            1.0
        };
        if plan.tiles > 0 {
            self.add_tiles(&mut sum, plan.tiles_missing());
        }
        self.add_streamed(&mut sum, plan.streamed as f64);
        sum.tokens_per_s = 1e3 * tokens as f64 / sum.ms.max(1e-9);
        memory_bytes += s.vocab as f64 * s.head.row_bytes(s.d) as f64;
        let reading = memory_bytes / self.rates.read.at(set) * 1e-6;
        let streams = self.mode(plan, s.layers - 1, tokens, positions).streams || plan.tiles > 0;
        sum.limit = match () {
            () if sum.wait_ms > 0.25 * sum.ms && streams => Limit::SequentialReads,
            () if sum.wait_ms > 0.25 * sum.ms => Limit::RandomReads,
            () if reading > 0.5 * sum.compute_ms => Limit::Memory,
            () => Limit::Compute,
        };
        sum
    }

    /// Adds the reads of tiles, of which the share `missing` is not resident. Dense tiles are read ahead during the whole pass,
    /// experts only during their FFN.
    fn add_tiles(&self, sum: &mut Forecast, missing: f64) {
        let (of, tokens) = (self.shape.tiles, sum.tokens as f64);
        let blocks = (tokens / TileSizes::ROWS as f64).ceil();
        let [dense, experts] = [
            of.dense * blocks,
            of.experts * (1.0 - (1.0 - of.visited).powf(tokens)),
        ];
        sum.cold_hit_rate = 1.0 - missing;
        let bytes = (dense + experts) * missing;
        if bytes <= 0.0 {
            return;
        }
        let beside = match of.experts > 0.0 {
            // The FFN's part of the pass, by bytes.
            true => {
                let visited = of.dense + of.experts * of.visited;
                let all = self.shape.attention_bytes * self.shape.layers as f64;
                sum.ms * (visited / all.max(1.0)).min(1.0)
            }
            false => sum.ms,
        };
        self.add_long_reads(sum, bytes, beside);
    }

    /// Adds the reads of matrices that are read once for each pass, ahead of their use.
    fn add_streamed(&self, sum: &mut Forecast, bytes: f64) {
        if bytes <= 0.0 {
            return;
        }
        // Storage is busy with tiles for a part of the time already.
        let idle = (sum.ms - sum.io_ms).max(0.0);
        self.add_long_reads(sum, bytes, idle);
    }

    /// Adds `bytes` in reads as long as a tile, which go on during `beside` milliseconds of other work.
    fn add_long_reads(&self, sum: &mut Forecast, bytes: f64, beside: f64) {
        let len = self.shape.tiles.len.max(1);
        let count = bytes / len as f64;
        let io_ms = count * self.storage.read_ns(len, Pattern::Sequential) * 1e-6;
        let wait = (io_ms - beside).max(0.0);
        sum.ms += wait;
        sum.wait_ms += wait;
        sum.io_ms += io_ms;
        sum.bytes_read += bytes;
        sum.reads += count;
    }

    fn mode(&self, plan: &MemoryPlan, layer: usize, tokens: usize, positions: usize) -> Mode {
        let dense = self.shape.dense || self.firing.is_always(layer);
        let predicts = self.predictor.bytes > 0 && !dense;
        let bundles = layer as u64 >= plan.gate_banks;
        let scan = dense || bundles && !predicts;
        Mode {
            tokens: tokens as f64,
            positions: positions as f64,
            predicts,
            bundles,
            scan,
            streams: scan && (dense || !self.two_phases),
            foresees: self.foresees && predicts && bundles && tokens == 1,
            set: self.working_set(),
        }
    }

    /// Time in nanoseconds of an FFN without reads: [before a lane can start, total].
    pub fn in_memory(&self, plan: &MemoryPlan, of: ResidentLayer) -> [f64; 2] {
        let mode = self.mode(plan, of.layer, of.rows, 0);
        let fires = self.fires(of.layer, self.own(of.rows));
        let times = self.ffn(&LayerReads::default(), fires, mode);
        [if mode.streams { 0.0 } else { times.gates }, times.work]
    }

    /// Rows computed by the CPU; a lane computes the others.
    fn own(&self, rows: usize) -> usize {
        rows.saturating_sub(self.beside.rows)
    }

    /// Neurons of a layer that the CPU computes for at least one of `tokens` rows.
    fn fires(&self, layer: usize, tokens: usize) -> f64 {
        if self.shape.dense {
            self.neurons()
        } else {
            self.firing.fires(layer, self.beside.neurons, tokens)
        }
    }

    /// Adds a layer with `fires` computed neurons, overlapped with `reads`.
    fn add_layer(&self, sum: &mut Forecast, mode: Mode, reads: LayerReads, fires: f64) {
        let foresees = mode.foresees && reads.count > 0.0;
        let (reads, late) = if foresees {
            reads.foreseen()
        } else {
            (reads, reads)
        };
        let attention = self.attention(mode.tokens, mode.positions, mode.set);
        let mut times = LayerTimes {
            attention,
            ..self.ffn(&reads, fires, mode)
        };
        if foresees {
            times.work += self.naming(mode.tokens, mode.set);
        }
        let (work, mut all) = (times.work, self.overlapped(&times, &late, mode.streams));
        if mode.foresees {
            // Storage is busy from one layer's prefetch to the next.
            let deviation = reads.ns * (VARIANCE_RATIO / reads.count.max(1.0)).sqrt();
            all = mean_of_larger(attention + all, reads.ns, deviation) - attention;
        }
        let ms = 1e-6;
        sum.ms += (attention + all) * ms;
        sum.compute_ms += (attention + work.min(all)) * ms;
        sum.io_ms += reads.ns * ms;
        sum.wait_ms += (all - work).max(0.0) * ms;
        sum.bytes_read += reads.bytes;
        sum.reads += reads.count;
    }

    /// Compute times of an FFN with `fires` neurons, overlapped with `reads`.
    fn ffn(&self, reads: &LayerReads, fires: f64, mode: Mode) -> LayerTimes {
        let Mode {
            predicts,
            streams,
            set,
            ..
        } = mode;
        let tokens = (mode.tokens - self.beside.rows as f64).max(1.0);
        let (s, m) = (self.shape, self.machine);
        let neurons = self.neurons();
        let named = if predicts {
            (fires * self.predictor.named).min(neurons)
        } else {
            neurons
        };
        let found = if streams {
            0.0
        } else {
            (reads.asked - reads.missed).max(0.0)
        };
        let naming = neurons * m.name_ns + found * m.lookup_ns;
        let predicting = self.naming(mode.tokens, set);
        let gates = self.gates(tokens, named, set) + predicting;
        let sums = self.sums(tokens, fires, set);
        let admitted = if streams { 0.0 } else { reads.missed };
        let threads = f64::from(self.rates.threads.max(1));
        let checking = (reads.checked / threads + reads.checked_alone) / m.check_gb_per_s;
        let arriving = checking + admitted * m.replace_ns;
        // Each piece of the gates with misses wakes the I/O thread, unless it is still awake.
        let pieces = GATE_PIECES as f64;
        let wakeups = if streams {
            0.0
        } else {
            let apart = 1.0 + (gates + naming) / m.wake_ns.max(1.0);
            reads.count.min(pieces).min(apart)
        };
        // The caller looks up neurons and wakes the I/O thread while other threads compute gates.
        let calling = naming + wakeups * m.tell_ns;
        let naming = (calling / threads).max(calling - gates);
        let own = gates + sums + naming + arriving + self.beside.copying + self.rates.layer_ns;
        let taken = self.taken(reads, own, wakeups);
        // A lane starts once the active set is known. A streamed layer has none.
        let waits = !streams && self.beside.rows == 0;
        let before = if waits { gates + naming } else { 0.0 };
        let work = before + (own + taken - before).max(self.beside.ns);
        let clusters = s.neurons.div_ceil(CLUSTER) as f64;
        // Streamed clusters include their Gate rows.
        let late = sums + arriving + if streams { gates } else { 0.0 };
        LayerTimes {
            attention: 0.0,
            work,
            // Misses of earlier pieces are read while later pieces are computed.
            gates: gates + naming + taken * (pieces - 1.0) / pieces,
            head: (gates + naming) / pieces,
            last: late / clusters + self.rates.section_ns,
        }
    }

    /// Neurons of a layer that the CPU may compute.
    fn neurons(&self) -> f64 {
        self.shape.neurons.saturating_sub(self.beside.neurons) as f64
    }

    /// CPU time in nanoseconds that the I/O thread takes from the compute threads, which run for
    /// `own` nanoseconds and wake it `wakeups` times.
    ///
    /// With a compute thread on every core, the I/O thread preempts one of them and the others wait
    /// at the barrier; the loss is at most one core. The I/O thread sleeps while storage is idle.
    fn taken(&self, reads: &LayerReads, own: f64, wakeups: f64) -> f64 {
        let m = self.machine;
        let cores = f64::from(m.machine.cores.max(1));
        let threads = f64::from(self.rates.threads.max(1));
        let awake = (reads.ns / own.max(1.0)).min(1.0);
        let busy = reads.cpu_ns + (reads.busy_ns - reads.cpu_ns).max(0.0) * awake;
        // A busy core has no wake-up latency. A context switch costs about as much as the wake-up
        // call.
        let waking = wakeups * m.tell_ns;
        let taken = (busy + waking) * (threads / cores).min(1.0);
        taken.min(own / (cores - 1.0).max(1.0))
    }

    /// Nanoseconds to score a layer's neurons for all tokens of a pass, including the rows of a
    /// device: the larger of reading the predictor's weights and multiplying.
    fn naming(&self, tokens: f64, set: f64) -> f64 {
        let layers = self.shape.layers as f64;
        let reading = self.predictor.bytes as f64 / layers / self.rates.read.at(set);
        let products = self.predictor.products / layers * tokens;
        match self.rates.kernel(DType::Q4) {
            Some(kernel) if tokens > 1.0 => reading.max(products / kernel.gemm_at(tokens)),
            _ => reading,
        }
    }

    /// Time of an FFN with overlapped reads, in nanoseconds.
    fn overlapped(&self, times: &LayerTimes, reads: &LayerReads, streams: bool) -> f64 {
        if reads.count <= 0.0 {
            return times.work;
        }
        let wake = self.machine.wake_ns;
        // Both the I/O thread and the waiting thread sleep if anything is read.
        let round_trip = 2.0 * wake + reads.latency_ns;
        if streams && self.shape.visited < 1.0 {
            let share = reads.missed / (self.shape.neurons as f64).max(1.0);
            return misses(self.shape.chosen, share)
                .map(|(chance, missed)| {
                    if missed > 0.0 {
                        chance * times.work.max(round_trip + missed * reads.ns + times.last)
                    } else {
                        chance * times.work
                    }
                })
                .sum();
        }
        let round_trip = round_trip * (1.0 - (-reads.count).exp());
        if streams {
            // As many clusters as there are buffers are read during attention.
            let buffers = f64::from(self.stream_buffers);
            let ahead = reads.ns * (buffers / reads.count.max(1.0)).min(1.0);
            return times.work.max(reads.ns - ahead.min(times.attention));
        }
        let all = times.head + round_trip + reads.ns + times.last;
        // Storage faster than the gates waits for their last piece.
        let rest = times.gates + round_trip + reads.ns / GATE_PIECES as f64 + times.last;
        let deviation = reads.ns * (VARIANCE_RATIO / reads.count).sqrt();
        mean_of_larger(times.work, all.max(rest), deviation)
    }

    /// Bytes of memory touched per token.
    fn working_set(&self) -> f64 {
        let s = self.shape;
        let fires = if s.dense { 1.0 } else { self.firing.share() };
        let neuron = s.gate_len + s.rest_len * fires;
        let layer = s.attention_bytes + s.neurons as f64 * neuron;
        s.layers as f64 * layer + (s.vocab * s.head.row_bytes(s.d)) as f64
    }

    /// Nanoseconds of a product of a matrix and `tokens` tokens.
    fn products(rates: &ThreadRates, dtype: DType, of: MatrixSize, tokens: f64, set: f64) -> f64 {
        let MatrixSize { rows, bytes } = of;
        let Some(kernel) = rates.kernel(dtype) else {
            return bytes / rates.read.at(set);
        };
        let one = kernel.dot.ns(rows, bytes, set);
        if tokens <= 1.0 {
            return one;
        }
        let some = if dtype.is_per_channel() || dtype.is_blocks() {
            1024
        } else {
            32
        };
        let elements = bytes / dtype.row_bytes(some) as f64 * some as f64;
        one.max(elements * tokens / kernel.gemm_at(tokens))
    }

    /// Expected idle time at the end of a parallel section of `ns` nanoseconds with `items` work
    /// items: half an item for every thread but the last.
    fn end(rates: &ThreadRates, ns: f64, items: f64) -> f64 {
        ns / items.max(1.0) * (f64::from(rates.threads) - 1.0) / 2.0
    }

    fn attention(&self, tokens: f64, positions: f64, set: f64) -> f64 {
        let s = self.shape;
        let of = MatrixSize {
            rows: s.attention_rows,
            bytes: s.attention_bytes,
        };
        let matrices = Self::products(self.rates, s.attention, of, tokens, set);
        let pairs = tokens * (positions + tokens / 2.0);
        let kv = pairs * s.kv_bytes / self.rates.read.at(set);
        let elements = 8.0 * s.d as f64 * tokens * self.machine.element_ns;
        let items = (s.attention_rows / ROWS_PER_CHUNK as f64).max(1.0);
        let ends = 4.0 * Self::end(self.rates, matrices, items);
        matrices + ends + kv + elements + 6.0 * self.rates.section_ns
    }

    fn gates(&self, tokens: f64, rows: f64, set: f64) -> f64 {
        let (s, rates) = (self.shape, self.rates);
        let bytes = rows * s.gate_len;
        let products = Self::products(rates, s.ffn, MatrixSize { rows, bytes }, tokens, set);
        products + Self::end(rates, products, rows / CLUSTER as f64) + rates.section_ns
    }

    /// Up products and Down sums of `fires` neurons, and the reduction of partial sums.
    fn sums(&self, tokens: f64, fires: f64, set: f64) -> f64 {
        let (s, rates) = (self.shape, self.rates);
        let bytes = fires * s.rest_len;
        let one = match rates.kernel(s.ffn) {
            Some(kernel) => kernel.neuron.ns(2.0 * fires, bytes, set),
            None => bytes / rates.read.at(set),
        };
        let rows = 2.0 * fires;
        let all = one.max(Self::products(
            rates,
            s.ffn,
            MatrixSize { rows, bytes },
            tokens,
            set,
        ));
        let clusters = (s.neurons.div_ceil(CLUSTER) as f64).min(fires);
        let all = all + Self::end(rates, all, clusters);
        let partials = clusters * tokens * 4.0 * s.d as f64;
        all + partials / rates.read.at(partials) + 3.0 * rates.section_ns
    }

    fn head(&self, set: f64) -> f64 {
        let s = self.shape;
        let rows = s.vocab as f64;
        let bytes = rows * s.head.row_bytes(s.d) as f64;
        Self::products(self.rates, s.head, MatrixSize { rows, bytes }, 1.0, set)
            + rows * 2.0 * self.machine.element_ns
            + self.rates.section_ns
    }
}

/// Binomial distribution of misses among `chosen` experts, each missing with probability `share`:
/// yields (probability of k misses, k / expected misses) for each k.
fn misses(chosen: usize, share: f64) -> impl Iterator<Item = (f64, f64)> {
    let n = chosen.max(1);
    let share = share.clamp(0.0, 1.0);
    let mut choose = 1.0;
    (0..=n).map(move |k| {
        let chance = choose * share.powi(k as i32) * (1.0 - share).powi((n - k) as i32);
        choose *= (n - k) as f64 / (k + 1) as f64;
        (chance, k as f64 / (n as f64 * share).max(1e-9))
    })
}

/// `E[max(fixed, x)]` for a normal `x` with this mean and deviation.
fn mean_of_larger(fixed: f64, mean: f64, deviation: f64) -> f64 {
    if deviation <= 0.0 {
        return fixed.max(mean);
    }
    let z = (mean - fixed) / deviation;
    let below = 0.5 * libm::erfc(-z / std::f64::consts::SQRT_2);
    let density = (-0.5 * z * z).exp() / (2.0 * std::f64::consts::PI).sqrt();
    fixed + deviation * density + (mean - fixed) * below
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_are_missed_one_by_one() {
        for (chosen, share) in [(1, 1.0), (2, 0.3), (8, 0.75), (4, 0.0)] {
            let all: Vec<(f64, f64)> = misses(chosen, share).collect();
            let chances: f64 = all.iter().map(|(chance, _)| chance).sum();
            let reads: f64 = all.iter().map(|(chance, reads)| chance * reads).sum();
            assert!((chances - 1.0).abs() < 1e-9, "{all:?}");
            assert!(share == 0.0 || (reads - 1.0).abs() < 1e-9, "{all:?}");
        }
        let (none, _) = misses(2, 0.3).next().expect("none missed");
        assert!((none - 0.49).abs() < 1e-9, "{none}");
    }

    #[test]
    fn the_mean_of_the_larger_is_above_the_larger_mean() {
        assert_eq!(mean_of_larger(3.0, 2.0, 0.0), 3.0);
        assert!((mean_of_larger(10.0, 2.0, 1.0) - 10.0).abs() < 1e-9);
        assert!((mean_of_larger(2.0, 10.0, 1.0) - 10.0).abs() < 1e-9);
        // Equal means: 0.4 standard deviations more.
        assert!((mean_of_larger(5.0, 5.0, 1.0) - 5.398_942).abs() < 1e-5);
    }
}
