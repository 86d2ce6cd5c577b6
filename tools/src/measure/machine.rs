//! Measures [`Rates`]: half a second to a few seconds of the kernels of decoding, on memory of several sizes, and of
//! their bookkeeping.

use std::hint::black_box;
use std::thread::Builder;
use std::time::{Duration, Instant};

use emberflow_engine::CLUSTER;
use emberflow_engine::planner::rates::{
    FORMATS, KernelRates, Rates, ThreadRates, Throughput, VERSION, counts,
};
use emberflow_kernels::{
    Activations, Columns, Compute, Cpu, DType, Row, Workers, matmul_scratch, matmul_scratch_q,
    quantize_row, read_bandwidth,
};
use emberflow_storage::arena::{Arena, ArenaOptions};
use emberflow_storage::mem;
use emberflow_storage::profile::{Machine, Watch};

use super::cache;
use super::timing::{SCATTER, best};
use crate::Failure;

/// Elements of a long row: the residual width of a 7B model.
pub const LONG: usize = 4096;

/// Elements of a short row, as in a small model. Two lengths separate the cost per row from the cost per byte.
const SHORT: usize = 256;

/// Working set sizes: within a core's cache, within a shared cache, in memory.
const SETS: [u64; 3] = [1 << 20, 16 << 20, 256 << 20];

/// Batch sizes of matrix products.
const TOKENS: [usize; 4] = [2, 8, 32, 128];

/// How thoroughly to measure.
#[derive(Debug, Clone)]
pub struct Effort {
    /// Time for each of about 15 values per thread count and format, in each round.
    pub time: Duration,
    /// Rounds over all values; the best of each counts.
    pub rounds: u32,
    /// Largest working set in bytes; less on small machines.
    pub memory: u64,
    /// Block formats.
    pub formats: Vec<DType>,
    /// Whether to leave out most thread counts and lengths of matrix products.
    pub brief: bool,
}

impl Default for Effort {
    /// All formats.
    fn default() -> Self {
        Self {
            time: Duration::from_millis(10),
            rounds: 2,
            memory: SETS[2],
            formats: FORMATS.to_vec(),
            brief: false,
        }
    }
}

impl Effort {
    /// Some hundred milliseconds for one or two formats.
    pub fn brief(formats: Vec<DType>) -> Self {
        Self {
            time: Duration::from_millis(1),
            rounds: 3,
            memory: twice_the_caches(),
            formats,
            brief: true,
        }
    }

    /// Thread counts: all up to some, or one, half and all of them.
    pub fn counts(&self, cores: u32) -> Vec<u32> {
        let all = counts(cores);
        if !self.brief {
            return all;
        }
        let mut few = vec![1, cores / 2, cores.max(1)];
        few.retain(|&n| n > 0);
        few.dedup();
        few
    }
}

/// Twice the largest cache that cores share, at least 64 MiB.
fn twice_the_caches() -> u64 {
    let shared = std::fs::read_to_string("/sys/devices/system/cpu/cpu0/cache/index3/size");
    let kib = shared
        .ok()
        .and_then(|s| s.trim().strip_suffix('K')?.parse::<u64>().ok());
    (kib.unwrap_or(0) << 11).clamp(64 << 20, SETS[2])
}

/// Measures this machine. Allocates [`Effort::memory`].
///
/// # Errors
/// Out of memory.
pub fn measure(effort: &Effort, mut tick: impl FnMut()) -> Result<Rates, Failure> {
    let machine = Machine::here();
    let sets = sets(effort.memory);
    let watch = Watch::start(None);
    // Huge pages, as for weights.
    let options = ArenaOptions {
        huge_pages: true,
        ..ArenaOptions::default()
    };
    let mut arena = Arena::new(1, sets[sets.len() - 1] as usize, 1, options)
        .map_err(emberflow_storage::Error::from)?;
    let Some(mut memory) = arena.take() else {
        return Err(Failure::usage(
            "not enough memory to measure: close other programs or raise the memory limit of this process",
        ));
    };
    let pools: Vec<Compute> = (effort.counts(machine.cores).into_iter())
        .map(|n| Compute::new(n as usize, None))
        .collect();
    let cpu = Cpu::detect();
    memory.as_mut_slice().fill(1);
    let mut round = || -> Result<Rates, Failure> {
        let mut threads: Vec<ThreadRates> = (pools.iter())
            .map(|on| thread_rates(on, memory.as_slice(), &sets, effort.time))
            .collect();
        for &dtype in &effort.formats {
            let mut lab = Lab {
                cpu,
                dtype,
                memory: memory.as_mut_slice(),
                effort,
            };
            lab.kernels(&pools, &sets, &mut threads, &mut tick);
        }
        let cold = cache::measure(cache::USUAL, effort.time)?;
        let (wake_ns, tell_ns) = wake(effort.time)?;
        Ok(Rates {
            version: VERSION,
            machine: machine.clone(),
            isa: cpu.name().to_owned(),
            measured: true,
            doubt: None,
            check_gb_per_s: check(memory.as_slice(), effort.time),
            lookup_ns: cold.pin_ns + cold.release_ns,
            replace_ns: cold.replace_ns,
            name_ns: name(effort.time),
            wake_ns,
            tell_ns,
            element_ns: element(cpu, effort.time),
            threads,
        })
    };
    let mut rates = round()?;
    for _ in 1..effort.rounds {
        rates = rates.best_of(round()?);
    }
    rates.doubt = watch.end(0, None).doubt();
    Ok(rates)
}

/// Working set sizes in ascending order: [`SETS`] up to `most` and a quarter of free memory.
fn sets(most: u64) -> Vec<u64> {
    let free = mem::mem_available().unwrap_or(u64::MAX) / 4;
    let most = most.min(free).max(SETS[0]);
    let mut sets: Vec<u64> = SETS.into_iter().filter(|&s| s < most).collect();
    sets.push(most);
    sets
}

/// Rates of a thread count that do not depend on a kernel.
fn thread_rates(on: &Compute, memory: &[u8], sets: &[u64], time: Duration) -> ThreadRates {
    let section = section(&on.workers, time);
    let read = |set: u64| {
        let bytes = &memory[..set as usize];
        (set, read_bandwidth(on, &[bytes], time) / 1e9)
    };
    ThreadRates {
        threads: on.threads() as u32,
        section_ns: section,
        layer_ns: 0.0,
        read: Throughput {
            row_ns: 0.0,
            gb_per_s: sets.iter().map(|&s| read(s)).collect(),
        },
        kernels: Vec::new(),
    }
}

/// Median nanoseconds of an almost empty parallel section, some microseconds after the one before, as in decoding.
fn section(workers: &Workers, time: Duration) -> f64 {
    const PAUSE: Duration = Duration::from_micros(5);
    let (start, mut all) = (Instant::now(), Vec::new());
    while start.elapsed() < time || all.is_empty() {
        let pause = Instant::now();
        while pause.elapsed() < PAUSE {
            std::hint::spin_loop();
        }
        let one = Instant::now();
        workers.for_each_chunk(4 * workers.threads(), &|_, item| {
            black_box(item);
        });
        all.push(one.elapsed().as_nanos() as f64);
    }
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or_default()
}

/// Separates the cost per row from the cost per byte. `short` and `long` are nanoseconds per row of the two lengths,
/// `long` for every working set.
///
/// If other load has spoiled one of them, they do not fit: a long row has 16 times as many bytes and takes at least twice as
/// long. Then all of its time is that of its bytes. So no bandwidth is more than twice what was seen.
fn fit(dtype: DType, short: f64, long: &[f64], sets: &[u64]) -> Throughput {
    let bytes = [SHORT, LONG].map(|n| dtype.row_bytes(n) as f64);
    let first = long.first().copied().unwrap_or(short);
    let row_ns = match 2.0 * short <= first {
        true => {
            let per_byte = (first - short) / (bytes[1] - bytes[0]);
            (short - bytes[0] * per_byte).max(0.0)
        }
        false => 0.0,
    };
    let speed = |(&set, &ns): (&u64, &f64)| (set, bytes[1] / (ns - row_ns).max(ns / 2.0));
    Throughput {
        row_ns,
        gb_per_s: sets.iter().zip(long).map(speed).collect(),
    }
}

/// Nanoseconds per row by working set.
struct RowTimes {
    dot: Vec<f64>,
    neuron: Vec<f64>,
}

/// Rows of one format and the vectors they are multiplied with.
struct Lab<'a> {
    cpu: Cpu,
    dtype: DType,
    memory: &'a mut [u8],
    effort: &'a Effort,
}

impl Lab<'_> {
    /// Measures the kernels of the format for every thread count and both row lengths.
    fn kernels(
        &mut self,
        pools: &[Compute],
        sets: &[u64],
        threads: &mut [ThreadRates],
        tick: &mut impl FnMut(),
    ) {
        let mut both = [Vec::new(), Vec::new()];
        for (n, found) in [(SHORT, 0), (LONG, 1)] {
            let sets = if n == SHORT { &sets[..1] } else { sets };
            self.fill(n, sets[sets.len() - 1]);
            for on in pools {
                both[found].push(self.speeds(&on.workers, n, sets));
            }
        }
        let [short, long] = both;
        for (((rates, on), short), long) in threads.iter_mut().zip(pools).zip(short).zip(long) {
            rates.kernels.push(KernelRates {
                dtype: self.dtype.name().to_owned(),
                dot: fit(self.dtype, short.dot[0], &long.dot, sets),
                neuron: fit(self.dtype, short.neuron[0], &long.neuron, sets),
                gemm: self.gemm(&on.workers),
            });
            tick();
        }
    }

    /// Fills the first `bytes` of the memory with quantized rows of `n` numbers.
    fn fill(&mut self, n: usize, bytes: u64) {
        let mut row = vec![0; self.dtype.row_bytes(n)];
        // Blocks are not written: theirs are zeros, which take as long.
        if !self.dtype.is_blocks() {
            let (quants, scales) = row.split_at_mut(self.dtype.quants_bytes(n));
            // The values are finite and within the range of every format.
            let _ = quantize_row(self.dtype, &numbers(n), quants, scales);
        }
        for to in self.memory[..bytes as usize].chunks_exact_mut(row.len()) {
            to.copy_from_slice(&row);
        }
    }

    /// Whether products are those of integers with activations in 8 bits.
    fn is_integers(&self) -> bool {
        self.dtype.is_grouped() || self.dtype.is_blocks()
    }

    fn speeds(&self, workers: &Workers, n: usize, sets: &[u64]) -> RowTimes {
        let times = |f: &dyn Fn(&[u8]) -> f64| {
            sets.iter()
                .map(|&s| f(&self.memory[..s as usize]))
                .collect()
        };
        let dot: Vec<f64> = times(&|bytes| self.dot(workers, n, bytes));
        let neuron = match self.dtype.is_blocks() {
            // These are no neurons: all rows are contiguous.
            true => dot.clone(),
            false => times(&|bytes| self.neuron(workers, n, bytes)),
        };
        RowTimes { dot, neuron }
    }

    /// Consecutive rows, as attention and the head read them. Nanoseconds per row.
    fn dot(&self, workers: &Workers, n: usize, bytes: &[u8]) -> f64 {
        let (cpu, stride) = (self.cpu, self.dtype.row_bytes(n));
        let mut y = vec![0.0; bytes.len() / stride];
        let x = numbers(n);
        let mut activations = Activations::default();
        cpu.quantize_activations(&x, 1, &mut activations);
        let quantized = activations.all();
        let rows = y.len() as f64;
        let pass = best(self.effort.time, || {
            workers.for_each_chunk_mut(&mut y, 32, &|_, chunk, out| {
                let part = &bytes[chunk * 32 * stride..][..out.len() * stride];
                if self.is_integers() {
                    cpu.matvec_q(self.dtype, part, stride, quantized, out);
                } else {
                    cpu.matvec(self.dtype, part, stride, n, &x, out);
                }
            });
        });
        black_box(&y);
        pass / rows
    }

    /// Every [`SCATTER`]th neuron: a dot product with one row, and the next row added to a sum, as in an FFN cluster.
    /// Nanoseconds per row; a neuron has two.
    fn neuron(&self, workers: &Workers, n: usize, bytes: &[u8]) -> f64 {
        let (cpu, dtype) = (self.cpu, self.dtype);
        let len = dtype.row_bytes(n);
        let bundle = 2 * len;
        let neurons = (bytes.len() / bundle / SCATTER).saturating_sub(1);
        let per_cluster = CLUSTER / SCATTER;
        let x = numbers(n);
        let mut activations = Activations::default();
        cpu.quantize_activations(&x, 1, &mut activations);
        let quantized = activations.all();
        let clusters = neurons.div_ceil(per_cluster).max(1);
        let mut sums = vec![0.0; clusters.min(256) * n];
        // Other neurons are active each time, so that the whole working set is used.
        let mut turn = 0;
        let pass = best(self.effort.time, || {
            turn = (turn + 1) % SCATTER;
            // Sums are reused: a layer has about 100 clusters.
            workers.for_each_chunk_mut(&mut sums, n, &|_, sum, out| {
                let mut hidden = [0.0; CLUSTER];
                for cluster in (sum..clusters).step_by(256) {
                    let first = cluster * per_cluster;
                    let count = per_cluster.min(neurons.saturating_sub(first));
                    let at = |i: usize| &bytes[((first + i) * SCATTER + turn) * bundle..][..bundle];
                    let row = |bytes| Row::inline(dtype, n, bytes);
                    let mut ups = [Row::f32(&[]); CLUSTER];
                    let mut downs = ups;
                    for i in 0..count {
                        let (up, down) = at(i).split_at(len);
                        (ups[i], downs[i]) = (row(up), row(down));
                    }
                    let hidden = &mut hidden[..count];
                    if dtype.is_grouped() {
                        cpu.dot_rows_q(&ups[..count], quantized, hidden);
                    } else {
                        for (h, up) in hidden.iter_mut().zip(&ups) {
                            *h = cpu.dot(*up, &x);
                        }
                    }
                    cpu.sum_rows(hidden, &downs[..count], out);
                }
            });
        });
        black_box(&sums);
        pass / (2 * neurons.max(1)) as f64
    }

    /// Multiply-adds per second of matrix products, by batch size.
    fn gemm(&self, workers: &Workers) -> Vec<(u32, f64)> {
        let (cpu, dtype, n) = (self.cpu, self.dtype, LONG);
        let stride = dtype.row_bytes(n);
        let rows = (512 * workers.threads()).min(self.memory.len() / stride);
        let mut scratch =
            vec![vec![0.0; matmul_scratch(n).max(matmul_scratch_q(n))]; workers.threads()];
        let speed = |&tokens: &usize| {
            let x = numbers(n * tokens);
            let mut activations = Activations::default();
            cpu.quantize_activations(&x, tokens, &mut activations);
            let quantized = activations.all();
            let mut y = vec![0.0; rows * tokens];
            let pass = best(self.effort.time, || {
                let y = Columns::new(&mut y, tokens, rows, rows);
                workers.for_each_column_block(y, 32, &mut scratch, &|scratch, first, mut block| {
                    let part = &self.memory[first * stride..][..block.width() * stride];
                    if self.is_integers() {
                        let x = quantized;
                        cpu.matmul_q(dtype, part, stride, x, &mut block, scratch);
                    } else {
                        cpu.matmul_columns(dtype, part, stride, n, &x, &mut block, scratch);
                    }
                });
            });
            black_box(&y);
            (tokens as u32, (rows * n * tokens) as f64 / pass)
        };
        let step = if self.effort.brief { 2 } else { 1 };
        TOKENS.iter().step_by(step).map(speed).collect()
    }
}

/// GB/s of checksums over uncached memory, as after a read by the device.
fn check(bytes: &[u8], time: Duration) -> f64 {
    let pass = best(time, || {
        for part in bytes.chunks(4096) {
            black_box(emberflow_storage::container::checksum(part));
        }
    });
    bytes.len() as f64 / pass
}

/// Nanoseconds to test a gate, of which one in [`SCATTER`] is active, unpredictably.
fn name(time: Duration) -> f64 {
    let mut state = 1u32;
    let gates: Vec<f32> = (0..2 * cache::USUAL)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f32::from(u8::from((state >> 16).is_multiple_of(SCATTER as u32)))
        })
        .collect();
    let mut ids = Vec::with_capacity(gates.len());
    let pass = best(time, || {
        ids.clear();
        for (id, gate) in black_box(&gates).chunks_exact(1).enumerate() {
            if gate.iter().filter(|&&g| g != 0.0).count() > 0 {
                ids.push(id as u32);
            }
        }
        black_box(&ids);
    });
    pass / gates.len() as f64
}

/// Median nanoseconds until a sleeping thread receives a message, and to send it, some hundred microseconds after the
/// last one, as for the I/O thread.
///
/// # Errors
/// There is no thread to wake.
fn wake(time: Duration) -> std::io::Result<(f64, f64)> {
    const PAUSE: Duration = Duration::from_micros(200);
    let (send, receive) = std::sync::mpsc::channel::<Instant>();
    let median = |mut all: Vec<f64>| {
        all.sort_by(f64::total_cmp);
        all.get(all.len() / 2).copied().unwrap_or_default()
    };
    let sleeper = Builder::new().name("ember-sleeper".into()).spawn(move || {
        let all = receive.iter().map(|sent| sent.elapsed().as_nanos() as f64);
        median(all.collect())
    })?;
    let (start, mut sent) = (Instant::now(), Vec::new());
    while start.elapsed() < time {
        let pause = Instant::now();
        while pause.elapsed() < PAUSE {
            std::hint::spin_loop();
        }
        let now = Instant::now();
        if send.send(now).is_err() {
            break;
        }
        sent.push(now.elapsed().as_nanos() as f64);
    }
    drop(send);
    Ok((sleeper.join().unwrap_or_default(), median(sent)))
}

/// Nanoseconds per element of a norm and what follows it.
fn element(cpu: Cpu, time: Duration) -> f64 {
    let (x, weight, mut out) = (numbers(LONG), numbers(LONG), vec![0.0; LONG]);
    let mut activations = Activations::default();
    let pass = best(time, || {
        cpu.rmsnorm(&x, &weight, 1e-5, &mut out);
        cpu.quantize_activations(&out, 1, &mut activations);
    });
    black_box(&out);
    pass / LONG as f64
}

/// `n` pseudo-random numbers.
fn numbers(n: usize) -> Vec<f32> {
    (0..n)
        .map(|i| ((i * 37 % 101) as f32 - 50.0) / 64.0)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_costs_what_its_bytes_do_not() {
        // 10 ns per row and 2 GB/s, 4 GB/s from the cache.
        let [short, long] = [SHORT, LONG].map(|n| DType::Q8.row_bytes(n) as f64);
        let times = [10.0 + long / 4.0, 10.0 + long / 2.0];
        let speed = fit(DType::Q8, 10.0 + short / 4.0, &times, &[1, 2]);
        assert!((speed.row_ns - 10.0).abs() < 1e-9);
        assert!((speed.gb_per_s[0].1 - 4.0).abs() < 1e-9);
        assert!((speed.gb_per_s[1].1 - 2.0).abs() < 1e-9);
    }

    #[test]
    fn times_that_do_not_fit_are_those_of_the_bytes() {
        let [short_bytes, bytes] = [SHORT, LONG].map(|n| DType::Q4.row_bytes(n) as f64);
        let fitted = |short, long: [f64; 2]| fit(DType::Q4, short, &long, &[1, 2]);
        let plain = [(1, bytes / 1000.0), (2, bytes / 1600.0)];
        // Other load made the short rows slow, or the long ones were faster afterwards.
        for short in [501.0, 999.999, 1000.0, 5000.0] {
            let speed = fitted(short, [1000.0, 1600.0]);
            assert_eq!(
                (speed.row_ns, speed.gb_per_s),
                (0.0, plain.to_vec()),
                "{short}"
            );
        }
        // A bandwidth is at most twice what was seen.
        let speed = fitted(500.0, [1000.0, 300.0]);
        let row_ns = 500.0 - short_bytes * 500.0 / (bytes - short_bytes);
        assert!((speed.row_ns - row_ns).abs() < 1e-9, "{speed:?}");
        assert!(speed.gb_per_s[0].1 < 2.0 * plain[0].1, "{speed:?}");
        assert_eq!(speed.gb_per_s[1].1, bytes / 150.0);
    }

    #[test]
    fn every_rate_of_this_machine_is_a_positive_number() {
        let mut effort = Effort {
            time: Duration::from_micros(100),
            memory: 1 << 20,
            ..Effort::default()
        };
        let mut ticks = 0;
        let rates = measure(&effort, || ticks += 1).unwrap();
        assert_eq!(ticks, 2 * rates.threads.len() * FORMATS.len());
        assert!(rates.has(&FORMATS) && rates.is_plausible());
        effort.brief = true;
        assert_eq!(effort.counts(1), [1]);
        assert_eq!(effort.counts(2), [1, 2]);
        assert_eq!(effort.counts(16), [1, 8, 16]);
        let good = |x: f64| x.is_finite() && x > 0.0;
        assert!(good(rates.check_gb_per_s) && good(rates.lookup_ns));
        assert!(
            good(rates.replace_ns)
                && good(rates.name_ns)
                && good(rates.wake_ns)
                && good(rates.tell_ns)
        );
        for t in &rates.threads {
            assert!(good(t.section_ns) && good(t.read.at(1e6)), "{t:?}");
            assert_eq!(t.kernels.len(), FORMATS.len());
            for k in &t.kernels {
                assert!(good(k.dot.at(1e6)) && good(k.neuron.at(1e6)), "{k:?}");
                assert!(good(k.gemm_at(10.0)), "{k:?}");
            }
        }
    }
}
