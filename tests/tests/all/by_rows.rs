//! Containers whose matrices lie by rows, beside the checkpoints that they were packed from.

use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use emberflow::pack::{PackOptions, PackReport, pack};
use emberflow_engine::{Engine, Lab, Logits, Model, Options, unpacked};
use emberflow_kernels::DType;
use emberflow_models::Bands;
use emberflow_models::names::{Role, TensorId};
use emberflow_storage::container::Container;
use emberflow_tests::{all_logits, bits, case, fixtures, one_per_family, open, roomy, squeeze};

fn packed(checkpoint: &Path, dir: &Path, options: &PackOptions) -> (PathBuf, PackReport) {
    let output = dir.join("model.ember");
    let options = PackOptions {
        force: true,
        ..options.clone()
    };
    let report = pack(checkpoint, &output, &options, &mut |_, _| {}).unwrap();
    (output, report)
}

/// Options with small tiles, and with projections and the head on disk.
fn streams(context: usize) -> Options {
    let roomy = roomy(context);
    Options {
        lab: Lab {
            tile: 6 << 10,
            streams: true,
            ..roomy.lab.clone()
        },
        ..roomy
    }
}

/// A checkpoint of each family, in floats and in blocks, copied: the same tensors and the same logits, whatever is on disk.
#[test]
fn a_copy_has_the_bits_of_its_checkpoint() {
    const LEN: usize = 12;
    let dir = tempfile::tempdir().unwrap();
    let blocks = [
        "llama2/model-q8_0.gguf",
        "llama2/model-q4_0.gguf",
        "deepseek_v4_release/model-converted.gguf",
        "deepseek_v3/stacked.safetensors",
    ];
    let blocks = blocks.map(case);
    let (mut families, mut on_disk, mut in_blocks, mut converted) = (0, 0, 0, 0);
    for path in one_per_family().into_iter().chain(blocks) {
        let (file, report) = packed(&path, dir.path(), &PackOptions::keep());
        let (copy, own) = (
            Container::open(&file).unwrap(),
            unpacked(&path, Bands::Small).unwrap(),
        );
        assert_eq!(copy.tensors().len(), own.tensors().len());
        let mut other = 0;
        for of in own.tensors() {
            let found = copy.tensor(of.name()).unwrap();
            assert_eq!(found.dims(), of.dims(), "{path:?}");
            // Of MXFP4 and FP8 whose scales lie elsewhere.
            other += usize::from(found.dtype != of.dtype);
            in_blocks += usize::from(DType::from_code(of.dtype).unwrap().is_blocks());
        }
        if other > 0 {
            converted += 1;
            continue;
        }
        assert!(report.rounding.is_empty(), "{path:?}");
        let model = Model::of_checkpoint(&path).unwrap();
        let mut engine = Engine::open(model, roomy(LEN)).unwrap();
        let mut random = fastrand::Rng::with_seed(3);
        let vocab = engine.config().vocab;
        let tokens: Vec<u32> = (0..LEN).map(|_| random.u32(..vocab)).collect();
        let expected = bits(&all_logits(&mut engine, &tokens, 5));
        for options in [roomy(LEN), streams(LEN)] {
            let mut engine = open(&file, options);
            on_disk += usize::from(engine.needs().streamed > 0);
            for share in [1.0, 0.0] {
                squeeze(&mut engine, share);
                let found = bits(&all_logits(&mut engine, &tokens, 5));
                assert!(found == expected, "{path:?} at {share}");
            }
        }
        families += 1;
    }
    let enough = families > 60 && on_disk > 60 && in_blocks > 20 && converted < 5;
    assert!(enough, "{families} {on_disk} {in_blocks} {converted}");
}

/// By default a model in whose FFN every neuron is active lies by rows, in its own blocks and bytes; one with zeros in bundles.
#[test]
fn what_is_quantized_keeps_its_blocks() {
    let dir = tempfile::tempdir().unwrap();
    let auto = PackOptions::as_source();
    let (file, report) = packed(&case("llama2").join("model-q8_0.gguf"), dir.path(), &auto);
    assert_eq!(report.bits_per_weight, report.source_bits_per_weight);
    assert!(report.rounding.is_empty(), "{:?}", report.rounding);
    let copy = Container::open(&file).unwrap();
    assert!(copy.banks().is_empty());
    let down = TensorId::layer(Role::Down, 0).to_string();
    let down = copy.tensor(&down).unwrap();
    assert!(DType::from_code(down.dtype).unwrap().is_blocks());
    // Floats get the formats that they get in bundles.
    let (file, _) = packed(&case("qwen3"), dir.path(), &auto);
    let copy = Container::open(&file).unwrap();
    let of = |role| copy.tensor(&TensorId::layer(role, 0).to_string()).unwrap();
    let four_bits = DType::Q4k.code();
    assert_eq!(
        [Role::Gate, Role::Down, Role::Q].map(|r| of(r).dtype),
        [four_bits; 3]
    );
    let (file, _) = packed(&case("opt"), dir.path(), &auto);
    assert!(!Container::open(&file).unwrap().banks().is_empty());
}

/// The quantized folders, whose weights products cannot read: no more than the rounding of formats that have as many bits.
#[test]
fn quantized_folders_lie_by_rows_in_as_many_bits() {
    let dir = tempfile::tempdir().unwrap();
    let folders = std::fs::read_dir(fixtures().join("quantized")).unwrap();
    let mut seen = 0;
    for folder in folders.map(|entry| entry.unwrap().path()) {
        let (file, report) = packed(&folder, dir.path(), &PackOptions::as_source());
        assert!(
            Container::open(&file).unwrap().banks().is_empty(),
            "{folder:?}"
        );
        let worst = report.rounding.iter().map(|of| of.relative_squared);
        assert!(
            worst.fold(0.0, f64::max) < 0.01,
            "{folder:?}: {:?}",
            report.rounding
        );
        let mut engine = open(&file, roomy(8));
        assert!(
            all_logits(&mut engine, &[1, 2, 3], 2)
                .iter()
                .all(|x| x.is_finite())
        );
        seen += 1;
    }
    assert!(seen > 10, "{seen}");
}

/// A pack that could not end resumes: what is complete is not written again, what is damaged is.
#[test]
fn an_interrupted_pack_resumes() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = case("llama2").join("model-q8_0.gguf");
    let (whole, _) = packed(&checkpoint, dir.path(), &PackOptions::as_source());
    let expected = std::fs::read(whole).unwrap();
    let output = dir.path().join("again.ember");
    let options = PackOptions {
        durable_bytes: 1,
        ..PackOptions::as_source()
    };
    let mut appears = |done, total| {
        if done == total {
            std::fs::write(&output, "another file").unwrap();
        }
    };
    pack(&checkpoint, &output, &options, &mut appears).unwrap_err();
    std::fs::remove_file(&output).unwrap();
    // A byte of the last tensor.
    let partial = dir.path().join("again.ember.partial");
    let mut file = std::fs::File::options()
        .read(true)
        .write(true)
        .open(&partial)
        .unwrap();
    let last = Container::open(dir.path().join("model.ember")).unwrap();
    let last = last.tensors().last().unwrap().clone();
    flip(&mut file, last.offset);
    let report = pack(&checkpoint, &output, &options, &mut |_, _| {}).unwrap();
    let tensors = Container::open(&output).unwrap().tensors().len();
    assert_eq!(report.resumed_units, tensors - 1);
    assert!(std::fs::read(&output).unwrap() == expected);
}

fn flip(file: &mut std::fs::File, at: u64) {
    let mut byte = [0];
    file.seek(SeekFrom::Start(at)).unwrap();
    file.read_exact(&mut byte).unwrap();
    file.seek(SeekFrom::Start(at)).unwrap();
    file.write_all(&[byte[0] ^ 16]).unwrap();
}

/// A damaged byte of any matrix is an error that names its tensor: when it is loaded, or when the tile is read. `verify` finds
/// it, too.
#[test]
fn a_damaged_byte_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = case("gpt_oss").join("model.gguf");
    let (path, _) = packed(&checkpoint, dir.path(), &PackOptions::as_source());
    let tensors = Container::open(&path).unwrap().tensors().to_vec();
    let (mut tiles, mut streamed) = (0, 0);
    for role in [Role::Gate, Role::Down, Role::Q, Role::Head] {
        let of_role = |id: TensorId| id.role == role;
        let tensor = tensors
            .iter()
            .rfind(|of| of.name().parse().is_ok_and(of_role));
        let tensor = tensor.unwrap();
        let mut file = std::fs::File::options()
            .read(true)
            .write(true)
            .open(&path)
            .unwrap();
        let at = tensor.offset + tensor.len - 1;
        flip(&mut file, at);
        for options in [roomy(64), streams(64)] {
            let container = Container::open(&path).unwrap();
            let report = container.verify(&mut |_, _| {}).unwrap();
            assert_eq!(report.problem_count, 1);
            assert!(report.problems[0].what.contains(tensor.name()));
            let on_disk = options.lab.streams;
            let error = match Engine::open(Model::open(container).unwrap(), options) {
                Err(error) => error,
                Ok(mut engine) => {
                    let mut sequence = engine.new_sequence().unwrap();
                    let mut random = fastrand::Rng::with_seed(3);
                    // All experts of the last layer are visited.
                    let tokens: Vec<u32> = (0..60).map(|_| random.u32(..90)).collect();
                    tiles += usize::from(role == Role::Gate || role == Role::Down);
                    streamed += usize::from(on_disk && (role == Role::Q || role == Role::Head));
                    let outcome = engine.forward(&mut sequence, &tokens, Logits::Last);
                    outcome.expect_err(tensor.name())
                }
            };
            let text = error.to_string();
            assert!(text.contains(tensor.name()), "{text}");
        }
        flip(&mut file, at);
    }
    assert_eq!((tiles, streamed), (4, 2));
}
