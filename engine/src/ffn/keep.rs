//! What of a pass is likely to be needed by the next token, and so stays in memory.
//!
//! A prompt needs far more neurons than the token that comes after it, which needs mostly what the
//! prompt's last tokens did and what is needed often. So of what a prompt read only the former stays,
//! and what was there before is worth as much as it was, as if each token had had a pass of its own.

use std::ops::Range;
use std::time::Instant;

use emberflow_kernels::{Cpu, Workers};
use emberflow_predictor::Features;

use super::store::NeuronStore;
use super::{CLUSTER, Ffn, nanoseconds};

/// Tokens at the end of a text's pass whose neurons are kept.
pub(super) const RECENT: usize = 2;

impl Ffn {
    /// Tells the cold region how near the last tokens of a text's pass were to each neuron of `bank`:
    /// the two last ones, which say how long nearness lasts. They are scored once more for that, as a
    /// pass of many tokens keeps no margins. Of several texts it is not told apart what is whose.
    pub(super) fn lean_on_end(
        &mut self,
        cpu: Cpu,
        workers: &Workers,
        bank: u32,
        features: Features<'_>,
    ) {
        let (Some(predictors), [end]) = (&mut self.predictors, &self.ends[..]) else {
            return;
        };
        if !self.store.evicts() {
            return;
        }
        let start = Instant::now();
        for (t, follows) in [(end.end - 2, false), (end.end - 1, true)] {
            let features = features.alone(t);
            if !predictors.prepare(cpu, workers, bank, features) {
                return;
            }
            let predictors = &*predictors;
            workers.for_each_part_mut(&mut self.margins, CLUSTER, &|_, c, margins| {
                predictors.margins(cpu, bank, features, c * CLUSTER, margins);
            });
            (self.store).lean(cpu, bank, 0, &self.margins, follows);
        }
        self.predict_ns += nanoseconds(start.elapsed());
    }
}

/// Gives back what the clusters that are `done` held; false when there were none. `gates` are those of
/// all neurons, how many tokens they are for, and the last ones of each text.
pub(super) fn release(
    store: &mut NeuronStore,
    done: &mut Vec<u32>,
    ids: &[u32],
    (gates, tokens, ends): (&[f32], usize, &[Range<usize>]),
) -> bool {
    // Of a prompt only what its last tokens needed, or most of its tokens, is likely to be
    // needed soon; the rest would push everything else out.
    let recent = |n: u32| {
        let gates = &gates[n as usize * tokens..][..tokens];
        let fires = |g: &&f32| **g != 0.0;
        let last = |end: &Range<usize>| gates[end.clone()].iter().any(|g| *g != 0.0);
        ends.len() == tokens
            || ends.iter().any(last)
            || 2 * gates.iter().filter(fires).count() >= tokens
    };
    let any = !done.is_empty();
    for c in done.drain(..) {
        store.release(ids, c, recent);
    }
    any
}
