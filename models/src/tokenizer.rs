//! Text to tokens and back.
//!
//! [`Tokenizer`] wraps the `tokenizers` crate behind two rules. What a file
//! describes is checked before the crate sees it (`check`): only the
//! components that the supported families use are accepted, and nothing in
//! them can make the crate panic. And text that is decoded token by token
//! ([`StreamDecoder`]) is the same text that [`Tokenizer::decode`] gives.

mod check;
mod stream;

use std::collections::HashSet;

use tokenizers::Model;

use crate::Error;
pub use stream::StreamDecoder;

/// A tokenizer read from `tokenizer.json` text. Cheap to share by reference
/// between threads.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    decoding: check::Decoding,
    special: HashSet<u32>,
    size: u32,
}

impl Tokenizer {
    /// Reads and checks the text of a `tokenizer.json`. Truncation and padding
    /// that the file asks for are dropped: they belong to training, not to
    /// generation.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] where the text is not a BPE tokenizer made of the
    /// known components, contradicts itself, or gives an added token another
    /// id than it says.
    pub fn from_json(json: &str) -> Result<Self, Error> {
        let checked = check::check(json)?;
        let mut inner: tokenizers::Tokenizer = json
            .parse()
            .map_err(|error| refused("tokenizer.json", &error, "the format of tokenizers 0.x"))?;
        inner
            .with_truncation(None)
            .map_err(|error| refused("truncation", &error, "none"))?;
        inner.with_padding(None);
        let tokenizer = Self {
            inner,
            decoding: checked.decoding,
            special: checked.special,
            size: checked.size,
        };
        for (content, id) in &checked.added {
            tokenizer.check_added(content, *id, checked.takes_space)?;
        }
        Ok(tokenizer)
    }

    /// Added tokens are looked for in a text before anything else; the crate
    /// gives them ids by their place and trusts that they do not overlap.
    fn check_added(&self, content: &str, id: u32, takes_space: bool) -> Result<(), Error> {
        let refuse = |found: String, expected: &str| Error::Tokenizer {
            what: format!("added token {content:?}"),
            found,
            expected: expected.to_owned(),
        };
        let given = self.inner.token_to_id(content);
        if given != Some(id) {
            let found = format!("id {id} in the file, {given:?} by place in the vocabulary");
            return Err(refuse(found, "the same id from both"));
        }
        let form = self.decoded_form(id).unwrap_or_default();
        if takes_space && form.starts_with(char::is_whitespace) {
            let found = "leading white space, and another with rstrip".to_owned();
            return Err(refuse(found, "one or the other"));
        }
        Ok(())
    }

    /// Tokens of `text`. Special tokens written out in the text are found as
    /// such; `add_special` also puts on those that the tokenizer adds around
    /// every text (usually one at the start). Leave it off for text that a
    /// chat template produced, which writes its own.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] where a character has no token and the vocabulary
    /// has no token for the unknown.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, Error> {
        let encoding = self.inner.encode_fast(text, add_special).map_err(|error| {
            let what = format!("a text of {} bytes", text.len());
            refused(&what, &error, "text that the vocabulary covers")
        })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Text of `ids`, taken as a whole text: a leading space that stands only
    /// for the start of the text is dropped. Ids without a token are skipped
    /// (models pad their vocabulary past the tokenizer's), and so are special
    /// tokens where `skip_special` says so.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] where the decoder refuses.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, Error> {
        let kept: Vec<u32> = ids
            .iter()
            .copied()
            .filter(|id| !(skip_special && self.is_special(*id)))
            .collect();
        self.inner
            .decode(&kept, false)
            .map_err(|error| refused("decoding", &error, "decodable tokens"))
    }

    /// Decodes one token at a time, as a whole text that begins with the next
    /// token. Special tokens give no text.
    pub fn stream(&self) -> StreamDecoder<'_> {
        StreamDecoder::new(self, true)
    }

    /// Like [`stream`](Self::stream), but in the middle of a text: a leading
    /// space is kept. For a continuation that is printed after its prompt.
    pub fn stream_after_prompt(&self) -> StreamDecoder<'_> {
        StreamDecoder::new(self, false)
    }

    /// One more than the largest token id. The model's own vocabulary may be larger.
    pub fn vocab_size(&self) -> u32 {
        self.size
    }

    /// Id of a token by its exact stored form.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Stored form of a token (`Ġthe`, `▁the`, `<0x0A>`), not its text.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// True for tokens that stand for structure and not for text.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }

    /// The form of a token that the decoder reads.
    fn decoded_form(&self, id: u32) -> Option<String> {
        self.inner
            .get_added_vocabulary()
            .simple_id_to_token(id)
            .or_else(|| self.inner.get_model().id_to_token(id))
    }
}

fn refused(what: &str, error: &tokenizers::Error, expected: &str) -> Error {
    Error::Tokenizer {
        what: what.to_owned(),
        found: error.to_string(),
        expected: expected.to_owned(),
    }
}

#[cfg(test)]
mod tests;
