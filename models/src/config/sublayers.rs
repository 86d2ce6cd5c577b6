//! Layers with a mixer alone, or with an FFN alone.

use super::{BadField, ModelConfig, Parallel};

impl ModelConfig {
    /// Whether layer `layer` has an FFN.
    pub fn has_ffn(&self, layer: u32) -> bool {
        self.form.without_ffn.binary_search(&layer).is_err()
    }

    /// Whether layer `layer` has a mixer.
    pub fn has_mixer(&self, layer: u32) -> bool {
        self.form.without_mixer.binary_search(&layer).is_err()
    }

    /// The layers that have an FFN, ascending. All that concerns neurons numbers layers by their place
    /// among these.
    pub fn ffn_layers(&self) -> impl Iterator<Item = u32> + Clone {
        (0..self.layers).filter(|&layer| self.has_ffn(layer))
    }

    /// Number of FFNs before layer `layer`: the place of its own, if it has one.
    pub fn ffn_place(&self, layer: u32) -> usize {
        layer as usize - self.form.without_ffn.partition_point(|&l| l < layer)
    }

    /// Layers that lack what they cannot lack.
    pub(super) fn bad_sublayers(&self) -> Option<BadField> {
        let form = &self.form;
        let [mixerless, ffnless] = [&form.without_mixer, &form.without_ffn];
        for (key, list) in [
            ("layers without mixers", mixerless),
            ("layers without FFNs", ffnless),
        ] {
            let all = list.len() == self.layers as usize;
            if !self.are_layers(list) || all && std::ptr::eq(list, ffnless) {
                let expected = format!("some of {} layers, ascending", self.layers);
                return BadField::some(key, list, expected);
            }
        }
        if mixerless.is_empty() && ffnless.is_empty() {
            return None;
        }
        if let Some(layer) = mixerless.iter().find(|&&layer| !self.has_ffn(layer)) {
            return BadField::some("layers without mixers", layer, "a layer with an FFN");
        }
        let mixed = |layer: &&u32| {
            let convs = form.short_conv.iter().map(|of| &of.layers);
            let nets = form.delta_net.iter().map(|of| &of.layers);
            let mambas = form.mamba.iter().map(|of| &of.layers);
            let mut lists = convs.chain(nets).chain(mambas);
            lists.any(|list| list.binary_search(layer).is_ok())
        };
        if let Some(layer) = mixerless.iter().find(mixed) {
            return BadField::some("layers without mixers", layer, "a layer without a mixer");
        }
        let dense = self.mixture.as_ref().map_or(&[][..], |m| &m.dense_layers);
        if let Some(layer) = dense.iter().find(|&&layer| !self.has_ffn(layer)) {
            return BadField::some("dense layers", layer, "a layer with an FFN");
        }
        let early = self.mixture.as_ref().is_some_and(|m| m.early_router);
        let shares = form.shared_kv > 0 || form.streams.is_some() || !form.gate_top.is_empty();
        if form.parallel != Parallel::OneNorm || early || shares {
            let expected = "absent, as layers do not have one norm for whatever they consist of";
            return BadField::some("layers without FFNs or mixers", ffnless, expected);
        }
        None
    }
}
