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
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n\
         <text x=\"{LEFT}\" y=\"24\" font-size=\"15\">{}</text>\n",
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
         <text transform=\"translate(18 {:.1}) rotate(-90)\" text-anchor=\"middle\">{}</text>\n</svg>\n",
        LEFT + PLOT_W / 2.0,
        TOP + PLOT_H + 40.0,
        escape(x),
        TOP + PLOT_H / 2.0,
        escape(y)
    );
    out
}

fn escape(text: &str) -> String {
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
}
