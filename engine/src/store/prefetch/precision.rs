//! Prefetched neurons and the precision of prefetching.
//!
//! Precision is measured per layer. Prefetching continues for layers where at least half of the
//! prefetched neurons are needed, and is retried from time to time for the others.

use emberflow_storage::cache::Key;

use crate::store::bits::Bits;
use crate::store::layout::Layout;

/// Misses per pass of a layer below which prefetching does not pay off: so few reads overlap with
/// the computation of the hits.
const FEW_MISSING: u32 = 16;

/// Number of prefetched neurons of a layer from which its precision is used.
const TRIAL: u32 = 64;

/// Passes after which a layer with low precision is retried.
const RETRY: u32 = 64;

/// Prefetch statistics of a layer.
#[derive(Clone, Copy, Default)]
struct LayerPrecision {
    /// Passes over the layer.
    passes: u32,
    /// Neurons missing in the last pass, prefetched or not.
    missing: u32,
    /// Neurons prefetched; those that were needed (`needed`). Both decay exponentially.
    asked: u32,
    needed: u32,
}

impl LayerPrecision {
    /// Precision ≥ ½. A wrong guess costs a read, a slot, and the chance to merge reads.
    fn is_good(self) -> bool {
        self.asked < TRIAL || 2 * self.needed >= self.asked
    }

    /// Restarts the measurement.
    fn forget(&mut self) {
        (self.asked, self.needed) = (0, 0);
    }
}

/// State of neuron prefetching.
pub(crate) struct Guesses {
    /// Neurons prefetched for this layer and the next.
    asked: Bits,
    layers: Vec<LayerPrecision>,
    /// Whether the pass has one token. Precision with several tokens differs, so the two are not
    /// mixed.
    single: bool,
}

impl Guesses {
    pub fn new(layout: &Layout) -> Self {
        Self::of(layout.sizes(), layout.layers())
    }

    fn of(sizes: &[u32], layers: usize) -> Self {
        Self {
            asked: Bits::new(sizes),
            layers: vec![LayerPrecision::default(); layers],
            single: false,
        }
    }

    /// Bytes allocated by [`Guesses::new`].
    pub fn bytes_for(layout: &Layout) -> u64 {
        Bits::bytes_for(layout.sizes()) + (size_of::<LayerPrecision>() * layout.layers()) as u64
    }

    /// Begins a pass. `single`: it has one token.
    pub fn begin_pass(&mut self, single: bool) {
        if single != self.single {
            self.single = single;
            self.layers.iter_mut().for_each(LayerPrecision::forget);
        }
    }

    /// Begins a layer; clears the bits of the next one.
    pub fn begin_layer(&mut self, layout: &Layout, layer: usize) {
        self.begin(layer);
        let next = (layer + 1) % layout.layers();
        self.asked.clear(layout.banks_of(next));
    }

    fn begin(&mut self, layer: usize) {
        let record = &mut self.layers[layer];
        record.passes = record.passes.wrapping_add(1);
        record.missing = 0;
        if !record.is_good() && record.passes.is_multiple_of(RETRY) {
            record.forget();
        }
    }

    /// Counts a layer's misses, and the prefetched ones among them.
    pub fn count(&mut self, layer: usize, missing: usize, asked: usize) {
        let record = &mut self.layers[layer];
        record.missing += missing as u32;
        record.needed += asked as u32;
    }

    /// Whether prefetching pays off for a layer.
    pub fn pays(&self, layer: usize) -> bool {
        let record = self.layers.get(layer);
        record.is_some_and(|r| r.is_good() && (r.passes == 0 || r.missing >= FEW_MISSING))
    }

    /// Misses of the layer in the last pass, prefetched or not.
    pub fn missed(&self, layer: usize) -> u32 {
        self.layers.get(layer).map_or(0, |record| record.missing)
    }

    pub fn put(&mut self, layer: usize, key: Key) {
        self.asked.set(key);
        self.layers[layer].asked += 1;
    }

    /// Halves a layer's counts from time to time.
    pub fn age(&mut self, layer: usize) {
        let record = &mut self.layers[layer];
        if record.asked >= 64 * TRIAL {
            (record.asked, record.needed) = (record.asked / 2, record.needed / 2);
        }
    }

    /// Whether a neuron was prefetched.
    #[inline]
    pub fn has(&self, key: Key) -> bool {
        self.asked.has(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pass over two layers of one bank. If prefetching pays off, `asked` neurons of the second
    /// layer are prefetched, of which `needed` are needed. Returns whether it paid off.
    fn pass(guesses: &mut Guesses, single: bool, asked: u32, needed: u32) -> bool {
        guesses.begin_pass(single);
        guesses.begin(0);
        let pays = guesses.pays(1);
        if pays {
            (0..asked).for_each(|neuron| guesses.put(1, Key { bank: 1, neuron }));
        }
        guesses.begin(1);
        guesses.count(1, 100, if pays { needed as usize } else { 0 });
        pays
    }

    #[test]
    fn low_precision_is_retried_now_and_then() {
        let mut guesses = Guesses::of(&[256; 2], 2);
        let tried: Vec<bool> = (0..3 * RETRY)
            .map(|_| pass(&mut guesses, true, 100, 40))
            .collect();
        assert_eq!(tried.iter().filter(|&&t| t).count(), 3);
        // Prefetching resumes where precision is high.
        (0..RETRY).for_each(|_| _ = pass(&mut guesses, true, 100, 60));
        assert!((0..RETRY).all(|_| pass(&mut guesses, true, 100, 60)));
    }

    #[test]
    fn batches_and_single_tokens_are_judged_separately() {
        let mut guesses = Guesses::of(&[256; 2], 2);
        assert!(pass(&mut guesses, false, 100, 40));
        assert!(!pass(&mut guesses, false, 100, 40));
        assert!(pass(&mut guesses, true, 100, 60));
        assert!(pass(&mut guesses, true, 100, 60));
        assert!(pass(&mut guesses, false, 100, 40));
        assert!(pass(&mut guesses, true, 100, 60));
    }
}
