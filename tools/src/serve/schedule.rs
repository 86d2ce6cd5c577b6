//! Who runs next. Decisions only: no engine, no clock and no channel, so that the same code serves
//! requests and simulated loads (`emberflow-lab serve --simulate`).
//!
//! Interactive (*reactive*) requests go first and keep a quarter of the sequences free for themselves.
//! Background (*proactive*) ones fill the slack (Agent.xpu §4.5, Algorithm 2):
//!
//! - while no reactive request runs: as many together as are faster together (`Costs`), in order of
//!   arrival;
//! - while the prompt of a reactive request is computed: none, they are preempted between two layers;
//! - while reactive requests decode: those that decode too, up to `BATCH_CAP` requests in all and
//!   while they cost the reactive ones little; the longest ones are set aside;
//! - one that has waited for `OVERDUE` joins past the cap.

use std::time::Duration;

use super::costs::Costs;

/// Who goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheduling {
    /// Interactive requests, many texts at once.
    Classes,
    /// Who came first, one request after the other: the laboratory's baseline.
    FirstCome,
}

impl Scheduling {
    /// Its name in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Classes => "classes",
            Self::FirstCome => "fcfs",
        }
    }
}

/// Most requests per pass while a reactive one decodes (Agent.xpu, B_cap).
const BATCH_CAP: usize = 3;
/// A proactive request that is older than this runs beside reactive ones that decode, whatever it
/// costs them; one at a time.
const OVERDUE: Duration = Duration::from_secs(60);

/// A request that waits. Times are since some start.
#[derive(Debug, Clone, Copy)]
pub struct Waiting {
    /// Background work.
    pub proactive: bool,
    /// Its texts.
    pub texts: usize,
    /// When it came.
    pub arrived: Duration,
}

/// A text that runs, or is set aside.
#[derive(Debug, Clone, Copy)]
pub struct Running {
    /// Background work.
    pub proactive: bool,
    /// When its request came.
    pub arrived: Duration,
    /// Tokens of its prompt.
    pub prompt: usize,
    /// Tokens that it has, none while its prompt is computed.
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

/// Decides who runs.
#[derive(Debug)]
pub struct Schedule {
    scheduling: Scheduling,
    /// Most texts at once.
    most: usize,
    costs: Costs,
}

impl Schedule {
    /// For at most `most` texts at once.
    pub fn new(scheduling: Scheduling, most: usize) -> Self {
        Self {
            scheduling,
            most,
            costs: Costs::new(),
        }
    }

    /// Whether a request that comes makes the running pass yield.
    pub fn interrupts(scheduling: Scheduling, proactive: bool) -> bool {
        scheduling == Scheduling::Classes && !proactive
    }

    /// Which of `waiting`, in order of arrival, begins beside `running`: reactive ones first, each class
    /// in order of arrival.
    pub fn next(
        &self,
        now: Duration,
        waiting: impl Iterator<Item = Waiting> + Clone,
        running: &[Running],
    ) -> Option<usize> {
        if self.scheduling == Scheduling::FirstCome {
            let first = waiting.take(1).map(|_| 0).next();
            return first.filter(|_| running.is_empty());
        }
        let reactive = waiting.clone().position(|one| !one.proactive);
        let at = reactive.unwrap_or(0);
        let one = waiting.clone().nth(at)?;
        let kept = match one.proactive {
            true => self
                .most
                .saturating_sub(one.texts)
                .min(self.most.div_ceil(4)),
            false => 0,
        };
        let fits = running.len() + one.texts + kept <= self.most;
        (fits && (!one.proactive || self.has_slack_for(now, &one, running))).then_some(at)
    }

    /// Whether a proactive request can begin now.
    fn has_slack_for(&self, now: Duration, one: &Waiting, running: &[Running]) -> bool {
        match running.iter().any(|text| !text.proactive) {
            true => overdue(one.arrived, now) && !running.iter().any(|text| text.overdue(now)),
            false => running.len() < self.costs.together(now),
        }
    }

    /// Which texts are set aside: proactive ones for which there is no slack.
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
            0 => self.costs.together(now),
            _ if prefill => 0,
            _ => {
                // One that is overdue, then the shortest ones that decode.
                let decodes = |at: usize| running[at].tokens > 0 || running[at].overdue(now);
                let able = order.iter().filter(|&&at| decodes(at)).count();
                order.sort_by_key(|&at| {
                    let one = &running[at];
                    (!decodes(at), !one.overdue(now), one.prompt + one.tokens)
                });
                let first = order.first();
                let overdue = usize::from(first.is_some_and(|&at| running[at].overdue(now)));
                let most = BATCH_CAP.saturating_sub(count);
                let slack = self.costs.beside(now, count, most);
                slack.max(overdue).min(able)
            }
        };
        for (place, at) in order.into_iter().enumerate() {
            aside[at] = place >= room;
        }
        aside
    }

    /// Counts a pass in which all rows decoded: of so many texts, with so many tokens.
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
            arrived: NOW,
        }
    }

    /// A schedule that knows that up to eight texts take as long as one.
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
        let schedule = free();
        let next = |waiting: &[Waiting], running: &[Running]| {
            schedule.next(NOW, waiting.iter().copied(), running)
        };
        let both = [waiting(true), waiting(true), waiting(false)];
        assert_eq!(next(&both, &[]), Some(2));
        assert_eq!(next(&both[..2], &[]), Some(0));
        assert_eq!(next(&both[..2], &[running(false, 9, 3)]), None, "no slack");
        assert_eq!(next(&[], &[]), None);
        // A quarter of the places is kept free for them.
        let busy = [running(true, 9, 3); 6];
        assert_eq!(next(&both[..2], &busy), None);
        assert_eq!(next(&both, &busy), Some(2));
        assert_eq!(next(&both, &[running(true, 9, 3); 8]), None);
    }

    #[test]
    fn one_that_is_overdue_begins_beside_reactive_ones() {
        let schedule = free();
        let later = NOW + OVERDUE;
        let both = [waiting(true), waiting(true)];
        let next = |running: &[Running]| schedule.next(later, both.into_iter(), running);
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
        // One that is overdue joins past the cap, its prompt too.
        let mut old = texts;
        old[3].arrived = Duration::ZERO;
        let three = [&old[..], &[decodes; 3]].concat();
        let aside = schedule.aside(OVERDUE, &three);
        assert_eq!(aside[..4], [true, true, true, false]);
    }

    #[test]
    fn who_came_first_runs_alone() {
        let schedule = Schedule::new(Scheduling::FirstCome, 8);
        let both = [waiting(true), waiting(false)];
        assert_eq!(schedule.next(NOW, both.into_iter(), &[]), Some(0));
        let busy = [running(true, 9, 3)];
        assert_eq!(schedule.next(NOW, both.into_iter(), &busy), None);
        assert_eq!(schedule.aside(NOW, &busy), [false]);
    }
}
