//! Every chart of a command: nothing is cut off, and no text overlaps another or a legend.

use crate::common;
use std::path::Path;

use crate::common::look::look;
use crate::common::{emberflow, exported};

const TEXT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo/heldout.txt");

fn draw(dir: &Path, line: &str) -> String {
    let words = common::words(&line.replace("TEXT", TEXT));
    let mut command = emberflow();
    command.args(words).args(["--svg", "chart.svg", "--force"]);
    common::succeed(command.current_dir(dir).env("XDG_CACHE_HOME", dir));
    std::fs::read_to_string(dir.join("chart.svg")).unwrap()
}

/// Regression: in `profile show --svg` the legend covered a label.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn nothing_in_a_chart_is_covered_or_cut_off() {
    let dir = tempfile::tempdir().unwrap();
    exported(dir.path());
    common::save_rates(dir.path());
    for line in [
        "pack demo-hf -o m.ember --stats STATS",
        "profile m.ember -f TEXT -o demo.stats --limit 8192",
    ] {
        let stats = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../models/demo/activation_stats.json"
        );
        let words = line.replace("TEXT", TEXT).replace("STATS", stats);
        let mut command = emberflow();
        command.args(words.split(' ')).current_dir(dir.path());
        let output = command.output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{line}: {message}");
    }
    for line in [
        "profile show demo.stats",
        "inspect m.ember",
        "plan",
        "bench io --quick --size 8MiB --millis 5",
        "bench decode --quick",
        "bench sweep --quick --shares 50,100",
    ] {
        look(&draw(dir.path(), line), line);
    }
}
