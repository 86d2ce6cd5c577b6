//! Heads of keys and values by layer, and layers that share those of other layers.

use serde::{Deserialize, Serialize};

use super::{BadField, MAX_HEAD_DIM, MAX_WIDTH, ModelConfig};

/// Heads of keys and values of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadShape {
    /// Heads of keys and values.
    pub kv_heads: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// Values are the keys before norm and rotation.
    pub key_is_value: bool,
}

impl HeadShape {
    /// Elements of a position's keys, and of its values.
    pub fn stored(self) -> usize {
        self.kv_heads as usize * self.head_dim as usize
    }
}

/// Heads of the layers without a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GlobalHeads {
    /// Heads of keys and values.
    pub kv_heads: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// There is no projection to values: they are the keys before norm and rotation.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub key_is_value: bool,
}

impl ModelConfig {
    /// Whether layer `layer` has a window.
    pub(super) fn windowed(&self, layer: u32) -> bool {
        self.window.get(layer as usize).is_some_and(|&w| w != 0)
    }

    /// Heads of keys and values of layer `layer`.
    pub fn heads_of(&self, layer: u32) -> HeadShape {
        let global = self.form.global_heads.filter(|_| !self.windowed(layer));
        let GlobalHeads {
            kv_heads,
            head_dim,
            key_is_value,
        } = global.unwrap_or(GlobalHeads {
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            key_is_value: false,
        });
        HeadShape {
            kv_heads,
            head_dim,
            key_is_value,
        }
    }

    /// Number of layers with keys and values of their own.
    pub fn kv_layers(&self) -> u32 {
        self.kv_before(self.first_shared())
    }

    /// Number of these layers whose heads are [`super::Form::global_heads`].
    pub fn global_kv_layers(&self) -> u32 {
        self.global_before(self.first_shared())
    }

    /// Index of the keys and values that layer `layer` reads among those of all layers: layers with
    /// [`super::Form::global_heads`] come after the others.
    pub fn kv_place(&self, layer: u32) -> u32 {
        let of = self.kv_layer(layer);
        let global = self.global_before(of);
        if self.form.global_heads.is_some() && !self.windowed(of) {
            self.kv_layers() - self.global_kv_layers() + global
        } else {
            self.kv_before(of) - global
        }
    }

    /// Number of layers before layer `layer` whose heads are [`super::Form::global_heads`].
    fn global_before(&self, layer: u32) -> u32 {
        match self.form.global_heads {
            Some(_) => (0..layer).filter(|&l| !self.windowed(l)).count() as u32,
            None => 0,
        }
    }

    /// Number of layers before layer `layer` that have keys and values of their own.
    fn kv_before(&self, layer: u32) -> u32 {
        (0..layer).filter(|&l| self.has_keys(l)).count() as u32
    }

    /// The first of the layers that read others' keys and values.
    pub(super) fn first_shared(&self) -> u32 {
        self.layers - self.form.shared_kv.min(self.layers.saturating_sub(1))
    }

    /// The layer whose keys and values layer `layer` reads.
    pub fn kv_layer(&self, layer: u32) -> u32 {
        let own = self.first_shared();
        let alike = |l: &u32| self.windowed(*l) == self.windowed(layer);
        if layer < own {
            layer
        } else {
            (0..own).rev().find(alike).unwrap_or(0)
        }
    }

    /// Invalid shared keys and values, or an invalid share of gates.
    pub(super) fn bad_sharing(&self) -> Option<BadField> {
        let (form, own) = (&self.form, self.first_shared());
        let has = |l: u32| (0..own).any(|first| self.windowed(first) == self.windowed(l));
        if form.shared_kv >= self.layers || !(own..self.layers).all(has) {
            let expected = "few enough that a layer with and one without a window come before";
            return BadField::some("layers with shared keys", &form.shared_kv, expected);
        }
        let top = &form.gate_top;
        let sound = top.iter().all(|share| (0.0..1.0).contains(share));
        if !sound || !top.is_empty() && top.len() != self.layers as usize {
            let expected = format!("{} numbers from 0 to below 1", self.layers);
            return BadField::some("activation sparsity", top, expected);
        }
        if form.has_gate_top() && (self.mixture.is_some() || form.ffn_bias) {
            let expected = "0, with experts or biases of the FFN";
            return BadField::some("activation sparsity", top, expected);
        }
        None
    }

    /// Invalid heads of layers without a window.
    pub(super) fn bad_global_heads(&self) -> Option<BadField> {
        if self.form.shared_kv_ffn > 0 && self.mixture.is_some() {
            let expected = "0, with experts";
            return BadField::some(
                "neurons of layers with shared keys",
                &self.form.shared_kv_ffn,
                expected,
            );
        }
        if self.form.shared_kv_ffn > MAX_WIDTH {
            let expected = format!("at most {MAX_WIDTH}");
            return BadField::some(
                "neurons of layers with shared keys",
                &self.form.shared_kv_ffn,
                expected,
            );
        }
        let global = self.form.global_heads?;
        if !(1..=MAX_HEAD_DIM).contains(&global.head_dim) {
            let expected = format!("1 to {MAX_HEAD_DIM}");
            return BadField::some("head_dim without a window", &global.head_dim, expected);
        }
        let others =
            self.form.stores_one_vector() || (0..self.layers).any(|layer| !self.has_keys(layer));
        let whole = self.qk_norm_whole || self.form.qk_layer_norms;
        if others || whole || self.form.sinks || self.form.output_gate {
            let expected = "absent, with other mixers, sinks, output gates or norms over all heads";
            return BadField::some("heads without a window", &global, expected);
        }
        None
    }
}
