//! Windows of the text, and the inputs of FFNs and experts recorded on them.

use emberflow_engine::{Choice, Engine, FfnSeen, Logits, Text};
use half::f16;

use crate::cli::TrainPredictorArgs;
use crate::windows::{self, Amount, Source};
use crate::{Failure, progress};

/// Of ten windows, one is for calibration and one for measurement.
const PARTS: usize = 10;

/// Windows of a text, evenly spread over it.
pub struct Windows {
    tokens: Vec<Vec<u32>>,
}

impl Windows {
    /// Chooses windows with about as many tokens as requested; a shorter text is used whole.
    pub fn choose(
        text: &Text,
        source: &Source,
        args: &TrainPredictorArgs,
    ) -> Result<Self, Failure> {
        let amount = Amount {
            tokens: args.tokens as usize,
            least: PARTS,
        };
        let tokens = windows::choose(text.tokenizer(), text.config(), source, amount)?;
        Ok(Self { tokens })
    }

    /// Total tokens.
    pub fn total(&self) -> usize {
        self.tokens.iter().map(Vec::len).sum()
    }

    /// Tokens of the longest window.
    pub fn longest(&self) -> usize {
        self.tokens.iter().map(Vec::len).max().unwrap_or(0)
    }

    /// Tokens for training, calibration and measurement.
    pub fn tokens(&self) -> [usize; 3] {
        let mut parts = [0; 3];
        for (i, window) in self.tokens.iter().enumerate() {
            parts[part(i)] += window.len();
        }
        parts
    }
}

/// Purpose of a window: training, calibration or measurement.
fn part(window: usize) -> usize {
    match window % PARTS {
        4 => 1,
        9 => 2,
        _ => 0,
    }
}

/// Inputs of a layer on a part of the text.
#[derive(Default)]
struct InputPart {
    /// FFN inputs, `[tokens × d]`.
    x: Vec<f16>,
    /// Chosen experts, `[tokens × chosen]`; empty for a dense FFN.
    experts: Vec<Choice>,
}

/// Recorded inputs of several layers.
pub struct Inputs {
    d: usize,
    /// The experts' inputs are scaled by their weights.
    scales_input: bool,
    /// By layer and part.
    layers: Vec<[InputPart; 3]>,
}

impl Inputs {
    /// Runs `engine` over the windows and records the inputs of `layers`.
    pub fn collect(
        engine: &mut Engine,
        windows: &Windows,
        layers: &[usize],
    ) -> Result<Self, Failure> {
        let d = engine.config().bundle_width() as usize;
        let room = windows.tokens().map(|tokens| tokens * d);
        let empty = |values| InputPart {
            x: Vec::with_capacity(values),
            experts: Vec::new(),
        };
        let mut recorded: Vec<[InputPart; 3]> = layers.iter().map(|_| room.map(empty)).collect();
        let bar = progress::steps("reading the text", windows.total() as u64);
        let mut sequence = engine.new_sequence()?;
        for (i, window) in windows.tokens.iter().enumerate() {
            sequence.clear();
            let mut observe = |seen: &FfnSeen<'_>| {
                if let Some(k) = layers.iter().position(|&l| l == seen.layer) {
                    let part = &mut recorded[k][part(i)];
                    part.x.extend(seen.x.iter().map(|&x| f16::from_f32(x)));
                    part.experts.extend_from_slice(seen.choices);
                }
            };
            for chunk in window.chunks(engine.chunk()) {
                engine.forward_observed(&mut sequence, chunk, Logits::None, &mut observe)?;
            }
            bar.inc(window.len() as u64);
        }
        bar.finish_and_clear();
        let mixture = engine.config().mixture.as_ref();
        Ok(Self {
            d,
            scales_input: mixture.is_some_and(|mixture| mixture.scales_input),
            layers: recorded,
        })
    }

    /// Inputs of a bank of the `i`-th recorded layer: of all tokens, or of those that visit `expert`.
    pub fn of(&self, i: usize, expert: Option<u32>) -> [Vec<f32>; 3] {
        let bank = |part: &InputPart| {
            let chosen = part.experts.len() / (part.x.len() / self.d).max(1);
            // the factor of a token that visits the expert
            let factor = |token: usize| {
                let Some(expert) = expert else {
                    return Some(1.0);
                };
                let mut choices = part.experts[token * chosen..][..chosen].iter();
                let choice = choices.find(|choice| choice.expert == expert)?;
                Some(if self.scales_input {
                    choice.weight
                } else {
                    1.0
                })
            };
            let tokens = part.x.chunks_exact(self.d).enumerate();
            let read = tokens.filter_map(|(token, x)| Some((factor(token)?, x)));
            let values = read.flat_map(|(factor, x)| x.iter().map(move |x| factor * x.to_f32()));
            values.collect()
        };
        self.layers[i].each_ref().map(bank)
    }
}
