//! Tiny checkpoints for the unit tests, written independently of the readers, so that a
//! misunderstanding cannot cancel out.

mod folder;
mod gguf;

pub(crate) use folder::{Folder, Tensor};
pub(crate) use gguf::{Gguf, Kv, Order, text};

use std::collections::BTreeSet;
use std::path::Path;

use crate::checkpoint::Checkpoint;
use crate::error::Error;
use crate::json::Keys;
use crate::metadata::{ArchKeys, Metadata, Value};
use crate::mixers::Sizes;
use crate::mixers::keys::GgufLayers;
use crate::names::TensorId;

/// Sizes of the tiny decoder: all different, so that none can be confused.
pub(crate) const D: usize = 24;
pub(crate) const FFN: usize = 40;
pub(crate) const LAYERS: usize = 2;
pub(crate) const HEADS: usize = 4;
pub(crate) const KV_HEADS: usize = 2;
pub(crate) const HEAD_DIM: usize = 8;
pub(crate) const VOCAB: usize = 11;
/// Experts per layer, and neurons of a shared one.
pub(crate) const EXPERTS: usize = 3;
pub(crate) const SHARED: usize = 5;

/// The families with experts.
pub(crate) const FAMILIES_OF_EXPERTS: [&str; 5] = [
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "turbosparsemixtral",
];

/// A weight that depends on the tensor's name and the position, and is exact in f16 and bf16.
pub(crate) fn weight(name: &str, index: usize) -> f32 {
    let seed = name.bytes().fold(7u32, |hash, byte| {
        hash.wrapping_mul(31).wrapping_add(u32::from(byte))
    });
    let mixed = seed.wrapping_add(index as u32).wrapping_mul(0x9E37_79B1) >> 16;
    (mixed % 61) as f32 / 16.0 - 2.0
}

/// All weights of the tensor `name` are the standard ones.
pub(crate) fn assert_weights(name: &str, found: &[f32]) {
    let expected = (0..found.len()).map(|index| weight(name, index));
    assert!(expected.eq(found.iter().copied()), "{name}");
}

/// All rows of a tensor.
pub(crate) fn read_all(checkpoint: &dyn Checkpoint, id: TensorId) -> Vec<f32> {
    let info = checkpoint
        .tensors()
        .iter()
        .find(|info| info.id == id)
        .unwrap();
    let mut out = vec![f32::NAN; info.rows * info.cols];
    checkpoint.read_rows(id, 0, info.rows, &mut out).unwrap();
    out
}

/// What `read` finds in a parsed `config.json`.
pub(crate) fn keys_of<T>(
    value: &serde_json::Value,
    read: impl FnOnce(&Keys) -> Result<T, Error>,
) -> Result<T, Error> {
    read(&Keys::new(Path::new("config.json"), value)?)
}

/// What `read` finds in the keys of a GGUF file whose layers `headless` have no keys and values.
pub(crate) fn layers_of<T>(
    keys: impl IntoIterator<Item = (&'static str, Value)>,
    sizes: Sizes,
    headless: &[u32],
    read: impl FnOnce(&GgufLayers) -> Result<T, Error>,
) -> Result<T, Error> {
    let mut metadata = Metadata::new(Path::new("model.gguf"));
    for (key, value) in keys {
        metadata.insert(format!("arch.{key}"), value)?;
    }
    read(&GgufLayers {
        keys: ArchKeys {
            metadata: &metadata,
            arch: "arch",
        },
        sizes,
        headless,
        tensors: &BTreeSet::new(),
    })
}

/// Sizes of a model with six heads.
pub(crate) fn sizes_of(d_model: u32, layers: u32) -> Sizes {
    Sizes {
        d_model,
        layers,
        heads: 6,
        head_dim: 8,
        rotated: 0,
    }
}
