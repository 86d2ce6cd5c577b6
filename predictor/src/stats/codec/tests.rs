//! What is written is read, and what is damaged is refused.

use super::super::misses::BINS;
use super::*;

/// Two layers of three neurons with a nonzero value in every field.
fn stats() -> ActivationStats {
    let mut gates = Magnitudes::default();
    [0.5, 0.5, 3.0].into_iter().for_each(|v| gates.see(v));
    let layer = |layer: u32, counts: [u64; 3]| LayerStats {
        layer,
        experts: vec![ExpertStats {
            expert: 0,
            counts: counts.to_vec(),
            original: if layer == 0 {
                vec![2, 0, 1]
            } else {
                Vec::new()
            },
        }],
    };
    let bank = |counts: [u64; 3]| BankProfile {
        unions: vec![vec![1, 0, 2]; 5],
        stayed: counts.iter().map(|c| c / 2).collect(),
        later: [(40, 30), (9, 0), (2, 1)].map(|(fired, again)| Later {
            fired: fired.min(counts.iter().sum()),
            again: again.min(counts[0]),
        }),
        contributed: counts.to_vec(),
        gates: gates.clone(),
        hidden: Magnitudes::default(),
    };
    let mut sample = Sample::new(4);
    for priority in [7, 3] {
        sample.insert(Sampled {
            priority,
            bits: vec![0b101, priority],
        });
    }
    let mut misses = Misses::default();
    for (n, number) in misses.numbers_mut().enumerate() {
        *number = if n < BINS { 90 } else { n as u64 % 91 };
    }
    ActivationStats {
        format: FORMAT_V2.into(),
        tokens: 300,
        layers: vec![layer(0, [300, 200, 0]), layer(1, [1, 2, 3])],
        profile: Some(Box::new(Profile {
            model: "m 0123".into(),
            texts: vec![5, u64::MAX],
            window: 128,
            pairs: 290,
            steps: [300, 2, 2, 2, 2, 2],
            banks: vec![bank([300, 200, 0]), bank([1, 2, 3])],
            sample,
            misses,
            routing: None,
        })),
    }
}

fn seal(bytes: &mut [u8]) {
    let (len, sum) = (bytes.len() as u64, xxh3_64(&bytes[HEADER..]));
    bytes[8..16].copy_from_slice(&len.to_le_bytes());
    bytes[16..24].copy_from_slice(&sum.to_le_bytes());
}

#[test]
fn round_trip() {
    let s = stats();
    let bytes = s.to_bytes().unwrap();
    assert_eq!(ActivationStats::parse(&bytes, &[3, 3], 1).unwrap(), s);
    assert!(ActivationStats::parse(&bytes, &[3, 4], 1).is_err());
    let moved = stats().permuted(&[vec![1, 2, 0], vec![2, 0, 1]]);
    let p = moved.profile.as_ref().unwrap();
    assert_eq!(moved.counts(0, 0).unwrap(), [200, 0, 300]);
    assert_eq!(p.banks[0].unions[0], [0, 2, 1]);
    assert_eq!(p.sample.tokens()[0].bits[0], 0b110);
    assert_eq!(
        ActivationStats::read(&moved.to_bytes().unwrap()).unwrap(),
        moved
    );
}

#[test]
fn banks_may_have_fewer_neurons_than_the_largest() {
    let mut s = stats();
    let profile = s.profile.as_mut().unwrap();
    let bank = &mut profile.banks[1];
    for list in bank
        .unions
        .iter_mut()
        .chain([&mut bank.stayed, &mut bank.contributed])
    {
        list.truncate(2);
    }
    bank.later = Default::default();
    s.layers[1].experts[0].counts.truncate(2);
    for token in &mut profile.sample.tokens {
        token.bits[1] &= 0b11;
    }
    let bytes = s.to_bytes().unwrap();
    assert_eq!(ActivationStats::parse(&bytes, &[3, 2], 1).unwrap(), s);
    assert!(ActivationStats::parse(&bytes, &[3, 3], 1).is_err());
    let order = [vec![1, 2, 0], vec![1, 0]];
    let moved = s.clone().permuted(&order);
    let p = moved.profile.as_ref().unwrap();
    assert_eq!((p.sampled(0, 3).len(), p.sampled(1, 2).len()), (3, 2));
    let old = s.profile.as_ref().unwrap();
    assert_eq!(p.sampled(1, 2)[0], old.sampled(1, 2)[1]);
    // a neuron past the last
    s.profile.as_mut().unwrap().sample.tokens[0].bits[1] = 0b100;
    assert!(s.to_bytes().is_err());
}

#[test]
fn older_files_lack_what_follows_the_sample() {
    let s = stats();
    let mut bytes = s.to_bytes().unwrap();
    let mut without = s;
    let profile = without.profile.as_mut().unwrap();
    // Small numbers have one byte each.
    bytes.truncate(bytes.len() - profile.misses.numbers_mut().count());
    seal(&mut bytes);
    profile.misses = Misses::default();
    assert_eq!(ActivationStats::read(&bytes).unwrap(), without);
    // Two banks with two small numbers for each distance.
    let profile = without.profile.as_mut().unwrap();
    bytes.truncate(bytes.len() - 2 * 2 * profile.banks[0].later.len());
    seal(&mut bytes);
    let old = ActivationStats::read(&bytes).unwrap();
    for bank in &mut without.profile.as_mut().unwrap().banks {
        bank.later = Default::default();
        assert_eq!(bank.later[0].share(), None);
    }
    assert_eq!(old, without);
    // A partial list is damage.
    bytes.push(0);
    seal(&mut bytes);
    assert!(ActivationStats::read(&bytes).is_err());
}

#[test]
fn the_checkpoints_order_is_restored() {
    let mut checkpoint = stats();
    checkpoint.layers[0].experts[0].original.clear();
    let order = [vec![1, 2, 0], vec![2, 1, 0]];
    let packed = checkpoint.clone().permuted(&order);
    assert_ne!(packed, checkpoint);
    assert_eq!(packed.restored(&order).unwrap(), checkpoint);
    assert_eq!(checkpoint.clone().restored(&[]).unwrap(), checkpoint);
    assert!(checkpoint.restored(&[vec![0, 0, 1], vec![]]).is_err());
}

#[test]
fn what_cannot_be_true_is_not_written() {
    for wrong in 0..9 {
        let mut s = stats();
        let p = s.profile.as_mut().unwrap();
        match wrong {
            0 => p.banks[0].stayed[2] = 1,
            1 => p.banks[1].unions[4][0] = 3,
            2 => p.steps[0] = 299,
            3 => p.sample.tokens[0].bits[1] = 8,
            4 => p.pairs = 301,
            5 => p.banks[0].later[1].again = 10,
            6 => p.banks[1].later[0].fired = 7,
            7 => p.misses.missed[3][2] = 91,
            _ => drop(p.banks.pop()),
        }
        assert!(
            matches!(s.to_bytes(), Err(StatsError::Binary(_))),
            "{wrong}"
        );
    }
}

#[test]
fn damaged_files_are_refused() {
    let good = stats().to_bytes().unwrap();
    for cut in 0..good.len() {
        assert!(ActivationStats::read(&good[..cut]).is_err(), "{cut}");
    }
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 0x10;
        assert!(ActivationStats::read(&bad).is_err(), "{at}");
    }
}

#[test]
fn sums_are_exact_and_strangers_are_refused() {
    let (mut a, mut b) = (stats(), stats());
    assert!(
        matches!(a.merge(&b), Err(StatsError::Merge(_))),
        "the same text twice"
    );
    b.profile.as_mut().unwrap().texts = vec![9];
    let mut other_model = b.clone();
    other_model.profile.as_mut().unwrap().model = "n".into();
    assert!(a.clone().merge(&other_model).is_err());
    a.merge(&b).unwrap();
    assert_eq!(a.tokens, 600);
    assert_eq!(a.counts(0, 0).unwrap(), [600, 400, 0]);
    let p = a.profile.as_ref().unwrap();
    assert_eq!((p.pairs, p.steps), (580, [600, 4, 4, 4, 4, 4]));
    assert_eq!(p.banks[0].gates.total(), 6);
    assert_eq!(p.texts, [5, 9, u64::MAX]);
    assert!(ActivationStats::read(&a.to_bytes().unwrap()).is_ok());
}
