//! How two processors share a prompt: Agent.xpu's elastic dispatch (Algorithm 1, §4.3).
//!
//! ```text
//! first idle   max(first(whole − i chunks, rest), second(i chunks)) + sync, for the fastest i
//! first busy   second(all whole chunks) + sync; first(rest) begins so late that it ends with them
//! ```
//!
//! The second processor has a graph for a *chunk* of tokens; the first (a GPU, or the CPU's threads) takes
//! any number, so that the *rest* that fills no chunk is its. While the first decodes other texts it is
//! left to them as far as possible.

use super::{Pair, Product};

/// Who computes which tokens of a product.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Chunks {
    /// Chunks of the second processor, from the first token on.
    pub second: usize,
    /// Tokens of the first: whole chunks and the rest. 0 if the second takes the rest too, padded.
    pub first: usize,
    /// Seconds by which the first begins later, so that it ends no earlier than the second.
    pub defer: f64,
    /// Time from start to the joined result.
    pub seconds: f64,
}

impl Pair<'_> {
    /// Places the chunks of a product of `of.n` tokens.
    ///
    /// The paper takes the number of chunks for which both times differ least; here it is the one for
    /// which the slower ends first, which is what that is for. One processor alone is a candidate too.
    pub fn chunks(&self, of: Product, chunk: usize, first_is_busy: bool) -> Chunks {
        let whole = of.n.checked_div(chunk).unwrap_or(0);
        if first_is_busy && whole > 0 {
            return self.beside_decoding(of, chunk, whole);
        }
        let of_second = (0..=whole).map(|second| self.placed(of, chunk, second));
        // All on the second, padded.
        let padded = (chunk > 0).then(|| self.placed(of, chunk, of.n.div_ceil(chunk)));
        let mut best = self.placed(of, chunk, 0);
        for one in of_second.chain(padded) {
            if one.seconds < best.seconds {
                best = one;
            }
        }
        best
    }

    fn placed(&self, of: Product, chunk: usize, second: usize) -> Chunks {
        let first = of.n.saturating_sub(second * chunk);
        let mine = self.on_first(of, first);
        let theirs = self.on_second(of, chunk, second);
        Chunks {
            second,
            first,
            defer: 0.0,
            seconds: mine.max(theirs),
        }
    }

    /// All whole chunks go to the second; the rest is deferred.
    fn beside_decoding(&self, of: Product, chunk: usize, whole: usize) -> Chunks {
        let placed = self.placed(of, chunk, whole);
        let rest = self.on_first(of, placed.first);
        let until = self.on_second(of, chunk, whole) - self.sync;
        Chunks {
            defer: match placed.first {
                0 => 0.0,
                _ => (until - rest).max(0.0),
            },
            seconds: rest.max(until) + self.sync,
            ..placed
        }
    }

    fn on_first(&self, of: Product, n: usize) -> f64 {
        match n {
            0 => 0.0,
            n => self.first.seconds(Product { n, ..of }),
        }
    }

    /// Time of chunks one after the other, and of what joins them.
    fn on_second(&self, of: Product, chunk: usize, chunks: usize) -> f64 {
        match chunks {
            0 => 0.0,
            _ => chunks as f64 * self.second.seconds(Product { n: chunk, ..of }) + self.sync,
        }
    }
}
