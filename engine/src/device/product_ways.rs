//! Which kernels a device multiplies matrices with: tried once for each format and width, before the plan, so that what the
//! driver takes to make them is part of the process that the plan knows.

use std::time::Instant;

use std::ops::Range;
use std::sync::Arc;

use emberflow_kernels::{Activations, Cpu, DType, quantize_row};

use super::choose::{Outcome, Tried, best_ways, try_forms};
use super::compare::{FASTER, LONG, Seconds, deviation, is_wrong};
use super::numbers::Numbers;
use super::on_cpu::products;
use super::{
    Block, Dense, DeviceError, Found, Lease, MANY, Order, ProductRoom, SharedMatrix, Ways,
    token_bytes,
};
use crate::input::Input;

/// Rows of the matrix, of which so many differ from each other. The last tile is short.
const ROWS: usize = 1000;
const DIFFERENT: usize = 61;

/// Numbers of tokens that are compared, and of those that times are taken for; the largest of each.
const COMPARED: [usize; 3] = [1, 5, MOST_COMPARED];
const TIMED: [usize; 3] = [1, 8, MOST_TIMED];
const MOST_COMPARED: usize = MANY + 4;
const MOST_TIMED: usize = 256;

/// Runs of which the fastest counts.
const RUNS: usize = 3;

/// A matrix that the device has, and the CPU's products of its different rows.
struct Trial<'d> {
    device: &'d mut dyn Dense,
    matrix: SharedMatrix,
    number: usize,
    /// How it lies there.
    order: Order,
    x: Vec<f32>,
}

/// A matrix of random numbers.
fn matrix(dtype: DType, cols: usize) -> SharedMatrix {
    let (len, mut numbers) = (dtype.row_bytes(cols), Numbers::new(5));
    let mut bytes = vec![0; DIFFERENT * len];
    let mut row = vec![0.0f32; cols];
    for bytes in bytes.chunks_exact_mut(len) {
        row.iter_mut().for_each(|v| *v = 0.1 * numbers.next());
        let (quants, scales) = bytes.split_at_mut(dtype.quants_bytes(cols));
        // Finite numbers of such sizes fit every format.
        let _ = quantize_row(dtype, &row, quants, scales);
    }
    let all: Vec<u8> = bytes.iter().copied().cycle().take(ROWS * len).collect();
    SharedMatrix {
        dtype,
        rows: ROWS,
        cols,
        bytes: Arc::new(all),
    }
}

impl<'d> Trial<'d> {
    /// Shares a matrix with the device, for `most` tokens.
    fn new(
        device: &'d mut dyn Dense,
        order: Order,
        matrix: SharedMatrix,
        most: usize,
    ) -> Result<Self, DeviceError> {
        let mut numbers = Numbers::new(3);
        let (dtype, cols) = (matrix.dtype, matrix.cols);
        device.make_product_room(&ProductRoom {
            input: most * token_bytes(dtype, cols),
            results: most * ROWS,
        })?;
        Ok(Self {
            number: device.share(matrix.clone())?,
            device,
            matrix,
            order,
            x: (0..most * cols).map(|_| numbers.next()).collect(),
        })
    }

    fn set(&mut self, ways: Ways) -> Result<(), DeviceError> {
        let (dtype, cols) = (self.matrix.dtype, self.matrix.cols);
        self.device.set_product_ways(dtype, cols, ways)
    }

    /// The device's products of some rows with the first tokens, and how many seconds they take.
    fn run(&mut self, rows: Range<usize>, tokens: usize) -> Result<(Vec<f32>, f64), DeviceError> {
        let mut quantized = Activations::default();
        let x = &self.x[..tokens * self.matrix.cols];
        let input = Input::new(Cpu::detect(), x, tokens, &mut quantized);
        let mut out = vec![f32::NAN; tokens * rows.len()];
        let block = Block {
            matrix: self.number,
            rows,
        };
        let start = Instant::now();
        let ticket = self.device.multiply(&[block], input)?;
        let took = match self.device.take_products(ticket, &mut out)? {
            took if took.is_zero() => start.elapsed(),
            took => took,
        };
        Ok((out, took.as_secs_f64()))
    }

    /// How far products are from the CPU's, as a share of the largest.
    fn apart(&mut self) -> Result<f32, DeviceError> {
        let mut apart = 0.0f32;
        for tokens in COMPARED {
            let (found, _) = self.run(0..ROWS, tokens)?;
            let mut quantized = Activations::default();
            let x = &self.x[..tokens * self.matrix.cols];
            Cpu::detect().quantize_activations(x, tokens, &mut quantized);
            let some = 0..DIFFERENT;
            let some = products(Cpu::detect(), &self.matrix, some, x, &quantized);
            let both = some.chunks_exact(DIFFERENT).zip(found.chunks_exact(ROWS));
            for (some, found) in both {
                let expected: Vec<f32> = some.iter().copied().cycle().take(ROWS).collect();
                apart = apart.max(deviation(&expected, found));
            }
        }
        Ok(apart)
    }

    /// Seconds of products with the `i`-th number of tokens.
    fn timed(&mut self, i: usize) -> Result<f64, DeviceError> {
        let mut best = f64::INFINITY;
        for _ in 0..RUNS {
            let (_, took) = self.run(0..ROWS, TIMED[i])?;
            best = best.min(took);
            if took > LONG {
                break;
            }
        }
        Ok(best)
    }

    /// With all of them.
    fn all_timed(&mut self) -> Result<Seconds, DeviceError> {
        Ok([self.timed(0)?, self.timed(1)?, self.timed(2)?])
    }

    /// What comes of some ways.
    fn outcome(&mut self, ways: Ways) -> Outcome {
        let mut outcome = || -> Result<Outcome, DeviceError> {
            self.set(ways)?;
            let apart = self.apart()?;
            Ok(match is_wrong(apart) {
                true => Outcome::Wrong(apart),
                false => Outcome::Right {
                    worst: apart,
                    same_bits: apart == 0.0,
                    seconds: self.all_timed()?,
                },
            })
        };
        outcome().unwrap_or_else(|e| Outcome::Refused(e.what))
    }

    /// The fastest ways, and what was tried.
    fn chosen(&mut self, of: &str) -> Result<(Option<Ways>, Vec<Tried>), DeviceError> {
        let choices = self.device.choices(self.matrix.dtype);
        let name = self.device.facts().name.clone();
        let (order, mut tried) = (self.order, Vec::new());
        try_forms(&choices.forms, &mut tried, |form| {
            let outcome = self.outcome(form.into());
            let tried = Tried {
                order,
                form,
                outcome,
            };
            tried.told(&name, of)
        });
        let Some(best) = best_ways(&tried) else {
            return Ok((None, tried));
        };
        Ok((Some(self.with_groups(best, &choices.groups)?), tried))
    }

    /// The sizes of work groups with which ways are fastest. What the driver refuses is none.
    fn with_groups(&mut self, mut best: Ways, groups: &[usize]) -> Result<Ways, DeviceError> {
        for i in 0..TIMED.len() {
            self.set(best)?;
            let mut least = self.timed(i)?;
            for &group in groups {
                let mut ways = best;
                ways.each_mut()[i].group = group;
                match self.set(ways).and_then(|()| self.timed(i)) {
                    Ok(took) if took < least * FASTER => (best, least) = (ways, took),
                    _ => {}
                }
            }
        }
        self.set(best)?;
        Ok(best)
    }
}

impl Lease {
    /// Makes kernels for products with rows of `cols` elements: the fastest, where a verdict is kept or can be; else the
    /// first. `order` is how the device's matrices lie.
    ///
    /// # Errors
    /// The driver's, or no kernel whose products are right.
    pub(crate) fn prepare_products(
        &self,
        order: Order,
        dtype: DType,
        cols: usize,
    ) -> Result<(), DeviceError> {
        let choices = self.dense().choices(dtype);
        let Some(kept) = self.kept().filter(|_| !choices.is_one()) else {
            let mut dense = self.dense();
            dense.prepare_products(dtype, cols)?;
            return dense.set_product_ways(dtype, cols, choices.first().hidden);
        };
        let facts = self.dense().facts().clone();
        let of = format!("products of {dtype}, width {cols}, {order}");
        let known = kept.find(&facts, &of)?;
        let mut dense = self.dense();
        let most = match known {
            Some(_) => MOST_COMPARED,
            None => MOST_TIMED,
        };
        let mut trial = Trial::new(dense.as_mut(), order, matrix(dtype, cols), most)?;
        if let Some(Found::Ways(ways)) = known {
            trial.set(ways)?;
            // So that the driver has made the kernels, too.
            if !is_wrong(trial.apart()?) {
                dense.clear();
                return dense.make_product_room(&ProductRoom::default());
            }
            tracing::warn!(device = facts.name, of, "is not what it was: tried anew");
            trial = Trial::new(dense.as_mut(), order, matrix(dtype, cols), MOST_TIMED)?;
        }
        let (ways, tried) = trial.chosen(&of)?;
        let found = match ways {
            Some(ways) => Found::Ways(ways),
            None => Found::Wrong("no form of the kernel has the CPU's products".into()),
        };
        dense.clear();
        dense.make_product_room(&ProductRoom::default())?;
        kept.put(&facts, &of, found, tried);
        // Wrong ones are told of as at later starts.
        kept.find(&facts, &of).map(|_| ())
    }
}

/// How far a form's products are from the CPU's.
#[cfg(test)]
pub(super) fn apart(
    device: &mut dyn Dense,
    dtype: DType,
    cols: usize,
    form: super::Form,
) -> Result<f32, DeviceError> {
    let mut trial = Trial::new(device, Order::Rows, matrix(dtype, cols), MOST_COMPARED)?;
    trial.set(form.into())?;
    let apart = trial.apart()?;
    // Some rows, from the middle of a tile to that of another.
    let (all, _) = trial.run(0..ROWS, 1)?;
    let (some, _) = trial.run(45..301, 1)?;
    let number = trial.number;
    device.give_back(number);
    Ok(apart.max(deviation(&all[45..301], &some)))
}
