//! `pack --calibrate` on every family: the container is valid, and closer to the source.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use emberflow::pack::{self, CalibrationText, PackOptions};
use emberflow::packed::Packed;
use emberflow::verify;
use emberflow::windows::Source;
use emberflow_kernels::DType;
use emberflow_storage::container::Container;
use emberflow_tests::{Golden, all_logits, one_per_family, open, packed, roomy};

/// Tokens of the held-out text to calibrate with.
const TOKENS: u32 = 1024;

fn calibrated(folder: &Path, dir: &Path) -> PathBuf {
    let text = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo/heldout.txt");
    let output = dir.join("calibrated.ember");
    let options = PackOptions {
        calibrate: Some(CalibrationText {
            source: Arc::new(Source::open(text.as_ref()).unwrap()),
            tokens: TOKENS,
        }),
        force: true,
        ..PackOptions::new(DType::Q4)
    };
    let report = pack::pack(folder, &output, &options, &mut |_, _| {}).unwrap();
    assert!(report.calibrated.is_some());
    output
}

/// The root mean square of the differences.
fn off(a: &[f32], b: &[f32]) -> f64 {
    let squares = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2));
    (squares.sum::<f64>() / a.len() as f64).sqrt()
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn every_family_is_nearer_to_its_source_than_plain_rounding() {
    let (mut families, mut logarithms) = (0, Vec::new());
    for folder in one_per_family() {
        let source = emberflow_models::open(&folder).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let output = calibrated(&folder, dir.path());
        families += 1;
        let container = Container::open(&output).unwrap();
        let report = container.verify(&mut |_, _| {}).unwrap();
        assert!(report.is_clean(), "{folder:?}: {report:?}");
        let own = Packed::new(&container).unwrap();
        let compared = verify::compare(&container, &own, source.as_ref(), &mut |_, _| {}).unwrap();
        assert!(compared.calibrated.unwrap().weights > 0, "{folder:?}");

        let tokens = Golden::load(&folder, "golden.json").tokens;
        let logits = |path: &Path| all_logits(&mut open(path, roomy(tokens.len())), &tokens, 16);
        let expected = logits(&packed(&folder, dir.path(), DType::F32));
        let plain = off(&logits(&packed(&folder, dir.path(), DType::Q4)), &expected);
        let rounded = off(&logits(&output), &expected);
        println!("{:?}: {rounded:.4} of {plain:.4}", folder.file_name());
        logarithms.push((rounded / plain).ln());
    }
    let mean = (logarithms.iter().sum::<f64>() / logarithms.len() as f64).exp();
    println!("{families} models, {mean:.3} of the error of plain rounding");
    // some matrices of latent attention, DeltaNets, Mamba-2 and hyper-connections are rounded without
    // calibration in both
    assert!(families > 40 && mean < 0.88, "{families} models, {mean}");
}
