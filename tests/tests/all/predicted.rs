//! Predicted mode: for every budget, thread count, chunk length and read strategy, exactly the
//! neurons selected by the predictors are computed, token by token.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Parser;
use emberflow::Failure;
use emberflow::cli::{Cli, Command, ModelArg};
use emberflow::model::{open_container, open_model};
use emberflow::packed::Packed;
use emberflow::train_predictor;
use emberflow_engine::memory::SlotContents;
use emberflow_engine::{Engine, FfnSeen, Judge, Lab, Logits, Model, Options, Phases, Sparsity};
use emberflow_kernels::{Activations, Compute, DType, with_scale_per_token};
use emberflow_predictor::section::{Directory, Kind};
use emberflow_predictor::{Features, Shared, predict_all};
use emberflow_storage::container::Container;
use emberflow_tests::widen::{Wider, widen};
use emberflow_tests::{Golden, all_logits, bits, fixtures, open, packed, roomy, squeeze};

fn predicted(context: usize) -> Options {
    Options {
        sparsity: Sparsity::Predicted,
        ..roomy(context)
    }
}

const HELDOUT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo/heldout.txt");

/// Trains predictors on the held-out text; `arguments` begin with the model, unless it is the
/// bundled one.
fn try_train(arguments: &[&str], output: &Path) -> Result<(), Failure> {
    let mut line = vec!["emberflow", "train-predictor"];
    line.extend(arguments);
    line.extend(["--json", "-f", HELDOUT, "-o", output.to_str().unwrap()]);
    let Command::TrainPredictor(args) = Cli::parse_from(line).command else {
        unreachable!("that is the command");
    };
    train_predictor::command(&args)
}

fn train(arguments: &[&str], output: &Path) {
    try_train(arguments, output).unwrap();
}

/// The same tokens under many budgets, chunk lengths, thread counts and read strategies. Returns
/// the number of neurons prefetched before their layer.
fn check_one_answer(path: &Path, tokens: &[u32]) -> u64 {
    let expected = bits(&all_logits(
        &mut open(path, predicted(tokens.len())),
        tokens,
        5,
    ));
    let (mut residencies, mut foreseen) = (Vec::new(), 0);
    for (threads, chunk, phases, share) in [
        (1, 1, Phases::Auto, 1.0),
        (2, 7, Phases::One, 0.05),
        (1, 16, Phases::Two, 0.2),
        (3, 3, Phases::One, 0.45),
        (2, 1, Phases::Two, 0.7),
    ] {
        let mut engine = open(
            path,
            Options {
                threads,
                lab: Lab {
                    phases,
                    ..Lab::default()
                },
                ..predicted(tokens.len())
            },
        );
        squeeze(&mut engine, share);
        residencies.push(engine.memory().residency());
        let found = bits(&all_logits(&mut engine, tokens, chunk));
        assert!(
            found == expected,
            "{threads} threads, chunks of {chunk}, {phases:?}, {share} of the FFN"
        );
        let counters = engine.counters();
        assert!(counters.fired <= counters.looked_at && counters.looked_at < counters.possible);
        assert!(counters.guessed_needed <= counters.guessed.min(counters.misses));
        foreseen += counters.guessed;
    }
    assert!(residencies.contains(&SlotContents::Bundles));
    assert!(residencies.contains(&SlotContents::GatesResident));
    foreseen
}

/// Neurons that the tokens after a prompt have to read, with half of the FFN in memory.
fn missed_after(path: &Path, prompt: &[u32], chunk: usize, after: &[u32]) -> u64 {
    let context = prompt.len() + after.len();
    let mut engine = open(path, predicted(context));
    squeeze(&mut engine, 0.5);
    let mut sequence = engine.new_sequence().unwrap();
    for part in prompt.chunks(chunk) {
        (engine.forward(&mut sequence, part, Logits::Last)).unwrap();
    }
    let before = engine.counters().misses;
    for token in after {
        (engine.forward(&mut sequence, std::slice::from_ref(token), Logits::Last)).unwrap();
    }
    engine.counters().misses - before
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn trained_predictors_give_one_answer_and_leave_the_rest_of_the_file_alone() {
    let dir = tempfile::tempdir().unwrap();
    let bundled = ModelArg { model: None };
    let model = open_model(&bundled).unwrap();
    let tokens = model.text().encode("A reference to a vector that").unwrap();
    let container = open_container(&bundled).unwrap();
    let text = std::fs::read_to_string(HELDOUT).unwrap();
    let text = model.text().encode(&text[2000..2300]).unwrap();
    for kind in ["coarse", "low-rank", "sign"] {
        let output = dir.path().join(format!("{kind}.ember"));
        train(
            &["--kind", kind, "--tokens", "5120", "--floor", "0.9"],
            &output,
        );
        assert!(!dir.path().join(format!("{kind}.ember.layers")).exists());
        let other = Container::open(&output).unwrap();
        assert_eq!(other.meta(), container.meta());
        assert_eq!(other.read_stats().unwrap(), container.read_stats().unwrap());
        let names = |c: &Container| -> Vec<(String, u64)> {
            let tensors = c.tensors().iter();
            tensors.map(|t| (t.name.clone(), t.xxh3)).collect()
        };
        assert_eq!(names(&other), names(&container));
        let exact = |sparsity| Options {
            sparsity,
            ..roomy(tokens.len())
        };
        let dense = bits(&all_logits(
            &mut open(&output, exact(Sparsity::Dense)),
            &tokens,
            4,
        ));
        let same = bits(&all_logits(
            &mut open(&output, exact(Sparsity::Exact)),
            &tokens,
            4,
        ));
        assert!(dense == same, "predictors must not touch exact mode");
        let foreseen = check_one_answer(&output, &tokens);
        assert!(foreseen > 0, "nothing was read ahead of its layer");
        // The result of a separate pass for each token, and at most two fifths more reads. With coarse
        // copies it is about a third more, and runs differ by a tenth.
        if kind == "coarse" {
            continue;
        }
        let missed = |chunk: Option<usize>| -> u64 {
            let prompts = [4, 12, 24].map(|len| text[..len + 2].split_at(len));
            let one = |(prompt, after): (&[u32], _)| {
                missed_after(&output, prompt, chunk.unwrap_or(prompt.len()), after)
            };
            prompts.into_iter().map(one).sum()
        };
        let (together, one_by_one) = (missed(None), missed(Some(1)));
        assert!(
            5 * together <= 7 * one_by_one,
            "{kind}: {together} neurons missed after whole prompts, {one_by_one} token by token"
        );
    }
}

/// The directory of a container's predictors.
fn directory(path: &Path) -> Directory {
    let model = Model::open(Container::open(path).unwrap()).unwrap();
    let c = model.text().config();
    let neurons: Vec<usize> = c.banks().map(|bank| bank.neurons as usize).collect();
    let section = Container::open(path).unwrap().read_predictor().unwrap();
    Directory::parse(&section, section.len() as u64, c.d_model as usize, &neurons).unwrap()
}

/// Experts have their own predictors, trained on the tokens that visit them.
#[test]
fn predictors_of_experts_give_one_answer() {
    let dir = tempfile::tempdir().unwrap();
    let bundled = ModelArg {
        model: Some("demo-moe".into()),
    };
    let model = open_model(&bundled).unwrap();
    let tokens = model.text().encode("A reference to a vector that").unwrap();
    for kind in ["coarse", "low-rank", "sign"] {
        let output = dir.path().join(format!("{kind}.ember"));
        let bytes = ["--bytes", "20"];
        let how = ["--kind", kind, "--tokens", "5120", "--floor", "0.9"];
        train(&[&["demo-moe"], &bytes[..], &how].concat(), &output);
        let directory = directory(&output);
        let c = model.text().config();
        assert_eq!(directory.banks.len(), (c.layers * c.experts) as usize);
        let named = directory.banks.iter().filter(|bank| bank.kind.predicts());
        let (named, quality) = (named.count(), directory.quality());
        assert!(2 * named > directory.banks.len(), "{kind}: {named}");
        assert!(quality.recall() > 0.95, "{kind}: {quality:?}");
        // Each token visits the chosen experts of a layer.
        let visits =
            directory.measured_on * u64::from(c.layers * c.mixture.as_ref().unwrap().chosen);
        let (pairs, measured) = (visits * u64::from(c.ffn), quality.pairs);
        assert!(measured <= pairs, "{kind}: {measured} of {pairs}");
        assert!(
            // Experts visited by hardly any token are not measured.
            measured as f64 > 0.95 * pairs as f64,
            "{kind}: {measured} of {pairs}"
        );
        check_one_answer(&output, &tokens);
    }
}

#[test]
fn predictors_of_other_families_experts_give_one_answer() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["mixtral_relu", "turbosparse_mixtral", "smallthinker"] {
        let case = fixtures().join("models").join(name);
        let tokens = Golden::load(&case, "golden.json").tokens;
        let container = packed(&case, dir.path(), DType::Q8);
        let output = dir.path().join(format!("{name}.predicted.ember"));
        let how = "--kind coarse --bytes 100 --tokens 3000 --recall 0.6 --floor 0";
        let mut arguments = vec![container.to_str().unwrap()];
        arguments.extend(how.split(' '));
        train(&arguments, &output);
        assert!(
            directory(&output)
                .banks
                .iter()
                .any(|bank| bank.kind.predicts())
        );
        check_one_answer(&output, &tokens);
    }
}

/// Layers whose gates have a cutoff per token, which the predictor estimates; the last layer is
/// dense.
#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn predictors_of_gaussian_top_k_give_one_answer() {
    let dir = tempfile::tempdir().unwrap();
    let case = fixtures().join("models").join("gemma3n_whole");
    let tokens = Golden::load(&case, "golden.json").tokens;
    let wider = Wider {
        copies: 9,
        config: ("      150", "      1350"),
        rows: &["mlp.gate_proj", "mlp.up_proj"],
        columns: "down_proj.weight",
        change: |_, _| {},
    };
    let container = packed(
        &widen(&case, &dir.path().join("wide"), &wider),
        dir.path(),
        DType::Q8,
    );
    let output = dir.path().join("predicted.ember");
    let how = "--bytes 100 --tokens 3000 --recall 0.95 --floor 0";
    let mut arguments = vec![container.to_str().unwrap()];
    arguments.extend(how.split(' '));
    train(&arguments, &output);
    let kinds: Vec<Kind> = (directory(&output).banks.iter().map(|bank| bank.kind)).collect();
    assert!(kinds[..10].iter().all(Kind::knows_cutoffs));
    assert_eq!(kinds[10..], [Kind::None]);
    check_one_answer(&output, &tokens);
    // Close to what the gates themselves say, which is not touched.
    let with = |sparsity| Options {
        sparsity,
        ..roomy(tokens.len())
    };
    let logits = |path: &Path, sparsity| all_logits(&mut open(path, with(sparsity)), &tokens, 5);
    let exact = logits(&output, Sparsity::Exact);
    assert!(bits(&exact) == bits(&logits(&container, Sparsity::Auto)));
    let predicted = logits(&output, Sparsity::Predicted);
    let error = |(a, b): (&f32, &f32)| f64::from(a - b).powi(2);
    let off: f64 = exact.iter().zip(&predicted).map(error).sum();
    let all: f64 = exact.iter().map(|a| f64::from(*a).powi(2)).sum();
    println!("relative error of the logits: {}", (off / all).sqrt());
    // of 150 distinct neurons, which are few to estimate a deviation from
    assert!(off < 0.6 * all, "{off} of {all}");
    // a kind that cannot estimate the cutoff, and a floor that is not reached
    for (how, why) in [
        ("--kind sign", "only --kind coarse"),
        ("--floor 1", "lower --floor"),
    ] {
        let output = dir.path().join("refused.ember");
        let mut arguments = vec![
            container.to_str().unwrap(),
            "--bytes",
            "100",
            "--tokens",
            "500",
        ];
        arguments.extend(how.split(' '));
        let refused = try_train(&arguments, &output).unwrap_err().to_string();
        assert!(refused.contains(why), "{refused}");
    }
}

#[test]
fn experts_without_zeros_have_nothing_to_predict() {
    let dir = tempfile::tempdir().unwrap();
    let case = fixtures().join("models").join("qwen3_moe");
    let container = packed(&case, dir.path(), DType::Q8);
    for kind in ["auto", "coarse", "magnitude"] {
        let output = dir.path().join("none.ember");
        let arguments = [container.to_str().unwrap(), "--kind", kind];
        let refused = try_train(&arguments, &output).unwrap_err().to_string();
        assert!(refused.contains("never exactly zero"), "{refused}");
        assert!(!output.exists());
    }
}

/// Adds tensors to a checkpoint's one safetensors file.
fn add_tensors(folder: &Path, added: &[(String, [usize; 2], Vec<f32>)]) {
    let path = folder.join("model.safetensors");
    let file = std::fs::read(&path).unwrap();
    let len = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let mut header: serde_json::Value = serde_json::from_slice(&file[8..8 + len]).unwrap();
    let mut data = file[8 + len..].to_vec();
    for (name, shape, values) in added {
        let start = data.len();
        data.extend(values.iter().flat_map(|v| v.to_le_bytes()));
        header[name] = serde_json::json!({
            "dtype": "F32", "shape": shape, "data_offsets": [start, data.len()],
        });
    }
    let mut text = serde_json::to_vec(&header).unwrap();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut out = (text.len() as u64).to_le_bytes().to_vec();
    out.extend(text);
    out.extend(data);
    std::fs::write(&path, out).unwrap();
}

fn copy_of(case: &Path, to: &Path) -> PathBuf {
    let folder = to.join("checkpoint");
    std::fs::create_dir(&folder).unwrap();
    for entry in std::fs::read_dir(case).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            std::fs::copy(&path, folder.join(path.file_name().unwrap())).unwrap();
        }
    }
    folder
}

/// Layer, residual, normed input and gates of every chunk.
type Seen = Vec<(usize, Vec<f32>, Vec<f32>, Vec<f32>)>;

fn watch(engine: &mut Engine, tokens: &[u32]) -> Seen {
    let mut all = Vec::new();
    let mut keep = |s: &FfnSeen<'_>| {
        let [residual, x, gates] = [s.residual, s.x, s.gates].map(<[f32]>::to_vec);
        all.push((s.layer, residual, x, gates));
    };
    let mut sequence = engine.new_sequence().unwrap();
    for token in tokens {
        engine
            .forward_observed(&mut sequence, &[*token], Logits::Last, &mut keep)
            .unwrap();
    }
    all
}

/// PowerInfer's rule: a neuron is computed if `fc2 · relu(fc1 · residual)` is not below the
/// threshold, with the residual before the norm.
#[test]
fn imported_predictors_name_neurons_from_the_residual() {
    const RANK: usize = 5;
    let dir = tempfile::tempdir().unwrap();
    let case = fixtures().join("models").join("relu");
    let tokens = Golden::load(&case, "golden.json").tokens;
    let folder = copy_of(&case, dir.path());
    let config = emberflow_models::open(&folder).unwrap().config().clone();
    let (d, ffn) = (config.d_model as usize, config.ffn as usize);
    let mut random = fastrand::Rng::with_seed(1);
    // eighths are the same in f16
    let mut next = || (f32::from(random.u8(..16)) - 7.5) / 8.0;
    let mut random = |n: usize| -> Vec<f32> { (0..n).map(|_| next()).collect() };
    let mut added = Vec::new();
    for l in 0..config.layers {
        let name = |part| format!("model.layers.{l}.mlp.predictor.{part}.weight");
        added.push((name("fc1"), [RANK, d], random(RANK * d)));
        added.push((name("fc2"), [ffn, RANK], random(ffn * RANK)));
    }
    add_tensors(&folder, &added);
    let path = packed(&folder, dir.path(), DType::F32);
    let options = Options {
        lab: Lab {
            observe: true,
            ..Lab::default()
        },
        ..predicted(tokens.len())
    };
    let seen = watch(&mut open(&path, options), &tokens);
    let container = Container::open(&path).unwrap();
    let packed = Packed::new(&container).unwrap();
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        let products = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b));
        products.sum()
    };
    let (mut named, mut left_out) = (0, 0);
    for (l, residual, x, gates) in &seen {
        let (fc1, fc2) = (&added[2 * l].2, &added[2 * l + 1].2);
        let hidden: Vec<f32> = fc1
            .chunks(d)
            .map(|row| dot(row, residual).max(0.0) as f32)
            .collect();
        packed
            .neurons(*l, &mut |n, neuron| {
                let score = dot(&fc2[n * RANK..(n + 1) * RANK], &hidden);
                let gate = dot(&neuron.gate, x);
                if score.abs() < 1e-4 || gate.abs() < 1e-4 {
                    return Ok(());
                }
                let wanted = score > 0.0;
                named += usize::from(wanted);
                left_out += usize::from(!wanted && gate > 0.0);
                assert_eq!(gates[n] > 0.0, wanted && gate > 0.0, "layer {l} neuron {n}");
                Ok(())
            })
            .unwrap();
    }
    assert!(named > 20 && left_out > 20, "{named} {left_out}");
    check_one_answer(&path, &tokens);
}

/// The predictors of a model whose rows have one scale are judged with activations that have one too, as the engine's.
#[test]
fn predictors_are_judged_with_the_engines_activations() {
    let dir = tempfile::tempdir().unwrap();
    let container = packed(&fixtures().join("models/bamboo"), dir.path(), DType::Q8c);
    let output = dir.path().join("predicted.ember");
    let how = "--kind coarse --bytes 100 --tokens 1000 --recall 0.6 --floor 0";
    let mut arguments = vec![container.to_str().unwrap()];
    arguments.extend(how.split(' '));
    train(&arguments, &output);
    let model = Model::open(Container::open(&output).unwrap()).unwrap();
    let c = model.text().config();
    let (d, neurons, tokens) = (c.d_model as usize, c.ffn as usize, 40);
    // Five large elements, one more than may exceed a scale: beside them it makes zeros of most others.
    let x: Vec<f32> = (0..tokens * d)
        .map(|i| match i % d {
            0..5 => 9.0,
            _ => ((i * 7919) % 97) as f32 / 970.0 - 0.05,
        })
        .collect();
    let section: Arc<dyn AsRef<[u8]> + Send + Sync> =
        Arc::new(model.container().read_predictor().unwrap());
    let predictor = directory(&output).predictor(0, &section).unwrap();
    let [engines, other] = [true, false].map(|per_token| {
        let mut on = Compute::new(1, None);
        on.cpu = with_scale_per_token(on.cpu, per_token);
        let mut quantized = Activations::default();
        on.cpu.quantize_activations(&x, tokens, &mut quantized);
        let input = Features {
            normed: &x,
            quantized: quantized.all(),
            residual: &x,
        };
        let mut wanted = vec![0.0; neurons * tokens];
        let mut shared = Shared::new(predictor.shape(), tokens);
        predict_all(predictor.as_ref(), &on, input, &mut shared, &mut wanted);
        wanted.iter().filter(|&&wanted| wanted != 0.0).count() as u64
    });
    assert_ne!(engines, other);
    let mut judge = Judge::open(&model, tokens, 1).unwrap().unwrap();
    judge.see(&FfnSeen {
        layer: 0,
        tokens,
        residual: &x,
        x: &x,
        dense: &[],
        choices: &[],
        gates: &vec![1.0; neurons * tokens],
        hidden: &[],
    });
    assert_eq!(judge.layers()[0].predicted, engines);
}

#[test]
fn a_container_without_predictors_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let path = packed(
        &fixtures().join("models").join("relu"),
        dir.path(),
        DType::Q8,
    );
    let model = Model::open(Container::open(&path).unwrap()).unwrap();
    match Engine::open(model, predicted(8)) {
        Err(e) => assert!(e.to_string().contains("train-predictor"), "{e}"),
        Ok(_) => panic!("opened"),
    }
}

/// Without predictors, the next layer's resident Gate rows select the neurons to prefetch.
#[test]
fn gate_rows_guess_for_the_next_layer_and_change_no_bit() {
    let path = Path::new(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../models/demo/demo.ember"
    ));
    let exact = Options {
        sparsity: Sparsity::Exact,
        lab: Lab {
            profiles: false,
            gates_stay: true,
            ..Lab::default()
        },
        ..roomy(48)
    };
    let text = std::fs::read_to_string(HELDOUT).unwrap();
    let tokens = (Model::open(Container::open(path).unwrap()).unwrap())
        .text()
        .encode(&text[2000..2300])
        .unwrap();
    let tokens = &tokens[..48];
    let expected = bits(&all_logits(&mut open(path, exact.clone()), tokens, 1));
    let (mut guessed, mut needed) = (0, 0);
    for share in [0.5, 0.6, 0.7] {
        let mut engine = open(path, exact.clone());
        squeeze(&mut engine, share);
        assert_eq!(engine.memory().residency(), SlotContents::GatesResident);
        let found = bits(&all_logits(&mut engine, tokens, 1));
        assert!(found == expected, "{share} of the FFN");
        let counters = engine.counters();
        assert!(counters.guessed_needed <= counters.guessed.min(counters.misses));
        guessed += counters.guessed;
        needed += counters.guessed_needed;
    }
    assert!(
        guessed > 1_000 && 2 * needed > guessed,
        "of {guessed} neurons read ahead {needed} were needed"
    );
}
