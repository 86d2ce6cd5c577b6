//! Float graphs for sums by row, for providers without integer products, such as QNN's.
//!
//! ```text
//! weights [height, row bytes] i8        as in integer graphs; the host unpacks nibbles to bytes
//! across  [row bytes, width]  i8        activations by channel, padded with 0
//! sums    [pieces, height, width] f32   multiples of a power of two; exact if floats have 24 bits
//!
//! across  ─DequantizeLinear─▶ Slice of rows ────▶ ┐
//! weights ─DequantizeLinear─▶ Slice of columns ─▶ MatMul ─▶ sums of a piece
//! ```
//!
//! Channels are split into pieces whose sums stay below 2^24, so 32-bit floats hold them exactly in any order of additions.
//! Scales keep the products and sums in the range of 16-bit floats, which lose bits.

use crate::graph::{
    Floats, Form, GROUP, Numbers, OUTLIERS, PICKED, SUMS, Summed, TOKENS, Tile, WEIGHTS, Weights,
};
use crate::onnx::{Attribute, Element, Graph};

/// Channels per piece: for bytes 1024 · 128 · 127 < 2^24, for nibbles 16384 · 8 · 127 < 2^24.
fn piece_len(weights: Weights) -> usize {
    match weights {
        Weights::Bytes => 1 << 10,
        Weights::Nibbles(_) => 1 << 14,
    }
}

/// Scale of the bytes of weights and of activations.
const BYTE_SCALE: f32 = 1.0 / 128.0;

impl Form {
    /// Bytes per row in the input of a float graph.
    pub(crate) fn float_row_bytes(&self) -> usize {
        match self.weights {
            Weights::Bytes => self.row_bytes,
            Weights::Nibbles(_) => self.groups * GROUP,
        }
    }

    /// Whether the host has to unpack rows for graphs of these numbers.
    pub(crate) fn is_unpacked(&self, numbers: Numbers) -> bool {
        numbers != Numbers::Integers && self.weights != Weights::Bytes
    }

    /// Channel range of each piece of a row.
    fn pieces(&self) -> impl Iterator<Item = [usize; 2]> {
        let (end, len) = (self.groups * GROUP, piece_len(self.weights));
        let piece = move |start| [start, end.min(start + len)];
        (0..end).step_by(len).map(piece)
    }

    /// Values that a float graph returns per row and token.
    pub(crate) fn float_sums(&self) -> usize {
        self.pieces().count() + usize::from(self.outliers() > 0)
    }

    /// Memory of a run in bytes: inputs as bytes, as floats and as slices of pieces, and sums.
    pub(crate) fn float_bytes(&self, Tile { height, width }: Tile) -> usize {
        let sums = height * width * (8 * self.float_sums() + 4 * self.sums());
        let outliers = 5 * (height + width) * self.outliers();
        9 * (height + width) * self.float_row_bytes() + sums + outliers
    }

    /// Unpacks rows of nibbles to the bytes `[height × channels]` of a float graph's input; missing rows are 0.
    pub(crate) fn unpack(&self, rows: &[u8], out: &mut [u8]) {
        let bytes = self.weights.group_bytes();
        let offset = match self.weights {
            Weights::Bytes => 0,
            Weights::Nibbles(offset) => offset,
        };
        let rows = rows.chunks_exact(self.row_bytes);
        let mut groups = out.chunks_exact_mut(GROUP);
        let stored = rows.flat_map(|row| row[..self.groups * bytes].chunks_exact(bytes));
        // `stored` comes first in the zip: the other order would drop a group at its end.
        for (stored, group) in stored.zip(&mut groups) {
            let (low, high) = group.split_at_mut(bytes);
            for ((&byte, low), high) in stored.iter().zip(low).zip(high) {
                *low = (byte & 15).wrapping_sub(offset);
                *high = (byte >> 4).wrapping_sub(offset);
            }
        }
        groups.for_each(|group| group.fill(0));
    }

    /// Transposes activations `[tokens × channels]` to `[row bytes × width]`, padded with 0.
    pub(crate) fn put_across(&self, tokens: &[i8], width: usize, out: &mut [i8]) {
        across(tokens, self.groups * GROUP, width, out);
    }

    /// Transposes the activations of outlier channels, `[tokens × outliers]`.
    pub(crate) fn put_picked(&self, picked: &[i8], width: usize, out: &mut [i8]) {
        across(picked, self.outliers(), width, out);
    }

    /// Adds up a float graph's pieces, `[pieces × height · width]`, to the sums that an integer graph returns.
    pub(crate) fn add_pieces(&self, found: &[f32], sums: &mut Vec<i32>) {
        let (count, pieces) = (self.float_sums(), self.pieces().count());
        sums.clear();
        let len = found.len() / count.max(1);
        sums.resize(self.sums() * len, 0);
        let (whole, outliers) = sums.split_at_mut(len);
        for (i, piece) in found.chunks_exact(len.max(1)).enumerate() {
            let target = if i < pieces {
                &mut *whole
            } else {
                &mut *outliers
            };
            for (sum, value) in target.iter_mut().zip(piece) {
                // A provider may return any value: round to the nearest integer.
                let steps = (value / (BYTE_SCALE * BYTE_SCALE)).round_ties_even();
                *sum = sum.saturating_add(steps as i32);
            }
        }
    }

    /// Adds the nodes of a float graph for a tile; `None` if sums are by group.
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
            .float("scale", BYTE_SCALE)
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
            graph = dequantized(graph, PICKED, "activation", floats)
                .node(
                    "MatMul",
                    &["outlier", "activation"],
                    "outlier product",
                    None,
                )
                .node(
                    "Reshape",
                    &["outlier product", "one piece"],
                    "outlier sums",
                    None,
                );
            names.push("outlier sums".into());
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

/// Transposes items of `len` values each to `[len × width]`, padded with 0.
fn across(items: &[i8], len: usize, width: usize, out: &mut [i8]) {
    out.fill(0);
    for (t, item) in items.chunks_exact(len.max(1)).enumerate() {
        for (channel, &x) in item.iter().enumerate() {
            out[channel * width + t] = x;
        }
    }
}

/// Adds the nodes of a piece, whose output is `[1, height, width]`.
fn with_piece(graph: Graph, [start, end]: [usize; 2], sums: &str) -> Graph {
    let name = |value: &str| format!("{sums} {value}");
    let [first, last, weights, tokens, product] = ["first", "last", "w", "x", "product"].map(name);
    graph
        .list(&first, &[start])
        .list(&last, &[end])
        .node("Slice", &["w", &first, &last, "columns"], &weights, None)
        .node("Slice", &["x", &first, &last, "rows"], &tokens, None)
        .node("MatMul", &[&weights, &tokens], &product, None)
        .node("Reshape", &[&product, "one piece"], sums, None)
}

/// Adds the conversion of signed bytes to scaled floats of the given width.
fn dequantized(graph: Graph, from: &str, to: &str, floats: Floats) -> Graph {
    let (whole, half) = (format!("whole {to}"), Element::F16 as u64);
    let inputs = [from, "scale", "zero"];
    match floats {
        Floats::Single => graph.node("DequantizeLinear", &inputs, to, None),
        Floats::Half => graph.node("DequantizeLinear", &inputs, &whole, None).node(
            "Cast",
            &[&whole],
            to,
            Some(("to", Attribute::Number(half))),
        ),
    }
}
