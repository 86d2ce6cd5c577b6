//! Trace events of the engine for [`emberflow_storage::trace`].

use emberflow_storage::trace::Kind;

/// Attention of a layer, including projections.
pub static ATTENTION: Kind = Kind {
    name: "attention",
    keys: ["layer", ""],
};

/// A parallel section of an FFN: gates or clusters.
pub static FFN: Kind = Kind {
    name: "ffn",
    keys: ["layer", ""],
};

/// The router of a layer's experts.
pub static ROUTER: Kind = Kind {
    name: "router",
    keys: ["layer", ""],
};

/// Reduction of a layer's partial sums.
pub static REDUCE: Kind = Kind {
    name: "reduce",
    keys: ["layer", ""],
};

/// Embedding lookup.
pub static EMBEDDING: Kind = Kind {
    name: "embedding",
    keys: ["", ""],
};

/// Final norm and logits.
pub static HEAD: Kind = Kind {
    name: "head",
    keys: ["", ""],
};

/// Gates of one or several clusters, labelled by the first.
pub static GATE: Kind = Kind {
    name: "gate",
    keys: ["layer", "cluster"],
};

/// Up products of several clusters, labelled by the first.
pub static UP: Kind = Kind {
    name: "up",
    keys: ["layer", "cluster"],
};

/// Down sums of a cluster.
pub static DOWN: Kind = Kind {
    name: "down",
    keys: ["layer", "cluster"],
};

/// Computation stalled on reads.
pub static WAIT: Kind = Kind {
    name: "wait",
    keys: ["layer", ""],
};

/// A device's part of matrix products, from submission to the last result.
pub static PRODUCTS: Kind = Kind {
    name: "products",
    keys: ["tokens", "rows"],
};

/// A group of experts on a device, from submission to the last hidden value.
pub static EXPERTS: Kind = Kind {
    name: "experts",
    keys: ["layer", "experts"],
};

/// A device's part of an FFN, from submission to the last sum.
pub static DENSE: Kind = Kind {
    name: "dense",
    keys: ["layer", "clusters"],
};
