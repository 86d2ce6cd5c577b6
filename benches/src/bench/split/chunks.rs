//! How two processors share a prompt: the elastic dispatch of Agent.xpu (Algorithm 1, §4.3).
//!
//! ```text
//! first idle   max(first(whole − i chunks, rest), second(i chunks)) + sync, for the fastest i
//! first busy   second(all whole chunks) + sync; first(rest) begins so late that it ends with them
//! ```
//!
//! The second processor has a graph for a *chunk* of tokens. The first (a GPU, or the CPU's
//! threads) takes any number, including the *rest* that fills no chunk. While it decodes other
//! texts, it gets as little of the prompt as possible.

use emberflow_devices::split::{Pair, Product};

/// The tokens of a product by processor.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Chunks {
    /// Chunks on the second processor, from the first token on.
    pub second: usize,
    /// Tokens on the first: whole chunks plus the rest. 0 if the second pads the rest.
    pub first: usize,
    /// Seconds by which the first starts later, so that it does not finish before the second.
    pub defer: f64,
    /// Time from start to the joined result.
    pub seconds: f64,
}

/// Assigns the chunks of a product of `of.n` tokens.
///
/// The paper picks the number of chunks for which the two times differ least. This picks the one
/// with the earliest end, which is the purpose of that rule, and also considers each processor
/// alone.
pub fn chunks(pair: &Pair<'_>, of: Product, chunk: usize, first_is_busy: bool) -> Chunks {
    let whole = of.n.checked_div(chunk).unwrap_or(0);
    if first_is_busy && whole > 0 {
        return beside_decoding(pair, of, chunk, whole);
    }
    let of_second = (0..=whole).map(|second| placed(pair, of, chunk, second));
    // All on the second, padded.
    let padded = (chunk > 0).then(|| placed(pair, of, chunk, of.n.div_ceil(chunk)));
    let mut best = placed(pair, of, chunk, 0);
    for one in of_second.chain(padded) {
        if one.seconds < best.seconds {
            best = one;
        }
    }
    best
}

fn placed(pair: &Pair<'_>, of: Product, chunk: usize, second: usize) -> Chunks {
    let first = of.n.saturating_sub(second * chunk);
    let mine = on_first(pair, of, first);
    let theirs = on_second(pair, of, chunk, second);
    Chunks {
        second,
        first,
        defer: 0.0,
        seconds: mine.max(theirs),
    }
}

/// All whole chunks on the second; the rest is deferred.
fn beside_decoding(pair: &Pair<'_>, of: Product, chunk: usize, whole: usize) -> Chunks {
    let placed = placed(pair, of, chunk, whole);
    let rest = on_first(pair, of, placed.first);
    let until = on_second(pair, of, chunk, whole) - pair.sync;
    Chunks {
        defer: match placed.first {
            0 => 0.0,
            _ => (until - rest).max(0.0),
        },
        seconds: rest.max(until) + pair.sync,
        ..placed
    }
}

fn on_first(pair: &Pair<'_>, of: Product, n: usize) -> f64 {
    match n {
        0 => 0.0,
        n => pair.first.seconds(Product { n, ..of }),
    }
}

/// Time of several chunks in sequence, plus joining.
fn on_second(pair: &Pair<'_>, of: Product, chunk: usize, chunks: usize) -> f64 {
    match chunks {
        0 => 0.0,
        _ => chunks as f64 * pair.second.seconds(Product { n: chunk, ..of }) + pair.sync,
    }
}
