//! OpenCL devices.

use std::fmt::Write;
use std::time::Duration;

use arrayvec::ArrayVec;
use emberflow_kernels::DType;
use emberflow_models::config::Activation;
use emberflow_opencl as cl;
use emberflow_storage::prefer_huge_pages;

use super::host::put;
use super::order::{InRows, InTiles, scale_bytes};
use super::{
    Backend, Block, Clusters, DenseShape, DeviceError, Facts, HostBytes, Input, Kernels,
    NeuronRows, Order, Part, PartKind, Program, Taken, Ticket, Work, token_bytes,
};
use emberflow_engine::lane::CLUSTER;
use emberflow_engine::lane::MATRICES;

/// Divisions and square roots are rounded correctly.
const DIVIDES: &str = " -cl-fp32-correctly-rounded-divide-sqrt";

/// Neurons whose Down rows an item of a graphics processor reads at once. A processor has others ahead by itself.
const AT_ONCE: usize = 8;

/// Properties of a device.
fn facts(of: &cl::Listed) -> Facts {
    Facts {
        name: of.name.clone(),
        driver: of.driver.clone(),
        unified: of.unified,
        memory: of.memory,
        longest: of.longest,
        rows_at_once: cl::TILE_ROWS,
        floats: true,
        per_channel: false,
        grouped: true,
        halves: false,
        groups: false,
        graphs: &[],
        work_bytes: 0,
        compiles: Some("kernels"),
        kernels: of.kernels.each_ref().map(ToString::to_string),
    }
}

/// What a part has.
#[derive(Clone, Copy)]
enum ClPart {
    /// The number of its buffer, and of its neurons.
    Neurons { buffer: usize, neurons: usize },
    /// The number of a matrix, and whether it is multiplied by activations in 8 bits.
    Matrix { number: usize, grouped: bool },
}

/// An OpenCL device.
pub struct OpenCl {
    device: cl::Device,
    facts: Facts,
    shape: Option<DenseShape>,
    /// How rows lie.
    order: Order,
    /// Neurons on their way, in that order.
    pieces: Vec<Vec<u8>>,
    parts: Vec<Option<ClPart>>,
    /// Kernels in place of those that follow from the driver's facts.
    forced: Option<Kernels>,
}

/// The definition of a format in `rows.cl`.
fn format_of(dtype: DType) -> Option<&'static str> {
    Some(match dtype {
        DType::F32 => "F32",
        DType::F16 => "F16",
        DType::BF16 => "BF16",
        DType::Q8 => "Q8",
        DType::Q4 => "Q4",
        DType::Q4k => "Q4K",
        DType::Mxfp4 | DType::Q8c | DType::Q4c | DType::Block(_) => return None,
    })
}

/// The definition of an activation in `hidden.cl`, and its numbers. GELU without tanh and xIELU are refused before.
fn activation_of(of: Activation) -> (&'static str, ArrayVec<(&'static str, f32), 2>) {
    let mut numbers = ArrayVec::new();
    let name = match of {
        Activation::Relu => "RELU",
        Activation::FatRelu { threshold } => {
            numbers.push(("THRESHOLD", threshold));
            "FATRELU"
        }
        Activation::Relu2 => "RELU2",
        Activation::Silu => "SILU",
        Activation::ClampedSilu { limit } => {
            numbers.push(("LIMIT", limit));
            "CLAMPED_SILU"
        }
        Activation::ClampedSwiglu { limit, alpha } => {
            numbers.extend([("LIMIT", limit), ("ALPHA", alpha)]);
            "CLAMPED_SWIGLU"
        }
        Activation::GeluTanh | Activation::Gelu | Activation::Xielu { .. } => "GELU_TANH",
    };
    (name, numbers)
}

impl OpenCl {
    /// Opens the device of this number. `apart`: treats it as if it had separate memory.
    ///
    /// # Errors
    /// No such device, or the driver's.
    pub fn open(number: usize, apart: bool) -> Result<Self, DeviceError> {
        let device = cl::Device::open(number, apart).map_err(|e| DeviceError {
            device: format!("opencl:{number}"),
            what: e.to_string(),
        })?;
        let mut facts = facts(device.facts());
        if apart {
            facts.name.push_str(" (memory of its own)");
        }
        Ok(Self {
            facts,
            device,
            shape: None,
            order: Order::Rows,
            pieces: Vec::new(),
            parts: Vec::new(),
            forced: None,
        })
    }

    /// From the next [`Backend::prepare`] on, it computes with these kernels: no bit depends on them, which tests see to.
    pub fn force(&mut self, kernels: Kernels) {
        self.forced = Some(kernels);
        self.facts.kernels = [kernels, kernels].map(|kernels| kernels.to_string());
    }

    /// The kernels for rows of a format.
    fn kernels(&self, dtype: DType) -> Kernels {
        let of = &self.device.facts().kernels;
        self.forced.unwrap_or(of[usize::from(dtype.is_grouped())])
    }

    fn failed(&self, what: impl ToString) -> DeviceError {
        DeviceError {
            device: self.facts.name.clone(),
            what: what.to_string(),
        }
    }

    fn shape(&self) -> Result<DenseShape, DeviceError> {
        self.shape.ok_or_else(|| self.failed("is not prepared"))
    }

    fn part(&self, part: Part) -> Result<ClPart, DeviceError> {
        let held = self.parts.get(part.0).copied().flatten();
        held.ok_or_else(|| self.failed("has no such part"))
    }

    /// The buffer of a part, and how many neurons it has.
    fn neurons(&self, part: Part) -> Result<[usize; 2], DeviceError> {
        match self.part(part)? {
            ClPart::Neurons { buffer, neurons } => Ok([buffer, neurons]),
            ClPart::Matrix { .. } => Err(self.failed("has no neurons there")),
        }
    }

    /// Bytes of a part. In tiles clusters have room for all of their neurons.
    fn part_bytes(&self, neurons: usize) -> Result<usize, DeviceError> {
        let neurons = match self.order {
            Order::Rows => neurons,
            Order::Tiles => neurons.next_multiple_of(CLUSTER),
        };
        Ok(neurons * self.shape()?.neuron_bytes() as usize)
    }

    /// A matrix, and the definitions that the kernel of products asks for.
    fn matrix(
        &self,
        dtype: DType,
        cols: usize,
        rows: usize,
    ) -> Result<cl::MatrixSpec, DeviceError> {
        let format = format_of(dtype).ok_or_else(|| self.failed("does not know its format"))?;
        Ok(cl::MatrixSpec {
            options: format!("-w -D {format} -D D={cols}"),
            rows,
            quants: dtype.quants_bytes(cols),
            scales: dtype.scales_bytes(cols),
            scale: scale_bytes(dtype, cols),
            token_bytes: token_bytes(dtype, cols),
        })
    }

    /// The definitions that the kernels ask for.
    fn options(&self, shape: &DenseShape, dtype: &str) -> String {
        let (activation, numbers) = activation_of(shape.kind.activation);
        let mut options = format!(
            "-w -D {dtype} -D {activation} -D D={} -D CLUSTER={CLUSTER} -D MATRICES={} -D AT_ONCE={}",
            shape.d,
            shape.matrices(),
            match self.device.facts().gpu {
                true => AT_ONCE,
                false => 1,
            }
        );
        for (name, value) in numbers {
            // Writing to a string cannot fail.
            let _ = write!(options, " -D {name}=as_float({}u)", value.to_bits());
        }
        for (set, name) in [
            (shape.kind.ungated, " -D UNGATED"),
            (shape.kind.relu_on_up, " -D RELU_ON_UP"),
            (self.device.facts().divides, DIVIDES),
        ] {
            if set {
                options.push_str(name);
            }
        }
        options
    }
}

impl OpenCl {
    fn prepare_ffn(&mut self, shape: &DenseShape) -> Result<(), DeviceError> {
        if let Some(why) = shape.unsupported() {
            return Err(self.failed(why));
        }
        let dtype =
            format_of(shape.dtype).ok_or_else(|| self.failed(format!(
                "does not know {}: pack the model with --quant q8 or q4, or use --device npu or none",
                shape.dtype
            )))?;
        self.parts.clear();
        let spec = cl::Spec {
            options: self.options(shape, dtype),
            d: shape.d,
            cluster: CLUSTER,
            token_bytes: shape.token_bytes(),
            grouped: shape.dtype.is_grouped(),
        };
        let kernels = self.kernels(shape.dtype);
        let prepared = self.device.prepare(&spec, &kernels);
        (self.shape, self.order) = (Some(*shape), kernels.order);
        prepared.map_err(|e| self.failed(e))
    }

    fn begin_clusters(&mut self, work: &Clusters<'_>) -> Result<Ticket, DeviceError> {
        let (shape, [buffer, neurons]) = (self.shape()?, self.neurons(work.part)?);
        let work = cl::Work {
            part: buffer,
            neurons,
            first: work.clusters.start * CLUSTER,
            clusters: work.clusters.len(),
            rows: work.rows(),
            x: match shape.dtype.is_grouped() {
                true => work.quantized.bytes(),
                false => bytemuck::cast_slice(work.x),
            },
            mask: work.mask,
            gate_bias: work.gate_bias,
            up_bias: work.up_bias,
            cut: work.cut,
            end: work.end,
            sums: work.sums,
        };
        let begun = self.device.submit(&work);
        begun.map_err(|e| self.failed(e))?;
        Ok(Ticket::Work)
    }

    fn begin_products(
        &mut self,
        blocks: &[Block],
        input: Input<'_>,
    ) -> Result<Ticket, DeviceError> {
        let mut in_8_bits = false;
        let its = blocks.iter().map(|block| match self.part(block.matrix)? {
            ClPart::Matrix { number, grouped } => {
                in_8_bits = grouped;
                let (matrix, rows) = (number, block.rows.clone());
                Ok(cl::Block { matrix, rows })
            }
            ClPart::Neurons { .. } => Err(self.failed("has no matrix there")),
        });
        let blocks: ArrayVec<_, MATRICES> = its.collect::<Result<_, _>>()?;
        let x = match in_8_bits {
            true => input.quantized.bytes(),
            false => bytemuck::cast_slice(input.x),
        };
        let begun = self.device.multiply(&blocks, input.tokens(), x);
        begun.map_err(|e| self.failed(e))?;
        Ok(Ticket::Work)
    }
}

impl Backend for OpenCl {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn prepare(&mut self, program: &Program) -> Result<(), DeviceError> {
        let prepared = match program {
            Program::Ffn(shape) => return self.prepare_ffn(shape),
            Program::Products { dtype, cols } => {
                let spec = self.matrix(*dtype, *cols, 0)?;
                let kernels = self.kernels(*dtype);
                self.device.prepare_products(&spec, kernels)
            }
            Program::Room(room) => self.device.make_room(&cl::Room {
                rows: room.rows,
                clusters: room.clusters,
                pairs: room.pairs,
            }),
            Program::ProductRoom(room) => self.device.make_product_room(room.input, room.results),
            Program::Groups(_) => return Err(self.failed("computes no groups of experts")),
        };
        prepared.map_err(|e| self.failed(e))
    }

    fn memory(&mut self, of: PartKind) -> Result<Part, DeviceError> {
        let held = match of {
            PartKind::Held(neurons) => {
                let len = self.part_bytes(neurons)?;
                let buffer = (self.device).reserve(len, &|bytes| prefer_huge_pages(bytes));
                buffer.map(|buffer| ClPart::Neurons { buffer, neurons })
            }
            PartKind::Passing(neurons) => {
                let buffer = self.device.reserve_for_streams(self.part_bytes(neurons)?);
                buffer.map(|buffer| ClPart::Neurons { buffer, neurons })
            }
            PartKind::Shared(bytes, neurons) => {
                let len = self.part_bytes(neurons)?;
                let buffer = self.device.share_neurons(bytes, len);
                buffer.map(|buffer| ClPart::Neurons { buffer, neurons })
            }
            PartKind::Matrix(matrix) => {
                let spec = self.matrix(matrix.dtype, matrix.cols, matrix.rows)?;
                let grouped = matrix.dtype.is_grouped();
                let number = self.device.share(&spec, matrix.bytes);
                number.map(|number| ClPart::Matrix { number, grouped })
            }
        };
        let held = held.map_err(|e| self.failed(e))?;
        Ok(put(&mut self.parts, held))
    }

    fn host(&mut self, part: Part) -> Result<Option<HostBytes>, DeviceError> {
        let [buffer, _] = self.neurons(part)?;
        let bytes = self.device.host_bytes(buffer);
        bytes.map_err(|e| self.failed(e))
    }

    fn release(&mut self, part: Part) {
        match self.parts.get_mut(part.0).and_then(Option::take) {
            Some(ClPart::Neurons { buffer, .. }) => self.device.release(buffer),
            Some(ClPart::Matrix { number, .. }) => self.device.give_back(number),
            None => {}
        }
    }

    fn upload(
        &mut self,
        part: Part,
        first: usize,
        neurons: &mut dyn Iterator<Item = NeuronRows<'_>>,
    ) -> Result<Ticket, DeviceError> {
        let (shape, [buffer, all]) = (self.shape()?, self.neurons(part)?);
        let mut pieces = std::mem::take(&mut self.pieces);
        let written = match self.order {
            Order::Rows => {
                let of = InRows { shape, first, all };
                of.fill(&mut pieces, neurons);
                let mut pieces = pieces.iter().zip(0..shape.matrices());
                pieces.try_for_each(|(piece, m)| self.device.write(buffer, of.place(m), piece))
            }
            Order::Tiles => InTiles { shape }.each(&mut pieces, neurons, |i, cluster| {
                let at = (first / CLUSTER + i) * cluster.len();
                self.device.write(buffer, at, cluster)
            }),
        };
        self.pieces = pieces;
        written.map_err(|e| self.failed(e))?;
        Ok(Ticket::Upload(part))
    }

    fn submit(&mut self, work: &Work<'_>) -> Result<Ticket, DeviceError> {
        match work {
            Work::Clusters(work) => self.begin_clusters(work),
            Work::Products(blocks, input) => self.begin_products(blocks, *input),
            Work::Experts(..) => Err(self.failed("computes no groups of experts")),
        }
    }

    fn poll(&mut self, ticket: Ticket) -> Result<bool, DeviceError> {
        match ticket {
            Ticket::Work => self.device.is_done().map_err(|e| self.failed(e)),
            // Work on them waits for them by itself.
            Ticket::Upload(_) => Ok(true),
        }
    }

    fn take(&mut self, ticket: Ticket, out: &mut [f32]) -> Result<Taken, DeviceError> {
        let taken = match ticket {
            Ticket::Work => self.device.take(out),
            Ticket::Upload(part) => self.device.arrived(self.neurons(part)?[0]),
        };
        let taken = taken.map_err(|e| self.failed(e))?;
        Ok(Taken {
            fired: taken.fired,
            took: Duration::from_nanos(taken.nanoseconds),
            ..Taken::default()
        })
    }

    fn clear(&mut self) {
        self.parts.clear();
        self.device.clear();
    }
}
