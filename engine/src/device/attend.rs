//! Attention of a layer as one piece of work on a device: the norm before it, Q, K and V, norms, rotation, attention
//! over pages of keys and values, O.
//!
//! ```text
//! attend ─▶ norm ─▶ Q K V ─▶ norms, rotation ─▶ scores and sums ─▶ O ─▶ take: out, new keys and values
//! ```
//!
//! A row sees the pages of the positions before its span, and the keys and values of the span's own rows up to itself.
//!
//! The pages are the host's. A device reads them, or its copy of them, and holds them meanwhile, so that nobody writes:
//! the keys and values of the rows' own positions come back with the result, and the host stores them. So a device that is
//! lost in the middle has changed nothing of the host's.

use std::sync::Arc;

use emberflow_kernels::{Activations, DType, GROUP};
use emberflow_models::config::ModelConfig;
use emberflow_storage::arena::ArenaPages;

use crate::device::Part;
use crate::kv::{BLOCK, KvShape};
pub use emberflow_opencl::{
    Attend, AttendSpan, Attended, AttentionLayer, AttentionRoom, ChainRoom, Chained, RowNorm,
};

/// Limits of a piece of work: buffers do not grow with longer chunks.
struct Limits {
    /// Most rows.
    rows: usize,
    /// Most rows whose scores are held at a time.
    scored: usize,
    /// Bytes of scores, and of what follows from them, that are held at a time, if one row has fewer.
    scores: usize,
}

/// In the machine's memory.
const SHARED: Limits = Limits {
    rows: 32,
    scored: 8,
    scores: 4 << 20,
};

/// In a memory of the device's own, far from the host: fewer and larger pieces.
const APART: Limits = Limits {
    rows: 128,
    scored: 32,
    scores: 32 << 20,
};

/// What is alike in the attention of all layers of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// Elements of a row.
    pub d: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Pairs of elements of a head that are rotated.
    pub rotary: usize,
    /// Format of keys and values.
    pub kv: DType,
    /// Positions of a page.
    pub page: usize,
    /// Of norms of heads.
    pub eps: f32,
    /// Factor of scores.
    pub scale: f32,
    /// The clamp of queries, keys and values.
    pub clip: Option<f32>,
}

impl AttentionShape {
    /// That of a model.
    pub(crate) fn of(c: &ModelConfig, kv: KvShape) -> Self {
        let head_dim = c.head_dim as usize;
        Self {
            d: c.d_model as usize,
            heads: c.heads as usize,
            kv_heads: c.kv_heads as usize,
            head_dim,
            rotary: c.rope.dims as usize / 2,
            kv: kv.dtype,
            page: kv.page,
            eps: c.rms_eps,
            scale: (c.form.attention_scale).unwrap_or(1.0 / libm::sqrtf(head_dim as f32)),
            clip: c.clip_qkv,
        }
    }

    /// Elements of all heads of queries.
    pub(crate) fn width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Elements of all heads of keys, or of values.
    pub(crate) fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Elements of a stored value.
    pub(crate) fn value_width(&self) -> usize {
        self.head_dim.next_multiple_of(GROUP)
    }

    /// Bytes of keys and values of a layer in a page.
    pub(crate) fn layer_bytes(&self) -> usize {
        let elements = self.page * (self.head_dim + self.value_width());
        self.kv_heads * self.kv.row_bytes(elements)
    }

    /// Bytes of keys and values of so many positions.
    pub(crate) fn read_bytes(&self, positions: usize) -> f64 {
        (positions * self.kv_heads * self.kv.row_bytes(2 * self.head_dim)) as f64
    }

    /// Bytes of a row's scores, and of what follows from them, over so many positions.
    fn scores_bytes(&self, positions: usize) -> usize {
        let blocks = positions.div_ceil(BLOCK);
        4 * self.heads * blocks * (BLOCK + 2 + self.head_dim)
    }

    /// Room for passes of so many rows, of so many texts of so many positions each; `apart` in a memory of its own.
    pub(crate) fn room(
        &self,
        rows: usize,
        [spans, positions]: [usize; 2],
        apart: bool,
    ) -> AttentionRoom {
        let most = if apart { APART } else { SHARED };
        let rows = rows.min(most.rows);
        let scored = most.scores / self.scores_bytes(positions).max(1);
        AttentionRoom {
            rows,
            spans,
            positions,
            scored: scored.clamp(1, most.scored).min(rows.max(1)),
            quantized: Activations::bytes(self.d.max(self.width()), 1),
        }
    }

    /// Bytes for such room: of staging memory, and of the device's buffers.
    pub(crate) fn room_bytes(&self, room: &AttentionRoom) -> [u64; 2] {
        let (q, kv) = (self.width(), 2 * self.kv_width());
        let on_device = 4 * (2 * self.d + 2 * q + 2 * kv) + room.quantized;
        let staged = 4 * (2 * self.d + kv);
        // Angles and places: here those that are there and the next ones, and there.
        let angles = 4 * (2 * self.rotary + 5);
        let pages = 8 * room.spans * room.positions.div_ceil(self.page);
        let scores = room.scored * self.scores_bytes(room.positions);
        let here = room.rows * (staged + 2 * angles) + 2 * pages;
        let there = room.rows * (on_device + angles) + pages + scores;
        [here as u64, there as u64]
    }
}

/// Why devices do not compute the attention of a model; `None` if they do.
pub(crate) fn unsupported(c: &ModelConfig) -> Option<&'static str> {
    let local = c.form.local_rope.as_ref();
    match () {
        () if c.form.attention_cap.is_some() => Some("devices do not know caps of scores"),
        () if c.kv_layers() != c.layers => {
            Some("devices do not know layers that read the keys and values of others")
        }
        () if local.is_some_and(|rope| rope.dims != c.rope.dims) => {
            Some("devices do not know layers that rotate other parts of a head")
        }
        () if c.form.streams.is_some() => Some("devices do not know several residual streams"),
        () => None,
    }
}

/// A whole layer: its attention, and its FFN, all of whose neurons are on the device.
#[derive(Clone, Copy)]
pub struct ChainLayer<'a> {
    /// Number of its attention, which has the norm before the FFN.
    pub attention: usize,
    /// As in [`Attend`].
    pub angles: [&'a [f32]; 2],
    /// As in [`Attend`].
    pub spans: &'a [AttendSpan],
    /// Its neurons.
    pub part: Part,
}

/// Layers one after the other, without a word to the host between them.
#[derive(Clone, Copy)]
pub struct Chain<'a> {
    /// Rows of the residual stream before the first layer, `[rows × d]`.
    pub x: &'a [f32],
    /// The layers.
    pub layers: &'a [ChainLayer<'a>],
}

/// The memory of keys and values, as a device is told of it.
#[derive(Clone)]
pub struct KvMemory(pub(crate) Arc<ArenaPages>);

/// Divides what lies one after the other: O's results, keys, values.
pub(super) fn by_parts(all: &[f32], to: Attended<'_>) {
    let (out, rest) = all.split_at(to.out.len());
    let (keys, values) = rest.split_at(to.keys.len());
    to.out.copy_from_slice(out);
    to.keys.copy_from_slice(keys);
    to.values.copy_from_slice(values);
}
