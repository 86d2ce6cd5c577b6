//! Models whose texts keep different things: tests of what happens to texts run over each.

use emberflow::cli::ModelArg;
use emberflow::model::open_model;
use emberflow_engine::Model;
use emberflow_kernels::DType;

use crate::{case, packed};

/// A model to try: of attention alone, of one kind or the other, or with a mixer of recurrent state
/// beside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Of attention alone: the demo model.
    Attention,
    /// With short convolutions: a fixture.
    ShortConv,
    /// With gated DeltaNets: a fixture.
    DeltaNet,
    /// With Kimi Delta Attention beside latent attention: a fixture.
    Kda,
    /// The same with bounded decays, and latent attention with gates: a fixture.
    BoundedKda,
    /// Of latent attention alone: a fixture.
    Latent,
    /// With Mamba-2 layers: a fixture.
    Mamba,
    /// Of attention with two kinds of heads, shared keys, and inputs by layer: a fixture.
    TwoHeads,
    /// With attention to chunks of the text, and experts whose inputs are scaled: a fixture.
    Chunked,
    /// With attention over pools, several residual streams, and experts by token: a fixture.
    Pooled,
    /// Of layers that are a mixer alone or an FFN alone, among them Mamba-2: a fixture.
    Sublayers,
    /// With several residual streams, DeltaNets, and rows for the last tokens: a fixture.
    NGrams,
}

/// All of them.
pub const KINDS: [Kind; 12] = [
    Kind::Attention,
    Kind::ShortConv,
    Kind::DeltaNet,
    Kind::Kda,
    Kind::BoundedKda,
    Kind::Latent,
    Kind::Mamba,
    Kind::TwoHeads,
    Kind::Chunked,
    Kind::Pooled,
    Kind::Sublayers,
    Kind::NGrams,
];

impl Kind {
    /// The model.
    pub fn model(self) -> Model {
        match self {
            Self::Attention => open_model(&ModelArg { model: None }).expect("a model"),
            Self::ShortConv => fixture("lfm2"),
            Self::DeltaNet => fixture("qwen3_5"),
            Self::Kda => fixture("kimi_linear"),
            Self::BoundedKda => fixture("bailing_hybrid"),
            Self::Latent => fixture("deepseek_v3"),
            Self::Mamba => fixture("granitehybrid_dense"),
            Self::TwoHeads => fixture("gemma4_inputs"),
            Self::Chunked => fixture("llama4_text"),
            Self::Pooled => fixture("deepseek_v4"),
            Self::Sublayers => fixture("nemotron_h"),
            Self::NGrams => fixture("qwen4_exp"),
        }
    }

    /// A prompt of `len` of its tokens, others for each `n`.
    pub fn prompt(self, n: u32, len: usize) -> Vec<u32> {
        let texts = match self {
            Self::Attention => 900,
            _ => 260,
        };
        (0..len as u32)
            .map(|i| 40 + (i * 31 + n * 17) % texts)
            .collect()
    }

    /// The part of a text that another one can share, if it agrees with the first `len` tokens of it
    /// and `prompt` of these were a prompt.
    pub fn shared(self, len: usize, prompt: usize) -> usize {
        match self {
            Self::Attention | Self::Latent | Self::TwoHeads | Self::Chunked => len,
            _ if len >= prompt - 1 => prompt - 1,
            _ => 0,
        }
    }
}

/// A fixture, packed. It is read though its name goes.
fn fixture(name: &str) -> Model {
    let dir = tempfile::tempdir().expect("a folder");
    let container = packed(&case(name), dir.path(), DType::Q8);
    Model::load(container).expect("model")
}
