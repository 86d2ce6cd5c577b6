//! Read costs of the storage device, and the decisions based on them.

/// Nanoseconds per read at high queue depth.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReadCosts {
    /// A whole cluster, read sequentially.
    pub cluster: f64,
    /// The Gate row of one neuron.
    pub gate: f64,
    /// Up and Down of one neuron.
    pub rest: f64,
    /// The whole bundle of one neuron.
    pub bundle: f64,
    /// Expected share of neurons that fire.
    pub fire_share: f64,
}

impl ReadCosts {
    /// Whether two-phase loading of a cluster is cheaper than reading it whole: `neurons × (gate +
    /// fire_share × rest) < cluster` (PowerInfer-2 §4.4).
    pub fn two_phases(&self, neurons: usize) -> bool {
        neurons as f64 * (self.gate + self.fire_share * self.rest) < self.cluster
    }

    /// Whether two-phase loading of a predicted neuron is cheaper: `gate + precision × rest <
    /// bundle`.
    pub fn gate_first(&self, precision: f64) -> bool {
        self.gate + precision * self.rest < self.bundle
    }

    /// Whether one read of the cluster is cheaper: `missing × bundle > cluster`.
    pub fn cluster_over_bundles(&self, missing: usize) -> bool {
        missing as f64 * self.bundle > self.cluster
    }

    /// The same with resident Gate rows: `missing × rest > cluster`.
    pub fn whole_cluster(&self, missing: usize) -> bool {
        missing as f64 * self.rest > self.cluster
    }
}
