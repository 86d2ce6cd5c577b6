//! Static graphs of integer products.
//!
//! ```text
//! weights [height, row bytes] i8 or u8   rows as they lie, each with its scales behind it
//! tokens  [width, groups, 32] i8
//! sums    [groups, height, width]   i32
//!
//! PER GROUP
//! weights ─Slice─Reshape─Transpose─▶ [groups, height, bytes of a group] ─bytes or nibbles─▶ ┐
//! tokens ───────────────Transpose──▶ [groups, 32, width] ──────────────────────────────────▶ MatMulInteger ─▶ sums
//!
//! PER ROW: a group less in all shapes, and [1, height, width] sums, or with outliers [2, height, width]
//! weights ─Slice─bytes or nibbles─Reshape─▶ [height, groups · 32] ─────────────────────────▶ ┐
//! tokens ─Reshape─Transpose───────────────▶ [groups · 32, width] ──────────────────────────▶ MatMulInteger ─▶ sums[0]
//! outliers [height, count] i8 ─────────────────────────────────────────────────────────────▶ ┐
//! picked   [width, count]  i8 ─Transpose──▶ [count, width] ────────────────────────────────▶ MatMulInteger ─▶ sums[1]
//! ```
//!
//! A sum per row is what NPUs that know one scale per channel compute, and the output is as many times smaller as a row has
//! groups.
//!
//! Signed bytes are multiplied by signed bytes, and nibbles by signed bytes: kernels that multiply unsigned by signed bytes add
//! pairs of products in 16 bits on some processors, which saturates, but not of nibbles.

use serde::{Deserialize, Serialize};

use crate::onnx::{Attribute, Element, Graph};

/// Elements of a group.
pub(crate) const GROUP: usize = 32;

/// How weights are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Weights {
    /// Signed bytes.
    Bytes,
    /// Nibbles that stand for numbers that are so much smaller; the low ones of a group's bytes come first.
    Nibbles(u8),
}

impl Weights {
    pub(crate) fn element(self) -> Element {
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

/// Which products are summed up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Summed {
    /// Those of each group.
    ByGroup,
    /// Those of a row, and apart from them those of so many outliers, which are inputs of their own.
    ByRow(usize),
}

/// What a graph computes with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Numbers {
    /// Integers: `MatMulInteger`.
    Integers,
    /// Floats: `MatMul` (`floats.rs`).
    Floats(Floats),
}

/// Floats that products are computed in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Floats {
    /// Of 32 bits, if the provider has no others.
    Single,
    /// Of 16 bits, whatever the provider has.
    Half,
}

/// Rows of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Form {
    /// How they are stored.
    pub weights: Weights,
    /// Which products are summed up.
    pub summed: Summed,
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

/// Which graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub form: Form,
    pub tile: Tile,
    pub numbers: Numbers,
}

/// Names of a graph's inputs and of its output.
pub(crate) const WEIGHTS: &str = "weights";
pub(crate) const TOKENS: &str = "tokens";
pub(crate) const OUTLIERS: &str = "outliers";
pub(crate) const PICKED: &str = "picked";
pub(crate) const SUMS: &str = "sums";

impl Form {
    /// Sums of a row and a token.
    pub fn sums(&self) -> usize {
        match self.summed {
            Summed::ByGroup => self.groups,
            Summed::ByRow(0) => 1,
            Summed::ByRow(_) => 2,
        }
    }

    /// Outliers of a row.
    pub fn outliers(&self) -> usize {
        match self.summed {
            Summed::ByGroup => 0,
            Summed::ByRow(count) => count,
        }
    }

    /// Adds a sum for each row, and one for its outliers.
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
            Weights::Bytes => graph.node("MatMulInteger", &["rows", "x"], "all", None),
            Weights::Nibbles(less) => nibbles(
                graph.node("Reshape", &["rows", "by group"], "stored", None),
                less,
            )
            .node("Reshape", &["w", "by row"], "matrix", None)
            .node("MatMulInteger", &["matrix", "x", "less"], "all", None),
        };
        if count == 0 {
            return graph.node("Reshape", &["all", "one sum"], SUMS, None);
        }
        graph
            .input(OUTLIERS, Element::I8, &[height, count])
            .input(PICKED, Element::I8, &[width, count])
            .node("Transpose", &[PICKED], "p", permuted(&[1, 0]))
            .node("MatMulInteger", &[OUTLIERS, "p"], "of others", None)
            .node("Reshape", &["all", "one sum"], "of rows", None)
            .node("Reshape", &["of others", "one sum"], "of outliers", None)
            .node(
                "Concat",
                &["of rows", "of outliers"],
                SUMS,
                Some(("axis", Attribute::Number(0))),
            )
    }

    /// Adds a sum for each group.
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
            Weights::Nibbles(less) => {
                nibbles(graph, less).node("MatMulInteger", &["w", "x", "less"], SUMS, None)
            }
        }
    }
}

/// Adds the nibbles `w` of `stored` bytes, by group in their order, and how much `less` they stand for.
fn nibbles(graph: Graph, less: u8) -> Graph {
    graph
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
}

/// The attribute of a transposition.
fn permuted<'a>(axes: &'a [u64]) -> Option<(&'static str, Attribute<'a>)> {
    Some(("perm", Attribute::Numbers(axes)))
}
