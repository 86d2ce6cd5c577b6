//! Timelines of simulated work.

use super::schedule::{Operation, Processors, Slot, busy, makespan};
use emberflow::chart::{Bar, Row, timeline};

/// The lanes of one simulation.
pub struct Lanes {
    rows: Vec<Row>,
    ms: f64,
}

/// Colours by kind, in drawing order.
const FILLS: [(&str, &str); 9] = [
    ("norm", "#c9a66b"),
    ("qkv", "#6fa8dc"),
    ("attention", "#74b774"),
    ("output", "#8fb3c9"),
    ("ffn", "#f6a04d"),
    ("experts", "#e8c547"),
    ("read", "#4a6fa5"),
    ("join", "#e06666"),
    ("product", "#b59ad6"),
];

impl Lanes {
    /// A lane for each processor of `phone`, named after the simulation.
    pub fn new(name: &str, processors: &Processors, graph: &[Operation], slots: &[Slot]) -> Self {
        let end = makespan(slots);
        let lane = |(on, processor): (usize, &&str)| {
            let mine = slots.iter().filter(|slot| graph[slot.work].on == on);
            let bars = mine.map(|slot| {
                let kind = graph[slot.work].kind;
                Bar {
                    from: 1e3 * slot.start,
                    to: 1e3 * slot.end,
                    kind: FILLS.iter().position(|fill| fill.0 == kind).unwrap_or(0),
                    title: format!("{kind}, {:.2} ms", 1e3 * (slot.end - slot.start)),
                }
            });
            Row {
                name: format!("{name}: {processor}"),
                note: format!(
                    "{:.1} % busy",
                    100.0 * busy(graph, slots, on) / end.max(1e-12)
                ),
                bars: bars.collect(),
            }
        };
        Self {
            rows: processors.names.iter().enumerate().map(lane).collect(),
            ms: 1e3 * end,
        }
    }
}

/// Simulations below each other on one axis.
pub struct Drawn {
    /// Heading.
    pub title: String,
    /// From top to bottom.
    pub parts: Vec<Lanes>,
}

impl Drawn {
    /// As SVG.
    pub fn svg(self) -> String {
        let ms = self.parts.iter().map(|part| part.ms).fold(0.0, f64::max);
        let rows: Vec<Row> = self.parts.into_iter().flat_map(|part| part.rows).collect();
        timeline(&self.title, ms, &FILLS, &rows)
    }
}
