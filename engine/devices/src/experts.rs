//! Gate and Up of several experts as one piece of work (NPUMoE, §4.2), on devices whose memory is the machine's: hidden values
//! come out, of which the CPU computes Down.
//!
//! ```text
//! input  [tokens × d] ─ some tokens of each expert ─▶ Gate, Up ─▶ hidden [neurons × its tokens], expert after expert
//! ```

use emberflow_engine::lane::PickedTokens;

use crate::part::Part;
use crate::tiers::GROUPS;

/// Most experts of a group.
pub const MOST_EXPERTS: usize = GROUPS[0];

/// Experts of one graph, each with at most `capacity` tokens.
#[derive(Debug, Clone, Copy)]
pub struct ExpertGroup<'a> {
    /// Most tokens of each.
    pub capacity: usize,
    /// The experts.
    pub experts: &'a [ExpertRows<'a>],
}

/// An expert that is held whole, and the tokens that it is computed for.
#[derive(Debug, Clone, Copy)]
pub struct ExpertRows<'a> {
    /// Where its neurons are.
    pub part: Part,
    /// Their number.
    pub neurons: usize,
    /// The tokens.
    pub tokens: PickedTokens<'a>,
    /// Biases of Gate and of Up, by neuron; empty without any.
    pub bias: [&'a [f32]; 2],
}

impl ExpertGroup<'_> {
    /// Hidden values that come out.
    pub fn values(&self) -> usize {
        let of = |expert: &ExpertRows<'_>| expert.neurons * expert.tokens.count();
        self.experts.iter().map(of).sum()
    }
}

/// Size of the experts of groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupShape {
    /// Neurons of each.
    pub neurons: usize,
    /// Most tokens of each.
    pub capacity: usize,
}

/// Runs of a device's graphs for experts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GraphRuns {
    /// Runs of graphs.
    pub runs: u64,
    /// Places for tokens in the graphs of groups, once for each expert.
    pub places: u64,
}
