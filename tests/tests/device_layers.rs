//! A device with a memory of its own that has all weights computes the layers of a pass one after the other, and changes
//! no bit: whatever the family, whichever texts, and when it fails in the middle or gives other bits.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use emberflow_engine::device::Device;
use emberflow_engine::{DeviceAttention, Engine, Logits, Model, Options, Sequence, Span, Sparsity};
use emberflow_kernels::DType;
use emberflow_tests::devices::{Fault, Faulty, plain_devices_apart};
use emberflow_tests::{all_logits, bits, fixtures, open, packed, roomy};

fn text(len: u32, vocab: u32) -> Vec<u32> {
    (0..len).map(|i| (40 + i * 31) % vocab).collect()
}

/// Whole passes, whatever their times.
fn forced(device: Device, options: Options) -> Options {
    Options {
        device: Some(device),
        device_attention: DeviceAttention::On,
        ..options
    }
}

/// The devices that compute whole layers; so fast that they get all that they hold.
fn devices(fault: Fault, left: &Arc<AtomicUsize>) -> Vec<Device> {
    let chains = |device: &Device| device.lease().unwrap().dense().chains();
    let all = plain_devices_apart();
    let of_them: Vec<_> = all.iter().filter(|device| chains(device)).collect();
    let needed = std::env::var_os("EMBERFLOW_NEEDS_OPENCL").is_some();
    assert!(!(needed && of_them.is_empty()), "no device computes layers");
    let of_them = of_them.into_iter();
    of_them
        .map(|device| Faulty::armed_by(device, fault, Arc::clone(left)))
        .collect()
}

fn never() -> Arc<AtomicUsize> {
    Arc::new(AtomicUsize::new(usize::MAX - 1))
}

/// Logits of every position behind `first`: a prompt, then one token at a time.
fn decoded(engine: &mut Engine, tokens: &[u32], first: usize) -> Vec<u32> {
    let mut sequence = engine.new_sequence().unwrap();
    for part in tokens[..first].chunks(16) {
        engine.forward(&mut sequence, part, Logits::None).unwrap();
    }
    one_by_one(engine, &mut sequence, &tokens[first..])
}

fn one_by_one(engine: &mut Engine, sequence: &mut Sequence, tokens: &[u32]) -> Vec<u32> {
    let mut out = Vec::new();
    for token in tokens.chunks(1) {
        let mut sink = |_: usize, logits: &[f32]| out.extend_from_slice(logits);
        engine
            .forward(sequence, token, Logits::Each(&mut sink))
            .unwrap();
    }
    bits(&out)
}

#[test]
fn families_change_no_bit() {
    let dir = tempfile::tempdir().unwrap();
    for (name, dtype, kv, whole) in [
        ("llama3", DType::Q4, DType::F16, true),
        ("qwen3", DType::Q8, DType::F32, true),
        // Windows.
        ("mistral", DType::F16, DType::F16, true),
        // Rotation in some layers alone.
        ("smollm3", DType::Q4, DType::F16, true),
        ("bamboo", DType::BF16, DType::F16, true),
        // Biases of Q, K and V.
        ("qwen2", DType::F32, DType::F16, true),
        // What lies elsewhere: norms behind attention and FFN, biases of the FFN, both beside each other.
        ("olmo2", DType::Q4, DType::F16, false),
        ("starcoder2_bias", DType::Q4, DType::F16, false),
        ("falcon_sparse", DType::Q4, DType::F16, false),
    ] {
        let path = packed(&fixtures().join("models").join(name), dir.path(), dtype);
        let options = || Options {
            kv,
            chunk: 16,
            ..roomy(300)
        };
        let mut plain = open(&path, options());
        let tokens = text(290, plain.config().vocab);
        let vocab = plain.config().vocab as usize;
        let expected = bits(&all_logits(&mut plain, &tokens, 16)[250 * vocab..]);
        for device in devices(Fault::Never, &never()) {
            let mut engine = open(&path, forced(device, options()));
            let found = decoded(&mut engine, &tokens, 250);
            let report = engine.device().unwrap();
            assert!(found == expected, "{name}: {report:?}");
            // The first pass is computed both ways.
            assert_eq!(report.whole_passes, if whole { 39 } else { 0 }, "{name}");
        }
    }
}

/// Texts that share pages and come and go, of which the device sees more at once than one.
#[test]
fn batches_and_forks_are_what_each_text_is_alone() {
    let options = || Options {
        batch: 4,
        chunk: 16,
        context: 130,
        ..roomy(130)
    };
    let dir = tempfile::tempdir().unwrap();
    let path = packed(&fixtures().join("models/llama2"), dir.path(), DType::Q4);
    let mut plain = open(&path, options());
    let vocab = plain.config().vocab as usize;
    let (start, ends) = (
        text(70, 300),
        [3, 50, 60, 77].map(|n| text(40 + n, 290)[n as usize..].to_vec()),
    );
    let texts = ends.map(|end| [start.as_slice(), &end].concat());
    let expected = texts
        .each_ref()
        .map(|text| all_logits(&mut plain, text, 16));
    for device in devices(Fault::Never, &never()) {
        let mut engine = open(&path, forced(device, options()));
        let mut first = engine.new_sequence().unwrap();
        for part in start.chunks(16) {
            engine.forward(&mut first, part, Logits::None).unwrap();
        }
        let forks = (0..3).map(|_| first.fork().unwrap());
        let mut sequences: Vec<_> = forks.collect();
        sequences.insert(0, first);
        for live in [4, 2, 3, 1, 4, 4] {
            let at: Vec<usize> = sequences[..live].iter().map(Sequence::len).collect();
            let mut spans: Vec<_> = (sequences.iter_mut().zip(&texts).zip(&at))
                .map(|((sequence, text), &at)| Span {
                    sequence,
                    tokens: &text[at..=at],
                })
                .collect();
            let mut found = Vec::new();
            let mut sink = |_: usize, logits: &[f32]| found.extend_from_slice(logits);
            engine
                .forward_batch(&mut spans, Logits::Each(&mut sink))
                .unwrap();
            for (i, found) in found.chunks(vocab).enumerate() {
                let expected = &expected[i][at[i] * vocab..][..vocab];
                assert!(bits(found) == bits(expected), "text {i} of {live}");
            }
        }
        // A text that goes back, and a prompt in chunks between its tokens.
        let (text, logits) = (&texts[2], &expected[2]);
        let sequence = &mut sequences[2];
        sequence.truncate(30);
        let behind = |from: usize| bits(&logits[from * vocab..]);
        assert!(one_by_one(&mut engine, sequence, &text[30..]) == behind(30));
        sequence.truncate(35);
        engine
            .forward(sequence, &text[35..50], Logits::None)
            .unwrap();
        assert!(one_by_one(&mut engine, sequence, &text[50..]) == behind(50));
        assert!(engine.device().unwrap().whole_passes > 100);
    }
}

/// The CPU goes on with the same text.
#[test]
fn a_device_lost_in_the_middle_changes_no_bit() {
    let options = || Options {
        chunk: 16,
        ..roomy(120)
    };
    let dir = tempfile::tempdir().unwrap();
    let path = packed(&fixtures().join("models/llama2"), dir.path(), DType::Q4);
    let (tokens, mut plain) = (text(60, 300), open(&path, options()));
    let vocab = plain.config().vocab as usize;
    let expected = bits(&all_logits(&mut plain, &tokens, 16)[40 * vocab..]);
    for (fault, lost_at) in [
        (Fault::Chain, 0),
        (Fault::Chain, 1),
        (Fault::Chain, 9),
        (Fault::TakeChain, 0),
        (Fault::TakeChain, 14),
    ] {
        let left = never();
        for device in devices(fault, &left) {
            let mut engine = open(&path, forced(device, options()));
            left.store(lost_at, Ordering::Relaxed);
            for _ in 0..2 {
                let found = decoded(&mut engine, &tokens, 40);
                assert!(found == expected, "{fault:?} at {lost_at}");
            }
            let report = engine.device().unwrap();
            let lost = report.lost.as_deref().unwrap_or_default();
            assert!(
                lost.contains("was reset"),
                "{fault:?} at {lost_at}: {report:?}"
            );
            // The first pass is computed both ways.
            assert_eq!(report.whole_passes, lost_at.saturating_sub(1) as u64);
            left.store(usize::MAX - 1, Ordering::Relaxed);
        }
    }
}

/// Other bits are found by the first pass, which stays as it was.
#[test]
fn other_bits_are_refused() {
    let options = || Options {
        chunk: 16,
        ..roomy(64)
    };
    let dir = tempfile::tempdir().unwrap();
    let path = packed(&fixtures().join("models/llama2"), dir.path(), DType::Q4);
    let (tokens, mut plain) = (text(50, 300), open(&path, options()));
    let vocab = plain.config().vocab as usize;
    let expected = bits(&all_logits(&mut plain, &tokens, 16)[20 * vocab..]);
    for device in devices(Fault::OffChain, &never()) {
        let mut engine = open(&path, forced(device, options()));
        assert!(decoded(&mut engine, &tokens, 20) == expected);
        assert_eq!(engine.device().unwrap().whole_passes, 0);
    }
}

/// Layers of which a device has some clusters are not computed as if it had all.
#[test]
fn a_device_that_lacks_clusters_computes_no_whole_passes() {
    let options = || Options {
        sparsity: Sparsity::Exact,
        chunk: 16,
        ..roomy(64)
    };
    let demo = |options| Engine::open(Model::demo().unwrap(), options).unwrap();
    let (tokens, mut plain) = (text(50, 900), demo(options()));
    let vocab = plain.config().vocab as usize;
    let expected = bits(&all_logits(&mut plain, &tokens, 16)[20 * vocab..]);
    // So fast that it gets nearly all; with its own times a device holds what helps.
    let chains = |device: &Device| device.lease().unwrap().dense().chains();
    let own = plain_devices_apart().into_iter().filter(chains);
    for device in devices(Fault::Never, &never()).into_iter().chain(own) {
        let mut engine = demo(forced(device, options()));
        assert!(decoded(&mut engine, &tokens, 20) == expected);
        let report = engine.device().unwrap();
        assert_eq!(report.attention.none, None);
        let (all, whole) = (report.ffn_share == 1.0, report.whole_passes > 0);
        assert_eq!(all, whole, "{report:?}");
    }
}
