//! Values published in PowerInfer-2, measured by its authors on their phones. They are shown for
//! comparison and never mixed with ours.

/// Fig. 14 and §7.5: Bamboo-7B on a OnePlus 12 (UFS 4.0), half of the FFN in memory: (policy, added
/// mechanism, tokens per second). The last one needs a device: the authors' XPU.
pub const LADDER: [(&str, &str, f64); 5] = [
    ("baseline", "nothing", 0.4),
    ("bundle-only", "+ bundles", 1.1),
    ("no-pipeline", "+ neuron cache", 4.181),
    ("full", "+ cluster pipeline", 9.60),
    ("full", "+ device", 11.07),
];

/// Table 5: milliseconds per token of Bamboo-7B with half of the FFN in memory, 1,024 tokens: mean,
/// P50, P90, P99.
pub const LATENCY: [f64; 4] = [90.32, 86.88, 115.02, 162.02];

/// Table 4: share of the critical path spent waiting for I/O, Bamboo-7B, half of the FFN in memory:
/// PowerInfer-2, and the authors' implementation of LLM in a flash.
pub const WAITING: [f64; 2] = [0.137, 0.767];
