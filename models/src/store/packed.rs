//! Matrices stored as codes of a few bits, whose scales and offsets are in tensors of their own.

use std::ops::Range;
use std::sync::Arc;

use super::table::Table;
use crate::dtype::DType;
use crate::error::Error;
use crate::file::DataFile;

/// Most bytes of decoded rows of matrices that are stored transposed, which are decoded together; few in tests, whose
/// matrices then have several bands.
pub(super) const BAND_BYTES: usize = if cfg!(test) { 5000 } else { 256 << 20 };
/// Stored rows of a matrix that is stored transposed, which are read together.
const STRIP: usize = 64;

/// Columns that share a scale.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Groups {
    /// So many consecutive ones; the last group of a row may have fewer.
    Every(usize),
    /// The group of each column, as a table of one row.
    Listed(Table),
}

/// What is subtracted from a code, or added to its product.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Offsets {
    /// The same zero point for all codes.
    Zero(f32),
    /// A zero point for each group.
    Zeros(Table),
    /// A number for each group that is added to code times scale.
    Biases(Table),
}

/// A factor of all scales.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Common {
    /// They are multiplied by it.
    Factor(Table),
    /// They are divided by it.
    Divisor(Table),
}

/// Where the parts of a matrix lie, and how they give its elements: `(code − zero) · scale + bias`.
#[derive(Debug)]
pub(crate) struct Parts {
    /// Rows and columns.
    pub(crate) shape: [usize; 2],
    /// Whether all tables are transposed: a row for each column, or for each group of columns.
    pub(crate) transposed: bool,
    /// The codes.
    pub(crate) codes: Table,
    /// The scales: one for each row and group, or one for all.
    pub(crate) scales: Table,
    /// A factor of all scales.
    pub(crate) common: Option<Common>,
    /// Zero points or biases.
    pub(crate) offsets: Offsets,
    /// Columns with one scale.
    pub(crate) groups: Groups,
    /// The type in [`crate::TensorInfo::source_dtype`].
    pub(crate) dtype: DType,
    /// Bytes of all parts.
    pub(crate) bytes: u64,
}

/// Some consecutive rows of such a matrix.
#[derive(Debug, Clone)]
pub(crate) struct Packed {
    pub(crate) parts: Arc<Parts>,
    /// The first of them.
    pub(crate) first: usize,
}

/// Rows that were decoded together: those of a tensor, by its index, from this row on.
pub(super) type Band = ([usize; 2], Vec<f32>);

impl Packed {
    /// The rows from `rows` on.
    pub(crate) fn after_rows(&self, rows: usize) -> Self {
        Self {
            parts: Arc::clone(&self.parts),
            first: self.first.saturating_add(rows),
        }
    }

    /// Whether it has so many rows and columns.
    pub(super) fn holds(&self, rows: usize, cols: usize) -> bool {
        let end = self.first.checked_add(rows);
        end.is_some_and(|end| end <= self.parts.shape[0]) && cols == self.parts.shape[1]
    }

    /// The files with its tables.
    pub(super) fn files(&self) -> Vec<usize> {
        let parts = &self.parts;
        let mut tables = vec![&parts.codes, &parts.scales];
        tables.extend(parts.common.iter().map(|common| match common {
            Common::Factor(table) | Common::Divisor(table) => table,
        }));
        if let Offsets::Zeros(table) | Offsets::Biases(table) = &parts.offsets {
            tables.push(table);
        }
        if let Groups::Listed(table) = &parts.groups {
            tables.push(table);
        }
        tables.iter().map(|table| table.file).collect()
    }

    /// Bytes of so many of its rows in the files.
    pub(super) fn bytes(&self, rows: usize) -> u64 {
        let all = self.parts.shape[0].max(1) as u128;
        (u128::from(self.parts.bytes) * rows as u128 / all) as u64
    }
}

/// The files, and the name of what is read from them.
#[derive(Clone, Copy)]
pub(super) struct From<'a> {
    pub(super) files: &'a [DataFile],
    pub(super) what: &'a dyn Fn() -> String,
}

impl Parts {
    /// Decodes consecutive rows.
    pub(super) fn decode(
        &self,
        of: From<'_>,
        rows: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), Error> {
        let cols = self.shape[1];
        self.by_row(&self.codes, of, &rows, cols, out)?;
        let scales = self.by_group(&self.scales, of, &rows)?;
        let factor = self.factor(of)?;
        let offsets = match &self.offsets {
            Offsets::Zero(_) => None,
            Offsets::Zeros(table) | Offsets::Biases(table) => {
                Some(self.by_group(table, of, &rows)?)
            }
        };
        let per_row = scales.len() / rows.len().max(1);
        let listed = match self.groups {
            Groups::Listed(table) => self.listed(&table, of, per_row)?,
            Groups::Every(_) => Vec::new(),
        };
        for (row, out) in out.chunks_exact_mut(cols).enumerate() {
            let one = |group: usize| {
                let at = row * per_row + group;
                let offset = offsets.as_ref().map_or(0.0, |of| of[at]);
                let scale = factor(scales[at]);
                match self.offsets {
                    Offsets::Zero(zero) => (zero, scale, 0.0),
                    Offsets::Zeros(_) => (offset, scale, 0.0),
                    Offsets::Biases(_) => (0.0, scale, offset),
                }
            };
            let value = |code: f32, (zero, scale, bias): (f32, f32, f32)| {
                let product = (code - zero) * scale;
                if let Offsets::Biases(_) = self.offsets {
                    product + bias
                } else {
                    product
                }
            };
            match self.groups {
                Groups::Every(size) => {
                    for (group, out) in out.chunks_mut(size).enumerate() {
                        let of_group = one(group);
                        out.iter_mut()
                            .for_each(|code| *code = value(*code, of_group));
                    }
                }
                Groups::Listed(_) => {
                    for (code, group) in out.iter_mut().zip(&listed) {
                        *code = value(*code, one(*group));
                    }
                }
            }
        }
        Ok(())
    }

    /// The elements of a table in these rows of the matrix, `width` in each.
    fn by_row(
        &self,
        table: &Table,
        of: From<'_>,
        rows: &Range<usize>,
        width: usize,
        out: &mut [f32],
    ) -> Result<(), Error> {
        if !self.transposed {
            return table.read(of.files, of.what, rows.clone(), 0..width, out);
        }
        let mut strip = vec![0.0; STRIP.min(width) * rows.len()];
        for start in (0..width).step_by(STRIP) {
            let lines = start..(start + STRIP).min(width);
            let strip = &mut strip[..lines.len() * rows.len()];
            table.read(of.files, of.what, lines.clone(), rows.clone(), strip)?;
            for (row, out) in out.chunks_exact_mut(width).enumerate() {
                for (n, out) in out[lines.clone()].iter_mut().enumerate() {
                    *out = strip[n * rows.len() + row];
                }
            }
        }
        Ok(())
    }

    /// Numbers of a table for each row and group, row by row.
    fn by_group(
        &self,
        table: &Table,
        of: From<'_>,
        rows: &Range<usize>,
    ) -> Result<Vec<f32>, Error> {
        let groups = table.shape[usize::from(!self.transposed)];
        if table.shape == [1, 1] {
            let mut one = [0.0];
            table.read(of.files, of.what, 0..1, 0..1, &mut one)?;
            return Ok(vec![one[0]; rows.len()]);
        }
        let mut out = vec![0.0; rows.len() * groups];
        self.by_row(table, of, rows, groups, &mut out)?;
        Ok(out)
    }

    /// Applies the factor of all scales.
    fn factor(&self, of: From<'_>) -> Result<impl Fn(f32) -> f32, Error> {
        let (table, divides) = match &self.common {
            None => (None, false),
            Some(Common::Factor(table)) => (Some(table), false),
            Some(Common::Divisor(table)) => (Some(table), true),
        };
        let mut one = [1.0];
        if let Some(table) = table {
            table.read(of.files, of.what, 0..1, 0..1, &mut one)?;
        }
        Ok(move |scale| {
            if divides {
                scale / one[0]
            } else {
                scale * one[0]
            }
        })
    }

    /// The group of each column, each below `groups`.
    fn listed(&self, table: &Table, of: From<'_>, groups: usize) -> Result<Vec<usize>, Error> {
        let mut list = vec![0.0; self.shape[1]];
        table.read(of.files, of.what, 0..1, 0..self.shape[1], &mut list)?;
        match list
            .iter()
            .find(|&&group| !(0.0..groups as f32).contains(&group))
        {
            None => Ok(list.iter().map(|&group| group as usize).collect()),
            Some(group) => Err(Error::TensorRange {
                path: of.files[table.file].path.clone(),
                tensor: (of.what)(),
                found: format!("a column of group {group}"),
                expected: format!("groups below {groups}"),
            }),
        }
    }
}
