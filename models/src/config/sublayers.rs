//! Layers with only a mixer, or only an FFN.

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

    /// The layers with an FFN, ascending. Neuron-related code numbers layers by their index in this
    /// list.
    pub fn ffn_layers(&self) -> impl Iterator<Item = u32> + Clone {
        (0..self.layers).filter(|&layer| self.has_ffn(layer))
    }

    /// Number of FFNs before layer `layer`: the index of its own, if it has one.
    pub fn ffn_place(&self, layer: u32) -> usize {
        layer as usize - self.form.without_ffn.partition_point(|&l| l < layer)
    }

    /// Layers that lack a required part.
    pub(super) fn bad_sublayers(&self) -> Option<BadField> {
        let form = &self.form;
        let [mixerless, ffnless] = [&form.without_mixer, &form.without_ffn];
        for (key, list, most) in [
            ("layers without mixers", mixerless, self.layers),
            ("layers without FFNs", ffnless, self.layers - 1),
        ] {
            if !self.are_layers(list) || list.len() > most as usize {
                let expected = format!("up to {most} of {} layers, ascending", self.layers);
                return BadField::some(key, list, expected);
            }
        }
        if mixerless.is_empty() && ffnless.is_empty() {
            return None;
        }
        if let Some(layer) = mixerless.iter().find(|&&layer| !self.has_ffn(layer)) {
            return BadField::some("layers without mixers", layer, "a layer with an FFN");
        }
        let mut mixing = form.mixers().filter_map(|of| of.layers()).flatten();
        if let Some(layer) = mixing.find(|&&layer| !self.has_mixer(layer)) {
            let expected = "a layer that has no other mixer either";
            return BadField::some("layers without mixers", layer, expected);
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use crate::config::{Form, MixerKind, ModelConfig, Parallel};

    fn config() -> ModelConfig {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/models");
        let opened = crate::open(&fixtures.join("nemotron_h_both")).unwrap();
        opened.config().clone()
    }

    #[test]
    fn what_concerns_neurons_numbers_the_layers_with_an_ffn() {
        let c = config();
        let layers: Vec<u32> = c.ffn_layers().collect();
        assert_eq!(layers, [0, 1, 4]);
        let places: Vec<usize> = (0..6).map(|layer| c.ffn_place(layer)).collect();
        assert_eq!(places, [0, 1, 2, 2, 2, 3]);
        let mut banks = c.banks().map(|bank| (bank.layer, bank.place));
        assert!(banks.all(|(layer, place)| layers[place as usize] == layer));
        let mixers = (0..6).filter(|&layer| c.mixer_of(layer) != MixerKind::None);
        assert_eq!(mixers.collect::<Vec<_>>(), [2, 3, 5]);
        assert_eq!((c.kv_layers(), c.kv_place(2)), (1, 0));
        let experts = (0..6).filter(|&layer| c.mixture_of(layer).is_some());
        assert_eq!(experts.collect::<Vec<_>>(), [0, 4]);
    }

    #[test]
    fn layers_lack_only_what_they_can_lack() {
        type Change = fn(&mut Form);
        let changes: [Change; 7] = [
            |form| form.without_ffn = (0..6).collect(),
            |form| form.without_ffn = vec![3, 2],
            |form| form.without_mixer = vec![6],
            |form| form.without_mixer.push(5),
            |form| form.without_ffn.insert(0, 0),
            |form| form.without_ffn.insert(0, 1),
            |form| form.parallel = Parallel::No,
        ];
        let sound = |c: &ModelConfig| c.validate(Path::new("config.json"));
        sound(&config()).unwrap();
        for change in changes {
            let mut c = config();
            change(&mut c.form);
            assert!(sound(&c).is_err(), "{:?}", c.form);
        }
    }
}
