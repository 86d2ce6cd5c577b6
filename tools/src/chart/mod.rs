//! Charts as SVG: curves, bars, histograms, heat maps, timelines.
//!
//! `Frame` draws axes, ticks, names and the legend of every chart except timelines. The layout follows the text:
//! `width_of` is an upper bound of a text's width, so that labels never overlap. The legend is to the right of the
//! plot.

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

/// Size of the plot area.
const PLOT_W: f64 = 560.0;
const PLOT_H: f64 = 300.0;

/// Font sizes.
const TEXT: f64 = 12.0;
const SMALL: f64 = 10.0;
const LARGE: f64 = 15.0;

/// Space between elements.
const GAP: f64 = 8.0;

/// Line height as a multiple of the font size.
const LINE: f64 = 1.35;

/// Easily distinguishable colours.
const COLOURS: [&str; 14] = [
    "#d9480f", "#1971c2", "#2f9e44", "#9c36b5", "#868e96", "#f59f00", "#0c8599", "#5c940d",
    "#e64980", "#5f3dc4", "#7a4a1d", "#4dabf7", "#f0a6ca", "#212529",
];

/// Texts of a chart.
#[derive(Debug, Clone, Copy, Default)]
pub struct Labels<'a> {
    /// Title.
    pub title: &'a str,
    /// Subtitle in small print: machine and settings.
    pub facts: &'a str,
    /// Label of the x axis.
    pub x: &'a str,
    /// Label of the y axis.
    pub y: &'a str,
}

/// Upper bound of the width of a text at a font size, for common fonts.
fn width_of(text: &str, height: f64) -> f64 {
    text.chars().count() as f64 * height * 0.62
}

/// Colour of curve `i`.
fn colour(i: usize) -> String {
    match COLOURS.get(i) {
        Some(colour) => (*colour).to_owned(),
        // Hues at steps of the golden angle are well separated.
        None => format!(
            "hsl({:.0},70%,{}%)",
            (137.508 * i as f64) % 360.0,
            [40, 62, 25][i % 3]
        ),
    }
}

/// About `parts` round ticks from 0 to `top`, with labels.
fn round_ticks(top: f64, parts: f64) -> Vec<(f64, String)> {
    let step = nice(top / parts);
    let digits = (-step.log10().floor()).max(0.0) as usize;
    let count = (top / step + 1e-6).floor() as u32;
    let tick = |i| step * f64::from(i);
    (0..=count)
        .map(|i| (tick(i), format!("{:.digits$}", tick(i))))
        .collect()
}

/// Alignment of a text at its position.
#[derive(Debug, Clone, Copy)]
enum Anchor {
    Start,
    Middle,
    End,
}

/// A point of the picture; the origin is the upper left corner.
#[derive(Debug, Clone, Copy)]
struct Position {
    x: f64,
    y: f64,
}

impl Position {
    fn new(x: f64, y: f64) -> Self {
        Self { x, y }
    }
}

/// Size and colour of a text.
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
fn write_text(out: &mut String, place: Position, anchor: Anchor, ink: Ink<'_>, text: &str) {
    let (Position { x, y }, Ink { height, fill }) = (place, ink);
    let anchor = match anchor {
        Anchor::Start => "",
        Anchor::Middle => " text-anchor=\"middle\"",
        Anchor::End => " text-anchor=\"end\"",
    };
    // Writing to a String cannot fail.
    let _ = writeln!(
        out,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"{height}\"{anchor} fill=\"{fill}\">{}</text>",
        escape(text)
    );
}

/// An axis: range, ticks and labels.
#[derive(Debug, Clone)]
struct Axis {
    from: f64,
    to: f64,
    ticks: Vec<(f64, String)>,
    /// Whether to draw grid lines at the ticks.
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

    /// Relative position of a value: 0 at the start of the axis, 1 at its end.
    fn place(&self, value: f64) -> f64 {
        (value - self.from) / (self.to - self.from).max(1e-9)
    }

    fn widest(&self) -> f64 {
        let widths = self.ticks.iter().map(|t| width_of(&t.1, TEXT));
        widths.fold(0.0, f64::max)
    }

    /// Rows of tick labels: labels that would overlap alternate between rows.
    fn rows(&self) -> usize {
        let mut places: Vec<f64> = self.ticks.iter().map(|t| self.place(t.0)).collect();
        places.sort_by(f64::total_cmp);
        let gaps = places.windows(2).map(|pair| (pair[1] - pair[0]) * PLOT_W);
        let least = gaps.filter(|gap| *gap > 0.0).fold(PLOT_W, f64::min);
        ((self.widest() + GAP) / least).ceil().clamp(1.0, 4.0) as usize
    }
}

/// A chart under construction. Marks are added in plot coordinates.
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
        // The rotated axis label, then the ticks. Half of the first tick label below may extend to the left.
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

    /// Values beyond the axis are clamped.
    fn at_y(&self, y: f64) -> f64 {
        self.top + PLOT_H - self.y.place(y).clamp(0.0, 1.0) * PLOT_H
    }

    /// Adds a name to the legend.
    fn name(&mut self, name: &str, colour: &str) {
        self.legend.push((name.to_owned(), colour.to_owned()));
    }

    /// Draws a polyline.
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

    /// Draws a rectangle; `title` is its tooltip.
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
            Position::new(self.left, y),
            Anchor::Start,
            Ink::black(LARGE),
            &self.title,
        );
        if !self.facts.is_empty() {
            y += SMALL * LINE;
            write_text(
                &mut out,
                Position::new(self.left, y),
                Anchor::Start,
                Ink::grey(SMALL),
                &self.facts,
            );
        }
        self.draw_axes(&mut out);
        out += &self.marks;
        let below = bottom + self.x.rows() as f64 * TEXT * LINE + GAP;
        let name = below + TEXT;
        let middle = Position::new(self.left + PLOT_W / 2.0, name);
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
            Position::new(right + 2.0 * GAP, self.top),
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
            let place = Position::new(self.left - GAP / 2.0, at + TEXT / 3.0);
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
            let place = Position::new(at, bottom + GAP / 2.0 + TEXT + row * TEXT * LINE);
            write_text(out, place, Anchor::Middle, Ink::black(TEXT), text);
        }
    }
}

/// Draws names in as many columns as the plot height requires; returns the lower right corner.
fn draw_legend(out: &mut String, at: Position, names: &[(String, String)]) -> Position {
    if names.is_empty() {
        return at;
    }
    let Position { x, y } = at;
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
            write_text(out, Position::new(left, at), Anchor::Start, ink, name);
            widest = widest.max(width_of(name, TEXT));
            lowest = lowest.max(at + GAP);
        }
        left += widest + 2.0 * GAP;
    }
    out.push_str("</g>\n");
    Position::new(left, lowest)
}

/// A picture with one chart.
fn page(chart: Drawn) -> String {
    pages("", vec![chart])
}

/// A picture of several charts, two per row, with a common title.
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
            Position::new(2.0 * GAP, GAP + 16.0),
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

/// Opening tag and background of a picture.
fn canvas(width: f64, height: f64) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {:.0} {:.0}\" \
         font-family=\"sans-serif\" font-size=\"{TEXT}\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
        width.ceil(),
        height.ceil()
    )
}

/// The smallest of 1, 2, 5 times a power of ten that is at least `value`.
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

/// Escapes a text for SVG.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests;
