//! Attention of whole layers on a device changes no bit: whatever the family, the format of keys and values, the
//! length of a text, prompts of one and of several texts, batches; and when the device fails in the middle.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use emberflow_engine::device::Device;
use emberflow_engine::{DeviceAttention, Engine, Logits, Model, Options, Sequence, Span};
use emberflow_kernels::DType;
use emberflow_tests::devices::{Fault, Faulty, plain_devices, plain_devices_apart};
use emberflow_tests::{all_logits, bits, fixtures, open, packed, roomy};

fn text(len: u32, vocab: u32) -> Vec<u32> {
    (0..len).map(|i| (40 + i * 31) % vocab).collect()
}

/// Those with the machine's memory, and those with a memory of their own.
fn devices() -> impl Iterator<Item = Device> {
    plain_devices().into_iter().chain(plain_devices_apart())
}

/// With all the attention that a device can compute. One with a memory of its own holds the projections for that.
fn forced(device: Device, options: Options) -> Options {
    Options {
        device_memory: device.facts().unified.then_some(0),
        device: Some(device),
        device_attention: DeviceAttention::On,
        ..options
    }
}

/// Logits of every position: a prompt of `prompt` tokens in chunks, then one token at a time.
fn decoded(engine: &mut Engine, tokens: &[u32], prompt: usize) -> Vec<u32> {
    let mut sequence = engine.new_sequence().unwrap();
    let mut out = Vec::new();
    let (prompt, rest) = tokens.split_at(prompt);
    for part in prompt.chunks(16).chain(rest.chunks(1)) {
        let mut sink = |_: usize, logits: &[f32]| out.extend_from_slice(logits);
        engine
            .forward(&mut sequence, part, Logits::Each(&mut sink))
            .unwrap();
    }
    bits(&out)
}

#[test]
fn families_and_lengths_change_no_bit() {
    let dir = tempfile::tempdir().unwrap();
    let cases = [
        ("llama3", DType::Q4, DType::F16),
        // Norms of heads; over all of them, with none before the projections.
        ("qwen3", DType::Q8, DType::F16),
        ("olmo2", DType::Q4, DType::F16),
        // The FFN reads the same rows, by the same norm and by another.
        ("falcon_sparse", DType::Q4, DType::F16),
        ("falcon_new_sparse", DType::Q8, DType::F32),
        // Norms, windows in some layers, which rotate otherwise.
        ("gemma3_layers", DType::F32, DType::F32),
        // Windows in all layers.
        ("mistral", DType::Q4, DType::F32),
        // Biases, of O too, and windows.
        ("qwen2", DType::F16, DType::F16),
        ("starcoder2_bias", DType::BF16, DType::F16),
        // No rotation; in some layers.
        ("opt_sparse", DType::Q4, DType::F16),
        ("smollm3", DType::Q4, DType::F32),
    ];
    for (name, dtype, kv) in cases {
        let path = packed(&fixtures().join("models").join(name), dir.path(), dtype);
        let options = || Options {
            kv,
            chunk: 16,
            ..roomy(400)
        };
        let mut plain = open(&path, options());
        let tokens = text(330, plain.config().vocab);
        let expected = bits(&all_logits(&mut plain, &tokens, 16));
        for device in devices() {
            let mut engine = open(&path, forced(device, options()));
            // The last of several blocks and pages.
            for prompt in [250, 310] {
                let found = decoded(&mut engine, &tokens, prompt);
                assert!(found == expected, "{name}: {:?}", engine.device());
            }
            let report = engine.device().unwrap();
            let layers = u64::from(engine.config().layers);
            // Chunks of prompts, and next tokens.
            let passes = 16 + 80 + 20 + 20;
            assert_eq!(report.attention.layers, passes * layers, "{name}");
            assert_eq!(report.attention.none, None);
        }
    }
}

/// Texts that share pages, and come and go.
#[test]
fn batches_are_what_each_text_is_alone() {
    let options = || Options {
        batch: 4,
        chunk: 32,
        context: 120,
        ..roomy(120)
    };
    let demo = |options| Engine::open(Model::demo().unwrap(), options).unwrap();
    let mut plain = demo(options());
    let (start, vocab) = (text(40, 900), plain.config().vocab as usize);
    let of = |n: u32| {
        let own = (0..6).map(move |i| 100 + (n * 37 + i * 11) % 700);
        start.iter().copied().chain(own).collect::<Vec<u32>>()
    };
    let texts: Vec<Vec<u32>> = (0..4).map(of).collect();
    let expected: Vec<_> = (texts.iter())
        .map(|text| bits(&all_logits(&mut plain, text, 16)))
        .collect();
    for device in devices() {
        let mut engine = demo(forced(device, options()));
        let mut first = engine.new_sequence().unwrap();
        for part in start.chunks(32) {
            engine.forward(&mut first, part, Logits::None).unwrap();
        }
        let forks = (0..3).map(|_| first.fork().unwrap());
        let mut sequences: Vec<_> = forks.collect();
        sequences.insert(0, first);
        for (step, live) in [4, 4, 2, 3, 1].into_iter().enumerate() {
            let at = |text: usize, sequences: &[Sequence]| {
                let place = sequences[text].len();
                (place, [texts[text][place]])
            };
            let tokens: Vec<_> = (0..live).map(|text| at(text, &sequences)).collect();
            let mut spans: Vec<_> = (sequences.iter_mut().zip(&tokens))
                .map(|(sequence, (_, tokens))| Span { sequence, tokens })
                .collect();
            let mut found = Vec::new();
            let mut sink = |_: usize, logits: &[f32]| found.extend_from_slice(logits);
            engine
                .forward_batch(&mut spans, Logits::Each(&mut sink))
                .unwrap();
            for (text, found) in bits(&found).chunks(vocab).enumerate() {
                let expected = &expected[text][tokens[text].0 * vocab..][..vocab];
                assert!(found == expected, "text {text} of {live}, step {step}");
            }
        }
        let report = engine.device().unwrap();
        // The start in two chunks.
        assert_eq!(
            report.attention.layers,
            7 * u64::from(engine.config().layers)
        );
    }
}

/// Prompts of several texts of different lengths in one pass, beside next tokens.
#[test]
fn prompts_of_several_texts_are_what_each_is_alone() {
    let dir = tempfile::tempdir().unwrap();
    for (name, dtype) in [("mistral", DType::Q4), ("qwen3", DType::F32)] {
        let path = packed(&fixtures().join("models").join(name), dir.path(), dtype);
        let options = || Options {
            batch: 3,
            chunk: 64,
            ..roomy(320)
        };
        let mut plain = open(&path, options());
        let vocab = plain.config().vocab as usize;
        let texts = [300, 150, 70].map(|len| text(len, vocab as u32));
        let expected = (texts.each_ref()).map(|text| bits(&all_logits(&mut plain, text, 16)));
        for device in devices() {
            let mut engine = open(&path, forced(device, options()));
            let mut sequences = [0; 3].map(|_| engine.new_sequence().unwrap());
            let mut passes = 0;
            loop {
                // So many tokens of each, as far as it has them.
                let rows = [[40, 1, 23], [1, 62, 1], [30, 30, 4]][passes % 3];
                let (mut spans, mut wanted) = (Vec::new(), Vec::new());
                for (i, sequence) in sequences.iter_mut().enumerate() {
                    let (first, text) = (sequence.len(), &texts[i]);
                    let tokens = &text[first..text.len().min(first + rows[i])];
                    if !tokens.is_empty() {
                        let logits = first * vocab..(first + tokens.len()) * vocab;
                        wanted.extend_from_slice(&expected[i][logits]);
                        spans.push(Span { sequence, tokens });
                    }
                }
                if spans.is_empty() {
                    break;
                }
                let mut found = Vec::new();
                let mut sink = |_: usize, logits: &[f32]| found.extend_from_slice(logits);
                engine
                    .forward_batch(&mut spans, Logits::Each(&mut sink))
                    .unwrap();
                assert!(bits(&found) == wanted, "{name}, pass {passes}");
                passes += 1;
            }
            let report = engine.device().unwrap();
            let layers = passes as u64 * u64::from(engine.config().layers);
            assert_eq!(report.attention.layers, layers, "{report:?}");
        }
    }
}

/// Positions that are computed again, in pages that were others' before, on a device with a copy of all pages.
#[test]
fn pages_that_change_are_copied_again() {
    let options = || Options {
        batch: 2,
        chunk: 16,
        ..roomy(320)
    };
    let demo = |options| Engine::open(Model::demo().unwrap(), options).unwrap();
    let tokens = text(300, 900);
    let (other, mut plain) = (text(200, 700), demo(options()));
    let expected = all_logits(&mut plain, &tokens, 16);
    let of_other = all_logits(&mut plain, &other, 16);
    let vocab = plain.config().vocab as usize;
    // Takes tokens up to position `end` of a text, `chunk` at a time, and compares their logits.
    let follow = |engine: &mut Engine,
                  sequence: &mut Sequence,
                  (text, logits): (&[u32], &[f32]),
                  end,
                  chunk| {
        let start = sequence.len();
        let mut found = Vec::new();
        for part in text[start..end].chunks(chunk) {
            let mut sink = |_: usize, logits: &[f32]| found.extend_from_slice(logits);
            engine
                .forward(sequence, part, Logits::Each(&mut sink))
                .unwrap();
        }
        let expected = &logits[start * vocab..end * vocab];
        assert!(bits(&found) == bits(expected), "{start} to {end}");
    };
    for device in devices() {
        let mut engine = demo(forced(device, options()));
        let (one, two) = ((&*tokens, &*expected), (&*other, &*of_other));
        let mut sequence = engine.new_sequence().unwrap();
        follow(&mut engine, &mut sequence, one, 40, 16);
        follow(&mut engine, &mut sequence, one, 60, 1);
        follow(&mut engine, &mut sequence, one, 300, 16);
        // Other tokens at positions that it had.
        sequence.truncate(0);
        follow(&mut engine, &mut sequence, two, 70, 16);
        let mut fork = sequence.fork_at(33).unwrap();
        follow(&mut engine, &mut fork, two, 150, 1);
        follow(&mut engine, &mut sequence, two, 150, 16);
        // The same pages, for others.
        drop(fork);
        sequence.clear();
        follow(&mut engine, &mut sequence, one, 300, 5);
    }
}

/// The CPU computes the layer again, with the same keys and values.
#[test]
fn a_device_lost_in_the_middle_of_attention_changes_no_bit() {
    let options = || Options {
        chunk: 16,
        ..roomy(120)
    };
    let demo = |options| Engine::open(Model::demo().unwrap(), options).unwrap();
    let tokens = text(60, 900);
    let expected = bits(&all_logits(&mut demo(options()), &tokens, 16));
    for device in plain_devices() {
        for (fault, lost_at) in [
            (Fault::Attend, 0),
            // In the second chunk of the prompt, and behind it.
            (Fault::Attend, 7),
            (Fault::Attend, 23),
            (Fault::TakeAttention, 0),
            (Fault::TakeAttention, 12),
            (Fault::TakeAttention, 31),
        ] {
            let left = Arc::new(AtomicUsize::new(usize::MAX - 1));
            let faulty = Faulty::armed_by(&device, fault, Arc::clone(&left));
            let mut engine = demo(forced(faulty, options()));
            left.store(lost_at, Ordering::Relaxed);
            for _ in 0..2 {
                let found = decoded(&mut engine, &tokens, 40);
                assert!(found == expected, "{fault:?} at {lost_at}");
            }
            let report = engine.device().unwrap();
            assert!(report.lost.unwrap().contains("was reset"));
            assert_eq!(report.attention.layers, lost_at as u64);
        }
    }
}

/// Attention stays on the CPU, and the report says why: wrong results and other bits, projections that it does
/// not have, what no device knows, and where it was asked for.
#[test]
fn what_a_device_does_not_compute_is_told() {
    let options = || Options {
        chunk: 16,
        ..roomy(64)
    };
    let tokens = text(30, 300);
    let told = |path: &std::path::Path, options: Options| {
        let mut engine = open(path, options);
        let found = decoded(&mut engine, &tokens, 10);
        let report = engine.device().unwrap();
        assert_eq!((report.attention.layers, &report.lost), (0, &None));
        (found, report.attention.none.unwrap())
    };
    let dir = tempfile::tempdir().unwrap();
    let pack = |name: &str| packed(&fixtures().join("models").join(name), dir.path(), DType::Q4);
    let cpu = || plain_devices().swap_remove(0);
    let armed = |fault| Faulty::armed_by(&cpu(), fault, emberflow_tests::devices::never());
    let llama = pack("llama2");
    let expected = bits(&all_logits(&mut open(&llama, options()), &tokens, 16));
    for (device, why) in [
        (armed(Fault::WrongAttention), "wrong results"),
        (armed(Fault::OffAttention), "not the processor's"),
        (armed(Fault::Off), "not the processor's"),
        // Without room for projections in a memory of its own.
        (Faulty::discrete(Fault::Never), "all projections"),
    ] {
        let off = matches!(why, "not the processor's");
        let forced = Options {
            device_memory: Some(0),
            ..forced(device, options())
        };
        let (found, told) = told(&llama, forced);
        assert!(told.contains(why), "{told}");
        assert!(found == expected || off, "{why}");
    }
    let off = Options {
        device_attention: DeviceAttention::Off,
        ..forced(cpu(), options())
    };
    assert!(told(&llama, off).1.contains("--device-attention off"));
    let (_, told) = told(&pack("gemma2"), forced(cpu(), options()));
    assert!(told.contains("caps"), "{told}");
}
