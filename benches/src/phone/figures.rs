//! Published figures and simulated ones.

use serde::Serialize;

use crate::report::csv::Csv;

/// The papers' values: `curves/published.csv`. A range has a lower and an upper end.
const PUBLISHED: &str = include_str!("curves/published.csv");

/// Maximum deviation of a simulated figure from the published one to count as equal.
pub const WITHIN: f64 = 0.25;

/// A simulated value of a published figure.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FigureValue {
    /// Its key in the table.
    pub key: &'static str,
    /// In the table's unit.
    pub value: f64,
}

/// A simulated value.
pub fn simulated(key: &'static str, value: f64) -> FigureValue {
    FigureValue { key, value }
}

/// A figure of a paper, and the simulated one. JSON keys are a contract.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Figure {
    /// Its key.
    pub key: String,
    /// The paper.
    pub paper: String,
    /// Section, figure or table.
    pub place: String,
    /// Description.
    pub what: String,
    /// Its unit.
    pub unit: String,
    /// By simulation.
    pub simulated: f64,
    /// Lower and upper end.
    pub published: [f64; 2],
    /// Simulated over the nearest published value; 1 inside the range.
    pub ratio: f64,
    /// Whether the ratio is within [`WITHIN`] of 1.
    pub within: bool,
    /// Published curve on which the simulation is based.
    pub rests_on: String,
    /// Why it differs by more; empty if it does not.
    pub differs: String,
}

/// All figures of the table, in its order; those without a simulated value are omitted.
pub fn figures(values: &[FigureValue]) -> Vec<Figure> {
    let table = Csv::parse(PUBLISHED);
    let mut out = Vec::new();
    for row in table.rows() {
        let key = row.text("key");
        let Some(simulated) = values.iter().find(|value| value.key == key) else {
            continue;
        };
        let published = [row.or_zero("low"), row.or_zero("high")];
        let nearest = simulated.value.clamp(published[0], published[1]);
        let ratio = simulated.value / nearest;
        let text = |column: &str| row.text(column).to_owned();
        out.push(Figure {
            key: text("key"),
            paper: text("paper"),
            place: text("where"),
            what: text("what"),
            unit: text("unit"),
            simulated: simulated.value,
            published,
            ratio,
            within: (1.0 - WITHIN..=1.0 + WITHIN).contains(&ratio),
            rests_on: text("rests_on"),
            differs: text("differs"),
        });
    }
    out
}

/// The number of figures in the table.
#[cfg(test)]
pub fn published() -> usize {
    Csv::parse(PUBLISHED).rows().count()
}
