//! The parameters of xIELU (arXiv 2411.13010).

use super::Activation;

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
