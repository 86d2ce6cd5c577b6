//! An interrupted pack of any family resumes to the same bytes; size targets are met or rejected.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use emberflow_kernels::DType;
use emberflow_models::config::ModelConfig;
use emberflow_models::names::{Role, TensorId};
use emberflow_models::{Checkpoint, SamplingDefaults, TensorInfo};

use super::*;

/// A checkpoint whose reads fail after a given number.
struct Failing<'a> {
    source: &'a dyn Checkpoint,
    reads: AtomicUsize,
}

impl Checkpoint for Failing<'_> {
    fn path(&self) -> &Path {
        self.source.path()
    }
    fn config(&self) -> &ModelConfig {
        self.source.config()
    }
    fn sampling_defaults(&self) -> SamplingDefaults {
        self.source.sampling_defaults()
    }
    fn rules(&self) -> emberflow_models::TextRules {
        self.source.rules()
    }
    fn named_tokens(&self) -> BTreeMap<String, String> {
        self.source.named_tokens()
    }
    fn tokenizer_json(&self) -> &str {
        self.source.tokenizer_json()
    }
    fn chat_template(&self) -> Option<&str> {
        self.source.chat_template()
    }

    fn tool_template(&self) -> Option<&str> {
        self.source.tool_template()
    }
    fn tensors(&self) -> &[TensorInfo] {
        self.source.tensors()
    }
    fn read_rows(
        &self,
        id: TensorId,
        first: usize,
        count: usize,
        out: &mut [f32],
    ) -> Result<(), emberflow_models::Error> {
        let left = self
            .reads
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
        match left {
            Ok(_) => self.source.read_rows(id, first, count, out),
            Err(_) => Err(emberflow_models::Error::Io {
                op: "read",
                path: self.path().to_owned(),
                source: std::io::Error::other("stopped"),
            }),
        }
    }
    fn fingerprint(&self) -> u64 {
        self.source.fingerprint()
    }
}

/// A checkpoint that reports other types for its matrices.
struct Labelled<'a> {
    source: &'a dyn Checkpoint,
    tensors: Vec<TensorInfo>,
}

impl<'a> Labelled<'a> {
    fn new(source: &'a dyn Checkpoint, name: impl Fn(&TensorInfo) -> &'static str) -> Self {
        let label = |t: &TensorInfo| TensorInfo {
            source_dtype: match t.rows {
                1 => "F32".into(),
                _ => name(t).into(),
            },
            source_bytes: match BITS.iter().find(|(of, _)| *of == name(t)) {
                Some((_, bits)) => (bits * (t.rows * t.cols) as f64 / 8.0) as u64,
                None => t.source_bytes,
            },
            ..t.clone()
        };
        Self {
            source,
            tensors: source.tensors().iter().map(label).collect(),
        }
    }
}

impl Checkpoint for Labelled<'_> {
    fn path(&self) -> &Path {
        self.source.path()
    }
    fn config(&self) -> &ModelConfig {
        self.source.config()
    }
    fn sampling_defaults(&self) -> SamplingDefaults {
        self.source.sampling_defaults()
    }
    fn rules(&self) -> emberflow_models::TextRules {
        self.source.rules()
    }
    fn tool_template(&self) -> Option<&str> {
        self.source.tool_template()
    }
    fn tokenizer_json(&self) -> &str {
        self.source.tokenizer_json()
    }
    fn chat_template(&self) -> Option<&str> {
        self.source.chat_template()
    }
    fn named_tokens(&self) -> BTreeMap<String, String> {
        self.source.named_tokens()
    }
    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }
    fn read_rows(
        &self,
        id: TensorId,
        first: usize,
        count: usize,
        out: &mut [f32],
    ) -> Result<(), emberflow_models::Error> {
        self.source.read_rows(id, first, count, out)
    }
    fn fingerprint(&self) -> u64 {
        self.source.fingerprint()
    }
}

fn fixtures() -> Vec<PathBuf> {
    let models = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/models");
    let entries = std::fs::read_dir(models).unwrap();
    let mut folders: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    folders
}

/// One fixture per family, the first by name.
fn families() -> Vec<(String, PathBuf)> {
    let mut found = BTreeMap::new();
    for folder in fixtures() {
        let source = emberflow_models::open(&folder).unwrap();
        let family = source.config().family.clone();
        found.entry(family).or_insert(folder);
    }
    found.into_iter().collect()
}

fn options() -> PackOptions {
    PackOptions {
        durable_bytes: 1,
        threads: 1,
        ..PackOptions::new(DType::Q8)
    }
}

/// Packs four times; the first three runs fail, the first after half of all reads. Returns the last report.
fn with_failures(source: &dyn Checkpoint, output: &Path, options: &PackOptions) -> PackReport {
    let failing = |reads: usize| Failing {
        source,
        reads: reads.into(),
    };
    let counting = failing(usize::MAX);
    let whole = output.with_extension("counted");
    pack_source(&counting, &whole, options, &mut |_, _| {}).unwrap();
    std::fs::remove_file(&whole).unwrap();
    let all = usize::MAX - counting.reads.into_inner();
    for reads in [all * 11 / 20, all / 10, all / 10] {
        let source = failing(reads);
        pack_source(&source, output, options, &mut |_, _| {}).unwrap_err();
        assert!(!output.exists());
    }
    pack_source(source, output, options, &mut |_, _| {}).unwrap()
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn every_family_goes_on_where_it_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let [whole, stopped] = ["whole.ember", "stopped.ember"].map(|n| dir.path().join(n));
    let mut resumed = 0;
    for folder in fixtures() {
        let source = emberflow_models::open(&folder).unwrap();
        let again = PackOptions {
            force: true,
            ..options()
        };
        pack_source(source.as_ref(), &whole, &again, &mut |_, _| {}).unwrap();
        let report = with_failures(source.as_ref(), &stopped, &options());
        resumed += usize::from(report.resumed_units > 0);
        let [a, b] = [&whole, &stopped].map(|path| std::fs::read(path).unwrap());
        assert!(a == b, "{}", folder.display());
        std::fs::remove_file(&stopped).unwrap();
    }
    assert_eq!(resumed, fixtures().len());
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn every_calibrated_family_goes_on_too() {
    let dir = tempfile::tempdir().unwrap();
    let [whole, stopped] = ["whole.ember", "stopped.ember"].map(|n| dir.path().join(n));
    let text = "One text of some length, and then another one. ".repeat(40);
    let calibrated = PackOptions {
        calibrate: Some(CalibrationText {
            source: Arc::new(Source::of(text.into_bytes())),
            tokens: 32,
        }),
        ..options()
    };
    let families = families();
    for (_, folder) in &families {
        let source = emberflow_models::open(folder).unwrap();
        let again = PackOptions {
            force: true,
            ..calibrated.clone()
        };
        pack_source(source.as_ref(), &whole, &again, &mut |_, _| {}).unwrap();
        let report = with_failures(source.as_ref(), &stopped, &calibrated);
        assert!(report.calibrated.is_some());
        let [a, b] = [&whole, &stopped].map(|path| std::fs::read(path).unwrap());
        assert!(a == b, "{}", folder.display());
        std::fs::remove_file(&stopped).unwrap();
    }
    let ungated = ["opt", "nemotron", "falcon", "starcoder2"];
    let others = ["llama", "phi3", "olmo2", "granite", "gemma2", "smollm3"];
    for family in ungated.iter().chain(&others) {
        assert!(
            families.iter().any(|(name, _)| name == family),
            "{families:?}"
        );
    }
}

#[test]
fn sizes_are_met_or_refused_with_the_nearest_ones() {
    let dir = tempfile::tempdir().unwrap();
    let demo = dir.path().join("demo");
    let model = emberflow_engine::demo_container(emberflow_models::demo::Demo::Dense).unwrap();
    crate::export::export(&model, &demo, &mut |_, _| {}).unwrap();
    let output = dir.path().join("m.ember");
    let sized = |size: u64| PackOptions {
        size: Some(size),
        force: true,
        ..PackOptions::new(DType::Q4)
    };
    let packed = |size: u64| pack(&demo, &output, &sized(size), &mut |_, _| {});
    // The bundled weights have 8 bits; more bits cannot reduce the error.
    let most = packed(12_000_000).unwrap().bytes;
    assert!(most < 11_900_000, "{most}");
    for size in [6_700_000, 7_000_000, 7_500_000, 8_200_000] {
        let report = packed(size).unwrap();
        let share = report.bytes as f64 / size as f64;
        assert!((0.98..=1.0).contains(&share), "{size}: {report:?}");
        assert_eq!(report.bytes, std::fs::metadata(&output).unwrap().len());
        assert_eq!(report.mixed.unwrap().asked_bytes, Some(size));
    }
    // q8 neurons would leave too little for the other matrices.
    let report = packed(10_500_000).unwrap();
    assert_eq!(report.mixed.unwrap().ffn, "q4k");
    assert!(report.bytes < 8_400_000);
    let small = packed(1_000_000).unwrap_err().to_string();
    assert!(
        small.contains("the smallest container of this model"),
        "{small}"
    );
    assert_eq!(packed(1 << 30).unwrap().bytes, most);
}

/// Bits per weight of ggml's block formats (`ggml-common.h` in llama.cpp: block bytes · 8 / weights).
const BITS: [(&str, f64); 34] = [
    ("Q4_0", 4.5),
    ("Q4_1", 5.0),
    ("Q5_0", 5.5),
    ("Q5_1", 6.0),
    ("Q8_0", 8.5),
    ("Q4_K", 4.5),
    ("Q5_K", 5.5),
    ("Q6_K", 6.5625),
    ("Q2_K", 2.625),
    ("Q3_K", 3.4375),
    ("IQ4_NL", 4.5),
    ("IQ4_XS", 4.25),
    ("IQ1_S", 1.5625),
    ("IQ1_M", 1.75),
    ("IQ2_XXS", 2.0625),
    ("IQ2_XS", 2.3125),
    ("IQ2_S", 2.5625),
    ("IQ3_XXS", 3.0625),
    ("IQ3_S", 3.4375),
    ("TQ1_0", 1.6875),
    ("TQ2_0", 2.0625),
    ("Q1_0", 1.125),
    ("Q2_0", 2.25),
    ("MXFP4", 4.25),
    // of safetensors, with a scale and a bias of 16 bits for 64 weights, or a scale alone
    ("INT4", 4.5),
    ("AFFINE2", 2.5),
    ("AFFINE3", 3.5),
    ("AFFINE4", 4.5),
    ("AFFINE6", 6.5),
    ("AFFINE8", 8.5),
    ("NVFP4", 4.5),
    ("F16", 16.0),
    ("BF16", 16.0),
    ("F32", 32.0),
];

/// `--quant auto`, the default: no matrix of a quantized source loses bits (q4k has 4.5, q8 8.5).
#[test]
fn no_matrix_gets_fewer_bits_than_the_source_has() {
    let dir = tempfile::tempdir().unwrap();
    let demo = dir.path().join("demo");
    let model = emberflow_engine::demo_container(emberflow_models::demo::Demo::Dense).unwrap();
    crate::export::export(&model, &demo, &mut |_, _| {}).unwrap();
    let source = emberflow_models::open(&demo).unwrap();
    let decided = |name: &dyn Fn(&TensorInfo) -> &'static str| {
        let labelled = Labelled::new(source.as_ref(), name);
        by_source::decided(&labelled, &PackOptions::as_source())
    };
    let matrices = || source.tensors().iter().filter(|t| t.rows > 1);
    for (name, bits) in BITS {
        let options = decided(&|_| name);
        for tensor in matrices() {
            let dtype = options.dtype_of(tensor.id);
            let has = 8.0 * dtype.row_bytes(256) as f64 / 256.0;
            let float = bits >= 16.0;
            let expected = match (name, mix::is_embedding(tensor.id.role)) {
                ("Q4_0" | "INT4", _) => DType::Q4,
                (_, _) if bits <= 4.5 && !name.ends_with("FP4") => DType::Q4k,
                (_, false) if float => DType::Q4k,
                _ => DType::Q8,
            };
            assert_eq!(dtype, expected, "{name}: {}", tensor.id);
            assert!(float || has >= bits, "{name}: {}: {has}", tensor.id);
        }
    }
    // As in llama.cpp's Q4_K_M: V and Down in Q6_K, the others in Q4_K.
    let options = decided(&|t| match t.id.role {
        Role::V | Role::Down | Role::Embed => "Q6_K",
        _ => "Q4_K",
    });
    for tensor in matrices() {
        let expected = match tensor.id.role {
            Role::Q | Role::K | Role::O => DType::Q4k,
            _ => DType::Q8,
        };
        assert_eq!(options.dtype_of(tensor.id), expected, "{}", tensor.id);
    }
    // An explicit option overrides the source's formats.
    let asked = PackOptions {
        attention: DType::F16,
        by_source: BySource {
            attention: false,
            ..BySource::ALL
        },
        ..PackOptions::as_source()
    };
    let labelled = Labelled::new(source.as_ref(), |_| "Q8_0");
    let options = by_source::decided(&labelled, &asked);
    assert_eq!((options.ffn, options.attention), (DType::Q8, DType::F16));
    assert_eq!(PackOptions::new(DType::Q4).ffn, DType::Q4);
}

#[test]
fn the_report_tells_bits_and_formats() {
    let dir = tempfile::tempdir().unwrap();
    let models = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/models");
    let packed = |name: &str| {
        let (source, output) = (Path::new(models).join(name), dir.path().join("m.ember"));
        let options = PackOptions {
            force: true,
            ..PackOptions::as_source()
        };
        pack(&source, &output, &options, &mut |_, _| {}).unwrap()
    };
    let report = packed("llama2");
    assert_eq!(report.source_bits_per_weight, 32.0);
    assert!(report.bits_per_weight < 10.0, "{report:?}");
    let mixed = report.mixed.unwrap();
    assert!(mixed.source_is_float && mixed.asked_bytes.is_none());
    assert_eq!(mixed.ffn, "q4k");
    assert!(mixed.is_below(DType::Q8) && !mixed.is_below(DType::Q4k));
    // Columns that are no multiple of 32 are packed in q8.
    let eights = packed("qwen3_5_moe").mixed.unwrap();
    assert!(!eights.is_below(DType::Q8), "{eights:?}");
    let moe = packed("gpt_oss");
    assert_eq!(moe.mixed.unwrap().ffn, "mxfp4");
    assert!(moe.source_bits_per_weight < 32.0);
}

/// Σ(w − ŵ)² / Σw² of a container's weights in a format, of all rows.
fn squared_error(path: &Path, source: &dyn Checkpoint, dtype: DType) -> f64 {
    let container = emberflow_storage::container::Container::open(path).unwrap();
    let packed = crate::packed::Packed::new(&container).unwrap();
    let (mut errors, mut squares) = (0.0, 0.0);
    let mut add = |id: TensorId, row: usize, stored: &[f32]| {
        let mut values = vec![0.0; stored.len()];
        source.read_rows(id, row, 1, &mut values).unwrap();
        for (w, r) in values.iter().zip(stored) {
            errors += f64::from(w - r).powi(2);
            squares += f64::from(*w).powi(2);
        }
    };
    for info in source.tensors().iter().filter(|t| !t.id.role.is_bundled()) {
        let want = emberflow_models::names::Required {
            id: info.id,
            rows: info.rows,
            cols: info.cols,
        };
        let mut each = |row, stored: emberflow_kernels::Row<'_>, values: &[f32]| {
            if stored.dtype() == dtype {
                add(info.id, row, values);
            }
            Ok(())
        };
        packed.rows(want, &mut each).unwrap();
    }
    for (bank, of) in container.banks().iter().enumerate() {
        let mut each = |n, neuron: &crate::packed::Neuron| {
            for (role, values) in neuron.vectors() {
                let (layer, expert) = (of.layer, of.expert);
                add(
                    TensorId {
                        role,
                        layer,
                        expert,
                    },
                    n,
                    values,
                );
            }
            Ok(())
        };
        packed.neurons(bank, &mut each).unwrap();
    }
    errors / squares
}

#[test]
fn the_report_tells_the_rounding_error() {
    let dir = tempfile::tempdir().unwrap();
    let (demo, output) = (dir.path().join("demo"), dir.path().join("m.ember"));
    let model = emberflow_engine::demo_container(emberflow_models::demo::Demo::Dense).unwrap();
    crate::export::export(&model, &demo, &mut |_, _| {}).unwrap();
    let source = emberflow_models::open(&demo).unwrap();
    let packed = |options: PackOptions| {
        let options = PackOptions {
            force: true,
            ..options
        };
        pack(&demo, &output, &options, &mut |_, _| {})
            .unwrap()
            .rounding
    };
    let mut found = BTreeMap::new();
    for dtype in [DType::Q4, DType::Q4c, DType::Q8c] {
        let rounding = packed(PackOptions::new(dtype));
        let its = |of: &&RoundingError| of.format == dtype.name();
        let its = rounding.iter().find(its).unwrap().relative_squared;
        let all = squared_error(&output, source.as_ref(), dtype);
        assert!((its / all - 1.0).abs() < 0.1, "{dtype}: {its} of {all}");
        found.insert(dtype.name(), its);
    }
    assert!(found["q8c"] < 0.1 * found["q4c"], "{found:?}");
    // What calibration has rounded is compared with the source too.
    let text = "One text of some length, and then another one. ".repeat(40);
    let calibrated = packed(PackOptions {
        calibrate: Some(CalibrationText {
            source: Arc::new(Source::of(text.into_bytes())),
            tokens: 64,
        }),
        ..PackOptions::new(DType::Q4)
    });
    let its = calibrated.iter().find(|of| of.format == "q4").unwrap();
    let all = squared_error(&output, source.as_ref(), DType::Q4);
    assert!(
        (its.relative_squared / all - 1.0).abs() < 0.1,
        "{its:?} {all}"
    );
    assert!(its.relative_squared != found["q4"]);
    // Bundled weights have 8 bits already, and floats hold them.
    for (dtype, most) in [(DType::Q8, 1e-12), (DType::F32, 0.0)] {
        let rounding = packed(PackOptions::new(dtype));
        assert!(
            rounding.iter().all(|of| of.relative_squared <= most),
            "{rounding:?}"
        );
    }
}

/// What `plan` shows for a `config.json` is what `pack` makes, where the configuration says what is quantized.
#[test]
fn a_described_container_by_rows_is_the_packed_one() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("m.ember");
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/models");
    let mut seen = 0;
    for (name, options) in [
        ("gpt_oss", PackOptions::as_source()),
        ("gpt_oss", PackOptions::keep()),
        ("qwen3", PackOptions::as_source()),
    ] {
        let folder = models.join(name);
        let options = PackOptions {
            force: true,
            ..options
        };
        pack(&folder, &output, &options, &mut |_, _| {}).unwrap();
        let packed = emberflow_storage::container::Container::open(&output).unwrap();
        let planned = described(&folder.join("config.json"), &options).unwrap();
        for entry in packed.tensors() {
            let of = planned.tensor(&entry.name).unwrap();
            let [a, b] = [entry, of].map(|of| DType::from_code(of.dtype).unwrap());
            assert_eq!((a, entry.dims()), (b, of.dims()), "{name}: {}", entry.name);
            seen += usize::from(a != DType::F32);
        }
    }
    assert!(seen > 20, "{seen}");
}
