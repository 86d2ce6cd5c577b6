//! A prompt with the outliers of all layers on the CPU (llm.npu, §3.3): weights of hot channels are in memory, those of
//! other channels are read from flash when one of them has an outlier.
//!
//! ```text
//! for each product   NPU: clipped activations
//!                    flash: weights of cold channels with outliers ─▶ CPU: all channels with outliers ─▶ joined
//! ```
//!
//! A chunk's outliers are one dense tensor, of all channels that have one in some token. How many these are follows from
//! three published shares, if a channel's outliers come independently of each other: hot channels, what they have of the
//! outliers, and the channels that have any in a long prompt.

use super::schedule::{Operation, Processors, Rule, by_rule};
use emberflow_storage::io::{Profile, SimOptions};
use emberflow_storage::profile::{Pattern, ReadCost};

use super::subgraphs::{CPU, NPU};

/// Index of the flash.
const FLASH: usize = 2;

/// The phone with its flash.
const PHONE: Processors = Processors {
    names: &["CPU", "NPU", "flash"],
    bandwidth: f64::INFINITY,
};

/// Hot channels, as a share of all (Fig. 11).
const HOT: f64 = 0.03;
/// Share of the outliers in hot channels (Fig. 11).
const IN_HOT: f64 = 0.8;
/// Channels with an outlier in a prompt of [`LONG`] tokens (3.3).
const EVER: f64 = 0.78;
/// Tokens of a long prompt (Fig. 11).
const LONG: f64 = 2048.0;

/// Bytes of a weight in floats.
const FLOAT: f64 = 4.0;

/// Outliers of a token, as a share of the channels: what leaves 22 % of them without one in a long prompt. All hot
/// channels have some there.
pub fn of_token() -> f64 {
    let cold = 1.0 - HOT;
    let without = (1.0 - EVER) / cold;
    -without.ln() * cold / ((1.0 - IN_HOT) * LONG)
}

/// Shares of the channels that are hot, and cold, and have an outlier in one of `tokens` tokens.
pub fn channels(tokens: usize) -> [f64; 2] {
    let outliers = of_token() * tokens as f64;
    let with = |share: f64, of_all: f64| share * (1.0 - (-of_all * outliers / share).exp());
    [with(HOT, IN_HOT), with(1.0 - HOT, 1.0 - IN_HOT)]
}

/// Products that have the same input.
#[derive(Debug, Clone, Copy)]
pub struct OneInput {
    /// Channels of the input.
    pub channels: usize,
    /// Rows of all these products.
    pub rows: usize,
}

/// Outliers of all products, in chunks.
pub struct OutlierSubgraphs<'a> {
    /// Tokens of a chunk.
    pub tokens: usize,
    /// The inputs of the products of a subgraph, by its name.
    pub inputs: &'a dyn Fn(&str) -> Vec<OneInput>,
    /// Seconds of a product on the CPU, by its multiplications.
    pub on_cpu: &'a dyn Fn(f64) -> f64,
    /// Seconds of the fences of a subgraph of the NPU.
    pub fences: f64,
    /// Bytes of all weights in floats, over which reads are spread.
    pub bytes: f64,
}

impl OutlierSubgraphs<'_> {
    /// Seconds of the reads and of the CPU for a subgraph.
    fn seconds(&self, flash: &ReadCost, name: &str) -> [f64; 2] {
        let [hot, cold] = channels(self.tokens);
        let mut sums = [0.0; 2];
        for of in (self.inputs)(name) {
            let [channels, rows] = [of.channels, of.rows].map(|n| n as f64);
            let each = (rows * FLOAT) as u64;
            sums[0] += cold * channels * flash.read_ns(each, Pattern::Random) / 1e9;
            sums[1] += (self.on_cpu)((hot + cold) * channels * rows * self.tokens as f64);
        }
        sums
    }

    /// A prompt's subgraphs with outliers beside those of the NPU, which joins both.
    fn graph(&self, plain: &[Operation]) -> Vec<Operation> {
        let options = SimOptions::new(Profile::Ufs4, 0);
        let flash = ReadCost::simulated(&options, 32, self.bytes as u64);
        let mut graph: Vec<Operation> = Vec::with_capacity(4 * plain.len());
        let mut last: Vec<usize> = Vec::with_capacity(plain.len());
        for work in plain {
            let after: Vec<usize> = work.after.iter().map(|&before| last[before]).collect();
            let first = graph.len();
            graph.push(Operation {
                after: after.clone(),
                ..work.clone()
            });
            if work.on == NPU {
                let [read, outliers] = self.seconds(&flash, work.kind);
                let mut piece = |kind, on, seconds, after| {
                    graph.push(Operation {
                        kind,
                        on,
                        seconds,
                        draws: 0.0,
                        after,
                    });
                };
                piece("read", FLASH, read, after);
                piece("product", CPU, outliers, vec![first + 1]);
                piece("join", CPU, self.fences, vec![first, first + 2]);
            }
            last.push(graph.len() - 1);
        }
        graph
    }

    /// Seconds of a prompt in order.
    pub fn prompt(&self, plain: &[Operation]) -> f64 {
        by_rule(&self.graph(plain), &PHONE, NPU, Rule::InOrder).seconds()
    }
}

#[cfg(test)]
mod tests {
    use super::super::subgraphs::prompt;
    use super::*;

    /// Fig. 10: outliers of a token in 0.1 to 0.3 % of the channels; the two others follow from it.
    #[test]
    fn shares_of_channels_are_the_published_ones() {
        let of_token = 100.0 * of_token();
        assert!((0.1..0.4).contains(&of_token), "{of_token}");
        let [hot, cold] = channels(LONG as usize);
        assert!((hot + cold - EVER).abs() < 1e-6, "{hot} {cold}");
        let [hot, cold] = channels(1);
        assert!((100.0 * (hot + cold) / of_token - 1.0).abs() < 0.1);
        assert!((hot / (hot + cold) - IN_HOT).abs() < 0.02);
        let more = [256, 512, 1024].map(channels);
        assert!(more.windows(2).all(|two| two[0][1] < two[1][1]));
    }

    /// Without outliers it is the plain prompt, and each part adds at most its own time.
    #[test]
    fn outliers_add_what_the_npu_does_not_hide() {
        let plain = prompt(1, 3, &|_, at| [1.0, 2.0, 1.0, 2.0, 1.0, 4.0][at]);
        let in_order = by_rule(&plain, &PHONE, NPU, Rule::InOrder).seconds();
        let with = |rows: usize, cpu: f64, fences: f64| {
            let inputs = |_: &str| match rows {
                0 => Vec::new(),
                _ => vec![OneInput {
                    channels: 1000,
                    rows,
                }],
            };
            let of = OutlierSubgraphs {
                tokens: 256,
                inputs: &inputs,
                on_cpu: &|products| cpu * products,
                fences,
                bytes: 1e9,
            };
            of.prompt(&plain)
        };
        assert!((with(0, 0.0, 0.0) - in_order).abs() < 1e-9);
        // Nothing runs beside the fences of nine subgraphs.
        assert!((with(0, 0.0, 0.5) - in_order - 4.5).abs() < 1e-9);
        // Reads of 190 channels of 4 KB take a millisecond, which the NPU hides.
        let hidden = with(1000, 0.0, 0.0);
        assert!((hidden - in_order).abs() < 1e-2, "{hidden} {in_order}");
        assert!(with(1 << 24, 0.0, 0.0) > in_order);
        assert!(with(1000, 1e-7, 0.0) > in_order);
    }
}
