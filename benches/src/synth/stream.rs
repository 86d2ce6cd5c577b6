//! The residual stream: its coordinates, how much is added to them, and rows that read and write them.
//!
//! There are three groups of coordinates:
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

use emberflow_models::config::{MixerKind, ModelConfig};
use emberflow_models::names::{Role, TensorId};

use super::random::{mix, stream};
use super::window::Window;

/// Weights per block; groups and segments are whole blocks.
pub const BLOCK: usize = 32;

/// Stream keys from here on belong to tiles, smaller ones to rows.
const TILE_KEYS: usize = 1 << 40;

/// Relative strength of weights that a role does not need.
pub const LEAK: f64 = 1.0 / 32.0;

/// Energy of the bias group relative to that of all other coordinates.
const BIAS_ENERGY: f64 = 20.0;

/// Variance added to the context by mixers over all layers after the first; the first adds 1.
const ATTENTION_GROWTH: f64 = 1.0;

/// Variance added by the FFNs over all layers.
const FFN_GROWTH: f64 = 0.1;

/// Standard deviation of attention scores due to the tokens themselves.
pub const SCORE_NOISE: f64 = 0.05;

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

/// Least correlation of the context for which recurrent mixers have parameters.
const LEAST_CORRELATION: f64 = 0.01;

/// The residual stream of a model.
pub struct Stream {
    /// The model.
    pub config: ModelConfig,
    /// Seed of the weights.
    pub seed: u64,
    /// Correlation of the context with that of the next token.
    pub correlation: f64,
    /// The layer whose mixer adds most to the context.
    first: u32,
    /// The attention pattern.
    pub window: Window,
    /// Blocks of each group.
    blocks: [usize; 3],
}

impl Stream {
    /// For `config`, with this many blocks in each group and a context of this correlation.
    pub fn new(config: &ModelConfig, blocks: [usize; 3], correlation: f64, seed: u64) -> Self {
        let c = config;
        let correlation = correlation.max(LEAST_CORRELATION);
        let rope = (0..c.layers).find(|&layer| is_windowed(c, layer));
        let rope = rope.map_or(&c.rope, |layer| c.rope_of(layer));
        let scale = 1.0 / score_scale(c);
        Self {
            window: Window::new(rope.theta.into(), rope.dims as usize, scale, correlation),
            correlation,
            first: first_mixer(c),
            blocks,
            config: config.clone(),
            seed,
        }
    }

    pub fn sizes(&self) -> [f64; 3] {
        self.blocks.map(|blocks| (blocks * BLOCK) as f64)
    }

    pub fn groups(&self, fills: [Fill; 3]) -> RowPlan {
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
    pub fn token_code(&self, token: usize, deviation: f64) -> Fill {
        random(self.seed, TensorId::global(Role::Embed), token, deviation)
    }

    /// Relative strength of writes to a coordinate of the residual stream.
    pub fn written(&self, coordinate: usize) -> f64 {
        if coordinate / BLOCK < self.blocks[0] + self.blocks[1] {
            LEAK
        } else {
            1.0
        }
    }

    /// Value of the coordinates in the bias group.
    pub fn bias_level(&self) -> f64 {
        let [bias, token, context] = self.sizes();
        let rest = token + context * self.input_variance(self.config.layers);
        (BIAS_ENERGY * rest / bias).sqrt()
    }

    /// Variance of a context coordinate at the FFN of `layer`.
    pub fn context_variance(&self, layer: u32) -> f64 {
        self.input_variance(layer) + self.mixer_increment(layer)
    }

    /// The same at the input of a layer; after the last layer if `layer` is the number of layers.
    pub fn input_variance(&self, layer: u32) -> f64 {
        let added = |layer| self.mixer_increment(layer) + self.ffn_increment(layer);
        (0..layer).map(added).sum()
    }

    /// Variance that the mixer of a layer adds to the context.
    pub fn mixer_increment(&self, layer: u32) -> f64 {
        match layer {
            layer if layer == self.first => 1.0,
            layer if self.config.has_mixer(layer) => {
                ATTENTION_GROWTH / f64::from(self.config.layers)
            }
            _ => 0.0,
        }
    }

    /// The same of its FFN.
    pub fn ffn_increment(&self, layer: u32) -> f64 {
        if self.config.has_ffn(layer) {
            FFN_GROWTH / f64::from(self.config.layers)
        } else {
            0.0
        }
    }

    /// Factor of the scores.
    pub fn score_scale(&self) -> f64 {
        score_scale(&self.config)
    }

    /// Deviation of the random part of query and key elements for which scores have deviation
    /// [`SCORE_NOISE`].
    pub fn score_noise(&self) -> f64 {
        let power: f64 = self.window.query.iter().map(|a| a * a).sum();
        SCORE_NOISE / (self.score_scale() * power.max(1e-9).sqrt())
    }

    /// Reads `value` from the bias group, and a rest from the others.
    pub fn reading(&self, value: f64, rest: Fill) -> RowPlan {
        let own = Fill::Constant((value / self.sizes()[0]) as f32);
        self.groups([own, rest, rest])
    }

    /// Deviation of weights on the token and context groups that add up to `deviation`.
    pub fn read_noise(&self, deviation: f64) -> f64 {
        let [_, token, context] = self.sizes();
        deviation / (token + context).sqrt()
    }

    /// Reads the token's code, with this deviation.
    pub fn token_reader(&self, id: TensorId, row: usize, deviation: f64) -> RowPlan {
        let weight = deviation / self.sizes()[1].sqrt();
        let fill = |deviation| random(self.seed, id, row, deviation);
        let leak = fill(LEAK * weight);
        self.groups([leak, fill(weight), leak])
    }

    /// A row of the output projection over `width` values of this mean square.
    pub fn output(&self, id: TensorId, row: usize, width: usize, square: f64) -> RowPlan {
        let (increment, written) = if self.config.norms_of(id.layer).after {
            // the norm after it determines the scale
            (1.0, 1.0)
        } else {
            (self.mixer_increment(id.layer), self.written(row))
        };
        let full = (increment / (square * width as f64)).sqrt();
        whole(width, random(self.seed, id, row, full * written))
    }
}

/// Factor of the scores of attention.
fn score_scale(c: &ModelConfig) -> f64 {
    let usual = 1.0 / f64::from(c.head_dim).sqrt();
    c.form.attention_scale.map_or(usual, f64::from)
}

/// Whether attention in a layer can average the last tokens: it has rotary positions and its own values.
pub fn is_windowed(c: &ModelConfig, layer: u32) -> bool {
    let rotated = c.rotates(layer) && !c.heads_of(layer).key_is_value;
    match c.mixer_of(layer) {
        MixerKind::Attention => rotated && c.form.mamba.is_none(),
        MixerKind::Latent(_) => rotated,
        _ => false,
    }
}

/// The first layer whose mixer can have any correlation; the first one if there is none.
fn first_mixer(c: &ModelConfig) -> u32 {
    let recurrent = |layer| {
        matches!(
            c.mixer_of(layer),
            MixerKind::DeltaNet(_) | MixerKind::Mamba(_)
        )
    };
    let mut layers = 0..c.layers;
    layers
        .find(|&layer| is_windowed(c, layer) || recurrent(layer))
        .unwrap_or(0)
}

pub fn random(seed: u64, id: TensorId, row: usize, deviation: f64) -> Fill {
    Fill::Random {
        deviation: deviation as f32,
        key: stream(seed, id, row),
        tile: stream(seed, id, TILE_KEYS + row / BLOCK),
        row,
    }
}

/// One segment over `cols` columns.
pub fn whole(cols: usize, fill: Fill) -> RowPlan {
    let empty = Segment {
        blocks: 0,
        fill: Fill::Constant(0.0),
    };
    let blocks = cols / BLOCK;
    [Segment { blocks, fill }, empty, empty]
}
