//! One sequence: its tokens and their keys and values.

use crate::kv_cache::KvCache;

/// The state of one conversation or completion.
#[derive(Debug)]
pub struct Sequence {
    pub(crate) kv: KvCache,
    tokens: Vec<u32>,
}

impl Sequence {
    pub(crate) fn new(kv: KvCache) -> Self {
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

    /// Another sequence that goes on from here: a copy of all keys and values so far, with room
    /// for as many positions.
    pub fn fork(&self) -> Self {
        let mut tokens = Vec::with_capacity(self.kv.capacity());
        tokens.extend_from_slice(&self.tokens);
        Self {
            kv: self.kv.fork(self.tokens.len()),
            tokens,
        }
    }

    /// Forgets everything; the memory is kept.
    pub fn clear(&mut self) {
        self.truncate(0);
    }

    /// Forgets everything from position `len` on.
    pub fn truncate(&mut self, len: usize) {
        self.tokens.truncate(len);
    }

    /// Bytes of keys and values of one position.
    pub fn position_bytes(&self) -> u64 {
        self.kv.position_bytes()
    }

    /// Starts afresh with `count` positions of `token` that were never computed, so
    /// that the speed at a long context can be measured. Their keys and values are
    /// some constant.
    ///
    /// # Panics
    /// Where `count` is more than the sequence has room for.
    pub fn pretend(&mut self, token: u32, count: usize) {
        assert!(count <= self.kv.capacity(), "no room for {count} positions");
        self.kv.fill();
        self.tokens.clear();
        self.tokens.resize(count, token);
    }

    pub(crate) fn advance(&mut self, tokens: &[u32]) {
        self.tokens.extend_from_slice(tokens);
    }
}
