//! The weights of a tile, and their shared scales and minimums.

use std::ops::Range;

use super::scale::Grid;
use emberflow_kernels::{DType, GROUP, SuperBlock, best_super_block, store_q4_row, store_q4k_row};

/// Elements of a super-block.
const SUPER: usize = DType::Q4k.span();

/// Which weights share a scale: those of consecutive inputs of one output, or of consecutive
/// outputs of one input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Groups {
    Inputs,
    Outputs,
}

/// Weights of a tile in storage order: lines whose consecutive elements share scales.
pub struct Lines<'a> {
    pub dtype: DType,
    pub groups: Groups,
    /// Elements of a line.
    pub len: usize,
    /// All lines.
    pub values: &'a [f32],
}

impl<'a> Lines<'a> {
    pub fn new(dtype: DType, groups: Groups, len: usize, values: &'a [f32]) -> Self {
        Self {
            dtype,
            groups,
            len,
            values,
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = &'a [f32]> + use<'a> {
        self.values.chunks_exact(self.len)
    }

    /// Outputs of the tile.
    pub fn outputs(&self, inputs: usize) -> usize {
        self.values.len() / inputs
    }

    /// Index of the weight of an output and an input.
    pub fn index(&self, output: usize, input: usize) -> usize {
        match self.groups {
            Groups::Inputs => output * self.len + input,
            Groups::Outputs => input * self.len + output,
        }
    }

    /// Index of the scale of that weight.
    fn scale_index(&self, output: usize, input: usize) -> usize {
        let at = self.index(output, input);
        at / self.len * self.len.div_ceil(GROUP) + at % self.len / GROUP
    }

    /// The weight of an output and an input.
    pub fn at(&self, output: usize, input: usize) -> f32 {
        self.values[self.index(output, input)]
    }
}

/// The scales and minimums of a tile's lines.
pub struct Factors {
    grid: Grid,
    /// Elements of a line.
    len: usize,
    /// By line and group: a weight is `quant · scale − minimum`.
    values: Vec<(f32, f32)>,
    stored: Stored,
}

/// Scales and minimums in storage form.
enum Stored {
    /// f16 bits of each group's scale.
    Scales(Vec<u16>),
    /// Super-blocks by line; which of a line's super-blocks are begun.
    Blocks(Vec<SuperBlock>, Vec<bool>),
}

impl Factors {
    /// No scale chosen yet.
    pub fn new(lines: &Lines<'_>, grid: Grid) -> Self {
        let count = lines.values.len() / lines.len;
        let groups = lines.len.div_ceil(GROUP);
        let blocks = lines.len.div_ceil(lines.dtype.span());
        Self {
            grid,
            len: lines.len,
            values: vec![(0.0, 0.0); count * groups],
            stored: match lines.dtype {
                DType::Q4k => Stored::Blocks(
                    vec![SuperBlock::default(); count * blocks],
                    vec![false; blocks],
                ),
                _ => Stored::Scales(vec![0; count * groups]),
            },
        }
    }

    /// Scale and minimum of a weight.
    pub fn at(&self, lines: &Lines<'_>, output: usize, input: usize) -> (f32, f32) {
        self.values[lines.scale_index(output, input)]
    }

    /// The elements of a line that determine the choice of [`choose`](Self::choose) for the group
    /// of `element`: the group itself, or the whole super-block if it is not begun.
    pub fn shared(&self, element: usize) -> Range<usize> {
        let span = match &self.stored {
            Stored::Blocks(_, begun) if !begun[element / SUPER] => SUPER,
            _ => GROUP,
        };
        let first = element / span * span;
        first..self.len.min(first + span)
    }

    /// Chooses scale and minimum for the group of `element` in a line, given the weights of the
    /// [`shared`](Self::shared) elements and the cost of an error in each.
    pub fn choose(&mut self, line: usize, element: usize, xs: &[f32], costs: &[f32]) {
        let (groups, group) = (self.len.div_ceil(GROUP), element / GROUP);
        let to = &mut self.values[line * groups + group];
        match &mut self.stored {
            Stored::Scales(bits) => {
                let best = self.grid.best_scale(xs, costs);
                bits[line * groups + group] = best.to_bits();
                *to = (best.to_f32(), 0.0);
            }
            Stored::Blocks(blocks, begun) => {
                let (s, g) = (element / SUPER, group % (SUPER / GROUP));
                let block = &mut blocks[line * self.len.div_ceil(SUPER) + s];
                if begun[s] {
                    block.refit(g, xs, costs);
                } else {
                    *block = best_super_block(xs, costs).unwrap_or_default();
                }
                *to = block.factors(g);
            }
        }
    }

    /// Marks the super-block of `element` as begun in all lines: its two f16 numbers are fixed.
    pub fn begin(&mut self, element: usize) {
        if let Stored::Blocks(_, begun) = &mut self.stored {
            begun[element / SUPER] = true;
        }
    }

    /// Calls [`choose`](Self::choose) for a whole line of at most one super-block.
    pub fn choose_all(&mut self, line: usize, xs: &[f32], costs: &[f32]) {
        self.choose(line, 0, xs, costs);
        if let Stored::Blocks(blocks, _) = &self.stored {
            let groups = self.len.div_ceil(GROUP);
            let values = &mut self.values[line * groups..][..groups];
            for (g, to) in values.iter_mut().enumerate() {
                *to = blocks[line].factors(g);
            }
        }
    }

    /// Stores the lines' quants, given as signed bytes, with the chosen scales and minimums.
    pub fn store(&self, lines: &Lines<'_>, codes: &[u8], out: &mut [u8]) {
        let dtype = lines.dtype;
        let rows = out.chunks_exact_mut(dtype.row_bytes(lines.len));
        let mut nibbles = vec![0; lines.len];
        for (line, (codes, out)) in codes.chunks_exact(lines.len).zip(rows).enumerate() {
            match &self.stored {
                Stored::Blocks(blocks, _) => {
                    let per_line = lines.len.div_ceil(SUPER);
                    store_q4k_row(codes, &blocks[line * per_line..][..per_line], out);
                }
                Stored::Scales(scales) => {
                    let per_line = lines.len.div_ceil(GROUP);
                    let scales = &scales[line * per_line..][..per_line];
                    if dtype == DType::Q4 {
                        let from = codes.iter().map(|&code| (code as i8 + 8) as u8);
                        (nibbles.iter_mut().zip(from)).for_each(|(to, from)| *to = from);
                        store_q4_row(&nibbles, scales, out);
                        continue;
                    }
                    let (quants, to) = out.split_at_mut(dtype.quants_bytes(lines.len));
                    quants.fill(0);
                    quants[..codes.len()].copy_from_slice(codes);
                    for (to, scale) in to.chunks_exact_mut(2).zip(scales) {
                        to.copy_from_slice(&scale.to_le_bytes());
                    }
                }
            }
        }
    }
}
