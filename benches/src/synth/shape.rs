//! Dimensions of real models.

use clap::ValueEnum;
use emberflow_models::config::{
    Activation, FfnKind, Form, Mixture, ModelConfig, Rope, RopeScaling, Scoring,
};

use super::described;
use super::routing::RoutingTargets;
use emberflow::Failure;
use emberflow_models::Encoding;

/// A model whose dimensions are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Shape {
    /// 4 layers of 256 × 1024, for tests: one second from end to end.
    Tiny,
    /// TinyLlama-1.1B: 22 layers of 2048 × 5632.
    #[value(name = "llama-1b")]
    Llama1b,
    /// Llama-2-7B and ReluLLaMA-7B: 32 layers of 4096 × 11008.
    #[value(name = "llama-7b")]
    Llama7b,
    /// Llama-2-13B: 40 layers of 5120 × 13824.
    #[value(name = "llama-13b")]
    Llama13b,
    /// Mistral-7B-v0.2: 32 layers of 4096 × 14336, 8 key/value heads.
    #[value(name = "mistral-7b")]
    Mistral7b,
    /// Bamboo-7B: Mistral-7B's dimensions with ReLU on gate and up (dReLU).
    #[value(name = "bamboo-7b")]
    Bamboo7b,
    /// Qwen2-7B: 28 layers of 3584 × 18944, 152064 tokens, biases on Q, K and V.
    #[value(name = "qwen2-7b")]
    Qwen27b,
    /// 4 layers of 16 experts of 256 × 256, 4 per token: for tests.
    TinyMoe,
    /// Qwen3-30B-A3B: 48 layers of 128 experts of 2048 × 768, 8 per token.
    #[value(name = "qwen3-30b-a3b")]
    Qwen330bA3b,
    /// Mixtral-8x7B: 32 layers of 8 experts of 4096 × 14336, 2 per token.
    #[value(name = "mixtral-8x7b")]
    Mixtral8x7b,
    /// TurboSparse-Mixtral-47B: Mixtral-8x7B's dimensions with ReLU on gate and up (dReLU).
    #[value(name = "turbosparse-47b")]
    Turbosparse47b,
    /// `tiny-moe` with ReLU experts and a router that reads the layer's input: for tests.
    TinyMoeEarly,
    /// SmallThinker-21B-A3B: 52 layers of 64 ReLU experts of 2560 × 768, 6 per token, chosen before
    /// attention; every layer is rotated.
    #[value(name = "smallthinker-21b")]
    Smallthinker21b,
    /// `tiny-moe` with the experts, biases and windows of gpt-oss: for tests.
    TinyMoeOss,
    /// gpt-oss-20b: 24 layers of 32 experts of 2880 × 2880 in MXFP4, 4 per token; without YaRN, so
    /// its context is 4096.
    #[value(name = "gpt-oss-20b")]
    GptOss20b,
    /// Qwen3.6-35B-A3B: 40 layers of DeltaNets, every fourth attention; 256 experts of 2048 × 512, 8 per
    /// token.
    #[value(name = "qwen3.6-35b-a3b")]
    Qwen3635bA3b,
    /// GLM-4.7-Flash: 47 layers of latent attention; 64 experts of 2048 × 1536, 4 per token.
    #[value(name = "glm-4.7-flash")]
    Glm47Flash,
    /// Nemotron 3 Nano: 52 layers of Mamba-2, attention or 128 ReLU² experts of 2688 × 1856, 6 per token.
    #[value(name = "nemotron-3-nano")]
    Nemotron3Nano,
    /// Gemma 4 26B-A4B: 30 layers; 128 experts of 2816 × 704 with a dense FFN, 8 per token.
    #[value(name = "gemma-4-26b-a4b")]
    Gemma426bA4b,
    /// DeepSeek-V2-Lite: 27 layers of latent attention; 64 experts of 2048 × 1408, 6 per token.
    #[value(name = "deepseek-v2-lite")]
    DeepseekV2Lite,
    /// LFM2.5-8B-A1B: 24 layers of short convolutions or attention; 32 experts of 2048 × 1792, 4 per token.
    #[value(name = "lfm2.5-8b-a1b")]
    Lfm258bA1b,
    /// GLM-4.5-Air: 46 layers; 128 experts of 4096 × 1408, 8 per token.
    #[value(name = "glm-4.5-air")]
    Glm45Air,
    /// MiniMax-M2: 62 layers; 256 experts of 3072 × 1536, 8 per token.
    #[value(name = "minimax-m2")]
    MinimaxM2,
}

/// Gate activations by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ActArg {
    /// max(gate, 0) · up
    Relu,
    /// max(gate, 0) · max(up, 0), as Bamboo and TurboSparse
    Drelu,
    /// max(gate, 0)² · up
    Relu2,
    /// gate · sigmoid(gate) · up
    Silu,
    /// GELU with the error function
    Gelu,
    /// GELU with the tanh approximation
    GeluTanh,
}

impl ActArg {
    /// The FFN's formula.
    pub fn kind(self) -> FfnKind {
        FfnKind {
            activation: match self {
                Self::Relu | Self::Drelu => Activation::Relu,
                Self::Relu2 => Activation::Relu2,
                Self::Silu => Activation::Silu,
                Self::Gelu => Activation::Gelu,
                Self::GeluTanh => Activation::GeluTanh,
            },
            relu_on_up: self == Self::Drelu,
            ungated: false,
        }
    }
}

impl Shape {
    /// The `config.json` of a shape that has one.
    pub fn text(self) -> Option<&'static str> {
        Some(match self {
            Self::Qwen3635bA3b => include_str!("../../shapes/qwen3.6-35b-a3b.json"),
            Self::Glm47Flash => include_str!("../../shapes/glm-4.7-flash.json"),
            Self::Nemotron3Nano => include_str!("../../shapes/nemotron-3-nano.json"),
            Self::Gemma426bA4b => include_str!("../../shapes/gemma-4-26b-a4b.json"),
            Self::DeepseekV2Lite => include_str!("../../shapes/deepseek-v2-lite.json"),
            Self::Lfm258bA1b => include_str!("../../shapes/lfm2.5-8b-a1b.json"),
            Self::Glm45Air => include_str!("../../shapes/glm-4.5-air.json"),
            Self::MinimaxM2 => include_str!("../../shapes/minimax-m2.json"),
            _ => return None,
        })
    }

    /// Activation of the model named by the shape, unless it is a `config.json`.
    pub fn default_act(self) -> ActArg {
        match self {
            Self::Tiny | Self::TinyMoeEarly | Self::Smallthinker21b => ActArg::Relu,
            Self::Bamboo7b | Self::Turbosparse47b => ActArg::Drelu,
            _ => ActArg::Silu,
        }
    }

    /// Experts per layer and per token; `None` for a dense shape.
    fn experts(self) -> Option<[u32; 2]> {
        match self {
            Self::TinyMoe | Self::TinyMoeEarly | Self::TinyMoeOss => Some([16, 4]),
            Self::GptOss20b => Some([32, 4]),
            Self::Qwen330bA3b => Some([128, 8]),
            Self::Smallthinker21b => Some([64, 6]),
            Self::Mixtral8x7b | Self::Turbosparse47b => Some([8, 2]),
            _ => None,
        }
    }

    /// Published routing, if the shape has experts. Qwen3-30B-A3B: 65 of 128 experts receive 90 %
    /// of the routes, and 43.3 % of a token's experts are visited again (gpu-container handbook,
    /// BigMoeOnEdge). Mixtral: all experts are in use; reuse unknown, OLMoE's 43.5 % is taken
    /// (WASTE). SmallThinker: unknown; reuse of OLMoE, which has as many experts, and popularity of
    /// Qwen3-30B-A3B. gpt-oss: 17.9 % are visited again, and a list of the hottest experts is right
    /// for 26.7 % (BigMoeOnEdge); if the list has 4 of 32 experts, 74.5 % of them receive 90 % of
    /// the routes. Nothing is published of the others: those of 256 experts have the reuse of Kimi Linear,
    /// which has as many (33.6 %, WASTE), those of 64 and fewer that of OLMoE, all the popularity of
    /// Qwen3-30B-A3B.
    pub fn default_routing(self) -> Option<RoutingTargets> {
        let (popular, reuse) = match self {
            Self::Mixtral8x7b | Self::Turbosparse47b => (0.9, 0.435),
            Self::TinyMoe | Self::TinyMoeEarly | Self::TinyMoeOss => (0.7, 0.5),
            Self::GptOss20b => (0.745, 0.179),
            Self::Qwen3635bA3b | Self::MinimaxM2 => (65.0 / 128.0, 0.336),
            Self::Smallthinker21b | Self::Glm47Flash | Self::DeepseekV2Lite | Self::Lfm258bA1b => {
                (65.0 / 128.0, 0.435)
            }
            _ => (65.0 / 128.0, 0.433),
        };
        let has_experts = self.experts().is_some() || self.text().is_some();
        has_experts.then_some(RoutingTargets { popular, reuse })
    }

    /// Published share of neurons that fire per token: more than 60 % of those in SmallThinker's
    /// chosen experts do not (arXiv 2507.20984).
    pub fn default_active(self) -> Option<f64> {
        (self == Self::Smallthinker21b).then_some(0.4)
    }

    /// Whether the shape has the experts, biases and windows of gpt-oss.
    fn is_gpt_oss(self) -> bool {
        matches!(self, Self::TinyMoeOss | Self::GptOss20b)
    }

    /// Format of the experts in a file of 4 bits per weight.
    pub fn four_bits(self) -> Encoding {
        if self.is_gpt_oss() {
            Encoding::Mxfp4
        } else {
            Encoding::Q4_0
        }
    }

    /// Whether the router reads the layer's input, before attention.
    fn early_router(self) -> bool {
        matches!(self, Self::TinyMoeEarly | Self::Smallthinker21b)
    }

    /// Family whose checkpoints have this shape and FFN.
    fn family(self, kind: FfnKind) -> &'static str {
        match self {
            Self::Qwen27b => "qwen2",
            Self::Qwen330bA3b => "qwen3_moe",
            Self::TinyMoeEarly | Self::Smallthinker21b => "smallthinker",
            Self::TinyMoeOss | Self::GptOss20b => "gpt_oss",
            Self::TinyMoe | Self::Mixtral8x7b | Self::Turbosparse47b if kind.relu_on_up => {
                "turbosparsemixtral"
            }
            Self::TinyMoe | Self::Mixtral8x7b | Self::Turbosparse47b => "mixtral",
            _ if kind.relu_on_up => "bamboo",
            Self::Mistral7b | Self::Bamboo7b => "mistral",
            _ => "llama",
        }
    }

    /// Formula of the FFN; gpt-oss has its own form of SiLU.
    fn ffn_kind(self, act: ActArg) -> FfnKind {
        let kind = act.kind();
        if self.is_gpt_oss() && kind.activation == Activation::Silu {
            FfnKind {
                activation: Activation::ClampedSwiglu {
                    limit: 7.0,
                    alpha: 1.702,
                },
                ..kind
            }
        } else {
            kind
        }
    }

    /// Parameters of the mixture of experts.
    fn mixture(self) -> Option<Mixture> {
        let early_router = self.early_router();
        self.experts().map(|[_, chosen]| Mixture {
            chosen,
            renormalise: true,
            scoring: if early_router {
                Scoring::Sigmoid
            } else {
                Scoring::Softmax
            },
            early_router,
            router_bias: self.is_gpt_oss(),
            ..Mixture::default()
        })
    }

    /// Sliding window of a layer; 0 = none.
    fn window(self, layer: u32) -> u32 {
        if self.is_gpt_oss() && layer.is_multiple_of(2) {
            128
        } else {
            0
        }
    }

    /// Layers, `d_model`, neurons, heads, those of keys and values, tokens, context, rotary base, epsilon of
    /// norms; unless the shape is a `config.json`.
    fn sizes(self) -> Option<([u32; 7], f32, f32)> {
        Some(match self {
            Self::Tiny => ([4, 256, 1024, 4, 2, 4096, 4096], 1e4, 1e-5),
            Self::Llama1b => ([22, 2048, 5632, 32, 4, 32000, 2048], 1e4, 1e-5),
            Self::Llama7b => ([32, 4096, 11008, 32, 32, 32000, 4096], 1e4, 1e-5),
            Self::Llama13b => ([40, 5120, 13824, 40, 40, 32000, 4096], 1e4, 1e-5),
            Self::Mistral7b => ([32, 4096, 14336, 32, 8, 32000, 32768], 1e6, 1e-5),
            Self::Bamboo7b => ([32, 4096, 14336, 32, 8, 32000, 32768], 1e4, 1e-5),
            Self::Qwen27b => ([28, 3584, 18944, 28, 4, 152_064, 131_072], 1e6, 1e-6),
            Self::TinyMoe | Self::TinyMoeEarly | Self::TinyMoeOss => {
                ([4, 256, 256, 4, 2, 4096, 4096], 1e4, 1e-5)
            }
            Self::GptOss20b => ([24, 2880, 2880, 64, 8, 201_088, 4096], 150_000.0, 1e-5),
            Self::Smallthinker21b => ([52, 2560, 768, 28, 4, 151_936, 16_384], 1.5e6, 1e-6),
            Self::Qwen330bA3b => ([48, 2048, 768, 32, 4, 151_936, 40_960], 1e6, 1e-6),
            Self::Mixtral8x7b | Self::Turbosparse47b => {
                ([32, 4096, 14336, 32, 8, 32000, 32768], 1e6, 1e-5)
            }
            _ => return None,
        })
    }

    /// Configuration with activation `act`, if requested. `small`: with small sizes.
    ///
    /// # Errors
    /// Options that do not apply to the shape.
    pub fn config(
        self,
        act: Option<ActArg>,
        layers: Option<u16>,
        small: bool,
    ) -> Result<ModelConfig, Failure> {
        let name = super::name(self);
        if let Some(text) = self.text() {
            if act.is_some() {
                let why = "gguf files of its family have the activation of the family";
                return Err(Failure::usage(format!("--act: not for {name}: {why}")));
            }
            return described::config(&name, text, layers, small);
        }
        if small {
            let why = format!("--small: {name} has one size; take a tiny shape");
            return Err(Failure::usage(why));
        }
        let mut config = self.plain(act.unwrap_or_else(|| self.default_act()));
        if let Some(layers) = layers {
            config.layers = layers.into();
            let windows = config.window.iter().copied().cycle();
            config.window = windows.take(usize::from(layers)).collect();
        }
        Ok(config)
    }

    /// The same for a shape without a `config.json`.
    fn plain(self, act: ActArg) -> ModelConfig {
        let (counts, theta, rms_eps) = self.sizes().unwrap_or_default();
        let [layers, d_model, ffn, heads, kv_heads, vocab, max_context] = counts;
        let ffn_kind = self.ffn_kind(act);
        let head_dim = match self {
            Self::Qwen330bA3b | Self::Smallthinker21b => 128,
            Self::GptOss20b => 64,
            _ => d_model / heads,
        };
        let experts = self.experts().map_or(1, |[experts, _]| experts);
        ModelConfig {
            family: self.family(ffn_kind).into(),
            name: format!("synth-{}", super::name(self)),
            vocab,
            d_model,
            layers,
            heads,
            kv_heads,
            head_dim,
            ffn,
            experts,
            ffn_kind,
            rms_eps,
            rope: Rope {
                theta,
                dims: head_dim,
                scaling: RopeScaling::None,
            },
            window: (0..layers).map(|layer| self.window(layer)).collect(),
            qkv_bias: self == Self::Qwen27b || self.is_gpt_oss(),
            o_bias: self.is_gpt_oss(),
            qk_norm: self == Self::Qwen330bA3b,
            tied_head: false,
            max_context,
            bos: Some(super::vocab::BOS),
            add_bos: true,
            eos: vec![super::vocab::EOS],
            predictor_threshold: None,
            mixture: self.mixture(),
            qk_norm_whole: false,
            clip_qkv: None,
            form: Form {
                ffn_bias: self.is_gpt_oss(),
                sinks: self.is_gpt_oss(),
                ..Form::default()
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shape_is_sound_and_cut_in_blocks() {
        for &shape in Shape::value_variants() {
            let c = shape.config(None, None, false).unwrap();
            c.validate(std::path::Path::new("shape")).unwrap();
            for n in [c.d_model, c.ffn, c.heads * c.head_dim] {
                assert!(n.is_multiple_of(32), "{shape:?} {n}");
            }
        }
    }

    #[test]
    fn parameters_are_the_published_numbers() {
        for (shape, millions) in [
            (Shape::Llama1b, 1100),
            (Shape::Llama7b, 6738),
            (Shape::Llama13b, 13_016),
            (Shape::Mistral7b, 7242),
            (Shape::Qwen27b, 7616),
            (Shape::Qwen330bA3b, 30_532),
            (Shape::Mixtral8x7b, 46_703),
            (Shape::Turbosparse47b, 46_703),
            // "21B"
            (Shape::Smallthinker21b, 21_507),
            (Shape::GptOss20b, 20_915),
        ] {
            let c = shape.config(None, None, false).unwrap();
            let count: usize = emberflow_models::names::required(&c)
                .iter()
                .map(|t| t.rows * t.cols)
                .sum();
            assert_eq!((count + 500_000) / 1_000_000, millions, "{shape:?}");
        }
    }
}
