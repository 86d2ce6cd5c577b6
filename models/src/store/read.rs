//! Reads rows of every layout as presented.

use super::{Layout, Place, READ_BYTES, RotaryHeads, RowGroups, ScaleKind, Scales, Store, lock};
use crate::dequant;
use crate::error::Error;

/// Elements of a block with a separately stored scale.
const GROUP: usize = 32;

/// Consecutive rows of a location.
pub(super) struct Run {
    pub(super) first: usize,
    /// The row after the last one, if others follow.
    pub(super) end: usize,
    pub(super) file: usize,
    pub(super) offset: u64,
}

impl Place {
    /// The consecutive rows that contain row `row`.
    pub(super) fn part(&self, row: usize) -> Run {
        let next = self.rest.partition_point(|part| part.first <= row);
        let (first, file, offset) = match next.checked_sub(1) {
            Some(at) => (
                self.rest[at].first,
                self.rest[at].file,
                self.rest[at].offset,
            ),
            None => (0, self.file, self.offset),
        };
        let end = self.rest.get(next).map_or(usize::MAX, |part| part.first);
        Run {
            first,
            end,
            file,
            offset,
        }
    }

    /// Multiplies the presented rows from `first` on, of `cols` elements, by their factors.
    pub(super) fn apply_gains(&self, first: usize, cols: usize, out: &mut [f32]) {
        if self.gains.is_empty() {
            return;
        }
        for (row, out) in (first..).zip(out.chunks_mut(cols)) {
            let next = self.gains.partition_point(|(start, _)| *start <= row);
            if let Some((_, gain)) = next.checked_sub(1).map(|at| self.gains[at]) {
                out.iter_mut().for_each(|value| *value *= gain);
            }
        }
    }
}

impl Store {
    /// Reads stored rows `[first, first + out.len()/cols)` in bounded pieces.
    pub(super) fn read_stored(
        &self,
        at: usize,
        first: usize,
        out: &mut [f32],
    ) -> Result<(), Error> {
        let place = &self.places[at];
        if let Some(packed) = &place.packed {
            return self.read_packed(at, packed, first, out);
        }
        let rows_at_once = (READ_BYTES / place.row_bytes).max(1);
        let mut raw = lock(&self.raw);
        let (mut row, mut left) = (first, out);
        while !left.is_empty() {
            let part = place.part(row);
            let count = (left.len() / place.cols)
                .min(rows_at_once)
                .min(part.end - row);
            let (piece, others) = left.split_at_mut(count * place.cols);
            left = others;
            let file = &self.files[part.file];
            raw.resize(count * place.row_bytes, 0);
            let offset = part.offset + (row - part.first) as u64 * place.row_bytes as u64;
            file.read_at(&mut raw, offset, &|| {
                format!("tensor {}", self.infos[at].source_name)
            })?;
            match place.scales.map(|scales| (scales, scales.kind)) {
                Some((scales, ScaleKind::Exponents)) => {
                    self.decode_apart(at, scales, row, &raw, piece)?;
                }
                Some((scales, _)) => self.decode_grid(at, scales, row, &raw, piece)?,
                None => place.dtype.decode(&raw, piece),
            }
            row += count;
        }
        Ok(())
    }

    /// Decodes `raw`, eight-bit floats of stored rows from `row` on, with a scale for each block of rows
    /// and columns.
    fn decode_grid(
        &self,
        at: usize,
        scales: Scales,
        row: usize,
        raw: &[u8],
        out: &mut [f32],
    ) -> Result<(), Error> {
        let ScaleKind::Grid {
            dtype,
            block,
            in_a_row,
            first,
        } = scales.kind
        else {
            return Ok(());
        };
        let (place, file) = (&self.places[at], &self.files[scales.file]);
        place.dtype.decode(raw, out);
        let bytes_of_row = dtype.row_bytes(in_a_row).unwrap_or(0);
        let mut cache = lock(&self.scales);
        for (row, out) in (first + row..).zip(out.chunks_mut(place.cols)) {
            let blocks = row / block[0];
            if cache
                .as_ref()
                .is_none_or(|(cached, _)| *cached != [at, blocks])
            {
                let mut bytes = vec![0; bytes_of_row];
                let offset = scales.offset.saturating_add((blocks * bytes_of_row) as u64);
                file.read_at(&mut bytes, offset, &|| {
                    format!("scales of tensor {}", self.infos[at].source_name)
                })?;
                let mut line = vec![0.0; in_a_row];
                dtype.decode(&bytes, &mut line);
                *cache = Some(([at, blocks], line));
            }
            let line = cache.iter().flat_map(|(_, line)| line);
            for (out, scale) in out.chunks_mut(block[1]).zip(line) {
                out.iter_mut().for_each(|value| *value *= scale);
            }
        }
        Ok(())
    }

    /// Decodes `raw`, the blocks of stored rows from `row` on, with separately stored scales.
    fn decode_apart(
        &self,
        at: usize,
        scales: Scales,
        row: usize,
        raw: &[u8],
        out: &mut [f32],
    ) -> Result<(), Error> {
        let (place, file) = (&self.places[at], &self.files[scales.file]);
        let of_row = place.cols / GROUP;
        let mut bytes = vec![0; out.len() / GROUP];
        let offset = scales.offset.saturating_add((row * of_row) as u64);
        file.read_at(&mut bytes, offset, &|| {
            format!("scales of tensor {}", self.infos[at].source_name)
        })?;
        dequant::mxfp4_pairs(raw, &bytes, out);
        Ok(())
    }

    /// Every second stored row, from `place` on.
    pub(super) fn read_every_row(
        &self,
        at: usize,
        first: usize,
        out: &mut [f32],
        place: usize,
    ) -> Result<(), Error> {
        for (k, row) in out.chunks_mut(self.infos[at].cols).enumerate() {
            self.read_stored(at, 2 * (first + k) + place, row)?;
        }
        Ok(())
    }

    /// Every second stored element of a vector, from `place` on.
    pub(super) fn read_every_element(
        &self,
        at: usize,
        first: usize,
        out: &mut [f32],
        place: usize,
    ) -> Result<(), Error> {
        let mut stored = vec![0.0; 2 * out.len()];
        self.read_stored(at, 2 * first, &mut stored)?;
        for (value, pair) in out.iter_mut().zip(stored.chunks_exact(2)) {
            *value = pair[place];
        }
        Ok(())
    }

    /// Selects the rows of a tensor's own heads from its groups.
    pub(super) fn read_grouped(
        &self,
        at: usize,
        first: usize,
        out: &mut [f32],
        groups: RowGroups,
    ) -> Result<(), Error> {
        let rows = self.infos[at].rows;
        for (k, row) in out.chunks_mut(self.infos[at].cols).enumerate() {
            self.read_stored(at, groups.stored_row(first + k, rows), row)?;
        }
        Ok(())
    }

    /// Selects the elements of a vector from its groups.
    pub(super) fn read_grouped_elements(
        &self,
        at: usize,
        out: &mut [f32],
        groups: RowGroups,
    ) -> Result<(), Error> {
        let mut stored = vec![0.0; self.places[at].cols];
        self.read_stored(at, 0, &mut stored)?;
        let count = out.len();
        for (col, value) in out.iter_mut().enumerate() {
            *value = stored[groups.stored_row(col, count)];
        }
        Ok(())
    }

    /// Undoes the interleaved rotary order of rows.
    pub(super) fn read_interleaved(
        &self,
        at: usize,
        first: usize,
        out: &mut [f32],
        heads: RotaryHeads,
    ) -> Result<(), Error> {
        for (k, row) in out.chunks_mut(self.infos[at].cols).enumerate() {
            self.read_stored(at, heads.stored(first + k), row)?;
        }
        Ok(())
    }

    /// Undoes the interleaved rotary order of columns.
    pub(super) fn read_interleaved_columns(
        &self,
        at: usize,
        first: usize,
        out: &mut [f32],
        heads: RotaryHeads,
    ) -> Result<(), Error> {
        let mut stored = vec![0.0; out.len()];
        self.read_stored(at, first, &mut stored)?;
        let cols = self.infos[at].cols;
        for (out, stored) in out.chunks_mut(cols).zip(stored.chunks(cols)) {
            for (col, value) in out.iter_mut().enumerate() {
                *value = stored[heads.stored(col)];
            }
        }
        Ok(())
    }

    /// Copies rows out of the transposed matrix, transposing it first unless it is cached.
    pub(super) fn read_transposed(
        &self,
        at: usize,
        first: usize,
        out: &mut [f32],
    ) -> Result<(), Error> {
        let info = &self.infos[at];
        let (rows, cols) = (info.rows, info.cols);
        // row r is the stored column begin + r·step
        let (step, begin, width_stored) = match self.places[at].layout {
            Layout::TransposedEvery(begin) => (2, begin, 2 * rows),
            Layout::TransposedPart { first, stored } => (1, first, stored),
            _ => (1, 0, rows),
        };
        let mut cache = lock(&self.transposed);
        if cache.as_ref().is_none_or(|(cached, _)| *cached != [at, 0]) {
            let mut matrix = cache.take().map_or_else(Vec::new, |(_, buffer)| buffer);
            matrix.resize(rows * cols, 0.0);
            // A strip of 16 stored rows becomes 64-byte runs in every presented row.
            const STRIP: usize = 16;
            let mut strip = vec![0.0; STRIP * width_stored];
            for start in (0..cols).step_by(STRIP) {
                let width = STRIP.min(cols - start);
                let strip = &mut strip[..width * width_stored];
                self.read_stored(at, start, strip)?;
                for row in 0..rows {
                    let run = &mut matrix[row * cols + start..][..width];
                    for (k, value) in run.iter_mut().enumerate() {
                        *value = strip[k * width_stored + row * step + begin];
                    }
                }
            }
            *cache = Some(([at, 0], matrix));
        }
        if let Some((_, matrix)) = cache.as_ref() {
            out.copy_from_slice(&matrix[first * cols..][..out.len()]);
        }
        Ok(())
    }

    /// Copies rows from the transposed matrices of heads, `rank` rows each, of which `stored` rows
    /// are stored.
    pub(super) fn read_transposed_heads(
        &self,
        at: usize,
        first: usize,
        out: &mut [f32],
        [stored, rank]: [usize; 2],
    ) -> Result<(), Error> {
        let cols = self.infos[at].cols;
        let mut cache = lock(&self.transposed);
        for (row, out) in (first..).zip(out.chunks_exact_mut(cols)) {
            let (head, row) = (row / rank, row % rank);
            if cache
                .as_ref()
                .is_none_or(|(cached, _)| *cached != [at, head])
            {
                let mut matrix = cache.take().map_or_else(Vec::new, |(_, buffer)| buffer);
                matrix.resize(cols * rank, 0.0);
                self.read_stored(at, head * stored, &mut matrix)?;
                *cache = Some(([at, head], matrix));
            }
            let Some((_, matrix)) = cache.as_ref() else {
                continue;
            };
            for (out, stored) in out.iter_mut().zip(matrix.chunks_exact(rank)) {
                *out = stored[row];
            }
        }
        Ok(())
    }
}
