//! A container's weights as numbers again, under the checkpoint's names: for
//! `verify --source` and `export`.
//!
//! Neurons come out in packed order; FFN outputs do not depend on it.

use std::os::unix::fs::FileExt;

use emberflow_engine::bundle::NeuronFormat;
use emberflow_engine::meta::ContainerMeta;
use emberflow_kernels::{Cpu, DType, Row};
use emberflow_models::config::ModelConfig;
use emberflow_models::names::{Role, TensorId};
use emberflow_storage::container::Container;

use crate::Failure;

/// An open container and how to read its numbers.
pub struct Packed<'a> {
    container: &'a Container,
    /// Its metadata.
    pub meta: ContainerMeta,
    format: NeuronFormat,
    cpu: Cpu,
}

/// The three vectors of one neuron, `[d_model]` each.
#[derive(Debug, Clone)]
pub struct Neuron {
    /// Gate row.
    pub gate: Vec<f32>,
    /// Up row.
    pub up: Vec<f32>,
    /// Down column.
    pub down: Vec<f32>,
}

impl<'a> Packed<'a> {
    /// Reads and checks the metadata.
    pub fn new(container: &'a Container) -> Result<Self, Failure> {
        let meta = ContainerMeta::parse(container.meta(), container.path())?;
        let format = NeuronFormat::of(container, &meta)?;
        Ok(Self {
            container,
            meta,
            format,
            cpu: Cpu::detect(),
        })
    }

    /// The FFN's block format.
    pub fn ffn_dtype(&self) -> DType {
        self.format.dtype
    }

    /// The model's configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.meta.config
    }

    /// All values of a tensor that is not FFN, with its block format.
    pub fn tensor(&self, id: TensorId) -> Result<(DType, Vec<f32>), Failure> {
        let fail = |what: String| {
            Failure::Fault(format!(
                "{}: tensor {id} {what}",
                self.container.path().display()
            ))
        };
        let name = id.to_string();
        let entry = self
            .container
            .tensor(&name)
            .ok_or_else(|| fail("is missing".into()))?;
        let [rows, cols] = *entry.dims() else {
            return Err(fail(format!(
                "has shape {:?}, expected two numbers",
                entry.dims()
            )));
        };
        let (rows, cols) = (rows as usize, cols as usize);
        let dtype = DType::from_code(entry.dtype)
            .ok_or_else(|| fail(format!("has unknown block format {}", entry.dtype)))?;
        let stride = dtype.row_bytes(cols);
        if rows.checked_mul(stride) != Some(entry.len as usize) || cols == 0 {
            return Err(fail(format!(
                "has {} bytes for {rows} rows of {cols}",
                entry.len
            )));
        }
        let mut bytes = vec![0; entry.len as usize];
        self.container.read_tensor(entry, &mut bytes)?;
        let mut values = vec![0.0; rows * cols];
        for (row, out) in bytes
            .chunks_exact(stride)
            .zip(values.chunks_exact_mut(cols))
        {
            self.cpu.dequantize(Row::inline(dtype, cols, row), out);
        }
        Ok((dtype, values))
    }

    /// Calls `f` with every neuron of a bank, in packed order.
    pub fn neurons(
        &self,
        bank: usize,
        f: &mut dyn FnMut(usize, Neuron) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let g = self.container.geometry();
        let (stride, span) = (g.stride as usize, g.gate_span as usize);
        let neurons = self.config().ffn as usize;
        let per_neuron = self.format.resident_scales();
        let mut scales = vec![0; neurons * per_neuron];
        if per_neuron > 0 {
            self.container.read_scales(bank, &mut scales)?;
        }
        let mut bundle = vec![0; stride];
        let d = self.format.d;
        for n in 0..neurons {
            let offset = self.container.base() + self.container.neuron_offset(bank, n as u32);
            self.container
                .file()
                .read_exact_at(&mut bundle, offset)
                .map_err(Failure::file(self.container.path()))?;
            let (gate, rest) = bundle.split_at(span);
            self.container.check_gate(bank, n as u32, gate)?;
            self.container.check_rest(bank, n as u32, rest)?;
            let scales = &scales[n * per_neuron..(n + 1) * per_neuron];
            let values = |row: Row<'_>| {
                let mut out = vec![0.0; d];
                self.cpu.dequantize(row, &mut out);
                out
            };
            let neuron = Neuron {
                gate: values(self.format.gate(gate, scales)),
                up: values(self.format.up(rest, scales)),
                down: values(self.format.down(rest, scales)),
            };
            f(n, neuron)?;
        }
        Ok(())
    }

    /// Values of one FFN matrix, `[ffn × d_model]` in packed order.
    pub fn ffn_matrix(&self, id: TensorId) -> Result<Vec<f32>, Failure> {
        let mut out = Vec::with_capacity(self.config().ffn as usize * self.format.d);
        self.neurons(id.layer as usize, &mut |_, n| {
            out.extend_from_slice(match id.role {
                Role::Gate => &n.gate,
                Role::Up => &n.up,
                _ => &n.down,
            });
            Ok(())
        })?;
        Ok(out)
    }
}
