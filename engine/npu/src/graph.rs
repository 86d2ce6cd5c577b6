//! Static graphs of integer products.
//!
//! ```text
//! weights [height, row bytes] i8 or u8   rows as stored, each followed by its scales
//! tokens  [width, groups, 32] i8
//! sums    [groups, height, width]   i32
//!
//! PER GROUP
//! weights ─Slice─Reshape─Transpose─▶ [groups, height, group bytes] ─bytes or nibbles──────▶ ┐
//! tokens ───────────────Transpose──▶ [groups, 32, width] ──────────────────────────────────▶ MatMulInteger ─▶ sums
//!
//! PER ROW: shapes without the group dimension; sums [1, height, width], with outliers [2, height, width]
//! weights ─Slice─bytes or nibbles─Reshape─▶ [height, groups · 32] ─────────────────────────▶ ┐
//! tokens ─Reshape─Transpose───────────────▶ [groups · 32, width] ──────────────────────────▶ MatMulInteger ─▶ sums[0]
//! outliers [height, count] i8 ─────────────────────────────────────────────────────────────▶ ┐
//! picked   [width, count]  i8 ─Transpose──▶ [count, width] ────────────────────────────────▶ MatMulInteger ─▶ sums[1]
//! ```
//!
//! Sums by row suit NPUs with one scale per channel, and make the output smaller by the number of groups per row.
//!
//! Bytes are signed on both sides. On some processors kernels for unsigned times signed bytes add pairs of products in 16
//! bits, which saturate; products of nibbles do not, so nibbles are unsigned.

use serde::{Deserialize, Serialize};

use crate::onnx::{Attribute, Element, Graph};

/// Elements per group.
pub(crate) const GROUP: usize = 32;

/// Storage of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Weights {
    /// Signed bytes.
    Bytes,
    /// Nibbles minus this offset. The low nibbles of a group's bytes are its first half.
    Nibbles(u8),
}

impl Weights {
    pub(crate) fn element(self) -> Element {
        match self {
            Self::Bytes => Element::I8,
            Self::Nibbles(_) => Element::U8,
        }
    }

    /// Bytes per group.
    pub fn group_bytes(self) -> usize {
        match self {
            Self::Bytes => GROUP,
            Self::Nibbles(_) => GROUP / 2,
        }
    }
}

/// Range of sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Summed {
    /// One sum per group.
    ByGroup,
    /// One sum per row, and a second one of this number of outliers, if any; they are separate inputs.
    ByRow(usize),
}

/// Arithmetic of a graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Numbers {
    /// Integers: `MatMulInteger`.
    Integers,
    /// Floats: `MatMul` (`floats.rs`).
    Floats(Floats),
}

/// Float type of products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Floats {
    /// 32 bits in the graph; the provider may still use fewer.
    Single,
    /// 16 bits.
    Half,
}

/// Layout of rows and of their sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Form {
    /// Storage of weights.
    pub weights: Weights,
    /// Range of sums.
    pub summed: Summed,
    /// Groups per row.
    pub groups: usize,
    /// Bytes per row, including those after its groups.
    pub row_bytes: usize,
}

/// Size of a graph: rows (height) and tokens (width).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Tile {
    pub height: usize,
    pub width: usize,
}

/// Identifies a graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub form: Form,
    pub tile: Tile,
    pub numbers: Numbers,
}

/// Names of a graph's inputs and output.
pub(crate) const WEIGHTS: &str = "weights";
pub(crate) const TOKENS: &str = "tokens";
pub(crate) const OUTLIERS: &str = "outliers";
pub(crate) const PICKED: &str = "picked";
pub(crate) const SUMS: &str = "sums";

impl Form {
    /// Number of sums per row and token.
    pub fn sums(&self) -> usize {
        match self.summed {
            Summed::ByGroup => self.groups,
            Summed::ByRow(0) => 1,
            Summed::ByRow(_) => 2,
        }
    }

    /// Outliers per row.
    pub fn outliers(&self) -> usize {
        match self.summed {
            Summed::ByGroup => 0,
            Summed::ByRow(count) => count,
        }
    }

    /// Adds the nodes for sums by row, and for sums of outliers.
    pub(crate) fn by_row(&self, graph: Graph, Tile { height, width }: Tile) -> Graph {
        let (groups, count) = (self.groups, self.outliers());
        let (n, bytes) = (groups * GROUP, self.weights.group_bytes());
        let graph = graph
            .input(WEIGHTS, self.weights.element(), &[height, self.row_bytes])
            .input(TOKENS, Element::I8, &[width, groups, GROUP])
            .output(SUMS, Element::I32, &[self.sums(), height, width])
            .list("start", &[0])
            .list("end", &[groups * bytes])
            .list("axis", &[1])
            .list("by group", &[height, groups, bytes])
            .list("by row", &[height, n])
            .list("by token", &[width, n])
            .list("one sum", &[1, height, width])
            .node("Slice", &[WEIGHTS, "start", "end", "axis"], "rows", None)
            .node("Reshape", &[TOKENS, "by token"], "whole", None)
            .node("Transpose", &["whole"], "x", permuted(&[1, 0]));
        let graph = match self.weights {
            Weights::Bytes => graph.node("MatMulInteger", &["rows", "x"], "product", None),
            Weights::Nibbles(offset) => nibbles(
                graph.node("Reshape", &["rows", "by group"], "stored", None),
                offset,
            )
            .node("Reshape", &["w", "by row"], "matrix", None)
            .node("MatMulInteger", &["matrix", "x", "offset"], "product", None),
        };
        if count == 0 {
            return graph.node("Reshape", &["product", "one sum"], SUMS, None);
        }
        graph
            .input(OUTLIERS, Element::I8, &[height, count])
            .input(PICKED, Element::I8, &[width, count])
            .node("Transpose", &[PICKED], "p", permuted(&[1, 0]))
            .node("MatMulInteger", &[OUTLIERS, "p"], "outlier product", None)
            .node("Reshape", &["product", "one sum"], "row sums", None)
            .node(
                "Reshape",
                &["outlier product", "one sum"],
                "outlier sums",
                None,
            )
            .node(
                "Concat",
                &["row sums", "outlier sums"],
                SUMS,
                Some(("axis", Attribute::Number(0))),
            )
    }

    /// Adds the nodes for sums by group.
    pub(crate) fn by_group(&self, graph: Graph, tile: Tile) -> Graph {
        let Self {
            weights,
            groups,
            row_bytes,
            ..
        } = *self;
        let Tile { height, width } = tile;
        let bytes = weights.group_bytes();
        let graph = graph
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
        match weights {
            Weights::Bytes => graph.node("MatMulInteger", &["stored", "x"], SUMS, None),
            Weights::Nibbles(offset) => {
                nibbles(graph, offset).node("MatMulInteger", &["w", "x", "offset"], SUMS, None)
            }
        }
    }
}

/// Adds the nodes that unpack the bytes `stored` to nibbles `w`, group by group, and the constant `offset`.
fn nibbles(graph: Graph, offset: u8) -> Graph {
    graph
        .byte("16", 16)
        .byte("4", 4)
        .byte("offset", offset)
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
}

/// The attribute of `Transpose`.
fn permuted<'a>(axes: &'a [u64]) -> Option<(&'static str, Attribute<'a>)> {
    Some(("perm", Attribute::Numbers(axes)))
}
