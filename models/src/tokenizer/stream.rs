//! Streaming decoder: text from one token at a time.

use std::sync::Arc;

use super::Tokenizer;
use super::check::{Decoding, Pieces};

/// Decodes a growing sequence of tokens. Its concatenated output equals [`Tokenizer::decode`] of
/// the whole sequence, and it never returns half a character. Bytes that are not UTF-8 become
/// U+FFFD.
#[derive(Debug)]
pub struct StreamDecoder<'a> {
    tokenizer: &'a Tokenizer,
    /// Bytes of an incomplete character, at most three.
    pending: Vec<u8>,
    /// Leading spaces still to drop.
    strip: usize,
    /// Special tokens that produce text.
    shown: Arc<[u32]>,
}

impl<'a> StreamDecoder<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer, at_start: bool) -> Self {
        let strip = match &tokenizer.decoding {
            Decoding::Pieces(pieces) if at_start => pieces.strip,
            _ => 0,
        };
        Self {
            tokenizer,
            pending: Vec::new(),
            strip,
            shown: Arc::default(),
        }
    }

    /// Lets these special tokens produce text.
    #[must_use]
    pub fn showing(self, shown: Arc<[u32]>) -> Self {
        Self { shown, ..self }
    }

    /// The text that `id` completes; `None` if it completes nothing, is a special token or is not
    /// in the vocabulary.
    pub fn push(&mut self, id: u32) -> Option<String> {
        if self.tokenizer.is_special(id) && !self.shown.contains(&id) {
            return None;
        }
        self.pending.extend(self.tokenizer.token_bytes(id)?);
        let text = take_complete(&mut self.pending);
        self.without_leading_spaces(text)
    }

    /// The name of a special token without text.
    pub fn hidden(&self, id: u32) -> Option<String> {
        let hidden = self.tokenizer.is_special(id) && !self.shown.contains(&id);
        hidden.then(|| self.tokenizer.decoded_form(id)).flatten()
    }

    /// The rest after the last token: one U+FFFD for an incomplete character, or nothing.
    pub fn finish(self) -> Option<String> {
        (!self.pending.is_empty()).then(|| char::REPLACEMENT_CHARACTER.to_string())
    }

    fn without_leading_spaces(&mut self, text: String) -> Option<String> {
        let mut rest = text.as_str();
        while self.strip > 0 && !rest.is_empty() {
            match rest.strip_prefix(' ') {
                Some(shorter) => {
                    rest = shorter;
                    self.strip -= 1;
                }
                None => self.strip = 0,
            }
        }
        (!rest.is_empty()).then(|| rest.to_owned())
    }
}

impl Tokenizer {
    /// Bytes of a token, which may be a part of a character; `None` if it is not in the vocabulary.
    pub fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        let token = self.decoded_form(id)?;
        Some(match &self.decoding {
            Decoding::ByteLevel => byte_level_bytes(&token),
            Decoding::Pieces(pieces) => piece_bytes(pieces, token),
        })
    }
}

/// Removes and returns everything before an incomplete character.
fn take_complete(pending: &mut Vec<u8>) -> String {
    let mut text = String::new();
    let mut rest = pending.as_slice();
    loop {
        match std::str::from_utf8(rest) {
            Ok(valid) => {
                text.push_str(valid);
                rest = &[];
                break;
            }
            Err(error) => {
                let (valid, after) = rest.split_at(error.valid_up_to());
                text.push_str(&String::from_utf8_lossy(valid));
                rest = after;
                let Some(bad) = error.error_len() else { break };
                text.push(char::REPLACEMENT_CHARACTER);
                rest = rest.get(bad..).unwrap_or_default();
            }
        }
    }
    *pending = rest.to_vec();
    text
}

/// Bytes of a byte-level token. A token with any other character represents itself.
fn byte_level_bytes(token: &str) -> Vec<u8> {
    token
        .chars()
        .map(byte_level_byte)
        .collect::<Option<_>>()
        .unwrap_or_else(|| token.into())
}

/// GPT-2's invertible byte alphabet: printable Latin-1 bytes map to their own character; the 68
/// others to U+0100 and up, in order.
fn byte_level_byte(c: char) -> Option<u8> {
    let code = u32::from(c);
    let byte = match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => code,
        0x100..=0x120 => code - 0x100,
        0x121..=0x142 => code - 0x121 + 0x7f,
        0x143 => 0xad,
        _ => return None,
    };
    u8::try_from(byte).ok()
}

/// Bytes of a SentencePiece token: one raw byte for `<0xHH>`, else its text.
fn piece_bytes(pieces: &Pieces, mut token: String) -> Vec<u8> {
    for (from, to) in &pieces.replace {
        token = token.replace(from, to);
    }
    let byte = pieces
        .byte_fallback
        .then(|| fallback_byte(&token))
        .flatten();
    byte.map_or_else(|| token.into_bytes(), |byte| vec![byte])
}

fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 {
        u8::from_str_radix(digits, 16).ok()
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::check::byte_level_char;

    #[test]
    fn byte_alphabet_is_a_bijection() {
        let mut seen = [false; 256];
        for code in 0..=0x143 {
            if let Some(byte) = char::from_u32(code).and_then(byte_level_byte) {
                assert!(
                    !std::mem::replace(&mut seen[usize::from(byte)], true),
                    "{byte}"
                );
            }
        }
        assert!(seen.iter().all(|s| *s));
        for byte in 0..=255 {
            assert_eq!(byte_level_byte(byte_level_char(byte)), Some(byte));
        }
        assert_eq!(byte_level_byte('Ġ'), Some(b' '));
        assert_eq!(byte_level_byte('Ċ'), Some(b'\n'));
        assert_eq!(byte_level_byte('€'), None);
    }

    #[test]
    fn complete_characters_leave_and_unfinished_ones_stay() {
        let mut pending = "aé€".as_bytes()[..5].to_vec();
        assert_eq!(take_complete(&mut pending), "aé");
        assert_eq!(pending, [0xe2, 0x82]);
        pending.push(0xac);
        assert_eq!(take_complete(&mut pending), "€");
        assert!(pending.is_empty());
    }

    #[test]
    fn a_broken_sequence_becomes_one_replacement_and_does_not_swallow_what_follows() {
        let mut pending = vec![b'a', 0xff, b'b', 0xe2, 0x82, b'c', 0xf0];
        assert_eq!(take_complete(&mut pending), "a\u{fffd}b\u{fffd}c");
        assert_eq!(pending, [0xf0]);
    }
}
