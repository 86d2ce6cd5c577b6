use super::*;
use crate::stats::Range;

fn labels() -> Labels<'static> {
    Labels {
        title: "a<b",
        facts: "here & now",
        x: "x",
        y: "y",
    }
}

fn at(y: f64) -> Range {
    Range::of(&mut [y])
}

#[test]
fn steps_are_round() {
    let steps = [0.13, 1.0, 1.1, 3.0, 70.0].map(nice);
    assert_eq!(steps, [0.2, 1.0, 2.0, 5.0, 100.0]);
    assert_eq!(nice(0.0), 1.0);
    assert_eq!(nice(f64::NAN), 1.0);
}

#[test]
fn ticks_are_round_and_differ() {
    let texts = |top| -> Vec<String> {
        let Axis { ticks, .. } = Axis::up_to(top);
        ticks.into_iter().map(|t| t.1).collect()
    };
    assert_eq!(texts(9.0), ["0", "2", "4", "6", "8", "10"]);
    assert_eq!(texts(0.019), ["0.000", "0.005", "0.010", "0.015", "0.020"]);
    assert_eq!(texts(1.0), ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]);
    assert_eq!(texts(0.3), ["0.0", "0.1", "0.2", "0.3"]);
}

/// A name has the same colour in every panel.
#[test]
fn a_name_keeps_its_colour_in_every_panel() {
    let panel = |names: &[&str]| Panel {
        title: "t".into(),
        x: "x",
        y: "y",
        curves: names.iter().map(|n| ((*n).to_owned(), vec![])).collect(),
    };
    let all = [
        panel(&["layer 0", "layer 1", "published"]),
        panel(&["batch 1", "batch 2"]),
        panel(&["layer 1", "layer 0"]),
    ];
    let svg = panels("", Axes::Shares, &all);
    let colours = |name: &str| -> Vec<String> {
        let end = format!("\">{name}<");
        let starts = svg
            .split(&end)
            .map(|part| part.rsplit_once('"').map_or("", |p| p.1));
        let all: Vec<String> = starts.map(str::to_owned).collect();
        all[..all.len() - 1].to_vec()
    };
    let (zero, one) = (colours("layer 0"), colours("layer 1"));
    assert_eq!((zero.len(), one.len()), (2, 2), "{svg}");
    assert!(zero[0] == zero[1] && one[0] == one[1] && zero[0] != one[0]);
    for other in ["published", "batch 1", "batch 2"] {
        assert!(
            ![&zero[0], &one[0]].contains(&&colours(other)[0]),
            "{other}"
        );
    }
    let many: std::collections::BTreeSet<String> = (0..64).map(colour).collect();
    assert_eq!(many.len(), 64);
}

#[test]
fn curves_reach_from_corner_to_corner() {
    let frame = Frame::new(&labels(), Axis::share(), Axis::up_to(10.0));
    let corners = [(0.0, 0.0), (1.0, 10.0)].map(|(x, y)| (frame.at_x(x), frame.at_y(y)));
    let [(left, bottom), (right, top)] = corners;
    assert_eq!((right - left, bottom - top), (PLOT_W, PLOT_H));
    let curve = Curve {
        name: "c&d".into(),
        points: vec![(0.0, at(0.0)), (1.0, at(10.0))],
    };
    let ticks = [(0.0, "0 %".into()), (1.0, "10 %".into())];
    let svg = curves(&labels(), &ticks, &[curve]);
    for part in [
        "a&lt;b",
        "here &amp; now",
        "c&amp;d",
        ">10 %<",
        " fill=\"none\"",
    ] {
        assert!(svg.contains(part), "{part}: {svg}");
    }
    // A single point has no width.
    let one = Curve {
        name: "e".into(),
        points: vec![(0.5, at(1.0))],
    };
    assert!(!curves(&labels(), &[], &[one]).contains("NaN"));
    assert!(!curves(&labels(), &[], &[]).contains("NaN"));
}

#[test]
fn values_beyond_an_axis_lie_on_its_end() {
    let panel = |y: f64| Panel {
        title: "t".into(),
        x: "x",
        y: "y",
        curves: vec![("c".into(), vec![(0.0, y), (1.0, y)])],
    };
    let drawn = |y| panels("", Axes::Shares, &[panel(y)]);
    assert_eq!(drawn(7.0), drawn(1.0));
    assert_eq!(drawn(-1.0), drawn(0.0));
    assert_ne!(drawn(1.0), drawn(0.0));
}

#[test]
fn log_axes_end_at_powers() {
    // x from 1 to 4 spans two powers of 2; y from 9 to 900 spans 1 to 1000.
    let panel = Panel {
        title: "a<b".into(),
        x: "x",
        y: "y",
        curves: vec![("c".into(), vec![(1.0, 9.0), (2.0, 1000.0), (4.0, 900.0)])],
    };
    let svg = panels("t", Axes::Logs, &[panel]);
    for part in ["a&lt;b", ">1<", ">4<", ">1000<"] {
        assert!(svg.contains(part), "{part}: {svg}");
    }
    assert!(!svg.contains(">8<") && !svg.contains(">10000<"));
    assert!(!panels("t", Axes::Logs, &[]).contains("NaN"));
}

#[test]
fn bars_and_distributions_count() {
    let svg = bars(&labels(), &["n".into()], &[("g".into(), vec![4.0])]);
    assert!(svg.contains("g, n: 4.00"), "{svg}");
    let two = ["n".into(), "m".into()];
    let svg = piles(&labels(), &two, &[("g".into(), vec![4.0, 1.0])]);
    // The second block is stacked on the first.
    assert!(svg.contains("width=\"336.00\" height=\"240.00\""), "{svg}");
    assert!(svg.contains("width=\"336.00\" height=\"60.00\""), "{svg}");
    let svg = histogram(&labels(), &[("l".into(), vec![1.0, 1.0, 3.0, 8.0])]);
    assert!(svg.contains("l: 50.0 % from 1.00 to 1.20"), "{svg}");
    assert!(svg.contains("l: 25.0 % from 7.80 to 8.00"), "{svg}");
}

#[test]
fn a_timeline_has_a_bar_for_every_span() {
    let bar = Bar {
        from: 1.0,
        to: 2.0,
        kind: 0,
        title: "x<y".into(),
    };
    let row = Row {
        name: "a&b".into(),
        note: "busy".into(),
        bars: vec![bar],
    };
    let svg = timeline("t", 4.0, &[("k", "#123456")], &[row]);
    // About ten ticks, all at round numbers.
    for part in [
        "a&amp;b",
        "x&lt;y, 1.000 ms",
        "width=\"350.00\"",
        ">4.0 ms<",
        ">0.5 ms<",
    ] {
        assert!(svg.contains(part), "{part}: {svg}");
    }
}

/// With long texts, many names and many ticks nothing overlaps the legend or leaves the picture
/// (`tools/tests/all/charts.rs` checks the charts of the commands).
#[test]
fn long_texts_make_a_chart_wider() {
    let narrow = Frame::new(&labels(), Axis::share(), Axis::share())
        .end()
        .width;
    let mut frame = Frame::new(&labels(), Axis::share(), Axis::share());
    frame.name(&"name ".repeat(20), "black");
    assert!(frame.end().width > narrow + 600.0);
    let title = "title ".repeat(40);
    let long = Labels {
        title: &title,
        ..labels()
    };
    assert!(Frame::new(&long, Axis::share(), Axis::share()).end().width > 1500.0);
    let mut frame = Frame::new(&labels(), Axis::share(), Axis::share());
    (0..100).for_each(|i| frame.name(&format!("layer {i}"), "black"));
    let drawn = frame.end();
    assert!(drawn.height < PLOT_H + 120.0, "{}", drawn.height);
    assert!(drawn.width > narrow + 300.0, "{}", drawn.width);
    // Group names that would overlap alternate between rows.
    let groups: Vec<_> = (0..12)
        .map(|i| (format!("a long name {i}"), vec![1.0]))
        .collect();
    let svg = bars(&labels(), &["n".into()], &groups);
    let line = |i: usize| {
        let (before, _) = svg.split_once(&format!(">a long name {i}<")).unwrap();
        let (_, y) = before.rsplit_once(" y=\"").unwrap();
        y.split('"').next().unwrap().to_owned()
    };
    assert_ne!(line(0), line(1));
}
