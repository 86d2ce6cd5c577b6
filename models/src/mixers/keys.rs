//! What files say about a mixer.

use std::collections::BTreeSet;
use std::fmt::Debug;

use serde_json::{Value, json};

use super::MixerKind;
use crate::error::Error;
use crate::json::Keys;
use crate::limits::BadField;
use crate::metadata::ArchKeys;
use crate::role::Role;

/// A tensor of a layer, with its rows and columns.
pub(crate) type RoleShape = (Role, usize, usize);

/// Sizes of a model.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) d_model: u32,
    pub(crate) layers: u32,
    pub(crate) heads: u32,
    /// Elements of a head.
    pub(crate) head_dim: u32,
    /// Rotated elements of a head; 0 while `config.json` is read.
    pub(crate) rotated: u32,
}

/// The layers with a mixer, as a form has them.
pub(crate) trait MixerLayers: Debug {
    /// The form's field, and the name of its layers in errors.
    fn names(&self) -> [&'static str; 2];

    /// The layers that have it, ascending; `None` for all layers with attention.
    fn layers(&self) -> Option<&Vec<u32>>;

    /// The mixer of a layer that has it.
    fn kind(&self, layer: u32) -> MixerKind;

    /// An invalid size.
    fn bad(&self, of: Sizes) -> Option<BadField>;

    /// Only layer `layer`, as the first one, if it has it.
    fn alone(self, layer: u32) -> Option<Self>
    where
        Self: Sized;

    /// The field of a mixer that a form may have in addition.
    fn companion(&self) -> Option<&'static str> {
        None
    }

    /// Its keys in GGUF, after the architecture; none if files of this mixer are not written.
    fn gguf(&self, _of: Sizes) -> Vec<(&'static str, u32)> {
        Vec::new()
    }

    /// The rows of a vector that llama.cpp stores as a matrix.
    fn gguf_rows(&self, _role: Role) -> Option<u32> {
        None
    }

    /// Whether layer `layer` has it.
    fn has(&self, layer: u32) -> bool {
        let layers = self.layers();
        layers.is_none_or(|layers| layers.binary_search(&layer).is_ok())
    }
}

/// The methods of [`MixerLayers`] for a type with a list of layers: its names.
macro_rules! listed {
    ($field:literal, $layers:literal) => {
        fn names(&self) -> [&'static str; 2] {
            [$field, $layers]
        }

        fn layers(&self) -> Option<&Vec<u32>> {
            Some(&self.layers)
        }

        fn alone(self, layer: u32) -> Option<Self> {
            let layers = vec![0];
            self.has(layer).then_some(Self { layers, ..self })
        }
    };
}
pub(super) use listed;

/// How files of a family describe the layers `L` with a mixer.
pub(crate) struct MixerKeys<L> {
    /// Reads `config.json`; absent keys have the values of the configuration class.
    pub(crate) read: Read<L>,
    /// Adds the keys to `config.json`.
    pub(crate) write: Write<L>,
    /// Reads GGUF.
    pub(crate) gguf: Option<ReadGguf<L>>,
    pub(crate) facts: MixerFacts,
}

/// The same without readers and writers.
#[derive(Clone, Copy)]
pub(crate) struct MixerFacts {
    /// Keys that are read in GGUF, after the architecture.
    pub(crate) gguf_keys: &'static [&'static str],
    /// In GGUF, the layers with the mixer are those without heads of keys and values.
    pub(crate) headless: bool,
    /// Keys of the width of a head other than those of attention.
    pub(crate) head_dim: Option<HeadKeys>,
    /// The number of heads of keys and values if it is fixed, by that of query heads.
    pub(crate) kv_heads: Option<fn(u32) -> u32>,
}

type Read<L> = fn(&Keys, Sizes) -> Result<Option<L>, Error>;
type Write<L> = fn(Option<&L>, Sizes, &mut Value);
type ReadGguf<L> = fn(&GgufLayers) -> Result<Option<L>, Error>;

impl<L> MixerKeys<L> {
    pub(crate) const fn new(read: Read<L>, write: Write<L>) -> Self {
        Self {
            read,
            write,
            gguf: None,
            facts: MixerFacts {
                gguf_keys: &[],
                headless: false,
                head_dim: None,
                kv_heads: None,
            },
        }
    }

    /// With these keys in GGUF.
    pub(crate) const fn gguf(mut self, read: ReadGguf<L>, keys: &'static [&'static str]) -> Self {
        self.gguf = Some(read);
        self.facts.gguf_keys = keys;
        self
    }

    /// The same; the layers are those without heads of keys and values. Files without any are not read.
    pub(crate) const fn headless(self, read: ReadGguf<L>, keys: &'static [&'static str]) -> Self {
        let mut own = self.gguf(read, keys);
        own.facts.headless = true;
        own
    }

    /// With such heads of keys and values.
    pub(crate) const fn heads(
        mut self,
        head_dim: Option<HeadKeys>,
        kv_heads: fn(u32) -> u32,
    ) -> Self {
        self.facts.head_dim = head_dim;
        self.facts.kv_heads = Some(kv_heads);
        self
    }
}

/// Readers of the width of a head.
#[derive(Clone, Copy)]
pub(crate) struct HeadKeys {
    /// From `config.json`.
    pub(crate) hf: fn(&Keys) -> Result<u32, Error>,
    /// From GGUF.
    pub(crate) gguf: fn(&ArchKeys) -> Result<u32, Error>,
}

/// A GGUF file, whose layers may have mixers.
pub(crate) struct GgufLayers<'a> {
    pub(crate) keys: ArchKeys<'a>,
    pub(crate) sizes: Sizes,
    /// The layers without heads of keys and values.
    pub(crate) headless: &'a [u32],
    /// Names of tensors in layers, without the layer.
    pub(crate) tensors: &'a BTreeSet<String>,
}

impl GgufLayers<'_> {
    /// Refuses another number, in any layer.
    pub(crate) fn expect(&self, key: &str, expected: u32) -> Result<(), Error> {
        match (self.keys.uniform(key)?).is_some_and(|found| found != expected) {
            true => Err(self.keys.bad(key, &expected.to_string())),
            false => Ok(()),
        }
    }
}

/// A key of a size.
pub(crate) type SizeKey<S> = (&'static str, fn(&mut S) -> &mut u32);

/// Reads sizes from `config.json`; `usual` has the values of absent keys.
pub(crate) fn read_sizes<S>(keys: &Keys, table: &[SizeKey<S>], usual: S) -> Result<S, Error> {
    let mut shape = usual;
    for (key, size) in table {
        if let Some(value) = keys.u32(key)? {
            *size(&mut shape) = value;
        }
    }
    Ok(shape)
}

/// Adds the keys of sizes to `config.json`.
pub(crate) fn write_sizes<S>(table: &[SizeKey<S>], mut shape: S, config: &mut Value) {
    for (key, size) in table {
        config[*key] = json!(*size(&mut shape));
    }
}

/// Reads sizes from GGUF, where all keys are needed.
pub(crate) fn need_sizes<S>(
    keys: ArchKeys<'_>,
    table: &[SizeKey<S>],
    mut shape: S,
) -> Result<S, Error> {
    for (key, size) in table {
        *size(&mut shape) = keys.need(key)?;
    }
    Ok(shape)
}

/// The keys of sizes in GGUF.
pub(crate) fn gguf_sizes<S>(table: &[SizeKey<S>], mut shape: S) -> Vec<(&'static str, u32)> {
    let value = |(key, size): &SizeKey<S>| (*key, *size(&mut shape));
    table.iter().map(value).collect()
}
