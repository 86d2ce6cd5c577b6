//! Counters of an engine: totals, compared before and after.

/// Totals since the engine was opened, or a difference of two.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// (neuron, token) pairs whose gate fired.
    pub fired: u64,
    /// (neuron, token) pairs whose gate was computed; all of them without predictors.
    pub looked_at: u64,
    /// All (neuron, token) pairs.
    pub possible: u64,
    /// Needed neurons in the hot region.
    pub hot_hits: u64,
    /// Needed neurons in the cold region.
    pub hits: u64,
    /// Needed neurons that were looked up in the cold region: hits, and misses that are read one by one.
    pub looked_up: u64,
    /// Needed neurons that missed.
    pub misses: u64,
    /// Neurons prefetched before their layer began.
    pub guessed: u64,
    /// Prefetched neurons that were needed; they count as misses.
    pub guessed_needed: u64,
    /// Neurons evicted for others.
    pub evictions: u64,
    /// Reads requested.
    pub reads: u64,
    /// Read commands after merging.
    pub commands: u64,
    /// Bytes read from storage, including gaps between merged reads.
    pub bytes_read: u64,
    /// Time stalled on reads.
    pub wait_ns: u64,
    /// Time the storage device was busy.
    pub busy_ns: u64,
    /// The same of the thread that reads projections and the output head, if any.
    pub stream_busy_ns: u64,
    /// Bytes of FFN weights used, including predictors, each once per pass.
    pub ffn_bytes: u64,
    /// Time in the FFNs, including stalls.
    pub ffn_ns: u64,
    /// The part of `ffn_ns` spent in predictors, for this layer and the next.
    pub predict_ns: u64,
    /// Time in attention, including projections.
    pub attention_ns: u64,
    /// Time in the head: final norm and logits.
    pub head_ns: u64,
}

impl Counters {
    /// The same with the numbers of lookups of `other`.
    pub(crate) fn with_lookups_of(self, other: Self) -> Self {
        Self {
            hot_hits: other.hot_hits,
            hits: other.hits,
            looked_up: other.looked_up,
            misses: other.misses,
            guessed_needed: other.guessed_needed,
            ..self
        }
    }

    /// The difference to `before`.
    pub fn since(self, before: Self) -> Self {
        let streamed = self.stream_busy_ns.saturating_sub(before.stream_busy_ns);
        Self {
            fired: self.fired.saturating_sub(before.fired),
            looked_at: self.looked_at.saturating_sub(before.looked_at),
            possible: self.possible.saturating_sub(before.possible),
            hot_hits: self.hot_hits.saturating_sub(before.hot_hits),
            hits: self.hits.saturating_sub(before.hits),
            looked_up: self.looked_up.saturating_sub(before.looked_up),
            misses: self.misses.saturating_sub(before.misses),
            guessed: self.guessed.saturating_sub(before.guessed),
            guessed_needed: self.guessed_needed.saturating_sub(before.guessed_needed),
            evictions: self.evictions.saturating_sub(before.evictions),
            reads: self.reads.saturating_sub(before.reads),
            commands: self.commands.saturating_sub(before.commands),
            bytes_read: self.bytes_read.saturating_sub(before.bytes_read),
            wait_ns: self.wait_ns.saturating_sub(before.wait_ns),
            // Both threads read at the same time.
            busy_ns: self.busy_ns.saturating_sub(before.busy_ns).max(streamed),
            stream_busy_ns: streamed,
            ffn_bytes: self.ffn_bytes.saturating_sub(before.ffn_bytes),
            ffn_ns: self.ffn_ns.saturating_sub(before.ffn_ns),
            predict_ns: self.predict_ns.saturating_sub(before.predict_ns),
            attention_ns: self.attention_ns.saturating_sub(before.attention_ns),
            head_ns: self.head_ns.saturating_sub(before.head_ns),
        }
    }

    /// Share of (neuron, token) pairs whose gate was computed.
    pub fn looked_at_share(self) -> f64 {
        self.looked_at as f64 / self.possible.max(1) as f64
    }

    /// Share of (neuron, token) pairs whose gate fired.
    pub fn active_share(self) -> f64 {
        self.fired as f64 / self.possible.max(1) as f64
    }
}

/// A duration in nanoseconds, saturating.
pub(crate) fn nanoseconds(time: std::time::Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
