//! The token embedding: a token needs one row of it, so its rows stay on flash and are read when
//! they are needed. It is in memory only where a budget holds everything else, too: the same bytes
//! hold thousands of neurons, each of which is worth as many reads. (An embedding that is also the
//! head is needed as a whole, and stays.)

use emberflow_kernels::{Cpu, DType, Row};
use emberflow_models::config::ModelConfig;
use emberflow_models::names::Role;
use emberflow_storage::arena::{Arena, ArenaOptions, Slot};
use emberflow_storage::container::{Container, TensorEntry, TensorRows};

use crate::error::Error;
use crate::store::{Layout, NeuronStore, region};
use crate::weights::{Loader, name_of};

/// Rows under way at once: a whole pass of sequences, or of a prompt some hundreds of microseconds.
const ROWS: u32 = 32;

/// Bytes of an embedding.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct EmbeddingBytes {
    /// Of what [`Embedding::open`] keeps: checksums, and room for rows that arrive.
    pub kept: u64,
    /// Of all rows.
    pub all: u64,
}

/// A table of rows of which each token needs one.
pub(crate) struct Embedding {
    entry: TensorEntry,
    dtype: DType,
    d: usize,
    rows: TensorRows,
    /// Where rows arrive.
    arrivals: Arena,
    /// All rows, where the budget has room for them.
    held: Option<Slot>,
}

impl Embedding {
    /// Checks the table row by row. `None` where it is the head, too.
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

    /// What the embedding takes; nothing where it is the head, too.
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

    /// Holds all rows in memory, or gives them back.
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

    /// The rows of `tokens`, decoded, to `out [tokens × d_model]`.
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
