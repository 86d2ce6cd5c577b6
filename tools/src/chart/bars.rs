//! Bar charts: grouped, stacked, and histograms.

use super::{Axis, Frame, Labels, colour, highest, nice, page};

/// An x axis with one unit per group, labelled with the group's name.
fn groups_axis(groups: &[(String, Vec<f64>)]) -> Axis {
    let tick = |(i, group): (usize, &(String, Vec<f64>))| (i as f64 + 0.5, group.0.clone());
    Axis {
        from: 0.0,
        to: groups.len().max(1) as f64,
        ticks: groups.iter().enumerate().map(tick).collect(),
        grid: false,
    }
}

/// A frame for groups, and the colours of `names`.
fn frame_of(
    labels: &Labels<'_>,
    names: &[String],
    groups: &[(String, Vec<f64>)],
    top: f64,
) -> (Frame, Vec<String>) {
    let mut frame = Frame::new(labels, groups_axis(groups), Axis::up_to(top));
    let colours: Vec<String> = (0..names.len()).map(colour).collect();
    for (name, colour) in names.iter().zip(&colours) {
        frame.name(name, colour);
    }
    (frame, colours)
}

/// Grouped bars. Each group has a label and one value per name.
pub fn bars(labels: &Labels<'_>, names: &[String], groups: &[(String, Vec<f64>)]) -> String {
    let top = highest(groups.iter().flat_map(|g| g.1.iter().copied()));
    let (mut frame, colours) = frame_of(labels, names, groups, top);
    let width = 0.8 / names.len().max(1) as f64;
    for (i, (group, values)) in groups.iter().enumerate() {
        let named = names.iter().zip(&colours);
        for (j, (value, (name, colour))) in values.iter().zip(named).enumerate() {
            let from = i as f64 + 0.1 + width * j as f64;
            let title = format!("{group}, {name}: {value:.2}");
            frame.block(from..from + width * 0.92, 0.0..*value, colour, &title);
        }
    }
    page(frame.end())
}

/// Stacked bars. Each stack has a label and one height per name.
pub fn piles(labels: &Labels<'_>, names: &[String], groups: &[(String, Vec<f64>)]) -> String {
    let top = highest(groups.iter().map(|g| g.1.iter().sum()));
    let (mut frame, colours) = frame_of(labels, names, groups, top);
    for (i, (group, values)) in groups.iter().enumerate() {
        let (from, mut below) = (i as f64 + 0.2, 0.0);
        for (value, (name, colour)) in values.iter().zip(names.iter().zip(&colours)) {
            let title = format!("{group}, {name}: {value:.2}");
            if *value > 0.0 {
                frame.block(from..from + 0.6, below..below + value, colour, &title);
                below += value;
            }
        }
    }
    page(frame.end())
}

/// Histogram of each named list, with equal bins.
pub fn histogram(labels: &Labels<'_>, lists: &[(String, Vec<f64>)]) -> String {
    const PARTS: usize = 40;
    let most = highest(lists.iter().flat_map(|l| l.1.iter().copied()));
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
    let tick = |i: usize| {
        let at = step * i as f64;
        (at, format!("{}", (at * 1000.0).round() / 1000.0))
    };
    let x = Axis {
        from: 0.0,
        to: high,
        ticks: (0..=(high / step).round() as usize).map(tick).collect(),
        grid: false,
    };
    let mut frame = Frame::new(labels, x, Axis::up_to(top));
    let part = high / PARTS as f64;
    for (list, ((name, _), shares)) in lists.iter().zip(&shares).enumerate() {
        let colour = colour(list);
        frame.name(name, &colour);
        for (i, &share) in shares.iter().enumerate().filter(|(_, s)| **s > 0.0) {
            let from = part * i as f64;
            let title = format!("{name}: {share:.1} % from {from:.2} to {:.2}", from + part);
            frame.block(from..from + part, 0.0..share, &colour, &title);
        }
    }
    page(frame.end())
}
