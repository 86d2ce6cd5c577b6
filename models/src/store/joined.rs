//! A tensor whose rows are split over several tensors of the files.

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
        let mut number = first.id.expert + 1;
        while let Some(next) = by_id.remove(&TensorId {
            expert: number,
            ..first.id
        }) {
            let of_one =
                |tensor: &Found| (tensor.dtype, tensor.shape.len(), tensor.scales.is_none());
            let alike = of_one(&next) == (first.dtype, 2, true) && first.scales.is_none();
            let file = &self.files[next.file];
            if !(alike && first.shape.len() == 2 && next.shape[1] == first.shape[1]) {
                return Err(Error::WrongShape {
                    path: file.path.clone(),
                    tensor: next.name,
                    found: format!("{} {}", next.dtype.name(), shape_text(&next.shape)),
                    expected: format!("{} rows of {}", first.dtype.name(), wanted.cols),
                });
            }
            check_extent(file, &next, next.shape[0], wanted.cols)?;
            parts.push(LaterRows {
                first: first.shape[0],
                file: next.file,
                offset: next.offset,
            });
            first.shape[0] = first.shape[0].saturating_add(next.shape[0]);
            number += 1;
        }
        Ok(parts)
    }
}
