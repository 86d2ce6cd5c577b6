//! A load in simulated time: the server's schedule over passes with measured times.
//!
//! As in the server, prompts are computed in pieces next to decoding texts; an interactive request
//! stops the running pass before the next layer; a preempted text keeps its rows and resumes at
//! that layer.

use std::collections::VecDeque;
use std::time::Duration;

use emberflow_engine::spans::{Turns, Wants};

use super::load::{ANSWER, Arrival, PARALLEL, PROMPT, Served};
use super::passes::Passes;
use emberflow::serve::schedule::{Running, Schedule, Scheduling, Waiting};

/// Rows of a text that was stopped between two layers.
#[derive(Clone, Copy)]
struct Parked {
    rows: usize,
    layers: u32,
}

struct Text {
    id: usize,
    arrival: Arrival,
    began: Duration,
    /// Computed rows of its prompt.
    done: usize,
    tokens: usize,
    aside: bool,
    parked: Option<Parked>,
}

/// Rows of a pass that belong to one text.
struct Part {
    id: usize,
    rows: usize,
}

/// A pass in progress.
struct Pass {
    parts: Vec<Part>,
    /// Number of completed layers.
    layers: u32,
    whole: bool,
}

struct World<'a> {
    passes: &'a Passes,
    scheduling: Scheduling,
    schedule: Schedule,
    now: Duration,
    /// Future arrivals.
    coming: &'a [Arrival],
    waiting: VecDeque<Arrival>,
    live: Vec<Text>,
    pass: Option<Pass>,
    turns: Turns<usize>,
    began: usize,
    served: Vec<Served>,
}

/// Serves `arrivals`, given in order of arrival.
pub fn simulate(arrivals: &[Arrival], scheduling: Scheduling, passes: &Passes) -> Vec<Served> {
    let mut world = World {
        passes,
        scheduling,
        schedule: Schedule::new(scheduling, PARALLEL),
        now: Duration::ZERO,
        coming: arrivals,
        waiting: VecDeque::new(),
        live: Vec::new(),
        pass: None,
        turns: Turns::new(),
        began: 0,
        served: Vec::new(),
    };
    loop {
        if world.live.is_empty() && world.waiting.is_empty() {
            match world.coming.first() {
                Some(next) => world.now = world.now.max(next.at),
                None => return world.served,
            }
        }
        world.arrive();
        world.admit();
        world.balance();
        world.step();
    }
}

impl World<'_> {
    fn arrive(&mut self) {
        let here = self.coming.partition_point(|one| one.at <= self.now);
        let (here, coming) = self.coming.split_at(here);
        self.waiting.extend(here);
        self.coming = coming;
    }

    fn running(&self) -> Vec<Running> {
        let seen = |text: &Text| Running {
            proactive: text.arrival.proactive,
            arrived: text.arrival.at,
            prompt: PROMPT,
            tokens: text.tokens,
        };
        self.live.iter().map(seen).collect()
    }

    fn admit(&mut self) {
        loop {
            let waiting = self.waiting.iter().map(|one| Waiting {
                proactive: one.proactive,
                texts: 1,
                prompt: PROMPT,
                arrived: one.at,
            });
            let next = self.schedule.next(self.now, waiting, &self.running());
            let Some(arrival) = next.and_then(|at| self.waiting.remove(at)) else {
                return;
            };
            self.live.push(Text {
                id: self.began,
                arrival,
                began: self.now,
                done: 0,
                tokens: 0,
                aside: false,
                parked: None,
            });
            self.began += 1;
        }
    }

    fn balance(&mut self) {
        let aside = self.schedule.aside(self.now, &self.running());
        for (text, aside) in self.live.iter_mut().zip(aside) {
            if aside
                && !text.aside
                && let Some(pass) = &mut self.pass
                && let Some(at) = pass.parts.iter().position(|part| part.id == text.id)
            {
                let rows = pass.parts.remove(at).rows;
                let layers = pass.layers;
                text.parked = Some(Parked { rows, layers });
            }
            text.aside = aside;
        }
        let pass = self.pass.take();
        self.pass = pass.filter(|pass| !pass.parts.is_empty());
    }

    /// Resumes rows that stopped at the same layer as the first ones.
    fn unpark(&mut self) -> Option<Pass> {
        let mut live = self.live.iter().filter(|text| !text.aside);
        let layers = live.find_map(|text| text.parked)?.layers;
        let mut parts = Vec::new();
        for text in self.live.iter_mut().filter(|text| !text.aside) {
            if let Some(parked) = text.parked.take_if(|parked| parked.layers == layers) {
                parts.push(Part {
                    id: text.id,
                    rows: parked.rows,
                });
            }
        }
        Some(Pass {
            parts,
            layers,
            whole: false,
        })
    }

    fn choose(&mut self) -> Option<Pass> {
        let wants = |text: &Text| match text.tokens {
            _ if text.aside => Wants::Nothing,
            0 => Wants::Prompt(PROMPT - text.done),
            _ => Wants::Decode,
        };
        let wants: Vec<_> = self
            .live
            .iter()
            .map(|text| (text.id, wants(text)))
            .collect();
        let rows = self.turns.divide(&wants, self.passes.size());
        let parts = self.live.iter().zip(rows).filter(|(_, rows)| *rows > 0);
        let parts = parts.map(|(text, rows)| Part { id: text.id, rows });
        let pass = Pass {
            parts: parts.collect(),
            layers: 0,
            whole: true,
        };
        (!pass.parts.is_empty()).then_some(pass)
    }

    fn text(&mut self, id: usize) -> Option<&mut Text> {
        self.live.iter_mut().find(|text| text.id == id)
    }

    fn step(&mut self) {
        let unfinished = self.pass.take().or_else(|| self.unpark());
        let Some(mut pass) = unfinished.or_else(|| self.choose()) else {
            return;
        };
        let (mut texts, mut rows) = (0, 0);
        for part in &pass.parts {
            if self.text(part.id).is_some_and(|text| text.tokens > 0) {
                texts += 1
            } else {
                rows += part.rows
            }
        }
        let time = self.passes.time(texts, rows);
        let layer = time / self.passes.layers;
        let left = self.passes.layers - pass.layers;
        let interrupts = |one: &&Arrival| Schedule::interrupts(self.scheduling, one.proactive);
        if let Some(next) = self.coming.iter().find(interrupts) {
            let until = next.at.saturating_sub(self.now).as_secs_f64();
            let border = (until / layer.as_secs_f64()).ceil().max(1.0);
            if border < f64::from(left) {
                self.now += layer.mul_f64(border);
                pass.layers += border as u32;
                pass.whole = false;
                self.pass = Some(pass);
                return;
            }
        }
        self.now += layer * left;
        if pass.whole && rows == 0 {
            self.schedule.decoded(self.now, texts, texts, time);
        }
        for part in pass.parts {
            self.advance(&part);
        }
    }

    /// Counts rows that have passed all layers.
    fn advance(&mut self, part: &Part) {
        let now = self.now;
        let Some(text) = self.text(part.id) else {
            return;
        };
        match text.tokens {
            0 => {
                text.done += part.rows;
                text.tokens = usize::from(text.done == PROMPT);
            }
            _ => text.tokens += 1,
        }
        if text.tokens == ANSWER {
            let served = Served {
                proactive: text.arrival.proactive,
                arrived: text.arrival.at,
                began: text.began,
                ended: now,
            };
            self.served.push(served);
            self.live.retain(|text| text.id != part.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine on which a decoding pass takes 1 ms, as does each prompt row.
    fn passes() -> Passes {
        let prompt = |beside: usize| {
            let rows = [32, 64, 96, 128];
            let times = rows.map(|rows| 1e-3 * (rows + beside.min(1)) as f64);
            times.to_vec()
        };
        Passes {
            decoding: vec![1e-3; PARALLEL],
            prompts: [0, 1, 3, PARALLEL - 1].map(prompt).to_vec(),
            chunk: PROMPT + PARALLEL,
            layers: 4,
        }
    }

    fn arrival(at: u64, proactive: bool) -> Arrival {
        Arrival {
            at: Duration::from_millis(at),
            proactive,
            number: 0,
        }
    }

    fn ends(served: &[Served], proactive: bool) -> Vec<u64> {
        let of = served.iter().filter(|one| one.proactive == proactive);
        of.map(|one| (one.ended.as_secs_f64() * 1e3).round() as u64)
            .collect()
    }

    #[test]
    fn one_request_takes_its_prompt_and_its_tokens() {
        for scheduling in [Scheduling::FirstCome, Scheduling::Classes] {
            let served = simulate(&[arrival(5, false)], scheduling, &passes());
            assert_eq!(ends(&served, false), [5 + 128 + 31]);
        }
    }

    #[test]
    fn who_came_first_is_served_alone() {
        let both = [arrival(0, true), arrival(1, false)];
        let served = simulate(&both, Scheduling::FirstCome, &passes());
        assert_eq!(ends(&served, true), [159]);
        assert_eq!(ends(&served, false), [318]);
        assert_eq!(served[1].began.as_millis(), 159);
    }

    #[test]
    fn an_interactive_request_waits_for_a_layer_and_nothing_is_computed_twice() {
        // The prompt's pass of 128 ms has four layers of 32 ms.
        let both = [arrival(0, true), arrival(40, false)];
        let served = simulate(&both, Scheduling::Classes, &passes());
        let reactive = served.iter().find(|one| !one.proactive).unwrap();
        assert_eq!(reactive.began.as_millis(), 64);
        assert_eq!(reactive.ended.as_millis(), 64 + 159);
        // Then the other two layers, and its tokens.
        assert_eq!(ends(&served, true), [64 + 159 + 64 + 31]);
    }

    #[test]
    fn background_work_ends_whatever_comes() {
        let all: Vec<Arrival> = (0..400).map(|at| arrival(20 * at, at % 3 > 0)).collect();
        for scheduling in [Scheduling::FirstCome, Scheduling::Classes] {
            let served = simulate(&all, scheduling, &passes());
            assert_eq!(served.len(), all.len());
            assert!(served.iter().all(|one| one.ended > one.arrived));
        }
    }
}
