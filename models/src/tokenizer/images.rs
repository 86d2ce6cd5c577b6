//! Images of single bytes under a tokenizer's components.

use serde_json::Value;
use tokenizers::{NormalizedString, Normalizer};

use super::Tokenizer;
use super::check::{byte_level_char, kind_of, literal, steps_of};
use super::least::{Least, ONE};

/// The images of bytes.
struct Images {
    /// The first byte of each image.
    image: [u8; 256],
    counts: [bool; 256],
    byte_level: bool,
    ascii: bool,
}

/// Lower bound of the tokens of a text.
pub(super) fn least(tokenizer: &Tokenizer) -> Least {
    let images = Images::of(tokenizer).unwrap_or(Images {
        image: [0; 256],
        counts: [false; 256],
        byte_level: false,
        ascii: false,
    });
    let longest = longest(tokenizer, images.byte_level);
    let mut shares = [0; 256];
    for (byte, share) in (0..=u8::MAX).zip(&mut shares) {
        let at = usize::from(byte);
        let image = images.image[at];
        let length = longest[usize::from(image)] as u64;
        if images.counts[at] && length > 0 && known(tokenizer, image, images.byte_level) {
            *share = ONE / length;
        }
    }
    Least {
        shares,
        ascii: images.ascii,
    }
}

/// By byte, the length of the longest token that contains it.
fn longest(tokenizer: &Tokenizer, byte_level: bool) -> [usize; 256] {
    let mut longest = [0; 256];
    let mut take = |token: &[u8]| {
        for &byte in token {
            let at = &mut longest[usize::from(byte)];
            *at = token.len().max(*at);
        }
    };
    for id in 0..tokenizer.size {
        if byte_level && let Some(bytes) = tokenizer.token_bytes(id) {
            take(&bytes);
        } else if let Some(token) = tokenizer.decoded_form(id) {
            take(token.as_bytes());
        }
    }
    for token in tokenizer.inner.get_added_tokens_decoder().values() {
        take(token.content.as_bytes());
        let mut text = NormalizedString::from(token.content.as_str());
        if let Some(normalizer) = tokenizer.inner.get_normalizer()
            && normalizer.normalize(&mut text).is_ok()
        {
            take(text.get().as_bytes());
        }
    }
    longest
}

/// Whether a byte is never dropped, nor joined to others as an unknown one.
fn known(tokenizer: &Tokenizer, byte: u8, byte_level: bool) -> bool {
    let has = |token: &str| tokenizer.token_to_id(token).is_some();
    let falls_back = |byte: u8| has(&format!("<{byte:#04X}>"));
    let fallback = tokenizer.inner.get_model().settings.byte_fallback;
    if byte_level {
        has(byte_level_char(byte).encode_utf8(&mut [0; 4]))
    } else if byte.is_ascii() {
        has(char::from(byte).encode_utf8(&mut [0; 4])) || (fallback && falls_back(byte))
    } else {
        fallback && (0x80..=u8::MAX).all(falls_back)
    }
}

impl Images {
    /// `None` if a component may drop arbitrary text.
    fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let mut images = Self {
            image: std::array::from_fn(|byte| byte as u8),
            counts: [true; 256],
            byte_level: false,
            ascii: false,
        };
        let normalizer = serde_json::to_value(tokenizer.inner.get_normalizer()).ok()?;
        for step in steps_of(Some(&normalizer), "normalizer", "normalizers").ok()? {
            images.normalize(step)?;
        }
        let splitter = serde_json::to_value(tokenizer.inner.get_pre_tokenizer()).ok()?;
        for step in steps_of(Some(&splitter), "pre_tokenizer", "pretokenizers").ok()? {
            images.split(step)?;
        }
        let added = tokenizer.inner.get_added_tokens_decoder();
        if added.values().any(|token| token.lstrip || token.rstrip) {
            images.drops_white_space();
        }
        Some(images)
    }

    fn normalize(&mut self, step: &Value) -> Option<()> {
        match kind_of(step) {
            "Prepend" => {}
            "NFC" | "NFD" | "NFKC" | "NFKD" => self.ascii = true,
            "Lowercase" => {
                self.ascii = true;
                self.image
                    .iter_mut()
                    .for_each(|byte| byte.make_ascii_lowercase());
            }
            "Replace" => self.replace(literal(step)?, step.get("content")?.as_str()?)?,
            _ => return None,
        }
        Some(())
    }

    /// A one-byte pattern maps to the first byte of its replacement; bytes of longer patterns do
    /// not count. `None` for an empty replacement.
    fn replace(&mut self, from: &str, to: &str) -> Option<()> {
        let to = to.bytes().next()?;
        for (image, counts) in self.image.iter_mut().zip(&mut self.counts) {
            match from.as_bytes() {
                [only] if image == only => *image = to,
                pattern if pattern.len() > 1 && pattern.contains(image) => *counts = false,
                _ => {}
            }
        }
        Some(())
    }

    fn split(&mut self, step: &Value) -> Option<()> {
        let text = |key: &str| step.get(key).and_then(Value::as_str);
        match kind_of(step) {
            "ByteLevel" => self.byte_level = true,
            "Metaspace" => self.replace(" ", text("replacement")?)?,
            "Whitespace" | "WhitespaceSplit" => self.drops_white_space(),
            "Digits" => {}
            "Split" | "Punctuation" if text("behavior")? != "Removed" => {}
            _ => return None,
        }
        Some(())
    }

    /// White space may be dropped, including non-ASCII.
    fn drops_white_space(&mut self) {
        for (byte, counts) in (0..=u8::MAX).zip(&mut self.counts) {
            *counts &= byte.is_ascii() && !char::from(byte).is_whitespace();
        }
    }
}
