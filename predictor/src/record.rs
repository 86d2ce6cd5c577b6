//! Collects statistics from a running model.
//!
//! The text is divided into independent windows. A batch of size B consists of B different windows:
//! its tokens have the same position in each, like independent sequences decoded in parallel
//! (PowerInfer-2, figure 2). Windows run one after the other. Unions of 2, 4, … windows form like
//! the carries of a binary counter, so at most one window of bits is stored per size.

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::FiringTrace;
use crate::stats::{
    ActivationStats, BATCHES, BankProfile, ExpertStats, FORMAT_V2, LAGS, LayerStats, Misses,
    Profile, Sample, Sampled, StatsError, words,
};

/// What is profiled: model, text and sizes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subject {
    /// Model and checkpoint, as [`Profile::model`].
    pub model: String,
    /// Hash of the text.
    pub text: u64,
    /// Neurons of each layer's FFN.
    pub neurons: Vec<usize>,
    /// Maximum tokens per window.
    pub window: usize,
    /// Tokens to sample.
    pub sample: usize,
}

/// Neurons that fired at each position of one or several windows: `[positions][banks][words]`.
#[derive(Debug, Clone, PartialEq)]
struct Fired {
    positions: usize,
    bits: Vec<u64>,
}

/// Statistics being collected.
#[derive(Debug, Clone, PartialEq)]
pub struct Recorder {
    subject: Subject,
    stats: ActivationStats,
    profile: Profile,
    /// The current window.
    now: Fired,
    /// By [`BATCHES`], except the largest: the union of that many windows.
    open: Vec<Option<Fired>>,
    /// Firings of a sample of neurons in the first windows.
    trace: FiringTrace,
    /// Completed windows.
    done: u64,
}

const MAGIC: &[u8; 8] = b"EMBPROF2";

impl Recorder {
    /// An empty recorder.
    pub fn new(subject: Subject) -> Self {
        let layer = |layer: usize| LayerStats {
            layer: layer as u32,
            experts: vec![ExpertStats {
                expert: 0,
                counts: vec![0; subject.neurons[layer]],
                original: Vec::new(),
            }],
        };
        let stats = ActivationStats {
            format: FORMAT_V2.into(),
            tokens: 0,
            layers: (0..subject.neurons.len()).map(layer).collect(),
            profile: None,
        };
        let profile = Profile {
            model: subject.model.clone(),
            texts: vec![subject.text],
            window: subject.window as u32,
            pairs: 0,
            steps: [0; BATCHES.len()],
            banks: (subject.neurons.iter())
                .map(|&neurons| BankProfile::new(neurons))
                .collect(),
            sample: Sample::new(subject.sample),
            misses: Misses::default(),
            routing: None,
        };
        Self {
            now: Fired {
                positions: 0,
                bits: vec![0; subject.window * width(&subject)],
            },
            open: vec![None; BATCHES.len() - 1],
            trace: FiringTrace::new(&subject.neurons),
            done: 0,
            stats,
            profile,
            subject,
        }
    }

    /// Upper bound on the bytes a recorder holds.
    pub fn bytes_for(subject: &Subject) -> u64 {
        let window = 8 * (subject.window * width(subject)) as u64;
        let neurons: usize = subject.neurons.iter().sum();
        let counts = 8 * neurons as u64 * (BATCHES.len() as u64 + 2);
        let magnitudes = subject.neurons.len() as u64 * (2 << 16);
        // the current window, one of each size, and one being merged
        let windows = (BATCHES.len() as u64 + 1) * window;
        let trace = FiringTrace::bytes_for(&subject.neurons);
        trace + windows + counts + magnitudes + (subject.sample * 8 * (width(subject) + 4)) as u64
    }

    /// Number of tokens to sample for a sample of about `bytes` bytes, for layers with these numbers
    /// of neurons.
    pub fn sample_for(neurons: &[usize], bytes: usize) -> usize {
        (bytes / (8 * neurons.len() * of_bank(neurons)).max(1)).clamp(256, 16384)
    }

    /// Completed windows.
    pub fn done(&self) -> u64 {
        self.done
    }

    /// Tokens counted.
    pub fn tokens(&self) -> u64 {
        self.stats.tokens
    }

    /// Records an FFN's activations for a chunk of tokens; `gates` and `hidden` are `[neurons ×
    /// tokens]`. Skips the first `skip` tokens; the next one has position `at` in the window.
    /// Ignores tokens beyond the window.
    pub fn see(
        &mut self,
        bank: usize,
        at: usize,
        skip: usize,
        tokens: usize,
        gates: &[f32],
        hidden: &[f32],
    ) {
        let width = width(&self.subject);
        let first = bank * of_bank(&self.subject.neurons);
        let counted = tokens.saturating_sub(skip);
        let counted = counted.min(self.subject.window.saturating_sub(at));
        let Some(profile) = self.profile.banks.get_mut(bank) else {
            return;
        };
        self.now.positions = self.now.positions.max(at + counted);
        let rows = gates.chunks_exact(tokens).zip(hidden.chunks_exact(tokens));
        for (n, (gates, hidden)) in rows.enumerate().take(profile.contributed.len()) {
            for i in 0..counted {
                let (gate, hidden) = (gates[skip + i], hidden[skip + i]);
                if gate != 0.0 {
                    self.now.bits[(at + i) * width + first + n / 64] |= 1 << (n % 64);
                    profile.gates.see(gate);
                }
                if hidden != 0.0 && gate != 0.0 {
                    profile.hidden.see(hidden);
                    profile.contributed[n] += 1;
                }
            }
        }
    }

    /// Ends window number `window` of the text.
    pub fn end_window(&mut self, window: u64) {
        let width = width(&self.subject);
        let fresh = Fired {
            positions: 0,
            bits: vec![0; self.now.bits.len()],
        };
        let mut now = std::mem::replace(&mut self.now, fresh);
        let words = of_bank(&self.subject.neurons);
        let positions = now.positions;
        self.done += 1;
        self.stats.tokens += positions as u64;
        self.profile.steps[0] += positions as u64;
        self.profile.pairs += positions.saturating_sub(1) as u64;
        let layers = self.stats.layers.iter_mut();
        for (bank, expert) in layers.flat_map(|l| &mut l.experts).enumerate() {
            count(&now, bank, words, width, |n| expert.counts[n] += 1);
            let first = bank * words;
            let later = &mut self.profile.banks[bank].later;
            for (later, lag) in later.iter_mut().zip(LAGS) {
                for p in lag..positions {
                    let bits = |p: usize| &now.bits[p * width + first..][..words];
                    for (now, then) in bits(p).iter().zip(bits(p - lag)) {
                        later.fired += u64::from(then.count_ones());
                        later.again += u64::from((now & then).count_ones());
                    }
                }
            }
            let stayed = &mut self.profile.banks[bank].stayed;
            for p in 1..positions {
                for w in 0..words {
                    let at = p * width + first + w;
                    each_bit(now.bits[at] & now.bits[at - width], |bit| {
                        stayed[w * 64 + bit] += 1;
                    });
                }
            }
        }
        for p in 0..positions {
            self.trace.push(&now.bits[p * width..][..width]);
            let place = [self.subject.text, window, p as u64].map(u64::to_le_bytes);
            let priority = xxh3_64(place.as_flattened());
            if self.profile.sample.wants(priority) {
                let bits = now.bits[p * width..(p + 1) * width].to_vec();
                self.profile.sample.insert(Sampled { priority, bits });
            }
        }
        for size in 0..self.open.len() {
            let Some(other) = self.open[size].take() else {
                self.open[size] = Some(now);
                return;
            };
            now.positions = now.positions.min(other.positions);
            for (a, b) in now.bits.iter_mut().zip(&other.bits) {
                *a |= b;
            }
            self.profile.steps[size + 1] += now.positions as u64;
            for (bank, profile) in self.profile.banks.iter_mut().enumerate() {
                let list = &mut profile.unions[size];
                count(&now, bank, words, width, |n| list[n] += 1);
            }
        }
    }

    /// Drops the partial unions: the following windows belong to other batches.
    pub fn end_group(&mut self) {
        self.open.fill(None);
    }

    /// Firings of a sample of neurons in the first windows.
    pub fn trace(&self) -> &FiringTrace {
        &self.trace
    }

    /// The statistics so far.
    pub fn stats(&self) -> ActivationStats {
        ActivationStats {
            profile: Some(Box::new(self.profile.clone())),
            ..self.stats.clone()
        }
    }

    /// The complete state, for [`Recorder::resume`].
    ///
    /// # Errors
    /// As [`ActivationStats::to_bytes`].
    pub fn to_bytes(&self) -> Result<Vec<u8>, StatsError> {
        let mut out = MAGIC.to_vec();
        let fixed = |out: &mut Vec<u8>, n: u64| out.extend_from_slice(&n.to_le_bytes());
        fixed(&mut out, 0);
        fixed(&mut out, self.done);
        for open in &self.open {
            fixed(
                &mut out,
                open.as_ref().map_or(0, |f| f.positions as u64 + 1),
            );
            let bits = open.iter().flat_map(|f| &f.bits);
            bits.for_each(|&w| fixed(&mut out, w));
        }
        fixed(&mut out, self.trace.words().len() as u64);
        (self.trace.words().iter()).for_each(|&w| fixed(&mut out, w));
        out.extend(self.stats().to_bytes()?);
        let sum = xxh3_64_with_seed(&out[16..], SEED);
        out[8..16].copy_from_slice(&sum.to_le_bytes());
        Ok(out)
    }

    /// Resumes from [`Recorder::to_bytes`], called between two windows.
    ///
    /// # Errors
    /// If the file is damaged, or is for another model, text, window length or sample size.
    pub fn resume(bytes: &[u8], subject: Subject) -> Result<Self, StatsError> {
        let damaged = |what: &str| StatsError::Binary(format!("the checkpoint {what}"));
        let mut at = 0;
        let mut fixed = || -> Result<u64, StatsError> {
            let part = bytes.get(at..at + 8).ok_or_else(|| damaged("is cut off"))?;
            at += 8;
            let mut word = [0; 8];
            word.copy_from_slice(part);
            Ok(u64::from_le_bytes(word))
        };
        let (magic, sum) = (fixed()?, fixed()?);
        if magic.to_le_bytes() != *MAGIC {
            return Err(damaged("is no checkpoint of a profile"));
        }
        if xxh3_64_with_seed(&bytes[16..], SEED) != sum {
            return Err(damaged("does not match its checksum"));
        }
        let done = fixed()?;
        let mut new = Self::new(subject);
        let len = new.now.bits.len();
        for open in &mut new.open {
            let positions = fixed()?;
            if positions == 0 {
                continue;
            }
            let positions = usize::try_from(positions - 1).unwrap_or(usize::MAX);
            if positions > new.subject.window {
                return Err(damaged("is of a run with longer windows"));
            }
            let bits = (0..len).map(|_| fixed()).collect::<Result<_, _>>()?;
            *open = Some(Fired { positions, bits });
        }
        let words = usize::try_from(fixed()?).unwrap_or(usize::MAX);
        if words > bytes.len() / 8 {
            return Err(damaged("is cut off"));
        }
        let words = (0..words).map(|_| fixed()).collect::<Result<_, _>>()?;
        if new.trace.restore(words).is_none() {
            return Err(damaged("is of another model"));
        }
        let s = &new.subject;
        let mut stats = ActivationStats::parse(&bytes[at..], &s.neurons, 1)?;
        let Some(profile) = stats.profile.take() else {
            return Err(damaged("holds no profile"));
        };
        let same = (&profile.model, &profile.texts[..], profile.window as usize)
            == (&s.model, &[s.text][..], s.window)
            && profile.sample.capacity == s.sample;
        if !same {
            return Err(damaged(
                "is of another model, text, --window or sample size; delete it or give another -o",
            ));
        }
        Ok(Self {
            stats,
            profile: *profile,
            done,
            ..new
        })
    }
}

/// Distinguishes checkpoints from other checksummed data.
const SEED: u64 = 0x70726f66;

/// Words per position.
fn width(subject: &Subject) -> usize {
    subject.neurons.len() * of_bank(&subject.neurons)
}

/// Words per position of a bank: those of the largest.
fn of_bank(neurons: &[usize]) -> usize {
    words(neurons.iter().copied().max().unwrap_or(0))
}

fn each_bit(mut word: u64, mut f: impl FnMut(usize)) {
    while word != 0 {
        f(word.trailing_zeros() as usize);
        word &= word - 1;
    }
}

/// Calls `add` with each neuron of a bank that fired; the bank uses `width` words of a position.
fn count(fired: &Fired, bank: usize, words: usize, width: usize, mut add: impl FnMut(usize)) {
    let first = bank * words;
    for row in fired.bits.chunks_exact(width.max(1)).take(fired.positions) {
        for (w, &word) in row[first..][..words].iter().enumerate() {
            each_bit(word, |bit| add(w * 64 + bit));
        }
    }
}

/// The order in which `windows` windows run. Those of a batch run consecutively and are far apart
/// in the text, so they are independent. A batch ends (`None`) after every [`BATCHES`]`.last()`
/// windows; the remaining ones form the last batch.
pub fn spread(windows: u64) -> impl Iterator<Item = Option<u64>> + Clone {
    let most = BATCHES[BATCHES.len() - 1] as u64;
    let groups = (windows / most).max(1);
    let spread = (0..groups).flat_map(move |g| {
        let lanes = (0..most).map(move |lane| lane * groups + g);
        lanes.filter(move |&w| w < windows).map(Some).chain([None])
    });
    let rest = (groups * most..windows).map(Some);
    spread.chain(rest).chain([None])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn subject(window: usize) -> Subject {
        Subject {
            model: "m".into(),
            text: 42,
            neurons: vec![70, 131],
            window,
            sample: 5,
        }
    }

    /// Whether a neuron fires, from a hash.
    fn fires(window: u64, p: usize, bank: usize, n: usize) -> bool {
        let place = [window, p as u64, bank as u64, n as u64].map(u64::to_le_bytes);
        xxh3_64(place.as_flattened()).is_multiple_of(5)
    }

    /// Feeds a window in chunks of `chunk`, without counting the very first token.
    fn feed(r: &mut Recorder, window: u64, len: usize, chunk: usize) {
        let s = r.subject.clone();
        for from in (0..len + 1).step_by(chunk) {
            let tokens = chunk.min(len + 1 - from);
            let skip = usize::from(from == 0);
            for (bank, &neurons) in s.neurons.iter().enumerate() {
                let value = |n: usize, t: usize| match (from + t).checked_sub(1) {
                    Some(p) if fires(window, p, bank, n) => 1.5,
                    Some(_) => 0.0,
                    None => 1.0,
                };
                let gates: Vec<f32> = (0..neurons)
                    .flat_map(|n| (0..tokens).map(move |t| value(n, t)))
                    .collect();
                let hidden: Vec<f32> = gates
                    .iter()
                    .map(|g| if *g > 1.0 { -g } else { 0.0 })
                    .collect();
                r.see(bank, (from + skip) - 1, skip, tokens, &gates, &hidden);
            }
        }
        r.end_window(window);
    }

    #[test]
    fn counts_are_those_of_a_naive_count() {
        let (windows, len) = (5u64, 140usize);
        let mut r = Recorder::new(subject(144));
        for w in 0..windows {
            feed(&mut r, w, len, 3);
        }
        let s = r.stats();
        let p = s.profile.as_ref().unwrap();
        assert_eq!((s.tokens, p.pairs), (700, 695));
        // 5 windows: two pairs, one four, no eight
        assert_eq!(p.steps, [700, 280, 140, 0, 0, 0]);
        for bank in 0..2 {
            for n in 0..r.subject.neurons[bank] {
                let at = |w, p| fires(w, p, bank, n);
                let all = (0..windows).flat_map(|w| (0..len).map(move |p| (w, p)));
                let naive = all.clone().filter(|&(w, p)| at(w, p)).count() as u64;
                assert_eq!(s.counts(bank as u32, 0).unwrap()[n], naive);
                assert_eq!(p.banks[bank].contributed[n], naive);
                let stayed = all.filter(|&(w, p)| p > 0 && at(w, p) && at(w, p - 1));
                assert_eq!(p.banks[bank].stayed[n], stayed.count() as u64);
                let union = |ws: std::ops::Range<u64>| {
                    (0..len).filter(|&p| ws.clone().any(|w| at(w, p))).count() as u64
                };
                assert_eq!(p.banks[bank].unions[0][n], union(0..2) + union(2..4));
                assert_eq!(p.banks[bank].unions[1][n], union(0..4));
                assert_eq!(p.banks[bank].unions[2][n], 0);
            }
        }
        for (bank, profile) in p.banks.iter().enumerate() {
            for (later, lag) in profile.later.iter().zip(LAGS) {
                let neurons = r.subject.neurons[bank];
                let of = |p| (0..windows).flat_map(move |w| (0..neurons).map(move |n| (w, n, p)));
                let before = (lag..len).flat_map(of);
                let before = before.filter(|&(w, n, p)| fires(w, p - lag, bank, n));
                assert_eq!(later.fired, before.clone().count() as u64);
                let again = before.filter(|&(w, n, p)| fires(w, p, bank, n));
                assert_eq!(later.again, again.count() as u64);
                assert!(later.again > 0 && later.again < later.fired);
            }
        }
        assert_eq!(p.sample.tokens().len(), 5);
        assert_eq!(
            p.banks[0].gates.total(),
            s.counts(0, 0).unwrap().iter().sum::<u64>()
        );
        let bytes = s.to_bytes().unwrap();
        assert_eq!(ActivationStats::read(&bytes).unwrap(), s);
    }

    #[test]
    fn a_resumed_run_gives_the_same_numbers() {
        let order: Vec<Option<u64>> = spread(70).collect();
        let run = |r: &mut Recorder, part: &[Option<u64>]| {
            for step in part {
                match step {
                    Some(w) => feed(r, *w, if *w == 69 { 2 } else { 4 }, 2),
                    None => r.end_group(),
                }
            }
        };
        let mut whole = Recorder::new(subject(4));
        run(&mut whole, &order);
        for cut in [0, 1, 31, 40, 70] {
            let mut r = Recorder::new(subject(4));
            run(&mut r, &order[..cut]);
            let bytes = r.to_bytes().unwrap();
            let mut again = Recorder::resume(&bytes, subject(4)).unwrap();
            run(&mut again, &order[cut..]);
            assert!(again == whole, "cut at {cut}");
            assert!(Recorder::resume(&bytes, subject(5)).is_err());
            let mut other = subject(4);
            other.text = 1;
            assert!(Recorder::resume(&bytes, other).is_err());
            for at in (0..bytes.len()).step_by(7) {
                let mut bad = bytes.clone();
                bad[at] ^= 1;
                assert!(Recorder::resume(&bad, subject(4)).is_err());
                assert!(Recorder::resume(&bytes[..at], subject(4)).is_err());
            }
        }
    }

    proptest! {
        #[test]
        fn every_window_is_run_once_and_batches_lie_apart(windows in 0u64..400) {
            let order: Vec<Option<u64>> = spread(windows).collect();
            let mut all: Vec<u64> = order.iter().flatten().copied().collect();
            let full: Vec<&[Option<u64>]> = order
                .split(|w| w.is_none())
                .filter(|group| group.len() == 32)
                .collect();
            prop_assert_eq!(full.len() as u64, windows / 32);
            for pair in full.iter().flat_map(|group| group.windows(2)) {
                if let [Some(a), Some(b)] = pair {
                    prop_assert_eq!(b - a, windows / 32);
                }
            }
            all.sort_unstable();
            prop_assert_eq!(all, (0..windows).collect::<Vec<_>>());
            for group in order.split(|w| w.is_none()) {
                prop_assert!(group.len() <= 32);
            }
        }
    }
}
