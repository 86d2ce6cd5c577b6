//! The trait of a back end that holds clusters and computes with them, and its pieces of work.
//!
//! ```text
//! open ─▶ prepare (kernels for a model's FFN) ─▶ check ─▶ memory and upload, bank by bank
//! per layer: submit ─▶ the CPU computes its clusters ─▶ take: a sum for each row, or each cluster and row
//! ```
//!
//! Each cluster has a separate sum, and sums are added in the order of clusters as on the CPU, by the device if its clusters
//! come first: on a device whose arithmetic has the CPU's bits, the text has them too. [`check`](crate::check) decides
//! that with the CPU as reference, at every start, for the very kernels that will run.

use std::ops::Range;
use std::time::Duration;

use emberflow_engine::lane::{
    CLUSTER, Input, NeuronFormat, NeuronRows, ProductRoom, Room, SharedMatrix,
};
use emberflow_kernels::{ActivationsRef, DType};
use emberflow_models::config::{Activation, FfnKind};
use emberflow_opencl::{HostBytes, Sums};

use crate::error::DeviceError;
use crate::experts::{ExpertGroup, GraphRuns, GroupShape};
use crate::part::Part;

/// Properties of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// Its name.
    pub name: String,
    /// Name and version of its driver.
    pub driver: String,
    /// Its memory is the machine's, so its clusters count in the budget.
    pub unified: bool,
    /// Bytes of its memory.
    pub memory: u64,
    /// The longest buffer, in bytes.
    pub longest: u64,
    /// Matrices are padded to a multiple of this many rows.
    pub rows_at_once: usize,
    /// It knows rows of floats.
    pub floats: bool,
    /// It knows rows with a scale for each group of elements.
    pub grouped: bool,
    /// It knows rows with one scale, and tokens with one scale.
    pub per_channel: bool,
    /// It may compute with floats of 16 bits.
    pub halves: bool,
    /// It computes Gate and Up of several experts at once.
    pub groups: bool,
    /// Numbers of tokens, ascending, that it has static graphs for; empty if it computes any number alike.
    pub graphs: &'static [usize],
    /// Bytes of host memory that a piece of work takes in addition to input, results and buffers.
    pub work_bytes: u64,
    /// What its driver compiles at the first start, which takes long; none if nothing is compiled.
    pub compiles: Option<&'static str>,
    /// Descriptions of its kernels for floats and for 8-bit integers. Results do not depend on them.
    pub kernels: [String; 2],
}

impl Facts {
    /// Whether it knows rows of a format.
    pub fn multiplies(&self, dtype: DType) -> bool {
        let known = match dtype {
            _ if dtype.is_per_channel() => self.per_channel,
            _ if dtype.is_grouped() => self.grouped,
            _ => self.floats,
        };
        multiplies(dtype) && known
    }

    /// Description of its kernels for rows of a format.
    pub fn kernels(&self, dtype: DType) -> &str {
        &self.kernels[usize::from(dtype.is_grouped())]
    }
}

/// The FFN that a device is to compute.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DenseShape {
    /// Format of the rows.
    pub dtype: DType,
    /// Elements of a row.
    pub d: usize,
    /// Activation and matrices.
    pub kind: FfnKind,
}

impl DenseShape {
    /// Of neurons of a format.
    pub(crate) fn of(format: &NeuronFormat, kind: FfnKind) -> Self {
        Self {
            dtype: format.dtype,
            d: format.d,
            kind,
        }
    }

    /// Bytes of a neuron.
    pub fn neuron_bytes(&self) -> u64 {
        self.matrices() as u64 * self.dtype.row_bytes(self.d) as u64
    }

    /// Gate, Up and Down, or Gate and Down.
    pub fn matrices(&self) -> usize {
        if self.kind.ungated { 2 } else { 3 }
    }

    /// Bytes of host memory for pieces of work: inputs, biases and sums; and on a device whose
    /// memory is the machine's as many again, with hidden values and totals.
    pub fn room_bytes(&self, room: &Room, unified: bool) -> u64 {
        let input = self.token_bytes() * room.rows;
        let copied = input + room.pairs * CLUSTER / 8 + 8 * room.clusters * CLUSTER;
        let copied = copied + 4 * room.pairs * self.d;
        let between = 4 * (room.pairs * CLUSTER + room.rows * self.d);
        (copied + if unified { copied + between } else { 0 }) as u64
    }

    /// Bytes of a token's activations, as the device reads them.
    pub(crate) fn token_bytes(&self) -> usize {
        token_bytes(self.dtype, self.d)
    }

    /// Why no device computes such an FFN yet, and what can be done.
    pub fn unsupported(&self) -> Option<String> {
        match (self.kind.activation, self.dtype) {
            (Activation::Gelu | Activation::Xielu { .. }, _) => Some(format!(
                "devices do not know the activation {:?} of this model",
                self.kind.activation
            )),
            (_, dtype) if !multiplies(dtype) => Some(format!(
                "devices do not know {dtype}: pack the model with --quant q8, or with --quant q4 for the size \
                 of {dtype}"
            )),
            _ => None,
        }
    }
}

/// Whether devices know rows of a format.
pub(crate) fn multiplies(dtype: DType) -> bool {
    dtype != DType::Mxfp4
}

/// Bytes of the activations of a token for rows of `d` elements.
pub(crate) fn token_bytes(dtype: DType, d: usize) -> usize {
    match dtype.is_grouped() {
        true => emberflow_kernels::Activations::chunk_bytes(d),
        false => 4 * d,
    }
}

/// Work or a copy under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ticket {
    /// The piece of work under way.
    Work,
    /// Copies to a part.
    Upload(Part),
}

/// Clusters of a part to be computed for some rows.
#[derive(Clone, Copy)]
pub struct Clusters<'a> {
    /// Where the neurons are.
    pub part: Part,
    /// The clusters.
    pub clusters: &'a Range<usize>,
    /// Input, `[rows × d]`.
    pub x: &'a [f32],
    /// The same in 8 bits.
    pub quantized: ActivationsRef<'a>,
    /// The pairs of these clusters that a predictor wants, bit `n × rows + row`; `None` for all.
    pub mask: Option<&'a [u64]>,
    /// Smaller magnitudes of activated gates are zero.
    pub cut: f32,
    /// Biases of these clusters' Gates; empty without any.
    pub gate_bias: &'a [f32],
    /// Biases of their Ups.
    pub up_bias: &'a [f32],
    /// Neurons of the part that count, from its first one on.
    pub end: usize,
    /// Kind of result.
    pub sums: Sums,
}

impl Clusters<'_> {
    /// Rows of the input.
    pub fn rows(&self) -> usize {
        self.quantized.tokens()
    }
}

/// Counters of a finished piece of work.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Taken {
    /// (neuron, row) pairs that fired; 0 of products.
    pub fired: u64,
    /// Time from submission to the end by the device's clock; zero without one.
    pub took: Duration,
    /// Runs of graphs, for groups of experts.
    pub graphs: GraphRuns,
}

/// Work that a back end prepares for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Program {
    /// Clusters of an FFN. Frees earlier reservations.
    Ffn(DenseShape),
    /// Products of matrices of a format with rows of `cols` elements. After the FFN, as rows lie alike.
    Products {
        /// Format.
        dtype: DType,
        /// Elements of a row.
        cols: usize,
    },
    /// Buffers for clusters, in place of those before.
    Room(Room),
    /// Buffers for products, in place of those before.
    ProductRoom(ProductRoom),
    /// Groups of experts of a size, in addition to earlier programs; after the FFN.
    Groups(GroupShape),
}

/// What a part of a back end's memory is for.
#[derive(Clone)]
pub enum PartKind {
    /// This many neurons of a bank, uploaded once.
    Held(usize),
    /// A stream buffer of this many neurons: [`Backend::upload`] may be called while other work is under way,
    /// and between two pieces of work on the part.
    Passing(usize),
    /// Neurons in the machine's memory, from [`Backend::host`]: their bytes and number. Devices that share this memory do not
    /// copy them.
    Shared(HostBytes, usize),
    /// A matrix for products. Where the device has the machine's memory it is not copied.
    Matrix(SharedMatrix),
}

/// A piece of work.
#[derive(Clone, Copy)]
pub enum Work<'a> {
    /// Clusters of neurons × all rows of an input.
    Clusters(Clusters<'a>),
    /// Rows of matrices × all tokens of an input: `[tokens × rows]`, block by block.
    Products(&'a [Block], Input<'a>),
    /// Hidden values of several experts × some tokens of an input each: `[neurons × its tokens]`, expert by expert. On devices
    /// that compute groups.
    Experts(ExpertGroup<'a>, Input<'a>),
}

/// Rows of a matrix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// Where the matrix is.
    pub matrix: Part,
    /// The rows.
    pub rows: Range<usize>,
}

/// A processor beside the compute threads: memory, and one piece of work at a time.
pub trait Backend: Send {
    /// Its properties.
    fn facts(&self) -> &Facts;

    /// Prepares kernels, graphs and buffers.
    ///
    /// # Errors
    /// The driver's, not enough memory, or a format or activation that it does not know.
    fn prepare(&mut self, program: &Program) -> Result<(), DeviceError>;

    /// Whether kernels and graphs of all sizes that were prepared returned the CPU's bits, as far as the back end has tried them
    /// itself: a check against the CPU does not run each size.
    fn is_exact(&self) -> bool {
        true
    }

    /// A part of its memory.
    ///
    /// # Errors
    /// Not enough of it, or a format that it does not know.
    fn memory(&mut self, of: PartKind) -> Result<Part, DeviceError>;

    /// The bytes of a part that is held, which the host may read beside the device; `None` where the device has
    /// separate memory. Rows are stored matrix by matrix, each followed by its scales. No upload may follow.
    ///
    /// # Errors
    /// The driver's, or no such part.
    fn host(&mut self, part: Part) -> Result<Option<HostBytes>, DeviceError>;

    /// Gives a part back; no work is under way. Its number may be another one's then.
    fn release(&mut self, part: Part);

    /// Copies neurons to a part, from number `first` on. The host's bytes are read before it returns; to wait for the
    /// copies is not necessary: work on the part comes after them.
    ///
    /// # Errors
    /// The driver's, or no such place.
    fn upload(
        &mut self,
        part: Part,
        first: usize,
        neurons: &mut dyn Iterator<Item = NeuronRows<'_>>,
    ) -> Result<Ticket, DeviceError>;

    /// Begins a piece of work. One is under way at a time.
    ///
    /// # Errors
    /// Work that does not fit the buffers, or the driver's.
    fn submit(&mut self, work: &Work<'_>) -> Result<Ticket, DeviceError>;

    /// Whether work is done; does not wait.
    ///
    /// # Errors
    /// The driver's, or no such work.
    fn poll(&mut self, ticket: Ticket) -> Result<bool, DeviceError>;

    /// Waits for work and copies its results to `out`: sums `[clusters × rows × d]`, or a total `[rows × d]`, or nothing of a
    /// total that continues; products; hidden values; nothing of an upload.
    ///
    /// # Errors
    /// The driver's, no such work, or an `out` of another length.
    fn take(&mut self, ticket: Ticket, out: &mut [f32]) -> Result<Taken, DeviceError>;

    /// Gives back all of its memory but buffers for pieces of work.
    fn clear(&mut self);
}
