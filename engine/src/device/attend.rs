//! Attention of a layer as one piece of work on a device: Q, K and V, norms, rotation, attention over pages of keys
//! and values, O.
//!
//! ```text
//! attend ─▶ Q K V ─▶ norms, rotation ─▶ scores and sums over the pages ─▶ O ─▶ take: out, new keys and values
//! ```
//!
//! The pages are the host's, in memory that both see. A device only reads them, and holds them meanwhile, so that
//! nobody writes: the keys and values of the rows' own positions come back with the result, and the host stores
//! them. So a device that is lost in the middle has changed nothing.

use std::sync::Arc;

use emberflow_kernels::{Activations, DType, GROUP};
use emberflow_models::config::ModelConfig;
use emberflow_storage::arena::ArenaPages;

pub use crate::input::Input;
use crate::kv::{BLOCK, KvShape};
pub use emberflow_opencl::{AttendRow, Attended, AttentionLayer, AttentionRoom};

/// Most rows of a piece of work: texts that each have a next token.
pub(crate) const MOST_ROWS: usize = 32;

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

    /// Bytes that a row reads of keys and values at `position`, with a window or without.
    pub(crate) fn read_bytes(&self, position: usize, window: usize) -> f64 {
        let seen = match window {
            0 => position + 1,
            window => window.min(position + 1),
        };
        (seen * self.kv_heads * self.kv.row_bytes(2 * self.head_dim)) as f64
    }

    /// Room for so many rows and positions.
    pub(crate) fn room(&self, rows: usize, positions: usize) -> AttentionRoom {
        AttentionRoom {
            rows: rows.min(MOST_ROWS),
            positions,
            input: Activations::bytes(self.d, 1).max(4 * self.d),
            quantized: Activations::bytes(self.width(), 1),
        }
    }

    /// Bytes of buffers for such room.
    pub(crate) fn room_bytes(&self, room: &AttentionRoom) -> u64 {
        let blocks = room.positions.div_ceil(BLOCK);
        let heads = self.width() + 4 * self.kv_width();
        let scores = self.heads * blocks * (BLOCK + 2 + self.head_dim);
        let small = 8 * room.positions.div_ceil(self.page) + 4 * 2 * self.rotary;
        let row = 4 * (2 * heads + scores + 2 * self.d) + 2 * (room.input + room.quantized);
        (room.rows * (row + small)) as u64
    }
}

/// Why devices do not compute the attention of a model; `None` if they do.
pub(crate) fn unsupported(c: &ModelConfig) -> Option<&'static str> {
    let local = c.form.local_rope.as_ref();
    match () {
        () if c.form.attention_cap.is_some() => Some("devices do not know caps of scores"),
        () if c.qk_norm && c.qk_norm_whole => {
            Some("devices do not know norms over all heads of queries and keys")
        }
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

/// The memory of keys and values, as a device is told of it.
#[derive(Clone)]
pub struct KvMemory(pub(crate) Arc<ArenaPages>);

/// Attention of a layer for rows that each have one position.
#[derive(Clone, Copy)]
pub struct Attend<'a> {
    /// Number of the layer.
    pub layer: usize,
    /// The normalised input of all rows.
    pub input: Input<'a>,
    /// Cosines and sines of each row's position, `[rows × 2 · rotary]`; empty where the layer does not rotate.
    pub angles: &'a [f32],
    /// The rows.
    pub rows: &'a [AttendRow],
}

/// Divides what lies one after the other: O's results, keys, values.
pub(super) fn by_parts(all: &[f32], to: Attended<'_>) {
    let (out, rest) = all.split_at(to.out.len());
    let (keys, values) = rest.split_at(to.keys.len());
    to.out.copy_from_slice(out);
    to.keys.copy_from_slice(keys);
    to.values.copy_from_slice(values);
}
