//! The CPU as a device, one neuron and row after the other with the ordinary kernels. It is the reference of
//! [`check`](super::check), and stands in for a device where there is none.

use std::ops::Range;

use emberflow_kernels::{Activations, Cpu, Row};

use super::host::{Arithmetic, HostDevice, Task, Tokens};
use super::{Facts, Program, SharedMatrix};
use emberflow_engine::lane::CLUSTER;
use emberflow_engine::lane::{Gating, of_up};

/// The CPU as a device.
pub type CpuDevice = HostDevice<OneByOne>;

/// One (neuron, row) pair after the other.
pub struct OneByOne(pub(super) Cpu);

impl CpuDevice {
    /// With as much memory as the machine has.
    pub fn new() -> Self {
        let facts = Facts {
            name: "cpu".into(),
            driver: Cpu::detect().name().into(),
            unified: true,
            memory: u64::MAX,
            longest: u64::MAX,
            rows_at_once: 1,
            floats: true,
            per_channel: true,
            grouped: true,
            halves: false,
            groups: true,
            graphs: &[],
            work_bytes: 0,
            compiles: None,
            kernels: ["the CPU's", "the CPU's"].map(String::from),
        };
        Self::computing(facts, OneByOne(Cpu::detect()))
    }
}

impl Default for CpuDevice {
    fn default() -> Self {
        Self::new()
    }
}

impl Arithmetic for OneByOne {
    fn prepare(&mut self, _: &Program) -> Result<(), String> {
        Ok(())
    }

    fn hidden(&mut self, task: &Task, hidden: &mut Vec<f32>) -> Result<u64, String> {
        let mut fired = 0;
        for n in 0..task.neurons() {
            for row in 0..task.rows() {
                let gate = match task.wants(n, row) {
                    true => self.gate(task, n, row),
                    false => 0.0,
                };
                fired += u64::from(gate != 0.0);
                hidden.push(match gate != 0.0 {
                    true => self.hidden_value(task, gate, n, row),
                    false => 0.0,
                });
            }
        }
        Ok(fired)
    }

    fn sum(&mut self, task: &Task, cluster: usize, hidden: &[f32], sums: &mut [f32]) {
        let (d, last) = (task.part.shape.d, task.part.shape.matrices() - 1);
        sums.fill(0.0);
        for (n, of_neuron) in hidden.chunks_exact(task.rows()).enumerate() {
            let i = task.first + cluster * CLUSTER + n;
            for (&factor, sum) in of_neuron.iter().zip(sums.chunks_exact_mut(d)) {
                if factor != 0.0 {
                    self.0.axpy_rows(&[factor], &[task.part.row(i, last)], sum);
                }
            }
        }
    }

    fn products(
        &mut self,
        matrix: &SharedMatrix,
        rows: Range<usize>,
        tokens: &Tokens,
        out: &mut Vec<f32>,
    ) -> Result<(), String> {
        let Tokens { x, quantized } = tokens;
        out.append(&mut products(self.0, matrix, rows, x, quantized));
        Ok(())
    }
}

impl OneByOne {
    /// The activated gate of the `n`-th neuron.
    fn gate(&self, task: &Task, n: usize, row: usize) -> f32 {
        let gate_row = task.part.row(task.first + n, 0);
        let mut gate = [task.tokens.product(self.0, gate_row, row)];
        gate[0] += task.gate_bias.get(n).unwrap_or(&0.0);
        let gating = Gating {
            activation: task.part.shape.kind.activation,
            cut: task.cut,
            top: None,
        };
        gating.apply(self.0, &[], &mut gate);
        gate[0]
    }

    /// The factor of the `n`-th neuron's Down.
    fn hidden_value(&self, task: &Task, gate: f32, n: usize, row: usize) -> f32 {
        let kind = task.part.shape.kind;
        if kind.ungated {
            return gate;
        }
        let up_row = task.part.row(task.first + n, 1);
        let mut up = task.tokens.product(self.0, up_row, row);
        up += task.up_bias.get(n).unwrap_or(&0.0);
        gate * of_up(kind, up)
    }
}

/// The products of some rows of a matrix with all tokens, `[tokens × rows]`, one row and token after the other.
pub(super) fn products(
    cpu: Cpu,
    matrix: &SharedMatrix,
    rows: Range<usize>,
    x: &[f32],
    quantized: &Activations,
) -> Vec<f32> {
    let len = matrix.dtype.row_bytes(matrix.cols);
    let bytes: &[u8] = (*matrix.bytes).as_ref();
    let tokens = 0..quantized.tokens();
    let pairs = tokens.flat_map(|token| rows.clone().map(move |row| (token, row)));
    let product = |(token, row): (usize, usize)| {
        let row = Row::inline(matrix.dtype, matrix.cols, &bytes[row * len..][..len]);
        match matrix.dtype.is_grouped() {
            true => cpu.dot_q(row, quantized.token(token)),
            false => cpu.dot(row, &x[token * matrix.cols..][..matrix.cols]),
        }
    };
    pairs.map(product).collect()
}
