//! `run --trace` and `timeline`, as a user runs them.

use std::collections::BTreeSet;

use crate::common::json;
use serde_json::Value;

/// Runs on the bundled model with reads, two threads, and a file in a temporary folder.
fn in_folder(args: &[&str], file: &str) -> (Value, String) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(file);
    let path = path.to_str().unwrap();
    let common = ["--ffn-resident", "0.45", "--threads", "2", "--json"];
    let args: Vec<&str> = [args, &[path], &common].concat();
    (json(&args), std::fs::read_to_string(path).unwrap())
}

#[test]
fn a_trace_has_a_lane_for_every_thread_and_the_device() {
    let run = ["run", "-p", "A vector is", "-n", "8", "--ignore-eos"];
    let (report, text) = in_folder(&[&run[..], &["--trace"]].concat(), "trace.json");
    let events: Vec<Value> = serde_json::from_str(&text).unwrap();
    let lanes: Vec<&str> = (events.iter())
        .filter(|e| e["name"] == "thread_name")
        .map(|e| e["args"]["name"].as_str().unwrap())
        .collect();
    assert_eq!(lanes, ["compute 0", "compute 1", "i/o thread", "device"]);

    let of = |tid: u64, phase: &str| -> Vec<&Value> {
        let mine = |e: &&Value| e["tid"] == tid && e["ph"] == phase;
        events.iter().filter(mine).collect()
    };
    let kinds = |tid| -> BTreeSet<&str> {
        let events = of(tid, "X");
        events.iter().map(|e| e["cat"].as_str().unwrap()).collect()
    };
    for kind in ["attention", "ffn", "reduce", "head", "gate", "up", "down"] {
        assert!(kinds(0).contains(kind), "{kind}: {:?}", kinds(0));
    }
    for kind in ["start", "deliver"] {
        assert!(kinds(2).contains(kind), "{kind}: {:?}", kinds(2));
    }
    let cluster = (of(0, "X").into_iter())
        .find(|e| e["cat"] == "down")
        .unwrap();
    let (layer, number) = (&cluster["args"]["layer"], &cluster["args"]["cluster"]);
    assert_eq!(cluster["name"], format!("down L{layer} C{number}"));
    // Spans of a thread are nested or disjoint.
    for tid in [0, 1] {
        let time = |e: &Value| {
            let start = e["ts"].as_f64().unwrap();
            (start, start + e["dur"].as_f64().unwrap())
        };
        let mut spans: Vec<_> = of(tid, "X").into_iter().map(time).collect();
        spans.sort_by(|a, b| a.0.total_cmp(&b.0).then(b.1.total_cmp(&a.1)));
        let mut open: Vec<f64> = Vec::new();
        for (start, end) in spans {
            while open.last().is_some_and(|&last| last <= start + 1e-3) {
                open.pop();
            }
            assert!(open.last().is_none_or(|&last| end <= last + 1e-3));
            open.push(end);
        }
    }

    // Bytes from the device, including the initial fill.
    let bytes = |e: &&Value| e["args"]["bytes"].as_u64().unwrap();
    let read: u64 = of(3, "b").iter().map(bytes).sum();
    assert!(read >= report["io"]["bytes_read"].as_u64().unwrap());
    assert_eq!(of(3, "b").len(), of(3, "e").len());
    let peak = report["memory"]["peak_rss_bytes"].as_u64().unwrap();
    assert!(peak <= report["memory"]["budget_bytes"].as_u64().unwrap());
    let untraced = json(&[&run[..], &["--json"]].concat());
    assert_eq!(untraced["logits_hash"], report["logits_hash"]);
}

#[test]
fn a_timeline_shows_where_a_token_went() {
    let (report, svg) = in_folder(&["timeline", "--warm-up", "4", "--svg"], "t.svg");
    let lanes = report["lanes"].as_array().unwrap();
    let names: Vec<&str> = lanes.iter().map(|l| l["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["compute 0", "compute 1", "i/o thread", "device"]);
    for lane in lanes {
        let [busy, waiting] = ["busy", "waiting"].map(|key| lane[key].as_f64().unwrap());
        assert!(busy + waiting <= 1.0 + 1e-9 && busy >= 0.0, "{lane}");
        assert!(svg.contains(lane["name"].as_str().unwrap()));
    }
    // The amount depends on the device and on other load.
    assert!(lanes[0]["busy"].as_f64().unwrap() > 0.0, "{report}");
    let kinds = report["kinds"].as_array().unwrap();
    for kind in ["attention", "up", "down", "gate", "head"] {
        assert!(kinds.iter().any(|k| k["name"] == kind), "{kind}");
    }
    assert!(report["token_ms"].as_f64().unwrap() > 0.0);
    assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
    assert!(svg.contains("<title>down L0 C0,"), "no cluster is named");
}

/// The colour of a kind in the legend.
fn colour<'a>(drawn: &'a roxmltree::Document<'_>, kind: &str) -> &'a str {
    let legend = |node: &roxmltree::Node<'_, '_>| node.attribute("class") == Some("legend");
    let legend = drawn.descendants().find(legend).unwrap();
    let text = legend.children().find(|node| node.text() == Some(kind));
    let text = text.unwrap_or_else(|| panic!("{kind} is not in the legend"));
    let box_of = text.prev_siblings().find(|node| node.has_tag_name("rect"));
    box_of.unwrap().attribute("fill").unwrap()
}

/// `cpu` is a device that exists everywhere.
#[test]
fn a_timeline_has_a_lane_for_a_device() {
    let args = [
        "timeline",
        "--warm-up",
        "4",
        "--device",
        "cpu=1MiB",
        "--svg",
    ];
    let (report, svg) = in_folder(&args, "t.svg");
    let lanes = report["lanes"].as_array().unwrap();
    let names: Vec<&str> = lanes.iter().map(|l| l["name"].as_str().unwrap()).collect();
    assert_eq!(
        names,
        [
            "compute 0",
            "compute 1",
            "i/o thread",
            "device",
            "accelerator"
        ]
    );
    // Neither of these is a compute thread, so none of them waits for reads.
    assert!(
        lanes[2..].iter().all(|lane| lane["waiting"] == 0.0),
        "{report}"
    );
    let device = &lanes[4];
    assert!(device["busy"].as_f64().unwrap() > 0.0, "{report}");
    // Rows of projections, and by measured times clusters of FFNs.
    let kinds = report["kinds"].as_array().unwrap();
    let products = kinds.iter().find(|kind| kind["name"] == "products");
    assert!(
        products.is_some_and(|kind| kind["count"].as_u64() > Some(0)),
        "{report}"
    );
    let drawn = roxmltree::Document::parse(&svg).unwrap();
    let name = drawn
        .descendants()
        .find(|node| node.text() == Some("accelerator"))
        .unwrap();
    let place =
        |node: roxmltree::Node<'_, '_>| node.attribute("y").unwrap().parse::<f64>().unwrap();
    let title = |node: &roxmltree::Node<'_, '_>| {
        let title = node.children().find(|child| child.has_tag_name("title"));
        title.and_then(|title| title.text().map(str::to_owned))
    };
    let mut bars = 0;
    for bar in drawn.descendants().filter(|node| node.has_tag_name("rect")) {
        let Some(title) = title(&bar).filter(|_| (place(bar) - place(name)).abs() < 20.0) else {
            continue;
        };
        let kind = title.split([' ', ',']).next().unwrap();
        assert!(["products", "dense"].contains(&kind), "{title}");
        assert_eq!(bar.attribute("fill"), Some(colour(&drawn, kind)), "{title}");
        assert_ne!(bar.attribute("fill"), Some(colour(&drawn, "attention")));
        bars += 1;
    }
    assert_eq!(Some(bars), device["spans"].as_u64());
}
