//! Small line charts as SVG.

use std::fmt::Write as _;

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 60.0;
const TOP: f64 = 40.0;
const PLOT_W: f64 = 520.0;
const PLOT_H: f64 = 310.0;

/// A chart of named curves with both axes from 0 to 1.
pub fn lines(title: &str, x: &str, y: &str, curves: &[(String, Vec<(f64, f64)>)]) -> String {
    let mut out = canvas(WIDTH, HEIGHT);
    line_chart(&mut out, title, x, y, curves);
    out.push_str("</svg>\n");
    out
}

/// A chart among others: named curves with both axes from 0 to 1.
pub struct LinePanel {
    /// Headline.
    pub title: String,
    /// Name of the axis along.
    pub x: &'static str,
    /// Name of the axis up.
    pub y: &'static str,
    /// Name and points of each curve.
    pub curves: Vec<(String, Vec<(f64, f64)>)>,
}

/// Charts side by side, two in a row.
pub fn line_panels(title: &str, panels: &[LinePanel]) -> String {
    const COLUMNS: usize = 2;
    let rows = panels.len().div_ceil(COLUMNS);
    let mut out = canvas(WIDTH * COLUMNS as f64, HEIGHT * rows as f64 + 30.0);
    headline(&mut out, LEFT, title);
    for (i, panel) in panels.iter().enumerate() {
        let (column, row) = (i % COLUMNS, i / COLUMNS);
        // writing to a String cannot fail
        let _ = writeln!(
            out,
            "<g transform=\"translate({:.0} {:.0})\">",
            WIDTH * column as f64,
            HEIGHT * row as f64 + 30.0
        );
        line_chart(&mut out, &panel.title, panel.x, panel.y, &panel.curves);
        out.push_str("</g>\n");
    }
    out.push_str("</svg>\n");
    out
}

fn line_chart(
    out: &mut String,
    title: &str,
    x: &str,
    y: &str,
    curves: &[(String, Vec<(f64, f64)>)],
) {
    let _ = writeln!(
        out,
        "<text x=\"{LEFT}\" y=\"24\" font-size=\"15\">{}</text>",
        escape(title)
    );
    for i in 0..=5 {
        let share = f64::from(i) / 5.0;
        let (gx, gy) = (LEFT + share * PLOT_W, TOP + PLOT_H - share * PLOT_H);
        // writing to a String cannot fail
        let _ = write!(
            out,
            "<path d=\"M{LEFT} {gy:.1}H{:.1}M{gx:.1} {TOP}V{:.1}\" stroke=\"#ddd\" fill=\"none\"/>\n\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{share:.1}</text>\n\
             <text x=\"{gx:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{share:.1}</text>\n",
            LEFT + PLOT_W,
            TOP + PLOT_H,
            LEFT - 6.0,
            gy + 4.0,
            TOP + PLOT_H + 16.0
        );
    }
    for (i, (name, points)) in curves.iter().enumerate() {
        let hue = 360.0 * i as f64 / curves.len() as f64;
        let mut path = String::new();
        for (j, (px, py)) in points.iter().enumerate() {
            let command = if j == 0 { 'M' } else { 'L' };
            let _ = write!(
                path,
                "{command}{:.1} {:.1}",
                LEFT + px.clamp(0.0, 1.0) * PLOT_W,
                TOP + PLOT_H - py.clamp(0.0, 1.0) * PLOT_H
            );
        }
        let legend = TOP + 14.0 * i as f64 + 10.0;
        let _ = write!(
            out,
            "<path d=\"{path}\" fill=\"none\" stroke=\"hsl({hue:.0},70%,45%)\" stroke-width=\"1.5\"/>\n\
             <text x=\"{:.1}\" y=\"{legend:.1}\" fill=\"hsl({hue:.0},70%,35%)\">{}</text>\n",
            LEFT + PLOT_W + 12.0,
            escape(name)
        );
    }
    let _ = write!(
        out,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\n\
         <text transform=\"translate(18 {:.1}) rotate(-90)\" text-anchor=\"middle\">{}</text>\n",
        LEFT + PLOT_W / 2.0,
        TOP + PLOT_H + 40.0,
        escape(x),
        TOP + PLOT_H / 2.0,
        escape(y)
    );
}

/// A part of a chart: named curves of positive points, each in order of x.
pub struct Panel {
    /// Headline.
    pub title: String,
    /// Name and points of each curve.
    pub curves: Vec<(String, Vec<(f64, f64)>)>,
}

/// Panels side by side, two in a row, with the same logarithmic axes in all of them: powers of 2
/// along x, powers of 10 along y.
pub fn log_panels(title: &str, x: &str, y: &str, panels: &[Panel]) -> String {
    const COLUMNS: usize = 2;
    const CELL_H: f64 = HEIGHT - 20.0;
    let points = || {
        panels
            .iter()
            .flat_map(|p| p.curves.iter().flat_map(|c| &c.1))
    };
    let (x0, x1) = powers(points().map(|p| p.0.log2()));
    let (y0, y1) = powers(points().map(|p| p.1.log10()));
    let to_x = |v: f64| LEFT + (v.log2() - x0) / (x1 - x0) * PLOT_W;
    let to_y = |v: f64| TOP + PLOT_H - (v.log10() - y0) / (y1 - y0) * PLOT_H;
    let (bottom, right) = (TOP + PLOT_H, LEFT + PLOT_W);
    let rows = panels.len().div_ceil(COLUMNS);
    let mut out = canvas(WIDTH * COLUMNS as f64, CELL_H * rows as f64 + 40.0);
    headline(&mut out, LEFT, title);
    // writing to a String cannot fail
    for (i, panel) in panels.iter().enumerate() {
        let (column, row) = (i % COLUMNS, i / COLUMNS);
        let _ = write!(
            out,
            "<g transform=\"translate({:.0} {:.0})\">\n<text x=\"{LEFT}\" y=\"30\">{}</text>\n",
            WIDTH * column as f64,
            CELL_H * row as f64 + 30.0,
            escape(&panel.title)
        );
        for power in x0 as i32..=x1 as i32 {
            let (value, at) = (2f64.powi(power), to_x(2f64.powi(power)));
            let _ = writeln!(
                out,
                "<path d=\"M{at:.1} {TOP}V{bottom}\" stroke=\"#ddd\"/>\
                 <text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{value}</text>",
                bottom + 16.0
            );
        }
        for power in y0 as i32..=y1 as i32 {
            let (value, at) = (10f64.powi(power), to_y(10f64.powi(power)));
            let _ = writeln!(
                out,
                "<path d=\"M{LEFT} {at:.1}H{right}\" stroke=\"#ddd\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{value}</text>",
                LEFT - 6.0,
                at + 4.0
            );
        }
        for (i, (name, points)) in panel.curves.iter().enumerate() {
            let hue = 360.0 * i as f64 / panel.curves.len() as f64;
            let path: Vec<String> = (points.iter())
                .map(|&(x, y)| format!("{:.1} {:.1}", to_x(x), to_y(y)))
                .collect();
            let _ = writeln!(
                out,
                "<path d=\"M{}\" fill=\"none\" stroke=\"hsl({hue:.0},70%,45%)\" stroke-width=\"1.5\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" fill=\"hsl({hue:.0},70%,35%)\">{}</text>",
                path.join("L"),
                right + 12.0,
                TOP + 14.0 * i as f64 + 10.0,
                escape(name)
            );
        }
        let _ = write!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\
             <text transform=\"translate(18 {:.1}) rotate(-90)\" text-anchor=\"middle\">{}</text>\n</g>\n",
            LEFT + PLOT_W / 2.0,
            bottom + 34.0,
            escape(x),
            TOP + PLOT_H / 2.0,
            escape(y)
        );
    }
    out.push_str("</svg>\n");
    out
}

/// A lane of a timeline.
pub struct Row {
    /// Whose lane.
    pub name: String,
    /// Said below the name.
    pub note: String,
    /// In the order in which they are drawn.
    pub bars: Vec<Bar>,
}

/// Something that took a while.
pub struct Bar {
    /// Start and end in milliseconds.
    pub from: f64,
    /// See `from`.
    pub to: f64,
    /// Which of the kinds.
    pub kind: usize,
    /// Shown when it is pointed at.
    pub title: String,
}

/// Lanes below each other over `ms` milliseconds; `kinds` are names and colours.
pub fn timeline(title: &str, ms: f64, kinds: &[(&str, &str)], rows: &[Row]) -> String {
    const LANE: f64 = 46.0;
    const NAMES: f64 = 170.0;
    const TIME: f64 = 1400.0;
    let to_x = |at: f64| NAMES + at / ms.max(1e-9) * TIME;
    let bottom = TOP + LANE * rows.len() as f64;
    let mut out = canvas(NAMES + TIME + 20.0, bottom + 60.0);
    headline(&mut out, 10.0, title);
    // writing to a String cannot fail
    for i in 0..=10 {
        let at = ms * f64::from(i) / 10.0;
        let x = to_x(at);
        let _ = writeln!(
            out,
            "<path d=\"M{x:.1} {TOP}V{bottom:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{at:.2} ms</text>",
            bottom + 16.0
        );
    }
    for (i, row) in rows.iter().enumerate() {
        let y = TOP + LANE * i as f64;
        let _ = writeln!(
            out,
            "<text x=\"10\" y=\"{:.1}\">{}</text>\
             <text x=\"10\" y=\"{:.1}\" font-size=\"10\" fill=\"#555\">{}</text>",
            y + 18.0,
            escape(&row.name),
            y + 33.0,
            escape(&row.note)
        );
        for bar in &row.bars {
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
    let mut x = NAMES;
    for (name, fill) in kinds {
        let _ = writeln!(
            out,
            "<rect x=\"{x:.1}\" y=\"{:.1}\" width=\"12\" height=\"12\" fill=\"{fill}\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            bottom + 32.0,
            x + 17.0,
            bottom + 42.0,
            escape(name)
        );
        x += 100.0;
    }
    out.push_str("</svg>\n");
    out
}

/// Whole numbers around all finite values, at least one apart.
fn powers(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let finite = values.filter(|v| v.is_finite());
    let (low, high) = finite.fold((f64::MAX, f64::MIN), |(l, h), v| (l.min(v), h.max(v)));
    if low > high {
        return (0.0, 1.0);
    }
    (low.floor(), high.ceil().max(low.floor() + 1.0))
}

/// The beginning of a picture.
pub(crate) fn canvas(width: f64, height: f64) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    )
}

/// What the whole picture is about.
fn headline(out: &mut String, x: f64, title: &str) {
    // writing to a String cannot fail
    let _ = writeln!(
        out,
        "<text x=\"{x}\" y=\"24\" font-size=\"16\">{}</text>",
        escape(title)
    );
}

/// Text as it may stand in SVG.
pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    #[test]
    fn names_are_escaped_and_points_stay_inside() {
        let svg = super::lines(
            "a<b",
            "x",
            "y",
            &[("c&d".into(), vec![(0.0, 2.0), (1.0, -1.0)])],
        );
        assert!(svg.contains("a&lt;b") && svg.contains("c&amp;d"));
        assert!(svg.contains("M60.0 40.0L580.0 350.0"), "{svg}");
    }

    #[test]
    fn a_timeline_has_a_bar_for_every_span() {
        let bar = super::Bar {
            from: 1.0,
            to: 2.0,
            kind: 0,
            title: "x<y".into(),
        };
        let row = super::Row {
            name: "a&b".into(),
            note: "busy".into(),
            bars: vec![bar],
        };
        let svg = super::timeline("t", 4.0, &[("k", "#123456")], &[row]);
        for part in [
            "a&amp;b",
            "x&lt;y, 1.000 ms",
            "x=\"520.00\"",
            "width=\"350.00\"",
        ] {
            assert!(svg.contains(part), "{part}: {svg}");
        }
    }

    #[test]
    fn log_axes_end_at_powers() {
        // x from 1 to 4 is three powers of 2, y from 9 to 900 reaches from 1 to 1000.
        let panel = super::Panel {
            title: "a<b".into(),
            curves: vec![("c".into(), vec![(1.0, 9.0), (2.0, 1000.0), (4.0, 900.0)])],
        };
        let svg = super::log_panels("t", "x", "y", &[panel]);
        for part in ["a&lt;b", ">4<", ">1000<", "L320.0 40.0L"] {
            assert!(svg.contains(part), "{part}: {svg}");
        }
        assert_eq!(super::powers([].into_iter()), (0.0, 1.0));
        assert_eq!(super::powers([f64::NAN, 2.0].into_iter()), (2.0, 3.0));
    }
}
