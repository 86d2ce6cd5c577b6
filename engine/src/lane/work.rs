//! A layer's work as a lane sees it.

use std::ops::Range;

use emberflow_kernels::DType;

use super::{Outside, SharedBytes};
use crate::cluster::CLUSTER;
use crate::input::Input;

/// The largest pieces of a layer's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Most rows of a pass.
    pub rows: usize,
    /// Most clusters.
    pub clusters: usize,
    /// Most (cluster, row) pairs.
    pub pairs: usize,
}

/// The largest products of matrices.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ProductRoom {
    /// Bytes of all tokens' input.
    pub input: usize,
    /// Results.
    pub results: usize,
}

/// A matrix that the host holds too: rows of `cols` elements, each with its scales behind it.
#[derive(Clone)]
pub struct SharedMatrix {
    /// Format.
    pub dtype: DType,
    /// Rows.
    pub rows: usize,
    /// Elements of a row.
    pub cols: usize,
    /// The rows.
    pub bytes: SharedBytes,
}

/// A layer that is about to be computed.
#[derive(Debug, Clone, Copy)]
pub struct Offer<'a> {
    /// Number of the layer among those with an FFN.
    pub layer: usize,
    /// Rows of the pass.
    pub rows: usize,
    /// The only bank, if it computes all rows with weight 1 and nobody observes its neurons: the lane may compute any rows.
    pub by_rows: Option<u32>,
    /// (expert, rows) of each visited expert, ascending, if their hidden values may come from elsewhere; else empty.
    pub experts: &'a [(usize, usize)],
}

/// What a lane takes of a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Share {
    /// The first clusters of each bank, for all rows: as many as [`Outside`] says.
    Clusters,
    /// All clusters for the leading rows of the pass, and the first clusters of the bank for the rest.
    Rows {
        /// Number of these rows.
        rows: usize,
        /// Most clusters that it needs to see at once.
        group: usize,
    },
    /// Gate and Up of experts, for their first rows. By expert of the layer.
    Hidden(Vec<Option<HiddenRows>>),
}

/// Rows of an expert whose hidden values a lane computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HiddenRows {
    /// Their number, from the expert's first row on.
    pub tokens: usize,
    /// Where they begin in [`Lane::hidden`](super::Lane::hidden), `[neurons × tokens]`.
    pub first: usize,
}

/// A bank for some rows of a pass.
#[derive(Clone, Copy)]
pub struct UnitRows<'a> {
    /// Number of the bank.
    pub bank: u32,
    /// Its neurons.
    pub neurons: usize,
    /// The rows.
    pub input: Input<'a>,
    /// Mask of the (neuron, row) pairs that a predictor selects, `CLUSTER × rows / 64` words per cluster: bit
    /// `n × rows + row` of its n-th neuron. `None` for all.
    pub wanted: Option<&'a [u64]>,
    /// Smaller magnitudes of activated gates are zero.
    pub cut: f32,
    /// Biases of its Gates and Ups, by neuron; empty without any.
    pub bias: [&'a [f32]; 2],
}

impl UnitRows<'_> {
    /// Clusters of the bank.
    pub fn clusters(&self) -> usize {
        self.neurons.div_ceil(CLUSTER)
    }

    /// Words of the mask for a cluster.
    pub fn words(&self) -> usize {
        CLUSTER * self.input.tokens() / 64
    }
}

/// Some tokens of an input.
#[derive(Debug, Clone, Copy)]
pub enum PickedTokens<'a> {
    /// A contiguous range: first, count.
    From(usize, usize),
    /// By number, ascending.
    List(&'a [u32]),
}

impl PickedTokens<'_> {
    /// Their number.
    pub fn count(&self) -> usize {
        match self {
            Self::From(_, count) => *count,
            Self::List(tokens) => tokens.len(),
        }
    }

    /// The number of each in the input.
    pub fn each(&self) -> impl Iterator<Item = usize> + '_ {
        let (range, list): (Range<usize>, &[u32]) = match self {
            Self::From(first, count) => (*first..first + count, &[]),
            Self::List(tokens) => (0..0, tokens),
        };
        range.chain(list.iter().map(|&token| token as usize))
    }
}

/// An expert of which a lane computes hidden values.
#[derive(Debug, Clone, Copy)]
pub struct ExpertTokens<'a> {
    /// Its number in the layer.
    pub expert: usize,
    /// Number of its bank.
    pub bank: u32,
    /// Its tokens of the pass.
    pub tokens: PickedTokens<'a>,
    /// Biases of its Gates and Ups, by neuron; empty without any.
    pub bias: [&'a [f32]; 2],
}

/// Experts of which a lane computes hidden values.
#[derive(Clone, Copy)]
pub struct Experts<'a> {
    /// Input of the pass.
    pub input: Input<'a>,
    /// The experts, ascending.
    pub each: &'a [ExpertTokens<'a>],
}

/// The part of a layer that is being computed.
#[derive(Clone, Copy)]
pub struct Work<'a> {
    /// Clusters outside the store.
    pub outside: &'a Outside,
    /// The CPU's units.
    pub units: &'a [UnitRows<'a>],
    /// By unit: its first item. A unit's clusters are consecutive items.
    pub first: &'a [usize],
    /// The lane gives the total of its clusters of the only unit, rather than the sums of each.
    pub total: bool,
    /// Most clusters of a piece of work.
    pub at_once: usize,
    /// The rows that the lane computes with all clusters, of [`Share::Rows`].
    pub rows: Option<UnitRows<'a>>,
    /// The experts of [`Share::Hidden`].
    pub experts: Option<Experts<'a>>,
}

/// What the core wants of a lane.
pub enum Collect<'o> {
    /// Progress only, without waiting.
    Nothing,
    /// The total of the clusters that it computes for the CPU's rows, `[rows × d]`.
    Total(&'o mut [f32]),
    /// Sums of its clusters among a range of items, `[items × width]`, and whether to wait for all of them.
    Clusters {
        /// The items.
        items: Range<usize>,
        /// Sums of all items of the range.
        sums: &'o mut [f32],
        /// Floats of an item.
        width: usize,
        /// Waits for all of them; otherwise delivers finished ones.
        waits: bool,
    },
    /// Room for the next range of clusters that it needs.
    Room,
    /// The sums of the rows of [`Share::Rows`], `[rows × d]`.
    Rows(&'o mut [f32]),
    /// Hidden values before this one.
    Hidden(usize),
}
