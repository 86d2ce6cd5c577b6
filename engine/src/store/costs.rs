//! What reads cost on the device, and the choices that follow.

/// Nanoseconds of reads when many are under way.
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
    /// Whether it is cheaper to read the Gate parts of all `neurons` of a cluster
    /// first and Up and Down only where the gate fires (PowerInfer-2 §4.4) than to
    /// read the cluster at once.
    pub fn two_phases(&self, neurons: usize) -> bool {
        neurons as f64 * (self.gate + self.fire_share * self.rest) < self.cluster
    }

    /// Whether it is cheaper to read the Gate part of a neuron first, which a predictor
    /// wants and which fires in a `precision` share of cases, than the whole bundle.
    pub fn gate_first(&self, precision: f64) -> bool {
        self.gate + precision * self.rest < self.bundle
    }

    /// Whether it is cheaper to read a whole cluster than `missing` of its neurons one by
    /// one.
    pub fn cluster_over_bundles(&self, missing: usize) -> bool {
        missing as f64 * self.bundle > self.cluster
    }

    /// Whether it is cheaper to read a whole cluster than Up and Down of `missing`
    /// of its neurons one by one.
    pub fn whole_cluster(&self, missing: usize) -> bool {
        missing as f64 * self.rest > self.cluster
    }
}
