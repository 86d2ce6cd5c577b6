//! Tensors that hold a matrix of every expert, taken apart.

use crate::config::ModelConfig;
use crate::error::Error;
use crate::file::DataFile;
use crate::names::Role;
use crate::names::{Stack, TensorId};
use crate::store::{Found, Layout, shape_text};

/// The matrices in `whole`, a tensor of `layer` that is stored `[experts × rows × columns]`; the
/// fields of `whole` that say what it is do not matter.
///
/// # Errors
/// [`Error::WrongShape`] unless its shape is that of the configuration's experts.
pub(crate) fn split(
    whole: &Found,
    stack: Stack,
    layer: u32,
    config: &ModelConfig,
    file: &DataFile,
) -> Result<Vec<Found>, Error> {
    let (d, ffn) = (config.d_model as usize, config.ffn as usize);
    // SmallThinker's own converter can store Down transposed
    let is_neurons = config.family == "smallthinker" && whole.shape[1..] == [ffn, d];
    let (roles, matrix, layout): (&[Role], _, _) = match &stack {
        Stack::GateUp => (&[Role::Gate, Role::Up], [ffn, d], Layout::AsIs),
        Stack::One(Role::Down) if !is_neurons || d == ffn => {
            (&[Role::Down], [d, ffn], Layout::Transposed)
        }
        Stack::One(role) => (std::slice::from_ref(role), [ffn, d], Layout::AsIs),
    };
    let [rows, cols] = matrix;
    let stored = [config.experts as usize, rows * roles.len(), cols];
    let bytes = whole.dtype.bytes(rows, cols);
    let (true, Some(bytes)) = (whole.shape == stored, bytes) else {
        return Err(Error::WrongShape {
            path: file.path.clone(),
            tensor: whole.name.clone(),
            found: shape_text(&whole.shape),
            expected: match bytes {
                Some(_) => shape_text(&stored),
                None => format!(
                    "rows of a multiple of {} for {}",
                    whole.dtype.block().0,
                    whole.dtype.name()
                ),
            },
        });
    };
    let mut found = Vec::with_capacity(stored[0] * roles.len());
    let mut offset = whole.offset;
    for expert in 0..config.experts {
        for &role in roles {
            found.push(Found {
                id: TensorId {
                    role,
                    layer,
                    expert,
                },
                shape: matrix.to_vec(),
                layout,
                offset,
                ..whole.clone()
            });
            // past the end of the file, if it overflows
            offset = offset.saturating_add(bytes);
        }
    }
    Ok(found)
}
