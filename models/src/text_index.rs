//! Places of texts in a list that their owner holds: 5 to 10 bytes for each.

use std::hash::{BuildHasher, RandomState};

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

/// The places. Every call is given the text at a place.
#[derive(Debug)]
pub(crate) struct TextIndex {
    places: HashTable<u32>,
    state: RandomState,
}

impl TextIndex {
    pub(crate) fn with_capacity(texts: usize) -> Self {
        Self {
            places: HashTable::with_capacity(texts),
            state: RandomState::new(),
        }
    }

    /// Adds a place. If the same text has one, returns that and adds nothing.
    pub(crate) fn insert<'a>(&mut self, place: u32, text: impl Fn(u32) -> &'a str) -> Option<u32> {
        let (new, state) = (text(place), &self.state);
        let same = |other: &u32| text(*other) == new;
        let hash = |other: &u32| state.hash_one(text(*other));
        match self.places.entry(state.hash_one(new), same, hash) {
            Entry::Occupied(other) => Some(*other.get()),
            Entry::Vacant(free) => {
                free.insert(place);
                None
            }
        }
    }

    /// The place of a text.
    pub(crate) fn find<'a>(&self, wanted: &str, text: impl Fn(u32) -> &'a str) -> Option<u32> {
        let same = |place: &u32| text(*place) == wanted;
        let found = self.places.find(self.state.hash_one(wanted), same);
        found.copied()
    }
}
