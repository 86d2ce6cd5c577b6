use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::sample::{Index, select};
use tokenizers::models::bpe::{BPE, Vocab};

use super::*;

/// The model of the `tokenizers` crate.
fn reference(vocab: &[(String, u32)], merges: &[[String; 2]], of: &Settings) -> BPE {
    let merges = merges
        .iter()
        .map(|[left, right]| (left.clone(), right.clone()));
    let vocab: Vocab = vocab.iter().cloned().collect();
    let mut builder = BPE::builder()
        .vocab_and_merges(vocab, merges.collect())
        .fuse_unk(of.fuse_unknown)
        .byte_fallback(of.byte_fallback)
        .ignore_merges(of.ignore_merges);
    if let Some(token) = &of.unknown {
        builder = builder.unk_token(token.clone());
    }
    builder.build().unwrap()
}

fn ids(model: &impl Model, text: &str) -> Option<Vec<u32>> {
    let tokens = model.tokenize(text).ok()?;
    Some(tokens.iter().map(|token| token.id).collect())
}

/// A vocabulary of some characters and bytes, and of the tokens that `joins` make of two of those before; and its
/// merges, of which some occur twice.
fn grown(singles: &[&str], joins: &[(Index, Index)]) -> (Vec<String>, Vec<[String; 2]>) {
    let mut tokens: Vec<String> = singles.iter().map(|&text| text.to_owned()).collect();
    let mut merges = Vec::new();
    for (left, right) in joins {
        let pair = [left, right].map(|of| of.get(&tokens).clone());
        let union = pair.concat();
        if !tokens.contains(&union) {
            tokens.push(union);
        }
        merges.push(pair);
    }
    (tokens, merges)
}

const SINGLES: [&str; 10] = [
    "", "a", "b", "c", "é", "▁", "<0xC3>", "<0xA9>", "<0x64>", "<unk>",
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn tokens_are_those_of_the_crate(
        singles in proptest::sample::subsequence(&SINGLES[..], 1..=SINGLES.len()),
        joins in proptest::collection::vec(any::<(Index, Index)>(), 0..24),
        steps in proptest::collection::vec(1..4u32, 40),
        unknown in select(vec![None, Some("<unk>"), Some("a"), Some("absent")]),
        flags in any::<[bool; 3]>(),
        text in "[abcdé▁]{0,24}",
    ) {
        let (tokens, merges) = grown(&singles, &joins);
        let mut next = 0;
        let vocab: Vec<(String, u32)> = tokens.into_iter().zip(steps).map(|(token, step)| {
            next += step;
            (token, next)
        }).collect();
        let settings = Settings {
            unknown: unknown.map(str::to_owned),
            fuse_unknown: flags[0],
            byte_fallback: flags[1],
            ignore_merges: flags[2],
        };
        let expected = reference(&vocab, &merges, &settings);
        let mut model = Bpe::new(vocab.iter().rev().cloned().collect(), settings).unwrap();
        for [left, right] in &merges {
            model.add_merge(left, right).unwrap();
        }
        prop_assert_eq!(ids(&model, &text), ids(&expected, &text));
        prop_assert_eq!(model.get_vocab_size(), expected.get_vocab_size());
        let sorted = |of: HashMap<String, u32>| of.into_iter().collect::<BTreeMap<_, _>>();
        prop_assert_eq!(sorted(model.get_vocab()), sorted(Model::get_vocab(&expected)));
        for id in 0..next + 2 {
            prop_assert_eq!(model.id_to_token(id), expected.id_to_token(id));
        }
    }
}

#[test]
fn a_vocabulary_has_one_id_for_a_token_and_one_token_for_an_id() {
    let refusal =
        |vocab: &[(&str, u32)]| Bpe::new(vocab.to_vec(), Settings::default()).unwrap_err();
    assert_eq!(
        refusal(&[("a", 1), ("b", 2), ("c", 1)]),
        r#"id 1 for "a" and for "c""#
    );
    assert_eq!(
        refusal(&[("a", 1), ("b", 2), ("a", 3)]),
        r#""a" with id 1 and with id 3"#
    );
}
