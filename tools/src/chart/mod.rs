//! Charts as SVG: curves, bars, distributions, timelines.
//!
//! One `Frame` draws axes, ticks, names and the legend of every chart but the timeline. Sizes follow
//! the texts: a letter's width is guessed on the wide side (`width_of`), so whatever is written has
//! room, and a legend stands beside the plot, never in it.

mod bars;
mod curves;
mod heat;
mod timeline;

use std::fmt::Write as _;
use std::ops::Range;

pub use bars::{bars, histogram, piles};
pub use curves::{Axes, Curve, Panel, curves, panels};
pub use heat::heat;
pub use timeline::{Bar, Row, timeline};

/// Size of the plot itself.
const PLOT_W: f64 = 560.0;
const PLOT_H: f64 = 300.0;

/// Heights of letters.
const TEXT: f64 = 12.0;
const SMALL: f64 = 10.0;
const LARGE: f64 = 15.0;

/// Free space between things.
const GAP: f64 = 8.0;

/// From one line of a text to the next.
const LINE: f64 = 1.35;

/// Colours that are easily told apart.
const COLOURS: [&str; 14] = [
    "#d9480f", "#1971c2", "#2f9e44", "#9c36b5", "#868e96", "#f59f00", "#0c8599", "#5c940d",
    "#e64980", "#5f3dc4", "#7a4a1d", "#4dabf7", "#f0a6ca", "#212529",
];

/// What a chart says besides its data.
#[derive(Debug, Clone, Copy, Default)]
pub struct Labels<'a> {
    /// Headline.
    pub title: &'a str,
    /// Below it, in small print: where it was measured.
    pub facts: &'a str,
    /// Name of the axis along.
    pub x: &'a str,
    /// Name of the axis up.
    pub y: &'a str,
}

/// How wide a text of letters of some height is, at most: fonts differ, and few are wider.
fn width_of(text: &str, height: f64) -> f64 {
    text.chars().count() as f64 * height * 0.62
}

/// The colour of curve `i`, whatever stands beside it.
fn colour(i: usize) -> String {
    match COLOURS.get(i) {
        Some(colour) => (*colour).to_owned(),
        // steps of the golden angle are never near each other
        None => format!(
            "hsl({:.0},70%,{}%)",
            (137.508 * i as f64) % 360.0,
            [40, 62, 25][i % 3]
        ),
    }
}

/// Round places from 0 to `top`, about `parts` of them, and what is written there.
fn round_ticks(top: f64, parts: f64) -> Vec<(f64, String)> {
    let step = nice(top / parts);
    let digits = (-step.log10().floor()).max(0.0) as usize;
    let count = (top / step + 1e-6).floor() as u32;
    let tick = |i| step * f64::from(i);
    (0..=count)
        .map(|i| (tick(i), format!("{:.digits$}", tick(i))))
        .collect()
}

/// Which way a text extends from its place.
#[derive(Debug, Clone, Copy)]
enum Anchor {
    Start,
    Middle,
    End,
}

/// A point of the picture, from its left and upper edges.
#[derive(Debug, Clone, Copy)]
struct Place {
    x: f64,
    y: f64,
}

impl Place {
    fn new(x: f64, y: f64) -> Self {
        Self { x, y }
    }
}

/// How a text looks.
#[derive(Debug, Clone, Copy)]
struct Ink<'a> {
    height: f64,
    fill: &'a str,
}

impl Ink<'_> {
    fn black(height: f64) -> Self {
        let fill = "black";
        Self { height, fill }
    }

    fn grey(height: f64) -> Self {
        let fill = "#555";
        Self { height, fill }
    }
}

/// Writes a text.
fn write_text(out: &mut String, place: Place, anchor: Anchor, ink: Ink<'_>, text: &str) {
    let (Place { x, y }, Ink { height, fill }) = (place, ink);
    let anchor = match anchor {
        Anchor::Start => "",
        Anchor::Middle => " text-anchor=\"middle\"",
        Anchor::End => " text-anchor=\"end\"",
    };
    // writing to a String cannot fail
    let _ = writeln!(
        out,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"{height}\"{anchor} fill=\"{fill}\">{}</text>",
        escape(text)
    );
}

/// An axis: where it begins and ends, and what is written where.
#[derive(Debug, Clone)]
struct Axis {
    from: f64,
    to: f64,
    ticks: Vec<(f64, String)>,
    /// Whether lines go through the plot at the ticks.
    grid: bool,
}

impl Axis {
    /// From 0 to at least `top`, with round ticks.
    fn up_to(top: f64) -> Self {
        let step = nice(top / 5.0);
        let to = step * (top / step).ceil().max(1.0);
        Self {
            from: 0.0,
            to,
            ticks: round_ticks(to, to / step),
            grid: true,
        }
    }

    /// From 0 to 1.
    fn share() -> Self {
        Self {
            from: 0.0,
            to: 1.0,
            ticks: (0..=5)
                .map(|i| (f64::from(i) / 5.0, format!("{:.1}", f64::from(i) / 5.0)))
                .collect(),
            grid: true,
        }
    }

    /// Where a value lies, from 0 at the beginning to 1 at the end.
    fn place(&self, value: f64) -> f64 {
        (value - self.from) / (self.to - self.from).max(1e-9)
    }

    fn widest(&self) -> f64 {
        let widths = self.ticks.iter().map(|t| width_of(&t.1, TEXT));
        widths.fold(0.0, f64::max)
    }

    /// Rows of ticks below the plot: where they would touch in one they take turns.
    fn rows(&self) -> usize {
        let mut places: Vec<f64> = self.ticks.iter().map(|t| self.place(t.0)).collect();
        places.sort_by(f64::total_cmp);
        let gaps = places.windows(2).map(|pair| (pair[1] - pair[0]) * PLOT_W);
        let least = gaps.filter(|gap| *gap > 0.0).fold(PLOT_W, f64::min);
        ((self.widest() + GAP) / least).ceil().clamp(1.0, 4.0) as usize
    }
}

/// A chart under construction: marks go into `marks`, in the coordinates that it gives.
struct Frame {
    title: String,
    facts: String,
    names: (String, String),
    x: Axis,
    y: Axis,
    left: f64,
    top: f64,
    /// Name and colour.
    legend: Vec<(String, String)>,
    marks: String,
}

/// A finished chart.
struct Drawn {
    width: f64,
    height: f64,
    body: String,
}

impl Frame {
    fn new(labels: &Labels<'_>, x: Axis, y: Axis) -> Self {
        let above = |text: &str, height: f64| match text {
            "" => 0.0,
            _ => height * LINE,
        };
        // the name, turned, then the ticks; half of the first tick below may reach out, too
        let first = x.ticks.first().map_or(0.0, |t| width_of(&t.1, TEXT) / 2.0);
        let left = (GAP + TEXT * LINE + y.widest() + GAP).max(first + GAP);
        Self {
            title: labels.title.to_owned(),
            facts: labels.facts.to_owned(),
            names: (labels.x.to_owned(), labels.y.to_owned()),
            left,
            top: GAP + above(labels.title, LARGE) + above(labels.facts, SMALL) + GAP,
            x,
            y,
            legend: Vec::new(),
            marks: String::new(),
        }
    }

    fn at_x(&self, x: f64) -> f64 {
        self.left + self.x.place(x) * PLOT_W
    }

    /// Values beyond the axis lie on its end.
    fn at_y(&self, y: f64) -> f64 {
        self.top + PLOT_H - self.y.place(y).clamp(0.0, 1.0) * PLOT_H
    }

    /// Puts a name into the legend.
    fn name(&mut self, name: &str, colour: &str) {
        self.legend.push((name.to_owned(), colour.to_owned()));
    }

    /// A line through points.
    fn line(&mut self, points: impl Iterator<Item = (f64, f64)>, colour: &str, width: f64) {
        let place = |(x, y)| format!("{:.1} {:.1}", self.at_x(x), self.at_y(y));
        let path: Vec<String> = points.map(place).collect();
        if !path.is_empty() {
            let path = path.join("L");
            let _ = writeln!(
                self.marks,
                "<path d=\"M{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width}\"/>"
            );
        }
    }

    /// A bar from one height to another; `title` is shown when it is pointed at.
    fn block(&mut self, x: Range<f64>, y: Range<f64>, colour: &str, title: &str) {
        let (left, right) = (self.at_x(x.start), self.at_x(x.end));
        let (bottom, top) = (self.at_y(y.start), self.at_y(y.end));
        let _ = writeln!(
            self.marks,
            "<rect x=\"{left:.2}\" y=\"{top:.2}\" width=\"{:.2}\" height=\"{:.2}\" fill=\"{colour}\" \
             fill-opacity=\"0.75\"><title>{}</title></rect>",
            (right - left).max(0.3),
            bottom - top,
            escape(title)
        );
    }

    fn end(self) -> Drawn {
        let mut out = String::new();
        let (right, bottom) = (self.left + PLOT_W, self.top + PLOT_H);
        let mut y = GAP + LARGE;
        write_text(
            &mut out,
            Place::new(self.left, y),
            Anchor::Start,
            Ink::black(LARGE),
            &self.title,
        );
        if !self.facts.is_empty() {
            y += SMALL * LINE;
            write_text(
                &mut out,
                Place::new(self.left, y),
                Anchor::Start,
                Ink::grey(SMALL),
                &self.facts,
            );
        }
        self.draw_axes(&mut out);
        out += &self.marks;
        let below = bottom + self.x.rows() as f64 * TEXT * LINE + GAP;
        let name = below + TEXT;
        let middle = Place::new(self.left + PLOT_W / 2.0, name);
        write_text(
            &mut out,
            middle,
            Anchor::Middle,
            Ink::black(TEXT),
            &self.names.0,
        );
        let _ = writeln!(
            out,
            "<text transform=\"translate({:.1} {:.1}) rotate(-90)\" font-size=\"{TEXT}\" \
             text-anchor=\"middle\">{}</text>",
            GAP + TEXT,
            self.top + PLOT_H / 2.0,
            escape(&self.names.1)
        );
        let last = self
            .x
            .ticks
            .last()
            .map_or(0.0, |t| width_of(&t.1, TEXT) / 2.0);
        let legend = draw_legend(
            &mut out,
            Place::new(right + 2.0 * GAP, self.top),
            &self.legend,
        );
        let titles = width_of(&self.title, LARGE).max(width_of(&self.facts, SMALL));
        let name_ends = middle.x + width_of(&self.names.0, TEXT) / 2.0;
        Drawn {
            width: [right + last, legend.x, self.left + titles, name_ends]
                .into_iter()
                .fold(0.0, f64::max)
                + 2.0 * GAP,
            height: legend.y.max(name) + GAP,
            body: out,
        }
    }

    fn draw_axes(&self, out: &mut String) {
        let (right, bottom) = (self.left + PLOT_W, self.top + PLOT_H);
        for (value, text) in &self.y.ticks {
            let at = self.at_y(*value);
            let _ = writeln!(
                out,
                "<path d=\"M{:.1} {at:.1}H{right:.1}\" stroke=\"#ddd\"/>",
                self.left
            );
            let place = Place::new(self.left - GAP / 2.0, at + TEXT / 3.0);
            write_text(out, place, Anchor::End, Ink::black(TEXT), text);
        }
        let rows = self.x.rows();
        for (i, (value, text)) in self.x.ticks.iter().enumerate() {
            let at = self.at_x(*value);
            if self.x.grid {
                let _ = writeln!(
                    out,
                    "<path d=\"M{at:.1} {:.1}V{bottom:.1}\" stroke=\"#ddd\"/>",
                    self.top
                );
            }
            let row = (i % rows) as f64;
            let place = Place::new(at, bottom + GAP / 2.0 + TEXT + row * TEXT * LINE);
            write_text(out, place, Anchor::Middle, Ink::black(TEXT), text);
        }
    }
}

/// Draws names below each other, in as many columns as the height of a plot asks for; where it ends.
fn draw_legend(out: &mut String, at: Place, names: &[(String, String)]) -> Place {
    if names.is_empty() {
        return at;
    }
    let Place { x, y } = at;
    let each = (PLOT_H / (TEXT * LINE)) as usize;
    out.push_str("<g class=\"legend\">\n");
    let (mut left, mut lowest) = (x, y);
    for column in names.chunks(each) {
        let mut widest: f64 = 0.0;
        for (i, (name, colour)) in column.iter().enumerate() {
            let at = y + TEXT + i as f64 * TEXT * LINE;
            let ink = Ink {
                height: TEXT,
                fill: colour,
            };
            write_text(out, Place::new(left, at), Anchor::Start, ink, name);
            widest = widest.max(width_of(name, TEXT));
            lowest = lowest.max(at + GAP);
        }
        left += widest + 2.0 * GAP;
    }
    out.push_str("</g>\n");
    Place::new(left, lowest)
}

/// One picture of one chart.
fn page(chart: Drawn) -> String {
    pages("", vec![chart])
}

/// One picture of charts side by side, two in a row, under a common headline.
fn pages(title: &str, charts: Vec<Drawn>) -> String {
    let columns = charts.len().clamp(1, 2);
    let headline = if title.is_empty() {
        0.0
    } else {
        GAP + 16.0 * LINE
    };
    let cell_w = charts.iter().map(|c| c.width).fold(0.0, f64::max);
    let cell_h = charts.iter().map(|c| c.height).fold(0.0, f64::max);
    let width = (cell_w * columns as f64).max(width_of(title, 16.0) + 4.0 * GAP);
    let rows = charts.len().div_ceil(columns);
    let mut out = canvas(width, cell_h * rows as f64 + headline);
    if !title.is_empty() {
        write_text(
            &mut out,
            Place::new(2.0 * GAP, GAP + 16.0),
            Anchor::Start,
            Ink::black(16.0),
            title,
        );
    }
    for (i, chart) in charts.iter().enumerate() {
        let _ = writeln!(
            out,
            "<g transform=\"translate({:.1} {:.1})\">\n{}</g>",
            cell_w * (i % columns) as f64,
            cell_h * (i / columns) as f64 + headline,
            chart.body
        );
    }
    out.push_str("</svg>\n");
    out
}

/// The beginning of a picture.
fn canvas(width: f64, height: f64) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {:.0} {:.0}\" \
         font-family=\"sans-serif\" font-size=\"{TEXT}\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
        width.ceil(),
        height.ceil()
    )
}

/// 1, 2 or 5 times a power of ten, not below `value`.
fn nice(value: f64) -> f64 {
    if !(value.is_finite() && value > 0.0) {
        return 1.0;
    }
    let power = 10f64.powf(value.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0];
    let step = steps.iter().find(|&&s| s * power >= value * 0.999_999);
    step.unwrap_or(&10.0) * power
}

fn highest(values: impl Iterator<Item = f64>) -> f64 {
    values.filter(|v| v.is_finite()).fold(0.0, f64::max)
}

/// Text as it may stand in SVG.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests;
