//! OpenCL devices.

use std::fmt::Write;
use std::time::Duration;

use emberflow_kernels::DType;
use emberflow_models::config::Activation;
use emberflow_opencl as cl;
use emberflow_storage::prefer_huge_pages;

use super::order::{InRows, InTiles};
use super::{
    Block, Dense, DenseShape, DeviceError, Facts, HostBytes, Input, Kernels, NeuronRows, Order,
    Part, ProductRoom, Room, SharedMatrix, Taken, Ticket, Work, token_bytes,
};
use crate::cluster::CLUSTER;

/// Divisions and square roots are rounded correctly.
const DIVIDES: &str = " -cl-fp32-correctly-rounded-divide-sqrt";

/// Neurons whose Down rows an item of a graphics processor reads at once. A processor has others ahead by itself.
const AT_ONCE: usize = 8;

/// What a device is.
pub(super) fn facts(of: &cl::Listed) -> Facts {
    Facts {
        name: of.name.clone(),
        driver: of.driver.clone(),
        unified: of.unified,
        memory: of.memory,
        longest: of.longest,
    }
}

/// Neurons of a bank.
struct Bank {
    /// Number of its buffer.
    buffer: usize,
    neurons: usize,
}

/// An OpenCL device.
pub(super) struct OpenCl {
    device: cl::Device,
    facts: Facts,
    shape: Option<DenseShape>,
    /// How neurons lie.
    order: Order,
    /// Neurons on their way, in that order.
    pieces: Vec<Vec<u8>>,
    banks: Vec<Bank>,
    /// Whether each shared matrix is multiplied by activations in 8 bits.
    grouped: Vec<bool>,
    tickets: u64,
}

/// The definition of a format in `rows.cl`.
fn format_of(dtype: DType) -> Option<&'static str> {
    Some(match dtype {
        DType::F32 => "F32",
        DType::F16 => "F16",
        DType::BF16 => "BF16",
        DType::Q8 => "Q8",
        DType::Q4 => "Q4",
        DType::Q4k | DType::Mxfp4 => return None,
    })
}

impl OpenCl {
    /// Opens the device of this number. With `apart` it is taken to have a memory of its own, whatever it says.
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
            banks: Vec::new(),
            grouped: Vec::new(),
            tickets: 0,
        })
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

    fn bank(&self, part: Part) -> Result<&Bank, DeviceError> {
        let bank = self.banks.get(part.0);
        bank.ok_or_else(|| self.failed("has no such part"))
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
            scales: dtype.row_bytes(cols) - dtype.quants_bytes(cols),
            token_bytes: token_bytes(dtype, cols),
        })
    }

    /// The definitions that the kernels ask for.
    fn options(&self, shape: &DenseShape, dtype: &str) -> String {
        let activation = match shape.kind.activation {
            Activation::Relu => "RELU",
            Activation::FatRelu { .. } => "FATRELU",
            Activation::Relu2 => "RELU2",
            Activation::Silu => "SILU",
            Activation::GeluTanh | Activation::Gelu | Activation::ClampedSwiglu { .. } => {
                "GELU_TANH"
            }
        };
        let mut options = format!(
            "-w -D {dtype} -D {activation} -D D={} -D CLUSTER={CLUSTER} -D MATRICES={} -D AT_ONCE={}",
            shape.d,
            shape.matrices(),
            match self.device.facts().gpu {
                true => AT_ONCE,
                false => 1,
            }
        );
        if let Activation::FatRelu { threshold } = shape.kind.activation {
            // Writing to a string cannot fail.
            let _ = write!(options, " -D THRESHOLD=as_float({}u)", threshold.to_bits());
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

impl Dense for OpenCl {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn prepare(&mut self, shape: &DenseShape) -> Result<(), DeviceError> {
        if let Some(why) = shape.unsupported() {
            return Err(self.failed(why));
        }
        let dtype =
            format_of(shape.dtype).ok_or_else(|| self.failed("does not know its format"))?;
        self.banks.clear();
        let spec = cl::Spec {
            options: self.options(shape, dtype),
            d: shape.d,
            cluster: CLUSTER,
            token_bytes: shape.token_bytes(),
            grouped: shape.dtype.is_grouped(),
        };
        let prepared = self.device.prepare(&spec);
        self.shape = Some(*shape);
        prepared.map_err(|e| self.failed(e))
    }

    fn kernels(&self, dtype: DType) -> Kernels {
        self.device.kernels(dtype.is_grouped())
    }

    fn set_kernels(&mut self, kernels: &Kernels) -> Result<(), DeviceError> {
        let set = self.device.set_kernels(kernels);
        set.map_err(|e| self.failed(e))?;
        if self.order != kernels.order {
            self.order = kernels.order;
            self.banks.clear();
        }
        Ok(())
    }

    fn make_room(&mut self, room: &Room) -> Result<(), DeviceError> {
        let room = cl::Room {
            rows: room.rows,
            clusters: room.clusters,
            pairs: room.pairs,
        };
        let made = self.device.make_room(&room);
        made.map_err(|e| self.failed(e))
    }

    fn clear(&mut self) {
        self.banks.clear();
        self.grouped.clear();
        self.device.clear();
    }

    fn reserve(&mut self, neurons: usize) -> Result<Part, DeviceError> {
        let len = self.part_bytes(neurons)?;
        let buffer = (self.device).reserve(len, &|bytes| prefer_huge_pages(bytes));
        let buffer = buffer.map_err(|e| self.failed(e))?;
        self.banks.push(Bank { buffer, neurons });
        Ok(Part(self.banks.len() - 1))
    }

    fn reserve_for_streams(&mut self, neurons: usize) -> Result<Part, DeviceError> {
        let len = self.part_bytes(neurons)?;
        let buffer = self.device.reserve_for_streams(len);
        let buffer = buffer.map_err(|e| self.failed(e))?;
        self.banks.push(Bank { buffer, neurons });
        Ok(Part(self.banks.len() - 1))
    }

    fn arrived(&mut self, part: Part) -> Result<Duration, DeviceError> {
        let took = self.device.arrived(self.bank(part)?.buffer);
        took.map(Duration::from_nanos).map_err(|e| self.failed(e))
    }

    fn upload(
        &mut self,
        part: Part,
        first: usize,
        neurons: &mut dyn Iterator<Item = NeuronRows<'_>>,
    ) -> Result<(), DeviceError> {
        let shape = self.shape()?;
        let Bank {
            buffer,
            neurons: all,
        } = *self.bank(part)?;
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
        written.map_err(|e| self.failed(e))
    }

    fn host_bytes(&mut self, part: Part) -> Result<Option<HostBytes>, DeviceError> {
        let buffer = self.bank(part)?.buffer;
        let bytes = self.device.host_bytes(buffer);
        bytes.map_err(|e| self.failed(e))
    }

    fn prepare_products(
        &mut self,
        dtype: DType,
        cols: usize,
        kernels: &Kernels,
    ) -> Result<(), DeviceError> {
        let spec = self.matrix(dtype, cols, 0)?;
        let prepared = self.device.prepare_products(&spec, *kernels);
        prepared.map_err(|e| self.failed(e))
    }

    fn share(&mut self, matrix: SharedMatrix) -> Result<usize, DeviceError> {
        let (dtype, cols) = (matrix.dtype, matrix.cols);
        let spec = self.matrix(dtype, cols, matrix.rows)?;
        let shared = self.device.share(&spec, matrix.bytes);
        let number = shared.map_err(|e| self.failed(e))?;
        self.grouped
            .resize(self.grouped.len().max(number + 1), false);
        self.grouped[number] = dtype.is_grouped();
        Ok(number)
    }

    fn give_back(&mut self, matrix: usize) {
        self.device.give_back(matrix);
    }

    fn make_product_room(&mut self, room: &ProductRoom) -> Result<(), DeviceError> {
        let made = self.device.make_product_room(room.input, room.results);
        made.map_err(|e| self.failed(e))
    }

    fn multiply(&mut self, blocks: &[Block], input: Input<'_>) -> Result<Ticket, DeviceError> {
        let grouped = blocks.first().and_then(|b| self.grouped.get(b.matrix));
        let x = match grouped {
            Some(true) => input.quantized.bytes(),
            _ => bytemuck::cast_slice(input.x),
        };
        let begun = self.device.multiply(blocks, input.tokens(), x);
        begun.map_err(|e| self.failed(e))?;
        self.tickets += 1;
        Ok(Ticket(self.tickets))
    }

    fn take_products(&mut self, _ticket: Ticket, out: &mut [f32]) -> Result<Duration, DeviceError> {
        let took = self.device.take_products(out);
        took.map(Duration::from_nanos).map_err(|e| self.failed(e))
    }

    fn submit(&mut self, work: &Work<'_>) -> Result<Ticket, DeviceError> {
        let shape = self.shape()?;
        let bank = self.bank(work.part)?;
        let work = cl::Work {
            part: bank.buffer,
            neurons: bank.neurons,
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
        self.tickets += 1;
        Ok(Ticket(self.tickets))
    }

    fn poll(&mut self, _ticket: Ticket) -> Result<bool, DeviceError> {
        self.device.is_done().map_err(|e| self.failed(e))
    }

    fn take(&mut self, _ticket: Ticket, out: &mut [f32]) -> Result<Taken, DeviceError> {
        let taken = self.device.take(out).map_err(|e| self.failed(e))?;
        Ok(Taken {
            fired: taken.fired,
            took: Duration::from_nanos(taken.nanoseconds),
        })
    }
}
