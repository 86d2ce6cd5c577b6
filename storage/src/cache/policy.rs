//! Who leaves next, over indices: rings of indices in flat arrays, and an order of
//! eviction made of them. Nothing here allocates after it was made, but to resize.
//!
//! Knows nothing of keys, slots or bytes.

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

    /// Indices of a ring from the oldest to the newest.
    pub fn iter(&self, ring: u32) -> impl Iterator<Item = u32> + '_ {
        let after = move |node: u32| self.next[node as usize].checked_sub(self.heads);
        std::iter::successors(after(ring), move |&i| after(i + self.heads))
    }
}

/// Which unit leaves first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// The one that was used longest ago.
    Lru,
    /// The one with the fewest uses, each counting less with its age: half after about
    /// 43 ticks (LRFU, Lee et al. 2001). Uses are remembered for units that are not
    /// resident, too.
    ///
    /// Neurons fire in phases of some dozen tokens and otherwise by temperature, so how
    /// often one fired of late says more than when it fired last. What was used in this
    /// tick or the one before goes last all the same: where phases are short and few, the
    /// last use says most.
    Lrfu,
}

impl Policy {
    /// Bytes for each unit that may be cached, resident or not, beside the table's.
    pub(super) fn bytes_per_unit(self) -> u64 {
        match self {
            Self::Lru => 0,
            Self::Lrfu => 4,
        }
    }

    /// Bytes whatever the number of units.
    pub(super) fn fixed_bytes(self) -> u64 {
        match self {
            Self::Lru => 2 * 2 * 4,
            Self::Lrfu => 2 * 4 * u64::from(RINGS) + 2 * 2 * REACH as u64,
        }
    }
}

/// Units of a doubling of worth.
const DOUBLING: u32 = 128;

/// Worth is counted against a standard that grows by this much with every tick, instead
/// of letting everything shrink: by 2^(3/128), so that a use loses 1.6 %.
const TICK: u32 = 3;

/// Two worths whose logarithms differ by this or more add up to the larger one.
const REACH: u32 = 8 * DOUBLING;

/// Worth covered by one bucket: an eighth of a doubling.
const BUCKET: u32 = DOUBLING / 8;

/// Buckets: from 9 doublings below a single fresh use to 7 above, more than uses in
/// every tick add up to.
const BUCKETS: u32 = 128;

/// The buckets, the units in use, and the units used in this tick and in the last one.
const RINGS: u32 = BUCKETS + 3;

/// Buckets below that of a fresh use.
const BELOW: u32 = 72;

/// An order of eviction of indices whose uses are known by the units they hold.
#[derive(Debug)]
pub(super) struct Order {
    pub rings: Rings,
    policy: Policy,
    /// Logarithm of each unit's worth, in parts of a doubling.
    worth: Vec<u32>,
    /// log2(1 + 2^x) for x from -REACH to REACH.
    sums: Vec<u16>,
    /// That of a use right now.
    now: u32,
    /// Buckets that may hold something.
    filled: u128,
    /// The ring of units used in this tick.
    fresh: u32,
    evictable: u32,
    pinned: u32,
}

/// The ring of units in use is the last.
const LRU_PINNED: u32 = 1;

impl Order {
    pub fn new(policy: Policy, units: u32) -> Self {
        let (rings, worth, sums) = match policy {
            Policy::Lru => (LRU_PINNED + 1, Vec::new(), Vec::new()),
            Policy::Lrfu => {
                let unit = f64::from(DOUBLING);
                let sum = |i: u32| {
                    let x = (f64::from(i) - f64::from(REACH)) / unit;
                    ((1.0 + x.exp2()).log2() * unit).round() as u16
                };
                let sums = (0..2 * REACH).map(sum).collect();
                (RINGS, vec![0; units as usize], sums)
            }
        };
        Self {
            rings: Rings::new(rings, 0),
            policy,
            worth,
            sums,
            now: 2 * REACH,
            filled: 0,
            fresh: BUCKETS + 1,
            evictable: 0,
            pinned: 0,
        }
    }

    fn pinned_ring(&self) -> u32 {
        match self.policy {
            Policy::Lru => LRU_PINNED,
            Policy::Lrfu => BUCKETS,
        }
    }

    /// The ring of units used in the tick before.
    fn stale(&self) -> u32 {
        2 * BUCKETS + 3 - self.fresh
    }

    /// Time passes. `units` are those that the indices hold.
    pub fn tick(&mut self, units: &[u32]) {
        if self.policy == Policy::Lru {
            return;
        }
        let lowest = self.lowest();
        self.now = self.now.saturating_add(TICK);
        for bucket in lowest..self.lowest() {
            // what has sunk below all others, as the first to go among them
            let (from, to) = (bucket % BUCKETS, (bucket + 1) % BUCKETS);
            if self.filled >> from & 1 == 1 {
                self.rings.prepend(to, from);
                self.filled &= !(1 << from);
                self.filled |= 1 << to;
            }
        }
        let stale = self.stale();
        while let Some(i) = self.rings.oldest(stale) {
            self.rings.remove(i);
            let bucket = self.bucket(units[i as usize]);
            self.filled |= 1 << bucket;
            self.rings.push(bucket, i);
        }
        self.fresh = stale;
    }

    /// The bucket of the least worth, and of everything below.
    fn lowest(&self) -> u32 {
        self.now / BUCKET - BELOW
    }

    /// Says how often a unit is used per tick before it ever was.
    pub fn expect(&mut self, unit: u32, uses: f64) {
        if let Some(worth) = self.worth.get_mut(unit as usize) {
            let unit = f64::from(DOUBLING);
            let decay = 1.0 - (-f64::from(TICK) / unit).exp2();
            let log = (uses / decay).max(1e-9).log2() * unit;
            let log = log.clamp(-f64::from(REACH), f64::from(REACH));
            *worth = (f64::from(self.now) + log) as u32;
        }
    }

    /// Counts a use of a unit.
    #[inline]
    pub fn used(&mut self, unit: u32) {
        if let Some(worth) = self.worth.get_mut(unit as usize) {
            let x = i64::from(*worth) - i64::from(self.now) + i64::from(REACH);
            *worth = match u32::try_from(x) {
                Err(_) => self.now,
                Ok(x) if x >= 2 * REACH => *worth,
                Ok(x) => self.now + u32::from(self.sums[x as usize]),
            };
        }
    }

    fn bucket(&self, unit: u32) -> u32 {
        let Some(worth) = self.worth.get(unit as usize) else {
            return 0;
        };
        let lowest = self.lowest();
        (worth / BUCKET).clamp(lowest, lowest + BUCKETS - 1) % BUCKETS
    }

    /// Makes index `i`, which is in no ring and was just used, evictable.
    #[inline]
    pub fn push(&mut self, i: u32) {
        let ring = match self.policy {
            Policy::Lru => 0,
            Policy::Lrfu => self.fresh,
        };
        self.rings.push(ring, i);
        self.evictable += 1;
    }

    /// Makes index `i`, which is in no ring, the next to be evicted.
    pub fn push_first_victim(&mut self, i: u32) {
        let bucket = match self.policy {
            Policy::Lru => 0,
            Policy::Lrfu => self.lowest() % BUCKETS,
        };
        self.filled |= 1 << bucket;
        self.rings.push_oldest(bucket, i);
        self.evictable += 1;
    }

    /// Makes index `i`, which is in no ring, the last to be evicted.
    pub fn push_last_victim(&mut self, i: u32) {
        self.push(i);
    }

    /// Takes index `i` out of those that may be evicted.
    #[inline]
    pub fn remove(&mut self, i: u32) {
        self.rings.remove(i);
        self.evictable -= 1;
    }

    /// Marks index `i`, which is in no ring, as in use.
    #[inline]
    pub fn pin(&mut self, i: u32) {
        let ring = self.pinned_ring();
        self.rings.push(ring, i);
        self.pinned += 1;
    }

    /// Takes index `i` out of those in use.
    #[inline]
    pub fn unpin(&mut self, i: u32) {
        self.rings.remove(i);
        self.pinned -= 1;
    }

    /// The index in use whose last use lies furthest back.
    pub fn first_pinned(&self) -> Option<u32> {
        self.rings.oldest(self.pinned_ring())
    }

    /// The next victim.
    pub fn victim(&mut self) -> Option<u32> {
        if self.policy == Policy::Lru {
            return self.rings.oldest(0);
        }
        let first = self.lowest() % BUCKETS;
        loop {
            // bit 0 is the lowest bucket
            let ahead = self.filled.rotate_right(first);
            if ahead == 0 {
                let [stale, fresh] = [self.stale(), self.fresh].map(|r| self.rings.oldest(r));
                return stale.or(fresh);
            }
            let bucket = (first + ahead.trailing_zeros()) % BUCKETS;
            match self.rings.oldest(bucket) {
                None => self.filled &= !(1 << bucket),
                some => return some,
            }
        }
    }

    /// Indices that may be evicted.
    pub fn evictable(&self) -> u32 {
        self.evictable
    }

    /// Indices in use.
    pub fn pinned(&self) -> u32 {
        self.pinned
    }

    /// Indices that may be evicted, the next victim first.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        let (first, count, fresh) = match self.policy {
            Policy::Lru => (0, 1, 0),
            Policy::Lrfu => (self.lowest(), BUCKETS, 2),
        };
        let buckets = (first..first + count).map(move |b| b % count);
        let fresh = [self.stale(), self.fresh].into_iter().take(fresh);
        buckets
            .chain(fresh)
            .flat_map(move |ring| self.rings.iter(ring))
    }

    /// Indices in use, in the order of last use.
    pub fn iter_pinned(&self) -> impl Iterator<Item = u32> + '_ {
        self.rings.iter(self.pinned_ring())
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
    }

    /// Worth as it is defined: the sum of all uses, each weighted by its age.
    #[test]
    fn worth_is_the_sum_of_aged_uses() {
        let mut order = Order::new(Policy::Lrfu, 3);
        let mut exact = [0f64; 3];
        let weight = (-f64::from(TICK) / f64::from(DOUBLING)).exp2();
        let mut seed = 7u32;
        for tick in 0..3000 {
            for (unit, exact) in exact.iter_mut().enumerate() {
                seed = seed.wrapping_mul(1664525).wrapping_add(1013904223);
                *exact *= weight;
                if (seed >> 16).is_multiple_of(3 + 40 * unit as u32) {
                    *exact += 1.0;
                    order.used(unit as u32);
                }
                let log = (f64::from(order.worth[unit]) - f64::from(order.now)) / 128.0;
                if *exact > 0.01 && tick > 200 {
                    assert!((log - exact.log2()).abs() < 0.15, "{tick}: {log} {exact}");
                }
            }
            order.tick(&[]);
        }
        order.expect(0, 0.25);
        let log = (f64::from(order.worth[0]) - f64::from(order.now)) / 128.0;
        assert!((log - (0.25 / (1.0 - weight)).log2()).abs() < 0.02);
    }

    #[test]
    fn the_least_worth_leaves_first_however_long_it_stays() {
        let mut order = Order::new(Policy::Lrfu, 4);
        order.rings.resize(4);
        for unit in 0..4u32 {
            (0..=unit).for_each(|_| order.used(unit));
            order.push(unit);
        }
        order.tick(&[0, 1, 2, 3]);
        order.tick(&[0, 1, 2, 3]);
        assert_eq!(order.iter().collect::<Vec<_>>(), [0, 1, 2, 3]);
        // a long time later 1 is used once: it is worth more than what is forgotten
        for _ in 0..100_000 {
            order.tick(&[0, 1, 2, 3]);
        }
        assert_eq!(order.iter().collect::<Vec<_>>(), [0, 1, 2, 3]);
        order.remove(1);
        order.used(1);
        order.push(1);
        assert_eq!(order.iter().collect::<Vec<_>>(), [0, 2, 3, 1]);
        assert_eq!(order.victim(), Some(0));
        order.remove(3);
        order.push_first_victim(3);
        assert_eq!(order.victim(), Some(3));
        order.remove(3);
        order.push_last_victim(3);
        assert_eq!(order.iter().collect::<Vec<_>>(), [0, 2, 1, 3]);
        assert_eq!(order.evictable(), 4);
    }
}
