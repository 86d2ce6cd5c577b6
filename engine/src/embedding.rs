//! The token embedding. A token needs a single row, so rows stay on flash and are read on demand.
//! The embedding is resident only where everything else is: the same memory holds thousands of
//! neurons, each of which saves as many reads as a row. (A tied embedding is needed whole as the
//! head and stays resident.)

use emberflow_kernels::{Cpu, DType, Row};
use emberflow_models::config::ModelConfig;
use emberflow_models::names::Role;
use emberflow_storage::arena::{Arena, ArenaOptions, Slot};
use emberflow_storage::container::{Container, TensorEntry, TensorRows};

use crate::error::Error;
use crate::store::{Layout, NeuronStore, region};
use crate::weights::{Loader, name_of};

/// Rows in flight at once: a whole decode batch, or a few hundred microseconds of prefill.
const ROWS: u32 = 32;

/// Sizes of an embedding in bytes.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct EmbeddingBytes {
    /// Held by [`Embedding::open`]: checksums and row buffers.
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
    /// All rows, where resident.
    held: Option<Slot>,
}

impl Embedding {
    /// Validates the table. `None` where tied to the head.
    pub fn open(layout: &Layout, c: &ModelConfig) -> Result<Option<Self>, Error> {
        if c.tied_head {
            return Ok(None);
        }
        let (rows, d) = (c.vocab as usize, c.d_model as usize);
        let container = &layout.container;
        let (entry, dtype) = Loader { container }.entry(Role::Embed, 0, rows, d)?;
        let rows = container.rows(entry, rows)?;
        let (slot_len, align) = layout.piece(rows.row_len());
        let arrivals = Arena::new(ROWS, slot_len, align, ArenaOptions::default())
            .map_err(emberflow_storage::Error::from)?;
        Ok(Some(Self {
            entry: entry.clone(),
            dtype,
            d,
            rows,
            arrivals,
            held: None,
        }))
    }

    /// Sizes of the embedding; 0 where tied to the head.
    pub fn bytes_for(layout: &Layout, c: &ModelConfig) -> EmbeddingBytes {
        let table = layout.container.tensor(&name_of(Role::Embed, 0));
        let Some(table) = table.filter(|_| !c.tied_head) else {
            return EmbeddingBytes::default();
        };
        let rows = c.vocab as usize;
        let (slot_len, _) = layout.piece(table.len as usize / rows.max(1));
        EmbeddingBytes {
            kept: TensorRows::bytes_for(rows) + Arena::charge(ROWS, slot_len),
            all: Arena::charge(1, table.len as usize),
        }
    }

    /// Makes all rows resident, or frees them.
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

    /// Dequantizes the rows of `tokens` into `out [tokens × d_model]`.
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
