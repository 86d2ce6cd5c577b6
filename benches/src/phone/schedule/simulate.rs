//! Discrete-event simulation of work on processors that share one memory.
//!
//! ```text
//! rate of a running piece = min(1, bandwidth of the memory / sum of what the running pieces draw alone)
//! ```
//!
//! A processor runs one piece at a time and is not preempted. Whenever a piece ends, an [`Scheduler`] decides what
//! each idle processor begins; time then passes until the next piece ends.

use super::graph::{Execution, Operation, Scheduler};

/// Processors that share one memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Processors {
    /// Names, in the order of lanes.
    pub names: &'static [&'static str],
    /// Maximum GB/s of all of them together.
    pub bandwidth: f64,
}

/// When a piece ran.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Slot {
    /// Index of the piece.
    pub work: usize,
    /// Seconds.
    pub start: f64,
    /// Seconds.
    pub end: f64,
}

/// A running piece.
struct Running {
    slot: Slot,
    /// Remaining seconds at full rate.
    left: f64,
}

/// Runs the pieces in simulated time. Pieces that the order never begins are missing from the result, which is
/// sorted by their ends.
pub fn simulate(
    graph: &[Operation],
    processors: &Processors,
    scheduler: &mut dyn Scheduler,
) -> Vec<Slot> {
    let mut execution = Execution::new(graph, scheduler);
    let mut running: Vec<Option<Running>> = processors.names.iter().map(|_| None).collect();
    let (mut now, mut out) = (0.0, Vec::with_capacity(graph.len()));
    loop {
        // One operation may have to begin before another processor may begin the next.
        let mut changed = true;
        while changed {
            changed = false;
            for (processor, running) in running.iter_mut().enumerate() {
                if running.is_some() {
                    continue;
                }
                if let Some(work) = execution.begin(processor) {
                    *running = Some(Running {
                        slot: Slot {
                            work,
                            start: now,
                            end: now,
                        },
                        left: graph[work].seconds,
                    });
                    changed = true;
                }
            }
        }
        if running.iter().all(Option::is_none) {
            return out;
        }
        now += advance(graph, processors.bandwidth, &mut running);
        for place in &mut running {
            if let Some(done) = place.take_if(|running| running.left <= 0.0) {
                execution.end(done.slot.work);
                out.push(Slot {
                    end: now,
                    ..done.slot
                });
            }
        }
    }
}

/// Advances time until the first running piece ends; returns the seconds.
fn advance(graph: &[Operation], bandwidth: f64, running: &mut [Option<Running>]) -> f64 {
    let draws = |of: &Running| graph[of.slot.work].draws;
    let drawn: f64 = running.iter().flatten().map(draws).sum();
    let shared = if drawn > bandwidth {
        bandwidth / drawn
    } else {
        1.0
    };
    let rate = |of: &Running| if draws(of) > 0.0 { shared } else { 1.0 };
    let ends = running.iter().flatten().map(|of| of.left / rate(of));
    let passed = ends.fold(f64::INFINITY, f64::min);
    for of in running.iter_mut().flatten() {
        let rate = rate(of);
        // the first to end has exactly nothing left
        of.left = if of.left / rate <= passed {
            0.0
        } else {
            of.left - passed * rate
        };
    }
    passed
}

/// The end of the last piece.
pub fn makespan(slots: &[Slot]) -> f64 {
    slots.iter().fold(0.0, |end, slot| slot.end.max(end))
}

/// Seconds in which `processor` is busy.
pub fn busy(graph: &[Operation], slots: &[Slot], processor: usize) -> f64 {
    let mine = slots.iter().filter(|slot| graph[slot.work].on == processor);
    mine.map(|slot| slot.end - slot.start).sum()
}

#[cfg(test)]
mod tests {
    use super::super::InOrder;
    use super::*;

    const PHONE: Processors = Processors {
        names: &["a", "b"],
        bandwidth: 60.0,
    };

    fn work(on: usize, seconds: f64, draws: f64, after: &[usize]) -> Operation {
        Operation {
            kind: "work",
            on,
            seconds,
            draws,
            after: after.to_vec(),
        }
    }

    #[test]
    fn pieces_that_share_memory_slow_each_other() {
        // 40 + 40 GB/s share 60: three quarters of the speed until the first ends after 4 s.
        let graph = [work(0, 3.0, 40.0, &[]), work(1, 6.0, 40.0, &[])];
        let slots = simulate(&graph, &PHONE, &mut InOrder::default());
        assert_eq!(slots[0].end, 4.0);
        assert_eq!(slots[1].end, 7.0);
        // Operation without memory traffic does not slow down.
        let graph = [work(0, 3.0, 80.0, &[]), work(1, 6.0, 0.0, &[])];
        let slots = simulate(&graph, &PHONE, &mut InOrder::default());
        assert_eq!((slots[0].end, slots[1].end), (4.0, 6.0));
    }

    #[test]
    fn a_piece_waits_for_those_before_it() {
        let graph = [
            work(0, 1.0, 0.0, &[]),
            work(1, 2.0, 0.0, &[0]),
            work(0, 1.0, 0.0, &[]),
        ];
        let slots = simulate(&graph, &PHONE, &mut InOrder::default());
        assert_eq!(makespan(&slots), 3.0);
        assert_eq!(
            [busy(&graph, &slots, 0), busy(&graph, &slots, 1)],
            [2.0, 2.0]
        );
    }
}
