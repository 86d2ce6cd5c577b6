//! The commands on a model of each family: packed, verified, profiled and planned.

use std::path::Path;

use serde_json::Value;

use crate::common::{cache, call, json, save_rates};

/// The families with a mixer or a mixture of their own, and checkpoints in FP8 and FP4.
const MODELS: [&str; 33] = [
    "afmoe",
    "bailing_hybrid",
    "bamba",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v3_fp8",
    "deepseek_v4",
    "deepseek_v4_release",
    "ernie4_5_moe",
    "falcon_h1",
    "gemma4",
    "gemma4_inputs",
    "gemma4_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "granitemoehybrid",
    "hy_v3",
    "jamba",
    "kimi_k25",
    "kimi_linear",
    "lfm2_moe",
    "minimax_m2",
    "ministral3_fp8",
    "nemotron_h",
    "nemotron_h_moe",
    "olmo_hybrid",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_moe",
    "qwen3_next",
    "qwen4_exp_fp8",
];

/// The container equals its source, by rows and in bundles, also with neurons sorted by the statistics that a profile found; a
/// plan of `config.json` alone divides memory as that of the container does.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn every_family_is_packed_verified_profiled_and_planned() {
    let dir = tempfile::tempdir().unwrap();
    save_rates(&cache());
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let text = std::fs::read_to_string(root.join("models/demo/heldout.txt")).unwrap();
    let text = &text[..text.floor_char_boundary(600)];
    let at = |name: &str| dir.path().join(name).display().to_string();
    std::fs::write(at("text"), text).unwrap();
    for name in MODELS {
        let folder = root.join("tests/fixtures/models").join(name);
        let config = folder.join("config.json").display().to_string();
        let folder = folder.display().to_string();
        let [plain, bundles, sorted, stats] =
            ["ember", "bundles", "sorted", "stats"].map(|ending| at(&format!("{name}.{ending}")));
        let pack = |output: &str, more: &[&str]| {
            json(&[&["pack", &folder, "-o", output, "--json"], more].concat());
            let verified = json(&["verify", output, "--source", &folder, "--json"]);
            assert_eq!(verified["ok"], true, "{name}: {verified}");
        };
        pack(&plain, &[]);
        let profile = ["-f", &at("text"), "-o", &stats, "--window", "32", "--json"];
        pack(&bundles, &["--quant", "q4k"]);
        let profile = json(&[&["profile", &bundles], &profile[..]].concat());
        // most tokens of these vocabularies are bytes
        let tokens = profile["tokens"].as_u64().unwrap();
        assert!((500..=600).contains(&tokens), "{name}: {profile}");
        pack(&sorted, &["--quant", "q4k", "--stats", &stats]);
        let summary = &json(&["inspect", &sorted, "--json"])["meta"]["stats"];
        assert_eq!(summary["tokens"], tokens, "{name}: {summary}");
        let of_bundles = plan_with(&config, &["--quant", "q4k"]);
        let mut pairs = vec![(&of_bundles, &bundles), (&of_bundles, &sorted)];
        // The other fixtures of quantized releases have floats of 32 bits beside FP8, releases of 16.
        let by_rows = (!name.ends_with("_fp8")).then(|| plan(&config));
        pairs.extend(by_rows.iter().map(|described| (described, &plain)));
        for (described, packed) in pairs {
            let packed = plan(packed);
            assert_eq!(parts(described), parts(&packed), "{name}");
            assert_eq!(described["quant"], packed["quant"], "{name}");
            // the process's own memory is measured
            let smallest = |plan: &Value| plan["smallest_bytes"].as_u64().unwrap();
            let [a, b] = [described, &packed].map(smallest);
            assert!(a.abs_diff(b) <= 4 << 20, "{name}: {a} and {b}");
        }
    }
}

/// The plan of a model, in a budget that holds all of it.
fn plan(model: &str) -> Value {
    plan_with(model, &[])
}

fn plan_with(model: &str, more: &[&str]) -> Value {
    let options = ["--context", "100", "--memory", "64MiB", "--json"];
    json(&[&["plan", model], &options[..], more].concat())
}

/// A description is planned in the formats that are asked for.
#[test]
fn a_description_is_planned_in_any_format() {
    save_rates(&cache());
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let config = root.join("tests/fixtures/models/llama2/config.json");
    let config = config.display().to_string();
    let in_format = |quant: &str| {
        let options = ["--quant", quant, "--memory", "64MiB", "--json"];
        json(&[&["plan", &config], &options[..]].concat())
    };
    let [q4, q8c] = ["q4", "q8c"].map(in_format);
    assert_eq!([&q4["quant"]["ffn"], &q8c["quant"]["ffn"]], ["q4", "q8c"]);
    let hot = |plan: &Value| parts(plan)[6];
    assert!(hot(&q8c) > hot(&q4), "{q4} {q8c}");
    let output = call(&["plan", &config, "--quant", "auto:1GiB"]);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !output.status.success() && told.contains("name one format"),
        "{told}"
    );
}

/// Bytes of the parts of memory that are not measured.
fn parts(plan: &Value) -> [u64; 8] {
    let memory = &plan["plans"][0]["memory"];
    let parts = [
        "fixed", "scales", "kv", "scratch", "gates", "stream", "hot", "tiles",
    ];
    let parts = parts.map(|part| memory[part].as_u64().unwrap());
    let ffn = parts[6] + parts[7];
    assert!(parts[0] > 0 && parts[3] > 0 && ffn > 0, "{memory}");
    parts
}
