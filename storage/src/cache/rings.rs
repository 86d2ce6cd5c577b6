//! Linked rings of indices in one flat array. Only resizing allocates.

/// Circular doubly linked lists in one flat array. An index is in at most one ring, and is removed
/// without naming it. All operations take constant time.
#[derive(Debug, Clone)]
pub struct Rings {
    /// The rings' heads first, then the entries of the indices.
    links: Vec<Link>,
    heads: u32,
}

/// Both neighbours of an entry, which are read and written together.
#[derive(Debug, Clone, Copy, Default)]
struct Link {
    prev: u32,
    next: u32,
}

/// Resizes a vector to `n` entries and no spare capacity.
pub(super) fn resize<T: Clone>(all: &mut Vec<T>, n: usize, new: T) {
    all.reserve_exact(n.saturating_sub(all.len()));
    all.resize(n, new);
    all.shrink_to_fit();
}

impl Rings {
    /// `rings` empty rings, for indices below `n`.
    #[must_use]
    pub fn new(rings: u32, n: u32) -> Self {
        let empty = |head| Link {
            prev: head,
            next: head,
        };
        let mut new = Self {
            links: (0..rings).map(empty).collect(),
            heads: rings,
        };
        new.resize(n);
        new
    }

    /// Resizes to indices below `n`. Indices from `n` on must be in no ring.
    pub fn resize(&mut self, n: u32) {
        let len = self.heads as usize + n as usize;
        resize(&mut self.links, len, Link::default());
    }

    /// Number of indices with an entry.
    pub(super) fn len(&self) -> usize {
        self.links.len() - self.heads as usize
    }

    fn link(&mut self, a: u32, b: u32) {
        self.links[a as usize].next = b;
        self.links[b as usize].prev = a;
    }

    /// Adds `i` to a ring as the newest. It must be in no ring.
    #[inline]
    pub fn push(&mut self, ring: u32, i: u32) {
        let i = i + self.heads;
        let newest = self.links[ring as usize].prev;
        self.link(newest, i);
        self.link(i, ring);
    }

    /// Adds `i` to a ring as the oldest. It must be in no ring.
    pub fn push_oldest(&mut self, ring: u32, i: u32) {
        let i = i + self.heads;
        let oldest = self.links[ring as usize].next;
        self.link(ring, i);
        self.link(i, oldest);
    }

    /// Removes `i` from its ring. It must be in one.
    #[inline]
    pub fn remove(&mut self, i: u32) {
        let i = (i + self.heads) as usize;
        let (prev, next) = (self.links[i].prev, self.links[i].next);
        self.link(prev, next);
    }

    /// Replaces `from` by `to`, which must be in no ring.
    pub fn replace(&mut self, from: u32, to: u32) {
        let (from, to) = ((from + self.heads) as usize, to + self.heads);
        let (prev, next) = (self.links[from].prev, self.links[from].next);
        self.link(prev, to);
        self.link(to, next);
    }

    /// The oldest index of a ring.
    #[must_use]
    pub fn oldest(&self, ring: u32) -> Option<u32> {
        self.links[ring as usize].next.checked_sub(self.heads)
    }

    /// Indices of a ring from the oldest to the newest.
    pub fn iter(&self, ring: u32) -> impl Iterator<Item = u32> + '_ {
        let after = move |node: u32| self.links[node as usize].next.checked_sub(self.heads);
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
        assert_eq!(dump(&r, 1), [4, 1]);
        assert_eq!((r.oldest(0), r.oldest(1)), (Some(0), Some(4)));
        r.replace(3, 2);
        r.replace(4, 3);
        assert_eq!((dump(&r, 0), dump(&r, 1)), (vec![0, 2, 5], vec![3, 1]));
        r.remove(1);
        r.remove(3);
        assert_eq!((dump(&r, 0), r.oldest(1)), (vec![0, 2, 5], None));
    }
}
