//! Rings of indices in flat arrays. Nothing here allocates after it was made, but to
//! resize. Knows nothing of keys, slots or bytes.

/// Circular doubly linked lists inside two flat arrays. An index is in at most one
/// ring, which need not be known to take it out. All operations take constant time.
#[derive(Debug, Clone)]
pub struct Rings {
    /// The first entries are the rings' heads, those of the indices follow.
    prev: Vec<u32>,
    next: Vec<u32>,
    heads: u32,
}

/// A vector of `n` entries that takes no more memory than they need.
pub(super) fn resize<T: Clone>(all: &mut Vec<T>, n: usize, new: T) {
    all.reserve_exact(n.saturating_sub(all.len()));
    all.resize(n, new);
    all.shrink_to_fit();
}

impl Rings {
    /// `rings` empty rings, for indices below `n`.
    #[must_use]
    pub fn new(rings: u32, n: u32) -> Self {
        let mut new = Self {
            prev: (0..rings).collect(),
            next: (0..rings).collect(),
            heads: rings,
        };
        new.resize(n);
        new
    }

    /// Entries for indices below `n` from now on. Those from `n` on must be in no ring.
    pub fn resize(&mut self, n: u32) {
        let len = self.heads as usize + n as usize;
        resize(&mut self.prev, len, 0);
        resize(&mut self.next, len, 0);
    }

    /// Indices there are entries for.
    pub(super) fn len(&self) -> usize {
        self.next.len() - self.heads as usize
    }

    fn link(&mut self, a: u32, b: u32) {
        self.next[a as usize] = b;
        self.prev[b as usize] = a;
    }

    /// Adds `i` to a ring as the newest. It must be in no ring.
    #[inline]
    pub fn push(&mut self, ring: u32, i: u32) {
        let i = i + self.heads;
        let newest = self.prev[ring as usize];
        self.link(newest, i);
        self.link(i, ring);
    }

    /// Adds `i` to a ring as the oldest, the next to go. It must be in no ring.
    pub fn push_oldest(&mut self, ring: u32, i: u32) {
        let i = i + self.heads;
        let oldest = self.next[ring as usize];
        self.link(ring, i);
        self.link(i, oldest);
    }

    /// Takes `i` out of its ring. It must be in one.
    #[inline]
    pub fn remove(&mut self, i: u32) {
        let i = (i + self.heads) as usize;
        let (prev, next) = (self.prev[i], self.next[i]);
        self.link(prev, next);
    }

    /// Puts `to`, which is in no ring, into the place of `from`.
    pub fn replace(&mut self, from: u32, to: u32) {
        let (from, to) = ((from + self.heads) as usize, to + self.heads);
        let (prev, next) = (self.prev[from], self.next[from]);
        self.link(prev, to);
        self.link(to, next);
    }

    /// The index that has been in a ring for longest.
    #[must_use]
    pub fn oldest(&self, ring: u32) -> Option<u32> {
        self.next[ring as usize].checked_sub(self.heads)
    }

    /// Moves all of ring `from` before the oldest of ring `to`, keeping its order.
    pub fn prepend(&mut self, to: u32, from: u32) {
        let (first, last) = (self.next[from as usize], self.prev[from as usize]);
        if first == from {
            return;
        }
        let oldest = self.next[to as usize];
        self.link(to, first);
        self.link(last, oldest);
        self.link(from, from);
    }

    /// Moves all of ring `from` behind the newest of ring `to`, keeping its order.
    pub fn append(&mut self, to: u32, from: u32) {
        let (first, last) = (self.next[from as usize], self.prev[from as usize]);
        if first == from {
            return;
        }
        let newest = self.prev[to as usize];
        self.link(newest, first);
        self.link(last, to);
        self.link(from, from);
    }

    /// Indices of a ring from the oldest to the newest.
    pub fn iter(&self, ring: u32) -> impl Iterator<Item = u32> + '_ {
        let after = move |node: u32| self.next[node as usize].checked_sub(self.heads);
        std::iter::successors(after(ring), move |&i| after(i + self.heads))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_is_that_of_pushes() {
        let mut r = Rings::new(2, 6);
        let dump = |r: &Rings, ring| r.iter(ring).collect::<Vec<_>>();
        for i in [3, 0, 5] {
            r.push(0, i);
        }
        assert_eq!(dump(&r, 0), [3, 0, 5]);
        r.remove(0);
        r.push_oldest(0, 0);
        assert_eq!(dump(&r, 0), [0, 3, 5]);
        r.push(1, 4);
        r.push(1, 1);
        r.prepend(0, 1);
        assert_eq!(dump(&r, 0), [4, 1, 0, 3, 5]);
        assert_eq!((r.oldest(0), r.oldest(1)), (Some(4), None));
        r.prepend(0, 1);
        r.remove(4);
        r.replace(0, 2);
        r.replace(1, 0);
        r.replace(5, 4);
        assert_eq!(dump(&r, 0), [0, 2, 3, 4]);
        r.prepend(1, 0);
        assert_eq!((dump(&r, 1), r.oldest(0)), (vec![0, 2, 3, 4], None));
        r.append(1, 0);
        r.push(0, 5);
        r.append(0, 1);
        assert_eq!((dump(&r, 0), r.oldest(1)), (vec![5, 0, 2, 3, 4], None));
        r.remove(4);
        r.append(1, 0);
        assert_eq!((dump(&r, 1), r.oldest(0)), (vec![5, 0, 2, 3], None));
    }
}
