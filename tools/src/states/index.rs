//! Which texts have saved state: a tree of pieces.
//!
//! A piece is the state of up to [`PIECE`] positions after the positions of its parent, so texts with a common beginning
//! share its pieces, and a text that grows adds pieces. Only whole pieces have children. Where state is recurrent, a text
//! continues only from a piece with a snapshot.

use std::collections::HashMap;

use emberflow_engine::Sequence;
use xxhash_rust::xxh3::Xxh3;

/// Positions of a piece, at most: those of the longest page of keys and values. It takes a fraction of a second to write,
/// which is what a request may have to wait for.
pub const PIECE: usize = 256;
/// Fewer tokens than this are recomputed faster than they are read.
const LEAST: usize = 16;
/// The parent of the first piece.
const ROOT: u128 = 0;

/// A saved piece.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Key of the piece before it.
    pub parent: u128,
    /// Position of its first token.
    pub first: usize,
    /// Its tokens.
    pub tokens: Box<[u32]>,
    /// Whether it has recurrent state after its last token.
    pub snapshot: bool,
}

impl Piece {
    /// Identifies the text up to its end.
    pub fn key(&self) -> u128 {
        key(self.parent, &self.tokens, self.snapshot)
    }

    /// Position after its last token.
    pub fn end(&self) -> usize {
        self.first + self.tokens.len()
    }
}

fn key(parent: u128, tokens: &[u32], snapshot: bool) -> u128 {
    let mut hash = Xxh3::new();
    hash.update(&parent.to_le_bytes());
    hash.update(&[u8::from(snapshot)]);
    tokens
        .iter()
        .for_each(|token| hash.update(&token.to_le_bytes()));
    hash.digest128()
}

/// The longest saved beginning of a text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Found {
    /// Its tokens.
    pub len: usize,
    /// Keys of its pieces, from the first one on.
    pub pieces: Vec<u128>,
}

/// The pieces of one model.
#[derive(Debug, Default)]
pub struct Index {
    pieces: HashMap<u128, Piece>,
    children: HashMap<u128, Vec<u128>>,
    tokens: usize,
}

impl Index {
    /// Adds a piece.
    pub fn add(&mut self, piece: Piece) {
        let key = piece.key();
        let parent = piece.parent;
        self.tokens += piece.tokens.len();
        match self.pieces.insert(key, piece) {
            Some(same) => self.tokens -= same.tokens.len(),
            None => self.children.entry(parent).or_default().push(key),
        }
    }

    /// Removes a piece. Those after it are not found any more.
    pub fn remove(&mut self, key: u128) {
        let Some(piece) = self.pieces.remove(&key) else {
            return;
        };
        self.tokens -= piece.tokens.len();
        if let Some(children) = self.children.get_mut(&piece.parent) {
            children.retain(|&child| child != key);
            if children.is_empty() {
                self.children.remove(&piece.parent);
            }
        }
    }

    /// The piece with this key.
    pub fn get(&self, key: u128) -> Option<&Piece> {
        self.pieces.get(&key)
    }

    /// Tokens of all pieces.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    fn children(&self, parent: u128) -> impl Iterator<Item = (u128, &Piece)> {
        let keys = self.children.get(&parent).into_iter().flatten();
        keys.filter_map(|&key| Some((key, self.pieces.get(&key)?)))
    }

    /// The longest saved beginning of `tokens` whose pieces end at position `most` at the latest; with `recurrent` state,
    /// one that ends with a snapshot.
    pub fn find(&self, tokens: &[u32], recurrent: bool, most: usize) -> Found {
        let (mut found, mut path) = (Found::default(), Vec::new());
        let (mut parent, mut at) = (ROOT, 0);
        loop {
            let mut next = None;
            for (key, piece) in self
                .children(parent)
                .filter(|(_, piece)| piece.end() <= most)
            {
                let pairs = piece.tokens.iter().zip(&tokens[at..]);
                let common = pairs.take_while(|(a, b)| a == b).count();
                let whole = common == piece.tokens.len();
                let usable = if recurrent {
                    piece.snapshot && whole
                } else {
                    common > 0
                };
                if usable && at + common > found.len {
                    let pieces = path.iter().copied().chain([key]).collect();
                    found = Found {
                        len: at + common,
                        pieces,
                    };
                }
                if whole && common == PIECE && !piece.snapshot {
                    next = Some(key);
                }
            }
            let Some(key) = next else {
                return found;
            };
            path.push(key);
            (parent, at) = (key, at + PIECE);
        }
    }

    /// The first piece of a sequence that is not saved. None after one whose key another text has.
    pub fn missing(&self, sequence: &Sequence) -> Option<Piece> {
        let snapshots: Vec<_> = sequence.snapshots().filter(|&len| len >= LEAST).collect();
        self.missing_of(sequence.tokens(), !sequence.goes_back(), &snapshots)
    }

    /// The same for a text with these snapshots.
    fn missing_of(&self, tokens: &[u32], recurrent: bool, snapshots: &[usize]) -> Option<Piece> {
        let end = match recurrent {
            true => snapshots.last().copied().unwrap_or(0),
            false => tokens.len(),
        };
        let piece = |parent, first: usize, end, snapshot| Piece {
            parent,
            first,
            tokens: tokens[first..end].into(),
            snapshot,
        };
        let (mut parent, mut first) = (ROOT, 0);
        loop {
            for &len in snapshots {
                if (first..first + PIECE).contains(&len) {
                    let with = piece(parent, first, len, true);
                    match self.pieces.get(&with.key()) {
                        None => return Some(with),
                        Some(saved) if *saved != with => return None,
                        Some(_) => {}
                    }
                }
            }
            if first + PIECE > end {
                break;
            }
            let whole = piece(parent, first, first + PIECE, false);
            let key = whole.key();
            match self.pieces.get(&key) {
                None => return Some(whole),
                Some(saved) if *saved != whole => return None,
                Some(_) => {}
            }
            (parent, first) = (key, first + PIECE);
        }
        let rest = piece(parent, first, end, false);
        let is_saved = || {
            self.children(parent)
                .any(|(_, other)| other.tokens.starts_with(&rest.tokens))
        };
        (!recurrent && rest.tokens.len() >= LEAST && !is_saved()).then_some(rest)
    }

    /// Pieces that are the beginning of `piece`, which replaces them.
    pub fn replaced_by(&self, piece: &Piece) -> Vec<u128> {
        let others = self.children(piece.parent).filter(|(_, other)| {
            let shorter = other.tokens.len() < piece.tokens.len();
            shorter && !other.snapshot && piece.tokens.starts_with(&other.tokens)
        });
        match piece.snapshot {
            true => Vec::new(),
            false => others.map(|(key, _)| key).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Saves all pieces of a text; returns how many there were.
    fn save(index: &mut Index, tokens: &[u32], snapshots: Option<&[usize]>) -> usize {
        let mut count = 0;
        while let Some(piece) =
            index.missing_of(tokens, snapshots.is_some(), snapshots.unwrap_or_default())
        {
            assert_eq!(piece.tokens[..], tokens[piece.first..piece.end()]);
            for key in index.replaced_by(&piece) {
                index.remove(key);
            }
            index.add(piece);
            count += 1;
        }
        count
    }

    fn find(index: &Index, tokens: &[u32], recurrent: bool) -> Found {
        index.find(tokens, recurrent, usize::MAX)
    }

    fn text(seed: u32, len: usize) -> Vec<u32> {
        (0..len as u32).map(|i| i * 7 + seed).collect()
    }

    #[test]
    fn a_text_that_grows_adds_pieces_and_another_shares_its_beginning() {
        let mut index = Index::default();
        let long = text(1, 3 * PIECE);
        assert_eq!(save(&mut index, &long[..PIECE + 100], None), 2);
        assert_eq!(find(&index, &long, false).len, PIECE + 100);
        assert_eq!(find(&index, &long[..PIECE + 40], false).len, PIECE + 40);
        assert_eq!(
            save(&mut index, &long[..PIECE + 100 - LEAST], None),
            0,
            "it is saved"
        );
        assert_eq!(save(&mut index, &long, None), 2);
        assert_eq!(
            index.tokens(),
            3 * PIECE,
            "the unfinished piece is replaced"
        );
        let mut other = long[..2 * PIECE + 50].to_vec();
        other.extend(text(9, 60));
        assert_eq!(find(&index, &other, false).len, 2 * PIECE + 50);
        assert_eq!(save(&mut index, &other, None), 1);
        let found = find(&index, &other, false);
        assert_eq!((found.len, found.pieces.len()), (other.len(), 3));
        assert_eq!(find(&index, &text(2, 900), false), Found::default());
        // A piece that does not fit is not found.
        assert_eq!(index.find(&other, false, other.len() - 1).len, 2 * PIECE);
        assert_eq!(index.find(&other, false, PIECE - 1), Found::default());
        index.remove(found.pieces[1]);
        assert_eq!(find(&index, &other, false).len, PIECE);
    }

    #[test]
    fn recurrent_state_continues_from_snapshots() {
        let mut index = Index::default();
        let long = text(1, 3 * PIECE);
        assert_eq!(save(&mut index, &long[..700], Some(&[PIECE, 400, 600])), 5);
        for (len, reached) in [(PIECE - 1, 0), (399, PIECE), (599, 400), (768, 600)] {
            let found = find(&index, &long[..len], true);
            assert_eq!(found.len, reached, "{len}");
            assert_eq!(
                found.pieces.len(),
                reached / PIECE + usize::from(reached > 0)
            );
        }
        assert_eq!(save(&mut index, &long[..700], Some(&[400, 600])), 0);
        assert_eq!(save(&mut index, &long[..700], Some(&[700])), 1);
        assert_eq!(find(&index, &long, true).len, 700);
        assert_eq!(
            save(&mut index, &text(3, 700), Some(&[])),
            0,
            "nothing to continue from"
        );
    }
}
