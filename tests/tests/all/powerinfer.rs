//! PowerInfer files with predictors, from their bytes to logits, compared with an independent
//! decoder: scalar, in f64, from the file's own tensors. OPT and Falcon are compared with
//! transformers plus PowerInfer's rule (`tests/fixtures/golden/predicted.py`).

use std::path::Path;

use emberflow_engine::{Options, Sparsity};
use emberflow_kernels::DType;
use emberflow_tests::{Golden, all_logits, bits, case, open, packed, roomy, squeeze};

const D: usize = 32;
const FFN: usize = 80;
const LAYERS: usize = 2;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD: usize = 8;
const EPS: f32 = 1e-5;
const THETA: f32 = 1000.0;
const THRESHOLD: f32 = 0.125;
const PIECES: [&str; 11] = [
    "<unk>", "<s>", "</s>", "a", "b", "c", "d", "e", "f", "g", "h",
];

/// A tensor as stored in the file, f32, rows of `cols` numbers.
struct Tensor {
    name: String,
    cols: usize,
    values: Vec<f32>,
}

struct Checkpoint {
    arch: &'static str,
    tensors: Vec<Tensor>,
}

impl Checkpoint {
    fn random(arch: &'static str) -> Self {
        let mut random = fastrand::Rng::with_seed(5);
        let mut tensors = Vec::new();
        let mut add = |name: String, rows: usize, cols: usize, scale: f32| {
            // sixteenths are the same in f16
            let mut next = || (f32::from(random.u8(..32)) - 15.5) / 16.0 * scale;
            let norm = rows == 1;
            let values = (0..rows * cols).map(|_| next() + f32::from(u8::from(norm)));
            let values = values.collect();
            tensors.push(Tensor { name, cols, values });
        };
        add("token_embd.weight".into(), PIECES.len(), D, 1.0);
        for l in 0..LAYERS {
            let mut add = |name: &str, rows, cols, scale| {
                add(format!("blk.{l}.{name}.weight"), rows, cols, scale);
            };
            add("attn_norm", 1, D, 0.25);
            add("attn_q", HEADS * HEAD, D, 0.5);
            add("attn_k", KV_HEADS * HEAD, D, 0.5);
            add("attn_v", KV_HEADS * HEAD, D, 0.5);
            add("attn_output", D, HEADS * HEAD, 0.5);
            add("ffn_norm", 1, D, 0.25);
            add("ffn_gate", FFN, D, 0.5);
            add("ffn_up", FFN, D, 0.5);
            add("ffn_down_t", FFN, D, 0.5);
            add("fc1", 5 + l, D, 1.0);
            add("fc2", FFN, 5 + l, 1.0);
        }
        add("output_norm.weight".into(), 1, D, 0.25);
        add("output.weight".into(), PIECES.len(), D, 0.5);
        Self { arch, tensors }
    }

    fn find(&self, name: &str) -> &Tensor {
        let mut all = self.tensors.iter();
        let name = format!("{name}.weight");
        all.find(|t| t.name == name).unwrap()
    }

    fn write(&self, path: &Path) {
        let text = |text: &str| {
            let mut out = (text.len() as u64).to_le_bytes().to_vec();
            out.extend(text.as_bytes());
            out
        };
        let mut keys: Vec<Vec<u8>> = Vec::new();
        let mut key = |name: &str, kind: u32, value: &[u8]| {
            keys.push([&text(name), &kind.to_le_bytes()[..], value].concat());
        };
        let list = |kind: u32, values: &[Vec<u8>]| {
            let mut out = kind.to_le_bytes().to_vec();
            out.extend((values.len() as u64).to_le_bytes());
            out.extend(values.concat());
            out
        };
        key("general.architecture", 8, &text(self.arch));
        for (name, value) in [
            ("context_length", 64),
            ("embedding_length", D),
            ("block_count", LAYERS),
            ("feed_forward_length", FFN),
            ("attention.head_count", HEADS),
            ("attention.head_count_kv", KV_HEADS),
        ] {
            let name = format!("{}.{name}", self.arch);
            key(&name, 4, &(value as u32).to_le_bytes());
        }
        let norm = format!("{}.attention.layer_norm_rms_epsilon", self.arch);
        key(&norm, 6, &EPS.to_le_bytes());
        let base = format!("{}.rope.freq_base", self.arch);
        key(&base, 6, &THETA.to_le_bytes());
        key("powerinfer.sparse_threshold", 6, &THRESHOLD.to_le_bytes());
        key("tokenizer.ggml.model", 8, &text("llama"));
        key("tokenizer.ggml.tokens", 9, &list(8, &PIECES.map(text)));
        let scores = vec![0f32.to_le_bytes().to_vec(); PIECES.len()];
        key("tokenizer.ggml.scores", 9, &list(6, &scores));
        let kinds = [2, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1].map(|k: i32| k.to_le_bytes().to_vec());
        key("tokenizer.ggml.token_type", 9, &list(5, &kinds));
        key("tokenizer.ggml.bos_token_id", 4, &1u32.to_le_bytes());
        key("tokenizer.ggml.eos_token_id", 4, &2u32.to_le_bytes());

        let mut file = b"PWRI".to_vec();
        file.extend(3u32.to_le_bytes());
        file.extend((self.tensors.len() as u64).to_le_bytes());
        file.extend((keys.len() as u64).to_le_bytes());
        file.extend(keys.concat());
        let mut data = Vec::new();
        for t in &self.tensors {
            file.extend(text(&t.name));
            let rows = t.values.len() / t.cols;
            let dims = match rows {
                1 => vec![t.cols as u64],
                _ => vec![t.cols as u64, rows as u64],
            };
            file.extend((dims.len() as u32).to_le_bytes());
            file.extend(dims.iter().flat_map(|d| d.to_le_bytes()));
            file.extend(0u32.to_le_bytes());
            file.extend((data.len() as u64).to_le_bytes());
            data.extend(t.values.iter().flat_map(|v| v.to_le_bytes()));
            data.resize(data.len().next_multiple_of(32), 0);
        }
        file.resize(file.len().next_multiple_of(32), 0);
        file.extend(data);
        std::fs::write(path, file).unwrap();
    }

    fn product(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let t = self.find(name);
        let rows = t.values.chunks_exact(t.cols);
        rows.map(|row| dot(row, x)).collect()
    }

    fn normed(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
        let by = 1.0 / (mean + f64::from(EPS)).sqrt();
        let weights = &self.find(name).values;
        x.iter()
            .zip(weights)
            .map(|(x, w)| x * by * f64::from(*w))
            .collect()
    }

    /// Logits of every position, with predictors (`obey`) or with every neuron. Counts firing
    /// neurons that they miss, and other neurons that they select.
    fn logits(&self, tokens: &[u32], obey: bool, counts: &mut [usize; 2]) -> Vec<f64> {
        let embeddings = self.find("token_embd");
        let row = |t: &u32| embeddings.values[*t as usize * D..][..D].iter();
        let mut stream: Vec<Vec<f64>> = (tokens.iter())
            .map(|t| row(t).map(|&v| f64::from(v)).collect())
            .collect();
        for l in 0..LAYERS {
            let name = |part: &str| format!("blk.{l}.{part}");
            let (mut keys, mut values) = (Vec::new(), Vec::new());
            for (position, x) in stream.iter_mut().enumerate() {
                let h = self.normed(&name("attn_norm"), x);
                let mut q = self.product(&name("attn_q"), &h);
                let mut k = self.product(&name("attn_k"), &h);
                rotate(&mut q, position);
                rotate(&mut k, position);
                keys.push(k);
                values.push(self.product(&name("attn_v"), &h));
                let mut mixed = vec![0.0; HEADS * HEAD];
                for head in 0..HEADS {
                    let kv = head / (HEADS / KV_HEADS) * HEAD;
                    let query = &q[head * HEAD..][..HEAD];
                    let score = |k: &Vec<f64>| {
                        let products = query.iter().zip(&k[kv..]).map(|(a, b)| a * b);
                        (products.sum::<f64>() / (HEAD as f64).sqrt()).exp()
                    };
                    let weights: Vec<f64> = keys.iter().map(score).collect();
                    let sum: f64 = weights.iter().sum();
                    for (weight, v) in weights.iter().zip(&values) {
                        for i in 0..HEAD {
                            mixed[head * HEAD + i] += weight / sum * v[kv + i];
                        }
                    }
                }
                add(x, &self.product(&name("attn_output"), &mixed));
            }
            for x in &mut stream {
                // the predictor reads the stream before the norm
                let mut hidden = self.product(&name("fc1"), x);
                hidden.iter_mut().for_each(|v| *v = v.max(0.0));
                let scores = self.product(&name("fc2"), &hidden);
                let h = self.normed(&name("ffn_norm"), x);
                let gates = self.product(&name("ffn_gate"), &h);
                let ups = self.product(&name("ffn_up"), &h);
                let down = self.find(&name("ffn_down_t"));
                for n in 0..FFN {
                    let named = scores[n] >= f64::from(THRESHOLD);
                    counts[0] += usize::from(!named && gates[n] > 0.0);
                    counts[1] += usize::from(named);
                    if obey && !named {
                        continue;
                    }
                    let up = match self.arch {
                        "bamboo" => ups[n].max(0.0),
                        _ => ups[n],
                    };
                    let value = gates[n].max(0.0) * up;
                    for (x, w) in x.iter_mut().zip(&down.values[n * D..]) {
                        *x += value * f64::from(*w);
                    }
                }
            }
        }
        let last = |x: &Vec<f64>| self.product("output", &self.normed("output_norm", x));
        stream.iter().flat_map(last).collect()
    }
}

fn dot(row: &[f32], x: &[f64]) -> f64 {
    row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum()
}

fn add(x: &mut [f64], y: &[f64]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

/// Rows of a head are stored in pairs that rotate together.
fn rotate(heads: &mut [f64], position: usize) {
    for head in heads.chunks_exact_mut(HEAD) {
        for (i, pair) in head.chunks_exact_mut(2).enumerate() {
            let rate = f64::from(THETA).powf(-2.0 * i as f64 / HEAD as f64);
            let (sin, cos) = (position as f64 * rate).sin_cos();
            let (a, b) = (pair[0], pair[1]);
            (pair[0], pair[1]) = (a * cos - b * sin, a * sin + b * cos);
        }
    }
}

fn largest_difference(found: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let differences = found
        .iter()
        .zip(expected)
        .map(|(a, b)| (f64::from(*a) - b).abs());
    differences.fold(0.0, f64::max)
}

#[test]
fn a_powerinfer_file_runs_by_its_own_predictors() {
    let tokens = [1, 4, 9, 3, 3, 10, 6, 7, 5];
    for arch in ["llama", "bamboo"] {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("small.powerinfer.gguf");
        let checkpoint = Checkpoint::random(arch);
        checkpoint.write(&file);
        let container = packed(&file, dir.path(), DType::F32);
        let mut by_mode = Vec::new();
        for sparsity in [Sparsity::Predicted, Sparsity::Exact] {
            let options = Options {
                sparsity,
                ..roomy(tokens.len())
            };
            let found = all_logits(&mut open(&container, options), &tokens, 4);
            let mut counts = [0; 2];
            let obey = sparsity == Sparsity::Predicted;
            let expected = checkpoint.logits(&tokens, obey, &mut counts);
            let off = largest_difference(&found, &expected);
            assert!(off < 1e-3, "{arch} {sparsity:?}: off by {off}");
            let [left_out, named] = counts;
            assert!(left_out > 50 && named > 50, "{arch}: {counts:?}");
            by_mode.push(expected);
        }
        let differs = (by_mode[0].iter().zip(&by_mode[1])).any(|(a, b)| (a - b).abs() > 0.1);
        assert!(differs, "{arch}: the predictors change nothing");
    }
}

#[test]
fn ungated_files_obey_their_predictors_as_the_reference_does() {
    for name in ["opt_sparse", "falcon_sparse", "falcon_new_sparse"] {
        let dir = tempfile::tempdir().unwrap();
        let case = case(name);
        let container = packed(&case.join("model.gguf"), dir.path(), DType::F32);
        let golden = Golden::load(&case, "golden-predicted.json");
        let expected: Vec<f64> = golden.logits(&case).into_iter().map(f64::from).collect();
        let options = Options {
            sparsity: Sparsity::Predicted,
            ..roomy(golden.tokens.len())
        };
        let mut engine = open(&container, options);
        let found = all_logits(&mut engine, &golden.tokens, 16);
        let off = largest_difference(&found, &expected);
        assert!(off < 1e-3, "{name}: off by {off}");
        let counters = engine.counters();
        assert!(counters.looked_at < counters.possible, "{name}");
        for share in [0.0, 0.4] {
            squeeze(&mut engine, share);
            let again = all_logits(&mut engine, &golden.tokens, 3);
            assert!(bits(&again) == bits(&found), "{name}: {share} of the FFN");
        }
    }
}
