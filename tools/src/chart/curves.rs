//! Line charts: curves with ranges, and several panels in one picture.

use std::fmt::Write as _;

use super::{Axis, Drawn, Frame, Labels, colour, escape, highest, page, pages};
use crate::stats::Range;

/// A named curve with a range per point, in order of x.
pub struct Curve {
    /// Name.
    pub name: String,
    /// x and the range of y over the rounds.
    pub points: Vec<(f64, Range)>,
}

/// Draws curves; `ticks` are values of x and their labels.
pub fn curves(labels: &Labels<'_>, ticks: &[(f64, String)], curves: &[Curve]) -> String {
    let xs = || {
        let points = curves.iter().flat_map(|c| c.points.iter().map(|p| p.0));
        points.chain(ticks.iter().map(|t| t.0))
    };
    let low = xs().fold(f64::MAX, f64::min);
    let high = xs().fold(f64::MIN, f64::max);
    let (from, to) = if low < high {
        (low, high)
    } else {
        (low - 0.5, low + 0.5)
    };
    let top = highest(curves.iter().flat_map(|c| c.points.iter().map(|p| p.1.max)));
    let x = Axis {
        from,
        to,
        ticks: ticks.to_vec(),
        grid: false,
    };
    let mut frame = Frame::new(labels, x, Axis::up_to(top));
    for (i, curve) in curves.iter().enumerate() {
        let colour = colour(i);
        frame.name(&curve.name, &colour);
        let medians = curve.points.iter().map(|&(x, y)| (x, y.median));
        frame.line(medians, &colour, 2.0);
        for (x, y) in &curve.points {
            let at = frame.at_x(*x);
            let [low, middle, high] = [y.min, y.median, y.max].map(|y| frame.at_y(y));
            // Writing to a String cannot fail.
            let _ = writeln!(
                frame.marks,
                "<path d=\"M{at:.1} {low:.1}V{high:.1}\" stroke=\"{colour}\"/>\
                 <circle cx=\"{at:.1}\" cy=\"{middle:.1}\" r=\"3\" fill=\"{colour}\">\
                 <title>{}: {}</title></circle>",
                escape(&curve.name),
                y.show(2),
            );
        }
    }
    page(frame.end())
}

/// One of several charts in a picture.
pub struct Panel {
    /// Title.
    pub title: String,
    /// Label of the x axis.
    pub x: &'static str,
    /// Label of the y axis.
    pub y: &'static str,
    /// Name and points of each curve.
    pub curves: Vec<(String, Vec<(f64, f64)>)>,
}

/// Axes of a picture's panels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Axes {
    /// Both from 0 to 1.
    Shares,
    /// Logarithmic and common to all panels: powers of 2 on x, powers of 10 on y. Values are positive.
    Logs,
}

/// Draws panels, two per row.
pub fn panels(title: &str, axes: Axes, panels: &[Panel]) -> String {
    let points = || {
        let curves = panels.iter().flat_map(|p| &p.curves);
        curves.flat_map(|c| &c.1)
    };
    let (x, y) = match axes {
        Axes::Shares => (Axis::share(), Axis::share()),
        Axes::Logs => (
            powers(2.0, points().map(|p| p.0)),
            powers(10.0, points().map(|p| p.1)),
        ),
    };
    let place = |&(x, y): &(f64, f64)| match axes {
        Axes::Shares => (x.clamp(0.0, 1.0), y),
        Axes::Logs => (x.log2(), y.log10()),
    };
    let draw = |panel: &Panel| -> Drawn {
        let labels = Labels {
            title: &panel.title,
            facts: "",
            x: panel.x,
            y: panel.y,
        };
        let mut frame = Frame::new(&labels, x.clone(), y.clone());
        for ((name, points), i) in panel.curves.iter().zip(places(panels, panel)) {
            let colour = colour(i);
            frame.name(name, &colour);
            frame.line(points.iter().map(place), &colour, 1.5);
        }
        frame.end()
    };
    pages(title, panels.iter().map(draw).collect())
}

/// Colour numbers of a panel's curves. A name has the same colour in all panels, and no other curve has it.
fn places<'a>(panels: &'a [Panel], panel: &'a Panel) -> impl Iterator<Item = usize> + 'a {
    let has = |panel: &Panel, name: &str| panel.curves.iter().any(|c| c.0 == name);
    let mut shared: Vec<&str> = Vec::new();
    for (name, _) in panels.iter().flat_map(|p| &p.curves) {
        let panels = panels.iter().filter(|p| has(p, name)).count();
        if panels > 1 && !shared.contains(&name.as_str()) {
            shared.push(name);
        }
    }
    let mut next = shared.len();
    panel.curves.iter().map(move |(name, _)| {
        let place = shared.iter().position(|s| s == name);
        place.unwrap_or_else(|| {
            next += 1;
            next - 1
        })
    })
}

/// A logarithmic axis that spans whole powers of `base`, at least one.
fn powers(base: f64, values: impl Iterator<Item = f64>) -> Axis {
    let finite = values.map(|v| v.log(base)).filter(|v| v.is_finite());
    let (low, high) = finite.fold((f64::MAX, f64::MIN), |(l, h), v| (l.min(v), h.max(v)));
    let (from, to) = if low <= high {
        (low.floor(), high.ceil().max(low.floor() + 1.0))
    } else {
        (0.0, 1.0)
    };
    let tick = |power: i32| (f64::from(power), base.powi(power).to_string());
    Axis {
        from,
        to,
        ticks: (from as i32..=to as i32).map(tick).collect(),
        grid: true,
    }
}
