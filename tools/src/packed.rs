//! Reads a container's weights as f32 under the checkpoint's names, for `verify --source` and `export`.
//!
//! Everything streams: a tensor in batches of rows, a bank neuron by neuron. Neurons come in packed order, on which
//! FFN outputs do not depend.

use std::os::unix::fs::FileExt;

use emberflow_engine::bundle::{NeuronFormat, across};
use emberflow_engine::meta::ContainerMeta;
use emberflow_kernels::{Cpu, DType, Row};
use emberflow_models::config::ModelConfig;
use emberflow_models::names::{Required, Role, TensorId};
use emberflow_storage::container::{Container, TensorEntry, table_row};
use xxhash_rust::xxh3::Xxh3;

use crate::Failure;

/// Bytes of a tensor read at once, or one row if that is longer.
const BATCH_BYTES: usize = 1 << 20;

/// Receives a row's index, its stored bytes and its values.
pub type RowFn<'f> = dyn FnMut(usize, Row<'_>, &[f32]) -> Result<(), Failure> + 'f;

/// An open container and its metadata.
pub struct Packed<'a> {
    container: &'a Container,
    /// Metadata.
    pub meta: ContainerMeta,
    /// The format of its bundles; `None` if matrices lie by rows.
    bundles: Option<NeuronFormat>,
    cpu: Cpu,
}

/// The vectors of one neuron, `[d_model]` each.
#[derive(Debug, Clone)]
pub struct Neuron {
    /// Gate row.
    pub gate: Vec<f32>,
    /// Up row; empty if the FFN has no gate projection.
    pub up: Vec<f32>,
    /// Down column.
    pub down: Vec<f32>,
    /// Gate and Up as stored, quants followed by scales.
    pub stored: [Vec<u8>; 2],
}

impl Neuron {
    /// The vectors with the matrix that each belongs to.
    pub fn vectors(&self) -> impl Iterator<Item = (Role, &[f32])> {
        let all = [
            (Role::Gate, &self.gate),
            (Role::Up, &self.up),
            (Role::Down, &self.down),
        ];
        let all = all.into_iter().map(|(role, row)| (role, row.as_slice()));
        all.filter(|(_, row)| !row.is_empty())
    }
}

impl<'a> Packed<'a> {
    /// Reads the metadata and checks that the banks match the model.
    ///
    /// # Errors
    /// Metadata that do not parse or do not match the container.
    pub fn new(container: &'a Container) -> Result<Self, Failure> {
        let meta = ContainerMeta::parse(container.meta(), container.path())?;
        let bundles = match container.banks().is_empty() {
            true => None,
            false => {
                check_banks(container, &meta.config)?;
                Some(NeuronFormat::of(container, &meta)?)
            }
        };
        Ok(Self {
            container,
            meta,
            bundles,
            cpu: Cpu::detect(),
        })
    }

    /// Whether there are no bundles: the matrices of FFNs lie by rows, as all others.
    pub fn is_by_rows(&self) -> bool {
        self.bundles.is_none()
    }

    /// The block format of the bundles.
    ///
    /// # Errors
    /// A container without bundles.
    pub fn ffn_dtype(&self) -> Result<DType, Failure> {
        self.format().map(|format| format.dtype)
    }

    fn format(&self) -> Result<NeuronFormat, Failure> {
        self.bundles.ok_or_else(|| {
            let path = self.container.path().display();
            Failure::Fault(format!("{path}: it has no neurons in bundles"))
        })
    }

    /// The model's configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.meta.config
    }

    /// Calls `f` with each row of the non-FFN tensor `want`.
    ///
    /// # Errors
    /// A missing tensor, a wrong shape, a wrong checksum (detected after `f` has seen all rows), a read error, and
    /// errors of `f`.
    pub fn rows(&self, want: Required, f: &mut RowFn<'_>) -> Result<(), Failure> {
        let Required { id, rows, cols } = want;
        let fail = |what: String| self.fault(id, &what);
        let entry = self
            .container
            .tensor(&id.to_string())
            .ok_or_else(|| fail("is missing".into()))?;
        if *entry.dims() != [rows as u64, cols as u64] {
            let found = entry.dims();
            return Err(fail(format!(
                "has shape {found:?}, expected [{rows}, {cols}]"
            )));
        }
        let dtype = DType::from_code(entry.dtype)
            .ok_or_else(|| fail(format!("has unknown block format {}", entry.dtype)))?;
        // At most 8 weights fit in a byte, which bounds the row size.
        let len = if cols as u64 > entry.len.saturating_mul(8) {
            0
        } else {
            dtype.row_bytes(cols)
        };
        let Some(stride) = entry.row_stride(rows as u64, len) else {
            return Err(fail(format!(
                "has {} bytes for {rows} rows of {cols} in {}",
                entry.len,
                dtype.name()
            )));
        };
        self.stream(entry, dtype, cols, stride, f)
    }

    /// Columns of the tensor `want` as rows: `[cols × rows]`.
    ///
    /// # Errors
    /// As [`Packed::rows`].
    pub fn columns(&self, want: Required) -> Result<Vec<f32>, Failure> {
        // The check of the shape comes before memory for it.
        let entry = self.container.tensor(&want.id.to_string());
        let weights = entry.map_or(0, |entry| entry.len.saturating_mul(8));
        if (want.rows as u64).saturating_mul(want.cols as u64) > weights {
            return Err(self.fault(want.id, "is missing or too short"));
        }
        let mut columns = vec![0.0; want.rows * want.cols];
        self.rows(want, &mut |r, _, row| {
            let places = columns[r..].iter_mut().step_by(want.rows);
            places.zip(row).for_each(|(place, value)| *place = *value);
            Ok(())
        })?;
        Ok(columns)
    }

    fn stream(
        &self,
        entry: &TensorEntry,
        dtype: DType,
        cols: usize,
        stride: usize,
        f: &mut RowFn<'_>,
    ) -> Result<(), Failure> {
        let batch = (BATCH_BYTES / stride).max(1) * stride;
        let mut bytes = vec![0; batch.min(entry.len as usize)];
        let mut values = vec![0.0; cols];
        let mut hash = Xxh3::new();
        let mut at = 0;
        while at < entry.len {
            let len = (entry.len - at).min(batch as u64);
            let part = &mut bytes[..len as usize];
            self.read(entry.offset.checked_add(at), part)?;
            hash.update(part);
            for (i, stored) in part.chunks_exact(stride).enumerate() {
                let number = at as usize / stride + i;
                let row = match table_row(stored) {
                    _ if stride == dtype.row_bytes(cols) => stored,
                    (row, true) => row,
                    (_, false) => return Err(self.damaged(entry, number)),
                };
                let row = Row::inline(dtype, cols, row);
                self.cpu.dequantize(row, &mut values);
                f(number, row, &values)?;
            }
            at += len;
        }
        if hash.digest() != entry.xxh3 {
            return Err(Failure::Fault(format!(
                "{}: tensor {} is damaged: checksum {:016x}, expected {:016x}",
                self.container.path().display(),
                entry.name,
                hash.digest(),
                entry.xxh3
            )));
        }
        Ok(())
    }

    /// A row of a table whose checksum is not that of its bytes.
    fn damaged(&self, entry: &TensorEntry, row: usize) -> Failure {
        Failure::Fault(format!(
            "{}: row {row} of tensor {} is damaged",
            self.container.path().display(),
            entry.name
        ))
    }

    fn fault(&self, id: TensorId, what: &str) -> Failure {
        Failure::Fault(format!(
            "{}: tensor {id} {what}",
            self.container.path().display()
        ))
    }

    /// Reads `bytes` at `offset` of the container; `None` is an overflowed offset.
    fn read(&self, offset: Option<u64>, bytes: &mut [u8]) -> Result<(), Failure> {
        let path = self.container.path();
        let place = offset
            .and_then(|o| o.checked_add(self.container.base()))
            .ok_or_else(|| {
                Failure::Fault(format!("{}: an offset is out of range", path.display()))
            })?;
        self.container
            .file()
            .read_exact_at(bytes, place)
            .map_err(Failure::file(path))
    }

    /// Calls `f` with every neuron of a bank, in packed order.
    ///
    /// # Errors
    /// No bundles, a read error, a damaged bundle, and errors of `f`.
    pub fn neurons(
        &self,
        bank: usize,
        f: &mut dyn FnMut(usize, &Neuron) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let (g, format) = (self.container.geometry(), self.format()?);
        let (stride, span) = (g.stride as usize, g.gate_span as usize);
        let neurons = self.container.banks()[bank].neurons as usize;
        let per_neuron = format.resident_scales();
        let mut scales = vec![0; neurons * per_neuron];
        if per_neuron > 0 {
            self.container.read_scales(bank, &mut scales)?;
        }
        let mut bundle = vec![0; stride];
        let mut downs = Vec::new();
        let row = vec![0.0; format.d];
        let mut neuron = Neuron {
            gate: row.clone(),
            up: if format.ungated {
                Vec::new()
            } else {
                row.clone()
            },
            down: row,
            stored: [Vec::new(), Vec::new()],
        };
        for n in 0..neurons {
            let offset = self.container.neuron_offset(bank, n as u32);
            self.read(Some(offset), &mut bundle)?;
            let (gate, rest) = bundle.split_at(span);
            self.container.check_gate(bank, n as u32, gate)?;
            self.container.check_rest(bank, n as u32, rest)?;
            let scales = &scales[n * per_neuron..(n + 1) * per_neuron];
            let (up, down) = format.split_rest(rest);
            let keep = |row: Row<'_>, stored: &mut Vec<u8>| {
                stored.clear();
                stored.extend_from_slice(row.quants());
                stored.extend_from_slice(row.scales());
            };
            let gate = format.gate(gate, scales);
            self.cpu.dequantize(gate, &mut neuron.gate);
            keep(gate, &mut neuron.stored[0]);
            if !format.ungated {
                let up = format.up(up, scales);
                self.cpu.dequantize(up, &mut neuron.up);
                keep(up, &mut neuron.stored[1]);
            }
            if !format.is_across() {
                (self.cpu).dequantize(format.down(down, scales), &mut neuron.down);
            } else {
                let place = n % across::NEURONS;
                if place == 0 {
                    self.downs_across(bank, n, &mut downs)?;
                }
                neuron
                    .down
                    .copy_from_slice(&downs[place * format.d..][..format.d]);
            }
            f(n, &neuron)?;
        }
        Ok(())
    }

    /// Down vectors of the neurons from `first` on, for formats whose blocks span neurons.
    fn downs_across(&self, bank: usize, first: usize, out: &mut Vec<f32>) -> Result<(), Failure> {
        let (g, count) = (self.container.geometry(), across::NEURONS);
        let format = self.format()?;
        let (stride, span) = (g.stride as usize, g.gate_span as usize);
        let per_neuron = format.resident_scales();
        let mut bundles = vec![0; count * stride];
        let offset = self.container.neuron_offset(bank, first as u32);
        self.read(Some(offset), &mut bundles)?;
        let neurons = self.container.banks()[bank].neurons as usize;
        let mut scales = vec![0; neurons * per_neuron];
        if per_neuron > 0 {
            self.container.read_scales(bank, &mut scales)?;
        }
        let rows = bundles.chunks_exact(stride).enumerate().map(|(i, bundle)| {
            let scales = &scales[(first + i) * per_neuron..][..per_neuron];
            let (_, down) = format.split_rest(&bundle[span..]);
            format.down(down, scales)
        });
        let rows: Vec<Row<'_>> = rows.collect();
        out.resize(count * format.d, 0.0);
        across::decode(self.cpu, &rows, out);
        Ok(())
    }
}

/// Checks that there is one bank per layer and expert, in order, with the right number of neurons.
fn check_banks(container: &Container, c: &ModelConfig) -> Result<(), Failure> {
    let fault = |what: String| Failure::Fault(format!("{}: {what}", container.path().display()));
    let banks = container.banks();
    let count = c.banks().count();
    if banks.len() != count {
        return Err(fault(format!(
            "{} banks, expected {count} in {} layers",
            banks.len(),
            c.layers,
        )));
    }
    let expected = c.banks().map(|b| (b.layer, b.expert, b.neurons));
    match banks
        .iter()
        .map(|b| (b.layer, b.expert, b.neurons))
        .zip(expected)
        .find(|(found, expected)| found != expected)
    {
        None => Ok(()),
        Some((found, expected)) => Err(fault(format!(
            "a bank has (layer, expert, neurons) {found:?}, expected {expected:?}"
        ))),
    }
}
