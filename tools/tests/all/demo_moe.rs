//! The bundled mixture of experts, as a user runs it.

use crate::common::{cache, call, emberflow, json, save_rates, succeed};
use serde_json::Value;

const CARD: &str = include_str!("../../../models/demo-moe/README.md");
const HELDOUT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo/heldout.txt");

/// A report of `run demo-moe` with the card's prompt and `more`.
fn run(more: &str) -> Value {
    let mut args = vec!["point", "demo-moe", "-p", "# Ownership\n\nOwnership is"];
    args.extend(["-n", "96", "--ignore-eos", "--temp", "0", "--json"]);
    args.extend(more.split_whitespace());
    json(&args)
}

#[test]
fn the_text_is_the_cards_under_every_budget() {
    let in_memory = run("");
    assert_eq!(in_memory["io"]["bytes_read"], 0, "{in_memory}");
    let hash = in_memory["logits_hash"].as_str().unwrap();
    assert!(CARD.contains(hash), "{hash} is not on the card");
    assert!(CARD.contains(in_memory["text"].as_str().unwrap().trim()));
    for more in [
        "--ffn-resident 0.5",
        "--ffn-resident 0.1 --read-ahead on",
        "--ffn-resident 0.1 --read-ahead off",
        "--ffn-resident 0.3 --sparsity dense --read-ahead on",
        "--ffn-resident 0.3 --sparsity dense --read-ahead off",
        "--ffn-resident 0 --threads 1 --chunk 16",
    ] {
        let report = run(more);
        assert_eq!(report["logits_hash"], hash, "{more}");
        assert_eq!(report["text"], in_memory["text"], "{more}");
        assert!(report["io"]["bytes_read"].as_u64() > Some(0), "{more}");
        let [peak, budget] = ["peak_rss_bytes", "budget_bytes"].map(|key| {
            let bytes = &report["memory"][key];
            bytes.as_u64().unwrap()
        });
        assert!(peak <= budget, "{more}: {peak} of {budget}");
        let guessed = report["read_ahead"]["guessed"].as_u64();
        if more.contains("ahead o") {
            let on = more.contains("ahead on");
            assert_eq!(guessed > Some(0), on, "{more}: {guessed:?}");
        }
    }
}

#[test]
fn commands_find_it_by_its_name() {
    let dir = tempfile::tempdir().unwrap();
    save_rates(&cache());
    for command in [
        "inspect demo-moe",
        "verify demo-moe",
        "plan demo-moe",
        "perplexity demo-moe -f HELDOUT --limit 600",
        "profile demo-moe -f HELDOUT --limit 600 -o moe.stats",
        "export demo-moe -o moe-hf",
        "run demo -n 4",
    ] {
        let words = command.split(' ').map(|word| match word {
            "HELDOUT" => HELDOUT,
            word => word,
        });
        succeed(emberflow().current_dir(dir.path()).args(words));
    }
    // A file of that name takes precedence.
    std::fs::write(dir.path().join("demo-moe"), "no container").unwrap();
    let output = emberflow()
        .current_dir(dir.path())
        .args(["run", "demo-moe", "-n", "4", "-p", "a"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(!call(&["run", "demo-mo", "-p", "a"]).status.success());
}
