//! Dense devices: processors beside the compute threads that hold the hottest neurons of each bank
//! and compute them whole, while the CPU predicts, reads and computes the others (PowerInfer-2
//! §4.1). A device is a memory tier too: what it holds is in no other region.
//!
//! ```text
//! open ─▶ prepare (kernels for a model's FFN) ─▶ check ─▶ reserve and upload, bank by bank
//! per layer: submit ─▶ the CPU computes its clusters ─▶ take: a sum for each row, or each cluster and row
//! ```
//!
//! Each cluster's sum is a vector of its own, added in the order of clusters as the CPU's are, by the device where its
//! clusters come first: on a device whose arithmetic has the CPU's bits, the text has them too. [`check`] decides that with
//! the CPU as reference, at every start, for the very kernels that will run.

pub mod check;
mod choice;
mod compare;
mod cpu;
#[cfg(test)]
mod forms_tests;
mod in_use;
mod kept;
pub(crate) mod numbers;
mod on_cpu;
mod opencl;
mod order;
mod product_check;
pub(crate) mod products;
#[cfg(test)]
mod tests;
mod widths;

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use emberflow_kernels::{ActivationsRef, DType, Row};
use emberflow_models::config::{Activation, FfnKind};
pub(crate) use emberflow_opencl::TILE_ROWS;
pub use emberflow_opencl::{Block, Dots, Form, HostBytes, Kernels, MANY, Order, Sums, Team};

pub use self::check::Verdict;
pub use self::choice::{DeviceChoice, Listed, list};
pub use self::cpu::CpuDevice;
pub(crate) use self::in_use::InUse;
pub(crate) use self::kept::OfProducts;
pub use self::kept::{Entry, Found, Kept, Times, checked};
pub use self::products::{ProductRoom, SharedMatrix};
pub(crate) use self::widths::LEAST_STREAMED;
pub use self::widths::{Width, Widths};
use crate::cluster::CLUSTER;
pub use crate::error::DeviceError;
pub use crate::input::Input;

/// What a device is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// Its name.
    pub name: String,
    /// Name and version of its driver.
    pub driver: String,
    /// Its memory is the machine's, so that what it holds counts in the budget.
    pub unified: bool,
    /// Bytes of its memory.
    pub memory: u64,
    /// The longest buffer, in bytes.
    pub longest: u64,
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

/// The largest pieces of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Most rows of a pass.
    pub rows: usize,
    /// Most clusters.
    pub clusters: usize,
    /// Most (cluster, row) pairs.
    pub pairs: usize,
}

impl DenseShape {
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
            (Activation::Gelu | Activation::ClampedSwiglu { .. }, _) => Some(format!(
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
    !matches!(dtype, DType::Q4k | DType::Mxfp4)
}

/// Bytes of the activations of a token for rows of `d` elements.
pub(crate) fn token_bytes(dtype: DType, d: usize) -> usize {
    match dtype.is_grouped() {
        true => emberflow_kernels::Activations::bytes(d, 1),
        false => 4 * d,
    }
}

/// The rows of a neuron.
#[derive(Clone, Copy)]
pub struct NeuronRows<'a> {
    /// Gate.
    pub gate: Row<'a>,
    /// Up; `None` without a gate projection.
    pub up: Option<Row<'a>>,
    /// Down.
    pub down: Row<'a>,
}

impl<'a> NeuronRows<'a> {
    /// Its rows in the order of a part's matrices.
    pub(crate) fn matrices(self) -> impl Iterator<Item = Row<'a>> {
        [Some(self.gate), self.up, Some(self.down)]
            .into_iter()
            .flatten()
    }
}

/// Neurons of a bank on a device, by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part(pub(crate) usize);

/// Work that was submitted, by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ticket(pub(crate) u64);

/// Clusters of a part to be computed for some rows.
#[derive(Clone, Copy)]
pub struct Work<'a> {
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
    /// What comes out.
    pub sums: Sums,
}

impl Work<'_> {
    /// Rows of the input.
    pub fn rows(&self) -> usize {
        self.quantized.tokens()
    }
}

/// What came out besides sums.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Taken {
    /// (neuron, row) pairs that fired.
    pub fired: u64,
    /// Time from submission to the last sum.
    pub took: Duration,
}

/// A processor for dense work.
pub trait Dense: Send {
    /// What it is.
    fn facts(&self) -> &Facts;

    /// Takes note of an FFN; [`Dense::set_kernels`] makes its kernels. What was reserved before is given back.
    ///
    /// # Errors
    /// The driver's, or an FFN that it does not know.
    fn prepare(&mut self, shape: &DenseShape) -> Result<(), DeviceError>;

    /// The kernels with which it computes with rows of a format. No result depends on it.
    fn kernels(&self, _dtype: DType) -> Kernels {
        Kernels::default()
    }

    /// Makes kernels, and has them run from here on. With another order what was reserved before is given back.
    ///
    /// # Errors
    /// The driver's.
    fn set_kernels(&mut self, _kernels: &Kernels) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Makes buffers for pieces of work up to `room`.
    ///
    /// # Errors
    /// Not enough memory.
    fn make_room(&mut self, room: &Room) -> Result<(), DeviceError>;

    /// Gives back what was reserved, and kernels that do not run.
    fn clear(&mut self);

    /// Memory for `neurons` neurons of a bank.
    ///
    /// # Errors
    /// Not enough memory.
    fn reserve(&mut self, neurons: usize) -> Result<Part, DeviceError>;

    /// The same, for neurons that are replaced again and again: [`Dense::upload`] may be called while other
    /// work is under way, and between two pieces of work on the part.
    ///
    /// # Errors
    /// Not enough memory.
    fn reserve_for_streams(&mut self, neurons: usize) -> Result<Part, DeviceError> {
        self.reserve(neurons)
    }

    /// Uploads neurons from number `first` of a part on.
    ///
    /// # Errors
    /// The driver's.
    fn upload(
        &mut self,
        part: Part,
        first: usize,
        neurons: &mut dyn Iterator<Item = NeuronRows<'_>>,
    ) -> Result<(), DeviceError>;

    /// Waits until what was uploaded to a part for streams has arrived. Returns how long its copies took by the
    /// device's clock; zero without one, and where nothing is copied after [`Dense::upload`].
    ///
    /// # Errors
    /// The driver's.
    fn arrived(&mut self, _part: Part) -> Result<Duration, DeviceError> {
        Ok(Duration::ZERO)
    }

    /// The bytes of a part, which the host may read beside the device, where both have the same memory: the
    /// rows matrix by matrix, each with its scales behind it. Nothing is uploaded to it from here on.
    ///
    /// # Errors
    /// The driver's.
    fn host_bytes(&mut self, _part: Part) -> Result<Option<HostBytes>, DeviceError> {
        Ok(None)
    }

    /// Begins to compute. One piece of work is under way at a time.
    ///
    /// # Errors
    /// The driver's.
    fn submit(&mut self, work: &Work<'_>) -> Result<Ticket, DeviceError>;

    /// Whether it is done; does not wait.
    ///
    /// # Errors
    /// The driver's.
    fn poll(&mut self, ticket: Ticket) -> Result<bool, DeviceError>;

    /// Makes kernels for products of matrices of a format with rows of `cols` elements, and has them run from here on.
    ///
    /// # Errors
    /// The driver's, or a format that it does not know.
    fn prepare_products(
        &mut self,
        _dtype: DType,
        _cols: usize,
        _kernels: &Kernels,
    ) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Makes a matrix known, for products; its number. [`Dense::clear`] gives it back.
    ///
    /// # Errors
    /// Not enough memory, or a format that it does not know.
    fn share(&mut self, matrix: SharedMatrix) -> Result<usize, DeviceError>;

    /// Forgets a matrix; no work is under way. Its number may be another one's then.
    fn give_back(&mut self, matrix: usize);

    /// Makes buffers for products up to `room`.
    ///
    /// # Errors
    /// Not enough memory.
    fn make_product_room(&mut self, room: &ProductRoom) -> Result<(), DeviceError>;

    /// Begins products of blocks of matrices with all tokens of `input`, as [`Dense::submit`].
    ///
    /// # Errors
    /// The driver's.
    fn multiply(&mut self, blocks: &[Block], input: Input<'_>) -> Result<Ticket, DeviceError>;

    /// Waits for them, and copies them to `out`, block by block `[tokens × rows]`. Returns the time from
    /// submission to the last of them.
    ///
    /// # Errors
    /// The driver's.
    fn take_products(&mut self, ticket: Ticket, out: &mut [f32]) -> Result<Duration, DeviceError>;

    /// Waits for it, and copies the sums to `out`: `[clusters × rows × d]`, or of a total `[rows × d]`, and
    /// nothing of one that goes on.
    ///
    /// # Errors
    /// The driver's.
    fn take(&mut self, ticket: Ticket, out: &mut [f32]) -> Result<Taken, DeviceError>;
}

/// An open device, for one engine at a time.
#[derive(Clone)]
pub struct Device {
    facts: Facts,
    dense: Arc<Mutex<Box<dyn Dense>>>,
    leased: Arc<AtomicBool>,
    kept: Option<Kept>,
}

impl Device {
    /// A device that is open.
    pub fn new(dense: Box<dyn Dense>) -> Self {
        Self {
            facts: dense.facts().clone(),
            dense: Arc::new(Mutex::new(dense)),
            leased: Arc::default(),
            kept: None,
        }
    }

    /// The same, with a file that keeps verdicts on it from start to start.
    #[must_use]
    pub fn keeping(self, kept: Option<Kept>) -> Self {
        Self { kept, ..self }
    }

    /// What it is.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// The device for the caller alone, as long as the lease lives.
    ///
    /// # Errors
    /// Somebody else has it.
    pub fn lease(&self) -> Result<Lease, DeviceError> {
        match self.leased.swap(true, Ordering::Acquire) {
            false => Ok(Lease(self.clone())),
            true => Err(DeviceError {
                device: self.facts.name.clone(),
                what: "serves another engine; open it once more".into(),
            }),
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Device").field(&self.facts.name).finish()
    }
}

/// A device that nobody else uses.
#[derive(Debug)]
pub struct Lease(Device);

impl Lease {
    /// Where verdicts on it are kept.
    pub(crate) fn kept(&self) -> Option<&Kept> {
        self.0.kept.as_ref()
    }

    /// The device.
    pub fn dense(&self) -> MutexGuard<'_, Box<dyn Dense>> {
        let dense = self.0.dense.lock();
        dense.unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.dense().clear();
        self.0.leased.store(false, Ordering::Release);
    }
}
