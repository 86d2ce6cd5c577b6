//! The account of a lane.

use crate::engine::Engine;
use crate::lane::{LaneReport, Reported};

impl Engine {
    /// The account of who computed beside the compute threads, since the engine was opened; `None` without a lane.
    pub fn lane(&self) -> Option<LaneReport> {
        let (decoder, needs) = (&self.decoder, self.needs());
        let (lane, store) = (decoder.ffn.lane.as_ref()?, &decoder.ffn.store);
        let (in_decode, waited) = decoder.weights.on_lane();
        let chunk = self.prompt_chunk();
        let mut rows = vec![1, self.options().batch, chunk];
        rows.dedup();
        let resident = store.gates();
        Some(lane.report(&Reported {
            rows: &rows,
            chunk,
            clusters: [
                needs.clusters,
                needs.lane_clusters,
                needs.cluster * (needs.gate_len + needs.rest_len),
            ],
            outside: &store.outside,
            streamed: self.rows_streamed(),
            products: [in_decode, decoder.weights.prompt_on_lane(chunk)],
            gates: &|bank| resident.matrix(bank)?.lane(),
            waited,
        }))
    }
}
