//! Who computes a rectangle: some rows of a pass × some clusters of one unit. The compute threads take what nobody
//! else does (`ffn/run.rs`); a device takes
//!
//! ```text
//! clusters that it holds   × the CPU's rows             in pieces, before the CPU's own clusters are added
//! all clusters             × the first rows of a pass   what it does not hold passes through two buffers
//! Gate rows, projections   × all rows                   the last rows of matrices
//! Gate and Up of experts   × as many of their rows as a graph holds, group by group
//! ```
//!
//! A row's sums are added cluster by cluster, whoever computes them, so that no bit depends on how rectangles are dealt
//! out. The store does not know lanes: it is told which clusters lie outside of it.

mod device;
pub(crate) mod mask;

use std::ops::Range;

pub(crate) use self::device::{
    BegunGates, DeviceLane, Each, ExpertSetup, GateProducts, GroupCounts, GroupTimes, GroupUnit,
    HeldBanks, InGroup, PassRows, Queued, Setup, Sharing, Wait,
};
use crate::cluster::CLUSTER;
pub(crate) use crate::device::{Failures, LEAST_STREAMED, ProductRoom, Room};
use crate::input::Input;

/// A unit, for some rows of a pass.
#[derive(Clone, Copy)]
pub(crate) struct UnitRows<'a> {
    /// Number of the unit's bank.
    pub bank: u32,
    /// Its neurons.
    pub neurons: usize,
    /// The rows.
    pub input: Input<'a>,
    /// The (neuron, row) pairs that a predictor wants, as a [`mask`]; `None` for all.
    pub wanted: Option<&'a [u64]>,
    /// Smaller magnitudes of activated gates are zero.
    pub cut: f32,
    /// Biases of its Gates and of its Ups, by neuron; empty without any.
    pub bias: [&'a [f32]; 2],
}

impl UnitRows<'_> {
    /// Clusters of the unit.
    pub fn clusters(&self) -> usize {
        self.neurons.div_ceil(CLUSTER)
    }
}

/// Some rows of a pass × some clusters of one unit: all that a lane ever computes of an FFN.
#[derive(Clone)]
pub(crate) struct Rect<'a> {
    /// The unit, for the rectangle's rows.
    pub unit: UnitRows<'a>,
    /// The clusters.
    pub clusters: Range<usize>,
}

/// A layer's unit for the rows of both: those of the CPU, and the first ones, which a device computes with all clusters.
#[derive(Clone, Copy)]
pub(crate) struct LayerRows<'a> {
    /// The CPU's.
    pub own: UnitRows<'a>,
    /// The device's; `None` where it has none.
    pub first: Option<UnitRows<'a>>,
}
