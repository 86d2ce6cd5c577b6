//! Least recently used, over indices: doubly linked lists inside two flat arrays.
//!
//! Knows nothing of keys, slots or bytes. Several [`List`]s share one [`Links`]; an index is in at
//! most one of them, which the caller keeps track of.

const NONE: u32 = u32::MAX;

/// The links of all indices.
#[derive(Debug, Clone)]
pub struct Links {
    prev: Vec<u32>,
    next: Vec<u32>,
}

impl Links {
    /// Links for indices below `n`.
    #[must_use]
    pub fn new(n: u32) -> Self {
        Self {
            prev: vec![NONE; n as usize],
            next: vec![NONE; n as usize],
        }
    }

    /// Indices there are links for.
    pub(super) fn len(&self) -> usize {
        self.next.len()
    }

    /// Links for indices below `n` from now on. Those from `n` on must be in no list.
    pub fn resize(&mut self, n: u32) {
        for links in [&mut self.prev, &mut self.next] {
            resize(links, n, NONE);
        }
    }
}

/// A vector of `n` entries that takes no more memory than they need.
pub(super) fn resize<T: Clone>(all: &mut Vec<T>, n: u32, new: T) {
    let n = n as usize;
    all.reserve_exact(n.saturating_sub(all.len()));
    all.resize(n, new);
    all.shrink_to_fit();
}

/// A list of indices, oldest first. All operations take constant time and allocate nothing.
#[derive(Debug, Clone)]
pub struct List {
    oldest: u32,
    newest: u32,
    len: u32,
}

impl Default for List {
    fn default() -> Self {
        Self {
            oldest: NONE,
            newest: NONE,
            len: 0,
        }
    }
}

impl List {
    /// Indices in the list.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether the list is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The index that was pushed longest ago: the next victim.
    #[must_use]
    pub fn oldest(&self) -> Option<u32> {
        (self.oldest != NONE).then_some(self.oldest)
    }

    /// Adds `i` as the newest. It must be in no list.
    pub fn push(&mut self, links: &mut Links, i: u32) {
        links.prev[i as usize] = self.newest;
        links.next[i as usize] = NONE;
        match self.newest {
            NONE => self.oldest = i,
            newest => links.next[newest as usize] = i,
        }
        self.newest = i;
        self.len += 1;
    }

    /// Adds `i` as the oldest, the next to go. It must be in no list.
    pub fn push_oldest(&mut self, links: &mut Links, i: u32) {
        links.next[i as usize] = self.oldest;
        links.prev[i as usize] = NONE;
        match self.oldest {
            NONE => self.newest = i,
            oldest => links.prev[oldest as usize] = i,
        }
        self.oldest = i;
        self.len += 1;
    }

    /// Takes `i` out. It must be in this list.
    pub fn remove(&mut self, links: &mut Links, i: u32) {
        let (prev, next) = (links.prev[i as usize], links.next[i as usize]);
        match prev {
            NONE => self.oldest = next,
            prev => links.next[prev as usize] = next,
        }
        match next {
            NONE => self.newest = prev,
            next => links.prev[next as usize] = prev,
        }
        self.len -= 1;
    }

    /// Puts `to`, which is in no list, into the place of `from`.
    pub fn replace(&mut self, links: &mut Links, from: u32, to: u32) {
        let (prev, next) = (links.prev[from as usize], links.next[from as usize]);
        links.prev[to as usize] = prev;
        links.next[to as usize] = next;
        match prev {
            NONE => self.oldest = to,
            prev => links.next[prev as usize] = to,
        }
        match next {
            NONE => self.newest = to,
            next => links.prev[next as usize] = to,
        }
    }

    /// Moves all of `other` behind the newest, keeping its order.
    pub fn append(&mut self, links: &mut Links, other: &mut Self) {
        let other = std::mem::take(other);
        if other.is_empty() {
            return;
        }
        if self.is_empty() {
            *self = other;
            return;
        }
        links.next[self.newest as usize] = other.oldest;
        links.prev[other.oldest as usize] = self.newest;
        self.newest = other.newest;
        self.len += other.len;
    }

    /// Indices from the oldest to the newest.
    pub fn iter<'a>(&self, links: &'a Links) -> impl Iterator<Item = u32> + 'a {
        let some = |i: u32| (i != NONE).then_some(i);
        std::iter::successors(some(self.oldest), move |&i| some(links.next[i as usize]))
    }

    /// The list as a vector, oldest first, for tests and traces.
    #[must_use]
    pub fn dump(&self, links: &Links) -> Vec<u32> {
        self.iter(links).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_is_that_of_pushes() {
        let mut links = Links::new(6);
        let (mut a, mut b) = (List::default(), List::default());
        for i in [3, 0, 5] {
            a.push(&mut links, i);
        }
        // 3 0 5
        assert_eq!(a.dump(&links), [3, 0, 5]);
        a.remove(&mut links, 0);
        // 3 5
        a.push(&mut links, 0);
        // 3 5 0
        assert_eq!(a.dump(&links), [3, 5, 0]);
        b.push(&mut links, 4);
        b.push(&mut links, 1);
        a.append(&mut links, &mut b);
        // 3 5 0 4 1, and b empty
        assert_eq!(a.dump(&links), [3, 5, 0, 4, 1]);
        assert!(b.is_empty() && b.oldest().is_none());
        a.remove(&mut links, 3);
        a.remove(&mut links, 1);
        // 5 0 4
        assert_eq!(
            (a.dump(&links), a.oldest(), a.len()),
            (vec![5, 0, 4], Some(5), 3)
        );
        a.replace(&mut links, 0, 2);
        // 5 2 4
        assert_eq!(a.dump(&links), [5, 2, 4]);
        a.replace(&mut links, 5, 0);
        a.replace(&mut links, 4, 1);
        // 0 2 1
        assert_eq!((a.dump(&links), a.oldest()), (vec![0, 2, 1], Some(0)));
        b.append(&mut links, &mut a);
        assert_eq!((b.dump(&links), a.len()), (vec![0, 2, 1], 0));
        a.append(&mut links, &mut List::default());
        assert!(a.is_empty());
    }
}
