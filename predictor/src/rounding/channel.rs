//! Rounds whole matrices to q4c, whose stored rows have one scale, and another for their outliers.

use emberflow_kernels::{
    ChannelRow, DType, QuantizeError, Row, outlier_channels, quantize_q4c, quantize_row,
};

use super::inputs::Inputs;
use super::scale::{Grid, inverse_of};

/// Outputs rounded together by a thread.
const TILE: usize = 32;

/// Scales tried for each row, relative to the one with the smallest error of the weights.
const FACTORS: [f32; 5] = [0.8, 0.9, 1.0, 1.12, 1.25];

/// Number of times that scales are fitted to the integers, and integers moved to fit the scales.
const REFITS: usize = 2;

/// What the scale of a column's outliers leaves room for: they change as they compensate errors of others.
const HEADROOM: f32 = 1.1;

/// The range of the nibbles, and of outliers.
const NIBBLES: Grid = Grid::new(-8.0, 7.0);
const BYTES: Grid = Grid::new(-127.0, 127.0);

/// Rounds matrices to q4c that read the same inputs. With compensation as [`super::Rounder`], but scales are
/// shared by whole rows: they are chosen before the first weight is rounded.
pub struct ChannelRounder<'a> {
    inputs: &'a Inputs<'a>,
    /// Input rounded at each step.
    order: Vec<u32>,
    /// [`Inputs::factor`] in that order.
    factor: Vec<f32>,
    /// Inputs that are outliers in every row, ascending; they come last in the order.
    outliers: Vec<u16>,
}

/// Weights of some outputs, `[outputs × size]`, and the grids to which they are rounded.
struct Tile {
    weights: Vec<f32>,
    /// Distance of the values that a weight can have.
    steps: Vec<f32>,
    /// Whether it is an outlier.
    outlier: Vec<bool>,
    /// Integers that are multiplied by the steps.
    codes: Vec<f32>,
}

impl Tile {
    /// The integer for a weight that should have the value `x`.
    fn nearest(&self, at: usize, x: f32) -> f32 {
        let grid = if self.outlier[at] { BYTES } else { NIBBLES };
        grid.nearest(x, inverse_of(self.steps[at]))
    }

    /// The weights less what stands for them.
    fn errors(&self) -> Vec<f32> {
        let values = self.codes.iter().zip(&self.steps).map(|(c, s)| c * s);
        self.weights
            .iter()
            .zip(values)
            .map(|(w, v)| w - v)
            .collect()
    }
}

impl<'a> ChannelRounder<'a> {
    /// For matrices whose rows share these outliers, which ascend ([`rows`](Self::rows)).
    pub fn for_rows(inputs: &'a Inputs<'a>, outliers: Vec<u16>) -> Self {
        let mut order = inputs.by_energy();
        // Their errors are small, so they can compensate all others.
        order.sort_by_key(|&i| outliers.iter().any(|&o| u32::from(o) == i));
        Self {
            inputs,
            factor: inputs.factor(&order),
            order,
            outliers,
        }
    }

    /// For matrices that are stored by columns, each with outliers of its own ([`columns`](Self::columns)).
    pub fn for_columns(inputs: &'a Inputs<'a>) -> Self {
        Self::for_rows(inputs, Vec::new())
    }

    /// Rounds rows `[outputs × size]` and stores them. The squared error of the products over the text is in no row larger than
    /// if each weight is rounded on its own.
    ///
    /// # Errors
    /// A weight that the format cannot represent.
    pub fn rows(&self, values: &[f32]) -> Result<Vec<u8>, QuantizeError> {
        let (n, dtype) = (self.inputs.size, DType::Q4c);
        let bytes = dtype.row_bytes(n);
        let mut stored = vec![Ok(Vec::new()); (values.len() / n).div_ceil(TILE)];
        let workers = &self.inputs.on.workers;
        workers.for_each_chunk_mut(&mut stored, 1, &|_, t, stored| {
            let weights = &values[t * TILE * n..];
            stored[0] = self.row_tile(&weights[..weights.len().min(TILE * n)]);
        });
        let mut out = Vec::with_capacity(values.len() / n * bytes);
        for tile in stored {
            out.extend(tile?);
        }
        Ok(out)
    }

    /// Rounds and stores some rows.
    fn row_tile(&self, weights: &[f32]) -> Result<Vec<u8>, QuantizeError> {
        let (n, dtype) = (self.inputs.size, DType::Q4c);
        let (bytes, count) = (dtype.row_bytes(n), weights.len() / n);
        let mut out = vec![0; count * bytes];
        let mut plain = vec![0.0; weights.len()];
        for (r, (row, out)) in (weights.chunks_exact(n))
            .zip(out.chunks_exact_mut(bytes))
            .enumerate()
        {
            let (quants, scales) = out.split_at_mut(dtype.quants_bytes(n));
            quantize_q4c(row, &self.outliers, quants, scales)?;
            let values = &mut plain[r * n..][..n];
            self.inputs
                .on
                .cpu
                .dequantize(Row::inline(dtype, n, out), values);
        }
        let errors = weights.iter().zip(&plain).map(|(w, p)| w - p);
        let losses = self.inputs.losses(&errors.collect::<Vec<_>>());
        let tile = self.best(weights);
        let found = self.inputs.losses(&tile.errors());
        let mut codes = Vec::with_capacity(n);
        for (r, out) in out.chunks_exact_mut(bytes).enumerate() {
            // NaN counts as worse.
            if found[r] < losses[r] {
                let row = r * n..(r + 1) * n;
                let [steps, its] = [&tile.steps, &tile.codes].map(|all| &all[row.clone()]);
                store(its, steps, &tile.outlier[row], &mut codes, out);
            }
        }
        Ok(out)
    }

    /// Rows with the best of several scales.
    fn best(&self, weights: &[f32]) -> Tile {
        let n = self.inputs.size;
        let dense = n - self.outliers.len();
        let costs: Vec<f32> = (0..dense)
            .map(|i| self.factor[i * (n + 1)].powi(-2))
            .collect();
        let mut first = vec![false; n];
        (self.outliers.iter()).for_each(|&o| first[usize::from(o)] = true);
        let outlier = first.repeat(weights.len() / n);
        let mut elements = Vec::with_capacity(dense);
        let scales = weights.chunks_exact(n).map(|row| {
            elements.clear();
            elements.extend(self.order[..dense].iter().map(|&i| row[i as usize]));
            NIBBLES.best(&elements, &costs, |scale| scale)
        });
        let scales: Vec<f32> = scales.collect();
        let tried = FACTORS.map(|factor| {
            let steps = scales.iter().flat_map(|scale| vec![scale * factor; n]);
            let mut tile = Tile {
                weights: weights.to_vec(),
                steps: steps.collect(),
                outlier: outlier.clone(),
                codes: vec![0.0; weights.len()],
            };
            self.compensate(&mut tile);
            tile
        });
        let losses = tried
            .each_ref()
            .map(|tile| self.inputs.losses(&tile.errors()));
        let [mut best, others @ ..] = tried;
        let [mut least, other_losses @ ..] = losses;
        for (tile, losses) in others.iter().zip(&other_losses) {
            for (r, loss) in losses.iter().enumerate() {
                if *loss >= least[r] {
                    continue;
                }
                least[r] = *loss;
                let row = r * n..(r + 1) * n;
                best.steps[row.clone()].copy_from_slice(&tile.steps[row.clone()]);
                best.codes[row.clone()].copy_from_slice(&tile.codes[row]);
            }
        }
        self.settle(&mut best);
        for _ in 0..REFITS {
            self.refit(&mut best);
            self.settle(&mut best);
        }
        best
    }

    /// Rounds input by input. The error of each in the products is compensated, as far as possible, by the inputs
    /// that follow.
    fn compensate(&self, tile: &mut Tile) {
        let n = self.inputs.size;
        let mut w = Vec::with_capacity(tile.weights.len());
        for row in tile.weights.chunks_exact(n) {
            w.extend(self.order.iter().map(|&input| row[input as usize]));
        }
        for (i, &input) in self.order.iter().enumerate() {
            let input = input as usize;
            let factor = &self.factor[i * n + i..(i + 1) * n];
            for (r, w) in w.chunks_exact_mut(n).enumerate() {
                if i + self.outliers.len() == n {
                    // Outliers have met the errors of all others now.
                    let most = w[i..].iter().fold(0.0f32, |most, w| most.max(w.abs()));
                    for &outlier in &self.outliers {
                        tile.steps[r * n + usize::from(outlier)] = most / 127.0;
                    }
                }
                let Some((&mut x, later)) = w[i..].split_first_mut() else {
                    continue;
                };
                let at = r * n + input;
                tile.codes[at] = tile.nearest(at, x);
                let error = (x - tile.codes[at] * tile.steps[at]) / factor[0];
                self.inputs
                    .on
                    .cpu
                    .axpy(-error, Row::f32(&factor[1..]), later);
            }
        }
    }

    /// Moves each integer to where the error of the products is smallest while the others are fixed.
    fn settle(&self, tile: &mut Tile) {
        let n = self.inputs.size;
        self.inputs.settle(&mut tile.errors(), |r, i, by| {
            let at = r * n + i;
            let (code, step) = (tile.codes[at], tile.steps[at]);
            tile.codes[at] = tile.nearest(at, code * step + by);
            (tile.codes[at] - code) * step
        });
    }

    /// Gives each row the two scales with the smallest error of the products for its integers.
    fn refit(&self, tile: &mut Tile) {
        let n = self.inputs.size;
        for r in 0..tile.codes.len() / n {
            let row = r * n..(r + 1) * n;
            let codes = tile.codes[row.clone()]
                .iter()
                .zip(&tile.outlier[row.clone()]);
            let mut all = Vec::with_capacity(2 * n);
            for part in [false, true] {
                let codes = codes.clone();
                all.extend(codes.map(|(c, &is)| if is == part { *c } else { 0.0 }));
            }
            let spread = self.inputs.spread(&all);
            let dot = |a: &[f32], b: &[f32]| -> f64 {
                let pairs = a.iter().zip(b);
                pairs.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
            };
            let (q, p) = all.split_at(n);
            let (of_q, of_p) = spread.split_at(n);
            let w = &tile.weights[row.clone()];
            let (qq, pp, qp) = (dot(q, of_q), dot(p, of_p), dot(q, of_p));
            let (qw, pw) = (dot(w, of_q), dot(w, of_p));
            let det = qq * pp - qp * qp;
            let scales = if det > 1e-9 * qq * pp {
                [(qw * pp - pw * qp) / det, (pw * qq - qw * qp) / det]
            } else if qq > 0.0 && pp == 0.0 {
                [qw / qq, 0.0]
            } else {
                continue;
            };
            for at in row {
                tile.steps[at] = scales[usize::from(tile.outlier[at])] as f32;
            }
        }
    }

    /// Rounds columns `[size × outputs]`, one per input, and stores them; a column has a scale and outliers of its
    /// own. The squared error of the products over the text is never larger than if each weight is rounded on its
    /// own.
    ///
    /// # Errors
    /// As [`rows`](Self::rows).
    pub fn columns(&self, outputs: usize, values: &[f32]) -> Result<Vec<u8>, QuantizeError> {
        let (n, dtype) = (self.inputs.size, DType::Q4c);
        let bytes = dtype.row_bytes(outputs);
        let mut out = vec![0; n * bytes];
        let mut plain = vec![0.0; values.len()];
        let mut steps = vec![0.0; values.len()];
        let mut outlier = vec![false; values.len()];
        let ones = vec![1.0; outputs];
        for (i, column) in values.chunks_exact(outputs).enumerate() {
            let row = i * outputs..(i + 1) * outputs;
            let out = &mut out[i * bytes..][..bytes];
            let (quants, scales) = out.split_at_mut(dtype.quants_bytes(outputs));
            quantize_row(dtype, column, quants, scales)?;
            let stored = Row::inline(dtype, outputs, out);
            self.inputs
                .on
                .cpu
                .dequantize(stored, &mut plain[row.clone()]);
            let magnitudes: Vec<f32> = column.iter().map(|w| w.abs()).collect();
            let mut dense = column.to_vec();
            let mut most = 0.0f32;
            for o in outlier_channels(&magnitudes).into_iter().map(usize::from) {
                outlier[row.start + o] = true;
                most = most.max(std::mem::take(&mut dense[o]).abs());
            }
            let scale = NIBBLES.best(&dense, &ones, |scale| scale);
            for at in row {
                steps[at] = if outlier[at] {
                    HEADROOM * most / 127.0
                } else {
                    scale
                };
            }
        }
        let mut tiles: Vec<Option<(Tile, [f64; 2])>> = Vec::new();
        tiles.resize_with(outputs.div_ceil(TILE), || None);
        let workers = &self.inputs.on.workers;
        workers.for_each_chunk_mut(&mut tiles, 1, &|_, t, tile| {
            let lines = t * TILE..outputs.min((t + 1) * TILE);
            let mut made = Tile {
                weights: turned(values, outputs, lines.clone()),
                steps: turned(&steps, outputs, lines.clone()),
                outlier: turned(&outlier, outputs, lines.clone()),
                codes: vec![0.0; lines.len() * n],
            };
            self.compensate(&mut made);
            self.settle(&mut made);
            let plain = turned(&plain, outputs, lines);
            let without = made.weights.iter().zip(plain).map(|(w, p)| w - p);
            let without: Vec<f32> = without.collect();
            let loss = |errors: &[f32]| self.inputs.losses(errors).iter().sum();
            let losses = [loss(&made.errors()), loss(&without)];
            tile[0] = Some((made, losses));
        });
        let tiles: Vec<_> = tiles.into_iter().flatten().collect();
        let [with, without] = [0, 1].map(|which| tiles.iter().map(|(_, l)| l[which]).sum::<f64>());
        // NaN counts as worse.
        if with < without {
            let mut codes = Vec::with_capacity(outputs);
            for (i, out) in out.chunks_exact_mut(bytes).enumerate() {
                let its = tiles
                    .iter()
                    .flat_map(|(tile, _)| tile.codes[i..].iter().step_by(n));
                let its: Vec<f32> = its.copied().collect();
                let row = i * outputs..(i + 1) * outputs;
                store(&its, &steps[row.clone()], &outlier[row], &mut codes, out);
            }
        }
        Ok(out)
    }
}

/// Some columns of `all`, `[rows × cols]`, as rows.
fn turned<T: Copy>(all: &[T], cols: usize, columns: std::ops::Range<usize>) -> Vec<T> {
    let of = |column| all[column..].iter().step_by(cols).copied();
    columns.flat_map(of).collect()
}

/// Stores a row, given the integer and the step of each weight.
fn store(values: &[f32], steps: &[f32], outlier: &[bool], codes: &mut Vec<i8>, out: &mut [u8]) {
    let n = values.len();
    let channels: Vec<u16> = (0..n).filter(|&i| outlier[i]).map(|i| i as u16).collect();
    let outliers: Vec<i8> = (channels.iter().map(|&c| values[usize::from(c)] as i8)).collect();
    codes.clear();
    let dense = values.iter().zip(outlier);
    codes.extend(dense.map(|(&code, &is)| if is { 0 } else { code as i8 }));
    let step = |which| {
        outlier
            .iter()
            .position(|&is| is == which)
            .map_or(0.0, |at| steps[at])
    };
    let row = ChannelRow {
        codes,
        scale: step(false),
        outliers: &outliers,
        outlier_scale: step(true),
        channels: &channels,
    };
    let (quants, scales) = out.split_at_mut(DType::Q4c.quants_bytes(n));
    row.store(quants, scales);
}
