//! Tensors of a checkpoint in the format in which they are multiplied: whole rows of its files, copied without decoding.
//!
//! What products cannot read is converted without rounding: transposed floats keep their format, and everything else
//! becomes f32.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use emberflow_kernels::DType;
use half::{bf16, f16};

use super::{Layout, Packed, READ_BYTES, Store};
use crate::checkpoint::Checkpoint;
use crate::error::Error;
use crate::file::DataFile;
use crate::names::{Role, TensorId};
use crate::stored_tensors::{Bands, StoredTensor, StoredTensors};

/// The tensors of a store, without its configuration and texts.
struct Stored {
    store: Store,
    tensors: Vec<StoredTensor>,
}

impl std::fmt::Debug for Stored {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Stored")
            .field(&self.store.about.path)
            .finish()
    }
}

impl StoredTensors for Stored {
    fn tensors(&self) -> &[StoredTensor] {
        &self.tensors
    }

    fn read(&self, tensor: usize, first: usize, out: &mut [u8]) -> Result<(), Error> {
        let of = self.tensors.get(tensor).copied();
        let rows = of.filter(|of| {
            let row_bytes = of.dtype.row_bytes(of.cols).max(1);
            let end = first.checked_add(out.len() / row_bytes);
            out.len().is_multiple_of(row_bytes) && end.is_some_and(|end| end <= of.rows)
        });
        let Some(of) = rows else {
            return Err(Error::RowRange {
                path: self.store.about.path.clone(),
                id: of.map_or(TensorId::global(Role::Embed), |of| of.id),
                found: format!("{} bytes from row {first}", out.len()),
                expected: format!("whole rows of tensor {tensor}"),
            });
        };
        if of.verbatim {
            self.store.read_bytes(tensor, first, out)?;
        } else {
            self.store.read_converted(tensor, of, first, out)?;
        }
        let place = &self.store.places[tensor];
        let later = place.rest.iter().map(|part| part.file);
        let packed = place.packed.iter().flat_map(Packed::files);
        let mut files = later.chain([place.file]).chain(packed);
        files.try_for_each(|file| self.store.files[file].check_unchanged())
    }

    fn place(&self, tensor: usize) -> Option<(usize, u64)> {
        let of = self.tensors.get(tensor).filter(|of| of.verbatim)?;
        let place = &self.store.places[tensor];
        let in_order = match place.layout {
            Layout::AsIs => of.id.role != Role::Down,
            Layout::Transposed => of.id.role == Role::Down,
            _ => false,
        };
        (in_order && place.rest.is_empty()).then_some((place.file, place.offset))
    }

    fn files(&self) -> Vec<(&Path, &Arc<File>)> {
        let files = self.store.files.iter();
        files.map(|file| (&*file.path, file.handle())).collect()
    }

    fn check_unchanged(&self) -> Result<(), Error> {
        self.store
            .files
            .iter()
            .try_for_each(DataFile::check_unchanged)
    }
}

/// Whether products read a role's rows; the others are small and become f32.
fn is_multiplied(role: Role) -> bool {
    role.is_projection()
        || role.is_bundled()
        || role.is_table(false)
        || matches!(role, Role::Embed | Role::Head | Role::Positions)
}

impl Store {
    /// Its tensors alone.
    pub(super) fn into_rows(mut self, bands: Bands) -> Box<dyn StoredTensors> {
        if bands == Bands::Small {
            self.band_bytes = 4 * READ_BYTES;
        }
        let about = &mut self.about;
        about.tokenizer_json = String::new();
        (about.chat_template, about.tool_template) = (None, None);
        let tensors = (0..self.infos.len()).map(|at| self.stored(at)).collect();
        Box::new(Stored {
            store: self,
            tensors,
        })
    }

    /// The rows of tensor `at` as products read them.
    fn stored(&self, at: usize) -> StoredTensor {
        let (info, place) = (&self.infos[at], &self.places[at]);
        let is_down = info.id.role == Role::Down;
        let [rows, cols] = match is_down {
            true => [info.cols, info.rows],
            false => [info.rows, info.cols],
        };
        let own = place.dtype.multiplied().filter(|_| {
            place.scales.is_none() && place.gains.is_empty() && is_multiplied(info.id.role)
        });
        let in_rows = match place.layout {
            Layout::Transposed => is_down,
            Layout::AsIs | Layout::EveryRow(_) | Layout::Interleaved(_) | Layout::Grouped(_) => {
                !is_down
            }
            _ => false,
        };
        // Their readers change values.
        let changes = matches!(
            place.layout,
            Layout::PlusOne | Layout::Negative | Layout::NegativeLog
        );
        let dtype = match own {
            Some(dtype) if in_rows => dtype,
            Some(DType::F16) if !changes => DType::F16,
            Some(DType::BF16) if !changes => DType::BF16,
            _ => DType::F32,
        };
        StoredTensor {
            id: info.id,
            rows,
            cols,
            dtype,
            verbatim: in_rows && own.is_some(),
        }
    }

    /// The stored row of row `row` of tensor `at`, whose rows are stored ones.
    fn stored_row(&self, at: usize, row: usize) -> usize {
        match self.places[at].layout {
            Layout::EveryRow(place) => 2 * row + place,
            Layout::Interleaved(heads) => heads.stored(row),
            Layout::Grouped(groups) => groups.stored_row(row, self.infos[at].rows),
            _ => row,
        }
    }

    /// Copies rows of tensor `at` from its files; neighbours are read together.
    fn read_bytes(&self, at: usize, first: usize, out: &mut [u8]) -> Result<(), Error> {
        let place = &self.places[at];
        let rows = out.len() / place.row_bytes;
        let mut done = 0;
        while done < rows {
            let stored = self.stored_row(at, first + done);
            let part = place.part(stored);
            let most = (rows - done).min(part.end - stored);
            let follows = |n: &usize| self.stored_row(at, first + done + n) == stored + n;
            let count = (1..most).take_while(follows).count() + 1;
            let bytes = &mut out[done * place.row_bytes..][..count * place.row_bytes];
            let offset = part.offset + (stored - part.first) as u64 * place.row_bytes as u64;
            self.files[part.file].read_at(bytes, offset, &|| {
                format!("tensor {}", self.infos[at].source_name)
            })?;
            done += count;
        }
        Ok(())
    }

    /// Reads rows of `of`, tensor `at`, as numbers and stores them in its format, exactly.
    fn read_converted(
        &self,
        at: usize,
        of: StoredTensor,
        first: usize,
        out: &mut [u8],
    ) -> Result<(), Error> {
        let down = of.id.role == Role::Down;
        match self.places[at].layout {
            // Stored as it is multiplied.
            Layout::Transposed if down => self.read_numbers(at, of, first, out),
            // A stored row is a column.
            Layout::AsIs if down => self.read_columns(at, of, [1, 0], first, out),
            Layout::Transposed => self.read_columns(at, of, [1, 0], first, out),
            Layout::TransposedEvery(begin) => self.read_columns(at, of, [2, begin], first, out),
            Layout::TransposedPart { first: begin, .. } => {
                self.read_columns(at, of, [1, begin], first, out)
            }
            _ => self.read_presented(of, first, out),
        }
    }

    /// Stored rows that are those of `of`.
    fn read_numbers(
        &self,
        at: usize,
        of: StoredTensor,
        first: usize,
        out: &mut [u8],
    ) -> Result<(), Error> {
        let row_bytes = of.dtype.row_bytes(of.cols);
        let at_once = (READ_BYTES / (4 * of.cols)).max(1);
        let mut values = vec![0.0; at_once.min(of.rows) * of.cols];
        for (n, out) in out.chunks_mut(at_once * row_bytes).enumerate() {
            let first = first + n * at_once;
            let values = &mut values[..out.len() / row_bytes * of.cols];
            self.read_stored(at, first, values)?;
            for row in values.chunks_exact_mut(of.cols) {
                self.places[at].apply_gains(0, 1, row);
            }
            self.check_finite(at, first, of.cols, values)?;
            encode(of.dtype, values, out);
        }
        Ok(())
    }

    /// Rows of a matrix that is stored transposed, strip by strip: row r is element `step · r + begin` of every stored
    /// row.
    fn read_columns(
        &self,
        at: usize,
        of: StoredTensor,
        [step, begin]: [usize; 2],
        first: usize,
        out: &mut [u8],
    ) -> Result<(), Error> {
        let (place, row_bytes) = (&self.places[at], of.dtype.row_bytes(of.cols));
        let size = row_bytes / of.cols;
        let at_once = (READ_BYTES / (4 * place.cols)).clamp(1, of.cols);
        let mut strip = vec![0.0; at_once * place.cols];
        for start in (0..of.cols).step_by(at_once) {
            let width = at_once.min(of.cols - start);
            let strip = &mut strip[..width * place.cols];
            self.read_stored(at, start, strip)?;
            if of.id.role == Role::Down {
                place.apply_gains(start, place.cols, strip);
            }
            self.check_finite(at, start, place.cols, strip)?;
            for (row, out) in (first..).zip(out.chunks_exact_mut(row_bytes)) {
                for (k, stored) in strip.chunks_exact(place.cols).enumerate() {
                    let mut value = [stored[step * row + begin]];
                    if of.id.role != Role::Down {
                        place.apply_gains(row, 1, &mut value);
                    }
                    encode(of.dtype, &value, &mut out[(start + k) * size..][..size]);
                }
            }
        }
        Ok(())
    }

    /// Rows that are read as presented.
    fn read_presented(&self, of: StoredTensor, first: usize, out: &mut [u8]) -> Result<(), Error> {
        let row_bytes = of.dtype.row_bytes(of.cols);
        let at_once = (READ_BYTES / (4 * of.cols)).max(1);
        let mut values = vec![0.0; at_once.min(of.rows) * of.cols];
        for (n, out) in out.chunks_mut(at_once * row_bytes).enumerate() {
            let values = &mut values[..out.len() / row_bytes * of.cols];
            self.read_rows(of.id, first + n * at_once, out.len() / row_bytes, values)?;
            encode(of.dtype, values, out);
        }
        Ok(())
    }
}

/// Writes numbers in a float format that holds them exactly.
fn encode(dtype: DType, values: &[f32], out: &mut [u8]) {
    match dtype {
        DType::F16 => {
            for (&value, out) in values.iter().zip(out.as_chunks_mut::<2>().0) {
                *out = f16::from_f32(value).to_le_bytes();
            }
        }
        DType::BF16 => {
            for (&value, out) in values.iter().zip(out.as_chunks_mut::<2>().0) {
                *out = bf16::from_f32(value).to_le_bytes();
            }
        }
        _ => {
            for (&value, out) in values.iter().zip(out.as_chunks_mut::<4>().0) {
                *out = value.to_le_bytes();
            }
        }
    }
}
