//! Who leaves next.

use super::ages::{Ages, RINGS};
use super::duel::Duel;
use super::rings::Rings;
use super::worth::Worth;

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
    /// often one fired of late says more than when it fired last. Where phases are short
    /// and few, the last use says most: so units used in this tick or the one before get a
    /// head start, as large as pays (see `duel.rs`).
    Lrfu,
}

impl Policy {
    /// Bytes of an order of `units` units that may be cached, resident or not.
    pub(super) fn bytes(self, units: u64) -> u64 {
        let heads = |pinned: u32| 2 * 4 * u64::from(pinned + 1);
        match self {
            Self::Lru => heads(LRU_PINNED),
            Self::Lrfu => {
                let fixed = heads(LRFU_PINNED) + Worth::fixed_bytes();
                fixed.saturating_add(
                    (units.saturating_mul(4)).saturating_add(Duel::bytes_for(units)),
                )
            }
        }
    }
}

/// The ring of indices that go after all others until the next tick, and that of those set
/// aside because they are in use, where [`Ages`] takes the first ones.
const LAST: u32 = RINGS;
const LRFU_PINNED: u32 = RINGS + 1;
/// The same where one ring has all that may be evicted.
const LRU_PINNED: u32 = 1;

/// An order of eviction of indices, each of which holds a unit.
#[derive(Debug)]
pub(super) struct Order {
    pub rings: Rings,
    /// `None` where the last use alone counts.
    lrfu: Option<Lrfu>,
}

#[derive(Debug)]
struct Lrfu {
    worth: Worth,
    ages: Ages,
    duel: Duel,
}

impl Order {
    pub fn new(policy: Policy, units: u32) -> Self {
        let (pinned, lrfu) = match policy {
            Policy::Lru => (LRU_PINNED, None),
            Policy::Lrfu => {
                let lrfu = Lrfu {
                    worth: Worth::new(units),
                    ages: Ages::new(Duel::first()),
                    duel: Duel::new(units),
                };
                (LRFU_PINNED, Some(lrfu))
            }
        };
        Self {
            rings: Rings::new(pinned + 1, 0),
            lrfu,
        }
    }

    /// Entries for indices below `n` from now on. Those from `n` on must be in no ring.
    pub fn resize(&mut self, n: u32) {
        self.rings.resize(n);
        if let Some(lrfu) = &mut self.lrfu {
            lrfu.duel.resize(n);
        }
    }

    fn pinned_ring(&self) -> u32 {
        match self.lrfu {
            None => LRU_PINNED,
            Some(_) => LRFU_PINNED,
        }
    }

    /// Time passes. `unit` tells what an index holds.
    pub fn tick(&mut self, unit: impl Fn(u32) -> u32) {
        if let Some(Lrfu { worth, ages, duel }) = &mut self.lrfu {
            let lowest = worth.lowest();
            worth.tick();
            ages.tick(&mut self.rings, lowest, worth.lowest());
            if let Some(head_start) = duel.tick(lowest, worth.lowest()) {
                ages.head_start = head_start;
            }
            while let Some(i) = self.rings.oldest(LAST) {
                self.rings.remove(i);
                let bucket = worth.bucket(unit(i));
                ages.push(&mut self.rings, bucket, i);
            }
        }
    }

    /// Says how often a unit is used per tick before it ever was.
    pub fn expect(&mut self, unit: u32, uses: f64) {
        if let Some(lrfu) = &mut self.lrfu {
            lrfu.worth.expect(unit, uses);
        }
    }

    /// Counts a use of a unit.
    #[inline]
    pub fn used(&mut self, unit: u32) {
        if let Some(lrfu) = &mut self.lrfu {
            lrfu.worth.used(unit);
            lrfu.duel.used(unit, &lrfu.worth);
        }
    }

    /// Makes index `i`, which is in no ring and whose `unit` was just used, evictable.
    #[inline]
    pub fn push(&mut self, i: u32, unit: u32) {
        match &mut self.lrfu {
            None => self.rings.push(0, i),
            Some(Lrfu { worth, ages, .. }) => ages.push(&mut self.rings, worth.bucket(unit), i),
        }
    }

    /// Makes index `i`, which is in no ring, the next to be evicted.
    pub fn push_first_victim(&mut self, i: u32) {
        match &mut self.lrfu {
            None => self.rings.push_oldest(0, i),
            Some(Lrfu { worth, ages, .. }) => ages.push_oldest(&mut self.rings, worth.lowest(), i),
        }
    }

    /// Makes index `i`, which is in no ring, the last to be evicted until the next tick.
    pub fn push_last_victim(&mut self, i: u32) {
        self.rings
            .push(if self.lrfu.is_some() { LAST } else { 0 }, i);
    }

    /// Takes index `i` out of the ring that it is in.
    #[inline]
    pub fn remove(&mut self, i: u32) {
        self.rings.remove(i);
    }

    /// Puts index `i`, which is in no ring, where no victim is looked for.
    #[inline]
    pub fn set_aside(&mut self, i: u32) {
        let ring = self.pinned_ring();
        self.rings.push(ring, i);
    }

    /// The next victim.
    pub fn victim(&mut self) -> Option<u32> {
        match &mut self.lrfu {
            None => self.rings.oldest(0),
            Some(Lrfu { worth, ages, .. }) => {
                (ages.victim(&self.rings, worth.lowest())).or_else(|| self.rings.oldest(LAST))
            }
        }
    }

    /// Indices that are not set aside, the next victim first.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        let last = if self.lrfu.is_some() { LAST } else { 0 };
        let rings = &self.rings;
        let by_age = (self.lrfu.iter()).flat_map(|l| l.ages.iter(rings, l.worth.lowest()));
        by_age.chain(rings.iter(last))
    }

    /// Indices that were set aside.
    pub fn iter_aside(&self) -> impl Iterator<Item = u32> + '_ {
        self.rings.iter(self.pinned_ring())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_worth_leaves_first_however_long_it_stays() {
        let mut order = Order::new(Policy::Lrfu, 4);
        order.resize(4);
        for unit in 0..4u32 {
            (0..=unit).for_each(|_| order.used(unit));
            order.push(unit, unit);
        }
        order.tick(|i| i);
        order.tick(|i| i);
        assert_eq!(order.iter().collect::<Vec<_>>(), [0, 1, 2, 3]);
        // a long time later 1 is used once: it is worth more than what is forgotten
        for _ in 0..100_000 {
            order.tick(|i| i);
        }
        assert_eq!(order.iter().collect::<Vec<_>>(), [0, 1, 2, 3]);
        order.remove(1);
        order.used(1);
        order.push(1, 1);
        assert_eq!(order.iter().collect::<Vec<_>>(), [0, 2, 3, 1]);
        assert_eq!(order.victim(), Some(0));
        order.remove(3);
        order.push_first_victim(3);
        assert_eq!(order.victim(), Some(3));
        order.remove(3);
        order.push_last_victim(3);
        assert_eq!(order.iter().collect::<Vec<_>>(), [0, 2, 1, 3]);
    }
}
