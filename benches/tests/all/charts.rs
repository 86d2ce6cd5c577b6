//! Every chart of the laboratory: nothing is cut off, and no text overlaps another or a legend.

use crate::common::look::look;
use crate::common::{lab, program, succeed};

const TEXT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo/heldout.txt");

/// Regression: `timeline --svg` cut off its last tick.
#[test]
fn nothing_in_a_chart_is_covered_or_cut_off() {
    let dir = tempfile::tempdir().unwrap();
    let named = dir.path().join("p.ember").display().to_string();
    let train = ["train-predictor", "-f", TEXT, "--tokens", "600"];
    program(&[&train[..], &["--kind", "sign", "-o", &named]].concat());
    let run = |line: &str| {
        let words = line.split(' ').map(|w| if w == "TEXT" { TEXT } else { w });
        succeed(lab().args(words).current_dir(dir.path()));
    };
    run("trace record -f TEXT -o demo.trace --limit 200");
    for line in [
        "trace simulate demo.trace",
        "timeline --ffn-resident 0.45 --warm-up 4",
        "timeline --ffn-resident 0.45 --warm-up 4 --layers 2",
        "kernels --quick",
        "predictor p.ember --quick",
        "ablation --quick --io sim:ufs4",
        "latency --quick",
        "phone",
        "phone --paper npumoe",
        "phone --paper heteroinfer",
        "phone --paper powerinfer-2",
        "phone --paper plan",
    ] {
        run(&format!("{line} --svg chart.svg --force"));
        let svg = std::fs::read_to_string(dir.path().join("chart.svg")).unwrap();
        look(&svg, line);
    }
}
