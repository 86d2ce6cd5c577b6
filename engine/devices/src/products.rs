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

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use emberflow_engine::lane::{
    Input, LaneMatrix, MATRICES, MatrixRows, ProductShare, Products, SharedMatrix,
};
use emberflow_engine::trace;
use emberflow_storage::trace::Tracer;

use crate::backend::{Block, PartKind, Ticket, Work};
use crate::in_use::{InUse, MOST_DEVICES};
use crate::part::Part;
use crate::split::{
    Curve, Forms, Pair, Partition, Product, Rectangle, Rectangles, Space, Together,
};
use crate::times::GraphTimes;
use crate::units::{nanoseconds, renew};

/// A matrix on each device of a [`SharedProducts`]; `None` on one that does not have it.
pub(crate) type Matrices = ArrayVec<Option<Part>, MOST_DEVICES>;

/// Divisions kept. A prompt has few products of different shapes, which repeat layer after layer.
const KNOWN: usize = 16;

/// Devices that multiply matrices of one format and width.
pub(crate) struct SharedProducts {
    /// With the times of each.
    devices: Vec<(Arc<InUse>, GraphTimes)>,
    cpu: GraphTimes,
    /// By number: the matrices.
    matrices: Mutex<Vec<Option<Matrices>>>,
    underway: Mutex<Option<Begun>>,
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
    /// The part of all devices.
    together: Partition,
    /// The rectangle of each device within it.
    each: Rectangles,
}

/// Products under way: the last rows of each matrix, for the first tokens.
struct Begun {
    given: ArrayVec<GivenRows, MOST_DEVICES>,
    /// A device was lost: its rows are missing.
    lost: bool,
    /// Where their rows begin in each matrix: those before are left to the CPU.
    left: ArrayVec<usize, MATRICES>,
    /// Rows.
    rows: usize,
    /// Tokens: for those after, the CPU computes these rows too.
    tokens: usize,
    start: u64,
}

/// What a device was given of them.
struct GivenRows {
    device: usize,
    ticket: Ticket,
    places: ArrayVec<ResultPlace, MATRICES>,
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

/// The value behind a lock, even if a thread panicked with it.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SharedProducts {
    /// With times of the CPU's threads and of each device, and room for this many results.
    pub fn new(
        devices: Vec<(Arc<InUse>, GraphTimes)>,
        cpu: GraphTimes,
        results: usize,
        tracer: Tracer,
    ) -> Self {
        let products = Self {
            devices,
            cpu,
            matrices: Mutex::default(),
            underway: Mutex::default(),
            known: Mutex::default(),
            results: Mutex::default(),
            waited: AtomicU64::new(0),
            tracer,
        };
        products.set_results(results);
        products
    }

    /// Adds a matrix.
    pub fn add(self: &Arc<Self>, matrix: Matrices) -> LaneMatrix {
        let mut matrices = locked(&self.matrices);
        let free = matrices.iter().position(Option::is_none);
        let number = free.unwrap_or(matrices.len());
        match matrices.get_mut(number) {
            Some(place) => *place = Some(matrix),
            None => matrices.push(Some(matrix)),
        }
        LaneMatrix {
            products: Arc::clone(self) as _,
            number,
        }
    }

    /// Adds a matrix for the devices that are not lost and have room for it. `None` if none has.
    pub fn share(self: &Arc<Self>, matrix: &SharedMatrix) -> Option<LaneMatrix> {
        let known = |(device, _): &(Arc<InUse>, GraphTimes)| match device.lost() {
            None => (device.backend().memory(PartKind::Matrix(matrix.clone()))).ok(),
            Some(_) => None,
        };
        let parts: Matrices = self.devices.iter().map(known).collect();
        parts.iter().any(Option::is_some).then(|| self.add(parts))
    }

    /// The matrices of these numbers, with their rows.
    fn matrices(&self, of: &[MatrixRows]) -> Option<ArrayVec<(Matrices, Range<usize>), MATRICES>> {
        let matrices = locked(&self.matrices);
        let each = of.iter().map(|of| {
            let parts = matrices.get(of.number)?.clone()?;
            Some((parts, of.rows.clone()))
        });
        each.collect()
    }

    /// Numbers of the devices that have all of these matrices and may be given products: those without static graphs first.
    fn having(&self, matrices: &[(Matrices, Range<usize>)]) -> ArrayVec<usize, MOST_DEVICES> {
        let has = |&n: &usize| {
            let mut parts = matrices.iter().map(|(parts, _)| parts[n]);
            self.devices[n].0.takes_products() && parts.all(|part| part.is_some())
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
        let mut known = locked(&self.known);
        let key = Some((of, forms));
        let same = |known: &&DividedProduct| known.of == key && known.devices == devices;
        if let Some(found) = known.iter().find(same) {
            return found.clone();
        }
        let curves = devices.iter().map(|&n| &self.devices[n].1 as &dyn Curve);
        let curves: ArrayVec<&dyn Curve, MOST_DEVICES> = curves.collect();
        let both = Together::by(forms, &curves);
        let pair = Pair {
            first: &self.cpu,
            second: &both,
            sync: 0.0,
        };
        let space = Space {
            forms,
            ratios: None,
        };
        let together = pair.solve(of, space).partition;
        let (rows, n) = (together.rows, together.tokens);
        let found = DividedProduct {
            of: key,
            each: both.rectangles(Product { rows, n, ..of }),
            devices,
            together,
        };
        known.truncate(KNOWN - 1);
        known.insert(0, found.clone());
        found
    }

    /// Begins products of the last rows of `matrices`, on devices that have them all. `None` if the CPU computes all of it: it is
    /// faster alone, or no device is left.
    fn begin(
        &self,
        matrices: &[(Matrices, Range<usize>)],
        input: Input<'_>,
        forms: Forms,
    ) -> Option<Begun> {
        let of = Product {
            rows: matrices.iter().map(|(_, rows)| rows.len()).sum(),
            cols: input.n(),
            n: input.tokens(),
        };
        let DividedProduct {
            together,
            each,
            devices,
            ..
        } = self.division(of, forms, self.having(matrices));
        let mut begun = Begun {
            given: ArrayVec::new(),
            lost: false,
            left: ArrayVec::new(),
            rows: together.rows,
            tokens: together.tokens,
            start: self.tracer.now(),
        };
        let mut rest = together.rows;
        for (_, rows) in matrices.iter().rev() {
            let taken = rest.min(rows.len());
            rest -= taken;
            begun.left.push(rows.end - taken);
        }
        begun.left.reverse();
        for (number, Rectangle { rows, tokens }) in devices.into_iter().zip(each) {
            if rows.is_empty() || tokens.is_empty() {
                continue;
            }
            let (blocks, places) = begun.some(matrices, number, rows);
            let input = input.range(tokens.start, tokens.len());
            let device = &self.devices[number].0;
            let submitted = (device.backend()).submit(&Work::Products(&blocks, input));
            match device.or_lost(submitted).ok().flatten() {
                None => begun.lost = true,
                Some(ticket) => begun.given.push(GivenRows {
                    device: number,
                    ticket,
                    places,
                    tokens,
                }),
            }
        }
        (!begun.given.is_empty()).then_some(begun)
    }

    /// Waits for products and hands over all results. False if a device was lost: rows are missing.
    fn results(&self, begun: &Begun, then: &mut dyn FnMut(&[f32])) -> bool {
        let mut results = locked(&self.results);
        let [all, some] = &mut *results;
        let mut lost = begun.lost;
        let wait = Instant::now();
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
        if !lost {
            then(&all[..begun.rows * begun.tokens]);
        }
        !lost
    }
}

/// Which partitions are tried: by weights only if a device computes rows for all tokens.
fn forms(whole: bool) -> Forms {
    match whole {
        true => Forms::Weights,
        false => Forms::Corners,
    }
}

impl Products for SharedProducts {
    fn offer(&self, of: &[MatrixRows], input: Input<'_>, whole: bool) -> Option<ProductShare> {
        let begun = self.begin(&self.matrices(of)?, input, forms(whole))?;
        let share = ProductShare {
            left: begun.left.clone(),
            tokens: begun.tokens,
        };
        *locked(&self.underway) = Some(begun);
        Some(share)
    }

    fn collect(&self, then: &mut dyn FnMut(&[f32])) -> bool {
        let begun = locked(&self.underway).take();
        begun.is_some_and(|begun| self.results(&begun, then))
    }

    fn taken(&self, of: &[MatrixRows], cols: usize, tokens: usize, whole: bool) -> f64 {
        let Some(matrices) = self.matrices(of) else {
            return 0.0;
        };
        let product = Product {
            rows: of.iter().map(|of| of.rows.len()).sum(),
            cols,
            n: tokens,
        };
        let division = self.division(product, forms(whole), self.having(&matrices));
        let Partition { rows, tokens: some } = division.together;
        (rows * some) as f64 / tokens.max(1) as f64
    }

    fn set_results(&self, results: usize) {
        let mut held = locked(&self.results);
        let [all, some] = &mut *held;
        renew(all, results);
        if self.devices.len() > 1 {
            renew(some, results);
        }
    }

    fn waited(&self) -> Duration {
        Duration::from_nanos(self.waited.load(Ordering::Relaxed))
    }

    fn release(&self, number: usize) {
        let matrix = locked(&self.matrices)
            .get_mut(number)
            .and_then(Option::take);
        for ((device, _), part) in self.devices.iter().zip(matrix.unwrap_or_default()) {
            if let Some(part) = part {
                device.backend().release(part);
            }
        }
    }
}

impl Begun {
    /// Blocks of a device that takes some of the devices' rows, counted from the last matrix on, and where they lie.
    fn some(
        &self,
        matrices: &[(Matrices, Range<usize>)],
        device: usize,
        some: Range<usize>,
    ) -> (ArrayVec<Block, MATRICES>, ArrayVec<ResultPlace, MATRICES>) {
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

/// Puts a device's results, `[its tokens × rows]` block by block, in their place among those of all devices, which have
/// `tokens` tokens.
fn place(given: &GivenRows, tokens: usize, mut from: &[f32], to: &mut [f32]) {
    for ResultPlace { before, all, rows } in &given.places {
        let (block, rest) = from.split_at(rows.len() * given.tokens.len());
        from = rest;
        let to = to[before * tokens..].chunks_exact_mut(*all);
        let to = to.skip(given.tokens.start);
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
        let of: Vec<_> = (matrices.iter())
            .map(|rows| (parts.clone(), rows.clone()))
            .collect();
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
