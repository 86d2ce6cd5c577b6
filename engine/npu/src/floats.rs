//! Static graphs of floats for the sums of [`Form`]s by row: for providers that know no products of integers, such as QNN's.
//!
//! ```text
//! weights [height, row bytes] i8 or u8   as in graphs of integers
//! across  [planes · row bytes, width] i8 activations by channel, as the planes of a row's bytes have them, 0 elsewhere
//! sums    [pieces, height, width] f32    exact multiples of a power of two, if floats have 24 bits
//!
//! across  ─DequantizeLinear───────────▶ Slice of rows, for each piece ──────────────▶ ┐
//! weights ─DequantizeLinear─▶ planes ─▶ Slice of columns ───────────────────────────▶ MatMul ─▶ a piece of sums
//!
//! BYTES    one plane
//! NIBBLES  two planes, of the low and of the high nibbles: high = ⌊byte / 16⌋, low = byte - 16 · high
//! ```
//!
//! A piece has so few channels that its sums are below 2^24, so that floats of 32 bits have them exactly whatever the order
//! of additions. Factors keep products and sums of floats of 16 bits in their range; these lose bits.

use crate::graph::{
    Floats, Form, GROUP, OUTLIERS, PICKED, SUMS, Summed, TOKENS, Tile, WEIGHTS, Weights,
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

/// The factor of activations that meet nibbles, which have none.
const OF_NIBBLES: f32 = 1.0 / 1024.0;

/// Columns of a plane: a piece of a row's channels.
struct Piece {
    plane: usize,
    start: usize,
    end: usize,
}

impl Form {
    /// How a row's channels are divided.
    fn pieces(&self) -> Vec<Piece> {
        let end = self.groups * self.weights.group_bytes();
        let len = piece_len(self.weights);
        let of_plane = |plane| {
            (0..end).step_by(len).map(move |start| Piece {
                plane,
                start,
                end: end.min(start + len),
            })
        };
        (0..self.planes()).flat_map(of_plane).collect()
    }

    /// Planes of a row: whole bytes, or low and high nibbles.
    fn planes(&self) -> usize {
        match self.weights {
            Weights::Bytes => 1,
            Weights::Nibbles(_) => 2,
        }
    }

    /// Rows of activations by channel.
    pub(crate) fn across(&self) -> usize {
        self.planes() * self.row_bytes
    }

    /// Values of a row and a token that a graph of floats returns.
    pub(crate) fn float_sums(&self) -> usize {
        self.pieces().len() + usize::from(self.outliers() > 0)
    }

    /// Bytes of a run of a tile: bytes, floats of them and of their pieces, what planes of nibbles go through, and sums.
    pub(crate) fn float_bytes(&self, Tile { height, width }: Tile) -> usize {
        let of_row = 1 + 4 * (4 * self.planes() - 2);
        let sums = height * width * (8 * self.float_sums() + 4 * self.sums());
        let outliers = 5 * (height + width) * self.outliers();
        height * self.row_bytes * of_row + 9 * self.across() * width + sums + outliers
    }

    /// Puts activations, `[tokens × channels]`, by channel, `[across × width]`: those that are not there are 0.
    pub(crate) fn put_across(&self, tokens: &[i8], width: usize, out: &mut Vec<i8>) {
        out.clear();
        out.resize(self.across() * width, 0);
        let bytes = self.weights.group_bytes();
        for (t, token) in tokens.chunks_exact(self.groups * GROUP).enumerate() {
            for (g, group) in token.chunks_exact(GROUP).enumerate() {
                for (plane, some) in group.chunks_exact(bytes).enumerate() {
                    let first = plane * self.row_bytes + g * bytes;
                    for (j, &x) in some.iter().enumerate() {
                        out[(first + j) * width + t] = x;
                    }
                }
            }
        }
    }

    /// Adds the pieces that a graph returned, `[pieces × height · width]`, to whole sums, as graphs of integers return them.
    pub(crate) fn add_pieces(&self, found: &[f32], sums: &mut Vec<i32>) {
        let (count, of_pieces) = (self.float_sums(), self.pieces().len());
        let unit = match self.weights {
            Weights::Bytes => OF_BYTES * OF_BYTES,
            Weights::Nibbles(_) => OF_NIBBLES,
        };
        sums.clear();
        let len = found.len() / count.max(1);
        sums.resize(self.sums() * len, 0);
        let (whole, of_outliers) = sums.split_at_mut(len);
        for (i, piece) in found.chunks_exact(len.max(1)).enumerate() {
            let (into, unit) = match i < of_pieces {
                true => (&mut *whole, unit),
                false => (&mut *of_outliers, OF_BYTES * OF_BYTES),
            };
            for (sum, value) in into.iter_mut().zip(piece) {
                // A provider may return anything: what is no such integer becomes the nearest one.
                *sum = sum.saturating_add((value / unit).round_ties_even() as i32);
            }
        }
    }

    /// The model that multiplies a tile, in floats; `None` if sums are by group.
    pub(crate) fn float_model(&self, tile: Tile, floats: Floats) -> Option<Vec<u8>> {
        let Summed::ByRow(count) = self.summed else {
            return None;
        };
        let Tile { height, width } = tile;
        let factor = match self.weights {
            Weights::Bytes => OF_BYTES,
            Weights::Nibbles(_) => OF_NIBBLES,
        };
        let graph = Graph::new("row sums in floats")
            .input(WEIGHTS, self.weights.element(), &[height, self.row_bytes])
            .input(TOKENS, Element::I8, &[self.across(), width])
            .output(SUMS, Element::F32, &[self.float_sums(), height, width])
            .float("of tokens", factor)
            .float("of bytes", OF_BYTES)
            .signed_byte("zero", 0)
            .list("rows", &[0])
            .list("columns", &[1])
            .list("one piece", &[1, height, width]);
        let mut graph =
            self.planes_of(dequantized(graph, TOKENS, "of tokens", "x", floats), floats);
        let mut names = Vec::new();
        for (i, piece) in self.pieces().iter().enumerate() {
            let sums = format!("sums {i}");
            graph = self.with_piece(graph, piece, &sums);
            names.push(sums);
        }
        if count > 0 {
            graph = graph.input(OUTLIERS, Element::I8, &[height, count]).input(
                PICKED,
                Element::I8,
                &[count, width],
            );
            graph = dequantized(graph, OUTLIERS, "of bytes", "outlier", floats);
            graph = dequantized(graph, PICKED, "of bytes", "met", floats)
                .node("MatMul", &["outlier", "met"], "of outliers", None)
                .node("Reshape", &["of outliers", "one piece"], "others", None);
            names.push("others".into());
        }
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let axis = Some(("axis", Attribute::Number(0)));
        Some(
            match floats {
                Floats::Single => graph.node("Concat", &names, SUMS, axis),
                Floats::Half => {
                    let to = Some(("to", Attribute::Number(Element::F32 as u64)));
                    (graph.node("Concat", &names, "halves", axis)).node(
                        "Cast",
                        &["halves"],
                        SUMS,
                        to,
                    )
                }
            }
            .model(),
        )
    }

    /// Adds the sums of a piece, `[1, height, width]`.
    fn with_piece(&self, graph: Graph, piece: &Piece, sums: &str) -> Graph {
        let name = |of: &str| format!("{sums} {of}");
        let [start, end, first, last] = ["start", "end", "first", "last"].map(name);
        let [w, x, product] = ["w", "x", "product"].map(name);
        let (plane, before) = (PLANES[piece.plane], piece.plane * self.row_bytes);
        graph
            .list(&start, &[piece.start])
            .list(&end, &[piece.end])
            .list(&first, &[before + piece.start])
            .list(&last, &[before + piece.end])
            .node("Slice", &[plane, &start, &end, "columns"], &w, None)
            .node("Slice", &["x", &first, &last, "rows"], &x, None)
            .node("MatMul", &[&w, &x], &product, None)
            .node("Reshape", &[&product, "one piece"], sums, None)
    }

    /// Adds the planes of the weights.
    fn planes_of(&self, graph: Graph, floats: Floats) -> Graph {
        let Weights::Nibbles(less) = self.weights else {
            return dequantized(graph, WEIGHTS, "of bytes", PLANES[0], floats);
        };
        let graph = graph
            .float("sixteenth", 1.0 / 16.0)
            .float("sixteen", 16.0)
            .float("less", f32::from(less))
            .byte("none", 0)
            .node(
                "DequantizeLinear",
                &[WEIGHTS, "sixteenth", "none"],
                "sixteenths",
                None,
            )
            .node("Floor", &["sixteenths"], "high nibbles", None)
            .node("Sub", &["sixteenths", "high nibbles"], "rest", None)
            .node("Mul", &["rest", "sixteen"], "low nibbles", None);
        ["low nibbles", "high nibbles"]
            .iter()
            .zip(PLANES)
            .fold(graph, |graph, (of, plane)| {
                let whole = format!("whole {plane}");
                in_floats(
                    graph.node("Sub", &[of, "less"], &whole, None),
                    &whole,
                    plane,
                    floats,
                )
            })
    }
}

/// Names of the planes of weights.
const PLANES: [&str; 2] = ["plane 0", "plane 1"];

/// Adds signed bytes as floats, times a factor.
fn dequantized(graph: Graph, from: &str, factor: &str, to: &str, floats: Floats) -> Graph {
    let whole = format!("whole {to}");
    let graph = graph.node("DequantizeLinear", &[from, factor, "zero"], &whole, None);
    in_floats(graph, &whole, to, floats)
}

/// Adds floats as those that products are computed in.
fn in_floats(graph: Graph, from: &str, to: &str, floats: Floats) -> Graph {
    match floats {
        Floats::Single => graph.node("Identity", &[from], to, None),
        Floats::Half => {
            let half = Some(("to", Attribute::Number(Element::F16 as u64)));
            graph.node("Cast", &[from], to, half)
        }
    }
}
