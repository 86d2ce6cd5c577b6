//! The door for processors beside the compute threads. The core computes on the CPU and knows these traits and
//! plain data, not who is behind them. A model without a lane makes no call here.
//!
//! ```text
//! open     OpenLane::open ─▶ facts: data for the planner          before memory is divided
//! fill     multiply ─▶ hold ─▶ upload, cluster by cluster ─▶ settle
//! layer    offer ─▶ arrived, cluster by cluster ─▶ collect        the CPU computes what the lane does not take
//! matrix   Products::offer ─▶ the CPU's rows ─▶ Products::collect
//! ```
//!
//! A row's sums are added in the order of units and clusters, whichever processor computed them, so no division of the work changes a bit.
//! A lane that loses its device leaves the layer to the CPU, which has the same bytes, or ends the pass if bits would change.

mod facts;
mod outside;
mod products;
mod widths;
mod work;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use emberflow_kernels::{Compute, DType};
use emberflow_models::config::ModelConfig;
use emberflow_storage::trace::Tracer;
use serde::Serialize;

pub use self::facts::{CpuTimes, LaneFacts, LaneOutlook, LanePart, LanePlan, LaneTimes};

pub use self::outside::Outside;
pub use self::products::{HostMatrix, LaneMatrix, MATRICES, MatrixRows, ProductShare, Products};
pub use self::widths::{Width, Widths};
pub use self::work::{
    Collect, ExpertTokens, Experts, HiddenRows, Offer, PickedTokens, ProductRoom, Room, Share,
    SharedMatrix, UnitRows, Work,
};
pub use crate::activation::{Gating, of_up};
pub use crate::banks::Banks;
pub use crate::bundle::{NeuronFormat, NeuronRows};
pub use crate::cluster::{CLUSTER, prefixes};
use crate::error::Error;
pub use crate::input::Input;

/// Bytes with another owner, which any thread may read.
pub type SharedBytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// A model that is about to be opened.
#[derive(Clone, Copy)]
pub struct LaneModel<'a> {
    /// Its configuration.
    pub config: &'a ModelConfig,
    /// A hash of its content.
    pub identity: u128,
    /// Its banks.
    pub banks: &'a Arc<Banks>,
    /// All mechanisms are on: no baseline is reproduced.
    pub full: bool,
    /// Observers want the CPU's values of neurons.
    pub observed: bool,
    /// The engine counts which neurons of experts fire.
    pub counted: bool,
    /// Predictors select neurons.
    pub predicted: bool,
    /// Formats and widths of matrices whose rows a lane may multiply.
    pub matrices: &'a [(DType, usize)],
    /// Tokens have one scale, since some rows that are multiplied have one.
    pub one_scale: bool,
    /// Rows of the longest pass.
    pub rows: usize,
    /// Most compute threads.
    pub threads: usize,
}

/// Opens lanes. Options hold one of these rather than a lane, as they are cloned and a model may be opened again.
pub trait OpenLane: Send + Sync + fmt::Debug {
    /// Opens a lane for a model and checks it against the CPU. `None` leaves the model to the CPU.
    ///
    /// # Errors
    /// It cannot compute this model, is in use, or fails.
    fn open(&self, model: &LaneModel<'_>) -> Result<Option<Box<dyn Lane>>, Error>;

    /// What takes long at the first start, to be shown to the user.
    fn slow_start(&self) -> Option<String> {
        None
    }
}

/// What a lane keeps from when memory is filled on.
pub struct Hold {
    /// Number of clusters.
    pub clusters: u64,
    /// Hot clusters of each bank, by the statistics.
    pub hot: Vec<u32>,
    /// How often each bank is visited; empty without statistics.
    pub visits: Vec<f32>,
    /// The largest pieces of work.
    pub room: Room,
    /// Clusters and rows that it computes, by the rows of a pass.
    pub widths: Widths,
    /// Clusters of each of its two stream buffers; 0 if it streams none.
    pub at_once: usize,
    /// Seconds that the CPU takes for a layer of `chunk` rows.
    pub layer_seconds: f64,
    /// Rows of a prompt's pass.
    pub chunk: usize,
    /// Share of the FFN in memory, 0 to 1.
    pub resident: f64,
    /// Traces its work.
    pub tracer: Tracer,
}

/// Resources for matrices that a lane multiplies and the CPU holds too.
pub struct Sharing<'a> {
    /// Compute threads.
    pub on: &'a Compute,
    /// Their scratch.
    pub scratch: &'a mut [Vec<f32>],
    /// The largest products.
    pub room: ProductRoom,
    /// Traces products.
    pub tracer: Tracer,
    /// Bytes of its memory for matrices, where it is not the machine's.
    pub spare: u64,
}

/// A lane's account of a run.
#[derive(Debug, Clone, Serialize)]
#[serde(transparent)]
pub struct LaneReport {
    /// Its values.
    pub values: serde_json::Value,
    /// One line for the summary.
    #[serde(skip)]
    pub summary: String,
    /// Class of numerics: `cpu` if its sums have the CPU's bits. Texts and hashes are comparable within a class.
    #[serde(skip)]
    pub numerics: String,
}

/// What the engine tells a lane for its report.
pub struct Reported<'a> {
    /// Numbers of rows for which shares are reported: one, all texts, a prompt chunk.
    pub rows: &'a [usize],
    /// Rows of a prompt chunk.
    pub chunk: usize,
    /// Clusters of the model, those that the lane holds, and bytes of one.
    pub clusters: [u64; 3],
    /// Clusters outside the store.
    pub outside: &'a Outside,
    /// Rows of a prompt chunk that it computed with all neurons.
    pub streamed: usize,
    /// Share of the weights of projections and head that it multiplies in decode, and of projections in a prompt chunk.
    pub products: [f64; 2],
    /// The Gate rows of each bank that it multiplies, if they are resident.
    pub gates: &'a dyn Fn(u32) -> Option<&'a LaneMatrix>,
    /// Time that products were waited for, those of Gate rows aside.
    pub waited: Duration,
}

/// A pass whose time is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LanePass {
    /// Its rows.
    pub rows: usize,
    /// Whether all of them decode; otherwise some are a prompt's.
    pub decodes: bool,
}

/// Someone beside the compute threads who takes a part of a model's work.
pub trait Lane: Send + Sync {
    /// What the planner knows of it.
    fn facts(&self) -> &LaneFacts;

    /// Bytes of host memory for work of these sizes.
    fn host_bytes(&self, room: &Room, products: &ProductRoom) -> u64;

    /// Takes part in products of matrices, as many as it has room for: projections and head, or Gate rows of banks (`gates`).
    ///
    /// # Errors
    /// Its failure.
    fn multiply(
        &mut self,
        matrices: &mut dyn Iterator<Item = &mut dyn HostMatrix>,
        with: &mut Sharing<'_>,
        gates: bool,
    ) -> Result<(), Error>;

    /// Takes part in products of a bank's Gate rows that are resident again.
    fn multiply_again(&self, matrix: &mut dyn HostMatrix);

    /// Makes room for the clusters that it keeps. Returns which lie outside the store then.
    ///
    /// # Errors
    /// No memory for them.
    fn hold(&mut self, hold: Hold) -> Result<Outside, Error>;

    /// Takes the rows of a cluster, `[bank, cluster]`.
    ///
    /// # Errors
    /// Its failure.
    fn upload(
        &mut self,
        cluster: [u32; 2],
        rows: &mut dyn Iterator<Item = NeuronRows<'_>>,
    ) -> Result<(), Error>;

    /// All clusters are uploaded: adds the bytes that the CPU may read.
    ///
    /// # Errors
    /// Its failure, unless the CPU can take over.
    fn settle(&mut self, outside: &mut Outside) -> Result<(), Error>;

    /// Makes room for passes of other lengths. False if it has no memory for them; with `must`, devices without are given up.
    ///
    /// # Errors
    /// Its failure, unless the CPU can take over.
    fn set_room(
        &mut self,
        room: &Room,
        products: &ProductRoom,
        widths: &Widths,
        must: bool,
    ) -> Result<bool, Error>;

    /// Begins a pass. It may leave all of one whose time it will be told to the CPU.
    fn begin_pass(&mut self, timed: Option<LanePass>);

    /// Takes note of a pass's time.
    fn end_pass(&mut self, pass: LanePass, time: Duration);

    /// Leading rows of a pass of `rows` rows for which it computes all clusters.
    fn rows(&self, rows: usize) -> usize;

    /// Whether a part of it has failed.
    fn has_failed(&self) -> bool;

    /// Whether it computes hidden values of experts now, so that it has no time for products.
    fn is_busy(&self) -> bool;

    /// Begins a layer: returns its share, and sets in `outside` the clusters of each bank that it computes for all rows.
    /// Called again after a failure in the layer, whose earlier share is void.
    ///
    /// # Errors
    /// Its failure, unless the CPU can take over.
    fn offer(&mut self, layer: &Offer<'_>, outside: &mut Outside) -> Result<Share, Error>;

    /// Begins a range of the CPU's items of a layer.
    fn begin(&mut self, work: &Work<'_>, items: std::ops::Range<usize>);

    /// Whether it needs the bytes of a cluster that the CPU has.
    fn needs(&self, cluster: usize) -> bool;

    /// Takes the rows of a cluster that it needs.
    ///
    /// # Errors
    /// Its failure, unless the CPU can take over.
    fn arrived(
        &mut self,
        cluster: usize,
        rows: &mut dyn Iterator<Item = NeuronRows<'_>>,
    ) -> Result<(), Error>;

    /// Advances its part of a layer, and delivers the `wanted` results.
    ///
    /// # Errors
    /// Its failure, unless the CPU can take over: see [`Lane::is_lost`].
    fn collect(&mut self, work: &Work<'_>, wanted: Collect<'_>) -> Result<(), Error>;

    /// Hidden values of the layer's experts, see [`HiddenRows`].
    fn hidden(&self) -> &[f32];

    /// Whether sums of the current layer are missing because of a failure.
    fn is_lost(&self) -> bool;

    /// (neuron, row) pairs that fired, and bytes of weights that it computed with, since it was opened.
    fn counted(&self) -> [u64; 2];

    /// Its account of the run.
    fn report(&self, of: &Reported<'_>) -> LaneReport;
}
