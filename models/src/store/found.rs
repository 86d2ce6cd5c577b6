//! Tensors as found by a reader: location and conversion to the presented form.

use super::packed::Packed;
use crate::config::ModelConfig;
use crate::dtype::DType;
use crate::families;
use crate::names::{Role, TensorId};

/// Relation of the stored matrix to the presented one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layout {
    /// Equal.
    AsIs,
    /// Stored `[cols × rows]`.
    Transposed,
    /// Every second stored row, from this one on.
    EveryRow(usize),
    /// Every second stored element of a vector, from this one on.
    EveryElement(usize),
    /// Stored transposed; every second column of that, from this one on.
    TransposedEvery(usize),
    /// Stored transposed; some consecutive columns of that.
    TransposedPart {
        /// The first of them.
        first: usize,
        /// Stored columns.
        stored: usize,
    },
    /// Stored minus one (norms whose factor is `1 + weight`).
    PlusOne,
    /// Rows of several matrices stored together, group by group (Falcon 40B, Qwen3-Next).
    Grouped(RowGroups),
    /// The same for elements of a vector.
    GroupedElements(RowGroups),
    /// A vector stored as `log(−value)`.
    NegativeLog,
    /// Stored negated.
    Negative,
    /// The rows of each head are stored in interleaved rotary order: pair i in rows 2i and 2i+1,
    /// instead of i and i + head_dim/2 as in rotate-half.
    Interleaved(RotaryHeads),
    /// The same for the columns of a bias or of a norm.
    InterleavedColumns(RotaryHeads),
    /// The first stored rows of each head, transposed.
    TransposedHeads {
        /// Stored rows per head.
        stored: usize,
        /// Columns of a stored row.
        cols: usize,
    },
}

/// Heads whose rotated elements are stored in interleaved order; the others are in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RotaryHeads {
    /// Elements of a head.
    pub(crate) head_dim: usize,
    /// The first rotated one.
    pub(crate) first: usize,
    /// The number of rotated ones.
    pub(crate) rotated: usize,
}

impl RotaryHeads {
    /// Stored position of rotate-half position `row` of all heads.
    pub(crate) fn stored(self, row: usize) -> usize {
        let inside = (row % self.head_dim).checked_sub(self.first);
        let Some(inside) = inside.filter(|inside| *inside < self.rotated) else {
            return row;
        };
        let half = self.rotated / 2;
        row - inside + 2 * (inside % half) + inside / half
    }
}

/// Selects a matrix's rows in each group of the stored ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RowGroups {
    /// Stored rows per group.
    pub(crate) stored: usize,
    /// (First row in a group, number): the first part of all groups, then the second part.
    pub(crate) parts: [[usize; 2]; 3],
}

impl RowGroups {
    /// Rows of a group that the matrix takes.
    pub(crate) fn taken(&self) -> usize {
        self.parts.iter().map(|part| part[1]).sum()
    }

    /// The stored row of row `row` of `rows`.
    pub(crate) fn stored_row(&self, mut row: usize, rows: usize) -> usize {
        let groups = rows / self.taken().max(1);
        for [first, count] in self.parts {
            if row < count * groups {
                return row / count * self.stored + first + row % count;
            }
            row -= count * groups;
        }
        row
    }
}

/// A tensor found in a file, under its canonical id.
#[derive(Debug, Clone)]
pub(crate) struct Found {
    pub(crate) id: TensorId,
    pub(crate) name: String,
    /// Outermost dimension first, as stored.
    pub(crate) shape: Vec<usize>,
    pub(crate) dtype: DType,
    pub(crate) layout: Layout,
    /// Index into the files.
    pub(crate) file: usize,
    /// Byte position of the first element.
    pub(crate) offset: u64,
    /// Location of separately stored scales.
    pub(crate) scales: Option<Scales>,
    /// The parts of a packed matrix; offset and file are then those of its codes.
    pub(crate) packed: Option<Packed>,
    /// Factors of its presented rows.
    pub(crate) gains: Gains,
}

/// Factors of rows as a configuration gives them: from each row number on, up to the next. Rows before the first
/// have none.
pub(crate) type Gains = Vec<(usize, f32)>;

/// Separately stored scales of a tensor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scales {
    /// Index into the files.
    pub(crate) file: usize,
    /// Byte position of the first.
    pub(crate) offset: u64,
    /// The unit of a scale.
    pub(crate) kind: ScaleKind,
}

/// Unit of a scale.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ScaleKind {
    /// A byte for each block of 32 elements of a row.
    Exponents,
    /// A number for each block of rows and columns.
    Grid {
        /// F32, F16, BF16 or E8M0.
        dtype: DType,
        /// Rows and columns of a block; more than the matrix has, if it has one scale.
        block: [usize; 2],
        /// Number of blocks in a row of blocks.
        in_a_row: usize,
        /// Index of the tensor's first row among the rows that the scales cover.
        first: usize,
    },
}

impl Scales {
    /// The scales of the rows from `rows` on, after so many blocks.
    pub(crate) fn after_rows(self, rows: usize, blocks: usize) -> Self {
        match self.kind {
            ScaleKind::Exponents => Self {
                offset: self.offset.saturating_add(blocks as u64),
                ..self
            },
            ScaleKind::Grid {
                dtype,
                block,
                in_a_row,
                first,
            } => Self {
                kind: ScaleKind::Grid {
                    dtype,
                    block,
                    in_a_row,
                    first: first + rows,
                },
                ..self
            },
        }
    }
}

/// The layout of a tensor in a checkpoint that stores rows in interleaved rotary order; `None` if it
/// is not rotated.
pub(crate) fn rotary_order(id: TensorId, config: &ModelConfig) -> Option<Layout> {
    if !config.has_keys(id.layer) {
        return None;
    }
    let [rotated, head_dim] = [config.rope.dims, config.head_dim].map(|n| n as usize);
    let last = |head_dim: usize| RotaryHeads {
        head_dim,
        first: head_dim.saturating_sub(rotated),
        rotated,
    };
    // Converters to GGUF interleave whole heads, also of families that rotate a part of them.
    let interleaved = families::of(&config.family).interleaved;
    let first = RotaryHeads {
        head_dim,
        first: 0,
        rotated: if interleaved { rotated } else { head_dim },
    };
    match (id.role, config.form.latent) {
        (Role::Q, Some(_)) => Some(Layout::Interleaved(last(head_dim))),
        (Role::LatentKv, Some(latent)) => {
            Some(Layout::Interleaved(last(latent.rank as usize + rotated)))
        }
        (Role::Q | Role::K, None) => Some(Layout::Interleaved(first)),
        (Role::QBias | Role::KBias | Role::QNorm | Role::KNorm, None) => {
            Some(Layout::InterleavedColumns(first))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interleaved_order_is_the_inverse_of_the_converters_permutation() {
        // The converter's reshape(heads, 2, half).swapaxes(1, 2), written out.
        let (heads, head_dim) = (3, 8);
        let whole = RotaryHeads {
            head_dim,
            first: 0,
            rotated: head_dim,
        };
        let half = head_dim / 2;
        let mut stored = Vec::new();
        for head in 0..heads {
            for pair in 0..half {
                for part in 0..2 {
                    stored.push(head * head_dim + part * half + pair);
                }
            }
        }
        for row in 0..heads * head_dim {
            assert_eq!(stored[whole.stored(row)], row);
        }
        let of_seven = |first| -> Vec<usize> {
            let part = RotaryHeads {
                head_dim: 7,
                first,
                rotated: 4,
            };
            (0..14).map(|row| part.stored(row)).collect()
        };
        let last = of_seven(3);
        assert_eq!(last[..7], [0, 1, 2, 3, 5, 4, 6]);
        assert_eq!(last[7..], [7, 8, 9, 10, 12, 11, 13]);
        assert_eq!(of_seven(0)[7..], [7, 9, 8, 10, 11, 12, 13]);
    }
}
