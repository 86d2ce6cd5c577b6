//! What distinguishes the architectures of GGUF files from one another.

use std::path::Path;

use super::streams::GEMMA3N;
use super::value::Metadata;
use crate::error::Error;

/// An architecture.
pub(super) struct Arch {
    pub(super) name: &'static str,
    /// Q and K are stored in interleaved rotary order.
    pub(super) interleaved: bool,
    pub(super) qkv_bias: bool,
    pub(super) qk_norm: bool,
    /// Over all heads together.
    pub(super) qk_norm_whole: bool,
    /// ReLU is the architecture's activation.
    pub(super) relu: bool,
    pub(super) relu_on_up: bool,
    pub(super) experts: Experts,
    pub(super) windows: Windows,
}

/// Which layers a file's sliding window applies to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Windows {
    /// Unknown.
    Never,
    /// All (Mistral, stored as `llama`).
    Every,
    /// All but every fourth from the first on; those are not rotated (SmallThinker).
    AllButFourth,
    /// Every second one from the first on (gpt-oss, Gemma 2).
    Alternate,
    /// All but every `attention.sliding_window_pattern`-th, of which this is the default (Gemma 3).
    Pattern(u32),
}

/// Whether an architecture has experts, and how llama.cpp weighs them where the file does not say.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Experts {
    /// None, or an unknown form of them.
    Never,
    /// If `expert_count` is set; with renormalised weights (Mixtral, stored as `llama`).
    Optional,
    /// Always.
    Always { renormalise: bool },
}

/// The architecture whose experts have biases and an activation of their own.
pub(super) const GPT_OSS: &str = "gpt-oss";

/// The architecture of learned positions. PowerInfer's alone: llama.cpp does not know it.
pub(super) const OPT: &str = "opt";

const PLAIN: Arch = Arch {
    name: "",
    interleaved: false,
    qkv_bias: false,
    qk_norm: false,
    qk_norm_whole: false,
    relu: false,
    relu_on_up: false,
    experts: Experts::Never,
    windows: Windows::Never,
};

const ARCHS: [Arch; 21] = [
    Arch {
        name: "llama",
        interleaved: true,
        experts: Experts::Optional,
        windows: Windows::Every,
        ..PLAIN
    },
    Arch {
        name: "qwen2",
        qkv_bias: true,
        ..PLAIN
    },
    Arch {
        name: "qwen3",
        qk_norm: true,
        ..PLAIN
    },
    Arch {
        name: "bamboo",
        interleaved: true,
        relu: true,
        relu_on_up: true,
        windows: Windows::Every,
        ..PLAIN
    },
    Arch {
        name: "qwen2moe",
        qkv_bias: true,
        experts: Experts::Always { renormalise: false },
        ..PLAIN
    },
    Arch {
        name: "qwen3moe",
        qk_norm: true,
        experts: Experts::Always { renormalise: true },
        ..PLAIN
    },
    Arch {
        name: "olmoe",
        qk_norm: true,
        qk_norm_whole: true,
        experts: Experts::Always { renormalise: false },
        ..PLAIN
    },
    Arch {
        name: "smallthinker",
        relu: true,
        experts: Experts::Always { renormalise: true },
        windows: Windows::AllButFourth,
        ..PLAIN
    },
    Arch {
        name: GPT_OSS,
        experts: Experts::Always { renormalise: true },
        windows: Windows::Alternate,
        ..PLAIN
    },
    Arch {
        name: "olmo2",
        qk_norm: true,
        qk_norm_whole: true,
        ..PLAIN
    },
    Arch {
        name: "phi3",
        windows: Windows::Every,
        ..PLAIN
    },
    Arch {
        name: "granite",
        interleaved: true,
        ..PLAIN
    },
    Arch {
        name: "smollm3",
        interleaved: true,
        ..PLAIN
    },
    Arch {
        name: "minicpm",
        interleaved: true,
        ..PLAIN
    },
    Arch {
        name: "starcoder2",
        ..PLAIN
    },
    Arch {
        name: "nemotron",
        ..PLAIN
    },
    Arch {
        name: "falcon",
        ..PLAIN
    },
    Arch {
        name: OPT,
        relu: true,
        ..PLAIN
    },
    Arch {
        name: "gemma2",
        windows: Windows::Alternate,
        ..PLAIN
    },
    Arch {
        name: "gemma3",
        qk_norm: true,
        windows: Windows::Pattern(6),
        ..PLAIN
    },
    Arch {
        name: GEMMA3N,
        qk_norm: true,
        windows: Windows::Pattern(5),
        ..PLAIN
    },
];

impl Arch {
    /// Whether llama.cpp finds a window's layers by the architecture.
    pub(super) fn windows_have_a_key(&self) -> bool {
        matches!(
            self.windows,
            Windows::AllButFourth | Windows::Alternate | Windows::Pattern(_)
        )
    }
}

/// The architecture named by the file.
pub(super) fn arch(path: &Path, metadata: &Metadata) -> Result<&'static Arch, Error> {
    let found = metadata.need_text("general.architecture")?;
    ARCHS
        .iter()
        .find(|arch| arch.name == found)
        .ok_or_else(|| Error::UnknownFamily {
            path: path.to_owned(),
            found: format!("{found:?}"),
            supported: ARCHS.map(|arch| arch.name).join(", "),
        })
}

/// The architecture that llama.cpp uses for a family.
pub(super) fn arch_for(family: &str) -> Option<&'static Arch> {
    let name = match family {
        "mistral" | "bamboo" | "mixtral" | "turbosparsemixtral" => "llama",
        "qwen2_moe" => "qwen2moe",
        "qwen3_moe" => "qwen3moe",
        "gpt_oss" => GPT_OSS,
        "gemma3_text" => "gemma3",
        "gemma3n_text" => GEMMA3N,
        other => other,
    };
    ARCHS.iter().find(|arch| arch.name == name)
}
