//! Timelines: one lane per thread or device.

use std::fmt::Write as _;

use super::{
    Anchor, GAP, Ink, LINE, Position, SMALL, TEXT, canvas, escape, round_ticks, width_of,
    write_text,
};

/// A lane of a timeline.
pub struct Row {
    /// Name of the lane.
    pub name: String,
    /// Note below the name.
    pub note: String,
    /// Bars in drawing order.
    pub bars: Vec<Bar>,
}

/// A time span.
pub struct Bar {
    /// Start and end in milliseconds.
    pub from: f64,
    /// See `from`.
    pub to: f64,
    /// Index of its kind.
    pub kind: usize,
    /// Tooltip.
    pub title: String,
}

const LANE: f64 = 46.0;
const TIME: f64 = 1400.0;
const UNIT: &str = " ms";
/// Approximate number of ticks.
const TICKS: f64 = 10.0;
const HEADLINE: f64 = 16.0;

/// Draws lanes over `ms` milliseconds; `kinds` are names and colours.
pub fn timeline(title: &str, ms: f64, kinds: &[(&str, &str)], rows: &[Row]) -> String {
    let names = rows
        .iter()
        .map(|row| width_of(&row.name, TEXT).max(width_of(&row.note, SMALL)));
    let left = names.fold(0.0, f64::max) + 3.0 * GAP;
    let top = GAP + HEADLINE * LINE + GAP;
    let bottom = top + LANE * rows.len() as f64;
    let to_x = |at: f64| left + at / ms.max(1e-9) * TIME;
    let ticks = round_ticks(ms, TICKS);
    // Half of the last tick label may extend to the right of the lanes.
    let last = ticks.last().map_or(0.0, |t| width_of(&t.1, TEXT));
    let right = left + TIME + (last + width_of(UNIT, TEXT)) / 2.0;

    let mut body = String::new();
    let ends = legend(
        &mut body,
        Position::new(left, bottom + 3.0 * TEXT),
        right,
        kinds,
    );
    let width = right.max(width_of(title, HEADLINE) + GAP) + GAP;
    let mut out = canvas(width, ends + GAP);
    write_text(
        &mut out,
        Position::new(GAP, GAP + HEADLINE),
        Anchor::Start,
        Ink::black(HEADLINE),
        title,
    );
    for (at, text) in ticks {
        let x = to_x(at);
        // Writing to a String cannot fail.
        let _ = writeln!(
            out,
            "<path d=\"M{x:.1} {top:.1}V{bottom:.1}\" stroke=\"#ddd\"/>"
        );
        let place = Position::new(x, bottom + TEXT + GAP / 2.0);
        let text = format!("{text}{UNIT}");
        write_text(&mut out, place, Anchor::Middle, Ink::black(TEXT), &text);
    }
    for (i, row) in rows.iter().enumerate() {
        row.draw(&mut out, top + LANE * i as f64, to_x, kinds);
    }
    out += &body;
    out.push_str("</svg>\n");
    out
}

impl Row {
    /// Draws the lane with its upper edge at `y`.
    fn draw(&self, out: &mut String, y: f64, to_x: impl Fn(f64) -> f64, kinds: &[(&str, &str)]) {
        for (below, ink, text) in [
            (18.0, Ink::black(TEXT), &self.name),
            (33.0, Ink::grey(SMALL), &self.note),
        ] {
            write_text(out, Position::new(GAP, y + below), Anchor::Start, ink, text);
        }
        for bar in &self.bars {
            let (x, width) = (to_x(bar.from), to_x(bar.to) - to_x(bar.from));
            let (_, fill) = kinds.get(bar.kind).copied().unwrap_or(("", "#ccc"));
            let _ = writeln!(
                out,
                "<rect x=\"{x:.2}\" y=\"{:.1}\" width=\"{:.2}\" height=\"{:.1}\" fill=\"{fill}\" \
                 fill-opacity=\"0.8\" stroke=\"white\" stroke-width=\"0.2\"><title>{}, {:.3} ms</title></rect>",
                y + 4.0,
                width.max(0.05),
                LANE - 8.0,
                escape(&bar.title),
                bar.to - bar.from
            );
        }
    }
}

/// Draws a legend in as many rows as needed; returns its lower edge.
fn legend(out: &mut String, from: Position, right: f64, kinds: &[(&str, &str)]) -> f64 {
    let Position { x: left, y: top } = from;
    out.push_str("<g class=\"legend\">\n");
    let (mut x, mut y) = (left, top);
    for (name, fill) in kinds {
        let width = TEXT + GAP / 2.0 + width_of(name, TEXT) + 2.0 * GAP;
        if x + width > right && x > left {
            (x, y) = (left, y + TEXT * LINE);
        }
        let _ = writeln!(
            out,
            "<rect x=\"{x:.1}\" y=\"{:.1}\" width=\"{TEXT}\" height=\"{TEXT}\" fill=\"{fill}\"/>",
            y - TEXT + 2.0
        );
        let place = Position::new(x + TEXT + GAP / 2.0, y);
        write_text(out, place, Anchor::Start, Ink::black(TEXT), name);
        x += width;
    }
    out.push_str("</g>\n");
    y + GAP
}
