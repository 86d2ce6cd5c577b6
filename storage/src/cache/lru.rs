//! LRU eviction.

use super::rings::Rings;
use super::table::Table;

/// The ring of evictable indices, and the ring of pinned ones set aside.
const EVICTABLE: u32 = 0;
const ASIDE: u32 = 1;
const RINGS: u32 = 2;

/// Indices ordered by their release.
#[derive(Debug, Clone)]
pub(super) struct Lru {
    rings: Rings,
}

impl Lru {
    pub fn new() -> Self {
        Self {
            rings: Rings::new(RINGS, 0),
        }
    }

    /// Bytes for `slots` indices.
    pub fn bytes(slots: u64) -> u64 {
        8 * (u64::from(RINGS)).saturating_add(slots)
    }

    /// Resizes to indices below `n`. Indices from `n` on must be in no ring.
    pub fn resize(&mut self, n: u32) {
        self.rings.resize(n);
    }

    /// Adds index `i`, which is pinned.
    pub fn add_in_use(&mut self, i: u32) {
        self.rings.push(ASIDE, i);
    }

    /// Adds index `i` as the most recently used.
    pub fn add(&mut self, i: u32) {
        self.rings.push(EVICTABLE, i);
    }

    /// Makes index `i` the most recently used.
    pub fn put_last(&mut self, i: u32) {
        self.rings.remove(i);
        self.rings.push(EVICTABLE, i);
    }

    /// Makes index `i` the next victim.
    pub fn put_first(&mut self, i: u32) {
        self.rings.remove(i);
        self.rings.push_oldest(EVICTABLE, i);
    }

    /// Removes index `i`.
    pub fn remove(&mut self, i: u32) {
        self.rings.remove(i);
    }

    /// Renames index `from` to `to`.
    pub fn renumber(&mut self, from: u32, to: u32) {
        self.rings.replace(from, to);
    }

    /// The next victim. `key` maps an index to the flat number of its unit.
    pub fn victim(&mut self, table: &Table, key: impl Fn(u32) -> u32) -> Option<u32> {
        loop {
            let i = self.rings.oldest(EVICTABLE)?;
            if table.at(key(i)).pins == 0 {
                return Some(i);
            }
            // Its release puts it back.
            self.rings.remove(i);
            self.rings.push(ASIDE, i);
        }
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.rings.len()
    }

    /// All indices, and whether each is set aside.
    pub fn iter(&self) -> impl Iterator<Item = (u32, bool)> + '_ {
        let ring = |ring| self.rings.iter(ring).map(move |i| (i, ring == ASIDE));
        ring(EVICTABLE).chain(ring(ASIDE))
    }
}
