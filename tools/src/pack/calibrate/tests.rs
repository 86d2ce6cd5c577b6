//! Layers run one by one give the same values as the whole model, and an interrupted run resumes.

use std::path::{Path, PathBuf};

use emberflow_engine::{Budget, Engine, FfnSeen, Lab, Logits, Model, Options};
use emberflow_kernels::DType;
use emberflow_models::config::ModelConfig;

use super::*;
use crate::pack::write::write;

fn fixture(name: &str) -> PathBuf {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/models");
    models.join(name)
}

fn windows(c: &ModelConfig) -> Vec<Vec<u32>> {
    let token = |i: u32| (i * 37 + i * i * 5) % c.vocab;
    vec![(0..29).map(token).collect(), (40..53).map(token).collect()]
}

fn job<'a>(
    source: &'a dyn Checkpoint,
    options: &'a PackOptions,
    folder: &Path,
) -> (Calibrator<'a>, Stream) {
    let windows = windows(source.config());
    let vocabulary = stream::vocabulary(source.config(), &windows);
    let stream = Stream::embed(source, options, &windows, &vocabulary).unwrap();
    let job = Calibrator {
        source,
        options,
        on: Compute::new(1, None),
        vocabulary,
        folder: folder.to_path_buf(),
        name: "test".into(),
    };
    (job, stream)
}

/// The inputs of all FFNs when the whole model runs at once, by layer.
fn whole(source: &dyn Checkpoint, options: &PackOptions, folder: &Path) -> Vec<Vec<f32>> {
    let path = folder.join("whole.ember");
    write(source, &path, options, None, &mut |_, _| {}).unwrap();
    let options = Options {
        context: 64,
        lab: Lab {
            chunk: 64,
            ..Lab::default()
        },
        ..Options::new(Budget::Auto)
    };
    let mut engine = Engine::open(Model::load(&path).unwrap(), options).unwrap();
    let mut inputs = vec![Vec::new(); source.config().layers as usize];
    for window in windows(source.config()) {
        let mut sequence = engine.new_sequence().unwrap();
        let mut observer = |seen: &FfnSeen<'_>| inputs[seen.layer].extend_from_slice(seen.x);
        (engine.forward_observed(&mut sequence, &window, Logits::None, &mut observer)).unwrap();
    }
    inputs
}

#[test]
fn layers_of_several_streams_read_what_they_read_in_the_whole_model() {
    let mut shared = 0;
    for name in ["gemma3n", "deepseek_v4", "qwen4_exp", "qwen4_exp_plain"] {
        let dir = tempfile::tempdir().unwrap();
        let source = emberflow_models::open(&fixture(name)).unwrap();
        let options = PackOptions::new(DType::F32);
        let expected = whole(source.as_ref(), &options, dir.path());
        let (job, mut stream) = job(source.as_ref(), &options, dir.path());
        let wanted = PassInputs {
            visits: true,
            advance: true,
            ..PassInputs::default()
        };
        let rows = LayerRows::default();
        for (number, expected) in (0..).zip(&expected) {
            let layer = OneLayer::new(job.place(number), &rows, true);
            shared += u32::from(layer.shares().is_some());
            let seen = job.pass(&layer, &mut stream, wanted).unwrap();
            assert!(
                seen.visits.unwrap().x == *expected,
                "{name}: layer {number}"
            );
        }
    }
    assert!(shared > 1);
}

#[test]
fn a_stopped_run_knows_the_keys_and_values_that_are_shared() {
    let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let source = emberflow_models::open(&fixture("gemma3n")).unwrap();
    let options = PackOptions::new(DType::Q4);
    let [(whole, mut stream), (stopped, mut early)] = dirs
        .each_ref()
        .map(|dir| job(source.as_ref(), &options, dir.path()));
    let layers = source.config().layers;
    assert_eq!(whole.all_layers(&mut stream).unwrap(), 0);
    // Stopped after the layers that have their own keys and values.
    let begun = layers - 2;
    for layer in 0..begun {
        let rows = stopped.layer(layer, &mut early).unwrap();
        rows.save(&stopped.file(layer)).unwrap();
    }
    early
        .save(&stopped.folder.join("test-stream"), begun)
        .unwrap();
    let (again, mut late) = job(source.as_ref(), &options, dirs[1].path());
    assert_eq!(again.all_layers(&mut late).unwrap(), begun);
    assert!(early.stored.len() == 2 && early.stored == late.stored);
    for layer in 0..layers {
        let bytes = |job: &Calibrator<'_>| std::fs::read(job.file(layer)).unwrap();
        assert!(bytes(&whole) == bytes(&again), "layer {layer}");
    }
}
