//! The mixers of a configuration's layers.

use super::{BadField, ModelConfig};
use crate::mixers::{LatentShape, LatentSizes, MixerKind, MixerLayers, Sizes};

impl LatentSizes {
    /// Sizes for a model with latent attention.
    pub fn new(c: &ModelConfig, shape: LatentShape) -> Self {
        Self::of(c.sizes(), shape)
    }
}

impl ModelConfig {
    /// The sizes on which those of mixers depend.
    pub(crate) fn sizes(&self) -> Sizes {
        Sizes {
            d_model: self.d_model,
            layers: self.layers,
            heads: self.heads,
            head_dim: self.head_dim,
            rotated: self.rope.dims,
        }
    }

    /// The token mixer of layer `layer`.
    pub fn mixer_of(&self, layer: u32) -> MixerKind {
        if !self.has_mixer(layer) {
            return MixerKind::None;
        }
        let mut mixers = self.form.mixers().filter(|of| of.has(layer));
        let found = mixers.next().map(|of| of.kind(layer));
        found.unwrap_or(MixerKind::Attention)
    }

    /// Whether layer `layer` has attention, and not a mixer of recurrent state.
    pub(crate) fn has_keys(&self, layer: u32) -> bool {
        self.mixer_of(layer).has_keys()
    }

    /// Elements of a key as attention multiplies it.
    pub fn key_width(&self) -> usize {
        let latent = self.form.latent.map(|shape| LatentSizes::new(self, shape));
        latent.map_or(self.head_dim as usize, LatentSizes::stored)
    }

    /// Invalid mixers, or something that they are not implemented with.
    pub(super) fn bad_mixers(&self) -> Option<BadField> {
        let mut mixers = self.form.mixers();
        mixers.find_map(|of| self.bad_mixer(of)).or_else(|| {
            let form = &self.form;
            let beside = form.mamba.as_ref().is_some_and(|of| of.beside);
            if beside && (form.parallel.is_parallel() || form.output_gate) {
                let expected = "absent, with attention and Mamba in one layer";
                return BadField::some("parallel layers or output gates", &true, expected);
            }
            self.bad_latent().or_else(|| self.bad_pooled())
        })
    }

    fn bad_mixer(&self, of: &dyn MixerLayers) -> Option<BadField> {
        let [name, layers_name] = of.names();
        if let Some(bad) = of.bad(self.sizes()) {
            return Some(bad);
        }
        if let Some(list) = of.layers()
            && (list.is_empty() || !self.are_layers(list))
        {
            let expected = format!("layers below {}, ascending", self.layers);
            return BadField::some(layers_name, list, expected);
        }
        let is_alone = |other: &dyn MixerLayers| {
            let [found, _] = other.names();
            found == name || of.companion() == Some(found) || other.companion() == Some(name)
        };
        if self.form.shared_kv > 0 || !self.form.mixers().all(is_alone) {
            let expected = "absent, with shared keys or mixers of other kinds";
            return BadField::some(name, &of, expected);
        }
        None
    }

    /// Latent attention with something that it is not implemented with.
    fn bad_latent(&self) -> Option<BadField> {
        let (latent, form) = (self.form.latent?, &self.form);
        let norms = self.qk_norm || form.value_norm;
        let more = form.sinks || form.local_rope.is_some();
        if self.has_extras() || norms || more {
            let expected = "absent, as attention has what it is not implemented with";
            return BadField::some("latent", &latent, expected);
        }
        None
    }

    /// The same for attention over pools.
    fn bad_pooled(&self) -> Option<BadField> {
        let (pooled, form) = (self.form.pooled.as_ref()?, &self.form);
        if self.kv_heads != 1 {
            return BadField::some("kv_heads", &self.kv_heads, "1");
        }
        if !(0..self.layers).all(|layer| self.windowed(layer)) || form.chunked {
            return BadField::some("window", &self.window, "above 0, in layers with pools");
        }
        let norms = self.qk_norm || form.value_norm || form.plain_qk_norm;
        let heads = form.global_heads.is_some() || form.query_scale.is_some();
        let more = heads || !form.nope_layers.is_empty() || !form.sinks;
        if self.has_extras() || norms || more {
            let expected = "absent, as attention has what it is not implemented with";
            return BadField::some("pooled", pooled, expected);
        }
        None
    }

    /// Whether attention has something that is implemented for plain attention alone.
    fn has_extras(&self) -> bool {
        let form = &self.form;
        let biases = self.qkv_bias || self.o_bias || self.clip_qkv.is_some();
        biases || form.attention_cap.is_some() || form.output_gate
    }
}
