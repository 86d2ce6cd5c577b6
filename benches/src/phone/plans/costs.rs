//! Times of single pieces of work on a phone, and graphs of them.

use emberflow_devices::DeviceNumbers;
use emberflow_engine::planner::Shape;
use emberflow_engine::planner::machine::MachineNumbers;
use emberflow_engine::planner::rates::{KernelRates, ThreadRates};
use emberflow_storage::profile::Pattern;

use super::super::schedule::{Bounds, Operation, Planned, Processors, Slot, makespan, simulate};

/// Index of the CPU's threads.
pub const CPU: usize = 0;
/// Index of the NPU.
pub const NPU: usize = 1;
/// Index of the storage device.
pub const FLASH: usize = 2;

/// A phone's processors.
pub const NAMES: &[&str] = &["CPU", "NPU", "flash"];

/// Elements of a matrix and its rows that are read.
#[derive(Clone, Copy)]
pub struct Rows {
    /// Rows.
    pub count: f64,
    /// Bytes of all of them.
    pub bytes: f64,
    /// Whether they are contiguous: single neurons are not.
    pub contiguous: bool,
}

/// A piece of work.
#[derive(Clone, Copy)]
pub struct Work {
    /// Seconds if nothing else uses the memory.
    pub seconds: f64,
    /// Whether memory is what limits it.
    pub by_memory: bool,
}

impl Work {
    /// Work that memory does not limit.
    pub fn apart(seconds: f64) -> Self {
        Self {
            seconds,
            by_memory: false,
        }
    }

    /// The same with so many seconds more.
    pub fn and(self, seconds: f64) -> Self {
        Self {
            seconds: self.seconds + seconds,
            ..self
        }
    }
}

/// Reads of neurons.
#[derive(Clone, Copy, Default)]
pub struct Read {
    /// Seconds of the storage device.
    pub seconds: f64,
    /// Seconds in which the CPU compares checksums.
    pub checking: f64,
}

impl Read {
    /// Both together.
    pub fn and(self, other: Self) -> Self {
        Self {
            seconds: self.seconds + other.seconds,
            checking: self.checking + other.checking,
        }
    }
}

/// Pieces of work of a model on a phone.
pub struct Costs<'a> {
    /// The model's sizes.
    pub shape: &'a Shape,
    /// The phone.
    pub machine: &'a MachineNumbers,
    /// Its NPU, if that is used.
    pub npu: Option<&'a DeviceNumbers>,
    /// GB/s of the CPU and of the NPU alone.
    pub gbs: [f64; 2],
}

impl Costs<'_> {
    fn rates(&self) -> &ThreadRates {
        &self.machine.rates.threads[0]
    }

    fn kernel(&self) -> &KernelRates {
        &self.rates().kernels[0]
    }

    /// The device.
    pub fn device(&self) -> Option<&DeviceNumbers> {
        self.npu
    }

    /// Rows and `tokens` tokens on the CPU.
    pub fn product(&self, rows: Rows, tokens: usize) -> Work {
        let kernel = self.kernel();
        let speed = match rows.contiguous {
            true => &kernel.dot,
            false => &kernel.neuron,
        };
        let reading = speed.ns(rows.count, rows.bytes, f64::INFINITY);
        let elements = rows.count * self.shape.d as f64 * tokens as f64;
        let computing = match tokens {
            0 | 1 => 0.0,
            _ => elements / kernel.gemm_at(tokens as f64),
        };
        Work {
            seconds: reading.max(computing) / 1e9,
            by_memory: reading >= computing,
        }
    }

    /// A layer's mixer for `tokens` tokens after `before` others.
    pub fn mixer(&self, tokens: usize, before: usize) -> Work {
        let s = self.shape;
        let rows = Rows {
            count: s.attention_rows,
            bytes: s.attention_bytes,
            contiguous: true,
        };
        let pairs = tokens as f64 * (before as f64 + tokens as f64 / 2.0);
        let keys = pairs * s.kv_bytes / self.rates().read.at(f64::INFINITY);
        let elements = 8.0 * (s.d * tokens) as f64 * self.machine.rates.element_ns;
        let own = keys + elements + 6.0 * self.rates().section_ns;
        self.product(rows, tokens).and(own / 1e9)
    }

    /// Gates of `neurons` neurons for `tokens` tokens.
    pub fn gates(&self, neurons: f64, tokens: usize) -> Work {
        let products = self.product(
            Rows {
                count: neurons,
                bytes: neurons * self.shape.gate_len,
                contiguous: true,
            },
            tokens,
        );
        let naming = neurons * self.machine.rates.name_ns / self.threads();
        products.and((naming + self.rates().section_ns) / 1e9)
    }

    /// Sums of `neurons` firing neurons for `tokens` tokens.
    pub fn sums(&self, neurons: f64, tokens: usize) -> Work {
        let products = self.product(
            Rows {
                count: 2.0 * neurons,
                bytes: neurons * self.shape.rest_len,
                contiguous: false,
            },
            tokens,
        );
        products.and(self.rates().section_ns / 1e9)
    }

    /// Seconds of a layer that nothing else explains, and of lookups of `found` and `missed` neurons.
    pub fn bookkeeping(&self, found: usize, missed: usize) -> f64 {
        let rates = &self.machine.rates;
        let lookups = found as f64 * rates.lookup_ns + missed as f64 * rates.replace_ns;
        (self.rates().layer_ns + lookups) / 1e9
    }

    /// The head for one token.
    pub fn head(&self) -> Work {
        let s = self.shape;
        let rows = Rows {
            count: s.vocab as f64,
            bytes: (s.vocab * s.head.row_bytes(s.d)) as f64,
            contiguous: true,
        };
        self.product(rows, 1)
    }

    /// Seconds of a layer's cache for neurons that are admitted.
    pub fn admitting(&self, neurons: f64) -> f64 {
        neurons * self.machine.rates.replace_ns / 1e9
    }

    /// Reads of `missed` neurons of a cluster: one by one, which all threads check, or all of it where that is faster, which
    /// one thread checks.
    pub fn picks(&self, missed: f64) -> Read {
        if missed <= 0.0 {
            return Read::default();
        }
        let (storage, s) = (&self.machine.storage, self.shape);
        let single = missed * storage.read_ns(s.rest_read, Pattern::Random) / 1e9;
        let whole = storage.read_ns(s.cluster_read, Pattern::Sequential) / 1e9;
        match single < whole {
            true => Read {
                seconds: single,
                checking: self.checking(missed * s.rest_read as f64) / self.threads(),
            },
            false => Read {
                seconds: whole,
                checking: self.checking(s.cluster_read as f64),
            },
        }
    }

    /// A whole cluster that passes through a stream buffer.
    pub fn streamed(&self) -> Read {
        let len = self.shape.cluster_read;
        let stream = &self.machine.stream;
        Read {
            seconds: stream.read_ns(len, Pattern::Sequential) / 1e9,
            checking: self.checking(len as f64) / self.threads(),
        }
    }

    /// Seconds of one thread.
    fn checking(&self, bytes: f64) -> f64 {
        bytes / self.machine.rates.check_gb_per_s / 1e9
    }

    fn threads(&self) -> f64 {
        f64::from(self.rates().threads)
    }
}

/// Operations of a pass, in the order in which each processor runs its own.
#[derive(Default)]
pub struct Graph {
    /// The operations.
    pub operations: Vec<Operation>,
    gbs: [f64; 2],
}

impl Graph {
    /// An empty one.
    pub fn new(costs: &Costs<'_>) -> Self {
        Self {
            operations: Vec::new(),
            gbs: costs.gbs,
        }
    }

    /// Appends an operation; returns its number.
    pub fn push(&mut self, kind: &'static str, on: usize, work: Work, after: &[usize]) -> usize {
        let draws = self.gbs.get(on).copied().filter(|_| work.by_memory);
        self.operations.push(Operation {
            kind,
            on,
            seconds: work.seconds,
            draws: draws.unwrap_or(0.0),
            after: after.to_vec(),
        });
        self.operations.len() - 1
    }

    /// When each runs, with so many GB/s of all processors together.
    pub fn slots(&self, bandwidth: f64) -> Vec<Slot> {
        let order: Vec<usize> = (0..self.operations.len()).collect();
        let processors = Processors {
            names: NAMES,
            bandwidth,
        };
        let mut planned = Planned::new(&self.operations, NAMES.len(), &order);
        simulate(&self.operations, &processors, &mut planned)
    }

    /// Seconds of all of them.
    pub fn seconds(&self, bandwidth: f64) -> f64 {
        makespan(&self.slots(bandwidth))
    }

    /// The largest lower bound of any order's seconds.
    pub fn bound(&self) -> f64 {
        Bounds::of(&self.operations, NAMES.len()).largest()
    }
}
