//! Products of resident matrices (projections of attention, the head, Gate rows) that the CPU's threads and a
//! device compute together: a partition by weights (HeteroInfer §4.2).
//!
//! ```text
//! y = W x    CPU: the first rows of W    device: the last ones, at the same time
//! ```
//!
//! A product of a row does not depend on who computes it, so on a device with the CPU's bits no
//! partition changes one. Which rows, [`split`](crate::split) decides for each number of tokens, by
//! times that were measured with both at work. The host keeps all rows: devices with the machine's
//! memory read the same bytes, and a lost device is not missed.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use emberflow_kernels::DType;
use emberflow_storage::trace::Tracer;
use serde::{Deserialize, Serialize};

use super::in_use::InUse;
use super::{Block, DeviceError, HostBytes, Input, Part, PartKind, Ticket, Work};
use crate::counters::nanoseconds;
use crate::split::{Curve, Pair, Product};
use crate::thread_buffer::renew;
use crate::trace;

/// Most matrices that are multiplied by the same input.
pub(crate) const TOGETHER: usize = 4;

/// A matrix that the host holds too: rows of `cols` elements, each with its scales behind it.
#[derive(Clone)]
pub struct SharedMatrix {
    /// Format.
    pub dtype: DType,
    /// Rows.
    pub rows: usize,
    /// Elements of a row.
    pub cols: usize,
    /// The rows.
    pub bytes: HostBytes,
}

/// The largest products.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ProductRoom {
    /// Bytes of all tokens' input.
    pub input: usize,
    /// Results.
    pub results: usize,
}

impl ProductRoom {
    /// Bytes of host memory for it: the input and results, and on a device with the machine's memory
    /// as many again.
    pub fn bytes(&self, unified: bool) -> u64 {
        let once = self.input + 2 * 4 * self.results;
        (once
            + if unified {
                self.input + 4 * self.results
            } else {
                0
            }) as u64
    }
}

/// Times of a processor for some number of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sample {
    /// Tokens.
    pub n: usize,
    /// Seconds for any product.
    pub launch: f64,
    /// Seconds for a weight.
    pub weight: f64,
}

/// Times by measurement, along straight lines between the numbers of tokens that were measured.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Samples(pub Vec<Sample>);

impl Curve for Samples {
    fn seconds(&self, of: Product) -> f64 {
        let Some(last) = self.0.last().filter(|_| of.rows > 0) else {
            return 0.0;
        };
        let time = |s: &Sample| s.launch + s.weight * (of.rows * of.cols) as f64;
        let after = self.0.iter().position(|s| s.n >= of.n);
        match after {
            Some(0) => time(&self.0[0]),
            Some(i) => {
                let (a, b) = (&self.0[i - 1], &self.0[i]);
                let share = (of.n - a.n) as f64 / (b.n - a.n) as f64;
                time(a) + (time(b) - time(a)) * share
            }
            None => time(last) * of.n as f64 / last.n as f64,
        }
    }
}

/// A matrix of a [`Products`].
#[derive(Clone)]
pub(crate) struct OnDevice {
    pub of: Arc<Products>,
    pub matrix: Part,
}

impl OnDevice {
    /// Has the device forget the matrix.
    pub fn give_back(self) {
        self.of.device.backend().release(self.matrix);
    }
}

impl fmt::Debug for OnDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OnDevice").field(&self.matrix).finish()
    }
}

/// A device for products.
pub(crate) struct Products {
    device: Arc<InUse>,
    cpu: Samples,
    its: Samples,
    results: Mutex<Vec<f32>>,
    waited: AtomicU64,
    tracer: Tracer,
}

/// Products that a device computes: the last rows of each matrix.
pub(crate) struct Begun {
    ticket: Ticket,
    /// Where its rows begin in each matrix: those before are left to the CPU.
    pub left: ArrayVec<usize, TOGETHER>,
    /// Results.
    len: usize,
    start: u64,
}

impl Products {
    /// With times of the CPU's threads and of the device, and room for so many results.
    pub fn new(
        device: Arc<InUse>,
        [cpu, its]: [Samples; 2],
        results: usize,
        tracer: Tracer,
    ) -> Self {
        Self {
            device,
            cpu,
            its,
            results: Mutex::new(vec![0.0; results]),
            waited: AtomicU64::new(0),
            tracer,
        }
    }

    /// Memory for so many results.
    pub fn set_results(&self, results: usize) {
        let mut held = self.results.lock().unwrap_or_else(PoisonError::into_inner);
        renew(&mut held, results);
    }

    /// How many of the rows the device takes, for so many tokens.
    pub fn rows(&self, of: Product) -> usize {
        let pair = Pair {
            first: &self.cpu,
            second: &self.its,
            sync: 0.0,
        };
        pair.rows_of_second(of)
    }

    /// Begins products of `matrices`, `(number, rows)`, with the same input. `None` where the CPU computes
    /// all of it: it is faster alone, or the device is lost.
    pub fn begin(&self, matrices: &[(Part, Range<usize>)], input: Input<'_>) -> Option<Begun> {
        if self.device.lost().is_some() {
            return None;
        }
        let all: usize = matrices.iter().map(|(_, rows)| rows.len()).sum();
        let its = self.rows(Product {
            rows: all,
            cols: input.n(),
            n: input.tokens(),
        });
        if its == 0 {
            return None;
        }
        let mut blocks = ArrayVec::<Block, TOGETHER>::new();
        let (mut left, mut rest) = (ArrayVec::new(), its);
        for (matrix, rows) in matrices.iter().rev() {
            let taken = rest.min(rows.len());
            rest -= taken;
            left.push(rows.end - taken);
            if taken > 0 {
                blocks.push(Block {
                    matrix: *matrix,
                    rows: rows.end - taken..rows.end,
                });
            }
        }
        left.reverse();
        let start = self.tracer.now();
        let work = Work::Products(&blocks, input);
        let begun = self.device.backend().submit(&work);
        let ticket = self.device.or_lost(begun).ok().flatten()?;
        Some(Begun {
            ticket,
            left,
            len: its * input.tokens(),
            start,
        })
    }

    /// Waits for what was begun and hands over its results, `[tokens × rows]` of each matrix, the last one
    /// first. `None` if the device was lost: the rows are missing.
    pub fn results<T>(
        &self,
        begun: &Begun,
        tokens: usize,
        then: impl FnOnce(&[f32]) -> T,
    ) -> Option<T> {
        let wait = Instant::now();
        let mut results = self.results.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = match results.get_mut(..begun.len) {
            Some(results) => self.device.backend().take(begun.ticket, results),
            None => Err(DeviceError {
                device: self.device.backend().facts().name.clone(),
                what: "was asked for more products than there is room for".into(),
            }),
        };
        self.waited
            .fetch_add(nanoseconds(wait.elapsed()), Ordering::Relaxed);
        let took = self.device.or_lost(taken).ok().flatten()?.took;
        let values = [tokens as u64, (begun.len / tokens) as u64];
        (self.tracer).accelerator(&trace::PRODUCTS, values, begun.start, nanoseconds(took));
        Some(then(&results[..begun.len]))
    }

    /// Waits for what was begun and puts the rows of each matrix of `all` rows in their place in its `y`,
    /// `[tokens × all]`. False if the device was lost.
    pub fn take<'a>(
        &self,
        begun: &Begun,
        tokens: usize,
        of: impl Iterator<Item = (usize, &'a mut [f32])>,
    ) -> bool {
        let of = of.zip(&begun.left).map(|((all, y), &left)| (all, left, y));
        let mut of: ArrayVec<_, TOGETHER> = of.collect();
        let place = |mut results: &[f32]| {
            for (all, left, y) in of.iter_mut().rev() {
                let rows = *all - *left;
                let (block, rest) = results.split_at(rows * tokens);
                results = rest;
                if rows > 0 {
                    let into = y.chunks_exact_mut(*all).map(|y| &mut y[*left..]);
                    for (y, block) in into.zip(block.chunks_exact(rows)) {
                        y.copy_from_slice(block);
                    }
                }
            }
        };
        self.results(begun, tokens, place).is_some()
    }

    /// Makes another matrix known to the device. `None` if it has no room for it, or is lost.
    pub fn share(self: &Arc<Self>, matrix: SharedMatrix) -> Option<OnDevice> {
        if self.device.lost().is_some() {
            return None;
        }
        let matrix = (self.device.backend().memory(PartKind::Matrix(matrix))).ok()?;
        Some(OnDevice {
            of: Arc::clone(self),
            matrix,
        })
    }

    /// Time that its products were waited for.
    pub fn waited(&self) -> Duration {
        Duration::from_nanos(self.waited.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_lie_on_lines_between_samples() {
        let sample = |n, weight| Sample {
            n,
            launch: 1.0,
            weight,
        };
        let samples = Samples(vec![sample(1, 1.0), sample(5, 3.0)]);
        let of = |n| {
            let (rows, cols) = (2, 5);
            samples.seconds(Product { rows, cols, n })
        };
        assert_eq!([1, 3, 5, 10].map(of), [11.0, 21.0, 31.0, 62.0]);
        let (rows, cols, n) = (0, 5, 1);
        assert_eq!(samples.seconds(Product { rows, cols, n }), 0.0);
    }
}
