//! Splits tensors that store several matrices.

use std::path::Path;

use crate::config::ModelConfig;
use crate::error::Error;
use crate::names::{Fused, Role, TensorId};
use crate::store::{Found, Layout, RowGroups, shape_text};

/// The parts of `whole`, a tensor of `layer`; the fields of `whole` that identify the matrix are
/// ignored.
///
/// # Errors
/// [`Error::WrongShape`] unless its shape is that of the parts together.
pub(crate) fn split(
    whole: &Found,
    fused: Fused,
    layer: u32,
    config: &ModelConfig,
    path: &Path,
) -> Result<Vec<Found>, Error> {
    let parts = parts(fused, layer, config);
    let stored = shape(fused, layer, config);
    let rows: usize = parts.iter().map(|part| part.rows).sum();
    let columns = columns(fused, &stored);
    let row_bytes = whole.dtype.row_bytes(columns.iter().product());
    let (true, Some(row_bytes)) = (whole.shape == stored, row_bytes) else {
        return Err(Error::WrongShape {
            path: path.to_owned(),
            tensor: whole.name.clone(),
            found: shape_text(&whole.shape),
            expected: shape_text(&stored),
        });
    };
    let mut rows_before = 0;
    let part = |part: &FusedPart| {
        let before = rows_before;
        rows_before += part.rows;
        let id = TensorId {
            expert: bank(fused, layer, config).0,
            ..TensorId::layer(part.role, layer)
        };
        let stored = rows / groups(fused, config).max(1);
        let cols = columns.first().copied().unwrap_or(1);
        match part.of_group {
            _ if fused == Fused::QkvColumns => Found {
                id,
                layout: Layout::TransposedPart {
                    first: before,
                    stored: rows,
                },
                ..whole.clone()
            },
            Some(_) if part.role == Role::LatentKeys => Found {
                id,
                layout: Layout::TransposedHeads { stored, cols },
                ..whole.clone()
            },
            Some(parts) if part.role.is_vector() => Found {
                id,
                layout: Layout::GroupedElements(RowGroups { stored, parts }),
                ..whole.clone()
            },
            Some(parts) => Found {
                id,
                layout: Layout::Grouped(RowGroups { stored, parts }),
                ..whole.clone()
            },
            None => Found {
                id,
                shape: [&[part.rows], &columns[..]].concat(),
                layout: Layout::AsIs,
                // past the end of the file, if it overflows
                offset: whole.offset.saturating_add((before * row_bytes) as u64),
                scales: whole
                    .scales
                    .map(|scales| scales.after_rows(before, before * row_bytes / 16)),
                packed: whole
                    .packed
                    .as_ref()
                    .map(|packed| packed.after_rows(before)),
                ..whole.clone()
            },
        }
    };
    Ok(parts.iter().map(part).collect())
}

/// The shape of a tensor of `layer` that holds several matrices.
pub(crate) fn shape(fused: Fused, layer: u32, config: &ModelConfig) -> Vec<usize> {
    let rows = (parts(fused, layer, config).iter())
        .map(|part| part.rows)
        .sum();
    let d = config.d_model as usize;
    match (fused, config.form.latent) {
        (Fused::LatentKeysValues, Some(latent)) => vec![rows, latent.rank as usize],
        (Fused::QkvBias | Fused::QkvBiasByGroup, _) => vec![rows],
        (Fused::QkvColumns, _) => vec![d, rows],
        _ => vec![rows, d],
    }
}

/// The columns of a part; a bias has none.
fn columns(fused: Fused, stored: &[usize]) -> Vec<usize> {
    match stored {
        [_, columns @ ..] if fused != Fused::QkvColumns => columns.to_vec(),
        _ => Vec::new(),
    }
}

/// One of several matrices stored together.
struct FusedPart {
    role: Role,
    rows: usize,
    /// Its rows in each group, if stored group by group.
    of_group: Option<[[usize; 2]; 3]>,
}

impl FusedPart {
    fn whole(role: Role, rows: usize) -> Self {
        Self {
            role,
            rows,
            of_group: None,
        }
    }
}

/// The expert to which Gate and Up of a layer belong, and its neurons.
fn bank(fused: Fused, layer: u32, config: &ModelConfig) -> (u32, usize) {
    let mixture = config.mixture_of(layer);
    match mixture.filter(|_| fused == Fused::SharedGateUp) {
        Some(mixture) => (config.experts, mixture.shared as usize),
        None => (0, config.ffn as usize),
    }
}

/// The groups of rows in which matrices are stored.
fn groups(fused: Fused, config: &ModelConfig) -> usize {
    let delta = config
        .form
        .delta_net
        .as_ref()
        .map_or(1, |nets| nets.shape.key_heads);
    let groups = match fused {
        Fused::QkvByGroup | Fused::QkvBiasByGroup => config.kv_heads,
        Fused::GatedQ | Fused::LatentKeysValues => config.heads,
        Fused::DeltaQkvz | Fused::DeltaBa => delta,
        Fused::Qkv | Fused::QkvColumns | Fused::QkvBias | Fused::GateUp | Fused::SharedGateUp => 1,
    };
    groups as usize
}

/// The matrices that are stored together.
fn parts(fused: Fused, layer: u32, config: &ModelConfig) -> Vec<FusedPart> {
    const NONE: [usize; 2] = [0; 2];
    let [heads, kv_heads, head_dim] =
        [config.heads, config.kv_heads, config.head_dim].map(|n| n as usize);
    let (_, ffn) = bank(fused, layer, config);
    let [q, kv] = [heads, kv_heads].map(|n| n * head_dim);
    let groups = groups(fused, config);
    let grouped = |role, of_group: [[usize; 2]; 3]| FusedPart {
        role,
        rows: groups * of_group.iter().map(|part| part[1]).sum::<usize>(),
        of_group: Some(of_group),
    };
    let delta = config.form.delta_net.as_ref().map(|nets| nets.shape);
    // per key head: width, and width and number of its values
    let [dim, values, per] = delta.map_or([0; 3], |net| {
        let per = net.value_heads as usize / groups.max(1);
        [net.key_dim as usize, per * net.value_dim as usize, per]
    });
    match fused {
        Fused::Qkv | Fused::QkvColumns => vec![
            FusedPart::whole(Role::Q, q),
            FusedPart::whole(Role::K, kv),
            FusedPart::whole(Role::V, kv),
        ],
        Fused::GateUp | Fused::SharedGateUp => vec![
            FusedPart::whole(Role::Gate, ffn),
            FusedPart::whole(Role::Up, ffn),
        ],
        Fused::QkvBias => vec![
            FusedPart::whole(Role::QBias, q),
            FusedPart::whole(Role::KBias, kv),
            FusedPart::whole(Role::VBias, kv),
        ],
        Fused::QkvByGroup | Fused::QkvBiasByGroup => {
            let roles = match fused {
                Fused::QkvByGroup => [Role::Q, Role::K, Role::V],
                _ => [Role::QBias, Role::KBias, Role::VBias],
            };
            let q = heads / kv_heads.max(1) * head_dim;
            vec![
                grouped(roles[0], [[0, q], NONE, NONE]),
                grouped(roles[1], [[q, head_dim], NONE, NONE]),
                grouped(roles[2], [[q + head_dim, head_dim], NONE, NONE]),
            ]
        }
        Fused::GatedQ => vec![
            grouped(Role::Q, [[0, head_dim], NONE, NONE]),
            grouped(Role::QGate, [[head_dim, head_dim], NONE, NONE]),
        ],
        Fused::LatentKeysValues => {
            let keys = (head_dim).saturating_sub(config.rope.dims as usize);
            let values = (config.form.latent).map_or(0, |latent| latent.value_dim as usize);
            vec![
                grouped(Role::LatentKeys, [[0, keys], NONE, NONE]),
                grouped(Role::LatentValues, [[keys, values], NONE, NONE]),
            ]
        }
        Fused::DeltaQkvz => vec![
            grouped(Role::DeltaIn, [[0, dim], [dim, dim], [2 * dim, values]]),
            grouped(Role::DeltaGate, [[2 * dim + values, values], NONE, NONE]),
        ],
        Fused::DeltaBa => vec![
            grouped(Role::DeltaBeta, [[0, per], NONE, NONE]),
            grouped(Role::DeltaDecay, [[per, per], NONE, NONE]),
        ],
    }
}
