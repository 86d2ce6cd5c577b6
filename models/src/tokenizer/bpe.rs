//! A BPE model that takes little memory.
//!
//! The `tokenizers` crate's own has every token twice as a `String` in a hash map, and merges in a third map:
//! 70 MB for the 262,144 tokens of Gemma 3. Here all tokens are one text, and the hash tables hold only numbers.
//! It gives the tokens of the crate's model; a property test compares them.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};

use hashbrown::HashTable;
use tokenizers::models::bpe::BpeTrainer;
use tokenizers::{Model, Token};

use crate::text_index::TextIndex;

/// A vocabulary with its merges.
#[derive(Debug)]
pub(super) struct Bpe {
    pub settings: Settings,
    texts: Texts,
    /// The id of each token, ascending.
    ids: Vec<u32>,
    /// Places in `texts` and `ids`.
    places: TextIndex,
    /// By rank: lower ones are applied first.
    merges: Vec<Merge>,
    /// Places in `merges`, by pair.
    ranks: HashTable<u32>,
    /// Hashes pairs; random, so that nobody can write merges whose hashes collide.
    state: RandomState,
}

/// The settings of a model.
#[derive(Debug, Clone, Default)]
pub(super) struct Settings {
    /// The token of a character that has none. Without it such characters are dropped.
    pub unknown: Option<String>,
    /// Successive unknown characters are one token.
    pub fuse_unknown: bool,
    /// A character without a token is the tokens `<0xHH>` of its bytes, if all of them exist.
    pub byte_fallback: bool,
    /// A whole piece that is a token is used without merges.
    pub ignore_merges: bool,
}

/// The texts of tokens, one after the other.
#[derive(Debug)]
struct Texts {
    all: String,
    ends: Vec<u32>,
}

impl Texts {
    fn get(&self, place: u32) -> &str {
        let end = |place: u32| self.ends[place as usize] as usize;
        &self.all[place.checked_sub(1).map_or(0, end)..end(place)]
    }
}

/// Two adjacent tokens and the one that replaces them.
#[derive(Debug, Clone, Copy)]
struct Merge {
    pair: [u32; 2],
    union: u32,
}

/// Part of a piece that is one token.
#[derive(Clone, Copy)]
struct Symbol {
    /// `None` once it is merged into the symbol before it.
    id: Option<u32>,
    before: Option<usize>,
    after: Option<usize>,
}

/// The symbols of a piece.
struct Symbols(Vec<Symbol>);

impl Symbols {
    fn of(ids: &[u32]) -> Self {
        let places = 0..ids.len();
        let symbol = |(place, id): (usize, &u32)| Symbol {
            id: Some(*id),
            before: place.checked_sub(1),
            after: Some(place + 1).filter(|after| places.contains(after)),
        };
        Self(ids.iter().enumerate().map(symbol).collect())
    }

    /// The ids of the symbol at `left` and the one after it.
    fn pair(&self, left: usize) -> Option<[u32; 2]> {
        let left = self.0[left];
        Some([left.id?, self.0[left.after?].id?])
    }

    /// Merges the symbol after `left` into it.
    fn join(&mut self, left: usize, union: u32) {
        self.0[left].id = Some(union);
        let Some(right) = self.0[left].after else {
            return;
        };
        self.0[right].id = None;
        let after = self.0[right].after;
        self.0[left].after = after;
        if let Some(after) = after {
            self.0[after].before = Some(left);
        }
    }
}

impl Bpe {
    /// A model without merges. The error says what of `vocab` is wrong.
    pub fn new<T: AsRef<str>>(
        mut vocab: Vec<(T, u32)>,
        settings: Settings,
    ) -> Result<Self, String> {
        vocab.sort_unstable_by_key(|(_, id)| *id);
        let bytes = vocab.iter().map(|(text, _)| text.as_ref().len()).sum();
        let mut texts = Texts {
            all: String::with_capacity(bytes),
            ends: Vec::with_capacity(vocab.len()),
        };
        let mut ids: Vec<u32> = Vec::with_capacity(vocab.len());
        let mut places = TextIndex::with_capacity(vocab.len());
        for (place, (text, id)) in (0..).zip(&vocab) {
            let text = text.as_ref();
            if ids.last() == Some(id) {
                let other = texts.get(place - 1);
                return Err(format!("id {id} for {other:?} and for {text:?}"));
            }
            ids.push(*id);
            texts.all.push_str(text);
            let end = u32::try_from(texts.all.len());
            texts.ends.push(end.map_err(|_| format!("{bytes} bytes"))?);
            if let Some(other) = places.insert(place, |place| texts.get(place)) {
                let other = ids[other as usize];
                return Err(format!("{text:?} with id {other} and with id {id}"));
            }
        }
        Ok(Self {
            settings,
            texts,
            ids,
            places,
            merges: Vec::new(),
            ranks: HashTable::new(),
            state: RandomState::new(),
        })
    }

    /// Adds the merge with the next rank. The error is a token that does not exist.
    pub fn add_merge(&mut self, left: &str, right: &str) -> Result<(), String> {
        let id = |text: &str| self.token_to_id(text).ok_or_else(|| text.to_owned());
        let pair = [id(left)?, id(right)?];
        let union = id(&format!("{left}{right}"))?;
        let rank = self.merges.len() as u32;
        self.merges.push(Merge { pair, union });
        let (merges, state) = (&self.merges, &self.state);
        let of = |rank: &u32| merges[*rank as usize].pair;
        let same = |rank: &u32| of(rank) == pair;
        let hash = |rank: &u32| state.hash_one(of(rank));
        let entry = self.ranks.entry(state.hash_one(pair), same, hash);
        // Of a merge that is listed twice, the last rank counts.
        *entry.or_insert(rank).get_mut() = rank;
        Ok(())
    }

    /// Number of merges.
    pub fn merges(&self) -> usize {
        self.merges.len()
    }

    /// The rank of a pair.
    fn rank(&self, pair: [u32; 2]) -> Option<u32> {
        let same = |rank: &u32| self.merges[*rank as usize].pair == pair;
        self.ranks.find(self.state.hash_one(pair), same).copied()
    }

    /// The tokens of single characters.
    fn characters(&self, piece: &str) -> tokenizers::Result<Vec<u32>> {
        let of = &self.settings;
        let mut ids = Vec::with_capacity(piece.len());
        let mut unknown = None;
        for (at, c) in piece.char_indices() {
            let c = &piece[at..at + c.len_utf8()];
            if let Some(id) = self.token_to_id(c) {
                ids.extend(unknown.take());
                ids.push(id);
                continue;
            }
            let byte = |byte: u8| self.token_to_id(&format!("<0x{byte:02X}>"));
            let bytes = || c.bytes().map(byte).collect::<Option<Vec<u32>>>();
            if let Some(bytes) = of.byte_fallback.then(bytes).flatten() {
                // As in the crate, an unknown character before them comes after them.
                ids.extend(bytes);
                continue;
            }
            if let Some(token) = &of.unknown {
                let id = self.token_to_id(token);
                let id = id.ok_or_else(|| format!("no unknown token {token:?}"))?;
                ids.extend(unknown.replace(id).filter(|_| !of.fuse_unknown));
            }
        }
        ids.extend(unknown);
        Ok(ids)
    }

    /// Applies merges, the lowest rank first, and at the first place of several.
    fn merged(&self, ids: &[u32]) -> impl Iterator<Item = u32> + use<> {
        let mut symbols = Symbols::of(ids);
        let found = |symbols: &Symbols, left: usize| {
            let rank = self.rank(symbols.pair(left)?)?;
            Some(Reverse((rank, left)))
        };
        let pairs = (0..symbols.0.len()).filter_map(|left| found(&symbols, left));
        let mut queue: BinaryHeap<_> = pairs.collect();
        while let Some(Reverse((rank, left))) = queue.pop() {
            let Merge { union, .. } = self.merges[rank as usize];
            // Either symbol may be another one by now.
            let now = symbols.pair(left).and_then(|pair| self.rank(pair));
            if now.is_none_or(|now| self.merges[now as usize].union != union) {
                continue;
            }
            symbols.join(left, union);
            let before = symbols.0[left].before;
            queue.extend(before.and_then(|before| found(&symbols, before)));
            queue.extend(found(&symbols, left));
        }
        symbols.0.into_iter().filter_map(|symbol| symbol.id)
    }
}

impl Model for Bpe {
    type Trainer = BpeTrainer;

    /// The tokens of a piece, without their texts and places, which nobody reads.
    fn tokenize(&self, piece: &str) -> tokenizers::Result<Vec<Token>> {
        if piece.is_empty() {
            return Ok(Vec::new());
        }
        let token = |id| Token::new(id, String::new(), (0, 0));
        if self.settings.ignore_merges
            && let Some(id) = self.token_to_id(piece)
        {
            return Ok(vec![token(id)]);
        }
        let ids = self.characters(piece)?;
        Ok(self.merged(&ids).map(token).collect())
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        let place = self.places.find(token, |place| self.texts.get(place))?;
        Some(self.ids[place as usize])
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        let place = self.ids.binary_search(&id).ok()?;
        Some(self.texts.get(place as u32).to_owned())
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        let places = (0..).zip(&self.ids);
        let named = places.map(|(place, id)| (self.texts.get(place).to_owned(), *id));
        named.collect()
    }

    fn get_vocab_size(&self) -> usize {
        self.ids.len()
    }

    fn save(&self, _: &Path, _: Option<&str>) -> tokenizers::Result<Vec<PathBuf>> {
        Err("the model is not written".into())
    }

    fn get_trainer(&self) -> BpeTrainer {
        BpeTrainer::default()
    }
}

#[cfg(test)]
mod tests;
