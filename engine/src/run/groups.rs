//! Groups of requests that decode in the same pass.
//!
//! A pass over `w` requests reads each missing neuron once for all of them, but needs the union of
//! their neurons. If the union does not fit in memory, each layer evicts neurons of the next pass,
//! and `w` requests together are slower than one. Requests then decode in groups that alternate
//! every [`SLICE`] passes, so that a group's neurons are read about once per slice.
//!
//! The group size `w` is found in two steps:
//! 1. After the first pass, it is halved until the union is expected to fit the slots of the cache.
//!    If a pass of `n` requests needs `U` of `N` neurons, each request independently, then a pass
//!    of `w` needs `N·(1 − (1 − U/N)^(w/n))`.
//! 2. While passes wait for storage, a smaller size is measured and adopted if it reduces the time per
//!    token to [`GAIN`]: half, or the size whose union is expected to fit by the needs of the last pass. Between the
//!    two, a smaller group reads as much per token as a larger one, so that halves alone would not get there.
//!
//! An admission restarts the search. No text depends on the group size.

use std::time::Duration;

use super::request::RequestId;

/// Passes of a time slice. A group reads its neurons again at the start of each slice.
const SLICE: usize = 128;
/// Passes after a change of group size that are not measured: neurons are not resident yet.
const WARM: usize = 6;
/// Measured passes.
const MEASURED: usize = 6;
/// Smallest share of time waiting for storage at which half the group size is measured.
const WAITS: f64 = 0.1;
/// Half the group size is adopted if a token takes at most this share of the time: more than noise.
const GAIN: f64 = 0.93;

/// Counts and times of a decoding pass.
#[derive(Debug, Clone, Copy)]
pub(super) struct PassCost {
    /// Rows of the pass, one per request.
    pub tokens: usize,
    /// Distinct neurons it needed.
    pub needed: u64,
    /// All neurons.
    pub neurons: u64,
    /// Largest number of neurons that can be resident at once.
    pub slots: u64,
    pub time: Duration,
    /// The part of it spent waiting for storage.
    pub wait: Duration,
}

/// State of the search for the group size.
#[derive(Debug, Clone, Copy)]
enum Search {
    /// No pass was measured yet.
    Start,
    /// The group size is being measured; the larger size before it, and its seconds per token.
    Measure(Option<(usize, f64)>),
    /// Found.
    Done,
}

/// Chooses the requests that decode in the next pass.
#[derive(Debug)]
pub(super) struct Groups {
    /// Requests per group; `usize::MAX` for all of them.
    group_size: usize,
    /// The group, and its request that was added last.
    group: Vec<RequestId>,
    last: Option<RequestId>,
    /// Remaining passes of the slice.
    left: usize,
    search: Search,
    /// Passes since the last change of group size; sums over the measured ones.
    passes: usize,
    tokens: usize,
    seconds: f64,
    waited: f64,
}

impl Groups {
    pub fn new() -> Self {
        Self {
            group_size: usize::MAX,
            group: Vec::new(),
            last: None,
            left: SLICE,
            search: Search::Start,
            passes: 0,
            tokens: 0,
            seconds: 0.0,
            waited: 0.0,
        }
    }

    /// A request was admitted: all requests decode together until the first pass is measured.
    pub fn admitted(&mut self) {
        self.set(usize::MAX, Search::Start);
    }

    /// Most requests per pass.
    pub fn group_size(&self) -> usize {
        self.group_size
    }

    /// Whether `id` decodes in the next pass.
    pub fn has(&self, id: RequestId) -> bool {
        self.group.contains(&id)
    }

    /// Selects the group among the requests that can decode, in order of arrival. Members stay for
    /// a slice; the next requests replace those that ended.
    pub fn choose(&mut self, decoding: impl Iterator<Item = RequestId> + Clone) {
        let mut live = decoding.clone();
        self.group.retain(|&id| live.any(|other| other == id));
        if self.left == 0 {
            self.left = SLICE;
            self.group.clear();
        }
        let group_size = self.group_size.min(decoding.clone().count());
        self.group.truncate(group_size);
        let last = self.last;
        let after = decoding.clone().filter(|&id| Some(id) > last);
        for id in after.chain(decoding) {
            if self.group.len() == group_size {
                break;
            }
            if !self.group.contains(&id) {
                self.group.push(id);
                self.last = Some(id);
            }
        }
        self.group.sort_unstable();
    }

    /// Records a pass of the group while `live` requests could decode.
    pub fn passed(&mut self, pass: PassCost, live: usize) {
        self.left = self.left.saturating_sub(1);
        if live < 2 {
            return;
        }
        match self.search {
            Search::Done => {}
            Search::Start => self.set(group_that_fits(&pass), Search::Measure(None)),
            Search::Measure(before) => {
                self.passes += 1;
                if self.passes > WARM {
                    self.tokens += pass.tokens;
                    self.seconds += pass.time.as_secs_f64();
                    self.waited += pass.wait.as_secs_f64();
                }
                if self.passes == WARM + MEASURED {
                    self.judge(before, &pass, live);
                }
            }
        }
    }

    /// Adopts the measured group size, returns to the larger one before it, or tries a smaller one.
    fn judge(&mut self, before: Option<(usize, f64)>, pass: &PassCost, live: usize) {
        let cost = self.seconds / self.tokens.max(1) as f64;
        let group_size = self.group_size.min(live);
        match before {
            Some((wider, old)) if cost > GAIN * old => {
                // The size that fits may be far below half, which is still to be measured.
                let half = wider.min(live).div_ceil(2);
                if group_size < half {
                    self.set(half, Search::Measure(before));
                } else {
                    self.set(wider, Search::Done);
                }
            }
            _ if group_size > 1 && self.waited > WAITS * self.seconds => {
                let before = Some((self.group_size, cost));
                let smaller = group_size.div_ceil(2).min(group_that_fits(pass));
                self.set(smaller, Search::Measure(before));
            }
            _ => self.search = Search::Done,
        }
    }

    fn set(&mut self, group_size: usize, search: Search) {
        (self.group_size, self.search, self.passes) = (group_size, search, 0);
        (self.tokens, self.seconds, self.waited) = (0, 0.0, 0.0);
    }
}

/// The largest group whose neurons are expected to fit, from a pass over all requests; all requests
/// if smaller groups would need nearly as many neurons.
fn group_that_fits(pass: &PassCost) -> usize {
    let neurons = pass.neurons.max(1) as f64;
    let not_needed = 1.0 - (pass.needed as f64 / neurons).min(1.0);
    let needed = |group_size: usize| {
        let share = group_size as f64 / pass.tokens as f64;
        neurons * (1.0 - libm::pow(not_needed, share))
    };
    let mut group_size = pass.tokens;
    while group_size > 1 && needed(group_size) > pass.slots as f64 {
        group_size = group_size.div_ceil(2);
    }
    if group_size < pass.tokens && needed(group_size) < 0.8 * pass.needed as f64 {
        group_size
    } else {
        usize::MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDS: [RequestId; 4] = [RequestId(1), RequestId(2), RequestId(3), RequestId(4)];

    /// Decodes until the group size is found. A token takes `cost(size)` milliseconds, half of it
    /// waiting; a request needs `share` of the neurons, half of which fit.
    fn found(share: f64, cost: impl Fn(usize) -> u64) -> usize {
        found_with(|_| share, cost)
    }

    /// [`found`], with the share of each pass.
    fn found_with(share: impl Fn(usize) -> f64, cost: impl Fn(usize) -> u64) -> usize {
        let mut groups = Groups::new();
        for number in 0..100 {
            let share = share(number);
            groups.choose(IDS.into_iter());
            let tokens = groups.group.len();
            let time = Duration::from_millis(cost(tokens) * tokens as u64);
            let pass = PassCost {
                tokens,
                needed: (1000.0 * (1.0 - libm::pow(1.0 - share, tokens as f64))) as u64,
                neurons: 1000,
                slots: 500,
                time,
                wait: time / 2,
            };
            groups.passed(pass, IDS.len());
        }
        assert!(matches!(groups.search, Search::Done));
        groups.group_size.min(IDS.len())
    }

    #[test]
    fn the_width_is_the_fastest_one() {
        assert_eq!(found(0.1, |_| 10), 4, "no group_size is faster");
        assert_eq!(found(0.1, |w| 10 + 5 * w as u64), 1, "narrower is faster");
        assert_eq!(found(0.1, |w| [9, 5, 7, 7][w - 1]), 2, "two are best");
        assert_eq!(found(0.2, |w| [9, 5, 7, 7][w - 1]), 2, "four do not fit");
        assert_eq!(found(1.0, |w| 40 / w as u64), 4, "all need everything");
        let grows = |pass| if pass < 5 { 0.1 } else { 0.4 };
        let cost = |w| [4, 10, 10, 9][w - 1];
        assert_eq!(
            found_with(grows, cost),
            1,
            "two do not fit either, and are slower than four"
        );
        let cost = |w| [11, 7, 7, 10][w - 1];
        let which = "one fits and is slower than four, two are faster";
        assert_eq!(found_with(grows, cost), 2, "{which}");
    }

    #[test]
    fn the_first_pass_that_does_not_fit_narrows_at_once() {
        let mut groups = Groups::new();
        groups.choose(IDS.into_iter());
        let pass = PassCost {
            tokens: 4,
            needed: 600,
            neurons: 1000,
            slots: 500,
            time: Duration::from_millis(9),
            wait: Duration::from_millis(8),
        };
        groups.passed(pass, 4);
        assert_eq!(groups.group_size(), 2);
        groups.admitted();
        assert_eq!(groups.group_size(), usize::MAX);
    }

    #[test]
    fn groups_take_turns_and_refill() {
        let mut groups = Groups::new();
        groups.set(2, Search::Done);
        let pass = PassCost {
            tokens: 2,
            needed: 0,
            neurons: 0,
            slots: 0,
            time: Duration::ZERO,
            wait: Duration::ZERO,
        };
        for group in [[1, 2], [3, 4], [1, 2]] {
            for _ in 0..SLICE {
                groups.choose(IDS.into_iter());
                assert_eq!(groups.group, group.map(RequestId));
                groups.passed(pass, 4);
            }
        }
        // One request of the next group has ended, then one during its slice.
        let ids = [IDS[0], IDS[1], IDS[3]];
        groups.choose(ids.into_iter());
        assert_eq!(groups.group, [IDS[0], IDS[3]]);
        groups.choose(ids[..2].iter().copied());
        assert_eq!(groups.group, IDS[..2]);
    }
}
