//! The mixers of a family's layers, in a form.

use serde_json::Value;

use crate::config::{Form, MixerField, ModelConfig};
use crate::error::Error;
use crate::json::Keys;
use crate::mixers::Sizes;
use crate::mixers::keys::{GgufLayers, MixerFacts, MixerKeys};

/// [`MixerKeys`] of any mixer.
pub(crate) trait FamilyMixer: Sync {
    /// Reads `config.json`.
    fn read(&self, keys: &Keys, sizes: Sizes, form: &mut Form) -> Result<(), Error>;
    /// Adds the keys to `config.json`.
    fn write(&self, c: &ModelConfig, config: &mut Value);
    /// Reads GGUF.
    fn read_gguf(&self, file: &GgufLayers, form: &mut Form) -> Result<(), Error>;
    /// The rest.
    fn facts(&self) -> MixerFacts;
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
        let exists = !self.facts.headless || !file.headless.is_empty();
        if let Some(read) = self.gguf.filter(|_| exists) {
            L::put(form, read(file)?);
        }
        Ok(())
    }

    fn facts(&self) -> MixerFacts {
        self.facts
    }
}
