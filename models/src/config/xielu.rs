//! The parameters of xIELU (arXiv 2411.13010), which each layer has of its own.

use super::{Activation, BadField, FfnKind, ModelConfig};

/// Parameters of a layer's xIELU as checkpoints store them.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct XieluParameters {
    pub(crate) alpha_p: f32,
    pub(crate) alpha_n: f32,
    pub(crate) beta: f32,
    pub(crate) eps: f32,
}

impl XieluParameters {
    /// The function: both alphas pass through a softplus, and `beta` is added to that of negative values.
    pub(crate) fn activation(self) -> Activation {
        Activation::Xielu {
            positive: softplus(self.alpha_p),
            negative: self.beta + softplus(self.alpha_n),
            beta: self.beta,
            eps: self.eps,
        }
    }
}

/// `ln(1 + e^x)`, and `x` where they are equal in f32, as in PyTorch.
fn softplus(x: f32) -> f32 {
    if x > 20.0 {
        x
    } else {
        libm::log1pf(libm::expf(x))
    }
}

impl ModelConfig {
    /// The formula of the FFN of layer `layer`.
    pub fn ffn_kind_of(&self, layer: u32) -> FfnKind {
        let own = self.form.activations.get(layer as usize).copied();
        FfnKind {
            activation: own.unwrap_or(self.ffn_kind.activation),
            ..self.ffn_kind
        }
    }

    /// Activations of layers that are not one for each, or with parameters that are not finite.
    pub(super) fn bad_activations(&self) -> Option<BadField> {
        let all = &self.form.activations;
        let sound = |activation: &Activation| match *activation {
            Activation::Xielu {
                positive,
                negative,
                beta,
                eps,
            } => [positive, negative, beta, eps]
                .iter()
                .all(|x| x.is_finite()),
            _ => false,
        };
        let count = all.is_empty() || all.len() == self.layers as usize;
        if count && all.iter().all(sound) {
            return None;
        }
        let expected = format!("finite parameters for each of {} layers", self.layers);
        BadField::some("activations", all, expected)
    }
}
