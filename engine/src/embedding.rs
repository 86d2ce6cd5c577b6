//! The token embedding. A token needs one row, so rows stay on flash and are read on demand. The
//! embedding is resident only if everything else is: the same memory holds thousands of neurons,
//! each of which saves as many reads as a row. A tied embedding is also the head and always
//! resident.

use emberflow_kernels::{Cpu, DType, Row};
use emberflow_models::config::ModelConfig;
use emberflow_models::names::{Role, TensorId};
use emberflow_storage::arena::{Arena, ArenaOptions, Slot};
use emberflow_storage::container::{Container, TensorEntry, TensorRows};

use crate::error::Error;
use crate::loader::{Loader, name_of};
use crate::store::{Layout, NeuronStore, region};

/// Rows in flight at once: a whole decode batch, or a few hundred microseconds of prefill.
const ROWS: u32 = 32;

/// Sizes of an embedding in bytes.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct EmbeddingBytes {
    /// Always resident: checksums and row buffers of [`Embedding::open`].
    pub kept: u64,
    /// All rows.
    pub all: u64,
}

/// A table of which each token needs one row.
pub(crate) struct Embedding {
    entry: TensorEntry,
    dtype: DType,
    d: usize,
    rows: TensorRows,
    /// Buffers for rows in flight.
    arrivals: Arena,
    /// All rows, if resident.
    held: Option<Slot>,
}

impl Embedding {
    /// Validates the table. `None` if it is tied to the head.
    pub fn open(layout: &Layout, c: &ModelConfig) -> Result<Option<Self>, Error> {
        if c.tied_head {
            return Ok(None);
        }
        Self::table(layout, Role::Embed, c.vocab as usize, c.d_model as usize).map(Some)
    }

    /// The table of per-layer inputs, if the model has one.
    pub fn of_layers(layout: &Layout, c: &ModelConfig) -> Result<Option<Self>, Error> {
        let Some(inputs) = c.form.inputs_by_layer() else {
            return Ok(None);
        };
        let (rows, width) = (inputs.vocab, c.layers * inputs.width);
        Self::table(layout, Role::LayerInputs, rows as usize, width as usize).map(Some)
    }

    /// The table of rows for the last tokens, if the model has one.
    pub fn of_ngrams(layout: &Layout, c: &ModelConfig) -> Result<Option<Self>, Error> {
        let Some(of) = &c.form.ngrams else {
            return Ok(None);
        };
        let [rows, width] = [of.rows, of.width].map(|n| n as usize);
        Self::table(layout, Role::NGramTable, rows, width).map(Some)
    }

    fn table(layout: &Layout, role: Role, rows: usize, d: usize) -> Result<Self, Error> {
        let container = &layout.container;
        let (entry, dtype) = Loader { container }.entry(TensorId::global(role), rows, d)?;
        let rows = container.rows(entry, rows)?;
        let (slot_len, align) = layout.piece(rows.row_len());
        let arrivals = Arena::new(ROWS, slot_len, align, ArenaOptions::default())
            .map_err(emberflow_storage::Error::from)?;
        Ok(Self {
            entry: entry.clone(),
            dtype,
            d,
            rows,
            arrivals,
            held: None,
        })
    }

    /// Sizes of the embedding (0 if tied to the head) and of the tables beside it.
    pub fn bytes_for(layout: &Layout, c: &ModelConfig) -> EmbeddingBytes {
        let embedding = if c.tied_head {
            EmbeddingBytes::default()
        } else {
            Self::bytes_of(layout, Role::Embed, c.vocab)
        };
        let inputs = c.form.inputs_by_layer().map(|inputs| inputs.vocab);
        let inputs = inputs.map(|rows| Self::bytes_of(layout, Role::LayerInputs, rows));
        let inputs = inputs.unwrap_or_default();
        let ngrams = c.form.ngrams.as_ref();
        let ngrams = ngrams.map(|of| Self::bytes_of(layout, Role::NGramTable, of.rows));
        let ngrams = ngrams.unwrap_or_default();
        EmbeddingBytes {
            kept: embedding.kept + inputs.kept + ngrams.kept,
            all: embedding.all + inputs.all + ngrams.all,
        }
    }

    fn bytes_of(layout: &Layout, role: Role, rows: u32) -> EmbeddingBytes {
        let Some(table) = layout.container.tensor(&name_of(role, 0)) else {
            return EmbeddingBytes::default();
        };
        let rows = rows as usize;
        let (slot_len, _) = layout.piece(table.len as usize / rows.max(1));
        EmbeddingBytes {
            kept: TensorRows::bytes_for(rows) + Arena::charge(ROWS, slot_len),
            all: Arena::charge(1, table.len as usize),
        }
    }

    /// Whether all rows are resident.
    pub fn is_held(&self) -> bool {
        self.held.is_some()
    }

    /// Loads all rows, or frees them.
    pub fn hold(&mut self, container: &Container, hold: bool) -> Result<(), Error> {
        if !hold {
            self.held = None;
        } else if self.held.is_none() {
            let mut bytes = region(self.entry.len as usize)?;
            container.read_tensor(&self.entry, bytes.as_mut_slice())?;
            self.held = Some(bytes);
        }
        Ok(())
    }

    /// Dequantises the rows of `tokens` into `out`, one after the other.
    pub fn rows(
        &mut self,
        cpu: Cpu,
        store: &mut NeuronStore,
        tokens: impl Iterator<Item = u32>,
        out: &mut [f32],
    ) -> Result<(), Error> {
        let (dtype, d, rows) = (self.dtype, self.d, &self.rows);
        let decode = |bytes: &[u8], out: &mut [f32]| {
            cpu.dequantize(Row::inline(dtype, d, bytes), out);
        };
        if let Some(held) = &self.held {
            let len = rows.row_len();
            for (token, out) in tokens.zip(out.chunks_exact_mut(d)) {
                let at = token as usize * len;
                decode(&held.as_slice()[at..at + len], out);
            }
            return Ok(());
        }
        store.fetch(rows, tokens, &mut self.arrivals, &mut |n, bytes| {
            decode(bytes, &mut out[n * d..(n + 1) * d]);
        })
    }
}
