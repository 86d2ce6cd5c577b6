//! Tokenises a text that arrives in pieces, with bounded memory.

use super::Tokenizer;
use super::cuts::Cuts;
use super::images;
use super::least::Least;
use crate::Error;

/// Approximate number of bytes tokenised at once: the `tokenizers` crate needs some 140 for each.
const PIECE: usize = 8 << 10;

/// Most bytes without a cut. Prose and code have one in every line.
const STRETCH: usize = 64 << 10;

/// Tokenises a text piece by piece; the result equals [`Tokenizer::encode`] without special tokens
/// around the text. Holds back undecided text, about 8 KiB.
#[derive(Debug)]
pub struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    /// Approximate number of bytes tokenised at once.
    piece: usize,
    held: String,
    /// Bytes of `held` already searched for a cut.
    searched: usize,
    /// The character before `held`.
    before: Option<char>,
}

impl<'a> Encoder<'a> {
    fn new(tokenizer: &'a Tokenizer, piece: usize) -> Self {
        Self {
            tokenizer,
            piece,
            held: String::new(),
            searched: 0,
            before: None,
        }
    }

    /// Accepts `text`, and appends the tokens that are certain to `ids`.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`]; [`Error::Tokenizer`] for more than 64 KiB that cannot be cut.
    pub fn push(&mut self, mut text: &str, ids: &mut Vec<u32>) -> Result<(), Error> {
        while !text.is_empty() {
            let (some, rest) = text.split_at(text.ceil_char_boundary(self.piece));
            self.held.push_str(some);
            text = rest;
            // bytes without a cut are searched only once
            if self.held.len() - self.searched >= self.piece {
                self.cut(ids)?;
            }
        }
        Ok(())
    }

    /// Appends the last tokens.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn finish(self, ids: &mut Vec<u32>) -> Result<(), Error> {
        self.tokenizer.encode_after(self.before, &self.held, ids)
    }

    /// Number of bytes held back.
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// A lower bound for the tokens of the text held back, for any continuation; 0 for a short text.
    pub fn least(&self) -> usize {
        if self.held.len() < 4 * self.piece {
            0
        } else {
            self.tokenizer.least().tokens(&self.held)
        }
    }

    fn cut(&mut self, ids: &mut Vec<u32>) -> Result<(), Error> {
        let place = self.tokenizer.last_cut(&self.held, self.searched);
        let Some(place) = place else {
            self.searched = self.held.len();
            return if self.searched <= STRETCH {
                Ok(())
            } else {
                Err(Error::Tokenizer {
                    what: "the text".to_owned(),
                    found: format!("{} bytes in one piece", self.searched),
                    expected: format!(
                        "white space, a line end or another place to cut it within {STRETCH} bytes"
                    ),
                })
            };
        };
        let (ready, rest) = self.held.split_at(place);
        self.tokenizer.encode_after(self.before, ready, ids)?;
        self.before = ready.chars().next_back();
        self.held = rest.to_owned();
        self.searched = 0;
        Ok(())
    }
}

impl Tokenizer {
    /// Tokenises a text that arrives in pieces.
    pub fn encoder(&self) -> Encoder<'_> {
        Encoder::new(self, PIECE)
    }

    /// The tokens of a long text, without special tokens around it.
    pub(super) fn encode_long(&self, text: &str) -> Result<Vec<u32>, Error> {
        let mut ids = Vec::new();
        let mut encoder = self.encoder();
        encoder.push(text, &mut ids)?;
        encoder.finish(&mut ids)?;
        Ok(ids)
    }

    /// Whether a text is long enough to be tokenised piece by piece.
    pub(super) fn is_long(text: &str) -> bool {
        text.len() >= 2 * PIECE
    }

    /// The tokens of a part of a text that follows `before`.
    fn encode_after(
        &self,
        before: Option<char>,
        text: &str,
        ids: &mut Vec<u32>,
    ) -> Result<(), Error> {
        let Some(before) = before else {
            ids.extend(self.encode_whole(text, false)?);
            return Ok(());
        };
        let lead = self.encode_whole(before.encode_utf8(&mut [0; 4]), false)?;
        let all = self.encode_whole(&format!("{before}{text}"), false)?;
        ids.extend_from_slice(all.get(lead.len()..).unwrap_or_default());
        Ok(())
    }

    fn last_cut(&self, text: &str, from: usize) -> Option<usize> {
        let cuts = self.cuts.get_or_init(|| Cuts::of(&self.inner, self.size));
        cuts.as_ref()?.last(self.inner.get_model(), text, from)
    }

    fn least(&self) -> &Least {
        self.least.get_or_init(|| images::least(self))
    }
}

#[cfg(test)]
mod tests;
