//! Inspection for tests: the eviction order and the invariants.

use super::{Order, SlotCache};

impl SlotCache {
    /// Evictable units, next victim first, as flat neuron numbers. For tests and traces.
    #[must_use]
    pub fn dump(&self) -> Vec<u32> {
        let (mut order, mut table) = (self.order.clone(), self.table.clone());
        let key = |slot: u32| self.keys[slot as usize];
        std::iter::from_fn(|| {
            let slot = match &mut order {
                Order::Lru(lru) => lru.victim(&table, key)?,
                Order::Lrfu(lrfu) => lrfu.victim(&table, &self.keys)?,
            };
            if let Order::Lru(lru) = &mut order {
                lru.remove(slot);
            }
            table.at_mut(key(slot)).leave();
            Some(key(slot))
        })
        .collect()
    }

    /// Checks the numbered invariants; for tests.
    ///
    /// # Panics
    /// When one does not hold, naming it.
    pub fn check_invariants(&self) {
        let known = self.keys.len();
        assert!(known >= self.arena.limit() as usize, "6: too few keys");
        let mut listed = vec![0u32; known];
        if let Order::Lru(lru) = &self.order {
            assert_eq!(lru.len(), known, "6: links");
            for (slot, aside) in lru.iter() {
                listed[slot as usize] += 1;
                let pins = self.table.at(self.keys[slot as usize]).pins;
                assert!(pins > 0 || !aside, "2: slot {slot} is not pinned");
            }
        }
        let (mut home, mut loading, mut resident) = (0, 0, 0);
        for (slot, &key) in (0u32..).zip(&self.keys) {
            let unit = self.table.at(key);
            let shelved = self.arena.is_shelved(slot);
            if shelved {
                resident += 1;
                assert_eq!(unit.resident(), Some(slot), "1: resident slot");
            } else if self.arena.is_home(slot) {
                home += u32::from(slot < self.arena.limit());
                assert_ne!(unit.slot(), Some(slot), "1: home slot is in the table");
            } else {
                loading += 1;
                assert_eq!(unit.loading(), Some(slot), "1: loading slot");
            }
            let lists = shelved && matches!(self.order, Order::Lru(_));
            assert_eq!(
                listed[slot as usize],
                u32::from(lists),
                "2: lists of slot {slot}"
            );
        }
        let known = self.table.all().iter();
        assert!(
            known.clone().all(|u| u.pins == 0 || u.resident().is_some()),
            "2: pins"
        );
        let in_use = known.clone().filter(|u| u.pins > 0).count() as u32;
        assert_eq!(self.in_use, in_use, "3: in use");
        let entries = known.filter(|u| u.slot().is_some()).count() as u32;
        assert_eq!(entries, loading + resident, "1: stray table entries");
        assert_eq!(self.resident(), resident, "3: resident");
        assert_eq!(self.loading, loading, "3: loading");
        assert_eq!(
            self.arena.free() as u32,
            home,
            "4: home slots against the arena"
        );
    }
}
