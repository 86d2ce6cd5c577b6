//! Numbers that PowerInfer-2 published, measured by its authors on their phones: they stand beside
//! ours for orientation, never mixed with them.

/// Fig. 14 and §7.5: Bamboo-7B on a OnePlus 12 (UFS 4.0), half of the FFN in memory. A policy, what
/// its step adds, and tokens per second. The last step needs a device: the authors' XPU.
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

/// Table 4: share of the critical path that Bamboo-7B waits for I/O, half of the FFN in memory:
/// PowerInfer-2, and LLM in a flash as its authors built it.
pub const WAITING: [f64; 2] = [0.137, 0.767];
