//! Scheduling decisions. No engine, clock or channel, so that the same code serves requests and simulated loads
//! (`emberflow-lab serve --simulate`).
//!
//! Interactive (*reactive*) requests run first, the shortest prompt before longer ones, and a quarter of the sequences is
//! reserved for them. Long prompts leave one of them to short ones. Background (*proactive*) requests use what is left
//! (Agent.xpu §4.5, Algorithm 2):
//!
//! - No reactive request running: as many proactive ones as have the highest throughput (`Costs`), in order of
//!   arrival.
//! - A reactive prompt in prefill: none; they are preempted between two layers.
//! - Reactive requests decoding: proactive ones that decode too, up to `BATCH_CAP` requests in total and as long as
//!   they slow the reactive ones down little; the longest ones are preempted.
//! - A proactive request older than `OVERDUE` runs despite the cap.

use std::time::Duration;

use super::costs::Costs;

/// Scheduling policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheduling {
    /// Two classes, many sequences at once.
    Classes,
    /// First come, first served, one request at a time: the laboratory's baseline.
    FirstCome,
}

impl Scheduling {
    /// Name in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Classes => "classes",
            Self::FirstCome => "fcfs",
        }
    }
}

/// Maximum requests per pass while a reactive one decodes (Agent.xpu, B_cap).
const BATCH_CAP: usize = 3;
/// Age at which a proactive request runs alongside decoding reactive ones, whatever it costs; one at a time.
const OVERDUE: Duration = Duration::from_secs(60);

/// A waiting request. Times are relative to the start of the server.
#[derive(Debug, Clone, Copy)]
pub struct Waiting {
    /// Background request.
    pub proactive: bool,
    /// Number of texts.
    pub texts: usize,
    /// Prompt tokens.
    pub prompt: usize,
    /// Arrival time.
    pub arrived: Duration,
}

/// A running or preempted text.
#[derive(Debug, Clone, Copy)]
pub struct Running {
    /// Background request.
    pub proactive: bool,
    /// Arrival time of its request.
    pub arrived: Duration,
    /// Prompt tokens.
    pub prompt: usize,
    /// Generated tokens; 0 during prefill.
    pub tokens: usize,
}

impl Running {
    fn overdue(&self, now: Duration) -> bool {
        self.proactive && overdue(self.arrived, now)
    }
}

fn overdue(arrived: Duration, now: Duration) -> bool {
    now.saturating_sub(arrived) >= OVERDUE
}

/// Reactive requests that may start before an older one because their prompts are shorter. This decides who has a sequence;
/// among those that have one, the engine's `Turns` divide the rows of each pass. Neither can do the other's part: a request
/// that waits here has no rows, and a sequence is not taken back in the middle of an answer.
const PASSED_OVER: usize = 4;
/// Tokens of a short prompt, at most.
const SHORT: usize = 512;
/// Sequences from which on long prompts leave one to short ones.
const LEAVES_ONE: usize = 4;

/// The scheduler.
#[derive(Debug)]
pub struct Schedule {
    scheduling: Scheduling,
    /// Arrival of the oldest waiting reactive request, and how many others have started before it.
    oldest: Duration,
    passed_over: usize,
    /// Maximum concurrent texts.
    most: usize,
    costs: Costs,
}

impl Schedule {
    /// A scheduler for at most `most` concurrent texts.
    pub fn new(scheduling: Scheduling, most: usize) -> Self {
        Self {
            scheduling,
            oldest: Duration::ZERO,
            passed_over: 0,
            most,
            costs: Costs::new(),
        }
    }

    /// Whether a new request interrupts the running pass.
    pub fn interrupts(scheduling: Scheduling, proactive: bool) -> bool {
        scheduling == Scheduling::Classes && !proactive
    }

    /// Index of the next request in `waiting` to start; `waiting` is in order of arrival. Reactive requests first: the
    /// shortest prompt for which there is room, or the oldest one that `PASSED_OVER` others have overtaken. Proactive ones
    /// in order of arrival.
    pub fn next(
        &mut self,
        now: Duration,
        waiting: impl Iterator<Item = Waiting> + Clone,
        running: &[Running],
    ) -> Option<usize> {
        let first = waiting.clone().next()?;
        if self.scheduling == Scheduling::FirstCome {
            return running.is_empty().then_some(0);
        }
        if waiting.clone().any(|one| !one.proactive) {
            return self.reactive(waiting, running);
        }
        let reserved = (self.most.saturating_sub(first.texts)).min(self.most.div_ceil(4));
        let fits = running.len() + first.texts + reserved <= self.most;
        (fits && self.has_slack_for(now, &first, running)).then_some(0)
    }

    /// Index of the next reactive request.
    fn reactive(
        &mut self,
        waiting: impl Iterator<Item = Waiting>,
        running: &[Running],
    ) -> Option<usize> {
        let reactive = waiting.enumerate().filter(|(_, one)| !one.proactive);
        let mut reactive = reactive.peekable();
        let &(at, oldest) = reactive.peek()?;
        if oldest.arrived != self.oldest {
            (self.oldest, self.passed_over) = (oldest.arrived, 0);
        }
        if self.passed_over >= PASSED_OVER {
            // It waits for sequences, which nobody else takes, or for other long prompts, beside which short ones start.
            if self.may_start(&oldest, running) {
                return Some(at);
            }
            if running.len() + oldest.texts > self.most {
                return None;
            }
        }
        let fitting = reactive.filter(|(_, one)| self.may_start(one, running));
        let (at, one) = fitting.min_by_key(|(_, one)| one.prompt)?;
        self.passed_over += usize::from(one.arrived > self.oldest);
        Some(at)
    }

    /// Whether there is room for a reactive request.
    fn may_start(&self, one: &Waiting, running: &[Running]) -> bool {
        let long = |prompt: usize| prompt > SHORT && self.most >= LEAVES_ONE;
        let beside = running.iter().filter(|text| !text.proactive);
        let beside = beside.filter(|text| long(text.prompt)).count();
        let most_long = (self.most - 1).max(one.texts);
        let leaves_one = !long(one.prompt) || beside + one.texts <= most_long;
        running.len() + one.texts <= self.most && leaves_one
    }

    /// Whether a proactive request may start now.
    fn has_slack_for(&self, now: Duration, one: &Waiting, running: &[Running]) -> bool {
        if running.iter().any(|text| !text.proactive) {
            overdue(one.arrived, now) && !running.iter().any(|text| text.overdue(now))
        } else {
            running.len() < self.costs.best_batch(now)
        }
    }

    /// Which texts to preempt: proactive ones beyond the current limit.
    pub fn aside(&self, now: Duration, running: &[Running]) -> Vec<bool> {
        let mut aside = vec![false; running.len()];
        if self.scheduling == Scheduling::FirstCome {
            return aside;
        }
        let reactive = running.iter().filter(|text| !text.proactive);
        let count = reactive.clone().count();
        let prefill = reactive.clone().any(|text| text.tokens == 0);
        let mut order: Vec<usize> = (0..running.len()).collect();
        order.retain(|&at| running[at].proactive);
        let room = match count {
            // In order of arrival.
            0 => self.costs.best_batch(now),
            _ if prefill => 0,
            _ => {
                // An overdue one first, then the shortest ones that decode.
                let decodes = |at: usize| running[at].tokens > 0 || running[at].overdue(now);
                let able = order.iter().filter(|&&at| decodes(at)).count();
                order.sort_by_key(|&at| {
                    let one = &running[at];
                    (!decodes(at), !one.overdue(now), one.prompt + one.tokens)
                });
                let first = order.first();
                let overdue = usize::from(first.is_some_and(|&at| running[at].overdue(now)));
                let most = BATCH_CAP.saturating_sub(count);
                let slack = self.costs.background_limit(now, count, most);
                slack.max(overdue).min(able)
            }
        };
        for (place, at) in order.into_iter().enumerate() {
            aside[at] = place >= room;
        }
        aside
    }

    /// Records a decode-only pass of `texts` texts that generated `tokens` tokens.
    pub fn decoded(&mut self, now: Duration, texts: usize, tokens: usize, time: Duration) {
        self.costs.add(now, texts, tokens, time);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(10);

    fn running(proactive: bool, prompt: usize, tokens: usize) -> Running {
        Running {
            proactive,
            arrived: NOW,
            prompt,
            tokens,
        }
    }

    fn waiting(proactive: bool) -> Waiting {
        Waiting {
            proactive,
            texts: 1,
            prompt: 9,
            arrived: NOW,
        }
    }

    /// A scheduler for which eight texts take as long as one.
    fn free() -> Schedule {
        let mut schedule = Schedule::new(Scheduling::Classes, 8);
        for texts in 1..=8 {
            for _ in 0..10 {
                schedule.decoded(NOW, texts, texts, Duration::from_millis(10));
            }
        }
        schedule
    }

    #[test]
    fn reactive_requests_begin_first() {
        let mut schedule = free();
        let mut next = |waiting: &[Waiting], running: &[Running]| {
            schedule.next(NOW, waiting.iter().copied(), running)
        };
        let both = [waiting(true), waiting(true), waiting(false)];
        assert_eq!(next(&both, &[]), Some(2));
        assert_eq!(next(&both[..2], &[]), Some(0));
        assert_eq!(next(&both[..2], &[running(false, 9, 3)]), None, "no slack");
        assert_eq!(next(&[], &[]), None);
        // A quarter of the sequences is reserved for reactive requests.
        let busy = [running(true, 9, 3); 6];
        assert_eq!(next(&both[..2], &busy), None);
        assert_eq!(next(&both, &busy), Some(2));
        assert_eq!(next(&both, &[running(true, 9, 3); 8]), None);
    }

    #[test]
    fn one_that_is_overdue_begins_beside_reactive_ones() {
        let mut schedule = free();
        let later = NOW + OVERDUE;
        let both = [waiting(true), waiting(true)];
        let mut next = |running: &[Running]| schedule.next(later, both.into_iter(), running);
        assert_eq!(next(&[running(false, 9, 3)]), Some(0));
        let one = [running(false, 9, 3), running(true, 9, 0)];
        assert_eq!(next(&one), None, "one at a time");
    }

    #[test]
    fn the_longest_ones_are_set_aside() {
        let schedule = free();
        let texts = [
            running(true, 100, 5),
            running(true, 50, 5),
            running(true, 70, 5),
            running(true, 10, 0),
        ];
        let with = |reactive: &[Running]| schedule.aside(NOW, &[&texts[..], reactive].concat());
        assert_eq!(with(&[]), [false; 4], "nobody is in a hurry");
        let decodes = running(false, 9, 3);
        assert_eq!(with(&[decodes]), [true, false, false, true, false]);
        let two = [decodes, decodes];
        assert_eq!(with(&two), [true, false, true, true, false, false]);
        let prompt = running(false, 9, 0);
        assert_eq!(with(&[decodes, prompt])[..4], [true; 4]);
        // An overdue request runs despite the cap, even in prefill.
        let mut old = texts;
        old[3].arrived = Duration::ZERO;
        let three = [&old[..], &[decodes; 3]].concat();
        let aside = schedule.aside(OVERDUE, &three);
        assert_eq!(aside[..4], [true, true, true, false]);
    }

    #[test]
    fn the_shortest_prompt_begins_first_until_it_has_passed_over_others() {
        let mut schedule = free();
        let at = |seconds: u64, prompt| Waiting {
            prompt,
            arrived: Duration::from_secs(seconds),
            ..waiting(false)
        };
        let mut queue = vec![at(1, 1000), at(2, 500), at(3, 10), waiting(true)];
        let mut begun = Vec::new();
        for arrival in 4..9 {
            let next = schedule.next(NOW, queue.iter().copied(), &[]).unwrap();
            begun.push(queue.remove(next).prompt);
            queue.insert(queue.len() - 1, at(arrival, 20));
        }
        assert_eq!(begun, [10, 20, 20, 20, 1000]);
        let next = schedule.next(NOW, queue.iter().copied(), &[]).unwrap();
        assert_eq!(queue[next].prompt, 20, "the next oldest one waits as long");
        assert_eq!(
            schedule.next(NOW, queue.into_iter(), &[running(false, 9, 3); 8]),
            None
        );
    }

    #[test]
    fn long_prompts_leave_a_sequence_to_short_ones() {
        let mut schedule = Schedule::new(Scheduling::Classes, 4);
        let long = Waiting {
            prompt: SHORT + 1,
            ..waiting(false)
        };
        let short = Waiting {
            prompt: SHORT,
            ..long
        };
        let runs = |long: usize| vec![running(false, SHORT + 1, 3); long];
        let mut next = |queue: &[Waiting], running: &[Running]| {
            schedule.next(NOW, queue.iter().copied(), running)
        };
        assert_eq!(next(&[long], &runs(2)), Some(0));
        assert_eq!(next(&[long], &runs(3)), None);
        assert_eq!(next(&[long, short], &runs(3)), Some(1));
        // Short ones fill all.
        let three_short = [running(false, SHORT, 3); 3];
        assert_eq!(next(&[short], &three_short), Some(0));
        assert_eq!(next(&[long], &three_short), Some(0));
        let all = Waiting { texts: 4, ..long };
        assert_eq!(next(&[all], &[]), Some(0), "texts of one request");
        let mut few = Schedule::new(Scheduling::Classes, LEAVES_ONE - 1);
        let queue = [long].into_iter();
        assert_eq!(few.next(NOW, queue, &runs(LEAVES_ONE - 2)), Some(0));
    }

    /// The sequence of the short ones stays theirs if a long one has been overtaken often.
    #[test]
    fn a_long_prompt_that_waits_for_long_ones_holds_up_no_short_one() {
        let mut schedule = Schedule::new(Scheduling::Classes, 4);
        let at = |seconds: u64, prompt| Waiting {
            prompt,
            arrived: Duration::from_secs(seconds),
            ..waiting(false)
        };
        let long = running(false, 1000, 3);
        for arrival in 2..9 {
            let queue = [at(1, 1000), at(arrival, 10)];
            assert_eq!(schedule.next(NOW, queue.into_iter(), &[long; 3]), Some(1));
        }
        let queue = [at(1, 1000), at(9, 10)];
        let short = running(false, 10, 3);
        assert_eq!(
            schedule.next(NOW, queue.into_iter(), &[long, long, short]),
            Some(0),
            "the next sequence is its own"
        );
    }

    #[test]
    fn a_request_with_many_texts_lets_others_pass_until_it_is_due() {
        let mut schedule = Schedule::new(Scheduling::Classes, 4);
        let at = |seconds: u64, texts, prompt| Waiting {
            texts,
            prompt,
            arrived: Duration::from_secs(seconds),
            ..waiting(false)
        };
        let busy = [running(false, 9, 3); 2];
        let mut begun = Vec::new();
        for arrival in 2..8 {
            let queue = [at(1, 4, 5), at(arrival, 1, 20)];
            begun.push(schedule.next(NOW, queue.into_iter(), &busy));
        }
        let passes = Some(1);
        assert_eq!(begun, [passes, passes, passes, passes, None, None]);
        let queue = [at(1, 4, 5), at(9, 1, 20)];
        assert_eq!(schedule.next(NOW, queue.into_iter(), &[]), Some(0));
    }

    #[test]
    fn who_came_first_runs_alone() {
        let mut schedule = Schedule::new(Scheduling::FirstCome, 8);
        let both = [waiting(true), waiting(false)];
        assert_eq!(schedule.next(NOW, both.into_iter(), &[]), Some(0));
        let busy = [running(true, 9, 3)];
        assert_eq!(schedule.next(NOW, both.into_iter(), &busy), None);
        assert_eq!(schedule.aside(NOW, &busy), [false]);
    }
}
