//! Which resident matrices devices multiply too, and how many rows. Each format and width is timed when the engine is opened,
//! while the CPU computes: for some numbers of tokens, and for those that a device has static graphs for.

use std::sync::Arc;
use std::time::{Duration, Instant};

use emberflow_engine::Error;
use emberflow_engine::lane::{HostMatrix, Input, SharedMatrix, Sharing};
use emberflow_kernels::{Activations, DType};

use crate::backend::{Block, PartKind, Program, Work, token_bytes};
use crate::check::{Numbers, OfProducts, Times};
use crate::error::DeviceError;
use crate::in_use::{Devices, InUse};
use crate::part::Part;
use crate::products::{Matrices, SharedProducts};
use crate::split::{Curve, Product};
use crate::times::{GraphTimes, Sample, Samples};

/// Token counts that are timed in addition to those of a device's graphs.
const TOKENS: [usize; 4] = [1, 8, 32, 64];

/// Rows of the small product whose time gives the launch cost: half of an NPU's graph of 128 rows, as a last graph of some
/// number of rows is half empty on average.
const FEW: usize = 64;

/// Products of more tokens are timed on fewer rows, so that they take no longer than all rows for this many tokens, but on
/// at least [`LEAST_ROWS`].
const PAIRS_OF: usize = 32;
/// See [`PAIRS_OF`].
const LEAST_ROWS: usize = 576;

/// Timed runs of each product; the fastest counts.
const RUNS: usize = 3;

/// A matrix, and its parts on devices.
struct HeldMatrix<'m> {
    host: &'m mut dyn HostMatrix,
    shared: SharedMatrix,
    parts: Matrices,
}

/// Matrices of one format and width that devices store, and their parts there.
struct Kind<'m> {
    dtype: DType,
    cols: usize,
    devices: Devices,
    matrices: Vec<HeldMatrix<'m>>,
}

/// Devices, and the resources for timing them.
pub(crate) struct Sharer<'d, 's, 'r> {
    pub devices: &'d Devices,
    pub with: &'s mut Sharing<'r>,
}

impl Sharer<'_, '_, '_> {
    /// Makes room for products.
    ///
    /// # Errors
    /// Not enough memory, or the driver's.
    pub fn begin(&self) -> Result<(), Error> {
        for device in self.devices {
            (device.backend()).prepare(&Program::ProductRoom(self.with.room))?;
        }
        Ok(())
    }

    /// Shares matrices with the devices whose products have the CPU's bits, as many as have room in their memory.
    ///
    /// # Errors
    /// The driver's.
    pub fn share<'m>(
        &mut self,
        matrices: &mut dyn Iterator<Item = &'m mut dyn HostMatrix>,
    ) -> Result<Vec<Arc<SharedProducts>>, Error> {
        let mut shared = Vec::new();
        let mut kinds: Vec<Kind<'m>> = Vec::new();
        for host in matrices {
            let shared = host.shared();
            let (dtype, cols) = (shared.dtype, shared.cols);
            let multiplies = |device: &&Arc<InUse>| device.multiplies(dtype, cols);
            let devices: Devices = self.devices.iter().filter(multiplies).cloned().collect();
            let at_once = devices.iter().map(|device| device.facts().rows_at_once);
            // In tiles the last one may have places without rows.
            let places = shared.rows.next_multiple_of(at_once.max().unwrap_or(1));
            let len = (places * dtype.row_bytes(cols)) as u64;
            if devices.is_empty() || len > self.with.spare {
                continue;
            }
            // Where a device has no memory for it, the CPU multiplies it.
            let part = |device: &Arc<InUse>| {
                let matrix = PartKind::Matrix(shared.clone());
                device.backend().memory(matrix).ok()
            };
            let parts: Matrices = devices.iter().map(part).collect();
            if !parts.iter().all(Option::is_some) {
                for (device, part) in devices.iter().zip(parts) {
                    let mut backend = device.backend();
                    part.into_iter().for_each(|part| backend.release(part));
                }
                continue;
            }
            self.with.spare -= len;
            let same = |kind: &&mut Kind<'_>| kind.dtype == dtype && kind.cols == cols;
            let matrix = HeldMatrix {
                host,
                shared,
                parts,
            };
            match kinds.iter_mut().find(same) {
                Some(kind) => kind.matrices.push(matrix),
                None => kinds.push(Kind {
                    dtype,
                    cols,
                    devices,
                    matrices: vec![matrix],
                }),
            }
        }
        for kind in kinds {
            let products = Arc::new(self.timed(&kind)?);
            for matrix in kind.matrices {
                matrix.host.set_lane(Some(products.add(matrix.parts)));
            }
            shared.push(products);
        }
        Ok(shared)
    }

    /// The products of a kind, with saved times, or measured ones, one device after the other. The CPU's are the longest of
    /// these.
    fn timed(&mut self, kind: &Kind<'_>) -> Result<SharedProducts, Error> {
        let (mut cpu, mut devices) = (Samples::default(), Vec::new());
        for (number, device) in kind.devices.iter().enumerate() {
            let counts = counts(device.facts().graphs);
            let compared = self.compared(kind, &counts);
            let measured = || self.measured(kind, number, &counts);
            let times = device.lease().times_of_products(compared, measured)?;
            tracing::info!(device = device.facts().name, dtype = %kind.dtype, rows = compared.rows, cols = kind.cols,
                cpu = ?times.cpu, device_times = ?times.device, "products");
            let graph_times = GraphTimes::new(times.device, device.facts().graphs);
            devices.push((Arc::clone(device), graph_times));
            // Of devices with other graphs other numbers of tokens were timed.
            let total = |samples: &Samples| {
                let (rows, cols) = (compared.rows, compared.cols);
                let seconds = |n| samples.seconds(Product { rows, cols, n });
                TOKENS.into_iter().map(seconds).sum::<f64>()
            };
            if total(&times.cpu) > total(&cpu) {
                cpu = times.cpu;
            }
        }
        let (results, tracer) = (self.with.room.results, self.with.tracer.clone());
        let cpu = GraphTimes::new(cpu, &[]);
        Ok(SharedProducts::new(devices, cpu, results, tracer))
    }

    /// Rows of the largest matrix of a kind whose products for `n` tokens fit the buffers. `None` if there is none.
    fn most_rows(&self, kind: &Kind<'_>, n: usize) -> Option<usize> {
        let bytes = n * token_bytes(kind.dtype, kind.cols);
        let rows = kind.matrices.iter().map(|m| m.shared.rows);
        let fits =
            |rows: &usize| rows * n <= self.with.room.results && bytes <= self.with.room.input;
        rows.filter(fits).max()
    }

    /// The products to time: of the largest matrices of a kind, for those of these token counts that fit the buffers.
    fn compared(&self, kind: &Kind<'_>, counts: &[usize]) -> OfProducts {
        let rows = kind.matrices.iter().map(|m| m.shared.rows).max();
        let fits = |n: &&usize| self.most_rows(kind, **n).is_some();
        OfProducts {
            dtype: kind.dtype,
            rows: rows.unwrap_or(0),
            cols: kind.cols,
            threads: self.with.on.threads(),
            tokens: counts.iter().rfind(fits).copied().unwrap_or(1),
        }
    }

    /// Takes the times of products, each of another matrix, so that they come from memory as they will.
    fn measured(
        &mut self,
        kind: &Kind<'_>,
        device: usize,
        counts: &[usize],
    ) -> Result<Times, Error> {
        let mut times = Times {
            cpu: Samples::default(),
            device: Samples::default(),
        };
        for &n in counts {
            let Some(most) = self.most_rows(kind, n) else {
                continue;
            };
            let largest = kind.matrices.iter().filter(|m| m.shared.rows == most);
            let mut next = largest.cycle();
            let rows = (most * PAIRS_OF / n).max(LEAST_ROWS).min(most);
            let few = FEW.min(rows);
            let mut best = [[f64::INFINITY; 2]; 2];
            for _ in 0..RUNS {
                for (best, count) in best.iter_mut().zip([few, rows]) {
                    let Some(matrix) = next.next() else {
                        continue;
                    };
                    let Some(part) = matrix.parts[device] else {
                        continue;
                    };
                    let times = self.one(&kind.devices[device], part, matrix, count, n)?;
                    for (best, time) in best.iter_mut().zip(times) {
                        *best = best.min(time.as_secs_f64());
                    }
                }
            }
            let [[cpu_few, its_few], [cpu, its]] = best;
            let both = [
                (&mut times.cpu, [cpu_few, cpu]),
                (&mut times.device, [its_few, its]),
            ];
            for (samples, seconds) in both {
                samples.0.push(sample(n, [few, rows], kind.cols, seconds));
            }
        }
        Ok(times)
    }

    /// The times of the CPU's threads and of a device for the first `rows` rows of a matrix and `n` tokens,
    /// both at work at once where they share a memory.
    fn one(
        &mut self,
        device: &InUse,
        part: Part,
        matrix: &HeldMatrix<'_>,
        rows: usize,
        n: usize,
    ) -> Result<[Duration; 2], Error> {
        let mut numbers = Numbers::new(n as u64);
        let x: Vec<f32> = (0..n * matrix.shared.cols)
            .map(|_| numbers.next())
            .collect();
        let mut quantized = Activations::default();
        let input = Input::new(self.with.on.cpu, &x, n, &mut quantized);
        let mut found = vec![f32::NAN; n * rows];
        let mut own = vec![0.0; n * matrix.shared.rows];
        let block = Block {
            matrix: part,
            rows: 0..rows,
        };
        let start = Instant::now();
        let work = [block];
        let work = Work::Products(&work, input);
        let ticket = device.backend().submit(&work)?;
        let mut take = || -> Result<Duration, DeviceError> {
            let took = device.backend().take(ticket, &mut found)?.took;
            Ok(match took.is_zero() {
                // The device has no clock.
                true => start.elapsed(),
                false => took,
            })
        };
        // Separate memory is not slowed by the CPU, and its device need not have a clock.
        let apart = !device.backend().facts().unified;
        let before = if apart { Some(take()?) } else { None };
        let submitted = Instant::now();
        let host = &*matrix.host;
        host.multiply(self.with.on, input, 0..rows, self.with.scratch, &mut own);
        let busy = submitted.elapsed();
        let took = before.map_or_else(take, Ok)?;
        Ok([busy, took])
    }
}

/// Numbers of tokens that are timed, ascending.
fn counts(graphs: &[usize]) -> Vec<usize> {
    let mut all = [&TOKENS[..], graphs].concat();
    all.sort_unstable();
    all.dedup();
    all
}

/// Launch cost and cost per row: the line through the times of two row counts.
fn sample(n: usize, rows: [usize; 2], cols: usize, times: [f64; 2]) -> Sample {
    let all = times[1] / rows[1].max(1) as f64;
    let slope = if rows[1] > rows[0] {
        (times[1] - times[0]) / (rows[1] - rows[0]) as f64
    } else {
        all
    };
    // If few rows are no faster, only the launch was measured.
    let row = slope.clamp(all * 0.01, all);
    Sample {
        n,
        // Rounding may leave less than nothing.
        launch: (times[1] - row * rows[1] as f64).max(0.0),
        weight: row / cols as f64,
    }
}
