//! A pack that was stopped anywhere goes on, to the same bytes, whatever the family; sizes that are
//! asked for.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use emberflow_kernels::DType;
use emberflow_models::config::ModelConfig;
use emberflow_models::names::TensorId;
use emberflow_models::{Checkpoint, SamplingDefaults, TensorInfo};

use super::*;

/// A checkpoint that fails after so many reads.
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
    fn named_tokens(&self) -> std::collections::BTreeMap<String, String> {
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

fn fixtures() -> Vec<PathBuf> {
    let models = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/models");
    let entries = std::fs::read_dir(models).unwrap();
    let mut folders: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    folders
}

fn options() -> PackOptions {
    PackOptions {
        durable_bytes: 1,
        threads: 1,
        ..PackOptions::new(DType::Q8)
    }
}

/// Packs four times, of which the first three fail, the first one after half of all reads. Returns the last
/// report.
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
fn every_calibrated_family_goes_on_too() {
    let dir = tempfile::tempdir().unwrap();
    let [whole, stopped] = ["whole.ember", "stopped.ember"].map(|n| dir.path().join(n));
    let text = "One text of some length, and then another one. ".repeat(40);
    let calibrated = PackOptions {
        calibrate: Some(CalibrationText {
            source: Arc::new(Source::of(text.into_bytes())),
            tokens: 64,
        }),
        ..options()
    };
    let mut families = std::collections::BTreeSet::new();
    for folder in fixtures() {
        let source = emberflow_models::open(&folder).unwrap();
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
        families.insert(source.config().family.clone());
    }
    let ungated = ["opt", "nemotron", "falcon", "starcoder2"];
    let others = ["llama", "phi3", "olmo2", "granite", "gemma2", "smollm3"];
    for family in ungated.iter().chain(&others) {
        assert!(families.contains(*family), "{families:?}");
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
    // The bundled weights have eight bits: more take away no error.
    let most = packed(12_000_000).unwrap().bytes;
    assert!(most < 11_900_000, "{most}");
    for size in [6_700_000, 7_000_000, 7_500_000, 8_200_000] {
        let report = packed(size).unwrap();
        let share = report.bytes as f64 / size as f64;
        assert!((0.98..=1.0).contains(&share), "{size}: {report:?}");
        assert_eq!(report.bytes, std::fs::metadata(&output).unwrap().len());
        assert_eq!(report.mixed.unwrap().asked_bytes, size);
    }
    // neurons in q8 would leave the others less than they need
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
