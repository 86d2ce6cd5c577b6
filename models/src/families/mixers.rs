//! The mixers of a family's layers, in a form.

use serde_json::Value;

use crate::config::{Form, MixerField, ModelConfig};
use crate::error::Error;
use crate::json::Keys;
use crate::mixers::Sizes;
use crate::mixers::keys::{GgufLayers, HeadKeys, MixerKeys};

/// [`MixerKeys`] of any mixer.
pub(crate) trait FamilyMixer: Sync {
    /// Reads `config.json`.
    fn read(&self, keys: &Keys, sizes: Sizes, form: &mut Form) -> Result<(), Error>;
    /// Adds the keys to `config.json`.
    fn write(&self, c: &ModelConfig, config: &mut Value);
    /// Reads GGUF.
    fn read_gguf(&self, file: &GgufLayers, form: &mut Form) -> Result<(), Error>;
    /// The keys that are read in GGUF, after the architecture.
    fn gguf_keys(&self) -> &'static [&'static str];
    /// Whether its layers are those without heads of keys and values in GGUF.
    fn headless(&self) -> bool;
    /// Keys of the width of a head other than those of attention.
    fn head_dim(&self) -> Option<HeadKeys>;
    /// The number of heads of keys and values if it is fixed, by that of query heads.
    fn kv_heads(&self, heads: u32) -> Option<u32>;
}

impl<L: MixerField> FamilyMixer for MixerKeys<L> {
    fn read(&self, keys: &Keys, sizes: Sizes, form: &mut Form) -> Result<(), Error> {
        L::put(form, (self.read)(keys, sizes)?);
        Ok(())
    }

    fn write(&self, c: &ModelConfig, config: &mut Value) {
        (self.write)(L::of(&c.form).as_ref(), c.sizes(), config);
    }

    fn read_gguf(&self, file: &GgufLayers, form: &mut Form) -> Result<(), Error> {
        if let Some(of) = &self.gguf {
            L::put(form, (of.read)(file)?);
        }
        Ok(())
    }

    fn gguf_keys(&self) -> &'static [&'static str] {
        self.gguf.as_ref().map_or(&[], |of| of.known)
    }

    fn headless(&self) -> bool {
        self.gguf.as_ref().is_some_and(|of| of.headless)
    }

    fn head_dim(&self) -> Option<HeadKeys> {
        self.head_dim
    }

    fn kv_heads(&self, heads: u32) -> Option<u32> {
        self.kv_heads.map(|number| number(heads))
    }
}
