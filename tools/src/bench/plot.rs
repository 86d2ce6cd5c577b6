//! Charts of benchmarks: curves with spreads, groups of bars, distributions.

use std::fmt::Write as _;

use crate::stats::Range;
use crate::svg::{canvas, escape};

const LEFT: f64 = 64.0;
const TOP: f64 = 58.0;
const WIDTH: f64 = 560.0;
const HEIGHT: f64 = 300.0;
const COLOURS: [&str; 8] = [
    "#d9480f", "#1971c2", "#2f9e44", "#9c36b5", "#868e96", "#f59f00", "#0c8599", "#5c940d",
];

/// Named points with their spreads, in order of x.
pub struct Curve {
    /// Its name.
    pub name: String,
    /// x, and y over the rounds.
    pub points: Vec<(f64, Range)>,
}

/// Headline, where it was measured, and the names of the axes.
pub struct Labels<'a> {
    /// Headline.
    pub title: &'a str,
    /// Below it, in small print.
    pub facts: &'a str,
    /// Name of the axis along.
    pub x: &'a str,
    /// Name of the axis up.
    pub y: &'a str,
}

/// A chart under construction.
struct Chart {
    out: String,
    x: (f64, f64),
    top: f64,
    legend: usize,
}

impl Chart {
    fn new(labels: &Labels<'_>, x: (f64, f64), top: f64) -> Self {
        let step = nice(top / 5.0);
        let top = (top / step).ceil().max(1.0) * step;
        let mut out = canvas(LEFT + WIDTH + 230.0, TOP + HEIGHT + 56.0);
        out += &format!(
            "<text x=\"{LEFT}\" y=\"22\" font-size=\"15\">{}</text>\n\
             <text x=\"{LEFT}\" y=\"40\" font-size=\"10\" fill=\"#555\">{}</text>\n",
            escape(labels.title),
            escape(labels.facts),
        );
        // writing to a String cannot fail
        let lines = (top / step).round() as usize;
        let digits = if step < 0.1 {
            2
        } else {
            usize::from(step < 1.0)
        };
        for i in 0..=lines {
            let value = step * i as f64;
            let at = TOP + HEIGHT - value / top * HEIGHT;
            let _ = writeln!(
                out,
                "<path d=\"M{LEFT} {at:.1}H{:.1}\" stroke=\"#ddd\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{value:.digits$}</text>",
                LEFT + WIDTH,
                LEFT - 6.0,
                at + 4.0,
            );
        }
        let _ = writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\
             <text transform=\"translate(18 {:.1}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
            LEFT + WIDTH / 2.0,
            TOP + HEIGHT + 42.0,
            escape(labels.x),
            TOP + HEIGHT / 2.0,
            escape(labels.y),
        );
        Self {
            out,
            x,
            top,
            legend: 0,
        }
    }

    fn at_x(&self, x: f64) -> f64 {
        let (low, high) = self.x;
        LEFT + (x - low) / (high - low).max(1e-9) * WIDTH
    }

    fn at_y(&self, y: f64) -> f64 {
        TOP + HEIGHT - y.clamp(0.0, self.top) / self.top * HEIGHT
    }

    fn tick(&mut self, x: f64, text: &str) {
        let (x, y) = (self.at_x(x), TOP + HEIGHT + 18.0);
        let _ = writeln!(
            self.out,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\">{}</text>",
            escape(text)
        );
    }

    /// The colour of the next name, which is put beside the chart.
    fn name(&mut self, name: &str) -> &'static str {
        let colour = COLOURS[self.legend % COLOURS.len()];
        let _ = writeln!(
            self.out,
            "<text x=\"{:.1}\" y=\"{:.1}\" fill=\"{colour}\">{}</text>",
            LEFT + WIDTH + 14.0,
            TOP + 12.0 + 17.0 * self.legend as f64,
            escape(name)
        );
        self.legend += 1;
        colour
    }

    fn bar(&mut self, from: f64, to: f64, y: f64, colour: &str, title: &str) {
        self.block((from, to), (0.0, y), colour, title);
    }

    /// A bar from one height to another.
    fn block(&mut self, x: (f64, f64), y: (f64, f64), colour: &str, title: &str) {
        let (left, right) = (self.at_x(x.0), self.at_x(x.1));
        let (bottom, top) = (self.at_y(y.0), self.at_y(y.1));
        let _ = writeln!(
            self.out,
            "<rect x=\"{left:.2}\" y=\"{top:.2}\" width=\"{:.2}\" height=\"{:.2}\" fill=\"{colour}\" \
             fill-opacity=\"0.75\"><title>{}</title></rect>",
            (right - left).max(0.3),
            bottom - top,
            escape(title)
        );
    }

    fn end(mut self) -> String {
        self.out.push_str("</svg>\n");
        self.out
    }
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

/// Curves over `ticks`, which are values of x and what to write there.
pub fn curves(labels: &Labels<'_>, ticks: &[(f64, String)], curves: &[Curve]) -> String {
    let xs = || {
        let points = curves.iter().flat_map(|c| c.points.iter().map(|p| p.0));
        points.chain(ticks.iter().map(|t| t.0))
    };
    let low = xs().fold(f64::MAX, f64::min);
    let high = xs().fold(f64::MIN, f64::max);
    let x = if low < high {
        (low, high)
    } else {
        (low - 0.5, low + 0.5)
    };
    let top = highest(curves.iter().flat_map(|c| c.points.iter().map(|p| p.1.max)));
    let mut chart = Chart::new(labels, x, top);
    for (x, text) in ticks {
        chart.tick(*x, text);
    }
    for curve in curves {
        let colour = chart.name(&curve.name);
        let place = |(x, y): &(f64, Range)| {
            let (x, y) = (chart.at_x(*x), chart.at_y(y.median));
            format!("{x:.1} {y:.1}")
        };
        let path: Vec<String> = curve.points.iter().map(place).collect();
        if !path.is_empty() {
            let path = path.join("L");
            let _ = writeln!(
                chart.out,
                "<path d=\"M{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>"
            );
        }
        for (x, y) in &curve.points {
            let (x, low, middle, high) = (
                chart.at_x(*x),
                chart.at_y(y.min),
                chart.at_y(y.median),
                chart.at_y(y.max),
            );
            let _ = writeln!(
                chart.out,
                "<path d=\"M{x:.1} {low:.1}V{high:.1}\" stroke=\"{colour}\"/>\
                 <circle cx=\"{x:.1}\" cy=\"{middle:.1}\" r=\"3\" fill=\"{colour}\"><title>{}: {}</title>\
                 </circle>",
                escape(&curve.name),
                y.show(2),
            );
        }
    }
    chart.end()
}

/// Groups of bars: a name for each, and in each the value of every one of `names`.
pub fn bars(labels: &Labels<'_>, names: &[String], groups: &[(String, Vec<f64>)]) -> String {
    let top = highest(groups.iter().flat_map(|g| g.1.iter().copied()));
    let mut chart = Chart::new(labels, (0.0, groups.len().max(1) as f64), top);
    let colours: Vec<&str> = names.iter().map(|name| chart.name(name)).collect();
    let width = 0.8 / names.len().max(1) as f64;
    for (i, (group, values)) in groups.iter().enumerate() {
        chart.tick(i as f64 + 0.5, group);
        for (j, (value, (name, colour))) in
            values.iter().zip(names.iter().zip(&colours)).enumerate()
        {
            let from = i as f64 + 0.1 + width * j as f64;
            let title = format!("{group}, {name}: {value:.2}");
            chart.bar(from, from + width * 0.92, *value, colour, &title);
        }
    }
    chart.end()
}

/// Piles of blocks: a name for each, and in each the height of every one of `names`.
pub fn piles(labels: &Labels<'_>, names: &[String], groups: &[(String, Vec<f64>)]) -> String {
    let top = highest(groups.iter().map(|g| g.1.iter().sum()));
    let mut chart = Chart::new(labels, (0.0, groups.len().max(1) as f64), top);
    let colours: Vec<&str> = names.iter().map(|name| chart.name(name)).collect();
    for (i, (group, values)) in groups.iter().enumerate() {
        chart.tick(i as f64 + 0.5, group);
        let (from, mut below) = (i as f64 + 0.2, 0.0);
        for (value, (name, colour)) in values.iter().zip(names.iter().zip(&colours)) {
            let title = format!("{group}, {name}: {value:.2}");
            if *value > 0.0 {
                chart.block((from, from + 0.6), (below, below + value), colour, &title);
                below += value;
            }
        }
    }
    chart.end()
}

/// How often values fall into each of some equal parts, for each of the named lists.
pub fn histogram(labels: &Labels<'_>, lists: &[(String, Vec<f64>)]) -> String {
    const PARTS: usize = 40;
    let all = || lists.iter().flat_map(|l| l.1.iter().copied());
    let most = highest(all());
    let step = nice(most / 8.0);
    let high = (most / step).ceil().max(1.0) * step;
    let share = |list: &[f64]| -> Vec<f64> {
        let mut counts = vec![0.0; PARTS];
        for value in list {
            let part = (value / high * PARTS as f64) as usize;
            counts[part.min(PARTS - 1)] += 100.0 / list.len() as f64;
        }
        counts
    };
    let shares: Vec<Vec<f64>> = lists.iter().map(|l| share(&l.1)).collect();
    let top = highest(shares.iter().flatten().copied());
    let mut chart = Chart::new(labels, (0.0, high), top);
    for i in 0..=(high / step).round() as usize {
        let at = step * i as f64;
        chart.tick(at, &format!("{}", (at * 1000.0).round() / 1000.0));
    }
    let part = high / PARTS as f64;
    for ((name, _), shares) in lists.iter().zip(&shares) {
        let colour = chart.name(name);
        for (i, &share) in shares.iter().enumerate().filter(|(_, s)| **s > 0.0) {
            let from = part * i as f64;
            let title = format!("{name}: {share:.1} % from {from:.2} to {:.2}", from + part);
            chart.bar(from, from + part, share, colour, &title);
        }
    }
    chart.end()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels() -> Labels<'static> {
        Labels {
            title: "a<b",
            facts: "here & now",
            x: "x",
            y: "y",
        }
    }

    #[test]
    fn steps_are_round() {
        let steps = [0.13, 1.0, 1.1, 3.0, 70.0].map(nice);
        assert_eq!(steps, [0.2, 1.0, 2.0, 5.0, 100.0]);
        assert_eq!(nice(0.0), 1.0);
        assert_eq!(nice(f64::NAN), 1.0);
    }

    #[test]
    fn curves_reach_from_corner_to_corner() {
        let at = |y: f64| Range::of(&mut [y]);
        let curve = Curve {
            name: "c&d".into(),
            points: vec![(0.1, at(0.0)), (1.0, at(10.0))],
        };
        let svg = curves(&labels(), &[(0.1, "10 %".into())], &[curve]);
        let path = "M64.0 358.0L624.0 58.0";
        for part in ["a&lt;b", "here &amp; now", "c&amp;d", ">10 %<", path] {
            assert!(svg.contains(part), "{part}: {svg}");
        }
        // One point has no width.
        let one = Curve {
            name: "e".into(),
            points: vec![(0.5, at(1.0))],
        };
        assert!(!curves(&labels(), &[], &[one]).contains("NaN"));
        assert!(!curves(&labels(), &[], &[]).contains("NaN"));
    }

    #[test]
    fn bars_and_distributions_count() {
        let svg = bars(&labels(), &["n".into()], &[("g".into(), vec![4.0])]);
        assert!(svg.contains("g, n: 4.00"), "{svg}");
        let two = ["n".into(), "m".into()];
        let svg = piles(&labels(), &two, &[("g".into(), vec![4.0, 1.0])]);
        // the second lies on the first
        assert!(svg.contains("y=\"118.00\" width=\"336.00\" height=\"240.00\""));
        assert!(svg.contains("y=\"58.00\" width=\"336.00\" height=\"60.00\""));
        let svg = histogram(&labels(), &[("l".into(), vec![1.0, 1.0, 3.0, 8.0])]);
        assert!(svg.contains("l: 50.0 % from 1.00 to 1.20"), "{svg}");
        assert!(svg.contains("l: 25.0 % from 7.80 to 8.00"), "{svg}");
    }
}
