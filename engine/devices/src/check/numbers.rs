//! Inputs of comparisons with the CPU: the same at every start.

/// Seeded numbers.
pub(crate) struct Numbers(u64);

impl Numbers {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Within ±1.
    pub fn next(&mut self) -> f32 {
        // Knuth's MMIX generator
        self.0 = (self.0)
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}
