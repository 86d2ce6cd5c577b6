//! Firings of a sample of neurons, token by token: the input of cache simulations.

use crate::stats::words;

/// Approximate number of sampled neurons; most tokens of the trace.
const NEURONS: usize = 4096;
const TOKENS: usize = 4096;

/// The firings of every `step`-th neuron of each bank, banks in packed order, for consecutive tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct FiringTrace {
    /// Neurons of each bank.
    neurons: Vec<usize>,
    step: usize,
    /// Number of sampled neurons before those of each bank, and of all.
    starts: Vec<usize>,
    /// `[tokens][words]`: the sampled neurons of all banks.
    bits: Vec<u64>,
}

impl FiringTrace {
    /// An empty trace of banks with these numbers of neurons.
    pub fn new(neurons: &[usize]) -> Self {
        let all: usize = neurons.iter().sum();
        Self::with_step(neurons.to_vec(), all.div_ceil(NEURONS).max(1))
    }

    fn with_step(neurons: Vec<usize>, step: usize) -> Self {
        let mut starts = vec![0];
        for bank in &neurons {
            starts.push(starts[starts.len() - 1] + bank.div_ceil(step));
        }
        Self {
            neurons,
            step,
            starts,
            bits: Vec::new(),
        }
    }

    /// Bytes of a full trace.
    pub fn bytes_for(neurons: &[usize]) -> u64 {
        8 * (TOKENS * Self::new(neurons).width()) as u64
    }

    /// Sampled neurons of each bank.
    pub fn sampled(&self) -> Vec<usize> {
        self.starts.windows(2).map(|of| of[1] - of[0]).collect()
    }

    /// The bank of a sampled neuron, and its index among the bank's sampled neurons.
    pub fn place(&self, n: usize) -> [usize; 2] {
        let bank = self.starts.partition_point(|&start| start <= n) - 1;
        [bank, n - self.starts[bank]]
    }

    /// Sampled neurons of all banks.
    fn all(&self) -> usize {
        self.starts[self.neurons.len()]
    }

    fn width(&self) -> usize {
        words(self.all())
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

    /// Records a token, given the bits of all neurons, `[banks][words of the largest]`. Ignored once the
    /// trace is full.
    pub(crate) fn push(&mut self, fired: &[u64]) {
        if self.tokens() >= TOKENS {
            return;
        }
        let most = self.neurons.iter().copied().max().unwrap_or(0);
        let (start, bank_words, step) = (self.bits.len(), words(most), self.step);
        self.bits.resize(start + self.width(), 0);
        let banks = self.neurons.iter().enumerate();
        let places =
            banks.flat_map(|(bank, &neurons)| (0..neurons).step_by(step).map(move |n| (bank, n)));
        for (i, (bank, n)) in places.enumerate() {
            let word = fired.get(bank * bank_words + n / 64).copied().unwrap_or(0);
            self.bits[start + i / 64] |= (word >> (n % 64) & 1) << (i % 64);
        }
    }

    /// The trace of the banks for which `keeps` is true.
    pub fn of_banks(&self, keeps: impl Fn(usize) -> bool) -> Self {
        let kept: Vec<usize> = (0..self.neurons.len())
            .filter(|&bank| keeps(bank))
            .collect();
        let neurons = kept.iter().map(|&bank| self.neurons[bank]).collect();
        let mut some = Self::with_step(neurons, self.step);
        for token in 0..self.tokens() {
            let start = some.bits.len();
            some.bits.resize(start + some.width(), 0);
            self.each(token, |n| {
                let [bank, inside] = self.place(n);
                if let Ok(bank) = kept.binary_search(&bank) {
                    let i = some.starts[bank] + inside;
                    some.bits[start + i / 64] |= 1 << (i % 64);
                }
            });
        }
        some
    }

    /// Share of the tokens for which each sampled neuron fires.
    pub fn frequencies(&self) -> Vec<f64> {
        let mut counts = vec![0u64; self.all()];
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
            let mut trace = FiringTrace::new(&vec![neurons; banks]);
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
            let each = trace.sampled()[0];
            assert_eq!(trace.sampled(), vec![each; banks]);
            assert_eq!(places.len(), banks * each);
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
            assert_eq!(odd.sampled().len(), banks / 2);
            let kept = trace.frequencies();
            let kept = kept.chunks(each).skip(1).step_by(2).flatten();
            assert!(odd.frequencies().iter().eq(kept));
            let all: f64 = trace.frequencies().iter().sum();
            let seen = (0..3).flat_map(|t| places.iter().filter(move |&&n| fires(t, n)));
            assert!((all - seen.count() as f64 / 3.0).abs() < 1e-9);
            let mut other = FiringTrace::new(&vec![neurons; banks]);
            assert!(other.restore(trace.words().to_vec()).is_some() && other == trace);
        }
        assert!(FiringTrace::new(&[70, 70]).restore(vec![0; 4]).is_none());
    }

    #[test]
    fn banks_of_different_sizes_are_sampled_alike() {
        let mut trace = FiringTrace::new(&[70, 3, 130]);
        assert_eq!(trace.sampled(), [70, 3, 130]);
        let mut bits = vec![0u64; 3 * words(130)];
        bits[words(130)] = 0b101;
        bits[2 * words(130) + 2] = 0b10;
        trace.push(&bits);
        let mut seen = Vec::new();
        trace.each(0, |n| seen.push(trace.place(n)));
        assert_eq!(seen, [[1, 0], [1, 2], [2, 129]]);
        let some = trace.of_banks(|bank| bank != 1);
        seen.clear();
        some.each(0, |n| seen.push(some.place(n)));
        assert_eq!(seen, [[1, 129]]);
        assert_eq!(some.sampled(), [70, 130]);
    }
}
