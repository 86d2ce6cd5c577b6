//! Rows of matrices that are stored as codes.

use super::packed::{From, Packed};
use super::{READ_BYTES, Store, lock};
use crate::error::Error;

impl Store {
    /// Reads rows of tensor `at`, which is `packed`, from its row `first` on. A matrix that is stored transposed is
    /// decoded in bands of rows, of which the last one is kept.
    pub(super) fn read_packed(
        &self,
        at: usize,
        packed: &Packed,
        first: usize,
        out: &mut [f32],
    ) -> Result<(), Error> {
        let parts = &packed.parts;
        let [rows, cols] = parts.shape;
        let what = || format!("tensor {}", self.infos[at].source_name);
        let of = From {
            files: &self.files,
            what: &what,
        };
        let mut row = packed.first + first;
        if !parts.transposed {
            let at_once = (READ_BYTES / (4 * cols)).max(1);
            for out in out.chunks_mut(at_once * cols) {
                let count = out.len() / cols;
                parts.decode(of, row..row + count, out)?;
                row += count;
            }
            return Ok(());
        }
        let of_band = (self.band_bytes / (4 * cols)).clamp(1, rows);
        let mut cache = lock(&self.band);
        for out in out.chunks_exact_mut(cols) {
            let band = row / of_band * of_band;
            if cache.as_ref().is_none_or(|(key, _)| *key != [at, band]) {
                let mut values = cache.take().map_or_else(Vec::new, |(_, values)| values);
                let end = (band + of_band).min(rows);
                values.resize((end - band) * cols, 0.0);
                parts.decode(of, band..end, &mut values)?;
                *cache = Some(([at, band], values));
            }
            if let Some((_, values)) = cache.as_ref() {
                out.copy_from_slice(&values[(row - band) * cols..][..cols]);
            }
            row += 1;
        }
        Ok(())
    }
}
