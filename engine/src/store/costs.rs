//! Read costs of the device, and the decisions based on them.

/// Nanoseconds per read at high queue depth.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReadCosts {
    /// A whole cluster, sequentially.
    pub cluster: f64,
    /// The Gate part of one neuron.
    pub gate: f64,
    /// The Up and Down part of one neuron.
    pub rest: f64,
    /// A whole neuron.
    pub bundle: f64,
    /// Expected share of neurons that fire.
    pub fire_share: f64,
}

impl ReadCosts {
    /// Two-phase loading pays for a whole cluster if
    /// `neurons × (gate + fire_share × rest) < cluster` (PowerInfer-2 §4.4).
    pub fn two_phases(&self, neurons: usize) -> bool {
        neurons as f64 * (self.gate + self.fire_share * self.rest) < self.cluster
    }

    /// Two-phase loading pays for a predicted neuron if `gate + precision × rest < bundle`.
    pub fn gate_first(&self, precision: f64) -> bool {
        self.gate + precision * self.rest < self.bundle
    }

    /// One read of the cluster is cheaper if `missing × bundle > cluster`.
    pub fn cluster_over_bundles(&self, missing: usize) -> bool {
        missing as f64 * self.bundle > self.cluster
    }

    /// One read of the cluster is cheaper if `missing × rest > cluster`, with Gate rows resident.
    pub fn whole_cluster(&self, missing: usize) -> bool {
        missing as f64 * self.rest > self.cluster
    }
}
