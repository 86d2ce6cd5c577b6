//! Heat maps: one row per item, one coloured cell per value.

use std::fmt::Write as _;

use super::{
    Anchor, GAP, Ink, LARGE, LINE, Labels, PLOT_W, Position, SMALL, TEXT, canvas, escape, highest,
    round_ticks, width_of, write_text,
};

/// Height of a row, and width of the colour scale.
const ROW: f64 = 12.0;
const SCALE: f64 = 160.0;

/// Steps of the colour scale.
const STEPS: usize = 16;

/// Draws named `rows`. The darkest colour is the greatest value of all; `unit` names the unit of a value.
pub fn heat(labels: &Labels<'_>, unit: &str, rows: &[(String, Vec<f64>)]) -> String {
    let most = highest(rows.iter().flat_map(|row| row.1.iter().copied())).max(1e-9);
    let names = rows.iter().map(|row| width_of(&row.0, SMALL));
    let left = 2.0 * GAP + TEXT * LINE + names.fold(0.0, f64::max) + GAP;
    let top = GAP + LARGE * LINE + SMALL * LINE + GAP;
    let bottom = top + ROW * rows.len() as f64;
    let scale = bottom + SMALL * LINE + GAP + TEXT * LINE + GAP;
    let texts = width_of(labels.title, LARGE).max(width_of(labels.facts, SMALL));
    let width = left + PLOT_W.max(texts) + 2.0 * GAP;
    let mut out = canvas(width, scale + ROW + TEXT * LINE + GAP);
    let mut write = |x, y, anchor, ink, text: &str| {
        write_text(&mut out, Position::new(x, y), anchor, ink, text);
    };
    let headline = GAP + LARGE;
    write(
        left,
        headline,
        Anchor::Start,
        Ink::black(LARGE),
        labels.title,
    );
    let below = headline + SMALL * LINE;
    write(left, below, Anchor::Start, Ink::grey(SMALL), labels.facts);
    let middle = left + PLOT_W / 2.0;
    let under = bottom + SMALL * LINE + GAP + TEXT;
    write(middle, under, Anchor::Middle, Ink::black(TEXT), labels.x);
    let cells = rows.iter().map(|row| row.1.len()).max().unwrap_or(0).max(1) as f64;
    for (at, text) in round_ticks(cells, 8.0).into_iter().skip(1) {
        // Cells are numbered from 1, with the tick at the middle of the cell.
        let x = left + PLOT_W * (at - 0.5) / cells;
        let y = bottom + SMALL * LINE;
        write(x, y, Anchor::Middle, Ink::grey(SMALL), &text);
    }
    for (i, (name, _)) in rows.iter().enumerate() {
        let y = top + ROW * (i as f64 + 0.8);
        write(left - GAP / 2.0, y, Anchor::End, Ink::grey(SMALL), name);
    }
    let ends = scale + ROW + TEXT;
    let greatest = format!("{:.1} %", 100.0 * most);
    write(left, ends, Anchor::Start, Ink::grey(SMALL), "0 %");
    write(left + SCALE, ends, Anchor::End, Ink::grey(SMALL), &greatest);
    let unit_x = left + SCALE + GAP;
    write(unit_x, scale + SMALL, Anchor::Start, Ink::grey(SMALL), unit);
    let _ = writeln!(
        out,
        "<text transform=\"translate({:.1} {:.1}) rotate(-90)\" font-size=\"{TEXT}\" \
         text-anchor=\"middle\">{}</text>",
        GAP + TEXT,
        (top + bottom) / 2.0,
        escape(labels.y)
    );
    let title = escape(labels.y);
    for (i, (name, values)) in rows.iter().enumerate() {
        let at = Position::new(left, top + ROW * i as f64);
        let name = format!("{title} {}", escape(name));
        draw_row(&mut out, at, &name, values, most);
    }
    for step in 0..STEPS {
        let _ = writeln!(
            out,
            "<rect x=\"{:.1}\" y=\"{scale:.1}\" width=\"{:.1}\" height=\"{ROW}\" fill=\"{}\"/>",
            left + SCALE * step as f64 / STEPS as f64,
            SCALE / STEPS as f64,
            shade((step as f64 + 0.5) / STEPS as f64)
        );
    }
    out.push_str("</svg>\n");
    out
}

/// Draws the cells of a row; `most` is the greatest value of all.
fn draw_row(out: &mut String, at: Position, name: &str, values: &[f64], most: f64) {
    let cell = PLOT_W / values.len().max(1) as f64;
    for (j, value) in values.iter().enumerate() {
        // Writing to a String cannot fail.
        let _ = writeln!(
            out,
            "<rect x=\"{:.2}\" y=\"{:.1}\" width=\"{cell:.2}\" height=\"{ROW}\" fill=\"{}\">\
                 <title>{name}, {}: {:.2} %</title></rect>",
            at.x + cell * j as f64,
            at.y,
            shade(value / most),
            j + 1,
            100.0 * value
        );
    }
}

/// Colour for a share from 0 (nearly white) to 1 (dark red).
fn shade(share: f64) -> String {
    let light = 97.0 - 62.0 * share.clamp(0.0, 1.0).sqrt();
    format!("hsl(18,85%,{light:.0}%)")
}
