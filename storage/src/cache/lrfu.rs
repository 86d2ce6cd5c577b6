//! LRFU eviction: victims are the units with the lowest rank, found by scanning all units.
//!
//! A rank is the level of the unit's CRF (see `crf.rs`) after these rules:
//!
//! 1. A unit marked as first victim has rank 0. A unit read ahead in this pass has the highest
//!    rank.
//! 2. While predictor margins are stable from pass to pass, a unit with a known margin scores
//!    CRF · 2^(margin/16).
//! 3. Otherwise a unit used in the last pass over its bank scores CRF plus the last-use bonus.
//!
//! A priority queue would move a unit on every use and touch memory at three random places. Uses
//! outnumber evictions ten to twenty times, and one sequential scan of all units costs as much as a
//! few thousand such moves. So a use updates only the unit, and the first eviction of a pass scans
//! for the next victims, up to several thousand at a time.

use super::crf::{Crf, LEVELS_PER_DOUBLING, TOP_LEVEL};
use super::table::{Table, Unit};

/// Maximum victims that one scan collects: this number, or one per [`SLOTS_PER_VICTIM`] slots. A unit whose rank falls
/// below theirs after the scan waits for the next scan.
const MAX_VICTIMS: usize = 1 << 14;
const SLOTS_PER_VICTIM: usize = 16;
/// Slots per victim for a table that is cheap to scan.
const SLOTS_PER_VICTIM_SMALL: usize = 64;
/// Lower bound on the victims of one scan.
const MIN_VICTIMS: usize = 64;

/// Passes for which the victims of a large table stay valid. Scanning a million units in every pass
/// would cost more than fresher victims save.
const SCAN_VALID: u16 = 3;

/// From this many units on, the victims' ranks are estimated from a sample: one run of
/// [`SAMPLE_RUN`] units in every [`SAMPLE_STEP`].
const LARGE_TABLE: usize = 1 << 16;
const SAMPLE_RUN: usize = 64;
const SAMPLE_STEP: usize = 16;

/// With at least this many units per slot, and room to sort all slots, scan the slots instead of
/// the table: a cache smaller than a token's working set scans often.
const SPARSE_UNITS: usize = 8;

/// First victims stored in a list. A scan finds the rest.
const MAX_FIRST: usize = 1024;

/// Margin of a unit for which none was reported.
const UNKNOWN: i8 = i8::MIN;

/// Levels per margin step: a sixteenth of a doubling.
const LEVELS_PER_MARGIN_STEP: i32 = LEVELS_PER_DOUBLING as i32 / 16;

/// Largest shift of a rank by a margin, in levels, either way.
const MARGIN_SPAN: u32 = 128 * LEVELS_PER_MARGIN_STEP as u32;

/// Margins are stable if at least this many tenths of the units above the threshold are above it
/// again in the next report. Below that they change too fast to predict more than the CRF does.
const STABLE_TENTHS: u64 = 6;

/// Rank of a unit read ahead in this pass, above all others: 0 is a first victim, any other unit
/// has 1 + level + margin shift.
const READ_AHEAD: u32 = TOP_LEVEL + 2 * MARGIN_SPAN + 2;

/// Ranks units and finds victims.
#[derive(Debug, Clone)]
pub(super) struct Lrfu {
    crf: Crf,
    /// Predictor margin by unit, or [`UNKNOWN`]. A unit at or above 0 is due.
    margins: Box<[i8]>,
    /// Whether margins replace the last-use bonus, and whether the previous pass had reports to
    /// decide that. If not, this pass decides with the reports so far.
    use_margins: bool,
    judged: bool,
    /// Of the units reported in this pass: those due in both the previous report and this one, and
    /// those due in the previous one.
    due: [u64; 2],
    /// Units used in this pass, and those of them also used in the previous pass.
    used: [u64; 2],
    /// Pass number, modulo 2^16.
    now: u16,
    /// End of the units whose layer has begun in this pass.
    layer_end: u32,
    /// Capacities of `first` and `victims`, allocated once.
    capacity: [usize; 2],
    first: Vec<u32>,
    /// Units and their ranks, next victim first. Some have since been pinned or used.
    victims: Vec<(u32, u32)>,
    /// Victims to collect per scan.
    wanted: usize,
    /// Pass of the last scan, and for how many passes its victims stay valid.
    last_scan: u16,
    valid_passes: u16,
    /// Index of the next victim.
    next: usize,
    /// Where the next scan starts, so that units of equal rank leave in rotation.
    hand: usize,
}

impl Lrfu {
    /// Ranks `units` cacheable units.
    pub fn new(units: u32) -> Self {
        let capacity = [MAX_FIRST, MAX_VICTIMS].map(|n| n.min(units as usize));
        Self {
            crf: Crf::new(),
            margins: vec![UNKNOWN; units as usize].into_boxed_slice(),
            use_margins: false,
            judged: false,
            due: [0; 2],
            used: [0; 2],
            now: 0,
            layer_end: 0,
            capacity,
            first: Vec::with_capacity(capacity[0]),
            victims: Vec::with_capacity(capacity[1]),
            wanted: capacity[1],
            last_scan: 0,
            valid_passes: if (units as usize) < LARGE_TABLE {
                1
            } else {
                SCAN_VALID
            },
            next: 0,
            hand: 0,
        }
    }

    /// Bytes [`Lrfu::new`] allocates.
    pub fn bytes(units: u64) -> u64 {
        let first = 4 * units.min(MAX_FIRST as u64);
        let victims = 8 * units.min(MAX_VICTIMS as u64);
        Crf::bytes() + first + victims + units
    }

    /// Sets the number of slots of the cache.
    pub fn resize(&mut self, slots: u32) {
        let per_victim = if self.margins.len() < LARGE_TABLE {
            SLOTS_PER_VICTIM_SMALL
        } else {
            SLOTS_PER_VICTIM
        };
        self.wanted = (slots as usize / per_victim)
            .max(MIN_VICTIMS)
            .min(self.capacity[1]);
    }

    /// The layer of the units up to `layer_end` begins. A unit before `layer_end` that was not used
    /// in this pass waits for the next one.
    pub fn begin_layer(&mut self, layer_end: u32) {
        self.layer_end = layer_end;
    }

    /// Advances the clock by one pass.
    pub fn begin_pass(&mut self) {
        let [used, again] = std::mem::take(&mut self.used);
        self.crf.observe_reuse(again, used);
        self.crf.begin_pass();
        self.now = self.now.wrapping_add(1);
        self.use_margins = self.margins_are_stable();
        self.judged = self.due[1] > 0;
        self.due = [0; 2];
        if self.now.wrapping_sub(self.last_scan) >= self.valid_passes {
            self.victims.clear();
            self.next = 0;
        }
    }

    /// Sets the CRF of a unit never used to that of `uses` uses per pass.
    pub fn set_prior(&self, unit: &mut Unit, uses: f64) {
        unit.crf = self.crf.prior(uses);
    }

    /// Counts a use.
    #[inline]
    pub fn add_use(&mut self, unit: &mut Unit) {
        let age = self.now.wrapping_sub(unit.last);
        self.used[0] += u64::from(age != 0);
        self.used[1] += u64::from(age == 1);
        self.crf.add_use(&mut unit.crf);
        unit.last = self.now;
        unit.set_first(false);
    }

    /// Stores the margins of the units from flat number `first` on. `consecutive`: the previous
    /// report was for the previous pass.
    pub fn set_margins(
        &mut self,
        first: u32,
        margins: impl ExactSizeIterator<Item = i8>,
        consecutive: bool,
    ) {
        let units = &mut self.margins[first as usize..][..margins.len()];
        let [mut again, mut before] = [0u32; 2];
        for (unit, margin) in units.iter_mut().zip(margins) {
            let due = *unit >= 0;
            before += u32::from(due);
            again += u32::from(due & (margin >= 0));
            *unit = margin.max(UNKNOWN + 1);
        }
        if consecutive {
            self.due[0] += u64::from(again);
            self.due[1] += u64::from(before);
            if !self.judged {
                self.use_margins = self.margins_are_stable();
            }
        }
    }

    /// Whether enough of the due units were due again in this pass.
    fn margins_are_stable(&self) -> bool {
        let [again, before] = self.due;
        before > 0 && 10 * again >= STABLE_TENTHS * before
    }

    /// Gives a unit read ahead the highest rank in this pass, and in the next one that of a unit
    /// used then.
    pub fn keep_read_ahead(&self, unit: &mut Unit) {
        unit.last = self.now.wrapping_add(1);
    }

    /// Marks a unit as first victim.
    pub fn put_first(&mut self, flat: u32, unit: &mut Unit) {
        unit.set_first(true);
        if self.first.len() < self.capacity[0] {
            self.first.push(flat);
        }
    }

    // Nearly branch-free: a scan calls it for every unit.
    #[inline]
    fn rank(&self, flat: u32, unit: &Unit) -> u32 {
        if unit.is_first() {
            return 0;
        }
        let age = self.now.wrapping_sub(unit.last);
        if age == u16::MAX {
            return READ_AHEAD;
        }
        let margin = self.margins[flat as usize];
        let (crf, shift) = if self.use_margins & (margin != UNKNOWN) {
            (unit.crf, i32::from(margin) * LEVELS_PER_MARGIN_STEP)
        } else {
            if age <= u16::from(flat >= self.layer_end) {
                (self.crf.with_bonus(unit.crf), 0)
            } else {
                (unit.crf, 0)
            }
        };
        1 + self.crf.level(crf) + MARGIN_SPAN.wrapping_add_signed(shift)
    }

    /// Slot of the next victim. `keys` holds the flat number of the unit in each slot, and any
    /// number for an empty slot.
    pub fn victim(&mut self, table: &Table, keys: &[u32]) -> Option<u32> {
        loop {
            while let Some(flat) = self.first.pop() {
                let unit = table.at(flat);
                if unit.is_first() && unit.is_evictable() {
                    return unit.resident();
                }
            }
            while let Some(&(flat, rank)) = self.victims.get(self.next) {
                self.next += 1;
                let unit = table.at(flat);
                if unit.is_evictable() && self.rank(flat, unit) <= rank {
                    return unit.resident();
                }
            }
            if !self.scan(table, keys) {
                return None;
            }
        }
    }

    /// Flat number of the unit that is probably the `ahead`-th next victim.
    pub fn upcoming(&self, ahead: usize) -> Option<u32> {
        Some(self.victims.get(self.next + ahead)?.0)
    }

    /// Collects the next victims. False if there are none.
    fn scan(&mut self, table: &Table, keys: &[u32]) -> bool {
        self.victims.clear();
        self.next = 0;
        self.last_scan = self.now;
        let units = table.all();
        let few = keys.len() <= self.capacity[1] && SPARSE_UNITS * keys.len() <= units.len();
        let hand = self.hand % units.len().max(1);
        if few {
            self.collect_from_slots(table, keys)
        } else {
            self.collect_from_table(units, hand)
        }
        let from_hand = |flat: u32| (flat as usize + units.len() - hand) % units.len();
        (self.victims).sort_unstable_by_key(|&(flat, rank)| (rank, from_hand(flat)));
        if few && self.victims.len() > self.wanted {
            self.victims.truncate(self.wanted);
            self.hand = self.victims.last().map_or(0, |v| v.0 as usize + 1);
        }
        !self.victims.is_empty()
    }

    /// Collects every evictable unit in a slot.
    fn collect_from_slots(&mut self, table: &Table, keys: &[u32]) {
        for (slot, &flat) in (0..).zip(keys) {
            let unit = table.at(flat);
            if unit.is_evictable() && unit.resident() == Some(slot) {
                let rank = self.rank(flat, unit);
                self.victims.push((flat, rank));
            }
        }
    }

    /// Collects the evictable units up to the cutoff rank, starting at unit `hand`.
    fn collect_from_table(&mut self, units: &[Unit], hand: usize) {
        let step = if units.len() < LARGE_TABLE {
            1
        } else {
            SAMPLE_STEP
        };
        let cutoff = match self.cutoff(units, step) {
            None if step > 1 => self.cutoff(units, 1),
            found => found,
        };
        if let Some(cutoff) = cutoff {
            let (before, after) = units.split_at(hand);
            self.collect(hand, after, cutoff);
            self.collect(0, before, cutoff);
        }
    }

    /// Collects the evictable units up to rank `cutoff` from `units`, whose flat numbers start at
    /// `first`, until the list is full.
    fn collect(&mut self, first: usize, units: &[Unit], cutoff: u32) {
        if self.victims.len() >= self.wanted {
            return;
        }
        for (i, unit) in units.iter().enumerate() {
            let rank = self.rank((first + i) as u32, unit);
            if unit.is_evictable() & (rank <= cutoff) {
                self.hand = first + i + 1;
                self.victims.push((self.hand as u32 - 1, rank));
                if self.victims.len() == self.wanted {
                    return;
                }
            }
        }
    }

    /// Highest rank up to which all evictable units fit into the list, and at least the lowest rank
    /// present. Counts one run of units in every `step`.
    fn cutoff(&self, units: &[Unit], step: usize) -> Option<u32> {
        let mut counts = [0usize; READ_AHEAD as usize + 1];
        for (run, units) in units.chunks(SAMPLE_RUN).enumerate().step_by(step) {
            for (flat, unit) in ((run * SAMPLE_RUN) as u32..).zip(units) {
                counts[self.rank(flat, unit) as usize] += usize::from(unit.is_evictable());
            }
        }
        // Leave room for sampling error.
        let room = if step > 1 {
            self.wanted * 7 / 8
        } else {
            self.wanted
        };
        let (mut sum, mut cutoff) = (0, None);
        for (rank, count) in (0..).zip(counts).filter(|c| c.1 > 0) {
            sum += step * count;
            if cutoff.is_some() && sum > room {
                break;
            }
            cutoff = Some(rank);
        }
        cutoff
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Keys of slots that hold the unit of their own number.
    fn slots(n: u32) -> Vec<u32> {
        (0..n).collect()
    }

    /// The order in which all units leave.
    fn leave(order: &Lrfu, table: &Table) -> Vec<u32> {
        let (mut order, mut table) = (order.clone(), table.clone());
        let slots = slots(table.len());
        std::iter::from_fn(|| {
            let slot = order.victim(&table, &slots)?;
            // Unit and slot have the same number.
            table.at_mut(slot).leave();
            Some(slot)
        })
        .collect()
    }

    #[test]
    fn the_lowest_crf_leaves_first() {
        let (mut order, mut table) = (Lrfu::new(4), Table::new(&[4]).unwrap());
        let slots = slots(4);
        for i in 0..4 {
            let unit = table.at_mut(i);
            unit.settle(i);
            (0..=i).for_each(|_| order.add_use(unit));
        }
        order.begin_pass();
        order.begin_pass();
        assert_eq!(leave(&order, &table), [0, 1, 2, 3]);
        // Much later, one use of unit 1 outranks all the decayed ones.
        (0..30_000).for_each(|_| order.begin_pass());
        assert_eq!(leave(&order, &table), [0, 1, 2, 3]);
        order.add_use(table.at_mut(1));
        assert_eq!(leave(&order, &table), [0, 2, 3, 1]);
        order.put_first(3, table.at_mut(3));
        assert_eq!(leave(&order, &table), [3, 0, 2, 1]);
        order.add_use(table.at_mut(3));
        order.add_use(table.at_mut(2));
        order.keep_read_ahead(table.at_mut(3));
        assert_eq!(leave(&order, &table), [0, 1, 2, 3]);
        // A pinned unit stays, and a unit used since the last scan is ranked again.
        assert_eq!(order.victim(&table, &slots), Some(0));
        table.at_mut(0).pins = 1;
        order.add_use(table.at_mut(1));
        assert_eq!(leave(&order, &table), [2, 3, 1]);
    }

    #[test]
    fn margins_order_eviction_while_they_are_stable() {
        let n = 100;
        let (mut order, mut table) = (Lrfu::new(n), Table::new(&[n]).unwrap());
        for i in 0..n {
            let unit = table.at_mut(i);
            unit.settle(i);
            order.add_use(unit);
        }
        let by_use = leave(&order, &table);
        // Lower numbers have higher margins, and units below 40 are due. Swapped: the others are
        // due.
        let margins = |swap: bool| (0..n as i8).map(move |i| if swap { i - 60 } else { 39 - i });
        for alternate in [false, true] {
            for pass in 0..4 {
                order.begin_pass();
                order.set_margins(0, margins(alternate && pass % 2 == 1), true);
            }
            order.begin_pass();
            let left = leave(&order, &table);
            if alternate {
                assert_eq!(left, by_use, "unstable margins do not count")
            } else {
                assert!((0..n).rev().eq(left), "the lowest margin first")
            }
        }
        // Without a report in a pass, margins stop counting.
        (0..4).for_each(|_| order.set_margins(0, margins(false), true));
        order.begin_pass();
        assert!((0..n).rev().eq(leave(&order, &table)));
        order.begin_pass();
        assert_eq!(leave(&order, &table), by_use);
        // The first two consecutive reports decide at once.
        order.set_margins(0, margins(false), false);
        assert_eq!(leave(&order, &table), by_use);
        order.set_margins(0, margins(false), true);
        assert!((0..n).rev().eq(leave(&order, &table)));
    }

    #[test]
    fn equal_units_leave_in_rotation() {
        for times in [3, 16] {
            let n = times * MAX_VICTIMS as u32;
            let (mut order, mut table) = (Lrfu::new(n), Table::new(&[n]).unwrap());
            (0..n).for_each(|i| table.at_mut(i).settle(i));
            let slots = slots(n);
            let mut left = vec![0; n as usize];
            for _ in 0..times {
                (0..SCAN_VALID).for_each(|_| order.begin_pass());
                for _ in 0..MAX_VICTIMS {
                    left[order.victim(&table, &slots).unwrap() as usize] += 1;
                }
            }
            assert!(left.iter().all(|&times| times == 1));
        }
    }

    /// A cache smaller than a token's working set evicts many units per pass, so its victim lists
    /// are short and new units are ranked soon.
    #[test]
    fn the_victim_list_scales_with_the_slots() {
        let n = 2 * LARGE_TABLE as u32;
        let (mut order, mut table) = (Lrfu::new(n), Table::new(&[n]).unwrap());
        order.resize(16 * 100);
        let slots = slots(1600);
        (0..1600).for_each(|i| table.at_mut(i).settle(i));
        assert!(order.victim(&table, &slots).is_some());
        assert!((1..=100).contains(&order.victims.len()));
        // The lower bound holds.
        order.resize(8);
        (0..100).for_each(|_| assert!(order.victim(&table, &slots).is_some()));
        assert_eq!(order.victims.len(), MIN_VICTIMS);
    }

    /// A scan of few slots finds the same victims as a scan of the whole table, and rotates equal
    /// units too.
    #[test]
    fn scanning_slots_and_units_gives_the_same_victims() {
        let n = 4096;
        let (mut order, mut table) = (Lrfu::new(n), Table::new(&[n]).unwrap());
        order.resize(256);
        // Slots hold scattered units in another order; one is empty and one is loading.
        let keys: Vec<u32> = (0..256).map(|slot| slot * 1999 % n).collect();
        for (slot, &flat) in (0..).zip(&keys) {
            let unit = table.at_mut(flat);
            order.set_prior(unit, f64::from(1 + slot % 97) / 100.0);
            match slot {
                5 => unit.leave(),
                9 => unit.load(slot),
                _ => unit.settle(slot),
            }
        }
        let order_of = |keys: &[u32]| {
            let (mut order, mut table) = (order.clone(), table.clone());
            let next = std::iter::from_fn(|| {
                let slot = order.victim(&table, keys)?;
                let flat = (0..n).find(|&f| table.at(f).resident() == Some(slot))?;
                table.at_mut(flat).leave();
                Some((order.crf.level(table.at(flat).crf), slot))
            });
            next.collect::<Vec<_>>()
        };
        // Enough keys to scan the table instead; the extra ones do not count.
        let more: Vec<u32> = (keys.iter().copied())
            .chain((256..n).map(|_| keys[5]))
            .collect();
        let (few, all) = (order_of(&keys), order_of(&more));
        assert_eq!(few.len(), 254);
        let levels = |all: &[(u32, u32)]| all.iter().map(|v| v.0).collect::<Vec<_>>();
        assert_eq!(levels(&few), levels(&all));
        let set = |mut all: Vec<(u32, u32)>| {
            all.sort_unstable();
            all
        };
        assert_eq!(set(few), set(all));
    }

    #[test]
    fn the_lowest_crf_leaves_a_large_table_first() {
        let n = 2 * LARGE_TABLE as u32;
        let (mut order, mut table) = (Lrfu::new(n), Table::new(&[n]).unwrap());
        let mut random = fastrand::Rng::with_seed(1);
        let mut crfs = Vec::new();
        for i in 0..n {
            let unit = table.at_mut(i);
            unit.settle(i);
            order.set_prior(unit, 0.01 + random.f64());
            crfs.push(unit.crf);
        }
        let mut sorted = crfs.clone();
        sorted.sort_unstable();
        let slots = slots(n);
        let mut last = 0;
        for gone in 1..=MAX_VICTIMS / 2 {
            let crf = crfs[order.victim(&table, &slots).unwrap() as usize];
            // A level has two steps.
            assert!(crf + 1 >= last && crf <= sorted[gone - 1] + 1);
            last = crf;
        }
    }
}
