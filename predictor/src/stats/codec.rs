//! Binary format of the statistics.
//!
//! ```text
//!    0   8  magic            "EMBSTAT2"
//!    8   8  length           bytes of the whole file, u64 little endian
//!   16   8  xxh3             of the bytes from 24 on
//!   24      body             numbers as LEB128 unless said otherwise:
//!             model            length, UTF-8
//!             texts            number, then each u64 little endian
//!             tokens, window, pairs, steps × 6
//!             layers, experts, neurons of the largest bank
//!             per bank         1 or 0: original ids follow (neurons ×); 2 more where its neurons are
//!                              fewer, whose number comes before them
//!                              counts, unions × 5, stayed, contributed (neurons × each)
//!                              gates, hidden: number of buckets, each distance to the last
//!                              bucket and count
//!             sample           capacity, tokens; each: priority u64, then words u64 per
//!                              bank (one bit per neuron of the largest), little endian
//!             later            per bank, for each distance: firings, and those that are followed
//!                              by another; not in older files
//!             misses           needed, then missed for each size of the cache, by class of
//!                              frequency; only where they were counted, or something follows
//!             routing          experts and chosen ones; layers; each: experts (0 where dense),
//!                              visits, again (experts × each), together (pairs of experts ×);
//!                              needed, and missed × 15; only of a model with experts
//!             neurons          of each expert, only where these were counted: neurons, then for
//!                              each layer 1 or 0: they follow, as counts per bank do above
//! ```
//!
//! Every list has at least one byte per entry, so no allocation exceeds a small multiple of the
//! file.

use xxhash_rust::xxh3::xxh3_64;

use super::routing::{ExpertMisses, RoutedLayer, Routing, pairs};
use super::sample::words;
use super::{
    ActivationStats, BATCHES, BankProfile, ExpertStats, FORMAT_V2, Later, LayerStats, Magnitudes,
    Misses, Profile, Sample, Sampled, StatsError,
};

const MAGIC: &[u8; 8] = b"EMBSTAT2";
const HEADER: usize = 24;

pub(super) fn is_binary(bytes: &[u8]) -> bool {
    bytes.starts_with(MAGIC)
}

pub(super) fn encode(stats: &ActivationStats, profile: &Profile) -> Result<Vec<u8>, StatsError> {
    // Written data must be readable.
    stats.check_itself()?;
    let [layers, experts, neurons] = stats.sizes();
    let mut out = Out(vec![0; HEADER]);
    out.number(profile.model.len() as u64);
    out.0.extend_from_slice(profile.model.as_bytes());
    out.number(profile.texts.len() as u64);
    profile.texts.iter().for_each(|&t| out.fixed(t));
    out.number(stats.tokens);
    out.number(u64::from(profile.window));
    out.number(profile.pairs);
    out.numbers(&profile.steps);
    for n in [layers, experts, neurons] {
        out.number(n as u64);
    }
    let all = stats.layers.iter().flat_map(|l| &l.experts);
    for (expert, bank) in all.zip(&profile.banks) {
        out.expert(expert, neurons);
        bank.unions.iter().for_each(|list| out.numbers(list));
        out.numbers(&bank.stayed);
        out.numbers(&bank.contributed);
        out.magnitudes(&bank.gates);
        out.magnitudes(&bank.hidden);
    }
    out.number(profile.sample.capacity as u64);
    out.number(profile.sample.tokens.len() as u64);
    for token in &profile.sample.tokens {
        out.fixed(token.priority);
        token.bits.iter().for_each(|&w| out.fixed(w));
    }
    for later in profile.banks.iter().flat_map(|b| b.later) {
        out.numbers(&[later.fired, later.again]);
    }
    if !profile.misses.is_empty() || profile.routing.is_some() {
        (profile.misses.clone().numbers_mut()).for_each(|n| out.number(*n));
    }
    if let Some(routing) = &profile.routing {
        out.routing(routing);
    }
    let mut bytes = out.0;
    let (len, sum) = (bytes.len() as u64, xxh3_64(&bytes[HEADER..]));
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..16].copy_from_slice(&len.to_le_bytes());
    bytes[16..24].copy_from_slice(&sum.to_le_bytes());
    Ok(bytes)
}

pub(super) fn decode(bytes: &[u8]) -> Result<ActivationStats, StatsError> {
    let stats = read(bytes).map_err(StatsError::Binary)?;
    stats.check_itself()?;
    Ok(stats)
}

/// Number of layers, of FFNs per layer, and of neurons per FFN.
#[derive(Clone, Copy)]
struct Sizes {
    layers: usize,
    experts: usize,
    neurons: usize,
    /// FFNs of all layers.
    banks: usize,
}

/// Checks length and checksum; the body follows.
fn read_header(bytes: &[u8]) -> Result<In<'_>, String> {
    let mut header = In { bytes, at: 8 };
    let (len, sum) = (header.fixed()?, header.fixed()?);
    if len != bytes.len() as u64 {
        return Err(format!("{} bytes, the header says {len}", bytes.len()));
    }
    if xxh3_64(&bytes[HEADER..]) != sum {
        return Err("the checksum does not match".into());
    }
    Ok(header)
}

/// Sizes bound each other, since a bank has more bytes than neurons.
fn read_sizes(body: &mut In<'_>) -> Result<Sizes, String> {
    let layers = body.count(1)?;
    let experts = body.count(1)?;
    let neurons = body.count(1)?;
    let banks = layers.checked_mul(experts).ok_or("too many banks")?;
    let entries = banks.checked_mul(neurons.max(1));
    if entries.is_none_or(|n| n > body.left()) {
        return Err(format!(
            "{layers} layers of {experts} × {neurons} neurons in {} bytes",
            body.bytes.len()
        ));
    }
    Ok(Sizes {
        layers,
        experts,
        neurons,
        banks,
    })
}

/// Reads one FFN: its neurons' ids and counts; the largest has `most` neurons.
fn read_expert(body: &mut In<'_>, expert: usize, most: usize) -> Result<ExpertStats, String> {
    let mark = body.number()?;
    if mark > 3 {
        return Err(format!("mark {mark} before original ids, expected 0 to 3"));
    }
    let neurons = match mark & 2 {
        0 => most,
        _ => body.count(1)?,
    };
    if mark & 2 != 0 && neurons >= most {
        return Err(format!(
            "{neurons} neurons, where fewer than {most} are expected"
        ));
    }
    let original = match mark & 1 {
        0 => Vec::new(),
        _ => (body.numbers(neurons)?.into_iter())
            .map(|n| u32::try_from(n).map_err(|_| format!("original id {n}")))
            .collect::<Result<_, _>>()?,
    };
    Ok(ExpertStats {
        expert: expert as u32,
        counts: body.numbers(neurons)?,
        original,
    })
}

/// Reads a bank's profile except `later`, which is at the end of the file.
fn read_bank(body: &mut In<'_>, neurons: usize) -> Result<BankProfile, String> {
    Ok(BankProfile {
        unions: (1..BATCHES.len())
            .map(|_| body.numbers(neurons))
            .collect::<Result<_, _>>()?,
        stayed: body.numbers(neurons)?,
        contributed: body.numbers(neurons)?,
        later: Default::default(),
        gates: body.magnitudes()?,
        hidden: body.magnitudes()?,
    })
}

fn read_sample(body: &mut In<'_>, sizes: Sizes) -> Result<Sample, String> {
    let capacity = usize::try_from(body.number()?).map_err(|_| "a sample of 2^64 tokens")?;
    let width = sizes.banks * words(sizes.neurons);
    let sampled = body.count(8 * (1 + width))?;
    let mut tokens = Vec::with_capacity(sampled);
    for _ in 0..sampled {
        tokens.push(Sampled {
            priority: body.fixed()?,
            bits: (0..width).map(|_| body.fixed()).collect::<Result<_, _>>()?,
        });
    }
    Ok(Sample { capacity, tokens })
}

fn read(bytes: &[u8]) -> Result<ActivationStats, String> {
    let mut body = read_header(bytes)?;
    let name = body.count(1)?;
    let model = std::str::from_utf8(body.take(name)?).map_err(|e| e.to_string())?;
    let model = model.to_owned();
    let texts = body.count(8)?;
    let texts = (0..texts).map(|_| body.fixed()).collect::<Result<_, _>>()?;
    let tokens = body.number()?;
    let window = u32::try_from(body.number()?).map_err(|_| "a window of 2^32 tokens or more")?;
    let pairs = body.number()?;
    let mut steps = [0; BATCHES.len()];
    for step in &mut steps {
        *step = body.number()?;
    }
    let sizes = read_sizes(&mut body)?;
    let mut layers = Vec::with_capacity(sizes.layers);
    let mut banks = Vec::with_capacity(sizes.banks);
    for layer in 0..sizes.layers {
        let mut experts = Vec::with_capacity(sizes.experts);
        for expert in 0..sizes.experts {
            let expert = read_expert(&mut body, expert, sizes.neurons)?;
            banks.push(read_bank(&mut body, expert.counts.len())?);
            experts.push(expert);
        }
        layers.push(LayerStats {
            layer: layer as u32,
            experts,
        });
    }
    let sample = read_sample(&mut body, sizes)?;
    if body.left() > 0 {
        for later in banks.iter_mut().flat_map(|b| &mut b.later) {
            *later = Later {
                fired: body.number()?,
                again: body.number()?,
            };
        }
    }
    let mut misses = Misses::default();
    if body.left() > 0 {
        for n in misses.numbers_mut() {
            *n = body.number()?;
        }
    }
    let routing = match body.left() {
        0 => None,
        _ => Some(body.routing()?),
    };
    if body.left() > 0 {
        return Err(format!("{} bytes too many at the end", body.left()));
    }
    Ok(ActivationStats {
        format: FORMAT_V2.into(),
        tokens,
        layers,
        profile: Some(Box::new(Profile {
            model,
            texts,
            window,
            pairs,
            steps,
            banks,
            sample,
            misses,
            routing,
        })),
    })
}

struct Out(Vec<u8>);

impl Out {
    fn fixed(&mut self, n: u64) {
        self.0.extend_from_slice(&n.to_le_bytes());
    }

    fn number(&mut self, mut n: u64) {
        while n >= 0x80 {
            self.0.push(n as u8 | 0x80);
            n >>= 7;
        }
        self.0.push(n as u8);
    }

    fn numbers(&mut self, list: &[u64]) {
        list.iter().for_each(|&n| self.number(n));
    }

    fn routing(&mut self, routing: &Routing) {
        self.number(routing.experts.into());
        self.number(routing.chosen.into());
        self.number(routing.layers.len() as u64);
        for layer in &routing.layers {
            self.number(layer.visits.len() as u64);
            let lists = [&layer.visits, &layer.again, &layer.together];
            lists.iter().for_each(|list| self.numbers(list));
        }
        self.number(routing.misses.needed);
        self.numbers(&routing.misses.missed);
        let counted = routing.layers.iter().flat_map(|l| &l.neurons).next();
        let Some(first) = counted else { return };
        self.number(first.counts.len() as u64);
        for layer in &routing.layers {
            self.number(u64::from(!layer.neurons.is_empty()));
            let neurons = layer.neurons.iter();
            neurons.for_each(|expert| self.expert(expert, first.counts.len()));
        }
    }

    /// Writes one FFN; the largest has `most` neurons.
    fn expert(&mut self, expert: &ExpertStats, most: usize) {
        let fewer = expert.counts.len() != most;
        self.number(u64::from(!expert.original.is_empty()) + 2 * u64::from(fewer));
        if fewer {
            self.number(expert.counts.len() as u64);
        }
        expert.original.iter().for_each(|&i| self.number(i.into()));
        self.numbers(&expert.counts);
    }

    fn magnitudes(&mut self, m: &Magnitudes) {
        self.number(m.filled().count() as u64);
        let mut last = 0;
        for (bucket, count) in m.filled() {
            self.number((bucket - last) as u64);
            self.number(count);
            last = bucket;
        }
    }
}

struct In<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> In<'a> {
    fn left(&self) -> usize {
        self.bytes.len().saturating_sub(self.at)
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], String> {
        let end = self.at.checked_add(len);
        let part = end.and_then(|end| self.bytes.get(self.at..end));
        let part = part.ok_or_else(|| format!("the file ends inside the value at {}", self.at))?;
        self.at += len;
        Ok(part)
    }

    fn fixed(&mut self) -> Result<u64, String> {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(self.take(8)?);
        Ok(u64::from_le_bytes(bytes))
    }

    fn number(&mut self) -> Result<u64, String> {
        let mut n = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.take(1)?[0];
            if shift == 63 && byte > 1 {
                break;
            }
            n |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(n);
            }
        }
        Err(format!("a number before {} has more than 64 bits", self.at))
    }

    /// Reads the length of a list whose entries have at least `bytes` bytes each.
    fn count(&mut self, bytes: usize) -> Result<usize, String> {
        let n = self.number()?;
        let fits = usize::try_from(n)
            .ok()
            .filter(|n| *n <= self.left() / bytes);
        fits.ok_or_else(|| format!("{n} entries before {}, more than the file has", self.at))
    }

    fn numbers(&mut self, len: usize) -> Result<Vec<u64>, String> {
        (0..len).map(|_| self.number()).collect()
    }

    fn routing(&mut self) -> Result<Routing, String> {
        let small = |n: u64| u32::try_from(n).map_err(|_| format!("{n} experts"));
        let (experts, chosen) = (small(self.number()?)?, small(self.number()?)?);
        let count = self.count(1)?;
        let mut layers = Vec::with_capacity(count);
        for _ in 0..count {
            let experts = self.count(1)?;
            let together = pairs(experts);
            if together > self.left() {
                return Err(format!("{experts} experts, more than the file has"));
            }
            layers.push(RoutedLayer {
                visits: self.numbers(experts)?,
                again: self.numbers(experts)?,
                together: self.numbers(together)?,
                neurons: Vec::new(),
            });
        }
        let mut misses = ExpertMisses {
            needed: self.number()?,
            ..ExpertMisses::default()
        };
        for missed in &mut misses.missed {
            *missed = self.number()?;
        }
        if self.left() > 0 {
            self.neurons(&mut layers)?;
        }
        Ok(Routing {
            experts,
            chosen,
            layers,
            misses,
        })
    }

    /// Reads how neurons inside the experts of `layers` fire.
    fn neurons(&mut self, layers: &mut [RoutedLayer]) -> Result<(), String> {
        let neurons = self.count(1)?;
        for layer in layers {
            match self.number()? {
                0 => continue,
                1 if neurons > 0 && !layer.visits.is_empty() => {}
                n => return Err(format!("mark {n} before the neurons of experts")),
            }
            for expert in 0..layer.visits.len() {
                layer.neurons.push(read_expert(self, expert, neurons)?);
            }
        }
        Ok(())
    }

    fn magnitudes(&mut self) -> Result<Magnitudes, String> {
        let mut m = Magnitudes::default();
        let filled = self.count(2)?;
        let mut bucket = 0usize;
        for i in 0..filled {
            let step = usize::try_from(self.number()?).unwrap_or(usize::MAX);
            bucket = bucket.saturating_add(step);
            let count = self.number()?;
            if (i > 0 && step == 0) || count == 0 {
                return Err("a bucket of magnitudes twice, or empty".into());
            }
            m.set(bucket, count)
                .ok_or_else(|| format!("no bucket {bucket} of magnitudes"))?;
        }
        Ok(m)
    }
}

#[cfg(test)]
mod tests;
