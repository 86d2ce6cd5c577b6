//! LRFU eviction against an oracle that computes each worth as it is defined, in floats, from the
//! whole history of a unit.
//!
//! ```text
//! worth      Σ 2^(−3·age/128) over the uses of a unit, age in ticks; before it was ever used, what
//!            so many uses per tick would have added up to
//! last use   if the unit was used in the last turn that its bank had: worth + 8·p/(1−p), which is
//!            at least 1 and at most 64; p is the part of the units used in a tick that had been
//!            used in the one before, 1/8 of each tick's part entering it
//! nearness   in place of that, where of the units that are due at least 0.6 are due again in the
//!            next report: worth · 2^(steps/16)
//! first      what was released as the first victim leaves first, what was read ahead in this tick
//!            leaves last
//! ```
//!
//! The cache keeps logarithms in 64ths of a doubling and rounds with each use: see [`WIDTH`]. With
//! these few units it looks at all of them, so the first eviction of a tick is exact to that width.
//! Later ones in the tick keep to the order of that look: what was evictable then, and has not been
//! touched since, leaves by its worth then, and before all that came later. What larger tables
//! approximate (victims of three ticks, a sample of the units) is not tested here.

use std::collections::{HashMap, HashSet};

use emberflow_storage::arena::{Arena, ArenaOptions};
use emberflow_storage::cache::{Eviction, Key, SlotCache};
use proptest::prelude::*;

const BANKS: [u32; 3] = [11, 2, 11];
const UNITS: u32 = 24;
const CAPACITY: u32 = 9;

/// Doublings of worth by which units are equal to the cache.
const WIDTH: f64 = 0.05;

fn key(n: u32) -> Key {
    match n {
        0..11 => Key::new(0, n),
        11..13 => Key::new(1, n - 11),
        _ => Key::new(2, n - 13),
    }
}

#[derive(Debug, Clone)]
enum Op {
    /// Rounds of all banks pass.
    Rounds(u32),
    /// A bank's turn.
    Turn(u32),
    Use(u32),
    UseAndMark(u32),
    /// Some units from one on are used in so many rounds.
    UseForLong(u32, u32, u32),
    LookAt(u32),
    Pin(u32),
    Unpin(u32),
    UnpinUnused(u32),
    ReadAhead(u32),
    Remove(u32),
    Expect(u32, f64),
    /// Nearness of the units from one on.
    Report(u32, Vec<i8>, bool),
    Resize(u32),
}

fn op() -> impl Strategy<Value = Op> {
    let n = 0..UNITS;
    let rate = prop::sample::select(vec![0.0, 0.001, 0.02, 0.3, 1.0]);
    let near = prop::collection::vec(prop_oneof![any::<i8>(), -20..20i8], 1..24);
    prop_oneof![
        6 => (1..4u32).prop_map(Op::Rounds),
        1 => (1..400u32).prop_map(Op::Rounds),
        6 => (0..3u32).prop_map(Op::Turn),
        20 => n.clone().prop_map(Op::Use),
        2 => n.clone().prop_map(Op::UseAndMark),
        1 => (n.clone(), 1..7u32, 4..40u32).prop_map(|(n, units, rounds)| Op::UseForLong(n, units, rounds)),
        2 => n.clone().prop_map(Op::LookAt),
        2 => n.clone().prop_map(Op::Pin),
        2 => n.clone().prop_map(Op::Unpin),
        2 => n.clone().prop_map(Op::UnpinUnused),
        2 => n.clone().prop_map(Op::ReadAhead),
        1 => n.clone().prop_map(Op::Remove),
        1 => (n.clone(), rate).prop_map(|(n, rate)| Op::Expect(n, rate)),
        2 => (n, near, any::<bool>()).prop_map(|(n, near, follows)| Op::Report(n, near, follows)),
        1 => (1..=CAPACITY).prop_map(Op::Resize),
    ]
}

/// What is known of a unit, resident or not.
#[derive(Default)]
struct Unit {
    resident: bool,
    pins: u32,
    /// The ticks of all uses, and uses per tick that were expected from one tick on.
    uses: Vec<i32>,
    expected: Option<(i32, f64)>,
    last: Option<i32>,
    near: Option<i8>,
    /// To be the first victim, and whether that may have been forgotten: an eviction that finds it
    /// in use does not come back to it.
    first: bool,
    forgotten: bool,
}

impl Unit {
    fn is_evictable(&self) -> bool {
        self.resident && self.pins == 0
    }

    fn worth(&self, now: i32) -> f64 {
        let weight = |tick: i32| (-3.0 * f64::from(now - tick) / 128.0).exp2();
        let expected = self.expected.map_or(0.0, |(since, rate)| {
            let before = rate / (1.0 - weight(now - 1));
            before.max(1.0 / 256.0) * weight(since)
        });
        expected + self.uses.iter().map(|&tick| weight(tick)).sum::<f64>()
    }
}

/// What a tick's evictions so far tell of the order of the next ones.
enum Order {
    /// There was none: all units are looked at.
    Open,
    /// There was one. The ranks then, and who has not been touched since.
    At(HashMap<u32, f64>, HashSet<u32>),
    /// All that were looked at may be gone, and others were, nobody knows when.
    Unknown,
}

struct Oracle {
    units: HashMap<u32, Unit>,
    now: i32,
    bank: u32,
    persistence: f64,
    /// First uses of units in this tick; whether they had been used in the tick before.
    used: Vec<bool>,
    /// Units that were due in a report, as far as another followed it in this tick: whether they
    /// were due in that, too.
    due: Vec<bool>,
    nearness_counts: bool,
    /// Whether the tick before had such units.
    judged: bool,
    order: Order,
    /// Marks of first victims that the cache may remember.
    marks: u32,
}

impl Oracle {
    fn new() -> Self {
        Self {
            units: (0..UNITS).map(|n| (n, Unit::default())).collect(),
            now: 0,
            bank: 0,
            persistence: 0.8,
            used: Vec::new(),
            due: Vec::new(),
            nearness_counts: false,
            judged: false,
            order: Order::Open,
            marks: 0,
        }
    }

    fn unit(&mut self, n: u32) -> &mut Unit {
        if let Order::At(_, untouched) = &mut self.order {
            untouched.remove(&n);
        }
        self.units.get_mut(&n).unwrap()
    }

    fn begin(&mut self, bank: u32) {
        if bank <= self.bank {
            if !self.used.is_empty() {
                let part = share(&self.used);
                self.persistence += (part - self.persistence) / 8.0;
            }
            self.nearness_counts = self.nearness_lasts();
            self.judged = !self.due.is_empty();
            self.used.clear();
            self.due.clear();
            self.now += 1;
            self.order = Order::Open;
        }
        self.bank = bank;
    }

    fn nearness_lasts(&self) -> bool {
        !self.due.is_empty() && share(&self.due) >= 0.6
    }

    fn used(&mut self, n: u32, mark: bool) {
        let now = self.now;
        let unit = self.unit(n);
        // what was read ahead counts as used in the tick that follows, which a use adds nothing to
        let again = (unit.last != Some(now)).then(|| unit.last == Some(now - 1));
        unit.uses.push(now);
        unit.last = Some(now);
        (unit.first, unit.forgotten) = (mark, false);
        self.used.extend(again);
        self.marks += u32::from(mark);
    }

    fn report(&mut self, first: u32, near: &[i8], follows: bool) {
        for (n, &near) in (first..UNITS).zip(near) {
            let unit = self.unit(n);
            let was_due = unit.near.is_some_and(|near| near >= 0);
            unit.near = Some(near.max(-127));
            if was_due && follows {
                self.due.push(near >= 0);
            }
        }
        if follows && !self.judged {
            let counts = self.nearness_lasts();
            if counts != self.nearness_counts && !matches!(self.order, Order::Open) {
                self.order = Order::Unknown;
            }
            self.nearness_counts = counts;
        }
    }

    /// Who has less goes first.
    fn rank(&self, n: u32) -> f64 {
        let unit = &self.units[&n];
        if unit.first {
            return f64::NEG_INFINITY;
        }
        if unit.last == Some(self.now + 1) {
            return f64::INFINITY;
        }
        // What is below or above that is not told apart.
        let log = |worth: f64| worth.log2().clamp(-9.0, 7.0);
        let worth = unit.worth(self.now);
        match unit.near {
            Some(near) if self.nearness_counts => log(worth) + f64::from(near) / 16.0,
            _ => {
                let waits = key(n).bank > self.bank;
                let in_last_turn =
                    unit.last == Some(self.now) || unit.last == Some(self.now - 1) && waits;
                let p = self.persistence;
                let follow = (8.0 * p / (1.0 - p)).clamp(1.0, 64.0);
                log(worth + if in_last_turn { follow } else { 0.0 })
            }
        }
    }

    fn evictable(&self) -> Vec<u32> {
        let mut all: Vec<u32> = (0..UNITS).collect();
        all.retain(|n| self.units[n].is_evictable());
        all
    }

    /// Checks that it was the turn of `gone`.
    fn evicted(&mut self, gone: u32) {
        let evictable = self.evictable();
        assert!(evictable.contains(&gone), "{gone} was in use");
        let is_first = |n: u32| self.units[&n].first && !self.units[&n].forgotten;
        let marked = evictable.iter().any(|&n| is_first(n));
        assert!(
            !marked || is_first(gone),
            "{gone} went before a first victim"
        );
        let (forgotten, now) = (self.units[&gone].forgotten, self.rank(gone));
        match &mut self.order {
            _ if marked => self.marks -= 1,
            order if forgotten => *order = Order::Unknown,
            Order::Open => {
                let ranks: HashMap<u32, f64> =
                    evictable.iter().map(|&n| (n, self.rank(n))).collect();
                for (n, rank) in &ranks {
                    assert!(ranks[&gone] <= rank + WIDTH, "{gone} before {n}: {ranks:?}");
                }
                self.order = Order::At(ranks, evictable.into_iter().collect());
            }
            Order::At(ranks, untouched) => match ranks.get(&gone) {
                Some(&then) if now <= then + WIDTH => {
                    for n in untouched.iter() {
                        assert!(then <= ranks[n] + WIDTH, "{gone} before {n}: {ranks:?}");
                    }
                }
                // It came later, or was used since.
                _ => {
                    assert!(untouched.is_empty(), "{gone} before {untouched:?}");
                    self.order = Order::Unknown;
                }
            },
            Order::Unknown => {}
        }
        if !marked {
            self.marks = 0;
        }
        for unit in self.units.values_mut() {
            unit.forgotten |= unit.first && !unit.is_evictable();
        }
        self.leaves(gone);
    }

    fn leaves(&mut self, n: u32) {
        let unit = self.unit(n);
        (unit.resident, unit.first, unit.forgotten) = (false, false, false);
    }
}

fn share(of: &[bool]) -> f64 {
    of.iter().filter(|&&is| is).count() as f64 / of.len() as f64
}

#[derive(Clone, Copy, PartialEq)]
enum Release {
    Used,
    Unused,
    First,
}

struct World {
    cache: SlotCache,
    oracle: Oracle,
}

impl World {
    fn new(slots: u32) -> Self {
        let arena = Arena::new(CAPACITY, 512, 512, ArenaOptions::default()).unwrap();
        let mut cache = SlotCache::with_eviction(arena, &BANKS, Eviction::Lrfu).unwrap();
        cache.resize(slots);
        let oracle = Oracle::new();
        Self { cache, oracle }
    }

    /// Does what may evict, and has the oracle judge who left: several, where more than the limit
    /// were in use, in the order in which the cache says that all would leave.
    fn evicting<T>(&mut self, act: impl FnOnce(&mut SlotCache) -> T) -> T {
        let order = self.cache.dump();
        let done = act(&mut self.cache);
        for n in order {
            if !self.cache.contains(key(n)) {
                self.oracle.evicted(n);
            }
        }
        done
    }

    /// Pins a unit, read if need be. False where everything else is in use.
    fn pin(&mut self, n: u32) -> bool {
        if self.cache.get_pin(key(n)).is_none() {
            let Some(slot) = self.evicting(|cache| cache.reserve(key(n))) else {
                return false;
            };
            self.cache.admit(key(n), slot);
        }
        let unit = self.oracle.unit(n);
        unit.resident = true;
        unit.pins += 1;
        true
    }

    fn release(&mut self, n: u32, mut how: Release) {
        if how == Release::First && self.oracle.marks == UNITS {
            // more marks than units are not remembered
            how = Release::Used;
        }
        match how {
            Release::Used => self.cache.unpin(key(n)),
            Release::Unused => self.cache.unpin_unused(key(n)),
            Release::First => self.cache.unpin_first_victim(key(n)),
        }
        let unit = self.oracle.unit(n);
        unit.pins -= 1;
        if unit.pins == 0 && how != Release::Unused {
            self.oracle.used(n, how == Release::First);
        }
    }

    fn step(&mut self, op: &Op) {
        match *op {
            Op::Rounds(rounds) => (0..rounds).for_each(|_| self.begin(0)),
            Op::Turn(bank) => self.begin(bank),
            Op::Use(n) | Op::UseAndMark(n) => {
                if self.pin(n) {
                    let mark = matches!(op, Op::UseAndMark(_));
                    self.release(n, if mark { Release::First } else { Release::Used });
                }
            }
            Op::UseForLong(first, units, rounds) => {
                for _ in 0..rounds {
                    self.begin(0);
                    for n in (first..UNITS).take(units as usize) {
                        if self.pin(n) {
                            self.release(n, Release::Used);
                        }
                    }
                }
            }
            Op::LookAt(n) => {
                if self.cache.contains(key(n)) && self.pin(n) {
                    self.release(n, Release::Unused);
                }
            }
            Op::Pin(n) => {
                self.pin(n);
            }
            Op::Unpin(n) | Op::UnpinUnused(n) => {
                if self.oracle.units[&n].pins > 0 {
                    let used = matches!(op, Op::Unpin(_));
                    self.release(n, if used { Release::Used } else { Release::Unused });
                }
            }
            Op::ReadAhead(n) => {
                if let Some(slot) = self.evicting(|cache| cache.reserve(key(n))) {
                    self.cache.admit_ahead(key(n), slot);
                    let next = self.oracle.now + 1;
                    let unit = self.oracle.unit(n);
                    (unit.resident, unit.last) = (true, Some(next));
                }
            }
            Op::Remove(n) => {
                if self.cache.remove(key(n)) {
                    self.oracle.leaves(n);
                }
            }
            Op::Expect(n, rate) => {
                self.cache.set_prior(key(n), rate);
                let expected = Some((self.oracle.now, rate));
                let unit = self.oracle.unit(n);
                (unit.uses, unit.expected) = (Vec::new(), expected);
            }
            Op::Report(first, ref near, follows) => {
                let near = &near[..near.len().min((UNITS - first) as usize)];
                self.cache
                    .set_margins(key(first), near.iter().copied(), follows);
                self.oracle.report(first, near, follows);
            }
            Op::Resize(slots) => {
                self.evicting(|cache| cache.resize(slots));
            }
        }
        self.check();
    }

    fn begin(&mut self, bank: u32) {
        if bank <= self.oracle.bank {
            self.cache.begin_pass();
        }
        self.cache.begin_layer(bank);
        self.oracle.begin(bank);
    }

    fn check(&self) {
        self.cache.check_invariants();
        let order = self.cache.dump();
        let mut all = order.clone();
        all.sort_unstable();
        assert_eq!(all, self.oracle.evictable());
        if matches!(self.oracle.order, Order::Open) {
            let ranks: Vec<f64> = order.iter().map(|&n| self.oracle.rank(n)).collect();
            let mut most = f64::NEG_INFINITY;
            for &rank in &ranks {
                assert!(most <= rank + WIDTH, "{order:?} have {ranks:?}");
                most = most.max(rank);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn who_is_worth_least_leaves(
        slots in 1..=CAPACITY, ops in prop::collection::vec(op(), 1..300)
    ) {
        let mut world = World::new(slots);
        for op in &ops {
            world.step(op);
        }
    }
}
