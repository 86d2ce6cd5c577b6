//! One sequence: its tokens and their keys and values.

use emberflow_models::config::ModelConfig;

use crate::error::Error;
use crate::kv::KvPages;

/// The state of one conversation or completion.
///
/// Creating a sequence reserves pages of the engine's KV pool for its full length; dropping it
/// releases them.
#[derive(Debug)]
pub struct Sequence {
    pub(crate) kv: KvPages,
    tokens: Vec<u32>,
}

/// A sequence's part of a pass.
pub struct Span<'a> {
    /// The sequence to extend.
    pub sequence: &'a mut Sequence,
    /// Its next tokens, at least one.
    pub tokens: &'a [u32],
}

impl Sequence {
    pub(crate) fn new(kv: KvPages) -> Self {
        Self {
            tokens: Vec::with_capacity(kv.capacity()),
            kv,
        }
    }

    /// Number of tokens computed.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether no token was computed yet.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Free positions.
    pub fn room(&self) -> usize {
        self.kv.capacity() - self.tokens.len()
    }

    /// Rejects more tokens than there are free positions.
    pub(crate) fn check_room(&self, tokens: usize, config: &ModelConfig) -> Result<(), Error> {
        if tokens <= self.room() {
            return Ok(());
        }
        Err(Error::ContextFull {
            capacity: self.len() + self.room(),
            needed: self.len() + tokens,
            limit: config.max_context as usize,
        })
    }

    /// The tokens computed so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// A sequence that continues from here, with the same capacity. Keys and values are shared,
    /// copy-on-write.
    ///
    /// # Errors
    /// [`Error::KvFull`] if the engine has no room for another sequence of this length.
    pub fn fork(&self) -> Result<Self, Error> {
        self.fork_at(self.len())
    }

    /// Like [`Sequence::fork`], from position `len` on.
    ///
    /// # Errors
    /// As [`Sequence::fork`].
    pub fn fork_at(&self, len: usize) -> Result<Self, Error> {
        let len = len.min(self.len());
        let mut fork = Self::new(self.kv.fork(len, self.kv.capacity())?);
        fork.tokens.extend_from_slice(&self.tokens[..len]);
        Ok(fork)
    }

    /// Replaces the contents by the first `len` tokens of `other` and shares their keys and values.
    pub(crate) fn adopt(&mut self, other: &Self, len: usize) {
        self.clear();
        self.kv.adopt(&other.kv, len);
        self.tokens.extend_from_slice(&other.tokens[..len]);
    }

    /// Removes all tokens.
    pub fn clear(&mut self) {
        self.truncate(0);
    }

    /// Removes the tokens from position `len` on.
    pub fn truncate(&mut self, len: usize) {
        self.tokens.truncate(len);
        self.kv.truncate(len);
    }

    /// Bytes of keys and values per position.
    pub fn position_bytes(&self) -> u64 {
        self.kv.shape().position_bytes()
    }

    /// Replaces the contents by `count` positions of `token` without computing them, for
    /// benchmarks.
    pub(crate) fn pretend(&mut self, token: u32, count: usize) {
        self.assume(token, count);
        self.kv.pretend(count);
    }

    /// The same, with whatever its pages hold.
    pub(crate) fn assume(&mut self, token: u32, count: usize) {
        self.clear();
        self.kv.prepare(0, count);
        self.tokens.resize(count, token);
    }

    pub(crate) fn advance(&mut self, tokens: &[u32]) {
        self.tokens.extend_from_slice(tokens);
    }
}
