//! The token embedding, and other tables of which a token reads few rows: per-layer inputs, n-grams.
//! Rows stay on flash and are read on demand, each with a checksum of it or of its stripe. A table becomes resident only
//! after everything else: the same memory holds thousands of neurons, each of which saves as many reads
//! as a row. A tied embedding is also the head, and resident unless the head is read for every pass.

use emberflow_kernels::{Cpu, DType, Row};
use emberflow_models::config::ModelConfig;
use emberflow_models::names::{Role, TensorId};
use emberflow_storage::arena::{Arena, Slot};
use emberflow_storage::container::{Container, TensorEntry, TensorRows};

use crate::error::Error;
use crate::loader::{Loader, name_of};
use crate::store::{Layout, NeuronStore, RowReads, region};

/// Rows in flight at once: a whole decode batch, or a few hundred microseconds of prefill.
const ROWS: u32 = 32;

/// The same for n-grams, of which a token needs several rows.
const NGRAM_ROWS: u32 = 64;

/// The row tables that a model may have.
const ROLES: [Role; 3] = [Role::Embed, Role::LayerInputs, Role::NGramTable];

/// Matrices of which rows are decoded and none is multiplied.
pub(crate) fn only_decoded(c: &ModelConfig) -> impl Iterator<Item = Role> {
    let all = ROLES.into_iter().chain([Role::Positions]);
    let tied = c.tied_head;
    all.filter(move |&role| role != Role::Embed || !tied)
}

/// Sizes of tables in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EmbeddingBytes {
    /// Always resident: row buffers, and tables whose rows cannot be read one by one.
    pub always: u64,
    /// All rows of each table.
    pub all: [u64; 3],
}

/// A table of which each token needs a few rows.
pub(crate) struct Embedding {
    entry: TensorEntry,
    dtype: DType,
    d: usize,
    reads: RowReads,
    /// All rows, if resident.
    held: Option<Slot>,
    /// Rows cannot be read one by one, so all are resident.
    whole: bool,
}

/// (rows, elements per row) of a table; `None` if the model has none, or uses it as head, unless the head `streams`.
fn shape_of(c: &ModelConfig, role: Role, streams: bool) -> Option<[usize; 2]> {
    let shape = match role {
        Role::Embed if !c.tied_head || streams => [c.vocab, c.d_model],
        Role::LayerInputs => {
            let inputs = c.form.inputs_by_layer()?;
            [inputs.vocab, c.layers * inputs.width]
        }
        Role::NGramTable => {
            let of = c.form.ngrams.as_ref()?;
            [of.rows, of.width]
        }
        _ => return None,
    };
    Some(shape.map(|n| n as usize))
}

/// Reads in flight for rows of a table.
fn at_once(role: Role) -> u32 {
    match role {
        Role::NGramTable => NGRAM_ROWS,
        _ => ROWS,
    }
}

impl Embedding {
    /// Validates the table of `role` without reading it; `None` if the model has none, or uses it as
    /// head, unless the head `streams`.
    pub fn open(
        layout: &Layout,
        c: &ModelConfig,
        role: Role,
        streams: bool,
    ) -> Result<Option<Self>, Error> {
        let (container, shape) = (&layout.container, shape_of(c, role, streams));
        let Some([rows, d]) = shape else {
            return Ok(None);
        };
        let (entry, dtype) = Loader::of(container).table(TensorId::global(role), rows, d)?;
        let row_len = dtype.row_bytes(d);
        let rows = container.rows(entry, rows, row_len)?;
        let read = TensorRows::most_read(container, entry, row_len);
        let table = ROLES.iter().take_while(|&&other| other != role).count() as u32;
        let mut table = Self {
            entry: entry.clone(),
            dtype,
            d,
            reads: RowReads::new(layout, table, rows, read, at_once(role))?,
            held: None,
            whole: !container.has_rows(entry),
        };
        table.hold(container, false)?;
        Ok(Some(table))
    }

    /// Sizes of all tables of a model; `streams`: its head is read for every pass.
    pub fn bytes_for(layout: &Layout, c: &ModelConfig, streams: bool) -> EmbeddingBytes {
        let of = ROLES.map(|role| Self::bytes_of(layout, c, role, streams).unwrap_or_default());
        EmbeddingBytes {
            always: of.iter().map(|[always, _]| always).sum(),
            all: of.map(|[_, all]| all),
        }
    }

    /// Bytes of a table that are always resident, and bytes of the whole table.
    fn bytes_of(layout: &Layout, c: &ModelConfig, role: Role, streams: bool) -> Option<[u64; 2]> {
        let [_, d] = shape_of(c, role, streams)?;
        let entry = layout.container.tensor(&name_of(role, 0))?;
        let row_len = DType::from_code(entry.dtype)?.row_bytes(d);
        let read = TensorRows::most_read(&layout.container, entry, row_len);
        let always = RowReads::bytes_for(layout, read, at_once(role));
        let all = Arena::charge(1, entry.len as usize);
        Some(match layout.container.has_rows(entry) {
            true => [always, all],
            false => [always + all, 0],
        })
    }

    /// Whether all rows are resident.
    pub fn is_held(&self) -> bool {
        self.held.is_some()
    }

    /// Loads all rows, or frees them unless they must be resident.
    pub fn hold(&mut self, container: &Container, hold: bool) -> Result<(), Error> {
        let hold = hold || self.whole;
        if !hold {
            self.held = None;
        } else if self.held.is_none() {
            let mut bytes = region(self.entry.len as usize)?;
            container.read_tensor(&self.entry, bytes.as_mut_slice())?;
            self.held = Some(bytes);
        }
        Ok(())
    }

    /// Starts reading rows that [`Embedding::rows`] will request, if they are on flash.
    pub fn ask(
        &mut self,
        store: &mut NeuronStore,
        tokens: impl Iterator<Item = u32>,
    ) -> Result<(), Error> {
        if self.is_held() {
            Ok(())
        } else {
            self.reads.ask(store, tokens)
        }
    }

    /// Dequantises the rows of `tokens` into `out`, one after the other.
    pub fn rows(
        &mut self,
        cpu: Cpu,
        store: &mut NeuronStore,
        tokens: impl Iterator<Item = u32> + Clone,
        out: &mut [f32],
    ) -> Result<(), Error> {
        let (dtype, d) = (self.dtype, self.d);
        let decode = |bytes: &[u8], out: &mut [f32]| {
            cpu.dequantize(Row::inline(dtype, d, bytes), out);
        };
        if let Some(held) = &self.held {
            let rows = &self.reads.rows;
            for (token, out) in tokens.zip(out.chunks_exact_mut(d)) {
                let at = token as usize * rows.stride();
                decode(&held.as_slice()[at..at + rows.row_len()], out);
            }
            return Ok(());
        }
        self.reads.fetch(store, tokens, &mut |n, bytes| {
            decode(bytes, &mut out[n * d..(n + 1) * d]);
        })
    }
}

/// Loads the tables for which `hold` is true and frees the others.
pub(crate) fn hold_tables(
    tables: &mut [Option<&mut Embedding>; 3],
    container: &Container,
    hold: impl Fn(usize, &Embedding) -> bool,
) -> Result<(), Error> {
    for (at, table) in tables.iter_mut().enumerate() {
        if let Some(table) = table {
            let hold = hold(at, table);
            table.hold(container, hold)?;
        }
    }
    Ok(())
}
