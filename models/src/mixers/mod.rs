//! Token mixers: a file for each, with its sizes, their keys in `config.json` and in GGUF, and its tensors with
//! their names and shapes.
//!
//! A mixer sees keys and sizes, not the configuration: [`Form`](crate::config::Form) has a field for the layers with each
//! mixer, and a family names the [`keys::MixerKeys`] of its files.

pub(crate) mod attention;
pub(crate) mod delta_net;
pub(crate) mod kda;
pub(crate) mod keys;
pub(crate) mod latent;
pub(crate) mod layers;
pub(crate) mod mamba;
pub(crate) mod mamba1;
pub(crate) mod pooled;
pub(crate) mod short_conv;
pub(crate) mod sublayers;

pub use self::delta_net::{DeltaNetShape, DeltaNets};
pub use self::kda::{KdaLayers, KdaShape};
pub(crate) use self::keys::{MixerLayers, RoleShape, Sizes};
pub use self::latent::{LatentShape, LatentSizes};
pub use self::mamba::{MambaLayers, MambaShape};
pub use self::mamba1::{Mamba1Layers, Mamba1Shape};
pub use self::pooled::{PooledAttention, PooledShape};
pub use self::short_conv::ShortConvs;

/// The token mixer of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MixerKind {
    /// Attention over keys and values.
    Attention,
    /// Attention over latent vectors.
    Latent(LatentShape),
    /// Attention over a window and over pools.
    Pooled(PooledShape),
    /// A gated causal convolution over `taps` tokens.
    ShortConv {
        /// Number of tokens, including the current one.
        taps: u32,
    },
    /// A gated DeltaNet.
    DeltaNet(DeltaNetShape),
    /// Kimi Delta Attention.
    Kda(KdaShape),
    /// Mamba-2.
    Mamba(MambaShape),
    /// Mamba-1.
    Mamba1(Mamba1Shape),
    /// Attention and Mamba-2, whose outputs are added.
    Beside(MambaShape),
    /// None: the layer is only an FFN.
    None,
}

impl MixerKind {
    /// Whether it is attention or includes it.
    pub(crate) fn has_keys(self) -> bool {
        self.has_attention() || matches!(self, Self::Latent(_) | Self::Pooled(_))
    }

    /// The same for plain attention.
    pub(crate) fn has_attention(self) -> bool {
        matches!(self, Self::Attention | Self::Beside(_))
    }

    /// Its tensors in the order of the forward pass, without those of plain attention.
    pub(crate) fn tensors(self, of: Sizes) -> Vec<RoleShape> {
        match self {
            Self::None | Self::Attention => Vec::new(),
            Self::Latent(shape) => shape.tensors(of),
            Self::Pooled(shape) => shape.tensors(of),
            Self::ShortConv { taps } => short_conv::tensors(taps, of),
            Self::DeltaNet(shape) => shape.tensors(of),
            Self::Kda(shape) => shape.tensors(of),
            Self::Mamba(shape) | Self::Beside(shape) => shape.tensors(of),
            Self::Mamba1(shape) => shape.tensors(of),
        }
    }
}
