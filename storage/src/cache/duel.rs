//! How much a recent use should count, found out while running.
//!
//! Small models of the cache, each with another head start for recent uses, see every
//! 32nd unit (the sampling of UMON, Qureshi and Patt 2006); the one that misses least
//! decides for the cache. It changes who is evicted and so only speed.

use super::ages::{Ages, RINGS};
use super::rings::Rings;
use super::worth::{BUCKETS, Worth};

/// Head starts in buckets: none, a doubling of worth, and before all else.
const HEAD_STARTS: [u32; 3] = [0, 8, BUCKETS];

/// The one to begin with: large models published so far fire in phases.
const FIRST: usize = 2;

/// Of so many units one is looked at.
const SAMPLE: u32 = 32;

/// Ticks between decisions.
const PERIOD: u32 = 8;

/// Of the misses so far, the part that is forgotten with each decision.
const FORGET: u32 = 8;

/// The part by which a model has to miss less than the one that decides.
const MARGIN: u32 = 64;

/// The models and what they saw.
#[derive(Debug, Clone)]
pub(super) struct Duel {
    models: [Model; HEAD_STARTS.len()],
    /// The one that decides.
    best: usize,
    /// Units that a model holds.
    room: u32,
    ticks: u32,
}

/// A cache of units that hold nothing. Sampled units are indices.
#[derive(Debug, Clone)]
struct Model {
    rings: Rings,
    ages: Ages,
    resident: Vec<bool>,
    count: u32,
    misses: u32,
}

impl Duel {
    /// Over `units` units, with room for none.
    pub fn new(units: u32) -> Self {
        let sampled = units.div_ceil(SAMPLE);
        Self {
            models: HEAD_STARTS.map(|head_start| Model {
                rings: Rings::new(RINGS, sampled),
                ages: Ages::new(head_start),
                resident: vec![false; sampled as usize],
                count: 0,
                misses: 0,
            }),
            best: FIRST,
            room: 1,
            ticks: 0,
        }
    }

    /// Bytes that [`Duel::new`] allocates.
    pub fn bytes_for(units: u64) -> u64 {
        let sampled = units.div_ceil(u64::from(SAMPLE));
        HEAD_STARTS.len() as u64 * (8 * (u64::from(RINGS) + sampled) + sampled)
    }

    /// The head start before anything was seen.
    pub fn first() -> u32 {
        HEAD_STARTS[FIRST]
    }

    /// The cache has `slots` slots from now on.
    pub fn resize(&mut self, slots: u32) {
        self.room = (slots / SAMPLE).max(1);
    }

    /// A unit was used, which is worth `of` now.
    #[inline]
    pub fn used(&mut self, unit: u32, of: u32, worth: &Worth) {
        if unit % SAMPLE == SAMPLE / 2 {
            let (i, bucket, lowest) = (unit / SAMPLE, worth.bucket(of), worth.lowest());
            for model in &mut self.models {
                model.used(i, bucket, lowest, self.room);
            }
        }
    }

    /// Time passes; the lowest bucket rises from `from` to `to`. The head start to use
    /// from now on, where it is time to decide.
    pub fn tick(&mut self, from: u32, to: u32) -> Option<u32> {
        for model in &mut self.models {
            model.ages.tick(&mut model.rings, from, to);
        }
        self.ticks += 1;
        if self.ticks < PERIOD {
            return None;
        }
        self.ticks = 0;
        for (i, model) in self.models.iter().enumerate() {
            let least = self.models[self.best].misses;
            if model.misses < least - least / MARGIN {
                self.best = i;
            }
        }
        for model in &mut self.models {
            model.misses -= model.misses / FORGET;
        }
        Some(HEAD_STARTS[self.best])
    }
}

impl Model {
    fn used(&mut self, i: u32, bucket: u32, lowest: u32, room: u32) {
        if self.resident[i as usize] {
            self.rings.remove(i);
        } else {
            self.misses = self.misses.saturating_add(1);
            while self.count >= room {
                let Some(victim) = self.ages.victim(&self.rings, lowest) else {
                    break;
                };
                self.rings.remove(victim);
                self.resident[victim as usize] = false;
                self.count -= 1;
            }
            self.resident[i as usize] = true;
            self.count += 1;
        }
        self.ages.push(&mut self.rings, bucket, i);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The head start that a stream of uses leads to, with room for half of 1024 samples.
    /// `fires(state, random)` is a unit's next state.
    fn decides(fires: impl Fn(u32, bool, f64) -> bool) -> u32 {
        let units = 1024 * SAMPLE;
        let (mut worth, mut duel) = (Worth::new(), Duel::new(units));
        let mut of = vec![0; units as usize];
        duel.resize(units / 2);
        let mut state = vec![false; 1024];
        let mut seed = 1u64;
        let mut head_start = Duel::first();
        for _ in 0..512 {
            for i in 0..1024 {
                seed = seed.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
                let random = (seed >> 40) as f64 / f64::from(1 << 24);
                let now = &mut state[i as usize];
                *now = fires(i, *now, random);
                if *now {
                    let unit = i * SAMPLE + SAMPLE / 2;
                    let of = &mut of[unit as usize];
                    worth.used(of);
                    duel.used(unit, *of, &worth);
                    duel.used(unit + 1, *of, &worth);
                }
            }
            let from = worth.lowest();
            worth.tick();
            head_start = duel.tick(from, worth.lowest()).unwrap_or(head_start);
        }
        let counts = duel.models.each_ref().map(|m| (m.count, m.misses));
        assert!(counts.iter().all(|c| c.0 == 512 && c.1 > 0), "{counts:?}");
        head_start
    }

    #[test]
    fn neurons_that_stay_get_a_head_start_and_neurons_that_flicker_none() {
        // ends with 17 %, begins with 6 % whoever it is
        let stays = decides(|_, on, random| random < if on { 0.83 } else { 0.06 });
        assert_eq!(stays, BUCKETS);
        // each its own rate, whatever was before
        let flickers = decides(|i, _, random| random < f64::from(i) / 1100.0);
        assert_eq!(flickers, 0);
    }
}
