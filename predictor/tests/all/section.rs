//! The PREDICTOR section: round trips, and every kind of invalid section.

use std::sync::Arc;

use emberflow_kernels::{DType, Narrow, sign_bytes};
use emberflow_predictor::section::{Directory, Kind, NewBank, SectionError, Training, encode};
use emberflow_predictor::{LowRankSpec, Quality, Reads};

const D: usize = 70;
const NEURONS: usize = 5;
const LAYERS: usize = 8;

fn quality() -> Quality {
    Quality {
        pairs: 100 * NEURONS as u64,
        active: 50,
        predicted: 70,
        hit: 49,
    }
}

fn spec() -> LowRankSpec {
    LowRankSpec {
        d: D,
        neurons: NEURONS,
        rank: 3,
        fc1: DType::Q8,
        fc2: DType::F16,
        reads: Reads::Residual,
        relu: true,
    }
}

fn banks() -> Vec<NewBank> {
    let filled = |len: usize| vec![0x21; len];
    let layer = |kind, parts| NewBank {
        kind,
        quality: quality(),
        parts,
    };
    let rows = |narrow: Narrow| filled(NEURONS * narrow.row_bytes(D));
    let coarse = |narrow| {
        let parts = vec![rows(narrow), filled(2 * NEURONS)];
        layer(Kind::Coarse(narrow), parts)
    };
    let coarse_top = |narrow| {
        let parts = vec![rows(narrow), filled(12), filled(2 * NEURONS)];
        layer(Kind::CoarseTop(narrow), parts)
    };
    vec![
        layer(Kind::None, vec![]),
        layer(
            Kind::Sign { limit: 33 },
            vec![filled(NEURONS * sign_bytes(D))],
        ),
        layer(
            Kind::LowRank(spec()),
            vec![
                filled(spec().fc1_bytes()),
                filled(spec().fc2_bytes()),
                filled(2 * NEURONS),
            ],
        ),
        layer(Kind::Magnitude { threshold: 0.25 }, vec![]),
        coarse(Narrow::Two),
        coarse_top(Narrow::Two),
        coarse(Narrow::Three),
        coarse_top(Narrow::Three),
    ]
}

fn section() -> Vec<u8> {
    encode(
        D,
        &[NEURONS; LAYERS],
        Training {
            trained_on: 1000,
            measured_on: 100,
            target: 0.98,
        },
        &banks(),
    )
}

fn parse(bytes: &[u8]) -> Result<Directory, SectionError> {
    let directory = Directory::parse(bytes, bytes.len() as u64, D, &[NEURONS; LAYERS])?;
    directory.check(bytes)?;
    Ok(directory)
}

#[test]
fn what_was_written_is_read() {
    let bytes = section();
    let directory = parse(&bytes).expect("a section");
    assert_eq!(directory.len(), bytes.len());
    assert_eq!((directory.trained_on, directory.measured_on), (1000, 100));
    assert_eq!(directory.target, 0.98);
    let block: Arc<dyn AsRef<[u8]> + Send + Sync> = Arc::new(bytes.clone());
    for (i, bank) in banks().iter().enumerate() {
        let entry = &directory.banks[i];
        assert_eq!((entry.kind, entry.quality), (bank.kind, bank.quality));
        let again = directory.bank(i, &bytes).expect("a bank");
        assert_eq!(again.parts, bank.parts);
        let predictor = directory.predictor(i, &block);
        assert_eq!(predictor.is_some(), bank.kind.predicts());
        let weights: usize = bank.parts.iter().map(Vec::len).sum();
        if let Some(predictor) = predictor {
            assert_eq!(predictor.bytes(), weights as u64);
        }
    }
    assert_eq!(directory.quality().active, 50 * LAYERS as u64);
}

#[test]
fn experts_have_sizes_and_tokens_of_their_own() {
    let sizes = [5, 5, 9];
    let bank = |neurons: usize, tokens: u64| NewBank {
        kind: Kind::Sign { limit: 30 },
        quality: Quality {
            pairs: tokens * neurons as u64,
            active: 8,
            predicted: 10,
            hit: 7,
        },
        parts: vec![vec![0x21; neurons * sign_bytes(D)]],
    };
    let banks = [bank(5, 100), bank(5, 3), bank(9, 60)];
    let training = Training {
        trained_on: 1000,
        measured_on: 100,
        target: 0.98,
    };
    let bytes = encode(D, &sizes, training, &banks);
    let directory = Directory::parse(&bytes, bytes.len() as u64, D, &sizes).expect("a section");
    directory.check(&bytes).expect("a section");
    for ((entry, bank), neurons) in directory.banks.iter().zip(&banks).zip(sizes) {
        assert_eq!((entry.neurons, entry.quality), (neurons, bank.quality));
    }
    assert_eq!(directory.quality().pairs, 500 + 15 + 540);
    // The header holds the largest bank's size.
    for other in [[5, 5, 8], [9, 5, 5], [5, 9, 9]] {
        assert!(Directory::parse(&bytes, bytes.len() as u64, D, &other).is_err());
    }
}

#[test]
fn cutoffs_come_from_finite_numbers() {
    let good = section();
    let (directory, cutoffs) = (parse(&good).expect("a section"), good.len() - 128);
    for at in [0, 4, 8] {
        let mut bad = good.clone();
        bad[cutoffs + at..cutoffs + at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
        let error = directory.check(&bad).expect_err("cutoffs").to_string();
        assert!(error.contains("cutoffs"), "{error}");
    }
}

#[test]
fn lies_are_refused() {
    let good = section();
    let record = |layer: usize| 64 + 64 * layer;
    // where, what, and a word of the message
    let lies: &[(usize, &[u8], &str)] = &[
        (0, b"X", "magic"),
        (8, &[2], "version"),
        (12, &[4], "banks"),
        (16, &[71], "d_model"),
        (20, &[6], "neurons"),
        (32, &[0xff; 8], "pairs"),
        (40, &[1], "header"),
        (48, &2.0f32.to_le_bytes(), "recall"),
        (48, &f32::NAN.to_le_bytes(), "recall"),
        (60, &[1], "reserved"),
        (record(0), &[8], "kind"),
        (record(0) + 8, &[1], "zeros"),
        (record(0) + 20, &[1], "threshold"),
        (record(1) + 20, &[71], "threshold"),
        (record(1) + 24, &[0], "lie at"),
        (record(2) + 4, &[4], "flags"),
        (record(2) + 8, &[0], "rank"),
        (record(2) + 8, &[0xff; 4], "rank"),
        (record(2) + 8, &[40], "lie at"),
        (record(2) + 12, &[9], "block format"),
        (record(2) + 16, &[9], "block format"),
        (record(2) + 32, &[0], "lie at"),
        (record(3) + 20, &f32::NAN.to_le_bytes(), "threshold"),
        (record(3) + 20, &(-1.0f32).to_le_bytes(), "threshold"),
        (record(2) + 36, &[100], "header says"),
        (record(2) + 36, &[1], "fire"),
        (record(4) + 40, &[0xff; 8], "fire"),
        (record(4) + 56, &[71], "both"),
    ];
    for (at, what, word) in lies {
        let mut bad = good.clone();
        bad[*at..*at + what.len()].copy_from_slice(what);
        let error = parse(&bad).expect_err(word).to_string();
        assert!(
            error.contains(word),
            "{at}: {error:?} does not say {word:?}"
        );
    }
    let directory = parse(&good).expect("a section");
    let thresholds = good.len() - 64;
    let mut bad = good.clone();
    bad[thresholds..thresholds + 2].copy_from_slice(&0x7e00u16.to_le_bytes());
    assert!(
        directory.check(&bad).is_err(),
        "a threshold that is not a number"
    );
    let mut bad = good.clone();
    bad[thresholds..thresholds + 2].copy_from_slice(&0x7c00u16.to_le_bytes());
    assert!(
        directory.check(&bad).is_ok(),
        "an infinite threshold means never"
    );
    let mut bad = good.clone();
    *bad.last_mut().expect("bytes") = 1;
    assert!(directory.check(&bad).is_err(), "padding");
    for len in [0, 8, 63, 64, 300, good.len() - 1] {
        assert!(parse(&good[..len]).is_err(), "{len} bytes");
    }
    let mut long = good.clone();
    long.extend([0; 64]);
    assert!(parse(&long).is_err());
}
