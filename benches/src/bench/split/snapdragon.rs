//! The Snapdragon 8 Gen 3 as measured in HeteroInfer, with 4-bit weights and 16-bit activations,
//! for simulation. None of it was measured by us.

use emberflow_devices::split::{Forms, Pair, Product, Space};

use super::measured::{MeasuredCurve, Padded, Point, WeightShape};

const fn point(n: usize, us: f64) -> Point {
    Point { n, us }
}

/// GPU, Adreno 750 (HeteroInfer, Table 3): linear in tokens (§3.1).
pub const GPU: MeasuredCurve = MeasuredCurve {
    shapes: &[
        WeightShape {
            rows: 4096,
            cols: 4096,
            points: &[point(1, 511.0), point(128, 7306.0), point(256, 10841.0)],
        },
        WeightShape {
            rows: 4096,
            cols: 14336,
            points: &[point(1, 1467.0), point(256, 35231.0)],
        },
        WeightShape {
            rows: 28672,
            cols: 4096,
            points: &[point(1, 1903.0)],
        },
    ],
    step: 1,
};

/// NPU, Hexagon (Table 3): steps of 32 tokens (§3.2, stage performance); slow if columns outnumber
/// rows (shape-sensitive performance). The faster operand order (§4.1).
pub const NPU: MeasuredCurve = MeasuredCurve {
    shapes: &[
        WeightShape {
            rows: 4096,
            cols: 4096,
            points: &[point(1, 693.0), point(128, 912.0), point(256, 1884.0)],
        },
        WeightShape {
            rows: 4096,
            cols: 14336,
            points: &[point(1, 6506.0), point(256, 23445.0)],
        },
        WeightShape {
            rows: 28672,
            cols: 4096,
            points: &[point(1, 3886.0)],
        },
    ],
    step: 32,
};

/// Ratios of weights, `GPU : NPU`, in the solver's search space (Table 3).
pub const RATIOS: [[usize; 2]; 3] = [[1, 1], [3, 1], [2, 3]];

/// Token counts with a graph: one, and multiples of 128. (The paper names 128, 256 and 512 as
/// examples of standard sizes, and pads 257 to 384 in the last row of Table 3.) These reproduce the
/// ranges of Table 3 except one: a hybrid partition of 257 to 279 tokens is 1:1 instead of 2:3.
pub const GRAPHS: [usize; 9] = [1, 128, 256, 384, 512, 640, 768, 896, 1024];

/// The NPU with these graphs.
pub const GRAPHED: Padded = Padded {
    of: &NPU,
    graphs: &GRAPHS,
};

/// Seconds to synchronise with a polled flag and to copy (§4.3: some microseconds of polling in
/// shared memory, tens of microseconds to submit).
pub const SYNC: f64 = 50e-6;

/// Seconds to synchronise with `clFinish` (§3.1).
pub const SLOW_SYNC: f64 = 400e-6;

/// Both processors with fast synchronisation.
pub const PAIR: Pair<'static> = Pair {
    first: &GPU,
    second: &GRAPHED,
    sync: SYNC,
};

/// Search space of the paper's solver.
pub const SPACE: Space<'static> = Space {
    forms: Forms::Rectangles,
    ratios: Some(&RATIOS),
};

/// A row of Table 3: weights, tokens, and the published partition.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PublishedSplit {
    /// Weights and the row's first token count.
    pub product: Product,
    /// The row's last token count.
    pub until: usize,
    /// GPU and NPU alone in microseconds, if the row has single values.
    pub alone: Option<[f64; 2]>,
    /// The partition as named in the table, `GPU : NPU`.
    pub chosen: &'static str,
}

/// Table 3.
pub const TABLE: [PublishedSplit; 9] = [
    row([4096, 4096], [1, 1], Some([511.0, 693.0]), "weights 1:1"),
    row([28672, 4096], [1, 1], Some([1903.0, 3886.0]), "weights 3:1"),
    row([4096, 14336], [1, 1], Some([1467.0, 6506.0]), "GPU alone"),
    row([4096, 4096], [128, 128], Some([7306.0, 912.0]), "NPU alone"),
    row([4096, 4096], [193, 255], None, "NPU alone, padded"),
    row(
        [4096, 4096],
        [256, 256],
        Some([10841.0, 1884.0]),
        "NPU alone",
    ),
    row([4096, 4096], [257, 272], None, "activations n-256:256"),
    row(
        [4096, 14336],
        [256, 256],
        Some([35231.0, 23445.0]),
        "weights 2:3",
    ),
    row([4096, 14336], [257, 384], None, "hybrid 2:3"),
];

const fn row(
    weights: [usize; 2],
    tokens: [usize; 2],
    alone: Option<[f64; 2]>,
    chosen: &'static str,
) -> PublishedSplit {
    PublishedSplit {
        product: Product {
            rows: weights[0],
            cols: weights[1],
            n: tokens[0],
        },
        until: tokens[1],
        alone,
        chosen,
    }
}
