//! Rotary position embedding (RoPE): angles.

use emberflow_models::config::{ModelConfig, Rope, RopeScaling};

/// Inverse frequencies of a model, and the angles of a chunk.
#[derive(Debug, Clone)]
pub struct RopeTable {
    inv_freq: Vec<f32>,
    /// Cosines of the rows of the current chunk, `[tokens × dims/2]`.
    cos: Vec<f32>,
    sin: Vec<f32>,
    /// Factor of cosines and sines (`attention_factor`).
    factor: f32,
}

impl RopeTable {
    /// A table for chunks of up to `tokens` rows in sequences of up to `context` positions.
    pub fn new(rope: &Rope, tokens: usize, context: usize) -> Self {
        let inv_freq = inverse_frequencies(rope, context);
        let n = inv_freq.len() * tokens;
        Self {
            cos: vec![0.0; n],
            sin: vec![0.0; n],
            inv_freq,
            factor: rope.scaling.attention_factor(context),
        }
    }

    /// Computes the angles of row `t`, a token at `position` of its sequence.
    pub fn fill(&mut self, t: usize, position: usize) {
        let half = self.inv_freq.len();
        for i in 0..half {
            (self.cos[t * half + i], self.sin[t * half + i]) = self.angle(position, i);
        }
    }

    /// Number of pairs that rotate.
    pub fn pairs(&self) -> usize {
        self.inv_freq.len()
    }

    /// Cosine and sine of pair `pair` at `position`.
    pub fn angle(&self, position: usize, pair: usize) -> (f32, f32) {
        let angle = position as f32 * self.inv_freq[pair];
        (
            self.factor * libm::cosf(angle),
            self.factor * libm::sinf(angle),
        )
    }

    /// Cosines and sines of row `t`, each `dims/2` long.
    pub fn at(&self, t: usize) -> (&[f32], &[f32]) {
        let half = self.inv_freq.len();
        let range = t * half..(t + 1) * half;
        (&self.cos[range.clone()], &self.sin[range])
    }
}

/// Angles of global layers, and of layers with a sliding window if they have other frequencies.
#[derive(Debug, Clone)]
pub struct Ropes {
    all: RopeTable,
    local: Option<RopeTable>,
    /// By layer: whether it has the frequencies of `local`.
    locally: Vec<bool>,
}

impl Ropes {
    /// Tables for chunks of up to `tokens` rows in sequences of up to `context` positions.
    pub fn new(c: &ModelConfig, tokens: usize, context: usize) -> Self {
        let local = c.form.local_rope.as_ref();
        Self {
            all: RopeTable::new(&c.rope, tokens, context),
            local: local.map(|rope| RopeTable::new(rope, tokens, context)),
            locally: (0..c.layers)
                .map(|layer| !std::ptr::eq(c.rope_of(layer), &c.rope))
                .collect(),
        }
    }

    /// Computes the angles of row `t`, a token at `position` of its sequence.
    pub fn fill(&mut self, t: usize, position: usize) {
        self.all.fill(t, position);
        if let Some(local) = &mut self.local {
            local.fill(t, position);
        }
    }

    /// Inverse frequencies and factors, which depend on the context in some models.
    pub fn constants(&self) -> impl Iterator<Item = f32> {
        let tables = [&self.all].into_iter().chain(&self.local);
        tables.flat_map(|table| table.inv_freq.iter().copied().chain([table.factor]))
    }

    /// The table of a layer.
    pub fn of(&self, layer: usize) -> &RopeTable {
        let locally = self.locally.get(layer) == Some(&true);
        let local = self.local.as_ref().filter(|_| locally);
        local.unwrap_or(&self.all)
    }
}

/// Inverse frequencies `θ^(−2i/dims)` with the model's scaling.
///
/// LongRoPE's divisors depend on the longest possible position, not on the positions so far: stored
/// keys would have to be rotated again. (llama.cpp also decides by the context, transformers by the
/// longest position of a pass.)
fn inverse_frequencies(rope: &Rope, context: usize) -> Vec<f32> {
    let power = |i: u32| libm::powf(rope.theta, (2 * i) as f32 / rope.dims as f32);
    let frequencies = 0..rope.dims / 2;
    match &rope.scaling {
        RopeScaling::Long {
            short,
            long,
            original_context,
            ..
        } => {
            let divisors = if context > *original_context as usize {
                long
            } else {
                short
            };
            let divided = |(i, divisor): (u32, &f32)| 1.0 / (divisor * power(i));
            frequencies.zip(divisors).map(divided).collect()
        }
        RopeScaling::Yarn { factor, .. } => frequencies
            .map(|i| {
                let (plain, unscaled) = (1.0 / power(i), yarn_interpolation(rope, i));
                plain / factor * (1.0 - unscaled) + plain * unscaled
            })
            .collect(),
        RopeScaling::Proportional { pairs } => frequencies
            .map(|i| if i < *pairs { 1.0 / power(i) } else { 0.0 })
            .collect(),
        scaling => frequencies
            .map(|i| scaled(1.0 / power(i), scaling))
            .collect(),
    }
}

/// YaRN: share of the unscaled frequency `i`; 1 for the highest, 0 for the lowest, a linear ramp
/// between.
fn yarn_interpolation(rope: &Rope, i: u32) -> f32 {
    let RopeScaling::Yarn {
        beta_fast,
        beta_slow,
        original_context,
        truncate,
        ..
    } = rope.scaling
    else {
        return 1.0;
    };
    let (dims, theta) = (f64::from(rope.dims), f64::from(rope.theta));
    // Index of the frequency with this many rotations over the original context.
    let place = |turns: f32| {
        let context = f64::from(original_context) / (f64::from(turns) * std::f64::consts::TAU);
        dims * libm::log(context) / (2.0 * libm::log(theta))
    };
    let (low, high) = (place(beta_fast), place(beta_slow));
    let (low, high) = if truncate {
        (libm::floor(low), libm::ceil(high))
    } else {
        (low, high)
    };
    let (low, high) = (low.max(0.0), high.min(dims - 1.0));
    // Without a ramp, a step.
    let width = if high == low { 0.001 } else { high - low };
    1.0 - ((f64::from(i) - low) / width).clamp(0.0, 1.0) as f32
}

fn scaled(freq: f32, scaling: &RopeScaling) -> f32 {
    match scaling {
        RopeScaling::None
        | RopeScaling::Long { .. }
        | RopeScaling::Yarn { .. }
        | RopeScaling::Proportional { .. } => freq,
        RopeScaling::Linear { factor } => freq / factor,
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_context,
        } => {
            let context = *original_context as f32;
            let wavelength = 2.0 * std::f32::consts::PI / freq;
            if wavelength < context / high_freq_factor {
                freq
            } else if wavelength >= context / low_freq_factor {
                freq / factor
            } else {
                let smooth =
                    (context / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                (1.0 - smooth) * freq / factor + smooth * freq
            }
        }
    }
}
