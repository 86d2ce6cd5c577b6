//! Rows of matrices that are stored as codes.

use super::packed::{From, Packed};
use super::{READ_BYTES, Store, lock};
use crate::error::Error;

/// Bands that are kept: of Gate, Up and Down.
const BANDS: usize = 3;

impl Store {
    /// Reads rows of tensor `at`, which is `packed`, from its row `first` on. A matrix that is stored transposed is
    /// decoded in bands of rows. The last ones of a few tensors are kept, as FFNs read Gate, Up and Down in turns.
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
        let of_band = (self.band_bytes / BANDS / (4 * cols)).clamp(1, rows);
        let mut bands = lock(&self.bands);
        for out in out.chunks_exact_mut(cols) {
            let band = row / of_band * of_band;
            let known = bands.iter().position(|(key, _)| *key == [at, band]);
            let values = match known {
                Some(known) => bands.remove(known).1,
                None => {
                    let of_tensor = bands.iter().position(|(key, _)| key[0] == at);
                    let oldest = (bands.len() == BANDS).then_some(0);
                    let replaced = of_tensor.or(oldest).map(|place| bands.remove(place).1);
                    let mut values = replaced.unwrap_or_default();
                    let end = (band + of_band).min(rows);
                    values.resize((end - band) * cols, 0.0);
                    parts.decode(of, band..end, &mut values)?;
                    values
                }
            };
            out.copy_from_slice(&values[(row - band) * cols..][..cols]);
            bands.push(([at, band], values));
            row += 1;
        }
        Ok(())
    }
}
