//! What every row of every tensor contains.
//!
//! The residual stream is cut into three groups of coordinates:
//!
//! ```text
//! bias      a constant, set by every embedding; nothing writes to it. A gate row's
//!           weights on it are the neuron's own bias, and set how often it fires. It
//!           holds most of the stream's energy (as the massive activations of trained
//!           models do), so that the norms' divisor hardly depends on the token.
//! token     the embedding's code of the token; nothing writes to it. Values read
//!           it, and the head, whose rows are the codes of each token's predecessor:
//!           greedy decoding walks through the vocabulary and never repeats itself.
//! context   0 at first. Attention writes averages of the last tokens' codes to it
//!           (`window.rs`), the FFN a little more. Gates and Ups read it, so they
//!           move as slowly as the averages do.
//! ```
//!
//! Scores of experts are made like gates. Where they shall move faster than the gates, or the
//! other way round, the faster ones read the token group too, which is new with every token.
//!
//! Weights outside these roles are [`LEAK`] times as strong, not zero, so that
//! every weight counts a little. The narrower the context, the lower the rank of what
//! gates read and the smaller a low-rank predictor may be; the token group takes the
//! rest. Groups are whole blocks of 32, where a constant
//! is exact in every format. The norms' weights undo the growth of the residual
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

/// Weights in a block; groups and segments are whole blocks.
pub const BLOCK: usize = 32;

/// Streams from here on belong to tiles, before it to rows.
const TILE_KEYS: usize = 1 << 40;

/// Strength of the weights that a role does not need.
const LEAK: f64 = 1.0 / 32.0;
/// Energy of the bias group in units of what all other coordinates come to hold.
const BIAS_ENERGY: f64 = 20.0;
/// Variance that attention adds to the context after the first layer, over all
/// layers; the first adds 1.
const ATTENTION_GROWTH: f64 = 1.0;
/// Variance that the FFNs add over all layers.
const FFN_GROWTH: f64 = 0.1;
/// How far scores depend on the tokens themselves: standard deviation.
const SCORE_NOISE: f64 = 0.05;
/// Logit of the successor, where those of other tokens have deviation 1: enough
/// for greedy decoding to find it, little enough for sampling to stray.
const SUCCESSOR_LOGIT: f64 = 12.0;

/// A run of whole blocks filled the same way.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Segment {
    /// Blocks.
    pub blocks: usize,
    /// Their content.
    pub fill: Fill,
}

/// What a segment's weights are.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fill {
    /// All the same.
    Constant(f32),
    /// Independent, of mean 0.
    Random {
        /// Standard deviation.
        deviation: f32,
        /// Where their random bits come from.
        key: u64,
        /// The same for the 32 rows of a tile; decides the signs of its scales.
        tile: u64,
        /// Row they belong to, which decides where the largest weight is.
        row: usize,
    },
}

/// The three groups of a row of `d_model`, or one segment of another length.
pub type Row = [Segment; 3];

/// The plan of a whole checkpoint.
pub struct Recipe {
    config: ModelConfig,
    seed: u64,
    firing: Firing,
    /// The attention pattern.
    pub window: Window,
    /// Blocks of the three groups.
    blocks: [usize; 3],
    /// Biases of a layer's gates, ascending; which neuron gets which is drawn.
    biases: Vec<f32>,
    /// E[h²] of a hidden value.
    hidden_power: f64,
    /// Of a mixture of experts.
    routing: Option<Routing>,
}

/// What the rows that read the residual stream's slow part are made for: how often gates fire and
/// experts are chosen.
pub struct Statistics {
    /// Of gates.
    pub firing: Firing,
    /// Of experts, for a model that has some.
    pub routing: Option<Routing>,
}

impl Recipe {
    /// Plans `config` with these statistics and a context of `gate_rank` coordinates, rounded down
    /// to whole blocks.
    ///
    /// # Errors
    /// Where that leaves no context or no token group.
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

    /// The matrix row `row`, as presented; of Down, the row of neuron `row`.
    /// `biases` holds what [`Recipe::biases_of`] gave for the tensor.
    pub fn row(&self, id: TensorId, row: usize, biases: &[f32]) -> Row {
        let c = &self.config;
        let [bias, token, context] = self.sizes();
        let random = |deviation: f64| random(self.seed, id, row, deviation);
        // reads the context: deviation 1 from coordinates of deviation 1
        let reads_context = 1.0 / context.sqrt();
        match id.role {
            Role::Embed => self.groups([
                Fill::Constant(self.bias_level() as f32),
                // the start token adds nothing to averages, which would be large at first
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
    fn scores(&self, id: TensorId, row: usize, biases: &[f32]) -> Row {
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
    pub fn stored_down_row(&self, id: TensorId, coordinate: usize) -> Row {
        let deviation = self.down_deviation() * self.written(coordinate);
        let fill = random(self.seed, id, coordinate, deviation);
        whole(self.config.ffn as usize, fill)
    }

    /// Deviations of weights on the token group and on the context whose sum has deviation 1 and
    /// the correlation that gates or experts shall have.
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

    /// Those of a router that reads the input of `layer` without a norm. The first one finds no
    /// context yet: its scores are new with every token.
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

    /// The elements of a norm's or a bias's vector. After a norm, coordinates of
    /// the bias group are 1 and all others have deviation 1.
    pub fn vector(&self, id: TensorId, cols: usize) -> Vec<f32> {
        let context = match id.role {
            // no share of the scores beside it
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
        // before the first attention the context is empty
        let deviation = if context > 0.0 { context.sqrt() } else { 1.0 };
        values.resize(cols, (rms / deviation) as f32);
        values
    }

    /// Biases of a matrix of gates, by neuron, or of a router, by expert: hot ones lie anywhere.
    /// Empty for other tensors.
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

    /// Variance of a context coordinate where the FFN of `layer` reads it; after
    /// the last layer for `layer` = their number.
    fn context_variance(&self, layer: u32) -> f64 {
        let layers = f64::from(self.config.layers);
        let attention =
            1.0 + ATTENTION_GROWTH * f64::from(layer.min(self.config.layers - 1)) / layers;
        attention + FFN_GROWTH * f64::from(layer) / layers
    }

    /// The same where a layer begins.
    fn input_variance(&self, layer: u32) -> f64 {
        match layer {
            0 => 0.0,
            _ => self.context_variance(layer) - self.attention_increment(layer),
        }
    }

    /// Value of the residual stream's coordinates in the bias group.
    fn bias_level(&self) -> f64 {
        let [bias, token, context] = self.sizes();
        let rest = token + context * self.context_variance(self.config.layers);
        (BIAS_ENERGY * rest / bias).sqrt()
    }

    fn groups(&self, fills: [Fill; 3]) -> Row {
        std::array::from_fn(|i| Segment {
            blocks: self.blocks[i],
            fill: match fills[i] {
                // other bits for each group
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

    /// The code of `token`: the same bits in the embedding and in the head.
    fn token_code(&self, token: usize, deviation: f64) -> Fill {
        random(self.seed, TensorId::global(Role::Embed), token, deviation)
    }

    /// Strength of what is written to a coordinate of the residual stream.
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

    /// Deviation of the random part of a query's or key's elements that gives
    /// scores a deviation of [`SCORE_NOISE`].
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
fn whole(cols: usize, fill: Fill) -> Row {
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
        // the two forms of GELU differ by less than their scale matters here
        Activation::Gelu | Activation::GeluTanh => g * super::normal::cdf(g),
    }
}
