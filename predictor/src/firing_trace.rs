//! Firings of a sample of neurons, token by token: the input of cache simulations.

use crate::stats::words;

/// Approximate number of sampled neurons; most tokens of the trace.
const NEURONS: usize = 4096;
const TOKENS: usize = 4096;

/// The firings of every `step`-th neuron of each bank, banks in packed order, for consecutive tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct FiringTrace {
    banks: usize,
    /// Neurons of a bank.
    neurons: usize,
    step: usize,
    /// `[tokens][words]`: the sampled neurons of all banks.
    bits: Vec<u64>,
}

impl FiringTrace {
    /// An empty trace of `banks` banks of `neurons` neurons.
    pub fn new(banks: usize, neurons: usize) -> Self {
        Self {
            banks,
            neurons,
            step: (banks * neurons).div_ceil(NEURONS).max(1),
            bits: Vec::new(),
        }
    }

    /// Bytes of a full trace.
    pub fn bytes_for(banks: usize, neurons: usize) -> u64 {
        8 * (TOKENS * Self::new(banks, neurons).width()) as u64
    }

    /// Number of banks.
    pub fn banks(&self) -> usize {
        self.banks
    }

    /// Sampled neurons of each bank.
    pub fn sampled(&self) -> usize {
        self.neurons.div_ceil(self.step)
    }

    fn width(&self) -> usize {
        words(self.banks * self.sampled())
    }

    /// Tokens recorded.
    pub fn tokens(&self) -> usize {
        self.bits.len() / self.width().max(1)
    }

    /// Words in which the trace is stored.
    pub(crate) fn words(&self) -> &[u64] {
        &self.bits
    }

    /// Restores stored words; `None` if they are not whole tokens.
    pub(crate) fn restore(&mut self, bits: Vec<u64>) -> Option<()> {
        let width = self.width().max(1);
        let fits = bits.len().is_multiple_of(width) && bits.len() / width <= TOKENS;
        fits.then(|| self.bits = bits)
    }

    /// Records a token, given the bits of all neurons, `[banks][words]`. Ignored once the trace is
    /// full.
    pub(crate) fn push(&mut self, fired: &[u64]) {
        if self.tokens() >= TOKENS {
            return;
        }
        let (start, bank_words) = (self.bits.len(), words(self.neurons));
        self.bits.resize(start + self.width(), 0);
        let sampled = (0..self.neurons).step_by(self.step);
        let places = (0..self.banks).flat_map(|bank| sampled.clone().map(move |n| (bank, n)));
        for (i, (bank, n)) in places.enumerate() {
            let word = fired.get(bank * bank_words + n / 64).copied().unwrap_or(0);
            self.bits[start + i / 64] |= (word >> (n % 64) & 1) << (i % 64);
        }
    }

    /// The trace of the banks for which `keeps` is true.
    pub fn of_banks(&self, keeps: impl Fn(usize) -> bool) -> Self {
        let mut banks = 0;
        let mut places = vec![None; self.banks];
        for bank in (0..self.banks).filter(|&bank| keeps(bank)) {
            places[bank] = Some(banks);
            banks += 1;
        }
        let (each, bits) = (self.sampled(), Vec::new());
        let mut some = Self {
            banks,
            bits,
            ..*self
        };
        for token in 0..self.tokens() {
            let start = some.bits.len();
            some.bits.resize(start + some.width(), 0);
            self.each(token, |n| {
                if let Some(bank) = places[n / each] {
                    let i = bank * each + n % each;
                    some.bits[start + i / 64] |= 1 << (i % 64);
                }
            });
        }
        some
    }

    /// Share of the tokens for which each sampled neuron fires.
    pub fn frequencies(&self) -> Vec<f64> {
        let mut counts = vec![0u64; self.banks * self.sampled()];
        for token in 0..self.tokens() {
            self.each(token, |n| counts[n] += 1);
        }
        let tokens = self.tokens().max(1) as f64;
        counts.iter().map(|&c| c as f64 / tokens).collect()
    }

    /// Calls `f` with the index in the sample of each neuron that fires for a token.
    pub fn each(&self, token: usize, mut f: impl FnMut(usize)) {
        let width = self.width();
        for (w, &word) in self.bits[token * width..][..width].iter().enumerate() {
            let mut left = word;
            while left != 0 {
                f(w * 64 + left.trailing_zeros() as usize);
                left &= left - 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_step_th_neuron_is_seen() {
        for (banks, neurons) in [(2, 70), (3, 3000), (1, 1), (7, 1001)] {
            let mut trace = FiringTrace::new(banks, neurons);
            let fires = |t: usize, n: usize| (n * 7 + t).is_multiple_of(3);
            for t in 0..3 {
                let mut bits = vec![0u64; banks * words(neurons)];
                for n in (0..banks * neurons).filter(|&n| fires(t, n)) {
                    let (bank, neuron) = (n / neurons, n % neurons);
                    bits[bank * words(neurons) + neuron / 64] |= 1 << (neuron % 64);
                }
                trace.push(&bits);
            }
            assert_eq!(trace.tokens(), 3);
            let places: Vec<usize> = (0..banks)
                .flat_map(|b| {
                    (0..neurons)
                        .step_by(trace.step)
                        .map(move |n| b * neurons + n)
                })
                .collect();
            assert_eq!(places.len(), banks * trace.sampled());
            assert!(places.len() <= NEURONS + banks);
            assert!(places.len() >= (banks * neurons).min(NEURONS / 2));
            for t in 0..3 {
                let mut seen = Vec::new();
                trace.each(t, |n| seen.push(n));
                let expected: Vec<usize> =
                    (0..places.len()).filter(|&i| fires(t, places[i])).collect();
                assert_eq!(seen, expected);
            }
            let odd = trace.of_banks(|bank| bank % 2 == 1);
            assert_eq!(odd.banks(), banks / 2);
            let kept = trace.frequencies();
            let kept = kept.chunks(trace.sampled()).skip(1).step_by(2).flatten();
            assert!(odd.frequencies().iter().eq(kept));
            let all: f64 = trace.frequencies().iter().sum();
            let seen = (0..3).flat_map(|t| places.iter().filter(move |&&n| fires(t, n)));
            assert!((all - seen.count() as f64 / 3.0).abs() < 1e-9);
            let mut other = FiringTrace::new(banks, neurons);
            assert!(other.restore(trace.words().to_vec()).is_some() && other == trace);
        }
        assert!(FiringTrace::new(2, 70).restore(vec![0; 4]).is_none());
    }
}
