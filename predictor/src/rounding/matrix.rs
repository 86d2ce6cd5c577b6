//! Rounds whole matrices to the block formats of containers.

use std::cmp::Ordering;

use emberflow_kernels::{DType, GROUP, QuantizeError, Row, quantize_row};

use super::inputs::Inputs;
use super::lines::{Factors, Groups, Lines};
use super::scale::{Grid, inverse_of};

/// Outputs rounded together by a thread in a matrix stored by outputs, with one pass over the
/// factor. In a matrix stored by inputs, the outputs that share a scale are rounded together.
const TILE: usize = GROUP;

/// Computes the stored rows of tile number i.
type TileWork<'a> = dyn Fn(usize, &mut [u8]) -> Result<(), QuantizeError> + Sync + 'a;

/// Rounds matrices that read the same inputs.
pub struct Rounder<'a> {
    inputs: &'a Inputs<'a>,
    /// Input rounded at each step: the largest variance first, while many others can still
    /// compensate its error. Inputs whose weights share a scale are adjacent.
    order: Vec<u32>,
    /// [`Inputs::factor`] in that order.
    factor: Vec<f32>,
}

impl<'a> Rounder<'a> {
    /// For matrices with scales shared along a row ([`rows`](Self::rows)).
    pub fn for_rows(inputs: &'a Inputs<'a>) -> Self {
        let mut groups: Vec<Vec<u32>> = (0..inputs.size as u32)
            .collect::<Vec<_>>()
            .chunks(GROUP)
            .map(<[u32]>::to_vec)
            .collect();
        let energy = |&i: &u32| inputs.energy(i as usize);
        let sum = |group: &Vec<u32>| group.iter().map(energy).sum::<f32>();
        groups.sort_by(|a, b| sum(b).total_cmp(&sum(a)));
        let order = groups.concat();
        Self {
            inputs,
            factor: inputs.factor(&order),
            order,
        }
    }

    /// For matrices with scales shared along a column ([`columns`](Self::columns)).
    pub fn for_columns(inputs: &'a Inputs<'a>) -> Self {
        let order = inputs.by_energy();
        Self {
            inputs,
            factor: inputs.factor(&order),
            order,
        }
    }

    /// Rounds rows `[outputs × size]` and stores them in `dtype`; a scale is shared along a row.
    /// The squared error of the products over the text is never larger than that of rounding each
    /// weight on its own. `None` for a format without scales.
    ///
    /// # Errors
    /// A weight that the format cannot represent.
    pub fn rows(&self, dtype: DType, values: &[f32]) -> Result<Option<Vec<u8>>, QuantizeError> {
        let Some(grid) = Grid::of(dtype) else {
            return Ok(None);
        };
        let bytes = dtype.row_bytes(self.inputs.size);
        let mut out = vec![0; values.len() / self.inputs.size * bytes];
        let work = |tile: usize, out: &mut [u8]| {
            let lines =
                &values[tile * TILE * self.inputs.size..][..out.len() / bytes * self.inputs.size];
            self.tile(
                Lines::new(dtype, Groups::Inputs, self.inputs.size, lines),
                grid,
                out,
            )
        };
        self.each_tile(&mut out, TILE * bytes, &work)?;
        Ok(Some(out))
    }

    /// Rounds columns `[size × outputs]`, one per input, and stores them in `dtype`; a scale is
    /// shared along a column. Otherwise as [`rows`](Self::rows).
    ///
    /// # Errors
    /// As [`rows`](Self::rows).
    pub fn columns(
        &self,
        dtype: DType,
        outputs: usize,
        values: &[f32],
    ) -> Result<Option<Vec<u8>>, QuantizeError> {
        let Some(grid) = Grid::of(dtype) else {
            return Ok(None);
        };
        // [tiles][inputs], each with the quants and scales of one tile and input.
        let wide = dtype.span();
        let group = dtype.row_bytes(wide);
        let mut tiles = vec![0; outputs.div_ceil(wide) * self.inputs.size * group];
        let work = |tile: usize, out: &mut [u8]| {
            let first = tile * wide;
            let width = wide.min(outputs - first);
            let rows = values.chunks_exact(outputs);
            let lines: Vec<f32> = rows
                .flat_map(|row| &row[first..first + width])
                .copied()
                .collect();
            self.tile(Lines::new(dtype, Groups::Outputs, width, &lines), grid, out)
        };
        self.each_tile(&mut tiles, self.inputs.size * group, &work)?;
        let row = dtype.row_bytes(outputs);
        let mut out = vec![0; self.inputs.size * row];
        for (t, tile) in tiles.chunks_exact(self.inputs.size * group).enumerate() {
            let (first, width) = (t * wide, wide.min(outputs - t * wide));
            let parts = tile.chunks_exact(dtype.row_bytes(width));
            for (part, out) in parts.zip(out.chunks_exact_mut(row)) {
                let (out_quants, out_scales) = out.split_at_mut(dtype.quants_bytes(outputs));
                let (quants, scales) = part.split_at(dtype.quants_bytes(width));
                out_quants[dtype.quants_bytes(first)..][..quants.len()].copy_from_slice(quants);
                out_scales[dtype.scales_bytes(first)..][..scales.len()].copy_from_slice(scales);
            }
        }
        Ok(Some(out))
    }

    /// Calls `work` with every tile's number and part of `out`, on all threads.
    fn each_tile(
        &self,
        out: &mut [u8],
        bytes: usize,
        work: &TileWork<'_>,
    ) -> Result<(), QuantizeError> {
        let failed = std::sync::Mutex::new(None);
        let workers = &self.inputs.on.workers;
        workers.for_each_chunk_mut(out, bytes, &|_, tile, out| {
            if let Err(error) = work(tile, out)
                && let Ok(mut failed) = failed.lock()
            {
                failed.get_or_insert(error);
            }
        });
        match failed.into_inner() {
            Ok(Some(error)) => Err(error),
            _ => Ok(()),
        }
    }

    /// Rounds one tile into `out`, with compensation unless that is worse.
    fn tile(&self, lines: Lines<'_>, grid: Grid, out: &mut [u8]) -> Result<(), QuantizeError> {
        let bytes = lines.dtype.row_bytes(lines.len);
        // The last tile may be smaller.
        let out = &mut out[..lines.values.len() / lines.len * bytes];
        let mut plain = vec![0; out.len()];
        for (line, plain) in lines.iter().zip(plain.chunks_exact_mut(bytes)) {
            let (quants, scales) = plain.split_at_mut(lines.dtype.quants_bytes(lines.len));
            quantize_row(lines.dtype, line, quants, scales)?;
        }
        self.compensate(&lines, grid, out);
        let loss = |stored: &[u8]| {
            let losses = self.inputs.losses(&self.errors(&lines, stored));
            losses.iter().sum::<f64>()
        };
        let (with, without) = (loss(out), loss(&plain));
        // NaN counts as worse.
        if with.partial_cmp(&without) != Some(Ordering::Less) {
            out.copy_from_slice(&plain);
        }
        Ok(())
    }

    /// Rounds input by input. The error of each in the products is compensated, as far as possible,
    /// by the inputs that follow.
    fn compensate(&self, lines: &Lines<'_>, grid: Grid, out: &mut [u8]) {
        let (n, outputs) = (self.inputs.size, lines.outputs(self.inputs.size));
        let mut w = vec![0.0; outputs * n];
        for (r, w) in w.chunks_exact_mut(n).enumerate() {
            for (w, &input) in w.iter_mut().zip(&self.order) {
                *w = lines.at(r, input as usize);
            }
        }
        let mut codes = vec![0u8; outputs * n];
        let mut factors = Factors::new(lines, grid);
        let costs: Vec<f32> = (0..n).map(|i| self.factor[i * (n + 1)].powi(-2)).collect();
        let mut place = vec![0; n];
        (self.order.iter().enumerate()).for_each(|(i, &input)| place[input as usize] = i);
        let (mut elements, mut weights) = (Vec::new(), Vec::new());
        for i in 0..n {
            let input = self.order[i] as usize;
            match lines.groups {
                Groups::Outputs => {
                    elements.clear();
                    elements.extend((0..outputs).map(|r| w[r * n + i]));
                    weights.resize(outputs, 1.0);
                    factors.choose_all(input, &elements, &weights);
                }
                Groups::Inputs if i == 0 || self.order[i - 1] as usize / GROUP != input / GROUP => {
                    // Weights that share scales with the group; if it is the first of them, none is
                    // rounded yet.
                    let shared = factors.shared(input);
                    weights.clear();
                    weights.extend(shared.clone().map(|input| costs[place[input]]));
                    for (r, row) in w.chunks_exact(n).enumerate() {
                        elements.clear();
                        elements.extend(shared.clone().map(|input| row[place[input]]));
                        factors.choose(r, input, &elements, &weights);
                    }
                    factors.begin(input);
                }
                Groups::Inputs => {}
            }
            let factor = &self.factor[i * n + i..(i + 1) * n];
            for r in 0..outputs {
                let (s, min) = factors.at(lines, r, input);
                let (x, later) = match w[r * n + i..(r + 1) * n].split_first_mut() {
                    Some(split) => split,
                    None => continue,
                };
                let quant = grid.nearest(*x + min, inverse_of(s));
                codes[lines.index(r, input)] = quant as i8 as u8;
                let error = (*x - (quant * s - min)) / factor[0];
                self.inputs
                    .on
                    .cpu
                    .axpy(-error, Row::f32(&factor[1..]), later);
            }
        }
        self.refine(lines, grid, &factors, &mut codes);
        factors.store(lines, &codes, out);
    }

    /// Moves each quant to the value that minimises the error of the products while the others are
    /// fixed.
    fn refine(&self, lines: &Lines<'_>, grid: Grid, factors: &Factors, codes: &mut [u8]) {
        let (n, outputs) = (self.inputs.size, lines.outputs(self.inputs.size));
        let mut errors = vec![0.0; outputs * n];
        for (at, error) in errors.iter_mut().enumerate() {
            let (r, i) = (at / n, at % n);
            let quant = f32::from(codes[lines.index(r, i)] as i8);
            let (s, min) = factors.at(lines, r, i);
            *error = lines.at(r, i) - (quant * s - min);
        }
        self.inputs.settle(&mut errors, |r, i, by| {
            let (s, _) = factors.at(lines, r, i);
            let code = &mut codes[lines.index(r, i)];
            let quant = f32::from(*code as i8);
            let better = grid.nearest(quant * s + by, inverse_of(s));
            *code = better as i8 as u8;
            (better - quant) * s
        });
    }

    /// `lines` less `stored`, `[outputs × size]`.
    fn errors(&self, lines: &Lines<'_>, stored: &[u8]) -> Vec<f32> {
        let n = self.inputs.size;
        let mut values = vec![0.0; lines.values.len()];
        let bytes = lines.dtype.row_bytes(lines.len);
        let rows = stored.chunks_exact(bytes);
        for (row, values) in rows.zip(values.chunks_exact_mut(lines.len)) {
            let row = Row::inline(lines.dtype, lines.len, row);
            self.inputs.on.cpu.dequantize(row, values);
        }
        let error = |r, i| lines.at(r, i) - values[lines.index(r, i)];
        let each = (0..lines.outputs(n)).flat_map(|r| (0..n).map(move |i| (r, i)));
        each.map(|(r, i)| error(r, i)).collect()
    }
}
