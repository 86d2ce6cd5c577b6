//! The check of a device's products of matrices against the CPU, for each format and width. It comes before the plan, so that
//! what the driver takes for its kernels is part of the process whose size the plan knows.

use std::ops::Range;
use std::sync::Arc;

use emberflow_kernels::{Activations, Cpu, DType, quantize_row};

use super::numbers::Numbers;
use super::reference::{TokenScales, deviation, exceed};
use super::{Found, accept, wrong};
use crate::cpu::products;
use crate::{
    Backend, Block, DeviceError, Lease, Part, PartKind, ProductRoom, Program, SharedMatrix, Work,
    token_bytes,
};
use emberflow_engine::lane::Input;

/// Rows of the matrix, and how many of them are distinct. The last tile is short.
const ROWS: usize = 1000;
const DIFFERENT: usize = 61;

/// Numbers of tokens: one, some, and many of which a block is short.
const TOKENS: [usize; 3] = [1, 5, MOST];
const MOST: usize = 20;

/// A matrix that the device has.
struct Compared<'d> {
    device: &'d mut dyn Backend,
    matrix: SharedMatrix,
    number: Part,
    x: Vec<f32>,
    scales: TokenScales,
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

impl<'d> Compared<'d> {
    /// Shares a matrix with the device.
    fn new(
        device: &'d mut dyn Backend,
        matrix: SharedMatrix,
        scales: TokenScales,
    ) -> Result<Self, DeviceError> {
        let mut numbers = Numbers::new(3);
        let (dtype, cols) = (matrix.dtype, matrix.cols);
        device.prepare(&Program::ProductRoom(ProductRoom {
            input: MOST * token_bytes(dtype, cols),
            results: MOST * ROWS,
        }))?;
        let mut x: Vec<f32> = (0..MOST * cols).map(|_| numbers.next()).collect();
        if scales == TokenScales::One {
            exceed(&mut x);
        }
        Ok(Self {
            number: device.memory(PartKind::Matrix(matrix.clone()))?,
            device,
            matrix,
            x,
            scales,
        })
    }

    /// The device's products of some rows with the first tokens.
    fn run(&mut self, rows: Range<usize>, tokens: usize) -> Result<Vec<f32>, DeviceError> {
        let mut quantized = Activations::default();
        let x = &self.x[..tokens * self.matrix.cols];
        let input = Input::new(self.scales.cpu(), x, tokens, &mut quantized);
        let mut out = vec![f32::NAN; tokens * rows.len()];
        let block = Block {
            matrix: self.number,
            rows,
        };
        let ticket = self.device.submit(&Work::Products(&[block], input))?;
        self.device.take(ticket, &mut out)?;
        Ok(out)
    }

    /// How far products are from the CPU's, as a share of the largest.
    fn apart(&mut self) -> Result<f32, DeviceError> {
        let mut apart = 0.0f32;
        for tokens in TOKENS {
            let found = self.run(0..ROWS, tokens)?;
            let mut quantized = Activations::default();
            let x = &self.x[..tokens * self.matrix.cols];
            self.scales
                .cpu()
                .quantize_activations(x, tokens, &mut quantized);
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
}

impl Lease {
    /// Makes kernels for products with rows of `cols` elements, and compares them with the CPU: whether they have the same
    /// bits. Wrong ones are saved, and not run again.
    ///
    /// # Errors
    /// The driver's, or products that are wrong.
    pub(crate) fn prepare_products(
        &self,
        dtype: DType,
        cols: usize,
        scales: TokenScales,
    ) -> Result<bool, DeviceError> {
        let mut device = self.backend();
        let facts = device.facts().clone();
        let kernels = facts.kernels(dtype);
        let tokens = scales.of_kernels(dtype);
        let of = format!("products of {dtype}, width {cols}{tokens}; {kernels}");
        let known = match self.verdicts() {
            Some(verdicts) => verdicts.find(&facts, &of)?,
            None => None,
        };
        device.prepare(&Program::Products { dtype, cols })?;
        let apart = Compared::new(device.as_mut(), matrix(dtype, cols), scales)?.apart()?;
        let exact = device.is_exact();
        device.clear();
        device.prepare(&Program::ProductRoom(ProductRoom::default()))?;
        let found = wrong(&facts, apart).map_or(Found::Right, Found::Wrong);
        if let Some(verdicts) = self.verdicts().filter(|_| known.as_ref() != Some(&found)) {
            verdicts.put(&facts, &of, found);
        }
        accept(&facts, apart)?;
        Ok(apart == 0.0 && exact)
    }
}

/// How far products are from the CPU's.
#[cfg(test)]
pub(super) fn apart(
    device: &mut dyn Backend,
    dtype: DType,
    cols: usize,
) -> Result<f32, DeviceError> {
    device.prepare(&Program::Products { dtype, cols })?;
    let mut compared = Compared::new(device, matrix(dtype, cols), TokenScales::of(dtype))?;
    let apart = compared.apart()?;
    // Some rows, from the middle of a tile to that of another.
    let all = compared.run(0..ROWS, 1)?;
    let some = compared.run(45..301, 1)?;
    let number = compared.number;
    device.release(number);
    Ok(apart.max(deviation(&all[45..301], &some)))
}
