//! Choice of the sparsity mode.
//!
//! It depends on the container only, not on budget or machine, so that memory pressure cannot
//! change a text.

use emberflow_models::config::ModelConfig;

use crate::error::Error;
use crate::ffn::StoredPredictors;
use crate::options::Sparsity;

/// Bytes of Gate rows per bank and token that a predictor must save to pay off. It costs one or two
/// parallel sections, about 10 µs, in which a small machine reads this much.
const MIN_SAVING: u64 = 256 << 10;

/// A mode and its reason.
#[derive(Debug, Clone)]
pub(crate) struct SparsityChoice {
    pub sparsity: Sparsity,
    pub reason: String,
}

impl SparsityChoice {
    /// Of a model whose matrices lie by rows: no neuron is skipped.
    pub fn unpacked(c: &ModelConfig) -> Self {
        let gain = match c.has_zeros() {
            true => "; once packed, only neurons that fire are read and multiplied",
            false => "",
        };
        Self {
            sparsity: Sparsity::Dense,
            reason: format!("matrices that lie by rows are computed whole{gain}"),
        }
    }
}

/// Resolves `wanted` for a model with `gate_bytes` bytes of Gate rows.
pub(crate) fn choose(
    wanted: Sparsity,
    c: &ModelConfig,
    stored: Option<&StoredPredictors>,
    gate_bytes: u64,
) -> Result<SparsityChoice, Error> {
    let (activation, sparse) = (c.ffn_kind.activation, c.has_zeros());
    let asked = |sparsity| {
        Ok(SparsityChoice {
            sparsity,
            reason: "as asked".into(),
        })
    };
    match wanted {
        Sparsity::Dense => asked(Sparsity::Dense),
        Sparsity::Exact if sparse => asked(Sparsity::Exact),
        Sparsity::Exact => Err(Error::NotSparse { activation }),
        Sparsity::Predicted if stored.is_some() => asked(Sparsity::Predicted),
        Sparsity::Predicted => Err(Error::NoPredictors),
        Sparsity::Auto if !sparse => Ok(SparsityChoice {
            sparsity: Sparsity::Dense,
            reason: match stored {
                Some(_) => "cutting small gates of this activation changes the text; \
                            --sparsity predicted does it"
                    .into(),
                None => "the activation has no exact zeros".into(),
            },
        }),
        Sparsity::Auto => Ok(auto(c, stored, gate_bytes)),
    }
}

/// The mode for an activation with exact zeros.
fn auto(c: &ModelConfig, stored: Option<&StoredPredictors>, gate_bytes: u64) -> SparsityChoice {
    let exact = |reason: String| SparsityChoice {
        sparsity: Sparsity::Exact,
        reason,
    };
    let Some(stored) = stored.filter(|s| s.predicts()) else {
        return exact("the container has no predictors".into());
    };
    if stored.quality.is_none() {
        return exact("the recall of the imported predictors is not known".into());
    }
    let gate_bytes = gate_bytes as f64 * stored.visited();
    let read = stored.bytes as f64 * stored.visited() + stored.looked_at() * gate_bytes;
    let saved = (gate_bytes - read) / c.ffn_layers().count().max(1) as f64;
    let banks = c
        .mixture
        .as_ref()
        .map_or(1, |m| m.chosen + u32::from(m.shared_bank() > 0));
    let least = MIN_SAVING as f64 * f64::from(banks);
    let kib = |bytes: f64| (bytes / 1024.0).round();
    if saved >= least {
        SparsityChoice {
            sparsity: Sparsity::Predicted,
            reason: format!(
                "predictors save {} KiB of Gate rows per layer and token",
                kib(saved)
            ),
        }
    } else {
        exact(format!(
            "predictors save {} KiB of Gate rows per layer and token, less than predicting costs \
             ({} KiB)",
            kib(saved),
            kib(least)
        ))
    }
}
