//! What a sequence's state depends on, as numbers that identify it.

use std::time::SystemTime;

use crate::engine::Engine;

/// Version of the numbers in a sequence's state. To be raised whenever recorded hashes change, or what a state consists of.
const STATE_VERSION: u32 = 1;

impl Engine {
    /// Identifies the model's content. Of a checkpoint that is not packed, whose weights have no checksums, also by when its
    /// files were last changed.
    pub fn model_identity(&self) -> u128 {
        let container = &self.decoder.ffn.store.layout.container;
        let changed = container.changed().into_iter().flatten();
        let since = |at: SystemTime| {
            at.duration_since(SystemTime::UNIX_EPOCH)
                .unwrap_or_default()
        };
        let changed = changed.flat_map(|at| since(at).as_nanos().to_le_bytes());
        let all: Vec<u8> = container
            .identity()
            .to_le_bytes()
            .into_iter()
            .chain(changed)
            .collect();
        xxhash_rust::xxh3::xxh3_128(&all)
    }

    /// Identifies what the state of a sequence depends on besides its tokens: the model and how it is computed. Where it
    /// is equal, state that one engine wrote has the bits that another one computes.
    pub fn state_identity(&self) -> u128 {
        let model = self.model_identity();
        // Of sums with other bits, those that a lane is given by the user count.
        let lane = self.decoder.ffn.lane.as_ref().map(|lane| lane.facts());
        let others = lane.filter(|facts| !facts.same_bits);
        let numerics = others.and_then(|facts| Some((facts.fixed, self.lane()?.numerics)));
        let [sparsity, kv] = [self.sparsity().name(), self.options.kv.name()];
        let all = format!("{STATE_VERSION} {model:x} {sparsity} {kv} {numerics:?}");
        let rope = self.decoder.rope.constants().flat_map(f32::to_le_bytes);
        let all: Vec<u8> = all.into_bytes().into_iter().chain(rope).collect();
        xxhash_rust::xxh3::xxh3_128(&all)
    }
}
