//! Shared by the integration tests: fixtures, packing, opening.
#![forbid(unsafe_code)]
#![expect(
    clippy::expect_used,
    reason = "test support: a failure here is a failed test"
)]

pub mod devices;
pub mod fuzz;
pub mod gguf;
pub mod kinds;
pub mod widen;

use std::path::{Path, PathBuf};

use emberflow::pack::{self, PackOptions};
use emberflow_engine::memory::Needs;
use emberflow_engine::{Budget, Counters, Engine, Lab, Logits, Model, Options};
use emberflow_kernels::DType;
use emberflow_storage::container::Container;

/// The folder of committed fixtures.
pub fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

/// The folder of a model's fixture.
pub fn case(name: &str) -> PathBuf {
    fixtures().join("models").join(name)
}

/// One model of the fixtures per family and activation, the first by name: for slow tests that
/// depend on a family's mixers and FFNs, not on each of its options.
pub fn one_per_family() -> Vec<PathBuf> {
    let models = std::fs::read_dir(fixtures().join("models")).expect("fixtures");
    let mut folders: Vec<_> = models
        .map(|entry| entry.expect("an entry").path())
        .collect();
    folders.sort();
    let mut found = std::collections::BTreeMap::new();
    for folder in folders.into_iter().rev() {
        let source = emberflow_models::open(&folder).expect("a model");
        let config = source.config();
        let kind = format!("{} {:?}", config.family, config.ffn_kind.activation);
        found.insert(kind, folder);
    }
    found.into_values().collect()
}

/// Gives the engine this share of the neurons' bytes beyond its minimum.
pub fn give(engine: &mut Engine, share: f64) {
    let needs = Needs {
        process_peak: 0,
        ..*engine.needs()
    };
    let [least, most] = [needs.smallest_budget(), needs.full_budget()];
    let bytes = least + ((most - least) as f64 * share) as u64;
    engine.set_budget(bytes).expect("a budget");
}

/// The bits of the logits of a prompt, token by token, and the counters.
pub fn counted(engine: &mut Engine, tokens: &[u32]) -> (Vec<u32>, Counters) {
    let before = engine.counters();
    let logits = all_logits(engine, tokens, 1);
    (bits(&logits), engine.counters().since(before))
}

/// A fixture's golden numbers, from Hugging Face transformers.
#[derive(Debug, serde::Deserialize)]
pub struct Golden {
    /// The prompt's tokens.
    pub tokens: Vec<u32>,
    /// File with the logits, f32 little endian.
    pub logits: String,
    /// `[positions, vocab]`.
    pub shape: [usize; 2],
    /// The positions whose logits are kept; empty for all of them.
    #[serde(default)]
    pub positions: Vec<usize>,
    /// Mean negative log likelihood of the tokens after the first, in nats; none in long texts.
    pub nll: Option<f64>,
    /// The greedy continuation of the prompt; empty in long texts.
    #[serde(default)]
    pub greedy: Vec<u32>,
}

impl Golden {
    /// Reads `name` (such as `golden.json`) of the fixture folder `case`.
    pub fn load(case: &Path, name: &str) -> Self {
        let text = std::fs::read_to_string(case.join(name)).expect("golden json");
        serde_json::from_str(&text).expect("golden json")
    }

    /// The logits, of the shape [`Golden::shape`].
    pub fn logits(&self, case: &Path) -> Vec<f32> {
        let bytes = std::fs::read(case.join(&self.logits)).expect("golden logits");
        let values: Vec<f32> = bytes
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect();
        assert_eq!(values.len(), self.shape[0] * self.shape[1]);
        values
    }
}

/// Packs a checkpoint into `dir` and returns the container's path.
pub fn packed(checkpoint: &Path, dir: &Path, quant: DType) -> PathBuf {
    let stem = checkpoint.file_name().expect("a name").to_string_lossy();
    let output = dir.join(format!("{stem}.{}.ember", quant.name()));
    pack::pack(
        checkpoint,
        &output,
        &PackOptions::new(quant),
        &mut |_, _| {},
    )
    .expect("pack");
    output
}

/// Options for comparisons: f32 keys and values, a practically unlimited budget.
pub fn roomy(context: usize) -> Options {
    Options {
        budget: Budget::Bytes(1 << 40),
        threads: 2,
        context,
        kv: DType::F32,
        // What somebody measured on this machine decides on no test.
        lab: Lab {
            profiles: false,
            ..Lab::default()
        },
        ..Options::default()
    }
}

/// Opens a container file.
pub fn open(path: &Path, options: Options) -> Engine {
    let container = Container::open(path).expect("container");
    let model = Model::open(container).expect("model");
    Engine::open(model, options).expect("engine")
}

/// Logits of every position, `[tokens × vocab]`, computed in chunks of `chunk`.
pub fn all_logits(engine: &mut Engine, tokens: &[u32], chunk: usize) -> Vec<f32> {
    let mut sequence = engine.new_sequence().unwrap();
    let mut out = Vec::new();
    for part in tokens.chunks(chunk) {
        let mut sink = |_: usize, logits: &[f32]| out.extend_from_slice(logits);
        engine
            .forward(&mut sequence, part, Logits::Each(&mut sink))
            .expect("forward");
    }
    out
}

/// Neurons that a token visits, over all layers.
pub fn visited(engine: &Engine) -> u64 {
    let c = engine.config();
    let of_layer = |layer: u32| match c.mixture_of(layer) {
        Some(m) => m.chosen * c.ffn + m.shared_bank(),
        None => c.banks_of(layer).map(|bank| bank.neurons).sum(),
    };
    (c.ffn_layers().map(|layer| u64::from(of_layer(layer)))).sum()
}

/// The bits of every value, for comparisons that must be exact.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Reduces an open engine so that all neurons are resident and the embedding's rows are read from the file, independently
/// of the memory that other tests of the process have used before.
pub fn table_on_flash(engine: &mut Engine) {
    let needs = Needs {
        process_peak: 0,
        ..*engine.needs()
    };
    let all = needs.plan(needs.full_budget()).expect("plan");
    let less = all.ledger.used() - needs.tables[0] / 2;
    engine.set_budget(less).expect("budget");
    assert_eq!(engine.memory().ledger.held("embedding"), 0);
    assert_eq!(engine.memory().hot_clusters, engine.needs().clusters);
}

/// Reduces an open engine to `share` of its FFN, independently of the memory that other tests of
/// the process have used before.
pub fn squeeze(engine: &mut Engine, share: f64) {
    let needs = Needs {
        process_peak: 0,
        ..*engine.needs()
    };
    engine
        .set_budget(needs.budget_for_share(share))
        .expect("budget");
}
