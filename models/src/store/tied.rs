//! A head that is stored beside the embedding to which it is tied.

use super::{Found, READ_BYTES, Store, check_extent, shape_text};
use crate::error::Error;
use crate::names::{Role, TensorId};

impl Store {
    /// Compares a stored head with the embedding it is tied to. If they differ, programs disagree
    /// on which one counts, so reject the checkpoint.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if they differ, or an error of reading.
    pub(crate) fn expect_the_embedding(&self, head: &Found) -> Result<(), Error> {
        let config = &self.about.config;
        let (rows, cols) = (config.vocab as usize, config.d_model as usize);
        let file = &self.files[head.file];
        if head.shape != [rows, cols] {
            return Err(Error::WrongShape {
                path: file.path.clone(),
                tensor: head.name.clone(),
                found: shape_text(&head.shape),
                expected: shape_text(&[rows, cols]),
            });
        }
        if head.packed.is_some() || head.scales.is_some() {
            return Err(Error::Unsupported {
                path: file.path.clone(),
                key: "tie_word_embeddings".into(),
                found: "true".into(),
                why: format!(
                    "{} is stored too, in another format; set the key to false to use it",
                    head.name
                ),
            });
        }
        let row_bytes = check_extent(file, head, rows, cols)?;
        let at_once = (READ_BYTES / row_bytes).max(1);
        let (mut raw, mut ours, mut theirs) = (Vec::new(), Vec::new(), Vec::new());
        for first in (0..rows).step_by(at_once) {
            let count = at_once.min(rows - first);
            raw.resize(count * row_bytes, 0);
            ours.resize(count * cols, 0.0);
            theirs.resize(count * cols, 0.0);
            let offset = head.offset + (first * row_bytes) as u64;
            file.read_at(&mut raw, offset, &|| format!("tensor {}", head.name))?;
            head.dtype.decode(&raw, &mut theirs);
            self.read_stored(self.index[&TensorId::global(Role::Embed)], first, &mut ours)?;
            let bits = |x: &f32| x.to_bits();
            let differs = |(a, b): (&f32, &f32)| bits(a) != bits(b);
            if let Some(at) = ours.iter().zip(&theirs).position(differs) {
                return Err(Error::Unsupported {
                    path: file.path.clone(),
                    key: "tie_word_embeddings".into(),
                    found: "true".into(),
                    why: format!(
                        "{} is stored too and differs from the embedding in row {}; set the key to \
                         false to use it, or delete the tensor",
                        head.name,
                        first + at / cols
                    ),
                });
            }
        }
        Ok(())
    }
}
