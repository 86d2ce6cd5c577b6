//! What an engine has done: plain sums, compared before and after.

/// Sums since the engine was opened, or between two moments.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// (neuron, token) pairs whose gate fired.
    pub fired: u64,
    /// (neuron, token) pairs whose gate was looked at: all of them without predictors.
    pub looked_at: u64,
    /// All (neuron, token) pairs.
    pub possible: u64,
    /// Needed neurons whose cluster was in the hot region.
    pub hot_hits: u64,
    /// Needed neurons that were in the cold region.
    pub hits: u64,
    /// Needed neurons that had to be read.
    pub misses: u64,
    /// Neurons that were read before their layer began.
    pub guessed: u64,
    /// Of these, those that it then needed; they count as misses.
    pub guessed_needed: u64,
    /// Neurons that left the cold region for others.
    pub evictions: u64,
    /// Reads that were asked for.
    pub reads: u64,
    /// Reads that the device was given, neighbours merged.
    pub commands: u64,
    /// Bytes that came from the device, those between merged reads included.
    pub bytes_read: u64,
    /// Time the computation waited for reads.
    pub wait_ns: u64,
    /// Time the device had something to do.
    pub busy_ns: u64,
    /// Bytes of FFN weights that were computed with, predictors' included, each once per pass.
    pub ffn_bytes: u64,
    /// Time in the FFNs, waiting included.
    pub ffn_ns: u64,
    /// Of this, time in which predictors named neurons, of this layer and ahead of the next.
    pub predict_ns: u64,
    /// Time in attention, its projections included.
    pub attention_ns: u64,
    /// Time in the head: last norm and logits.
    pub head_ns: u64,
}

impl Counters {
    /// What was done since `before`.
    pub fn since(self, before: Self) -> Self {
        Self {
            fired: self.fired.saturating_sub(before.fired),
            looked_at: self.looked_at.saturating_sub(before.looked_at),
            possible: self.possible.saturating_sub(before.possible),
            hot_hits: self.hot_hits.saturating_sub(before.hot_hits),
            hits: self.hits.saturating_sub(before.hits),
            misses: self.misses.saturating_sub(before.misses),
            guessed: self.guessed.saturating_sub(before.guessed),
            guessed_needed: self.guessed_needed.saturating_sub(before.guessed_needed),
            evictions: self.evictions.saturating_sub(before.evictions),
            reads: self.reads.saturating_sub(before.reads),
            commands: self.commands.saturating_sub(before.commands),
            bytes_read: self.bytes_read.saturating_sub(before.bytes_read),
            wait_ns: self.wait_ns.saturating_sub(before.wait_ns),
            busy_ns: self.busy_ns.saturating_sub(before.busy_ns),
            ffn_bytes: self.ffn_bytes.saturating_sub(before.ffn_bytes),
            ffn_ns: self.ffn_ns.saturating_sub(before.ffn_ns),
            predict_ns: self.predict_ns.saturating_sub(before.predict_ns),
            attention_ns: self.attention_ns.saturating_sub(before.attention_ns),
            head_ns: self.head_ns.saturating_sub(before.head_ns),
        }
    }

    /// Share of (neuron, token) pairs whose gate was looked at.
    pub fn looked_at_share(self) -> f64 {
        self.looked_at as f64 / self.possible.max(1) as f64
    }

    /// Share of (neuron, token) pairs whose gate fired.
    pub fn active_share(self) -> f64 {
        self.fired as f64 / self.possible.max(1) as f64
    }
}

/// A time as counters hold it.
pub(crate) fn nanoseconds(time: std::time::Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
