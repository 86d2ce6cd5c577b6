//! Static graphs of integer products.
//!
//! ```text
//! weights [height, row bytes] i8 or u8   rows as they lie, each with its scales behind it
//! tokens  [width, groups, 32] i8
//! sums    [groups, height, width]   i32
//!
//! weights ─Slice─Reshape─Transpose─▶ [groups, height, bytes of a group] ─bytes or nibbles─▶ ┐
//! tokens ───────────────Transpose──▶ [groups, 32, width] ──────────────────────────────────▶ MatMulInteger ─▶ sums
//! ```
//!
//! Signed bytes are multiplied by signed bytes, and nibbles by signed bytes: kernels that multiply unsigned by signed bytes add
//! pairs of products in 16 bits on some processors, which saturates, but not of nibbles.

use crate::onnx::{Attribute, Element, Graph};

/// Elements of a group.
pub(crate) const GROUP: usize = 32;

/// How weights are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Weights {
    /// Signed bytes.
    Bytes,
    /// Nibbles that stand for numbers that are so much smaller; the low ones of a group's bytes come first.
    Nibbles(u8),
}

impl Weights {
    fn element(self) -> Element {
        match self {
            Self::Bytes => Element::I8,
            Self::Nibbles(_) => Element::U8,
        }
    }

    /// Bytes of a group.
    pub fn group_bytes(self) -> usize {
        match self {
            Self::Bytes => GROUP,
            Self::Nibbles(_) => GROUP / 2,
        }
    }
}

/// Rows of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Form {
    /// How they are stored.
    pub weights: Weights,
    /// Groups of a row.
    pub groups: usize,
    /// Bytes of a row, with what lies behind its groups.
    pub row_bytes: usize,
}

/// The number of rows and of tokens of a graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Tile {
    pub height: usize,
    pub width: usize,
}

/// Names of a graph's inputs and of its output.
pub(crate) const WEIGHTS: &str = "weights";
pub(crate) const TOKENS: &str = "tokens";
pub(crate) const SUMS: &str = "sums";

impl Form {
    /// The model that multiplies a tile.
    pub(crate) fn model(&self, tile: Tile) -> Vec<u8> {
        let Self {
            weights,
            groups,
            row_bytes,
        } = *self;
        let Tile { height, width } = tile;
        let bytes = weights.group_bytes();
        let graph = Graph::new("group sums")
            .input(WEIGHTS, weights.element(), &[height, row_bytes])
            .input(TOKENS, Element::I8, &[width, groups, GROUP])
            .output(SUMS, Element::I32, &[groups, height, width])
            .list("start", &[0])
            .list("end", &[groups * bytes])
            .list("axis", &[1])
            .list("by group", &[height, groups, bytes])
            .node("Slice", &[WEIGHTS, "start", "end", "axis"], "rows", None)
            .node("Reshape", &["rows", "by group"], "grouped", None)
            .node("Transpose", &["grouped"], "stored", permuted(&[1, 0, 2]))
            .node("Transpose", &[TOKENS], "x", permuted(&[1, 2, 0]));
        let graph = match weights {
            Weights::Bytes => graph.node("MatMulInteger", &["stored", "x"], SUMS, None),
            Weights::Nibbles(less) => graph
                .byte("16", 16)
                .byte("4", 4)
                .byte("less", less)
                .node("Mod", &["stored", "16"], "low", None)
                .node(
                    "BitShift",
                    &["stored", "4"],
                    "high",
                    Some(("direction", Attribute::Text("RIGHT"))),
                )
                .node(
                    "Concat",
                    &["low", "high"],
                    "w",
                    Some(("axis", Attribute::Number(2))),
                )
                .node("MatMulInteger", &["w", "x", "less"], SUMS, None),
        };
        graph.model()
    }
}

/// The attribute of a transposition.
fn permuted<'a>(axes: &'a [u64]) -> Option<(&'static str, Attribute<'a>)> {
    Some(("perm", Attribute::Numbers(axes)))
}
