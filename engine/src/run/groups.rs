//! Groups of requests that decode in the same pass.
//!
//! A pass over `w` requests reads each missing neuron once for all of them, but needs the union of
//! their neurons. If the cache does not hold what the next passes need of it, each layer evicts
//! neurons of the next pass, and `w` requests together are slower than one. Requests then decode in
//! groups that alternate every [`SLICE`] passes, so that a group's neurons are read about once per
//! slice.
//!
//! Where all neurons are in memory, all requests decode together. Elsewhere the group size `w` is
//! measured from one request on, as [`WARM`] and [`MEASURED`] passes of each size: so it is doubled
//! while a token takes about as little time as with the fastest size before ([`SLOWER`]), and the
//! misses per token stay near those of one request ([`MORE_MISSES`]).
//!
//! A request that is admitted while a smaller group decodes joins the rotation. No text depends on
//! the group size.

use std::time::Duration;

use super::request::RequestId;

/// Passes of a time slice. A group reads its neurons again at the start of each slice.
const SLICE: usize = 128;
/// Passes after a change of group size that are not measured: neurons are not resident yet.
const WARM: usize = 3;
/// Measured passes.
const MEASURED: usize = 6;
/// A larger group is kept if a token takes at most this many times as long: noise.
const SLOWER: f64 = 1.05;
/// Times these limits at which a larger group is given up before all of its passes are measured.
const FAR_WORSE: f64 = 1.5;
/// A larger group is given up if it waits for storage for this share of its time, and misses more than these times as
/// many neurons per token as one request, and this share of those that it needs.
const WAITS: f64 = 0.1;
/// See [`WAITS`].
const MORE_MISSES: f64 = 1.5;
/// See [`WAITS`].
const MISSES: f64 = 0.05;

/// Counts and times of a decoding pass.
#[derive(Debug, Clone, Copy)]
pub(super) struct PassCost {
    /// Rows of the pass, one per request.
    pub tokens: usize,
    /// Distinct neurons it needed, and those of them that were not resident.
    pub needed: u64,
    /// See `needed`.
    pub missed: u64,
    /// All neurons.
    pub neurons: u64,
    /// Largest number of neurons that can be resident at once.
    pub slots: u64,
    pub time: Duration,
    /// The part of it spent waiting for storage.
    pub wait: Duration,
}

/// What the sizes so far took.
#[derive(Debug, Clone, Copy)]
struct Measured {
    /// The largest size that was kept.
    group_size: usize,
    /// Fewest seconds per token of any size.
    seconds: f64,
    /// Misses per token of one request.
    missed: f64,
}

/// State of the search for the group size.
#[derive(Debug, Clone, Copy)]
enum Search {
    /// No pass was measured yet.
    Start,
    /// The group size is being measured, after smaller ones.
    Measure(Option<Measured>),
    /// Found.
    Done,
}

/// Sums over measured passes.
#[derive(Debug, Clone, Copy, Default)]
struct PassSums {
    passes: usize,
    tokens: usize,
    seconds: f64,
    waited: f64,
    needed: u64,
    missed: u64,
}

impl PassSums {
    fn add(&mut self, pass: &PassCost) {
        self.passes += 1;
        self.tokens += pass.tokens;
        self.seconds += pass.time.as_secs_f64();
        self.waited += pass.wait.as_secs_f64();
        self.needed += pass.needed;
        self.missed += pass.missed;
    }

    /// Per token.
    fn each(&self, sum: f64) -> f64 {
        sum / self.tokens.max(1) as f64
    }

    /// Whether this size is slower than `before`, a smaller one, or misses more, by more than `times` the tolerance.
    fn is_worse_than(&self, before: &Measured, times: f64) -> bool {
        let misses = self.each(self.missed as f64);
        let most = MORE_MISSES * before.missed + MISSES * self.each(self.needed as f64);
        self.each(self.seconds) > times * SLOWER * before.seconds
            || self.waited > WAITS * self.seconds && misses > times * most
    }

    /// Whether that is clear before all passes are measured.
    fn is_far_worse_than(&self, before: &Measured) -> bool {
        self.passes > 1 && self.is_worse_than(before, FAR_WORSE)
    }
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
    sums: PassSums,
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
            sums: PassSums::default(),
        }
    }

    /// A request was admitted. If all decode together, that is measured again.
    pub fn admitted(&mut self) {
        if self.group_size == usize::MAX {
            self.set(usize::MAX, Search::Start);
        }
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
            return self.set(usize::MAX, Search::Start);
        }
        match self.search {
            Search::Done => {}
            Search::Start if pass.slots >= pass.neurons => self.search = Search::Done,
            Search::Start => self.set(1, Search::Measure(None)),
            Search::Measure(before) => {
                self.passes += 1;
                if self.passes > WARM {
                    self.sums.add(&pass);
                }
                let is_clear = before.is_some_and(|before| self.sums.is_far_worse_than(&before));
                if is_clear || self.sums.passes == MEASURED {
                    self.judge(before, live);
                }
            }
        }
    }

    /// Returns to the size before, or tries twice the size.
    fn judge(&mut self, before: Option<Measured>, live: usize) {
        let sums = self.sums;
        if let Some(before) = before.filter(|before| sums.is_worse_than(before, 1.0)) {
            return self.set(before.group_size, Search::Done);
        }
        if self.group_size >= live {
            return self.set(usize::MAX, Search::Done);
        }
        let seconds = sums.each(sums.seconds);
        let next = Measured {
            group_size: self.group_size,
            seconds: before.map_or(seconds, |before| before.seconds.min(seconds)),
            missed: before.map_or(sums.each(sums.missed as f64), |before| before.missed),
        };
        self.set((2 * self.group_size).min(live), Search::Measure(Some(next)));
    }

    fn set(&mut self, group_size: usize, search: Search) {
        (self.group_size, self.search) = (group_size, search);
        (self.passes, self.sums) = (0, PassSums::default());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDS: [RequestId; 4] = [RequestId(1), RequestId(2), RequestId(3), RequestId(4)];

    /// A pass over `tokens` requests, of which each needs `share` of the neurons, half of which fit. A token takes `ms`
    /// milliseconds, half of it waiting, and misses `missed` neurons.
    fn pass(tokens: usize, share: f64, ms: u64, missed: u64) -> PassCost {
        let time = Duration::from_millis(ms * tokens as u64);
        PassCost {
            tokens,
            needed: (1000.0 * (1.0 - libm::pow(1.0 - share, tokens as f64))) as u64,
            missed: missed * tokens as u64,
            neurons: 1000,
            slots: 500,
            time,
            wait: time / 2,
        }
    }

    /// Decodes until the group size is found. A token takes `cost(size)` milliseconds and misses `missed(size)` neurons.
    fn found(cost: impl Fn(usize) -> u64, missed: impl Fn(usize) -> u64) -> usize {
        let mut groups = Groups::new();
        for _ in 0..100 {
            groups.choose(IDS.into_iter());
            let tokens = groups.group.len();
            groups.passed(pass(tokens, 0.1, cost(tokens), missed(tokens)), IDS.len());
        }
        assert!(matches!(groups.search, Search::Done));
        groups.group_size.min(IDS.len())
    }

    #[test]
    fn the_width_is_the_largest_that_is_fast() {
        let few = |_| 1;
        assert_eq!(found(|_| 10, few), 4, "all are as fast");
        assert_eq!(found(|w| 10 + 5 * w as u64, few), 1, "one is faster");
        assert_eq!(found(|w| [9, 5, 7, 7][w - 1], few), 2, "two are best");
        assert_eq!(found(|w| 40 / w as u64, few), 4, "all need everything");
        let cost = |w| [4, 10, 10, 9][w - 1];
        assert_eq!(found(cost, few), 1, "no group is as fast as one");
        let cost = |w| [11, 7, 7, 10][w - 1];
        assert_eq!(found(cost, few), 2, "two are faster");
    }

    /// Times vary with what else the machine does, misses do not.
    #[test]
    fn groups_that_miss_far_more_than_one_are_given_up() {
        let cost = |w| [10, 9, 9, 8][w - 1];
        assert_eq!(found(cost, |w| [10, 12, 0, 14][w - 1]), 4, "hardly more");
        assert_eq!(found(cost, |w| [10, 30, 0, 60][w - 1]), 1);
        assert_eq!(found(cost, |w| [10, 12, 0, 30][w - 1]), 2);
        assert_eq!(
            found(cost, |w| [0, 2, 0, 3][w - 1]),
            4,
            "few of those needed"
        );
    }

    #[test]
    fn a_group_that_is_far_slower_takes_few_passes() {
        let mut groups = Groups::new();
        let mut wide = 0;
        for _ in 0..100 {
            groups.choose(IDS.into_iter());
            let tokens = groups.group.len();
            wide += usize::from(tokens > 1);
            let ms = if tokens > 1 { 30 } else { 10 };
            groups.passed(pass(tokens, 0.1, ms, 1), IDS.len());
        }
        assert_eq!(groups.group_size(), 1);
        assert_eq!(wide, 1 + WARM + 2);
    }

    #[test]
    fn models_in_memory_have_no_groups() {
        let mut groups = Groups::new();
        groups.choose(IDS.into_iter());
        let in_memory = PassCost {
            slots: 1000,
            ..pass(4, 0.1, 10, 0)
        };
        groups.passed(in_memory, 4);
        assert!(matches!(groups.search, Search::Done));
        assert_eq!(groups.group_size(), usize::MAX);
    }

    #[test]
    fn an_admitted_request_joins_the_rotation() {
        let mut groups = Groups::new();
        let step = |groups: &mut Groups, live: usize| {
            groups.choose(IDS.into_iter().take(live));
            let tokens = groups.group.len();
            groups.passed(pass(tokens, 0.1, 10 * tokens as u64, 1), live);
        };
        for _ in 0..100 {
            step(&mut groups, 3);
        }
        assert_eq!(groups.group_size(), 1);
        groups.admitted();
        step(&mut groups, 4);
        assert_eq!(groups.group.len(), 1);
        // One that is alone, and who comes then, begin anew.
        step(&mut groups, 1);
        groups.admitted();
        assert_eq!(groups.group_size(), usize::MAX);
        step(&mut groups, 2);
        assert_eq!(groups.group_size(), 1);
    }

    #[test]
    fn groups_take_turns_and_refill() {
        let mut groups = Groups::new();
        groups.set(2, Search::Done);
        let pass = pass(2, 0.0, 0, 0);
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
