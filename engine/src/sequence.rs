//! One sequence: its tokens and their keys and values.

use crate::error::Error;
use crate::kv::KvPages;

/// The state of one conversation or completion.
///
/// Its keys and values lie in pages of the engine that made it. Making one charges the engine's pool
/// for all positions that it may come to have; dropping it gives them back.
#[derive(Debug)]
pub struct Sequence {
    pub(crate) kv: KvPages,
    tokens: Vec<u32>,
}

/// A part of a pass: tokens at the end of one sequence.
pub struct Span<'a> {
    /// The sequence, which the tokens are added to.
    pub sequence: &'a mut Sequence,
    /// Tokens that follow each other, at least one.
    pub tokens: &'a [u32],
}

impl Sequence {
    pub(crate) fn new(kv: KvPages) -> Self {
        Self {
            tokens: Vec::with_capacity(kv.capacity()),
            kv,
        }
    }

    /// Tokens run so far.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// True before the first token.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Positions there is still room for.
    pub fn room(&self) -> usize {
        self.kv.capacity() - self.tokens.len()
    }

    /// The tokens run so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Another sequence that goes on from here, with room for as many positions. Both share the keys
    /// and values so far until one of them adds a token.
    ///
    /// # Errors
    /// [`Error::KvFull`] where the engine has no room for another sequence of this length.
    pub fn fork(&self) -> Result<Self, Error> {
        self.fork_at(self.len())
    }

    /// As [`Sequence::fork`], from position `len` on.
    ///
    /// # Errors
    /// As [`Sequence::fork`].
    pub fn fork_at(&self, len: usize) -> Result<Self, Error> {
        let len = len.min(self.len());
        let mut fork = Self::new(self.kv.fork(len, self.kv.capacity())?);
        fork.tokens.extend_from_slice(&self.tokens[..len]);
        Ok(fork)
    }

    /// Begins with the first `len` tokens of `other`, whose keys and values are shared. What it held
    /// before is forgotten.
    pub(crate) fn adopt(&mut self, other: &Self, len: usize) {
        self.clear();
        self.kv.adopt(&other.kv, len);
        self.tokens.extend_from_slice(&other.tokens[..len]);
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.truncate(0);
    }

    /// Forgets everything from position `len` on.
    pub fn truncate(&mut self, len: usize) {
        self.tokens.truncate(len);
        self.kv.truncate(len);
    }

    /// Bytes of keys and values of one position.
    pub fn position_bytes(&self) -> u64 {
        self.kv.shape().position_bytes()
    }

    /// Starts afresh with `count` positions of `token` that were never computed.
    pub(crate) fn pretend(&mut self, token: u32, count: usize) {
        self.clear();
        self.kv.pretend(count);
        self.tokens.resize(count, token);
    }

    pub(crate) fn advance(&mut self, tokens: &[u32]) {
        self.tokens.extend_from_slice(tokens);
    }
}
