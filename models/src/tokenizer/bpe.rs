//! A BPE model that takes little memory.
//!
//! The `tokenizers` crate's own has every token twice as a `String` in a hash map, and merges in a third map: 70 MB for the
//! 262,144 tokens of Gemma 3. Here all tokens are one text, and the hash tables hold only numbers. Its tokens are those of the
//! crate's model, which a property test compares.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use tokenizers::models::bpe::BpeTrainer;
use tokenizers::{Model, Token};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// A vocabulary with its merges.
#[derive(Debug)]
pub(super) struct Bpe {
    pub settings: Settings,
    texts: Texts,
    /// The id of each token, ascending.
    ids: Vec<u32>,
    /// Places in `ids`, by text.
    places: HashTable<u32>,
    /// By rank: lower ones are applied first.
    merges: Vec<Merge>,
    /// Places in `merges`, by pair.
    ranks: HashTable<u32>,
    hasher: Hasher,
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
    fn get(&self, place: usize) -> &str {
        let start = place.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.all[start as usize..self.ends[place] as usize]
    }
}

/// Two adjacent tokens and the one that replaces them.
#[derive(Debug, Clone, Copy)]
struct Merge {
    pair: [u32; 2],
    union: u32,
}

/// Hashes with a random seed, so that nobody can write a vocabulary whose hashes collide.
#[derive(Debug, Clone, Copy)]
struct Hasher(u64);

impl Hasher {
    fn text(self, text: &str) -> u64 {
        xxh3_64_with_seed(text.as_bytes(), self.0)
    }

    fn pair(self, [left, right]: [u32; 2]) -> u64 {
        let both = u64::from(left) << 32 | u64::from(right);
        xxh3_64_with_seed(&both.to_le_bytes(), self.0)
    }
}

/// Part of a text that is one token.
#[derive(Clone, Copy)]
struct Symbol {
    id: u32,
    /// 0 once it is merged into the symbol before it.
    len: usize,
    before: Option<usize>,
    after: Option<usize>,
}

/// The symbols of a text.
#[derive(Default)]
struct Symbols(Vec<Symbol>);

impl Symbols {
    fn push(&mut self, id: u32, len: usize) {
        let place = self.0.len();
        let before = place.checked_sub(1);
        if let Some(before) = before {
            self.0[before].after = Some(place);
        }
        let after = None;
        self.0.push(Symbol {
            id,
            len,
            before,
            after,
        });
    }

    /// The ids of the symbol at `left` and the one after it.
    fn pair(&self, left: usize) -> Option<[u32; 2]> {
        let Symbol { id, after, .. } = self.0[left];
        after.map(|right| [id, self.0[right].id])
    }

    /// Merges the symbol after `left` into it.
    fn join(&mut self, left: usize, union: u32) {
        let Some(right) = self.0[left].after else {
            return;
        };
        let gone = std::mem::replace(&mut self.0[right].len, 0);
        let after = self.0[right].after;
        if let Some(after) = after {
            self.0[after].before = Some(left);
        }
        let joined = &mut self.0[left];
        joined.id = union;
        joined.len += gone;
        joined.after = after;
    }
}

impl Bpe {
    /// A model without merges. The error says what of `vocab` is wrong.
    pub fn new<T: AsRef<str>>(
        mut vocab: Vec<(T, u32)>,
        settings: Settings,
    ) -> Result<Self, String> {
        vocab.sort_unstable_by_key(|(_, id)| *id);
        let hasher = Hasher(RandomState::new().hash_one(0));
        let bytes = vocab.iter().map(|(text, _)| text.as_ref().len()).sum();
        let mut texts = Texts {
            all: String::with_capacity(bytes),
            ends: Vec::with_capacity(vocab.len()),
        };
        let mut ids: Vec<u32> = Vec::with_capacity(vocab.len());
        let mut places: HashTable<u32> = HashTable::with_capacity(vocab.len());
        for (place, (text, id)) in (0..).zip(&vocab) {
            let text = text.as_ref();
            if ids.last() == Some(id) {
                let other = texts.get(ids.len() - 1);
                return Err(format!("id {id} for {other:?} and for {text:?}"));
            }
            let same = |of: &u32| texts.get(*of as usize) == text;
            let hash = |of: &u32| hasher.text(texts.get(*of as usize));
            match places.entry(hasher.text(text), same, hash) {
                Entry::Occupied(other) => {
                    let other = ids[*other.get() as usize];
                    return Err(format!("{text:?} with id {other} and with id {id}"));
                }
                Entry::Vacant(free) => free.insert(place),
            };
            ids.push(*id);
            texts.all.push_str(text);
            let end = u32::try_from(texts.all.len());
            texts.ends.push(end.map_err(|_| format!("{bytes} bytes"))?);
        }
        Ok(Self {
            settings,
            texts,
            ids,
            places,
            merges: Vec::new(),
            ranks: HashTable::new(),
            hasher,
        })
    }

    /// Adds the merge with the next rank. The error is a token that does not exist.
    pub fn add_merge(&mut self, left: &str, right: &str) -> Result<(), String> {
        let id = |text: &str| self.token_to_id(text).ok_or_else(|| text.to_owned());
        let pair = [id(left)?, id(right)?];
        let union = id(&format!("{left}{right}"))?;
        let rank = self.merges.len() as u32;
        self.merges.push(Merge { pair, union });
        let (merges, hasher) = (&self.merges, self.hasher);
        let of = |rank: &u32| merges[*rank as usize].pair;
        let same = |rank: &u32| of(rank) == pair;
        let entry = self
            .ranks
            .entry(hasher.pair(pair), same, |rank| hasher.pair(of(rank)));
        // Of a merge that is listed twice, the last rank counts.
        *entry.or_insert(rank).get_mut() = rank;
        Ok(())
    }

    /// The rank of a pair.
    fn rank(&self, pair: [u32; 2]) -> Option<u32> {
        let same = |rank: &u32| self.merges[*rank as usize].pair == pair;
        self.ranks.find(self.hasher.pair(pair), same).copied()
    }

    /// The tokens of single characters.
    fn characters(&self, text: &str) -> tokenizers::Result<Symbols> {
        let of = &self.settings;
        let mut symbols = Symbols(Vec::with_capacity(text.len()));
        let mut unknown: Option<(u32, usize)> = None;
        for (at, c) in text.char_indices() {
            let c = &text[at..at + c.len_utf8()];
            if let Some(id) = self.token_to_id(c) {
                if let Some((id, len)) = unknown.take() {
                    symbols.push(id, len);
                }
                symbols.push(id, c.len());
                continue;
            }
            let byte = |byte: u8| self.token_to_id(&format!("<0x{byte:02X}>"));
            let bytes = of.byte_fallback.then(|| c.bytes().map(byte).collect());
            if let Some(bytes) = bytes.flatten() {
                let bytes: Vec<u32> = bytes;
                bytes.into_iter().for_each(|id| symbols.push(id, 1));
                continue;
            }
            let Some(token) = &of.unknown else {
                continue;
            };
            match &mut unknown {
                Some((_, len)) if of.fuse_unknown => *len += c.len(),
                _ => {
                    let id = self.token_to_id(token);
                    let id = id.ok_or_else(|| format!("no unknown token {token:?}"))?;
                    if let Some((id, len)) = unknown.replace((id, c.len())) {
                        symbols.push(id, len);
                    }
                }
            }
        }
        if let Some((id, len)) = unknown {
            symbols.push(id, len);
        }
        Ok(symbols)
    }

    /// Applies merges, the lowest rank first, and the first place of several.
    fn merge(&self, symbols: &mut Symbols) {
        let found = |symbols: &Symbols, left: usize| {
            let rank = self.rank(symbols.pair(left)?)?;
            Some(Reverse((rank, left)))
        };
        let pairs = (0..symbols.0.len()).filter_map(|left| found(symbols, left));
        let mut queue: BinaryHeap<_> = pairs.collect();
        while let Some(Reverse((rank, left))) = queue.pop() {
            let Merge { union, .. } = self.merges[rank as usize];
            // Either symbol may be another one by now.
            let now = symbols.pair(left).filter(|_| symbols.0[left].len > 0);
            let now = now.and_then(|pair| self.rank(pair));
            if now.is_none_or(|now| self.merges[now as usize].union != union) {
                continue;
            }
            symbols.join(left, union);
            let before = symbols.0[left].before;
            queue.extend(before.and_then(|before| found(symbols, before)));
            queue.extend(found(symbols, left));
        }
    }
}

impl Model for Bpe {
    type Trainer = BpeTrainer;

    /// The tokens of a piece, without their texts and places, which nobody reads.
    fn tokenize(&self, piece: &str) -> tokenizers::Result<Vec<Token>> {
        let token = |id| Token::new(id, String::new(), (0, 0));
        if self.settings.ignore_merges
            && let Some(id) = self.token_to_id(piece)
        {
            return Ok(vec![token(id)]);
        }
        let mut symbols = self.characters(piece)?;
        self.merge(&mut symbols);
        let left = symbols.0.iter().filter(|symbol| symbol.len > 0);
        Ok(left.map(|symbol| token(symbol.id)).collect())
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        let same = |place: &u32| self.texts.get(*place as usize) == token;
        let place = self.places.find(self.hasher.text(token), same)?;
        self.ids.get(*place as usize).copied()
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        let place = self.ids.binary_search(&id).ok()?;
        Some(self.texts.get(place).to_owned())
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        let texts = (0..self.ids.len()).map(|place| self.texts.get(place).to_owned());
        texts.zip(self.ids.iter().copied()).collect()
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
