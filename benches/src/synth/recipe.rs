//! Content of every row of every tensor.
//!
//! The residual stream has three groups of coordinates:
//!
//! ```text
//! bias      a constant, set by every embedding and never written to. A gate row's weights
//!           on it are the neuron's bias and determine how often it fires. It has most of the
//!           stream's energy (as massive activations in trained models), so the norms'
//!           divisor hardly depends on the token.
//! token     the embedding's code of the token; never written to. Values read it, and so
//!           does the head, whose rows are the codes of each token's predecessor: greedy
//!           decoding walks through the vocabulary without repetition.
//! context   0 at first. Attention writes averages of the last tokens' codes to it
//!           (`window.rs`), the FFN a little more. Gates and Ups read it, so they change
//!           as slowly as these averages.
//! ```
//!
//! Scores of experts are built like gates. If one of the two must change faster, it also reads the
//! token group, which is new for every token.
//!
//! All other weights are [`LEAK`] times as strong, not zero, so that every weight counts a little.
//! A narrower context lowers the rank of the gates' input and the size of a sufficient low-rank
//! predictor; the token group takes the remaining coordinates. Groups are whole blocks of 32, in
//! which a constant is exact in every format. The norms' weights cancel the growth of the residual
//! stream, which is known in advance because all increments are scaled here.

use emberflow_models::config::{Activation, ModelConfig};
use emberflow_models::names::{Role, TensorId};

use super::firing::Firing;
use super::normal::expect;
use super::random::{mix, stream};
use super::routing::Routing;
use super::vocab::{BOS, SPECIAL, predecessor};
use super::window::Window;
use emberflow::Failure;

/// Weights per block; groups and segments are whole blocks.
pub const BLOCK: usize = 32;

/// Stream keys from here on belong to tiles, smaller ones to rows.
const TILE_KEYS: usize = 1 << 40;

/// Relative strength of weights that a role does not need.
const LEAK: f64 = 1.0 / 32.0;
/// Energy of the bias group relative to that of all other coordinates.
const BIAS_ENERGY: f64 = 20.0;
/// Variance added to the context by attention over all layers after the first; the first adds 1.
const ATTENTION_GROWTH: f64 = 1.0;
/// Variance added by the FFNs over all layers.
const FFN_GROWTH: f64 = 0.1;
/// Standard deviation of attention scores due to the tokens themselves.
const SCORE_NOISE: f64 = 0.05;
/// Logit of the successor, while logits of other tokens have deviation 1: large enough for greedy
/// decoding to find it, small enough for sampling to deviate.
const SUCCESSOR_LOGIT: f64 = 12.0;

/// A run of whole blocks with the same content.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Segment {
    /// Blocks.
    pub blocks: usize,
    /// Their content.
    pub fill: Fill,
}

/// Content of a segment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fill {
    /// Equal weights.
    Constant(f32),
    /// Independent weights of mean 0.
    Random {
        /// Standard deviation.
        deviation: f32,
        /// Key of their random bits.
        key: u64,
        /// Key shared by the 32 rows of a tile; decides the signs of its scales.
        tile: u64,
        /// Row index; decides the position of the largest weight.
        row: usize,
    },
}

/// The three groups of a row of `d_model`, or one segment of another length.
pub type RowPlan = [Segment; 3];

/// The plan of a whole checkpoint.
pub struct Recipe {
    config: ModelConfig,
    seed: u64,
    firing: Firing,
    /// The attention pattern.
    pub window: Window,
    /// Blocks of each group.
    blocks: [usize; 3],
    /// Biases of a layer's gates, ascending; their assignment to neurons is drawn.
    biases: Vec<f32>,
    /// E[h²] of a hidden value.
    hidden_power: f64,
    /// Routing parameters, for a mixture of experts.
    routing: Option<Routing>,
}

/// Target parameters: firing rates of gates and popularity of experts.
pub struct Statistics {
    /// Of the gates.
    pub firing: Firing,
    /// Of the experts, for a model with experts.
    pub routing: Option<Routing>,
}

impl Recipe {
    /// Plans `config` with these statistics and a context group of `gate_rank` coordinates, rounded
    /// down to whole blocks.
    ///
    /// # Errors
    /// If no coordinates are left for the context or the token group.
    pub fn new(
        config: &ModelConfig,
        statistics: Statistics,
        gate_rank: Option<u32>,
        seed: u64,
    ) -> Result<Self, Failure> {
        let Statistics { firing, routing } = statistics;
        let routed = routing.as_ref().map_or(0.0, |r| r.correlation);
        let c = config;
        let all = c.d_model as usize / BLOCK;
        let bias = (all / 64).max(1);
        let most = all - bias - all / 4;
        let context = gate_rank.map_or(most, |rank| rank as usize / BLOCK);
        if !(1..=most).contains(&context) {
            return Err(Failure::usage(format!(
                "--gate-rank {}: expected {BLOCK} to {}",
                gate_rank.unwrap_or_default(),
                most * BLOCK
            )));
        }
        let (mean, deviation) = firing.gate();
        let act = |g: f64| activation(c.ffn_kind.activation, g);
        let up_power = match c.ffn_kind {
            kind if kind.relu_on_up => expect(firing.up_bias, 1.0, |u| u.max(0.0).powi(2)),
            // E[(u + 1)²]
            kind if matches!(kind.activation, Activation::ClampedSwiglu { .. }) => 2.0,
            _ => 1.0,
        };
        Ok(Self {
            window: Window::new(
                c.rope.theta.into(),
                c.head_dim as usize,
                firing.correlation.max(routed),
            ),
            blocks: [bias, all - bias - context, context],
            biases: firing
                .biases(c.ffn as usize)
                .into_iter()
                .map(|b| b as f32)
                .collect(),
            hidden_power: up_power * expect(mean, deviation, |g| act(g).powi(2)),
            config: config.clone(),
            firing,
            routing,
            seed,
        })
    }

    /// Row `row` of a matrix, as presented; of Down, the row of neuron `row`. `biases`: result of
    /// [`Recipe::biases_of`] for the tensor.
    pub fn row(&self, id: TensorId, row: usize, biases: &[f32]) -> RowPlan {
        let c = &self.config;
        let [bias, token, context] = self.sizes();
        let random = |deviation: f64| random(self.seed, id, row, deviation);
        // Reads the context: deviation 1 from coordinates of deviation 1.
        let reads_context = 1.0 / context.sqrt();
        match id.role {
            Role::Embed => self.groups([
                Fill::Constant(self.bias_level() as f32),
                // The start token adds nothing to averages, which would be large at first.
                match row {
                    row if row == BOS as usize => Fill::Constant(0.0),
                    row => self.token_code(row, 1.0),
                },
                random(LEAK),
            ]),
            Role::Head => {
                let code = SUCCESSOR_LOGIT / token;
                let text = row as u32 >= SPECIAL;
                let token = if text {
                    self.token_code(predecessor(row as u32, c.vocab) as usize, code)
                } else {
                    random(code)
                };
                self.groups([random(LEAK * reads_context), token, random(reads_context)])
            }
            Role::Q | Role::K => {
                let half = c.head_dim as usize / 2;
                let (part, pair) = (row / half % 2, row % half);
                let amplitude = match (id.role, part) {
                    (Role::K, _) => self.window.key[pair][part],
                    (_, 0) => self.window.query[pair],
                    _ => 0.0,
                };
                let noise = random(self.score_noise() / (token + context).sqrt());
                self.groups([Fill::Constant((amplitude / bias) as f32), noise, noise])
            }
            Role::V => {
                let reads_token = 1.0 / token.sqrt();
                let leak = random(LEAK * reads_token);
                self.groups([leak, random(reads_token), leak])
            }
            Role::O => {
                let heads = f64::from(c.heads) * f64::from(c.head_dim);
                let full =
                    (self.attention_increment(id.layer) / (self.window.energy * heads)).sqrt();
                whole(heads as usize, random(full * self.written(row)))
            }
            Role::Gate | Role::Router => self.scores(id, row, biases),
            Role::Up => {
                let own = match self.firing.up_bias {
                    0.0 => random(LEAK * reads_context),
                    up => Fill::Constant((up / bias) as f32),
                };
                let [token, context] = self.reads(id.role);
                self.groups([own, random(token), random(context)])
            }
            Role::Down => {
                let full = self.down_deviation();
                let leak = random(LEAK * full);
                self.groups([leak, leak, random(full)])
            }
            Role::GateBias | Role::UpBias => whole(c.ffn as usize, Fill::Constant(0.0)),
            Role::DownBias => whole(c.d_model as usize, Fill::Constant(0.0)),
            _ => whole(0, Fill::Constant(0.0)),
        }
    }

    /// A row that decides whether a neuron fires or an expert is chosen.
    fn scores(&self, id: TensorId, row: usize, biases: &[f32]) -> RowPlan {
        let random = |deviation: f64| random(self.seed, id, row, deviation);
        let own = f64::from(biases.get(row).copied().unwrap_or_default());
        let ([token, context], level) = match id.role {
            Role::Router if self.early_router() => (self.reads_input(id.layer), self.bias_level()),
            _ => (self.reads(id.role), 1.0),
        };
        let own = Fill::Constant((own / (self.sizes()[0] * level)) as f32);
        self.groups([own, random(token), random(context)])
    }

    /// Row `coordinate` of Down as checkpoints store it: all neurons' weights on
    /// one coordinate of the residual stream.
    pub fn stored_down_row(&self, id: TensorId, coordinate: usize) -> RowPlan {
        let deviation = self.down_deviation() * self.written(coordinate);
        let fill = random(self.seed, id, coordinate, deviation);
        whole(self.config.ffn as usize, fill)
    }

    /// Deviations of the weights on the token group and on the context: their sum has deviation 1
    /// and the required correlation of gates or experts.
    fn reads(&self, role: Role) -> [f64; 2] {
        let [_, token, context] = self.sizes();
        let wanted = |firing: f64, routed: f64| match role {
            Role::Router => (routed, firing),
            _ => (firing, routed),
        };
        let routed = self.routing.as_ref().map_or(0.0, |r| r.correlation);
        let (own, other) = wanted(self.firing.correlation, routed);
        if own >= other {
            let reads_context = 1.0 / context.sqrt();
            return [LEAK * reads_context, reads_context];
        }
        let slow = own / other;
        [((1.0 - slow) / token).sqrt(), (slow / context).sqrt()]
    }

    fn early_router(&self) -> bool {
        let mixture = self.config.mixture.as_ref();
        mixture.is_some_and(|mixture| mixture.early_router)
    }

    /// The same for a router that reads the input of `layer` without a norm. The first layer has no
    /// context yet, so its scores are new for every token.
    fn reads_input(&self, layer: u32) -> [f64; 2] {
        let [_, token, context] = self.sizes();
        match layer {
            0 => [1.0 / token.sqrt(), LEAK / context.sqrt()],
            _ => {
                let deviation = self.input_variance(layer).sqrt();
                let [of_token, of_context] = self.reads(Role::Router);
                [of_token, of_context / deviation]
            }
        }
    }

    /// Elements of a norm's or bias's vector. After a norm, coordinates of the bias group are 1 and
    /// all others have deviation 1.
    pub fn vector(&self, id: TensorId, cols: usize) -> Vec<f32> {
        let context = match id.role {
            // Sinks get no share of the scores.
            Role::Sinks => return vec![-40.0; cols],
            Role::QNorm | Role::KNorm => {
                let power = self.window.query.iter().map(|a| a * a).sum::<f64>();
                let rms = (power / f64::from(self.config.head_dim)).sqrt();
                return vec![rms.hypot(self.score_noise()) as f32; cols];
            }
            Role::AttnNorm => self.input_variance(id.layer),
            Role::FfnNorm => self.context_variance(id.layer),
            Role::FinalNorm => self.context_variance(self.config.layers),
            _ => return vec![0.0; cols],
        };
        let [bias, token, rest] = self.sizes();
        let level = self.bias_level();
        let energy = bias * level * level + token + rest * context;
        let rms = (energy / (bias + token + rest)).sqrt();
        let mut values = vec![(rms / level) as f32; bias as usize];
        values.resize((bias + token) as usize, rms as f32);
        // The context is empty before the first attention.
        let deviation = if context > 0.0 { context.sqrt() } else { 1.0 };
        values.resize(cols, (rms / deviation) as f32);
        values
    }

    /// Biases of a gate matrix by neuron, or of a router by expert, in random order. Empty for
    /// other tensors.
    pub fn biases_of(&self, id: TensorId) -> Vec<f32> {
        let mut biases = match (id.role, &self.routing) {
            (Role::Gate, _) => self.biases.clone(),
            (Role::Router, Some(routing)) => routing.biases.clone(),
            _ => return Vec::new(),
        };
        let key = stream(self.seed, id, usize::MAX);
        for i in (1..biases.len()).rev() {
            let j = mix(key.wrapping_add(i as u64)) % (i as u64 + 1);
            biases.swap(i, j as usize);
        }
        biases
    }

    fn sizes(&self) -> [f64; 3] {
        self.blocks.map(|blocks| (blocks * BLOCK) as f64)
    }

    /// Variance of a context coordinate at the FFN of `layer`; after the last layer if `layer` is
    /// the number of layers.
    fn context_variance(&self, layer: u32) -> f64 {
        let layers = f64::from(self.config.layers);
        let attention =
            1.0 + ATTENTION_GROWTH * f64::from(layer.min(self.config.layers - 1)) / layers;
        attention + FFN_GROWTH * f64::from(layer) / layers
    }

    /// The same at the input of a layer.
    fn input_variance(&self, layer: u32) -> f64 {
        match layer {
            0 => 0.0,
            _ => self.context_variance(layer) - self.attention_increment(layer),
        }
    }

    /// Value of the coordinates in the bias group.
    fn bias_level(&self) -> f64 {
        let [bias, token, context] = self.sizes();
        let rest = token + context * self.context_variance(self.config.layers);
        (BIAS_ENERGY * rest / bias).sqrt()
    }

    fn groups(&self, fills: [Fill; 3]) -> RowPlan {
        std::array::from_fn(|i| Segment {
            blocks: self.blocks[i],
            fill: match fills[i] {
                // Different bits for each group.
                Fill::Random {
                    deviation,
                    key,
                    tile,
                    row,
                } => Fill::Random {
                    deviation,
                    key: mix(key.wrapping_add(i as u64)),
                    tile: mix(tile.wrapping_add(i as u64)),
                    row,
                },
                constant => constant,
            },
        })
    }

    /// Code of `token`: the same bits in the embedding and in the head.
    fn token_code(&self, token: usize, deviation: f64) -> Fill {
        random(self.seed, TensorId::global(Role::Embed), token, deviation)
    }

    /// Relative strength of writes to a coordinate of the residual stream.
    fn written(&self, coordinate: usize) -> f64 {
        if coordinate / BLOCK < self.blocks[0] + self.blocks[1] {
            LEAK
        } else {
            1.0
        }
    }

    fn attention_increment(&self, layer: u32) -> f64 {
        match layer {
            0 => 1.0,
            _ => ATTENTION_GROWTH / f64::from(self.config.layers),
        }
    }

    fn down_deviation(&self) -> f64 {
        let increment = FFN_GROWTH / f64::from(self.config.layers);
        let power = self.hidden_power * self.routing.as_ref().map_or(1.0, |r| r.power);
        (increment / (f64::from(self.config.ffn) * power)).sqrt()
    }

    /// Deviation of the random part of query and key elements for which scores have deviation
    /// [`SCORE_NOISE`].
    fn score_noise(&self) -> f64 {
        let power: f64 = self.window.query.iter().map(|a| a * a).sum();
        SCORE_NOISE * (f64::from(self.config.head_dim) / power.max(1e-9)).sqrt()
    }
}

fn random(seed: u64, id: TensorId, row: usize, deviation: f64) -> Fill {
    Fill::Random {
        deviation: deviation as f32,
        key: stream(seed, id, row),
        tile: stream(seed, id, TILE_KEYS + row / BLOCK),
        row,
    }
}

/// One segment over `cols` columns.
fn whole(cols: usize, fill: Fill) -> RowPlan {
    let empty = Segment {
        blocks: 0,
        fill: Fill::Constant(0.0),
    };
    let blocks = cols / BLOCK;
    [Segment { blocks, fill }, empty, empty]
}

fn activation(kind: Activation, g: f64) -> f64 {
    match kind {
        Activation::Relu | Activation::FatRelu { .. } => g.max(0.0),
        Activation::Relu2 => g.max(0.0).powi(2),
        Activation::Silu => g / (1.0 + (-g).exp()),
        Activation::ClampedSwiglu { limit, alpha } => {
            let g = g.min(limit.into());
            g / (1.0 + (-g * f64::from(alpha)).exp())
        }
        Activation::ClampedSilu { limit } => {
            let g = g.min(limit.into());
            g / (1.0 + (-g).exp())
        }
        // The difference of the two GELU forms does not matter here.
        Activation::Gelu | Activation::GeluTanh => g * super::normal::cdf(g),
    }
}
