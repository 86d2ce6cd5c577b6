//! Gemma 3n's additions to its layers: keys, and tensors of several matrices.

use crate::config::{Form, ModelConfig, Streams};
use crate::error::Error;
use crate::file::DataFile;
use crate::metadata::ArchKeys;
use crate::names::{Role, TensorId};
use crate::store::{Found, shape_text};

/// Keys read here, after the architecture.
pub(super) const STREAMS: &str = "altup.num_inputs";
/// See [`STREAMS`].
pub(super) const ACTIVE: &str = "altup.active_idx";
/// See [`STREAMS`].
pub(super) const PER_LAYER: &str = "embedding_length_per_layer_input";
/// See [`STREAMS`].
pub(super) const SHARED_KV: &str = "attention.shared_kv_layers";
/// See [`STREAMS`]. Multiples of the deviation of the layers' gates.
pub(super) const TOP: &str = "activation_sparsity_scale";

/// Tensors with a projection for every stream but the first.
const PROJECTIONS: [(&str, Role); 2] = [
    ("altup_proj.weight", Role::StreamIn),
    ("altup_unembd_proj.weight", Role::StreamOut),
];

/// Sizes that follow only from tensors.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Sizes {
    /// Rows of the table of per-layer inputs.
    pub(super) rows: u32,
    /// Width of the low-rank path.
    pub(super) laurel: u32,
}

impl Sizes {
    /// From the shapes of the tensors, outermost dimension first.
    pub(super) fn of<'a>(shape_of: impl Fn(&str) -> Option<&'a [usize]>) -> Self {
        let rows = |name| {
            let rows = shape_of(name).and_then(|shape| shape.first().copied());
            rows.and_then(|n| u32::try_from(n).ok()).unwrap_or(0)
        };
        Self {
            rows: rows("per_layer_token_embd.weight"),
            laurel: rows("blk.0.laurel_l.weight"),
        }
    }
}

/// Reads the deviations of Gemma 3n.
pub(super) fn form(
    of: ArchKeys<'_>,
    layers: u32,
    sizes: Sizes,
    form: &mut Form,
) -> Result<(), Error> {
    if of.need(ACTIVE)? != 0 {
        return Err(of.unsupported(ACTIVE, "only 0 is implemented"));
    }
    let multiples = of.metadata.numbers(&of.key(TOP))?;
    if multiples.len() != layers as usize {
        let expected = format!("one number for each of {layers} layers");
        return Err(of.bad(TOP, &expected));
    }
    let share = |multiple: f32| 0.5 * libm::erfc(-f64::from(multiple) / std::f64::consts::SQRT_2);
    let shares = multiples.into_iter().map(|multiple| share(multiple) as f32);
    let shares: Vec<f32> = shares.collect();
    form.shared_kv = of.need(SHARED_KV)?;
    form.gate_top = if shares.iter().all(|&share| share == 0.0) {
        Vec::new()
    } else {
        shares
    };
    form.streams = Some(Streams {
        count: of.need(STREAMS)?,
        laurel: sizes.laurel,
        per_layer: of.need(PER_LAYER)?,
        per_layer_vocab: sizes.rows,
        scaled: true,
    });
    Ok(())
}

/// The matrices in `whole`, if it is a tensor of stream projections.
///
/// # Errors
/// [`Error::WrongShape`] unless its shape is that of the streams.
pub(super) fn split(
    whole: &Found,
    config: &ModelConfig,
    file: &DataFile,
) -> Result<Option<Vec<Found>>, Error> {
    let projection = PROJECTIONS.iter().find(|entry| entry.0 == whole.name);
    let (Some(&(_, role)), Some(streams)) = (projection, config.form.streams) else {
        return Ok(None);
    };
    let (d, count) = (config.d_model as usize, streams.count - 1);
    let expected = [count as usize, d, d];
    let bytes = whole.dtype.bytes(d, d);
    let (true, Some(bytes)) = (whole.shape == expected, bytes) else {
        return Err(Error::WrongShape {
            path: file.path.clone(),
            tensor: whole.name.clone(),
            found: shape_text(&whole.shape),
            expected: shape_text(&expected),
        });
    };
    let one = |number: u32| Found {
        packed: None,
        id: TensorId::numbered(role, number),
        shape: vec![d, d],
        // past the end of the file, if it overflows
        offset: whole
            .offset
            .saturating_add(bytes.saturating_mul(number.into())),
        ..whole.clone()
    };
    Ok(Some((0..count).map(one).collect()))
}

/// Whether a tensor is an unused key or value projection.
pub(super) fn is_unused(id: TensorId, config: &ModelConfig) -> bool {
    matches!(id.role, Role::K | Role::V | Role::KNorm)
        && id.layer < config.layers
        && config.kv_layer(id.layer) != id.layer
}
