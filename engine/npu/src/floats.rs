//! Static graphs of floats for the sums of [`Form`]s by row: for providers that know no products of integers, such as QNN's.
//!
//! ```text
//! weights [height, row bytes] i8        as in graphs of integers; nibbles as bytes, which the host unpacks
//! across  [row bytes, width]  i8        activations by channel, 0 where there are none
//! sums    [pieces, height, width] f32   exact multiples of a power of two, if floats have 24 bits
//!
//! across  ─DequantizeLinear─▶ Slice of rows, for each piece ─▶ ┐
//! weights ─DequantizeLinear─▶ Slice of columns ──────────────▶ MatMul ─▶ a piece of sums
//! ```
//!
//! A piece has so few channels that its sums are below 2^24, so that floats of 32 bits have them exactly whatever the order
//! of additions. Factors keep products and sums of floats of 16 bits in their range; these lose bits.

use crate::graph::{
    Floats, Form, GROUP, Numbers, OUTLIERS, PICKED, SUMS, Summed, TOKENS, Tile, WEIGHTS, Weights,
};
use crate::onnx::{Attribute, Element, Graph};

/// Channels of a piece: of bytes 1024 · 128 · 127 < 2^24, of nibbles 16384 · 8 · 127 < 2^24.
fn piece_len(weights: Weights) -> usize {
    match weights {
        Weights::Bytes => 1 << 10,
        Weights::Nibbles(_) => 1 << 14,
    }
}

/// The factor of bytes, of weights and of activations.
const OF_BYTES: f32 = 1.0 / 128.0;

impl Form {
    /// Bytes of a row as graphs of floats read it.
    pub(crate) fn float_row_bytes(&self) -> usize {
        match self.weights {
            Weights::Bytes => self.row_bytes,
            Weights::Nibbles(_) => self.groups * GROUP,
        }
    }

    /// Whether the host unpacks rows for graphs of such numbers.
    pub(crate) fn is_unpacked(&self, numbers: Numbers) -> bool {
        numbers != Numbers::Integers && self.weights != Weights::Bytes
    }

    /// Ranges of a row's channels, a piece each.
    fn pieces(&self) -> impl Iterator<Item = [usize; 2]> {
        let (end, len) = (self.groups * GROUP, piece_len(self.weights));
        let piece = move |start| [start, end.min(start + len)];
        (0..end).step_by(len).map(piece)
    }

    /// Values of a row and a token that a graph of floats returns.
    pub(crate) fn float_sums(&self) -> usize {
        self.pieces().count() + usize::from(self.outliers() > 0)
    }

    /// Bytes of a run of a tile: bytes, floats of them and of their pieces, and sums.
    pub(crate) fn float_bytes(&self, Tile { height, width }: Tile) -> usize {
        let sums = height * width * (8 * self.float_sums() + 4 * self.sums());
        let outliers = 5 * (height + width) * self.outliers();
        9 * (height + width) * self.float_row_bytes() + sums + outliers
    }

    /// Puts rows of nibbles as bytes, `[height × channels]`, as graphs of floats read them: rows that are not there are 0.
    pub(crate) fn unpack(&self, rows: &[u8], out: &mut [u8]) {
        let bytes = self.weights.group_bytes();
        let less = match self.weights {
            Weights::Bytes => 0,
            Weights::Nibbles(less) => less,
        };
        let rows = rows.chunks_exact(self.row_bytes);
        let mut groups = out.chunks_exact_mut(GROUP);
        let stored = rows.flat_map(|row| row[..self.groups * bytes].chunks_exact(bytes));
        // The stored ones come first, so that none of the others is passed over.
        for (stored, group) in stored.zip(&mut groups) {
            let (low, high) = group.split_at_mut(bytes);
            for ((&byte, low), high) in stored.iter().zip(low).zip(high) {
                *low = (byte & 15).wrapping_sub(less);
                *high = (byte >> 4).wrapping_sub(less);
            }
        }
        groups.for_each(|group| group.fill(0));
    }

    /// Puts activations, `[tokens × channels]`, by channel, `[row bytes × width]`: those that are not there are 0.
    pub(crate) fn put_across(&self, tokens: &[i8], width: usize, out: &mut [i8]) {
        across(tokens, self.groups * GROUP, width, out);
    }

    /// The same of what tokens meet of outliers, `[tokens × outliers]`.
    pub(crate) fn put_picked(&self, picked: &[i8], width: usize, out: &mut [i8]) {
        across(picked, self.outliers(), width, out);
    }

    /// Adds the pieces that a graph returned, `[pieces × height · width]`, to whole sums, as graphs of integers return them.
    pub(crate) fn add_pieces(&self, found: &[f32], sums: &mut Vec<i32>) {
        let (count, of_pieces) = (self.float_sums(), self.pieces().count());
        sums.clear();
        let len = found.len() / count.max(1);
        sums.resize(self.sums() * len, 0);
        let (whole, of_outliers) = sums.split_at_mut(len);
        for (i, piece) in found.chunks_exact(len.max(1)).enumerate() {
            let into = if i < of_pieces {
                &mut *whole
            } else {
                &mut *of_outliers
            };
            for (sum, value) in into.iter_mut().zip(piece) {
                // A provider may return anything: what is no such integer becomes the nearest one.
                let steps = (value / (OF_BYTES * OF_BYTES)).round_ties_even();
                *sum = sum.saturating_add(steps as i32);
            }
        }
    }

    /// A graph of floats, and what multiplies a tile; `None` if sums are by group.
    pub(crate) fn float_added(&self, graph: Graph, tile: Tile, floats: Floats) -> Option<Graph> {
        let Summed::ByRow(count) = self.summed else {
            return None;
        };
        let Tile { height, width } = tile;
        let len = self.float_row_bytes();
        let graph = graph
            .input(WEIGHTS, Element::I8, &[height, len])
            .input(TOKENS, Element::I8, &[len, width])
            .output(SUMS, Element::F32, &[self.float_sums(), height, width])
            .float("of bytes", OF_BYTES)
            .signed_byte("zero", 0)
            .list("rows", &[0])
            .list("columns", &[1])
            .list("one piece", &[1, height, width]);
        let graph = dequantized(graph, TOKENS, "x", floats);
        let mut graph = dequantized(graph, WEIGHTS, "w", floats);
        let mut names = Vec::new();
        for (i, piece) in self.pieces().enumerate() {
            let sums = format!("sums {i}");
            graph = with_piece(graph, piece, &sums);
            names.push(sums);
        }
        if count > 0 {
            graph = graph.input(OUTLIERS, Element::I8, &[height, count]).input(
                PICKED,
                Element::I8,
                &[count, width],
            );
            graph = dequantized(graph, OUTLIERS, "outlier", floats);
            graph = dequantized(graph, PICKED, "met", floats)
                .node("MatMul", &["outlier", "met"], "of outliers", None)
                .node("Reshape", &["of outliers", "one piece"], "others", None);
            names.push("others".into());
        }
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let axis = Some(("axis", Attribute::Number(0)));
        Some(match floats {
            Floats::Single => graph.node("Concat", &names, SUMS, axis),
            Floats::Half => {
                let to = Some(("to", Attribute::Number(Element::F32 as u64)));
                let graph = graph.node("Concat", &names, "halves", axis);
                graph.node("Cast", &["halves"], SUMS, to)
            }
        })
    }
}

/// Puts items of `len` values each by value, `[.. × width]`, and 0 elsewhere.
fn across(items: &[i8], len: usize, width: usize, out: &mut [i8]) {
    out.fill(0);
    for (t, item) in items.chunks_exact(len.max(1)).enumerate() {
        for (channel, &x) in item.iter().enumerate() {
            out[channel * width + t] = x;
        }
    }
}

/// Adds the sums of a piece, `[1, height, width]`.
fn with_piece(graph: Graph, [start, end]: [usize; 2], sums: &str) -> Graph {
    let name = |of: &str| format!("{sums} {of}");
    let [first, last, of_weights, of_tokens, product] =
        ["first", "last", "w", "x", "product"].map(name);
    graph
        .list(&first, &[start])
        .list(&last, &[end])
        .node("Slice", &["w", &first, &last, "columns"], &of_weights, None)
        .node("Slice", &["x", &first, &last, "rows"], &of_tokens, None)
        .node("MatMul", &[&of_weights, &of_tokens], &product, None)
        .node("Reshape", &[&product, "one piece"], sums, None)
}

/// Adds signed bytes as the floats that products are computed in, times their factor.
fn dequantized(graph: Graph, from: &str, to: &str, floats: Floats) -> Graph {
    let (whole, half) = (format!("whole {to}"), Element::F16 as u64);
    let of_bytes = [from, "of bytes", "zero"];
    match floats {
        Floats::Single => graph.node("DequantizeLinear", &of_bytes, to, None),
        Floats::Half => graph
            .node("DequantizeLinear", &of_bytes, &whole, None)
            .node("Cast", &[&whole], to, Some(("to", Attribute::Number(half)))),
    }
}
