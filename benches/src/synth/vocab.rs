//! A vocabulary of a given size: bytes, characters, and words of syllables with the parts they are
//! merged from. Any text can be encoded, any token decodes to text, and words are encoded as the
//! tokens they came from.

use emberflow_models::gguf_vocab::GgufVocab;

/// Start of a text.
pub const BOS: u32 = 1;
/// End of a text.
pub const EOS: u32 = 2;
/// Number of tokens that are not text: unknown, start, end, 256 bytes.
pub const SPECIAL: u32 = 3 + 256;

const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const NORMAL: i32 = 1;
const BYTE: i32 = 6;

/// A vocabulary of `size` tokens, more than [`SPECIAL`].
pub fn vocabulary(size: u32) -> GgufVocab {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(String::from).to_vec();
    let mut token_types = vec![UNKNOWN, CONTROL, CONTROL];
    tokens.extend((0..256).map(|byte| format!("<0x{byte:02X}>")));
    token_types.resize(tokens.len(), BYTE);
    tokens.push("▁".into());
    tokens.extend(('!'..='~').map(String::from));
    // The parts of words come first.
    tokens.extend((0..SYLLABLES).map(syllable));
    tokens.extend((0..SYLLABLES).map(|first| format!("▁{}", syllable(first))));
    tokens.extend((0..size as usize / SYLLABLES).flat_map(|stem| {
        let stem = format!("▁{}{}", syllable(stem / SYLLABLES), syllable(stem));
        let words = (0..SYLLABLES).map({
            let stem = stem.clone();
            move |last| format!("{stem}{}", syllable(last))
        });
        std::iter::once(stem).chain(words)
    }));
    tokens.truncate(size as usize);
    token_types.resize(tokens.len(), NORMAL);
    let scores = (0..tokens.len())
        .map(|i| -(i.saturating_sub(SPECIAL as usize) as f32))
        .collect();
    GgufVocab {
        model: "llama".into(),
        tokens,
        scores,
        token_types,
        bos: Some(BOS),
        eos: Some(EOS),
        unk: Some(0),
        add_bos: Some(true),
        add_eos: Some(false),
        add_space_prefix: Some(true),
        ..GgufVocab::default()
    }
}

const CONSONANTS: [char; 16] = [
    'b', 'd', 'f', 'g', 'h', 'k', 'l', 'm', 'n', 'p', 'r', 's', 't', 'v', 'w', 'z',
];
const VOWELS: [char; 5] = ['a', 'e', 'i', 'o', 'u'];
const SYLLABLES: usize = CONSONANTS.len() * VOWELS.len();

/// Syllable number `number`, cyclic.
fn syllable(number: usize) -> String {
    let number = number % SYLLABLES;
    let (consonant, vowel) = (number % CONSONANTS.len(), number / CONSONANTS.len());
    [CONSONANTS[consonant], VOWELS[vowel]].iter().collect()
}

/// Next token of the walk that greedy decoding takes: it visits all text tokens before it repeats
/// one.
pub fn successor(token: u32, vocab: u32) -> u32 {
    step(token, vocab, stride(vocab))
}

/// The token whose successor is `token`.
pub fn predecessor(token: u32, vocab: u32) -> u32 {
    step(token, vocab, vocab - SPECIAL - stride(vocab))
}

fn step(token: u32, vocab: u32, by: u32) -> u32 {
    SPECIAL + (token.saturating_sub(SPECIAL) + by) % (vocab - SPECIAL)
}

/// A step near the golden ratio, coprime to the number of text tokens.
fn stride(vocab: u32) -> u32 {
    let count = vocab - SPECIAL;
    let gcd = |mut a: u32, mut b: u32| {
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    let golden = (f64::from(count) * 0.618) as u32;
    (golden..count).find(|&s| gcd(s, count) == 1).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use emberflow_models::tokenizer::Tokenizer;
    use std::collections::HashSet;

    #[test]
    fn tokens_are_distinct_and_as_many_as_wanted() {
        for size in [4096, 32000, 152_064] {
            let v = vocabulary(size);
            assert_eq!(v.tokens.len(), size as usize);
            assert_eq!(v.tokens.iter().collect::<HashSet<_>>().len(), size as usize);
        }
    }

    #[test]
    fn words_are_encoded_as_the_tokens_they_came_from() {
        let v = vocabulary(32_000);
        let json = v.to_tokenizer_json().unwrap();
        let tokenizer = Tokenizer::from_json(&json).unwrap();
        let words: Vec<u32> = (0..v.tokens.len() as u32)
            .filter(|&t| v.tokens[t as usize].chars().count() == 7)
            .step_by(97)
            .collect();
        assert!(words.len() > 300);
        let text = tokenizer.decode(&words, false).unwrap();
        let tokens = tokenizer.encode(&text, false).unwrap();
        assert_eq!(tokens, words);
    }

    #[test]
    fn the_walk_visits_every_text_token() {
        let vocab = 4096;
        let mut seen = HashSet::new();
        let mut token = SPECIAL;
        while seen.insert(token) {
            let next = successor(token, vocab);
            assert_eq!(predecessor(next, vocab), token);
            token = next;
        }
        assert_eq!(seen.len(), (vocab - SPECIAL) as usize);
    }
}
