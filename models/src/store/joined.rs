//! A tensor whose rows are split over several tensors of the files: a table, or norms by head.

use std::collections::HashMap;

use super::{Found, LaterRows, Store, check_extent, shape_text};
use crate::error::Error;
use crate::names::{Required, TensorId};

impl Store {
    /// The parts of `first`, with consecutive rows, from `by_id`; its shape becomes that of all.
    ///
    /// # Errors
    /// [`Error::WrongShape`] if a part has another width or format.
    pub(super) fn join(
        &self,
        by_id: &mut HashMap<TensorId, Found>,
        first: &mut Found,
        wanted: Required,
    ) -> Result<Vec<LaterRows>, Error> {
        let mut parts = Vec::new();
        let at = |number| TensorId {
            expert: number,
            ..first.id
        };
        let mut numbers = first.id.expert + 1..;
        // a vector is one row
        let of_vectors = first.id.role.is_vector();
        let dims = if of_vectors { 1 } else { 2 };
        let width = first.shape.last().copied();
        while let Some(next) = numbers.next().and_then(|number| by_id.remove(&at(number))) {
            let of_one =
                |tensor: &Found| (tensor.dtype, tensor.shape.len(), tensor.scales.is_none());
            let plain = first.scales.is_none() && first.packed.is_none() && next.packed.is_none();
            let alike = of_one(&next) == (first.dtype, dims, true) && plain;
            let file = &self.files[next.file];
            if !(alike && first.shape.len() == dims && next.shape.last().copied() == width) {
                return Err(Error::WrongShape {
                    path: file.path.clone(),
                    tensor: next.name,
                    found: format!("{} {}", next.dtype.name(), shape_text(&next.shape)),
                    expected: format!("{} rows of {}", first.dtype.name(), wanted.cols),
                });
            }
            let rows = if of_vectors { 1 } else { next.shape[0] };
            check_extent(file, &next, rows, wanted.cols)?;
            parts.push(LaterRows {
                first: if of_vectors {
                    parts.len() + 1
                } else {
                    first.shape[0]
                },
                file: next.file,
                offset: next.offset,
            });
            first.shape[0] = first.shape[0].saturating_add(next.shape[0]);
        }
        Ok(parts)
    }
}
