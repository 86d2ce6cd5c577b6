//! Content of every row of every tensor, of a model with the residual stream of `stream.rs`.

use std::collections::BTreeMap;

use emberflow_models::config::{Activation, ModelConfig};
use emberflow_models::names::{Role, TensorId};

use super::firing::Firing;
use super::normal::expect;
use super::random::{mix, stream};
use super::routing::Routing;
use super::stream::{BLOCK, Fill, LEAK, RowPlan, SCORE_NOISE, Stream, is_windowed, random, whole};
use super::vocab::{BOS, SPECIAL, predecessor};
use emberflow::Failure;

/// Logit of the successor, while logits of other tokens have deviation 1: large enough for greedy
/// decoding to find it, small enough for sampling to deviate.
const SUCCESSOR_LOGIT: f64 = 12.0;

/// The plan of a whole checkpoint.
pub struct Recipe {
    /// The residual stream.
    pub stream: Stream,
    firing: Firing,
    /// Biases of a bank's gates, ascending, by its number of neurons; their assignment to neurons is drawn.
    biases: BTreeMap<usize, Vec<f32>>,
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
        let correlation = firing.correlation.max(routed);
        let biases_of = |neurons: usize| {
            let biases = firing.biases(neurons).into_iter();
            (neurons, biases.map(|b| b as f32).collect())
        };
        let blocks = [bias, all - bias - context, context];
        Ok(Self {
            stream: Stream::new(config, blocks, correlation, seed),
            biases: (c.banks())
                .map(|bank| bank.neurons as usize)
                .collect::<std::collections::BTreeSet<_>>()
                .into_iter()
                .map(biases_of)
                .collect(),
            hidden_power: up_power * expect(mean, deviation, |g| act(g).powi(2)),
            firing,
            routing,
        })
    }

    /// Row `row` of a matrix, as presented; of Down, the row of neuron `row`. `biases`: result of
    /// [`Recipe::biases_of`] for the tensor.
    pub fn row(&self, id: TensorId, row: usize, biases: &[f32]) -> RowPlan {
        if let Some(plan) = self.stream.mixer_row(id, row) {
            return plan;
        }
        let c = &self.stream.config;
        let [bias, token, context] = self.stream.sizes();
        let random = |deviation: f64| random(self.stream.seed, id, row, deviation);
        // Reads the context: deviation 1 from coordinates of deviation 1.
        let reads_context = 1.0 / context.sqrt();
        match id.role {
            Role::Embed => {
                let scale = 1.0 / f64::from(c.form.embedding_scale);
                self.stream.groups([
                    Fill::Constant((scale * self.stream.bias_level()) as f32),
                    // The start token adds nothing to averages, which would be large at first.
                    match row {
                        row if row == BOS as usize => Fill::Constant(0.0),
                        row => self.stream.token_code(row, scale),
                    },
                    random(LEAK * scale),
                ])
            }
            Role::Head => {
                let code = SUCCESSOR_LOGIT / token;
                let text = row as u32 >= SPECIAL;
                let token = if text {
                    self.stream
                        .token_code(predecessor(row as u32, c.vocab) as usize, code)
                } else {
                    random(code)
                };
                self.stream
                    .groups([random(LEAK * reads_context), token, random(reads_context)])
            }
            Role::Q | Role::K => self.query_or_key(id, row),
            Role::V => self.stream.token_reader(id, row, 1.0),
            Role::QGate => self
                .stream
                .reading(0.0, random(self.stream.read_noise(LEAK))),
            Role::O => {
                let heads = c.heads as usize * c.heads_of(id.layer).head_dim as usize;
                // gates are half open
                let open = if c.form.output_gate { 0.25 } else { 1.0 };
                let square = if is_windowed(c, id.layer) {
                    self.stream.window.energy * open
                } else {
                    open
                };
                self.stream.output(id, row, heads, square)
            }
            Role::Gate | Role::Router => self.scores(id, row, biases),
            Role::Up => {
                let own = match self.firing.up_bias {
                    0.0 => random(LEAK * reads_context),
                    up => Fill::Constant((up / bias) as f32),
                };
                let [token, context] = self.reads(id.role);
                self.stream.groups([own, random(token), random(context)])
            }
            Role::Down => {
                let full = self.down_deviation(id);
                let leak = random(LEAK * full);
                self.stream.groups([leak, leak, random(full)])
            }
            Role::GateBias | Role::UpBias => whole(c.ffn as usize, Fill::Constant(0.0)),
            Role::DownBias => whole(c.d_model as usize, Fill::Constant(0.0)),
            _ => whole(0, Fill::Constant(0.0)),
        }
    }

    /// Rows of heads that average a window, or that attend to all positions equally.
    fn query_or_key(&self, id: TensorId, row: usize) -> RowPlan {
        let c = &self.stream.config;
        let heads = c.heads_of(id.layer);
        if !is_windowed(c, id.layer) {
            return match id.role {
                Role::K => self.stream.token_reader(id, row, 1.0),
                _ => {
                    let noise = SCORE_NOISE / self.stream.score_scale();
                    let noise = self
                        .stream
                        .read_noise(noise / f64::from(heads.head_dim).sqrt());
                    self.stream
                        .reading(0.0, random(self.stream.seed, id, row, noise))
                }
            };
        }
        let (at, pairs) = (
            row % heads.head_dim as usize,
            self.stream.window.query.len(),
        );
        let amplitude = match (id.role, at / pairs) {
            (Role::K, part @ 0..2) => self.stream.window.key[at % pairs][part],
            (Role::Q, 0) => self.stream.window.query[at],
            _ => 0.0,
        };
        let noise = self.stream.read_noise(self.stream.score_noise());
        self.stream
            .reading(amplitude, random(self.stream.seed, id, row, noise))
    }

    /// A row that decides whether a neuron fires or an expert is chosen.
    fn scores(&self, id: TensorId, row: usize, biases: &[f32]) -> RowPlan {
        let random = |deviation: f64| random(self.stream.seed, id, row, deviation);
        let own = f64::from(biases.get(row).copied().unwrap_or_default());
        let ([token, context], level) = match id.role {
            Role::Router if self.early_router() => {
                (self.reads_input(id.layer), self.stream.bias_level())
            }
            _ => (self.reads(id.role), 1.0),
        };
        let own = Fill::Constant((own / (self.stream.sizes()[0] * level)) as f32);
        self.stream.groups([own, random(token), random(context)])
    }

    /// Row `coordinate` of Down as checkpoints store it: all neurons' weights on
    /// one coordinate of the residual stream.
    pub fn stored_down_row(&self, id: TensorId, coordinate: usize) -> RowPlan {
        let written = if self.stream.config.norms_of(id.layer).after {
            1.0
        } else {
            self.stream.written(coordinate)
        };
        let deviation = self.down_deviation(id) * written;
        let fill = random(self.stream.seed, id, coordinate, deviation);
        whole(self.neurons(id), fill)
    }

    /// Deviations of the weights on the token group and on the context: their sum has deviation 1
    /// and the required correlation of gates or experts.
    fn reads(&self, role: Role) -> [f64; 2] {
        let [_, token, context] = self.stream.sizes();
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
        let mixture = self.stream.config.mixture.as_ref();
        mixture.is_some_and(|mixture| mixture.early_router)
    }

    /// The same for a router that reads the input of `layer` without a norm. The first layer has no
    /// context yet, so its scores are new for every token.
    fn reads_input(&self, layer: u32) -> [f64; 2] {
        let [_, token, context] = self.stream.sizes();
        match layer {
            0 => [1.0 / token.sqrt(), LEAK / context.sqrt()],
            _ => {
                let deviation = self.stream.input_variance(layer).sqrt();
                let [of_token, of_context] = self.reads(Role::Router);
                [of_token, of_context / deviation]
            }
        }
    }

    /// Elements of a norm's or bias's vector. After a norm, coordinates of the bias group are 1 and
    /// all others have deviation 1.
    pub fn vector(&self, id: TensorId, cols: usize) -> Vec<f32> {
        if let Some(vector) = self.stream.mixer_vector(id, cols) {
            return vector;
        }
        let c = &self.stream.config;
        let mut factor = 1.0;
        let context = match id.role {
            // Sinks get no share of the scores.
            Role::Sinks => return vec![-40.0; cols],
            Role::QNorm | Role::KNorm => return vec![self.head_norm(id) as f32; cols],
            Role::ExpertScale | Role::LayerScale | Role::DensePostNorm | Role::ExpertsPostNorm => {
                return vec![1.0; cols];
            }
            Role::AttnPostNorm => {
                return self.post_norm(self.stream.mixer_increment(id.layer), cols);
            }
            Role::FfnPostNorm => return self.post_norm(self.stream.ffn_increment(id.layer), cols),
            Role::AttnNorm => self.stream.input_variance(id.layer),
            Role::RouterScale => {
                factor = f64::from(c.d_model).sqrt();
                self.stream.context_variance(id.layer)
            }
            Role::FfnNorm | Role::ExpertsNorm => self.stream.context_variance(id.layer),
            Role::FinalNorm => self.stream.input_variance(c.layers),
            _ => return vec![0.0; cols],
        };
        let [bias, token, rest] = self.stream.sizes();
        let level = self.stream.bias_level();
        let energy = bias * level * level + token + rest * context;
        let rms = factor * (energy / (bias + token + rest)).sqrt();
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
            (Role::Gate, _) => (self.biases.get(&self.neurons(id)).cloned()).unwrap_or_default(),
            (Role::Router, Some(routing)) => routing.biases.clone(),
            _ => return Vec::new(),
        };
        let key = stream(self.stream.seed, id, usize::MAX);
        for i in (1..biases.len()).rev() {
            let j = mix(key.wrapping_add(i as u64)) % (i as u64 + 1);
            biases.swap(i, j as usize);
        }
        biases
    }

    /// Weight of the norm of queries or keys.
    fn head_norm(&self, id: TensorId) -> f64 {
        let heads = self.stream.config.heads_of(id.layer);
        let width = f64::from(heads.head_dim);
        if !is_windowed(&self.stream.config, id.layer) {
            return match id.role {
                Role::QNorm => SCORE_NOISE / (self.stream.score_scale() * width.sqrt()),
                _ => 1.0,
            };
        }
        let power = self.stream.window.query.iter().map(|a| a * a).sum::<f64>();
        (power / width).sqrt().hypot(self.stream.score_noise())
    }

    /// Weights of the norm of an output that adds `increment` to the context's variance.
    fn post_norm(&self, increment: f64, cols: usize) -> Vec<f32> {
        let full = increment.sqrt();
        let weight = |coordinate| (full * self.stream.written(coordinate)) as f32;
        (0..cols).map(weight).collect()
    }

    /// Neurons of the bank of a tensor.
    fn neurons(&self, id: TensorId) -> usize {
        let mut banks = self.stream.config.banks_of(id.layer);
        let bank = banks.find(|bank| bank.expert == id.expert);
        bank.map_or(0, |bank| bank.neurons as usize)
    }

    /// Deviation of the weights of Down of a bank. The experts and the shared one add half each.
    fn down_deviation(&self, id: TensorId) -> f64 {
        let mixture = self.stream.config.mixture_of(id.layer);
        let apart = mixture.filter(|m| m.shared > 0 && !m.parallel_dense);
        let share = if apart.is_some() { 0.5 } else { 1.0 };
        let power = match mixture {
            None => 1.0,
            Some(m) if id.expert < self.stream.config.experts => {
                let of_weights = self.routing.as_ref().map_or(1.0, |r| r.power);
                of_weights * f64::from(m.scale).powi(2)
            }
            // the gate is half open
            Some(m) if !m.shared_is_plain => 0.25,
            Some(_) => 1.0,
        };
        let increment = share * self.stream.ffn_increment(id.layer);
        (increment / (self.neurons(id) as f64 * self.hidden_power * power)).sqrt()
    }
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
        Activation::Xielu {
            positive,
            negative,
            beta,
            eps,
        } => {
            let [positive, negative, beta, eps] = [positive, negative, beta, eps].map(f64::from);
            let curved = match g > 0.0 {
                true => positive * g * g,
                false => negative * (g.min(eps).exp_m1() - g),
            };
            curved + beta * g
        }
        // The difference of the two GELU forms does not matter here.
        Activation::Gelu | Activation::GeluTanh => g * super::normal::cdf(g),
    }
}
