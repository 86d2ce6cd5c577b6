//! LRFU eviction against an oracle that computes each score from its definition, in floats, from a
//! unit's whole history.
//!
//! ```text
//! CRF        C = Σ 2^(−3·age/128) over the uses of a unit, age in passes; a prior rate counts as so
//!            many uses in every earlier pass
//! last use   a unit used in the last pass over its bank scores C + 8·p/(1−p), the bonus clamped to
//!            1..=64; p is the share of the units used in a pass that were also used in the previous
//!            one, averaged with weight 1/8 for the latest pass
//! margin     instead of that, while at least 0.6 of the due units are due again in the next report:
//!            C · 2^(margin/16)
//! first      a first victim leaves first, a unit read ahead in this pass leaves last
//! ```
//!
//! The cache stores logarithms in 64ths of a doubling and rounds at each use: see [`WIDTH`]. It
//! scans all of these few units, so the first eviction of a pass is exact to that width. Later ones
//! in the pass follow that scan: units evictable at the scan and untouched since are evicted by
//! their score at the scan, before all others. Approximations of larger tables (victim lists valid
//! for three passes, sampling) are not tested here.

use std::collections::{HashMap, HashSet};

use emberflow_storage::arena::{Arena, ArenaOptions};
use emberflow_storage::cache::{Eviction, Key, SlotCache};
use proptest::prelude::*;

const BANKS: [u32; 3] = [11, 2, 11];
const UNITS: u32 = 24;
const CAPACITY: u32 = 9;

/// Doublings of the score within which the cache treats units as equal: roundings of many uses add up (`crf.rs` allows as
/// much).
const WIDTH: f64 = 0.15;

fn key(n: u32) -> Key {
    match n {
        0..11 => Key::new(0, n),
        11..13 => Key::new(1, n - 11),
        _ => Key::new(2, n - 13),
    }
}

#[derive(Debug, Clone)]
enum Op {
    /// Passes over all banks.
    Passes(u32),
    /// A layer with one bank begins.
    Layer(u32),
    Use(u32),
    UseAndMark(u32),
    /// First unit, number of units, number of passes that use them.
    UsePasses(u32, u32, u32),
    LookAt(u32),
    Pin(u32),
    Unpin(u32),
    UnpinUnused(u32),
    ReadAhead(u32),
    Remove(u32),
    Prior(u32, f64),
    /// Margins of the units from one on.
    Margins(u32, Vec<i8>, bool),
    Resize(u32),
    /// An arena with this number of slots, if no unit is in use.
    ReplaceArena(u32),
}

fn op() -> impl Strategy<Value = Op> {
    let n = 0..UNITS;
    let rate = prop::sample::select(vec![0.0, 0.001, 0.02, 0.3, 1.0]);
    let margin = prop::collection::vec(prop_oneof![any::<i8>(), -20..20i8], 1..24);
    prop_oneof![
        6 => (1..4u32).prop_map(Op::Passes),
        1 => (1..400u32).prop_map(Op::Passes),
        6 => (0..3u32).prop_map(Op::Layer),
        20 => n.clone().prop_map(Op::Use),
        2 => n.clone().prop_map(Op::UseAndMark),
        1 => (n.clone(), 1..7u32, 4..40u32).prop_map(|(n, units, passes)| Op::UsePasses(n, units, passes)),
        2 => n.clone().prop_map(Op::LookAt),
        2 => n.clone().prop_map(Op::Pin),
        2 => n.clone().prop_map(Op::Unpin),
        2 => n.clone().prop_map(Op::UnpinUnused),
        2 => n.clone().prop_map(Op::ReadAhead),
        1 => n.clone().prop_map(Op::Remove),
        1 => (n.clone(), rate).prop_map(|(n, rate)| Op::Prior(n, rate)),
        2 => (n, margin, any::<bool>()).prop_map(|(n, margin, consecutive)| Op::Margins(n, margin, consecutive)),
        1 => (1..=CAPACITY).prop_map(Op::Resize),
        1 => (1..=CAPACITY).prop_map(Op::ReplaceArena),
    ]
}

/// A unit, resident or not.
#[derive(Default)]
struct Unit {
    resident: bool,
    pins: u32,
    /// Passes of all uses; the prior rate and the pass that set it.
    uses: Vec<i32>,
    prior: Option<(i32, f64)>,
    last: Option<i32>,
    margin: Option<i8>,
    /// Marked as first victim, and whether the cache may have forgotten that: it drops a mark whose
    /// unit is pinned at an eviction.
    first: bool,
    forgotten: bool,
}

impl Unit {
    fn is_evictable(&self) -> bool {
        self.resident && self.pins == 0
    }

    fn crf(&self, now: i32) -> f64 {
        let weight = |pass: i32| (-3.0 * f64::from(now - pass) / 128.0).exp2();
        let prior = self.prior.map_or(0.0, |(since, rate)| {
            let before = rate / (1.0 - weight(now - 1));
            before.max(1.0 / 256.0) * weight(since)
        });
        prior + self.uses.iter().map(|&pass| weight(pass)).sum::<f64>()
    }
}

/// Consequences of this pass's evictions so far for the next ones.
enum Order {
    /// None so far: the next one scans all units.
    Open,
    /// Scores at the scan, and the units untouched since.
    At(HashMap<u32, f64>, HashSet<u32>),
    /// The victim list may have run out, and a later scan is possible at any time.
    Unknown,
}

struct Oracle {
    units: HashMap<u32, Unit>,
    now: i32,
    bank: u32,
    reuse: f64,
    /// For each unit's first use in this pass: whether the previous pass used it too.
    used: Vec<bool>,
    /// For each unit due in one report and reported again in this pass: whether it is still due.
    due: Vec<bool>,
    use_margins: bool,
    /// Whether the previous pass had such units.
    judged: bool,
    order: Order,
    /// First-victim marks that the cache may hold.
    marks: u32,
}

impl Oracle {
    fn new() -> Self {
        Self {
            units: (0..UNITS).map(|n| (n, Unit::default())).collect(),
            now: 0,
            bank: 0,
            reuse: 0.8,
            used: Vec::new(),
            due: Vec::new(),
            use_margins: false,
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
                self.reuse += (part - self.reuse) / 8.0;
            }
            self.use_margins = self.margins_are_stable();
            self.judged = !self.due.is_empty();
            self.used.clear();
            self.due.clear();
            self.now += 1;
            self.order = Order::Open;
        }
        self.bank = bank;
    }

    fn margins_are_stable(&self) -> bool {
        !self.due.is_empty() && share(&self.due) >= 0.6
    }

    fn used(&mut self, n: u32, mark: bool) {
        let now = self.now;
        let unit = self.unit(n);
        // a unit read ahead counts as used in the next pass, so a use there is not its first
        let again = (unit.last != Some(now)).then(|| unit.last == Some(now - 1));
        unit.uses.push(now);
        unit.last = Some(now);
        (unit.first, unit.forgotten) = (mark, false);
        self.used.extend(again);
        self.marks += u32::from(mark);
    }

    fn set_margins(&mut self, first: u32, margin: &[i8], consecutive: bool) {
        for (n, &margin) in (first..UNITS).zip(margin) {
            let unit = self.unit(n);
            let was_due = unit.margin.is_some_and(|margin| margin >= 0);
            unit.margin = Some(margin.max(-127));
            if was_due && consecutive {
                self.due.push(margin >= 0);
            }
        }
        if consecutive && !self.judged {
            let counts = self.margins_are_stable();
            if counts != self.use_margins && !matches!(self.order, Order::Open) {
                self.order = Order::Unknown;
            }
            self.use_margins = counts;
        }
    }

    /// The lowest score is evicted first.
    fn rank(&self, n: u32) -> f64 {
        let unit = &self.units[&n];
        if unit.first {
            return f64::NEG_INFINITY;
        }
        if unit.last == Some(self.now + 1) {
            return f64::INFINITY;
        }
        // The cache clamps scores to this range.
        let log = |crf: f64| crf.log2().clamp(-9.0, 7.0);
        let crf = unit.crf(self.now);
        match unit.margin {
            Some(margin) if self.use_margins => log(crf) + f64::from(margin) / 16.0,
            _ => {
                let waits = key(n).bank > self.bank;
                let in_last_pass =
                    unit.last == Some(self.now) || unit.last == Some(self.now - 1) && waits;
                let p = self.reuse;
                let bonus = (8.0 * p / (1.0 - p)).clamp(1.0, 64.0);
                log(crf + if in_last_pass { bonus } else { 0.0 })
            }
        }
    }

    fn evictable(&self) -> Vec<u32> {
        let mut all: Vec<u32> = (0..UNITS).collect();
        all.retain(|n| self.units[n].is_evictable());
        all
    }

    /// Checks that `gone` was the right victim.
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
                // It came after the scan, or was used since.
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

/// Slots of `len` bytes.
fn arena(len: usize) -> Arena {
    Arena::new(CAPACITY, len, 512, ArenaOptions::default()).unwrap()
}

struct World {
    cache: SlotCache,
    oracle: Oracle,
}

impl World {
    fn new(slots: u32) -> Self {
        let mut cache = SlotCache::with_eviction(arena(512), &BANKS, Eviction::Lrfu).unwrap();
        cache.resize(slots);
        let oracle = Oracle::new();
        Self { cache, oracle }
    }

    /// Runs an operation that may evict, and checks each eviction in the order of the cache's dump:
    /// a reserve evicts several units if pinned ones exceeded the limit.
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

    /// Pins a unit, loading it if absent. False if all others are in use.
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
            // the cache does not remember more marks than units
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
            Op::Passes(passes) => (0..passes).for_each(|_| self.begin(0)),
            Op::Layer(bank) => self.begin(bank),
            Op::Use(n) | Op::UseAndMark(n) => {
                if self.pin(n) {
                    let mark = matches!(op, Op::UseAndMark(_));
                    self.release(n, if mark { Release::First } else { Release::Used });
                }
            }
            Op::UsePasses(first, units, passes) => {
                for _ in 0..passes {
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
            Op::Prior(n, rate) => {
                self.cache.set_prior(key(n), rate);
                let prior = Some((self.oracle.now, rate));
                let unit = self.oracle.unit(n);
                (unit.uses, unit.prior) = (Vec::new(), prior);
            }
            Op::Margins(first, ref margin, consecutive) => {
                let margin = &margin[..margin.len().min((UNITS - first) as usize)];
                self.cache
                    .set_margins(key(first), margin.iter().copied(), consecutive);
                self.oracle.set_margins(first, margin, consecutive);
            }
            Op::Resize(slots) => {
                self.evicting(|cache| cache.resize(slots));
            }
            Op::ReplaceArena(slots) => self.replace_arena(slots),
        }
        self.check();
    }

    /// Continues with other slots if no unit is in use.
    fn replace_arena(&mut self, slots: u32) {
        self.evicting(|cache| cache.resize(0));
        if self.cache.resident() + self.cache.loading() == 0 {
            self.cache.replace_arena(arena(1024));
        }
        self.cache.resize(slots);
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
    fn the_lowest_score_is_evicted(
        slots in 1..=CAPACITY, ops in prop::collection::vec(op(), 1..300)
    ) {
        let mut world = World::new(slots);
        for op in &ops {
            world.step(op);
        }
    }
}
