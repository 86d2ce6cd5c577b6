//! A simulated device: the CPU computes its sums while the program's [clock](emberflow_storage::clock)
//! stands still; then they arrive when published measurements of the real processor say so.
//!
//! ```text
//! alone      Gate + Up + Down by the processor's curve + synchronisation
//! beside     the same, but not faster than the memory that a busy CPU leaves
//! attention  the products by the curve, keys and values by the memory's speed, one synchronisation;
//!            of spans of several rows scores and mixes are products by the curve too
//! arrival    while the CPU computes its own clusters work goes on at the second rate, then at the first
//! ```
//!
//! The disk has to be simulated too, since a real one would read on while the clock stands still. The
//! compute threads are those of this machine; [`DeviceChoice`](super::DeviceChoice) sets the clock's rate so
//! that they read memory as fast as the phone's.

use std::time::Duration;

use emberflow_storage::clock::{self, Moment};

use super::attend::{
    Attend, AttendSpan, Attended, AttentionLayer, AttentionRoom, AttentionShape, KvMemory, by_parts,
};
use super::cpu::put;
use super::{
    Block, CpuDevice, Dense, DenseShape, DeviceError, Facts, HostBytes, Input, NeuronRows, Part,
    ProductRoom, Room, SharedMatrix, Taken, Ticket, Work,
};
use crate::split::snapdragon::{GPU, MEMORY, MEMORY_OF_CPU, MEMORY_OF_ONE, NPU, SYNC};
use crate::split::{Curve, Measured, Product};
use crate::store::regions::CLUSTER;

/// A processor with published times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Simulated {
    /// The NPU of the Snapdragon 8 Gen 3.
    Npu8Gen3,
    /// Its GPU.
    Gpu8Gen3,
}

impl Simulated {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Npu8Gen3, Self::Gpu8Gen3];

    /// Its name after `sim:`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Npu8Gen3 => "8gen3",
            Self::Gpu8Gen3 => "8gen3-gpu",
        }
    }

    fn curve(self) -> &'static Measured {
        match self {
            Self::Npu8Gen3 => &NPU,
            Self::Gpu8Gen3 => &GPU,
        }
    }

    /// Seconds for a piece of work: alone, and beside a busy CPU. Products with the order of operands that
    /// suits the processor (HeteroInfer §4.1).
    fn seconds(self, shape: &DenseShape, neurons: usize, n: usize) -> [f64; 2] {
        let d = shape.d;
        let inward = Product {
            rows: neurons,
            cols: d,
            n,
        };
        let outward = Product {
            rows: d,
            cols: neurons,
            n,
        };
        let products = (1..shape.matrices()).map(|_| inward).chain([outward]);
        self.times(products, neurons as f64 * shape.neuron_bytes() as f64)
    }

    /// Seconds for the keys and values of a span's rows, in the same two cases. A row alone takes the time to read
    /// them; several rows take products besides, whose weights are the keys, then the values.
    fn over_pages(self, shape: &AttentionShape, span: &AttendSpan, window: usize) -> [f64; 2] {
        let end = span.first + span.rows;
        let seen = match window {
            0 => end,
            window => end.min(window + span.rows - 1),
        };
        let mix = Product {
            rows: seen * shape.kv_heads,
            cols: shape.head_dim,
            n: span.rows * (shape.heads / shape.kv_heads),
        };
        let products = match span.rows {
            1 => 0.0,
            _ => 2.0 * self.curve().seconds(mix),
        };
        let read = shape.read_bytes(seen);
        [MEMORY_OF_ONE, MEMORY - MEMORY_OF_CPU].map(|speed| products.max(read / speed))
    }

    /// As `seconds`, of products of `bytes` of weights.
    fn times(self, products: impl Iterator<Item = Product>, bytes: f64) -> [f64; 2] {
        let alone: f64 = products.map(|of| self.curve().seconds(of)).sum();
        let beside = alone.max(bytes / (MEMORY - MEMORY_OF_CPU));
        [alone + SYNC, beside + SYNC]
    }
}

/// Work that is under way.
struct Underway {
    submitted: Moment,
    fired: u64,
    alone: f64,
    beside: f64,
}

impl Underway {
    /// Seconds from submission to arrival, if the CPU worked for the first `busy` of them.
    fn arrival(&self, busy: f64) -> f64 {
        match busy >= self.beside {
            true => self.beside,
            false => busy + (1.0 - busy / self.beside) * self.alone,
        }
    }
}

/// A simulated device.
pub struct SimDevice {
    of: Simulated,
    facts: Facts,
    cpu: CpuDevice,
    shape: Option<DenseShape>,
    /// Neurons of each part.
    parts: Vec<usize>,
    sums: Vec<f32>,
    matrices: Vec<Option<SharedMatrix>>,
    products: Vec<f32>,
    attention: Option<AttentionShape>,
    /// Their matrices and windows.
    layers: Vec<([usize; 4], usize)>,
    attended: Vec<f32>,
    underway: Option<Underway>,
}

impl SimDevice {
    /// A processor that shares the machine's memory.
    pub fn new(of: Simulated) -> Self {
        let cpu = CpuDevice::new();
        Self {
            of,
            facts: Facts {
                name: format!("sim:{}", of.name()),
                driver: "simulated by HeteroInfer, Table 3".into(),
                simulated: true,
                ..cpu.facts().clone()
            },
            cpu,
            shape: None,
            parts: Vec::new(),
            sums: Vec::new(),
            matrices: Vec::new(),
            products: Vec::new(),
            attention: None,
            layers: Vec::new(),
            attended: Vec::new(),
            underway: None,
        }
    }

    fn failed(&self, what: &str) -> DeviceError {
        DeviceError {
            device: self.facts.name.clone(),
            what: what.into(),
        }
    }
}

impl SimDevice {
    /// Waits until the work under way arrives.
    fn arrive(&mut self) -> Result<Taken, DeviceError> {
        let missing = self.failed("has no such work");
        let underway = self.underway.take().ok_or(missing)?;
        let busy = underway.submitted.elapsed().as_secs_f64();
        let took = Duration::from_secs_f64(underway.arrival(busy));
        clock::wait_until(underway.submitted, took);
        Ok(Taken {
            fired: underway.fired,
            took,
        })
    }
}

impl Dense for SimDevice {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn prepare(&mut self, shape: &DenseShape) -> Result<(), DeviceError> {
        self.clear();
        self.shape = Some(*shape);
        self.cpu.prepare(shape)
    }

    fn make_room(&mut self, room: &Room) -> Result<(), DeviceError> {
        let shape = self.shape.ok_or_else(|| self.failed("is not prepared"))?;
        self.sums = vec![0.0; room.pairs * shape.d];
        self.cpu.make_room(room)
    }

    fn clear(&mut self) {
        self.underway = None;
        self.parts.clear();
        self.matrices.clear();
        (self.sums, self.products) = (Vec::new(), Vec::new());
        self.attention = None;
        self.attended = Vec::new();
        self.layers.clear();
        self.cpu.clear();
    }

    fn reserve(&mut self, neurons: usize) -> Result<Part, DeviceError> {
        self.parts.push(neurons);
        self.cpu.reserve(neurons)
    }

    fn upload(
        &mut self,
        part: Part,
        first: usize,
        neurons: &mut dyn Iterator<Item = NeuronRows<'_>>,
    ) -> Result<(), DeviceError> {
        self.cpu.upload(part, first, neurons)
    }

    fn reserve_for_streams(&mut self, neurons: usize) -> Result<Part, DeviceError> {
        self.parts.push(neurons);
        self.cpu.reserve_for_streams(neurons)
    }

    fn host_bytes(&mut self, part: Part) -> Result<Option<HostBytes>, DeviceError> {
        self.cpu.host_bytes(part)
    }

    fn submit(&mut self, work: &Work<'_>) -> Result<Ticket, DeviceError> {
        let submitted = Moment::now();
        let pause = clock::pause();
        let shape = self.shape.ok_or_else(|| self.failed("is not prepared"))?;
        let part = self.parts.get(work.part.0).copied();
        let all = part.ok_or_else(|| self.failed("has no such part"))?;
        let ticket = self.cpu.submit(work)?;
        let len = work.sums.vectors(work.clusters.len(), work.rows()) * shape.d;
        if self.sums.len() < len {
            return Err(self.failed("has no room for so much work"));
        }
        let taken = self.cpu.take(ticket, &mut self.sums[..len])?;
        let end = (work.clusters.end * CLUSTER).min(all).min(work.end);
        let neurons = end.saturating_sub(work.clusters.start * CLUSTER);
        let [alone, beside] = self.of.seconds(&shape, neurons, work.rows());
        self.underway = Some(Underway {
            submitted,
            fired: taken.fired,
            alone,
            beside,
        });
        drop(pause);
        Ok(ticket)
    }

    fn poll(&mut self, _ticket: Ticket) -> Result<bool, DeviceError> {
        let missing = self.failed("has no such work");
        let underway = self.underway.as_ref().ok_or(missing)?;
        Ok(underway.submitted.elapsed().as_secs_f64() >= underway.beside)
    }

    fn take(&mut self, _ticket: Ticket, out: &mut [f32]) -> Result<Taken, DeviceError> {
        let sums = self.sums.get(..out.len());
        out.copy_from_slice(sums.ok_or_else(|| self.failed("was asked for other sums"))?);
        self.arrive()
    }

    fn share(&mut self, matrix: SharedMatrix) -> Result<usize, DeviceError> {
        put(&mut self.matrices, matrix.clone());
        self.cpu.share(matrix)
    }

    fn give_back(&mut self, matrix: usize) {
        self.matrices[matrix] = None;
        self.cpu.give_back(matrix);
    }

    fn make_product_room(&mut self, room: &ProductRoom) -> Result<(), DeviceError> {
        self.products = vec![0.0; room.results];
        self.cpu.make_product_room(room)
    }

    fn multiply(&mut self, blocks: &[Block], input: Input<'_>) -> Result<Ticket, DeviceError> {
        let submitted = Moment::now();
        let pause = clock::pause();
        let n = input.tokens();
        let len = blocks.iter().map(|block| block.rows.len() * n).sum();
        let Some(out) = self.products.get_mut(..len) else {
            return Err(self.failed("has no room for so many products"));
        };
        let ticket = self.cpu.multiply(blocks, input)?;
        self.cpu.take_products(ticket, out)?;
        let products = blocks.iter().map(|block| Product {
            rows: block.rows.len(),
            cols: input.n(),
            n,
        });
        let bytes = blocks.iter().filter_map(|block| {
            let matrix = self.matrices[block.matrix].as_ref()?;
            Some(block.rows.len() * matrix.dtype.row_bytes(matrix.cols))
        });
        let bytes: usize = bytes.sum();
        let [alone, beside] = self.of.times(products, bytes as f64);
        self.underway = Some(Underway {
            submitted,
            fired: 0,
            alone,
            beside,
        });
        drop(pause);
        Ok(ticket)
    }

    fn prepare_attention(
        &mut self,
        shape: &AttentionShape,
        memory: &KvMemory,
    ) -> Result<(), DeviceError> {
        self.attention = Some(*shape);
        self.layers.clear();
        self.cpu.prepare_attention(shape, memory)
    }

    fn make_attention_room(&mut self, room: &AttentionRoom) -> Result<(), DeviceError> {
        let shape = self
            .attention
            .ok_or_else(|| self.failed("is not prepared"))?;
        self.attended = Vec::new();
        self.attended = vec![0.0; room.rows * (shape.d + 2 * shape.kv_width())];
        self.cpu.make_attention_room(room)
    }

    fn share_attention(&mut self, layer: AttentionLayer) -> Result<usize, DeviceError> {
        self.layers.push((layer.matrices, layer.window));
        self.cpu.share_attention(layer)
    }

    fn attend(&mut self, work: &Attend<'_>) -> Result<Ticket, DeviceError> {
        let submitted = Moment::now();
        let pause = clock::pause();
        let (Some(shape), Some(&(matrices, window))) =
            (self.attention, self.layers.get(work.layer))
        else {
            return Err(self.failed("has no such layer"));
        };
        let n = work.rows();
        let (out, kv) = (n * shape.d, n * shape.kv_width());
        let ticket = self.cpu.attend(work)?;
        let taken = match self.attended.get_mut(..out + 2 * kv) {
            Some(attended) => self.cpu.take(ticket, attended),
            None => Err(self.failed("has no room for so many rows")),
        };
        taken?;
        let matrices = matrices.map(|number| self.matrices.get(number).cloned().flatten());
        let matrices = || matrices.iter().flatten();
        let products = matrices().map(|m| Product {
            rows: m.rows,
            cols: m.cols,
            n,
        });
        let weights: usize = matrices().map(|m| m.rows * m.dtype.row_bytes(m.cols)).sum();
        let [mut alone, mut beside] = self.of.times(products, weights as f64);
        for span in work.spans {
            let [of_alone, of_beside] = self.of.over_pages(&shape, span, window);
            alone += of_alone;
            beside += of_beside;
        }
        self.underway = Some(Underway {
            submitted,
            fired: 0,
            alone,
            beside,
        });
        drop(pause);
        Ok(ticket)
    }

    fn take_attention(
        &mut self,
        _ticket: Ticket,
        to: Attended<'_>,
    ) -> Result<Duration, DeviceError> {
        let len = to.out.len() + to.keys.len() + to.values.len();
        let all = self.attended.get(..len);
        by_parts(
            all.ok_or_else(|| self.failed("was asked for other rows"))?,
            to,
        );
        Ok(self.arrive()?.took)
    }

    fn take_products(&mut self, _ticket: Ticket, out: &mut [f32]) -> Result<Duration, DeviceError> {
        let products = self.products.get(..out.len());
        out.copy_from_slice(products.ok_or_else(|| self.failed("was asked for other products"))?);
        Ok(self.arrive()?.took)
    }
}

#[cfg(test)]
mod tests {
    use emberflow_kernels::DType;
    use emberflow_models::config::{Activation, FfnKind};

    use super::*;

    fn shape() -> DenseShape {
        DenseShape {
            dtype: DType::Q4,
            d: 4096,
            kind: FfnKind {
                activation: Activation::Relu,
                relu_on_up: false,
                ungated: false,
            },
        }
    }

    #[test]
    fn times_are_the_published_ones() {
        // Table 3: the NPU takes 693 us for 4096 x 4096 and a token, and 912 for 128.
        let [alone, _] = Simulated::Npu8Gen3.seconds(&shape(), 4096, 1);
        assert!((alone - 3.0 * 693e-6 - SYNC).abs() < 1e-9, "{alone}");
        let [alone, _] = Simulated::Npu8Gen3.seconds(&shape(), 4096, 128);
        assert!((alone - 3.0 * 912e-6 - SYNC).abs() < 1e-9, "{alone}");
        // The GPU alone is faster than the memory that a busy CPU leaves.
        let neurons = 14_336;
        let [alone, beside] = Simulated::Gpu8Gen3.seconds(&shape(), neurons, 1);
        let bytes = (neurons as u64 * shape().neuron_bytes()) as f64;
        assert!(alone < beside && (beside - SYNC - bytes / 15.7e9).abs() < 1e-9);
    }

    #[test]
    fn stages_of_32_tokens_take_the_same_time_on_the_npu() {
        let of = |rows| Simulated::Npu8Gen3.seconds(&shape(), 4096, rows)[0];
        assert_eq!(of(97), of(128));
        assert!(of(129) > of(128));
        let of = |rows| Simulated::Gpu8Gen3.seconds(&shape(), 4096, rows)[0];
        assert!(of(97) < of(128));
    }

    #[test]
    fn a_row_reads_keys_and_values_and_several_multiply_by_them() {
        let shape = AttentionShape {
            d: 4096,
            heads: 32,
            kv_heads: 8,
            head_dim: 128,
            rotary: 64,
            kv: DType::F16,
            page: 256,
            eps: 1e-5,
            scale: 1.0,
            clip: None,
        };
        let npu = Simulated::Npu8Gen3;
        let times = |first, rows, window| {
            let pages = Vec::new();
            npu.over_pages(&shape, &AttendSpan { pages, first, rows }, window)
        };
        // 2 bytes of 8 heads of 128 elements, of keys and of values, for each position.
        let [alone, beside] = times(1023, 1, 0);
        assert!((alone - 1024.0 * 4096.0 / MEMORY_OF_ONE).abs() < 1e-12);
        assert!(beside > alone);
        assert_eq!(times(1023, 1, 256), times(255, 1, 0));
        let weights = Product {
            rows: 512 * 8,
            cols: 128,
            n: 32 * 4,
        };
        let of_rows = 2.0 * NPU.seconds(weights);
        assert!((times(480, 32, 0)[0] - of_rows).abs() < 1e-12);
        // The first row sees as many as the window has, and each other one more.
        assert_eq!(times(480, 32, 100), times(99, 32, 0));
    }

    #[test]
    fn what_a_busy_cpu_delays_arrives_between_the_two_times() {
        let work = Underway {
            submitted: Moment::now(),
            fired: 0,
            alone: 1.0,
            beside: 2.0,
        };
        assert_eq!(work.arrival(0.0), 1.0);
        assert_eq!(work.arrival(1.0), 1.5);
        assert_eq!(work.arrival(5.0), 2.0);
    }
}
