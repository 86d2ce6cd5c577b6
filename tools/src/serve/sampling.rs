//! Sampling parameters of requests.

use emberflow_engine::meta::SamplingDefaults;
use emberflow_engine::{Sampling, Text};
use serde::Deserialize;
use serde_json::Number;

use super::error::ApiError;

/// Request fields.
#[derive(Debug, Default, Deserialize)]
pub struct SamplingOptions {
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<usize>,
    min_p: Option<f32>,
    repeat_penalty: Option<f32>,
    repeat_last_n: Option<i64>,
    typical_p: Option<f32>,
    top_n_sigma: Option<f32>,
    xtc_probability: Option<f32>,
    xtc_threshold: Option<f32>,
    seed: Option<Number>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
}

impl SamplingOptions {
    /// The sampling parameters. Defaults are the checkpoint's recommendations, else those of chats; `seed` is the default seed.
    ///
    /// # Errors
    /// A value out of range.
    pub fn sampling(&self, text: &Text, seed: u64) -> Result<Sampling, ApiError> {
        let chosen = SamplingDefaults {
            temperature: self.temperature,
            top_k: self.top_k.map(|k| u32::try_from(k).unwrap_or(u32::MAX)),
            top_p: self.top_p,
            min_p: self.min_p,
            typical_p: self.typical_p,
            repetition_penalty: self.repeat_penalty,
        };
        let off = Sampling::default();
        let sampling = Sampling {
            presence_penalty: self.presence_penalty.unwrap_or(0.0),
            frequency_penalty: self.frequency_penalty.unwrap_or(0.0),
            // Negative values stand for the whole context.
            penalty_window: (self.repeat_last_n).map_or(off.penalty_window, |n| {
                usize::try_from(n).unwrap_or(usize::MAX)
            }),
            top_n_sigma: self.top_n_sigma.unwrap_or(off.top_n_sigma),
            xtc_probability: self.xtc_probability.unwrap_or(off.xtc_probability),
            xtc_threshold: self.xtc_threshold.unwrap_or(off.xtc_threshold),
            seed: self.seed.as_ref().and_then(whole).unwrap_or(seed),
            ..text.chat_sampling(chosen)
        };
        sampling
            .validate()
            .map_err(|bad| ApiError::param(field_of(bad.what), bad))?;
        Ok(sampling)
    }
}

/// A seed: any 64-bit integer.
fn whole(number: &Number) -> Option<u64> {
    number.as_u64().or(number.as_i64().map(i64::cast_unsigned))
}

/// The request field of a sampling parameter.
fn field_of(parameter: &'static str) -> &'static str {
    match parameter {
        "top-p" => "top_p",
        "min-p" => "min_p",
        "typical-p" => "typical_p",
        "top-n-sigma" => "top_n_sigma",
        "XTC's probability" => "xtc_probability",
        "XTC's threshold" => "xtc_threshold",
        "repetition penalty" => "repeat_penalty",
        "presence penalty" => "presence_penalty",
        "frequency penalty" => "frequency_penalty",
        same => same,
    }
}
