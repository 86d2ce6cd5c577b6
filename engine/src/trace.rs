//! What the engine does, by name, for the recorder of [`emberflow_storage::trace`].

use emberflow_storage::trace::Kind;

/// Attention of a layer, with its projections.
pub static ATTENTION: Kind = Kind {
    name: "attention",
    keys: ["layer", ""],
};

/// A section of the threads inside an FFN: gates or clusters of a layer.
pub static FFN: Kind = Kind {
    name: "ffn",
    keys: ["layer", ""],
};

/// Adding up the partial sums of a layer.
pub static REDUCE: Kind = Kind {
    name: "reduce",
    keys: ["layer", ""],
};

/// The tokens' rows of the embedding.
pub static EMBEDDING: Kind = Kind {
    name: "embedding",
    keys: ["", ""],
};

/// Last norm and logits.
pub static HEAD: Kind = Kind {
    name: "head",
    keys: ["", ""],
};

/// The gates of a cluster, or of some, named after the first.
pub static GATE: Kind = Kind {
    name: "gate",
    keys: ["layer", "cluster"],
};

/// Ups of some clusters, named after the first.
pub static UP: Kind = Kind {
    name: "up",
    keys: ["layer", "cluster"],
};

/// Downs of a cluster.
pub static DOWN: Kind = Kind {
    name: "down",
    keys: ["layer", "cluster"],
};

/// The computation stands still for reads.
pub static WAIT: Kind = Kind {
    name: "wait",
    keys: ["layer", ""],
};
