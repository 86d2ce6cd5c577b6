//! Bookkeeping of speculative reads and their precision.
//!
//! Precision is tracked per layer: speculation continues where at least half of the prefetched
//! neurons are needed, and is retried now and then elsewhere.

use emberflow_storage::cache::Key;

use super::layout::Layout;

/// Misses per pass of a layer below which speculation does not pay: so few reads overlap with the
/// computation of the hits.
const FEW_MISSING: u32 = 16;

/// Neurons prefetched for a layer before its precision counts.
const TRIAL: u32 = 64;

/// Passes after which a layer with low precision is retried.
const RETRY: u32 = 64;

/// One bit for each neuron of the model.
struct Bits {
    words: Vec<u64>,
    /// First word of each bank, and the end.
    first: Vec<usize>,
}

impl Bits {
    fn new(sizes: &[u32]) -> Self {
        let mut first = vec![0];
        for &neurons in sizes {
            let words = (neurons as usize).div_ceil(64);
            first.push(first.last().copied().unwrap_or(0) + words);
        }
        let all = first.last().copied().unwrap_or(0);
        Self {
            words: vec![0; all],
            first,
        }
    }

    fn bytes_for(sizes: &[u32]) -> u64 {
        let words = |&n: &u32| u64::from(n).div_ceil(64);
        8 * (sizes.iter().map(words).sum::<u64>() + sizes.len() as u64 + 1)
    }

    #[inline]
    fn word(&self, key: Key) -> usize {
        self.first[key.bank as usize] + key.neuron as usize / 64
    }

    #[inline]
    fn has(&self, key: Key) -> bool {
        self.words[self.word(key)] >> (key.neuron % 64) & 1 == 1
    }

    fn set(&mut self, key: Key) {
        let word = self.word(key);
        self.words[word] |= 1 << (key.neuron % 64);
    }

    /// Clears a bit; returns its previous value.
    #[inline]
    fn take(&mut self, key: Key) -> bool {
        let word = self.word(key);
        let was = self.has(key);
        self.words[word] &= !(1 << (key.neuron % 64));
        was
    }

    fn clear(&mut self, banks: std::ops::Range<u32>) {
        let ends = [banks.start, banks.end].map(|bank| self.first[bank as usize]);
        self.words[ends[0]..ends[1]].fill(0);
    }
}

/// Precision of the speculation for a layer.
#[derive(Clone, Copy, Default)]
struct Record {
    /// Passes over the layer.
    passes: u32,
    /// Neurons missing in the last pass, prefetched or not.
    missing: u32,
    /// Neurons prefetched, and those of them that were needed, with exponential decay.
    asked: u32,
    needed: u32,
}

impl Record {
    /// Precision ≥ ½. A wrong guess costs a read, a slot, and the chance to merge reads.
    fn is_good(self) -> bool {
        self.asked < TRIAL || 2 * self.needed >= self.asked
    }

    /// Restarts the trial.
    fn forget(&mut self) {
        (self.asked, self.needed) = (0, 0);
    }
}

/// State of speculative reads.
pub(crate) struct Guesses {
    /// Neurons prefetched for this layer and the next.
    asked: Bits,
    /// Resident neurons whose checksums are not yet verified.
    unchecked: Bits,
    layers: Vec<Record>,
    /// Whether the pass has one token. Precision differs for several, so the two are not mixed.
    single: bool,
}

impl Guesses {
    pub fn new(layout: &Layout) -> Self {
        Self::of(layout.sizes(), layout.layers())
    }

    fn of(sizes: &[u32], layers: usize) -> Self {
        Self {
            asked: Bits::new(sizes),
            unchecked: Bits::new(sizes),
            layers: vec![Record::default(); layers],
            single: false,
        }
    }

    /// Bytes that [`Guesses::new`] allocates.
    pub fn bytes_for(layout: &Layout) -> u64 {
        2 * Bits::bytes_for(layout.sizes()) + (size_of::<Record>() * layout.layers()) as u64
    }

    /// Begins a pass, of one token or several.
    pub fn begin_pass(&mut self, single: bool) {
        if single != self.single {
            self.single = single;
            self.layers.iter_mut().for_each(Record::forget);
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

    /// Counts a layer's misses, and those of them that had been prefetched.
    pub fn count(&mut self, layer: usize, missing: usize, asked: usize) {
        let record = &mut self.layers[layer];
        record.missing += missing as u32;
        record.needed += asked as u32;
    }

    /// Whether speculation pays for a layer.
    pub fn pays(&self, layer: usize) -> bool {
        let one = self.layers.get(layer);
        one.is_some_and(|r| r.is_good() && (r.passes == 0 || r.missing >= FEW_MISSING))
    }

    /// Neurons that the layer missed in the last pass, prefetched or not.
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

    /// Marks a resident neuron for verification before its first use.
    pub fn set_unchecked(&mut self, key: Key) {
        self.unchecked.set(key);
    }

    /// Whether a neuron is marked; clears the mark.
    #[inline]
    pub fn take_unchecked(&mut self, key: Key) -> bool {
        self.unchecked.take(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pass over two layers of one bank. `asked` neurons of the second are prefetched if
    /// speculation pays, and `needed` of them are needed. Returns whether it paid.
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
        // It resumes where precision is high.
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

    #[test]
    fn bits_of_banks_are_separate() {
        let mut bits = Bits::new(&[70, 1, 128]);
        for (bank, neuron) in [(0, 69), (1, 0), (2, 0), (2, 127)] {
            bits.set(Key { bank, neuron });
        }
        bits.clear(1..2);
        assert!(bits.has(Key::new(0, 69)) && bits.has(Key::new(2, 0)));
        assert!(!bits.has(Key::new(1, 0)) && !bits.has(Key::new(0, 0)));
        assert!(bits.take(Key::new(2, 127)) && !bits.take(Key::new(2, 127)));
    }
}
