//! What attention on a device is about: a model's layers, pieces of work, and what comes out.

use std::cell::UnsafeCell;
use std::sync::Arc;

use crate::HostBytes;

/// Memory of the host in which pages lie; a cell gives no access by itself.
pub type HostMemory = Arc<dyn AsRef<[UnsafeCell<u8>]> + Send + Sync>;

/// What is alike in all layers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AttentionSpec {
    /// Build options: the definitions that `attention.cl` asks for.
    pub options: String,
    /// Rows of O.
    pub d: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Pairs of elements that are rotated.
    pub rotary: usize,
    /// Positions whose sums are merged.
    pub block: usize,
    /// Positions of a page.
    pub page: usize,
    /// Bytes of a layer in a page.
    pub layer_bytes: usize,
    /// Items that share a row or a head.
    pub team: usize,
}

/// The largest pieces of work.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AttentionRoom {
    /// Most rows.
    pub rows: usize,
    /// Spans of so many positions that have room for their pages.
    pub spans: usize,
    /// Most positions of a span.
    pub positions: usize,
    /// Rows whose scores are held at a time.
    pub scored: usize,
    /// Bytes of a row in 8 bits: of the longest input of a projection.
    pub quantized: usize,
}

/// The norm of rows before the projections.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RowNorm {
    /// Factors of the elements.
    pub weights: Vec<f32>,
    /// LayerNorm with these biases; RMSNorm without.
    pub biases: Vec<f32>,
    /// Added to the mean of squares.
    pub eps: f32,
}

/// A layer.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AttentionLayer {
    /// The norm before the FFN, of layers that are computed one after the other.
    pub after: Option<RowNorm>,
    /// Numbers of the matrices Q, K, V, O.
    pub matrices: [usize; 4],
    /// Which of them take activations in 8 bits.
    pub quantizes: [bool; 4],
    /// The norm before them, if there is one.
    pub norm: Option<RowNorm>,
    /// Biases of Q, K and V; empty without.
    pub biases: Vec<f32>,
    /// Norms of the heads of Q and of K; empty without.
    pub norms: Vec<f32>,
    /// They are over all heads of a row together.
    pub whole: bool,
    /// Whether the heads of V have a norm.
    pub value_norm: bool,
    /// Whether queries and keys are rotated.
    pub rotates: bool,
    /// Logits of the heads beside those of the positions; empty without.
    pub sinks: Vec<f32>,
    /// Where it begins in a page.
    pub first: usize,
    /// Positions that are seen, the row's own included; 0 for all.
    pub window: usize,
}

/// A page of keys and values.
#[derive(Clone)]
pub struct KvPage {
    /// Its bytes. Nobody writes them while work with it is under way.
    pub bytes: HostBytes,
    /// A device with a memory of its own does not have what it will read of the layer here.
    pub stale: bool,
}

/// Rows of a text, which follow each other.
#[derive(Clone)]
pub struct AttendSpan {
    /// Pages of the positions up to its last one.
    pub pages: Vec<KvPage>,
    /// Its first position.
    pub first: usize,
    /// Its rows.
    pub rows: usize,
}

/// A piece of work.
#[derive(Clone, Copy)]
pub struct Attend<'a> {
    /// Number of the layer.
    pub layer: usize,
    /// The rows before the layer's norm, `[rows × d]`.
    pub x: &'a [f32],
    /// Cosines of the rows' positions, and sines, `[rows × rotary]` each; empty where the layer does not rotate.
    pub angles: [&'a [f32]; 2],
    /// The rows by text.
    pub spans: &'a [AttendSpan],
}

impl Attend<'_> {
    /// Rows of all spans.
    pub fn rows(&self) -> usize {
        self.spans.iter().map(|span| span.rows).sum()
    }
}

/// Where its results go.
pub struct Attended<'a> {
    /// O's, `[rows × d]`.
    pub out: &'a mut [f32],
    /// Keys of the rows' positions, `[rows × kv_heads · head_dim]`.
    pub keys: &'a mut [f32],
    /// Their values, the same.
    pub values: &'a mut [f32],
}

/// A whole layer: its attention, and its FFN, all of whose neurons are on the device.
#[derive(Clone, Copy)]
pub struct ChainLayer<'a> {
    /// Number of its attention.
    pub attention: usize,
    /// As in [`Attend`].
    pub angles: [&'a [f32]; 2],
    /// As in [`Attend`].
    pub spans: &'a [AttendSpan],
    /// Number of the buffer with its neurons, and how many these are.
    pub part: usize,
    /// See `part`.
    pub neurons: usize,
}

/// Layers one after the other, without a word to the host between them.
#[derive(Clone, Copy)]
pub struct Chain<'a> {
    /// Rows of the residual stream before the first layer, `[rows × d]`.
    pub x: &'a [f32],
    /// The layers.
    pub layers: &'a [ChainLayer<'a>],
}

/// The largest chains.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ChainRoom {
    /// Most rows.
    pub rows: usize,
    /// Most layers.
    pub layers: usize,
    /// Most clusters of a layer's FFN.
    pub clusters: usize,
}

/// Where the results of a chain go.
pub struct Chained<'a> {
    /// Rows of the residual stream behind the last layer.
    pub x: &'a mut [f32],
    /// Keys and values as pages have them, `[layer][row][K, V][kv_heads · head_dim]`.
    pub stored: &'a mut [f32],
}

impl AttentionLayer {
    /// The first position that a row at `position` sees.
    pub fn first_seen(&self, position: usize) -> usize {
        match self.window {
            0 => 0,
            window => (position + 1).saturating_sub(window),
        }
    }
}
