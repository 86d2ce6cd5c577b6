//! Matrices that a checkpoint stores as one, taken apart.

use crate::config::ModelConfig;
use crate::error::Error;
use crate::file::DataFile;
use crate::names::{Fused, Role, TensorId};
use crate::store::{Found, Layout, shape_text};

/// The parts of `whole`, a matrix of `layer`; the fields of `whole` that say what it is do not
/// matter.
///
/// # Errors
/// [`Error::WrongShape`] unless its shape is that of the parts together.
pub(crate) fn split(
    whole: &Found,
    fused: Fused,
    layer: u32,
    config: &ModelConfig,
    file: &DataFile,
) -> Result<Vec<Found>, Error> {
    let [d, ffn] = [config.d_model, config.ffn].map(|n| n as usize);
    let [heads, kv_heads, head_dim] =
        [config.heads, config.kv_heads, config.head_dim].map(|n| n as usize);
    let [q, kv] = [heads, kv_heads].map(|n| n * head_dim);
    let parts: &[(Role, usize)] = match fused {
        Fused::Qkv | Fused::QkvByGroup => &[(Role::Q, q), (Role::K, kv), (Role::V, kv)],
        Fused::GateUp => &[(Role::Gate, ffn), (Role::Up, ffn)],
    };
    let stored = [parts.iter().map(|part| part.1).sum(), d];
    let row_bytes = whole.dtype.row_bytes(d);
    let (true, Some(row_bytes)) = (whole.shape == stored, row_bytes) else {
        return Err(Error::WrongShape {
            path: file.path.clone(),
            tensor: whole.name.clone(),
            found: shape_text(&whole.shape),
            expected: shape_text(&stored),
        });
    };
    let per = heads / kv_heads.max(1);
    let grouped = |role| Layout::Grouped {
        head_dim,
        stored: per + 2,
        first: match role {
            Role::Q => 0,
            Role::K => per,
            _ => per + 1,
        },
        heads: if role == Role::Q { per } else { 1 },
    };
    let mut rows_before = 0;
    let part = |&(role, rows): &(Role, usize)| {
        let before = rows_before;
        rows_before += rows;
        let id = TensorId::layer(role, layer);
        match fused {
            Fused::QkvByGroup => Found {
                id,
                layout: grouped(role),
                ..whole.clone()
            },
            Fused::Qkv | Fused::GateUp => Found {
                id,
                shape: vec![rows, d],
                layout: Layout::AsIs,
                // past the end of the file, if it overflows
                offset: whole.offset.saturating_add((before * row_bytes) as u64),
                ..whole.clone()
            },
        }
    };
    Ok(parts.iter().map(part).collect())
}
