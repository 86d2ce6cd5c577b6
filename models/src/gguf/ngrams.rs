//! Qwen3.8-Flash-Next: hyper-connections and n-gram rows.

use super::streams;
use crate::config::{Form, HyperConnections, Mixing, NGrams};
use crate::error::Error;
use crate::metadata::{ArchKeys, Metadata, Value};

/// Reads the deviations of Qwen3.8-Flash-Next.
pub(super) fn form(of: ArchKeys<'_>, table: streams::Sizes, form: &mut Form) -> Result<(), Error> {
    let need = |rest: &str| of.need(rest);
    form.hyper = Some(HyperConnections {
        count: need("hyper_connection.count")?,
        mixing: Mixing::Gated {
            rank: need("hyper_connection.low_rank")?,
        },
    });
    let layer = match of.u32s("ple.layers")?[..] {
        [] => return Ok(()),
        [layer] => layer,
        _ => {
            let why = "only one such layer is implemented";
            return Err(of.unsupported("ple.layers", why));
        }
    };
    let numbers = |rest: &str, count: u32| {
        let list = of.metadata.u64s(&of.key(rest))?;
        if list.len() == count as usize {
            Ok(list)
        } else {
            Err(of.bad(rest, &format!("a list of {count} integers")))
        }
    };
    let longest = need("ple.ngram_size")?;
    let heads = longest
        .saturating_sub(1)
        .saturating_mul(need("ple.heads_per_ngram")?);
    let firsts = numbers("ple.head_offsets", heads)?;
    let rows = numbers("ple.head_vocab_sizes", heads)?;
    let narrow = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
    form.ngrams = Some(NGrams {
        layer,
        rows: table.rows,
        width: need("embedding_length_per_layer_input")?,
        taps: need("ple.conv_kernel")?,
        end: need("ple.eos_token_id")?,
        factors: numbers("ple.layer_multipliers", longest)?,
        heads: (firsts.into_iter().zip(rows))
            .map(|(first, rows)| [narrow(first), narrow(rows)])
            .collect(),
    });
    Ok(())
}

impl Metadata {
    /// A list of integers from 0 on; empty if the key is absent.
    fn u64s(&self, key: &str) -> Result<Vec<u64>, Error> {
        self.list(key, "a list of integers", |value| match value {
            Value::Uint(number) => Some(*number),
            Value::Int(number) => u64::try_from(*number).ok(),
            _ => None,
        })
    }
}
