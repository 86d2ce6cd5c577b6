//! Splits tensors that contain a matrix for every expert.

use std::path::Path;

use crate::config::ModelConfig;
use crate::error::Error;
use crate::names::Role;
use crate::names::{Stack, TensorId};
use crate::store::{Found, Layout, Scales, shape_text};

/// Structure of such a tensor.
struct Parts {
    /// Contents of each expert's part, and their layout.
    found: Vec<(Role, Layout)>,
    /// Whether these are consecutive, each a separate matrix.
    apart: bool,
    /// Rows and columns of each expert's part, or of each of several consecutive matrices.
    matrix: [usize; 2],
}

impl Parts {
    /// The structure of a tensor of shape `whole`.
    fn of(stack: Stack, whole: &[usize], config: &ModelConfig) -> Self {
        let (d, ffn) = (config.bundle_width() as usize, config.ffn as usize);
        let is_neurons = d != ffn && whole.get(1..) == Some(&[ffn, d]);
        let pair =
            |layout: fn(usize) -> Layout| vec![(Role::Gate, layout(0)), (Role::Up, layout(1))];
        let one = |role, layout| vec![(role, layout)];
        let (found, apart, matrix) = match stack {
            Stack::GateUp => (pair(|_| Layout::AsIs), true, [ffn, d]),
            Stack::EitherDown if is_neurons => (one(Role::Down, Layout::AsIs), false, [ffn, d]),
            Stack::One(Role::Down) | Stack::EitherDown => {
                (one(Role::Down, Layout::Transposed), false, [d, ffn])
            }
            Stack::One(role) => (one(role, Layout::AsIs), false, [ffn, d]),
            Stack::Neurons => (one(Role::Down, Layout::AsIs), false, [ffn, d]),
            Stack::Pairs => (pair(Layout::TransposedEvery), false, [d, 2 * ffn]),
            Stack::Halves => {
                let half = |first| Layout::TransposedPart {
                    first,
                    stored: 2 * ffn,
                };
                let found = vec![(Role::Gate, half(0)), (Role::Up, half(ffn))];
                (found, false, [d, 2 * ffn])
            }
            Stack::PairBlocks => (pair(Layout::EveryRow), false, [2 * ffn, d]),
            Stack::DownBlocks => (one(Role::Down, Layout::Transposed), false, [d, ffn]),
            Stack::PairBias => {
                let layouts = [(Role::GateBias, 0), (Role::UpBias, 1)];
                let found = layouts.map(|(role, place)| (role, Layout::EveryElement(place)));
                (found.to_vec(), false, [1, 2 * ffn])
            }
        };
        Self {
            found,
            apart,
            matrix,
        }
    }

    /// The shape of the tensor.
    fn shape(&self, stack: Stack, config: &ModelConfig) -> Vec<usize> {
        let [rows, cols] = self.matrix;
        let count = if self.apart { self.found.len() } else { 1 };
        let experts = config.experts as usize;
        match stack {
            Stack::PairBias => vec![experts, cols],
            Stack::PairBlocks | Stack::DownBlocks => vec![experts, rows, cols / 32, 16],
            _ => vec![experts, rows * count, cols],
        }
    }
}

/// The shape of a tensor with matrices of all experts, for writing.
pub(crate) fn shape(stack: Stack, config: &ModelConfig) -> Vec<usize> {
    Parts::of(stack, &[], config).shape(stack, config)
}

/// The matrices in `whole`, a tensor of `layer` stored as `[experts × rows × columns]`; the fields
/// of `whole` that identify the matrix are ignored.
///
/// # Errors
/// [`Error::WrongShape`] unless its shape is that of the configuration's experts.
pub(crate) fn split(
    whole: &Found,
    stack: Stack,
    layer: u32,
    config: &ModelConfig,
    path: &Path,
) -> Result<Vec<Found>, Error> {
    let parts = Parts::of(stack, &whole.shape, config);
    let [rows, cols] = parts.matrix;
    let experts = config.experts as usize;
    let stored = parts.shape(stack, config);
    let bytes = whole.dtype.bytes(rows, cols);
    let (true, Some(bytes)) = (whole.shape == stored, bytes) else {
        return Err(Error::WrongShape {
            path: path.to_owned(),
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
    if stack == Stack::PairBias {
        // one tensor of all experts
        return Ok((parts.found.into_iter())
            .map(|(role, layout)| Found {
                id: TensorId::layer(role, layer),
                layout,
                ..whole.clone()
            })
            .collect());
    }
    let mut found = Vec::with_capacity(experts * parts.found.len());
    let mut offset = whole.offset;
    for expert in 0..config.experts {
        for (i, &(role, layout)) in parts.found.iter().enumerate() {
            if parts.apart && i > 0 || i == 0 && expert > 0 {
                // past the end of the file, if it overflows
                offset = offset.saturating_add(bytes);
            }
            found.push(Found {
                id: TensorId {
                    role,
                    layer,
                    expert,
                },
                shape: parts.matrix.to_vec(),
                layout,
                offset,
                // a byte per block of 16
                scales: whole.scales.map(|scales| Scales {
                    offset: scales.offset.saturating_add((offset - whole.offset) / 16),
                    ..scales
                }),
                ..whole.clone()
            });
        }
    }
    Ok(found)
}
