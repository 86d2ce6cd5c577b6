//! Models with different kinds of state: tests of state run over each.

use emberflow::cli::ModelArg;
use emberflow::model::open_model;
use emberflow_engine::Model;
use emberflow_kernels::DType;

use crate::{case, packed};

/// A model to test: with only attention of some kind, or also with a recurrent mixer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Only attention: the demo model.
    Attention,
    /// With short convolutions: a fixture.
    ShortConv,
    /// With gated DeltaNets: a fixture.
    DeltaNet,
    /// With Kimi Delta Attention and latent attention: a fixture.
    Kda,
    /// The same with bounded decays, and latent attention with gates: a fixture.
    BoundedKda,
    /// Only latent attention: a fixture.
    Latent,
    /// With Mamba-2 layers: a fixture.
    Mamba,
    /// With Mamba-1 layers: a fixture.
    Mamba1,
    /// With attention and Mamba-2 in every layer: a fixture.
    Beside,
    /// Attention with two kinds of heads, shared keys, and per-layer inputs: a fixture.
    TwoHeads,
    /// With attention to chunks of the text, and experts whose inputs are scaled: a fixture.
    Chunked,
    /// With attention over pools, several residual streams, and experts by token: a fixture.
    Pooled,
    /// Layers that are only a mixer or only an FFN, among them Mamba-2: a fixture.
    Sublayers,
    /// With several residual streams, DeltaNets, and n-gram embeddings: a fixture.
    NGrams,
}

/// All of them.
pub const KINDS: [Kind; 14] = [
    Kind::Attention,
    Kind::ShortConv,
    Kind::DeltaNet,
    Kind::Kda,
    Kind::BoundedKda,
    Kind::Latent,
    Kind::Mamba,
    Kind::Mamba1,
    Kind::Beside,
    Kind::TwoHeads,
    Kind::Chunked,
    Kind::Pooled,
    Kind::Sublayers,
    Kind::NGrams,
];

impl Kind {
    /// The model, with a fixture's weights in q8.
    pub fn model(self) -> Model {
        self.model_in(DType::Q8)
    }

    /// The model, with a fixture's weights in a format.
    pub fn model_in(self, quant: DType) -> Model {
        let fixture = |name| fixture(name, quant);
        match self {
            Self::Attention => open_model(&ModelArg { model: None }).expect("a model"),
            Self::ShortConv => fixture("lfm2"),
            Self::DeltaNet => fixture("qwen3_5"),
            Self::Kda => fixture("kimi_linear"),
            Self::BoundedKda => fixture("bailing_hybrid"),
            Self::Latent => fixture("deepseek_v3"),
            Self::Mamba => fixture("granitehybrid_dense"),
            Self::Mamba1 => fixture("jamba_dense"),
            Self::Beside => fixture("falcon_h1"),
            Self::TwoHeads => fixture("gemma4_inputs"),
            Self::Chunked => fixture("llama4_text"),
            Self::Pooled => fixture("deepseek_v4"),
            Self::Sublayers => fixture("nemotron_h"),
            Self::NGrams => fixture("qwen4_exp"),
        }
    }

    /// A prompt of `len` of its tokens, different for each `n`.
    pub fn prompt(self, n: u32, len: usize) -> Vec<u32> {
        let texts = match self {
            Self::Attention => 900,
            _ => 260,
        };
        (0..len as u32)
            .map(|i| 40 + (i * 31 + n * 17) % texts)
            .collect()
    }

    /// The prefix of a text that another one can share, if it agrees with its first `len` tokens and
    /// `prompt` of these were a prompt.
    pub fn shared(self, len: usize, prompt: usize) -> usize {
        match self {
            Self::Attention | Self::Latent | Self::TwoHeads | Self::Chunked => len,
            _ if len >= prompt - 1 => prompt - 1,
            _ => 0,
        }
    }
}

/// A packed fixture. It stays readable although its name is removed.
pub fn fixture(name: &str, quant: DType) -> Model {
    let dir = tempfile::tempdir().expect("a folder");
    let container = packed(&case(name), dir.path(), quant);
    Model::load(container).expect("model")
}
