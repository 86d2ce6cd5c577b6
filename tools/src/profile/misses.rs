//! Measured miss rates of a profile: replays the activations of sampled neurons through the engine's cache, for
//! several cache sizes.

use emberflow_predictor::FiringTrace;
use emberflow_predictor::stats::Misses;
use emberflow_predictor::stats::misses::{SIZES, bin};
use emberflow_storage::cache::Key;

use crate::Failure;
use crate::cold::Cold;

/// Tokens that warm up a cache before misses are counted.
const WARM_UP: usize = 128;

/// Miss rates by cache size; empty if the trace is too short.
pub fn count(trace: &FiringTrace) -> Result<Misses, Failure> {
    let mut misses = Misses::default();
    if trace.tokens() < 2 * WARM_UP {
        return Ok(misses);
    }
    let often = trace.frequencies();
    for token in WARM_UP..trace.tokens() {
        trace.each(token, |n| misses.needed[class(often[n])] += 1);
    }
    for (&share, missed) in SIZES.iter().zip(&mut misses.missed) {
        let mut cold = filled(trace, &often, share)?;
        for token in 0..trace.tokens() {
            pass(&mut cold, trace, token, |n| {
                missed[class(often[n])] += u64::from(token >= WARM_UP);
            });
        }
    }
    Ok(misses)
}

fn class(often: f64) -> usize {
    bin(often).round() as usize
}

fn key(trace: &FiringTrace, n: usize) -> Key {
    let [bank, neuron] = trace.place(n);
    Key::new(bank as u32, neuron as u32)
}

/// A cold region for a share of the sampled neurons, filled as the engine does: with the front of every bank.
fn filled(trace: &FiringTrace, often: &[f64], share: f64) -> Result<Cold, Failure> {
    let slots = (share * often.len() as f64).round().max(1.0) as u64;
    let banks: Vec<u32> = trace.sampled().into_iter().map(|n| n as u32).collect();
    let mut cold = Cold::new(slots, &banks)?;
    let front = slots.div_ceil(banks.len() as u64) as u32;
    for (n, &often) in often.iter().enumerate() {
        let key = key(trace, n);
        cold.set_prior(key, often);
        if key.neuron < front {
            cold.fill(key);
        }
    }
    Ok(cold)
}

/// Replays one token, bank after bank, and calls `missed` for each neuron that is not cached.
fn pass(cold: &mut Cold, trace: &FiringTrace, token: usize, mut missed: impl FnMut(usize)) {
    let mut bank = 0;
    cold.begin_layer(bank);
    trace.each(token, |n| {
        let key = key(trace, n);
        while bank < key.bank {
            cold.end_layer();
            bank += 1;
            cold.begin_layer(bank);
        }
        if !cold.find(key) {
            missed(n);
        }
    });
    cold.end_layer();
}

#[cfg(test)]
mod tests {
    use emberflow_predictor::record::{Recorder, Subject};

    use super::*;

    const BANKS: usize = 2;
    const NEURONS: usize = 100;

    /// A trace of `tokens` tokens; `fires(token, neuron)` says whether a neuron is active.
    fn trace(tokens: usize, fires: impl Fn(usize, usize) -> bool) -> FiringTrace {
        let mut recorder = Recorder::new(Subject {
            model: "m".into(),
            text: 1,
            neurons: vec![NEURONS; BANKS],
            window: tokens,
            sample: 1,
        });
        for bank in 0..BANKS {
            let gates: Vec<f32> = (0..NEURONS)
                .flat_map(|n| (0..tokens).map(move |t| (t, bank * NEURONS + n)))
                .map(|(t, n)| f32::from(u8::from(fires(t, n))))
                .collect();
            recorder.see(bank, 0, 0, tokens, &gates, &gates);
        }
        recorder.end_window(0);
        recorder.trace().clone()
    }

    #[test]
    fn what_always_fires_stays_and_what_is_scanned_does_not() {
        // A tenth of the neurons is active for every token, each other neuron for every fifth.
        let misses = count(&trace(400, |t, n| n % 10 == 0 || (n + t).is_multiple_of(5))).unwrap();
        for (size, share) in SIZES.iter().enumerate() {
            let always = misses.missed[size][class(1.0)];
            // They are 10 % of all neurons; a token needs about 30 %.
            assert!(always > 0 || *share > 0.1, "{share}: {always}");
            assert!(always == 0 || *share < 0.35, "{share}: {always}");
        }
        assert!(misses.rate(0) > misses.rate(4) && misses.rate(4) > misses.rate(8));
        assert!(count(&trace(200, |_, _| true)).unwrap().is_empty());
    }
}
