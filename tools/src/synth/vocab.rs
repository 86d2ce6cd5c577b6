//! A vocabulary of the right size: bytes, characters, and words of syllables.
//! Any text can be encoded, and any token decodes to text.

use emberflow_models::gguf_vocab::GgufVocab;

/// Start of a text.
pub const BOS: u32 = 1;
/// End of a text.
pub const EOS: u32 = 2;
/// Tokens that are not text: unknown, start, end, 256 bytes.
pub const SPECIAL: u32 = 3 + 256;

const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const NORMAL: i32 = 1;
const BYTE: i32 = 6;

/// The vocabulary of `size` tokens, which is more than [`SPECIAL`].
pub fn vocabulary(size: u32) -> GgufVocab {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(String::from).to_vec();
    let mut token_types = vec![UNKNOWN, CONTROL, CONTROL];
    tokens.extend((0..256).map(|byte| format!("<0x{byte:02X}>")));
    token_types.resize(tokens.len(), BYTE);
    tokens.push("▁".into());
    tokens.extend(('!'..='~').map(String::from));
    tokens.extend((0..).map(word).take(size as usize));
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

/// The word with this number: three syllables, so that none is a character.
fn word(number: u32) -> String {
    const CONSONANTS: [char; 16] = [
        'b', 'd', 'f', 'g', 'h', 'k', 'l', 'm', 'n', 'p', 'r', 's', 't', 'v', 'w', 'z',
    ];
    const VOWELS: [char; 5] = ['a', 'e', 'i', 'o', 'u'];
    let mut text = String::from("▁");
    let mut rest = number as usize;
    for _ in 0..3 {
        text.push(CONSONANTS[rest % 16]);
        text.push(VOWELS[rest / 16 % 5]);
        rest /= 80;
    }
    text
}

/// The token that follows `token` in the walk that greedy decoding takes: all
/// text tokens, none twice before all have come.
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

/// A step near the golden section that visits every token.
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
