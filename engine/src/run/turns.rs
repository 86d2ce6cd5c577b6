//! Turns: how many requests decode in one pass.
//!
//! A pass over `w` requests reads each missing neuron once for all of them, but needs the union of
//! their neurons. Where the union does not fit in memory, each layer evicts what the next pass
//! needs, and `w` requests together are slower than one. Requests then decode in groups that take
//! turns of [`TURN`] passes, so that the neurons of a group are read about once a turn.
//!
//! Two steps find the number of requests per group, the width:
//! 1. After the first pass, it is halved until the union is expected to fit the slots of the cache.
//!    Of `N` neurons, a pass of `n` requests needs `U`; if each request needs them independently, a
//!    pass of `w` needs `N·(1 − (1 − U/N)^(w/n))`.
//! 2. While passes wait for the device, half the width is tried and kept if it is faster by
//!    [`GAIN`] per token.
//!
//! An admission starts over. No text depends on the choice.

use std::time::Duration;

use super::request::RequestId;

/// Passes of a turn. A group reads its neurons again at the start of each one.
const TURN: usize = 128;
/// Passes after a change of width that are not measured: their neurons are not yet resident.
const WARM: usize = 6;
/// Passes that are measured.
const MEASURED: usize = 6;
/// Share of their time spent waiting for the device from which half the width is tried.
const WAITS: f64 = 0.1;
/// Half the width is kept if a token takes at most this share of the time.
const GAIN: f64 = 0.93;

/// What a decoding pass needed and took.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pass {
    /// Its rows, one per request.
    pub tokens: usize,
    /// Distinct neurons it needed.
    pub needed: u64,
    /// All neurons.
    pub neurons: u64,
    /// How many of them can be resident at once.
    pub slots: u64,
    pub time: Duration,
    /// The part of it that waited for the device.
    pub wait: Duration,
}

/// How the width is being found.
#[derive(Debug, Clone, Copy)]
enum Search {
    /// Nothing is known yet.
    Start,
    /// The width is measured; the wider one before it and its seconds per token.
    Measure(Option<(usize, f64)>),
    /// Found.
    Done,
}

/// Chooses the requests that decode in the next pass.
#[derive(Debug)]
pub(super) struct Turns {
    /// Requests per group; `usize::MAX` for all of them.
    width: usize,
    /// The group, and the last request of it that was added.
    group: Vec<RequestId>,
    last: Option<RequestId>,
    /// Passes left in its turn.
    left: usize,
    search: Search,
    /// Passes since the change of width, and sums over those that are measured.
    passes: usize,
    tokens: usize,
    seconds: f64,
    waited: f64,
}

impl Turns {
    pub fn new() -> Self {
        Self {
            width: usize::MAX,
            group: Vec::new(),
            last: None,
            left: TURN,
            search: Search::Start,
            passes: 0,
            tokens: 0,
            seconds: 0.0,
            waited: 0.0,
        }
    }

    /// A request was admitted: all decode together until more is known.
    pub fn admitted(&mut self) {
        self.set(usize::MAX, Search::Start);
    }

    /// Most requests per pass.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Whether `id` decodes in the next pass.
    pub fn has(&self, id: RequestId) -> bool {
        self.group.contains(&id)
    }

    /// Chooses among the requests that could decode, in order of arrival. A group keeps its members
    /// for a turn; the next ones take the places of those that ended.
    pub fn choose(&mut self, decoding: impl Iterator<Item = RequestId> + Clone) {
        let mut live = decoding.clone();
        self.group.retain(|&id| live.any(|other| other == id));
        if self.left == 0 {
            self.left = TURN;
            self.group.clear();
        }
        let width = self.width.min(decoding.clone().count());
        self.group.truncate(width);
        let last = self.last;
        let after = decoding.clone().filter(|&id| Some(id) > last);
        for id in after.chain(decoding) {
            if self.group.len() == width {
                break;
            }
            if !self.group.contains(&id) {
                self.group.push(id);
                self.last = Some(id);
            }
        }
        self.group.sort_unstable();
    }

    /// Records a pass over the group, while `live` requests could decode.
    pub fn passed(&mut self, pass: Pass, live: usize) {
        self.left = self.left.saturating_sub(1);
        if live < 2 {
            return;
        }
        match self.search {
            Search::Done => {}
            Search::Start => self.set(width_that_fits(&pass), Search::Measure(None)),
            Search::Measure(before) => {
                self.passes += 1;
                if self.passes > WARM {
                    self.tokens += pass.tokens;
                    self.seconds += pass.time.as_secs_f64();
                    self.waited += pass.wait.as_secs_f64();
                }
                if self.passes == WARM + MEASURED {
                    self.judge(before, live);
                }
            }
        }
    }

    /// Keeps the measured width, returns to the wider one before it, or tries half of it.
    fn judge(&mut self, before: Option<(usize, f64)>, live: usize) {
        let cost = self.seconds / self.tokens.max(1) as f64;
        let width = self.width.min(live);
        match before {
            Some((wider, old)) if cost > GAIN * old => self.set(wider, Search::Done),
            _ if width > 1 && self.waited > WAITS * self.seconds => {
                let before = Some((self.width, cost));
                self.set(width.div_ceil(2), Search::Measure(before));
            }
            _ => self.search = Search::Done,
        }
    }

    fn set(&mut self, width: usize, search: Search) {
        (self.width, self.search, self.passes) = (width, search, 0);
        (self.tokens, self.seconds, self.waited) = (0, 0.0, 0.0);
    }
}

/// The widest group whose neurons are expected to fit, by a pass over all requests; all of them if
/// narrower groups would need about as much.
fn width_that_fits(pass: &Pass) -> usize {
    let neurons = pass.neurons.max(1) as f64;
    let not_needed = 1.0 - (pass.needed as f64 / neurons).min(1.0);
    let needed = |width: usize| {
        let share = width as f64 / pass.tokens as f64;
        neurons * (1.0 - libm::pow(not_needed, share))
    };
    let mut width = pass.tokens;
    while width > 1 && needed(width) > pass.slots as f64 {
        width = width.div_ceil(2);
    }
    if width < pass.tokens && needed(width) < 0.8 * pass.needed as f64 {
        width
    } else {
        usize::MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDS: [RequestId; 4] = [RequestId(1), RequestId(2), RequestId(3), RequestId(4)];

    /// Decodes until the width is found, if a token takes `cost(width)` milliseconds, half of it
    /// waiting, and a request needs `share` of the neurons, half of which fit.
    fn found(share: f64, cost: impl Fn(usize) -> u64) -> usize {
        let mut turns = Turns::new();
        for _ in 0..100 {
            turns.choose(IDS.into_iter());
            let tokens = turns.group.len();
            let time = Duration::from_millis(cost(tokens) * tokens as u64);
            let pass = Pass {
                tokens,
                needed: (1000.0 * (1.0 - libm::pow(1.0 - share, tokens as f64))) as u64,
                neurons: 1000,
                slots: 500,
                time,
                wait: time / 2,
            };
            turns.passed(pass, IDS.len());
        }
        assert!(matches!(turns.search, Search::Done));
        turns.width.min(IDS.len())
    }

    #[test]
    fn the_width_is_the_fastest_one() {
        assert_eq!(found(0.1, |_| 10), 4, "no width is faster");
        assert_eq!(found(0.1, |w| 10 + 5 * w as u64), 1, "narrower is faster");
        assert_eq!(found(0.1, |w| [9, 5, 7, 7][w - 1]), 2, "two are best");
        assert_eq!(found(0.2, |w| [9, 5, 7, 7][w - 1]), 2, "four do not fit");
        assert_eq!(found(1.0, |w| 40 / w as u64), 4, "all need everything");
    }

    #[test]
    fn the_first_pass_that_does_not_fit_narrows_at_once() {
        let mut turns = Turns::new();
        turns.choose(IDS.into_iter());
        let pass = Pass {
            tokens: 4,
            needed: 600,
            neurons: 1000,
            slots: 500,
            time: Duration::from_millis(9),
            wait: Duration::from_millis(8),
        };
        turns.passed(pass, 4);
        assert_eq!(turns.width(), 2);
        turns.admitted();
        assert_eq!(turns.width(), usize::MAX);
    }

    #[test]
    fn groups_take_turns_and_refill() {
        let mut turns = Turns::new();
        turns.set(2, Search::Done);
        let pass = Pass {
            tokens: 2,
            needed: 0,
            neurons: 0,
            slots: 0,
            time: Duration::ZERO,
            wait: Duration::ZERO,
        };
        for group in [[1, 2], [3, 4], [1, 2]] {
            for _ in 0..TURN {
                turns.choose(IDS.into_iter());
                assert_eq!(turns.group, group.map(RequestId));
                turns.passed(pass, 4);
            }
        }
        // One of the next group has ended, then one during its turn.
        let ids = [IDS[0], IDS[1], IDS[3]];
        turns.choose(ids.into_iter());
        assert_eq!(turns.group, [IDS[0], IDS[3]]);
        turns.choose(ids[..2].iter().copied());
        assert_eq!(turns.group, IDS[..2]);
    }
}
