//! Text to tokens and back.
//!
//! [`Tokenizer`] wraps the `tokenizers` crate with two guarantees. First, a file's content is
//! checked before the crate sees it (`check`): only the components of the supported families are
//! accepted, and nothing in them can make the crate panic. Second, text decoded token by token
//! ([`StreamDecoder`]) equals that of [`Tokenizer::decode`].

mod bpe;
mod check;
mod cuts;
mod file;
mod follow;
mod images;
mod least;
mod pieces;
mod stream;

use std::collections::HashSet;
use std::sync::OnceLock;

use tokenizers::Model;

use crate::Error;
pub use crate::special::Around;
use cuts::Cuts;
use file::{File, Inner};
use least::Least;
pub use pieces::Encoder;
pub use stream::StreamDecoder;

/// A tokenizer read from `tokenizer.json` text. Cheap to share by reference between threads.
#[derive(Debug)]
pub struct Tokenizer {
    inner: Inner,
    decoding: check::Decoding,
    special: HashSet<u32>,
    around: Around,
    size: u32,
    /// Rules for cutting a text, if known; created for the first long text.
    cuts: OnceLock<Option<Cuts>>,
    /// Lower bound of a text's tokens; created for the first long text that cannot be cut.
    least: OnceLock<Least>,
}

impl Tokenizer {
    /// Reads and checks the text of a `tokenizer.json`. Drops its truncation and padding, which are
    /// for training, not for generation.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the text is not a BPE tokenizer of the known components, is
    /// inconsistent, or gives an added token a wrong id.
    pub fn from_json(json: &str) -> Result<Self, Error> {
        let file = File::parse(json)?;
        let checked = check::check(&file)?;
        let inner = file.into_tokenizer()?;
        let tokenizer = Self {
            inner,
            decoding: checked.decoding,
            special: checked.special,
            around: checked.around,
            size: checked.size,
            cuts: OnceLock::new(),
            least: OnceLock::new(),
        };
        for (content, id) in &checked.added {
            tokenizer.check_added(content, *id, checked.takes_space)?;
        }
        Ok(tokenizer)
    }

    /// Added tokens are matched in a text before all others. The crate numbers them by position and
    /// assumes that they do not overlap.
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

    /// Tokens of `text`. Recognises special tokens written in the text; `add_special` also adds
    /// those that the tokenizer puts around every text (usually one at the start). Do not set it for
    /// the output of a chat template, which writes its own. A long text is tokenised piece by piece,
    /// which takes less memory.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if a character has no token and the vocabulary has no unknown token.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, Error> {
        if !add_special && Self::is_long(text) {
            self.encode_long(text)
        } else {
            self.encode_whole(text, add_special)
        }
    }

    fn encode_whole(&self, text: &str, add_special: bool) -> Result<Vec<u32>, Error> {
        let encoding = self.inner.encode_fast(text, add_special).map_err(|error| {
            let what = format!("a text of {} bytes", text.len());
            refused(&what, &error, "text that the vocabulary covers")
        })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Text of `ids` as a whole text: drops a leading space that only marks the start of the text.
    /// Skips ids without a token (models pad their vocabulary beyond the tokenizer's), and special
    /// tokens if `skip_special` is set.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the decoder fails.
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

    /// Decodes one token at a time, as a whole text that begins with the next token. Special tokens
    /// give no text.
    pub fn stream(&self) -> StreamDecoder<'_> {
        StreamDecoder::new(self, true)
    }

    /// Like [`stream`](Self::stream), but in the middle of a text: keeps a leading space. For a
    /// continuation printed after its prompt.
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

    /// Tokens that [`encode`](Self::encode) puts around a text if `add_special` is set.
    pub fn around(&self) -> &Around {
        &self.around
    }

    /// True for structural tokens, which are not text.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }

    /// The form of a token as read by the decoder.
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
