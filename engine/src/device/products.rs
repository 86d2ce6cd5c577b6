//! Products of resident matrices (projections of attention, the head, Gate rows) that the CPU's threads and
//! devices compute together: partitions by weights, by activations, or by both (HeteroInfer §4.2).
//!
//! ```text
//! y = W x    devices: the last rows of W for the first tokens, each a rectangle of rows × tokens, at the same time
//!            CPU: the other rows, and these for the other tokens
//! ```
//!
//! A product of a row and a token does not depend on who computes it, so on devices with the CPU's bits no
//! partition changes one. Which one is the fastest, [`split`](crate::split) decides for each number of tokens, by
//! times that were measured with both at work: tokens that fill no static graph of an NPU are padded, computed by smaller
//! graphs, or left to the CPU or to another device. The host keeps all rows: devices with the machine's
//! memory read the same bytes, and a lost device is not missed.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use emberflow_storage::trace::Tracer;

use super::in_use::{InUse, MOST_DEVICES};
use super::shared::{GraphTimes, SharedMatrix};
use super::{Block, Input, Part, PartKind, Ticket, Work};
use crate::counters::nanoseconds;
use crate::split::{
    Curve, Forms, Pair, Partition, Product, Rectangle, Rectangles, Space, Together,
};
use crate::thread_buffer::renew;
use crate::trace;

/// Most matrices that are multiplied by the same input.
pub(crate) const TOGETHER: usize = 4;

/// A matrix on each device of a [`Products`]; `None` on one that does not have it.
pub(crate) type Matrices = ArrayVec<Option<Part>, MOST_DEVICES>;

/// A matrix of a [`Products`].
#[derive(Clone)]
pub(crate) struct OnDevice {
    pub of: Arc<Products>,
    pub matrices: Matrices,
}

impl OnDevice {
    /// Has the devices forget the matrix.
    pub fn give_back(self) {
        for ((device, _), matrix) in self.of.devices.iter().zip(self.matrices) {
            if let Some(matrix) = matrix {
                device.backend().release(matrix);
            }
        }
    }
}

impl fmt::Debug for OnDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OnDevice").field(&self.matrices).finish()
    }
}

/// How products are divided that were computed last. A prompt has few forms of them, which come layer after layer.
const KNOWN: usize = 16;

/// Devices for products.
pub(crate) struct Products {
    /// With the times of each.
    devices: Vec<(Arc<InUse>, GraphTimes)>,
    cpu: GraphTimes,
    /// Divisions of the last products, the latest first.
    known: Mutex<ArrayVec<DividedProduct, KNOWN>>,
    /// Results, and those of one of several devices.
    results: Mutex<[Vec<f32>; 2]>,
    waited: AtomicU64,
    tracer: Tracer,
}

/// How a product is divided among the CPU and devices.
#[derive(Clone, Default)]
struct DividedProduct {
    /// The product, and how it may be divided.
    of: Option<(Product, Forms)>,
    /// The devices, by number: those without static graphs first.
    devices: ArrayVec<usize, MOST_DEVICES>,
    /// What they compute together.
    its: Partition,
    /// The rectangle of each within that.
    each: Rectangles,
}

/// Products that devices compute: the last rows of each matrix, for the first tokens.
pub(crate) struct Begun {
    given: ArrayVec<GivenRows, MOST_DEVICES>,
    /// A device was lost: its rows are missing.
    lost: bool,
    /// Where their rows begin in each matrix: those before are left to the CPU.
    pub left: ArrayVec<usize, TOGETHER>,
    /// Rows.
    rows: usize,
    /// Tokens: for those after, the CPU computes these rows too.
    pub tokens: usize,
    start: u64,
}

/// What a device was given of them.
struct GivenRows {
    device: usize,
    ticket: Ticket,
    places: ArrayVec<ResultPlace, TOGETHER>,
    tokens: Range<usize>,
}

impl GivenRows {
    fn rows(&self) -> usize {
        self.places.iter().map(|place| place.rows.len()).sum()
    }
}

/// Some rows among those that devices compute of a matrix.
struct ResultPlace {
    /// Rows of matrices whose results lie before, and of this one.
    before: usize,
    all: usize,
    rows: Range<usize>,
}

impl Products {
    /// With times of the CPU's threads and of each device, and room for so many results.
    pub fn new(
        devices: Vec<(Arc<InUse>, GraphTimes)>,
        cpu: GraphTimes,
        results: usize,
        tracer: Tracer,
    ) -> Self {
        let products = Self {
            devices,
            cpu,
            known: Mutex::default(),
            results: Mutex::default(),
            waited: AtomicU64::new(0),
            tracer,
        };
        products.set_results(results);
        products
    }

    /// Memory for so many results.
    pub fn set_results(&self, results: usize) {
        let mut held = self.results.lock().unwrap_or_else(PoisonError::into_inner);
        let [all, some] = &mut *held;
        renew(all, results);
        if self.devices.len() > 1 {
            renew(some, results);
        }
    }

    /// The devices that have all of these matrices and may be given products, by number: those without static graphs first.
    fn having<'m>(
        &self,
        matrices: impl Iterator<Item = &'m Matrices> + Clone,
    ) -> ArrayVec<usize, MOST_DEVICES> {
        let has = |&n: &usize| {
            let mut matrices = matrices.clone();
            self.devices[n].0.takes_products() && matrices.all(|parts| parts[n].is_some())
        };
        let mut having: ArrayVec<usize, MOST_DEVICES> =
            (0..self.devices.len()).filter(has).collect();
        having.sort_by_key(|&n| !self.devices[n].1.graphs().is_empty());
        having
    }

    /// The fastest division of a product among the CPU and these devices.
    fn division(
        &self,
        of: Product,
        forms: Forms,
        devices: ArrayVec<usize, MOST_DEVICES>,
    ) -> DividedProduct {
        if devices.is_empty() {
            return DividedProduct::default();
        }
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let same =
            |known: &DividedProduct| known.of == Some((of, forms)) && known.devices == devices;
        if let Some(found) = known.iter().find(|known| same(known)) {
            return found.clone();
        }
        let curves = devices.iter().map(|&n| &self.devices[n].1 as &dyn Curve);
        let curves: ArrayVec<&dyn Curve, MOST_DEVICES> = curves.collect();
        let together = Together::by(forms, &curves);
        let pair = Pair {
            first: &self.cpu,
            second: &together,
            sync: 0.0,
        };
        let space = Space {
            forms,
            ratios: None,
        };
        let its = pair.solve(of, space).partition;
        let (rows, n) = (its.rows, its.tokens);
        let found = DividedProduct {
            of: Some((of, forms)),
            each: together.rectangles(Product { rows, n, ..of }),
            devices,
            its,
        };
        known.truncate(KNOWN - 1);
        known.insert(0, found.clone());
        found
    }

    /// How many of the rows of `matrices`, which are multiplied with the same input, the devices take, for so many tokens: those
    /// that they take for some of the tokens count in part.
    pub fn rows<'m>(
        &self,
        matrices: impl Iterator<Item = &'m Matrices> + Clone,
        of: Product,
        forms: Forms,
    ) -> f64 {
        let Partition { rows, tokens } = self.division(of, forms, self.having(matrices)).its;
        (rows * tokens) as f64 / of.n.max(1) as f64
    }

    /// Begins products of `matrices`, with the rows to be multiplied, with the same input: on devices that have them all.
    /// `None` where the CPU computes all of it: it is faster alone, or no device is left.
    pub fn begin(
        &self,
        matrices: &[(&Matrices, Range<usize>)],
        input: Input<'_>,
        forms: Forms,
    ) -> Option<Begun> {
        let having = self.having(matrices.iter().map(|(parts, _)| *parts));
        let of = Product {
            rows: matrices.iter().map(|(_, rows)| rows.len()).sum(),
            cols: input.n(),
            n: input.tokens(),
        };
        let DividedProduct {
            its, each, devices, ..
        } = self.division(of, forms, having);
        let mut begun = Begun {
            given: ArrayVec::new(),
            lost: false,
            left: ArrayVec::new(),
            rows: its.rows,
            tokens: its.tokens,
            start: self.tracer.now(),
        };
        let mut rest = its.rows;
        for (_, rows) in matrices.iter().rev() {
            let taken = rest.min(rows.len());
            rest -= taken;
            begun.left.push(rows.end - taken);
        }
        begun.left.reverse();
        for (device, Rectangle { rows, tokens }) in devices.into_iter().zip(each) {
            if rows.is_empty() || tokens.is_empty() {
                continue;
            }
            let (blocks, places) = begun.some(matrices, device, rows);
            let input = input.range(tokens.start, tokens.len());
            let device_of = &self.devices[device].0;
            let submitted = (device_of.backend()).submit(&Work::Products(&blocks, input));
            match device_of.or_lost(submitted).ok().flatten() {
                None => begun.lost = true,
                Some(ticket) => begun.given.push(GivenRows {
                    device,
                    ticket,
                    places,
                    tokens,
                }),
            }
        }
        (!begun.given.is_empty()).then_some(begun)
    }

    /// Waits for what was begun and hands over its results, `[tokens × rows]` of each matrix, the last one
    /// first. `None` if a device was lost: rows are missing.
    pub fn results<T>(&self, begun: &Begun, then: impl FnOnce(&[f32]) -> T) -> Option<T> {
        let wait = Instant::now();
        let mut results = self.results.lock().unwrap_or_else(PoisonError::into_inner);
        let [all, some] = &mut *results;
        let mut lost = begun.lost;
        for given in &begun.given {
            let (device, _) = &self.devices[given.device];
            let (rows, tokens) = (given.rows(), given.tokens.len());
            let alone = [rows, tokens] == [begun.rows, begun.tokens];
            let to = if alone { &mut *all } else { &mut *some };
            let taken = match to.get_mut(..rows * tokens) {
                Some(results) => device.backend().take(given.ticket, results),
                None => Err(device.failed("was asked for more products than there is room for")),
            };
            let Some(taken) = device.or_lost(taken).ok().flatten() else {
                lost = true;
                continue;
            };
            if !alone {
                place(given, begun.tokens, some, all);
            }
            device.count(0, rows);
            let (values, took) = ([tokens as u64, rows as u64], nanoseconds(taken.took));
            (self.tracer).accelerator(device.number, &trace::PRODUCTS, values, begun.start, took);
        }
        self.waited
            .fetch_add(nanoseconds(wait.elapsed()), Ordering::Relaxed);
        (!lost).then(|| then(&all[..begun.rows * begun.tokens]))
    }

    /// Waits for what was begun and puts the rows of each matrix of `all` rows in their place in its `y`,
    /// `[tokens × all]`. False if the device was lost.
    pub fn take<'a>(
        &self,
        begun: &Begun,
        of: impl Iterator<Item = (usize, &'a mut [f32])>,
    ) -> bool {
        let of = of.zip(&begun.left).map(|((all, y), &left)| (all, left, y));
        let mut of: ArrayVec<_, TOGETHER> = of.collect();
        let place = |mut results: &[f32]| {
            for (all, left, y) in of.iter_mut().rev() {
                let rows = *all - *left;
                let (block, rest) = results.split_at(rows * begun.tokens);
                results = rest;
                if rows > 0 {
                    let into = y.chunks_exact_mut(*all).map(|y| &mut y[*left..]);
                    for (y, block) in into.zip(block.chunks_exact(rows)) {
                        y.copy_from_slice(block);
                    }
                }
            }
        };
        self.results(begun, place).is_some()
    }

    /// Makes another matrix known to the devices that are not lost and have room for it. `None` if none has.
    pub fn share(self: &Arc<Self>, matrix: &SharedMatrix) -> Option<OnDevice> {
        let known = |(device, _): &(Arc<InUse>, GraphTimes)| match device.lost() {
            None => (device.backend().memory(PartKind::Matrix(matrix.clone()))).ok(),
            Some(_) => None,
        };
        let matrices: Matrices = self.devices.iter().map(known).collect();
        matrices.iter().any(Option::is_some).then(|| OnDevice {
            of: Arc::clone(self),
            matrices,
        })
    }

    /// Time that its products were waited for.
    pub fn waited(&self) -> Duration {
        Duration::from_nanos(self.waited.load(Ordering::Relaxed))
    }
}

impl Begun {
    /// Blocks of a device that takes some of the devices' rows, counted from the last matrix on, and where they lie.
    fn some(
        &self,
        matrices: &[(&Matrices, Range<usize>)],
        device: usize,
        some: Range<usize>,
    ) -> (ArrayVec<Block, TOGETHER>, ArrayVec<ResultPlace, TOGETHER>) {
        let (mut blocks, mut places, mut before) = (ArrayVec::new(), ArrayVec::new(), 0);
        for ((parts, rows), &left) in matrices.iter().zip(&self.left).rev() {
            let all = rows.end - left;
            let rows = some.start.max(before)..some.end.min(before + all);
            if let (Some(matrix), false) = (parts[device], rows.is_empty()) {
                let rows = rows.start - before..rows.end - before;
                blocks.push(Block {
                    matrix,
                    rows: left + rows.start..left + rows.end,
                });
                places.push(ResultPlace { before, all, rows });
            }
            before += all;
        }
        (blocks, places)
    }
}

/// Puts a device's results, `[its tokens × rows]` block by block, in their place among those of all, which have so many tokens.
fn place(its: &GivenRows, tokens: usize, mut from: &[f32], to: &mut [f32]) {
    for ResultPlace { before, all, rows } in &its.places {
        let (block, rest) = from.split_at(rows.len() * its.tokens.len());
        from = rest;
        let to = to[before * tokens..].chunks_exact_mut(*all);
        let to = to.skip(its.tokens.start);
        for (to, block) in to.zip(block.chunks_exact(rows.len())) {
            to[rows.clone()].copy_from_slice(block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows of matrices divided among devices, or tokens, whatever the border: the results lie as one device has them.
    #[test]
    fn results_of_several_devices_lie_as_those_of_one() {
        let (tokens, matrices) = (3, [0..7, 0..5, 0..9]);
        let parts = Matrices::from_iter([0, 1].map(|device| Some(Part(device))));
        let of: Vec<_> = matrices.iter().map(|rows| (&parts, rows.clone())).collect();
        let left = ArrayVec::from_iter([4, 0, 2]);
        let begun = Begun {
            given: ArrayVec::new(),
            lost: false,
            left,
            rows: 3 + 5 + 7,
            tokens,
            start: 0,
        };
        let value =
            |matrix: usize, token: usize, row: usize| (100 * matrix + 10 * row + token) as f32;
        let results = |device: usize, Rectangle { rows, tokens }: Rectangle| {
            let (blocks, places) = begun.some(&of, device, rows);
            assert!(blocks.iter().all(|block| block.matrix == Part(device)));
            // Blocks come from the last matrix on, as many as there are places.
            let numbers = places.iter().map(|place| match place.before {
                0 => 2,
                7 => 1,
                _ => 0,
            });
            let mut found = Vec::new();
            for (block, matrix) in blocks.iter().zip(numbers) {
                for token in tokens.clone() {
                    found.extend(block.rows.clone().map(|row| value(matrix, token, row)));
                }
            }
            let given = GivenRows {
                device,
                ticket: Ticket::Work,
                places,
                tokens,
            };
            (found, given)
        };
        let all_of = || Rectangle {
            rows: 0..15,
            tokens: 0..tokens,
        };
        let (expected, _) = results(0, all_of());
        let by_rows = (0..=15)
            .map(|border| [0..border, border..15].map(|rows| Rectangle { rows, ..all_of() }));
        let by_tokens = (0..=tokens).map(|border| {
            [border..tokens, 0..border].map(|tokens| Rectangle { tokens, ..all_of() })
        });
        for rectangles in by_rows.chain(by_tokens) {
            let mut all = vec![f32::NAN; 15 * tokens];
            for (device, rectangle) in rectangles.iter().cloned().enumerate() {
                let (found, given) = results(device, rectangle);
                place(&given, tokens, &found, &mut all);
            }
            assert_eq!(all, expected, "{rectangles:?}");
        }
    }
}
