//! The order of eviction by worth, found by looking at all units.
//!
//! Kept in lists, every use would move a unit from one place to another, and touch memory at three
//! places in no order. There are ten or twenty times as many uses as evictions, and one look at
//! all units, in their order, costs as much as a few thousand such moves. So a use changes the unit
//! alone, and the first eviction of a tick looks for the next victims, some thousand at a time.

use super::table::{Table, Unit};
use super::worth::{LEVELS, TOP, Worth};

/// Victims that are looked for at once, at most, and as a share of the slots: what comes after a
/// look and is worth less than they are has to wait.
const VICTIMS: usize = 1 << 14;
const OF_SLOTS: usize = 16;
/// The same of a table that is looked at quickly.
const OF_SLOTS_OF_SMALL: usize = 64;
/// Always as many, however few slots there are.
const FEW: usize = 64;

/// Ticks for which the victims of a large table are taken before others are looked for. Who falls
/// below them meanwhile has to wait: a look at a million units at every tick would cost more.
const VALID: u16 = 3;

/// Of tables with as many units only some are looked at to find out what victims are worth: one
/// run of [`RUN`] units in [`STEP`].
const MANY: usize = 1 << 16;
const RUN: usize = 64;
const STEP: usize = 16;

/// Where a table has as many units for each slot, and room to sort all slots, the slots are looked
/// at in place of the table: a cache that is smaller than what a token uses is looked at often.
const SPARSE: usize = 8;

/// Units remembered that are to go before all others; more are found by looking.
const FIRST: usize = 1024;

/// Nearness of a unit of which nobody knows it.
const UNKNOWN: i8 = i8::MIN;

/// Levels of a step of nearness: a sixteenth of a doubling.
const STEP_OF_NEARNESS: i32 = LEVELS as i32 / 16;

/// As far below and above as nearness moves a unit, in levels.
const NEAR: u32 = 128 * STEP_OF_NEARNESS as u32;

/// Nearness counts where of ten units that were due as many are due again in the next tick. Where
/// fewer are, it changes too fast to say more than how often units were used.
const DUE_AGAIN: u64 = 6;

/// The rank of what was read ahead in this tick. Others have less: what is to go first has 0, a
/// unit its level and one more, and what nearness moves it by.
const AHEAD: u32 = TOP + 2 * NEAR + 2;

/// Who goes before whom, and who goes next.
#[derive(Debug, Clone)]
pub(super) struct Lrfu {
    worth: Worth,
    /// By unit: how near it is to being used, or [`UNKNOWN`]; what is not negative is due.
    near: Box<[i8]>,
    /// Whether that counts instead of the last use, and whether the tick before had word to judge it
    /// by: else it is judged by what this one has so far.
    leans: bool,
    judged: bool,
    /// Of the units reported in this tick: those that were due both in their report before and in
    /// this one, and those that were due in the one before.
    due: [u64; 2],
    /// Units used in this tick, and of them those that were used in the one before.
    used: [u64; 2],
    /// Ticks, modulo 2^16.
    now: u16,
    /// The unit after those that had their turn in this tick.
    reached: u32,
    /// Room for these two is made once: how many they may be.
    rooms: [usize; 2],
    first: Vec<u32>,
    /// Units and their ranks, the next victim first. Some are in use since, or worth more.
    victims: Vec<(u32, u32)>,
    /// How many of them to look for.
    wanted: usize,
    /// When they were looked for, and for how many ticks they are.
    looked: u16,
    valid: u16,
    /// Victims before this one are gone.
    next: usize,
    /// Where to begin to look: of equals not always the same go first.
    hand: usize,
}

impl Lrfu {
    /// For `units` units that may be cached.
    pub fn new(units: u32) -> Self {
        let rooms = [FIRST, VICTIMS].map(|n| n.min(units as usize));
        Self {
            worth: Worth::new(),
            near: vec![UNKNOWN; units as usize].into_boxed_slice(),
            leans: false,
            judged: false,
            due: [0; 2],
            used: [0; 2],
            now: 0,
            reached: 0,
            rooms,
            first: Vec::with_capacity(rooms[0]),
            victims: Vec::with_capacity(rooms[1]),
            wanted: rooms[1],
            looked: 0,
            valid: if (units as usize) < MANY { 1 } else { VALID },
            next: 0,
            hand: 0,
        }
    }

    /// Bytes that [`Lrfu::new`] allocates.
    pub fn bytes(units: u64) -> u64 {
        let first = 4 * units.min(FIRST as u64);
        let victims = 8 * units.min(VICTIMS as u64);
        Worth::bytes() + first + victims + units
    }

    /// The cache has `slots` slots from now on.
    pub fn resize(&mut self, slots: u32) {
        let part = match self.near.len() < MANY {
            true => OF_SLOTS_OF_SMALL,
            false => OF_SLOTS,
        };
        self.wanted = (slots as usize / part).max(FEW).min(self.rooms[1]);
    }

    /// It is the turn of the units before number `reached`, which are all of a bank and those before
    /// it. What was not used in its turn has to wait a whole tick for the next one.
    pub fn reach(&mut self, reached: u32) {
        self.reached = reached;
    }

    /// Time passes.
    pub fn tick(&mut self) {
        let [used, again] = std::mem::take(&mut self.used);
        self.worth.persist(again, used);
        self.worth.tick();
        self.now = self.now.wrapping_add(1);
        self.leans = self.nearness_lasts();
        self.judged = self.due[1] > 0;
        self.due = [0; 2];
        if self.now.wrapping_sub(self.looked) >= self.valid {
            self.victims.clear();
            self.next = 0;
        }
    }

    /// Says how often a unit is used per tick before it ever was.
    pub fn expect(&self, unit: &mut Unit, uses: f64) {
        unit.worth = self.worth.expected(uses);
    }

    /// Counts a use of a unit.
    #[inline]
    pub fn used(&mut self, unit: &mut Unit) {
        let age = self.now.wrapping_sub(unit.last);
        self.used[0] += u64::from(age != 0);
        self.used[1] += u64::from(age == 1);
        self.worth.used(&mut unit.worth);
        unit.last = self.now;
        unit.set_first(false);
    }

    /// Says how near units are to being used, from the one with flat number `first` on, and whether
    /// the word before it was that of the tick before.
    pub fn lean(&mut self, first: u32, near: impl ExactSizeIterator<Item = i8>, follows: bool) {
        let units = &mut self.near[first as usize..][..near.len()];
        let [mut again, mut before] = [0u32; 2];
        for (unit, near) in units.iter_mut().zip(near) {
            let due = *unit >= 0;
            before += u32::from(due);
            again += u32::from(due & (near >= 0));
            *unit = near.max(UNKNOWN + 1);
        }
        if follows {
            self.due[0] += u64::from(again);
            self.due[1] += u64::from(before);
            if !self.judged {
                self.leans = self.nearness_lasts();
            }
        }
    }

    /// Whether most of the units that were due are due again, as far as this tick tells.
    fn nearness_lasts(&self) -> bool {
        let [again, before] = self.due;
        before > 0 && 10 * again >= DUE_AGAIN * before
    }

    /// Keeps a unit that was not used longer than all others in this tick, and then as long as
    /// if it had been used in the next one.
    pub fn keep(&self, unit: &mut Unit) {
        unit.last = self.now.wrapping_add(1);
    }

    /// Makes a unit the next to go.
    pub fn put_first(&mut self, flat: u32, unit: &mut Unit) {
        unit.set_first(true);
        if self.first.len() < self.rooms[0] {
            self.first.push(flat);
        }
    }

    // Few jumps that cannot be foreseen: it is asked of every unit.
    #[inline]
    fn rank(&self, flat: u32, unit: &Unit) -> u32 {
        if unit.is_first() {
            return 0;
        }
        let age = self.now.wrapping_sub(unit.last);
        if age == u16::MAX {
            return AHEAD;
        }
        let near = self.near[flat as usize];
        let (worth, more) = if self.leans & (near != UNKNOWN) {
            (unit.worth, i32::from(near) * STEP_OF_NEARNESS)
        } else {
            match age <= u16::from(flat >= self.reached) {
                true => (self.worth.going_on(unit.worth), 0),
                false => (unit.worth, 0),
            }
        };
        1 + self.worth.level(worth) + NEAR.wrapping_add_signed(more)
    }

    /// The slot of the next victim. `keys` are the flat numbers of the units in the slots, and
    /// whatever units in those that are empty.
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
            if !self.look(table, keys) {
                return None;
            }
        }
    }

    /// The unit that is probably the `ahead`-th victim from now on, by its flat number.
    pub fn later(&self, ahead: usize) -> Option<u32> {
        Some(self.victims.get(self.next + ahead)?.0)
    }

    /// Looks for the next victims. False where there is none.
    fn look(&mut self, table: &Table, keys: &[u32]) -> bool {
        self.victims.clear();
        self.next = 0;
        self.looked = self.now;
        let units = table.all();
        let few = keys.len() <= self.rooms[1] && SPARSE * keys.len() <= units.len();
        let hand = self.hand % units.len().max(1);
        match few {
            true => self.all_in_slots(table, keys),
            false => self.all_in_order(units, hand),
        }
        let turn = |flat: u32| (flat as usize + units.len() - hand) % units.len();
        (self.victims).sort_unstable_by_key(|&(flat, rank)| (rank, turn(flat)));
        if few && self.victims.len() > self.wanted {
            self.victims.truncate(self.wanted);
            self.hand = self.victims.last().map_or(0, |v| v.0 as usize + 1);
        }
        !self.victims.is_empty()
    }

    /// Takes whatever may leave the slots for a victim.
    fn all_in_slots(&mut self, table: &Table, keys: &[u32]) {
        for (slot, &flat) in (0..).zip(keys) {
            let unit = table.at(flat);
            if unit.is_evictable() && unit.resident() == Some(slot) {
                let rank = self.rank(flat, unit);
                self.victims.push((flat, rank));
            }
        }
    }

    /// Takes the victims up to the rank up to which there is room, from the unit `hand` on.
    fn all_in_order(&mut self, units: &[Unit], hand: usize) {
        let step = if units.len() < MANY { 1 } else { STEP };
        let highest = match self.highest(units, step) {
            None if step > 1 => self.highest(units, 1),
            found => found,
        };
        if let Some(highest) = highest {
            let (before, after) = units.split_at(hand);
            self.collect(hand, after, highest);
            self.collect(0, before, highest);
        }
    }

    /// Adds the victims up to rank `highest` among `units`, which begin with number `first`, as far
    /// as there is room.
    fn collect(&mut self, first: usize, units: &[Unit], highest: u32) {
        if self.victims.len() >= self.wanted {
            return;
        }
        for (i, unit) in units.iter().enumerate() {
            let rank = self.rank((first + i) as u32, unit);
            if unit.is_evictable() & (rank <= highest) {
                self.hand = first + i + 1;
                self.victims.push((self.hand as u32 - 1, rank));
                if self.victims.len() == self.wanted {
                    return;
                }
            }
        }
    }

    /// The rank up to which there is room for all victims, or that of the first ones where not
    /// even those have room: reckoned from one run of units in `step`.
    fn highest(&self, units: &[Unit], step: usize) -> Option<u32> {
        let mut counts = [0usize; AHEAD as usize + 1];
        for (run, units) in units.chunks(RUN).enumerate().step_by(step) {
            for (flat, unit) in ((run * RUN) as u32..).zip(units) {
                counts[self.rank(flat, unit) as usize] += usize::from(unit.is_evictable());
            }
        }
        // Some more may be there than the sample says.
        let room = if step > 1 {
            self.wanted * 7 / 8
        } else {
            self.wanted
        };
        let (mut sum, mut highest) = (0, None);
        for (rank, count) in (0..).zip(counts).filter(|c| c.1 > 0) {
            sum += step * count;
            if highest.is_some() && sum > room {
                break;
            }
            highest = Some(rank);
        }
        highest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Slots of units that have the slots of their numbers.
    fn slots(n: u32) -> Vec<u32> {
        (0..n).collect()
    }

    /// The order in which all would leave.
    fn leave(order: &Lrfu, table: &Table) -> Vec<u32> {
        let (mut order, mut table) = (order.clone(), table.clone());
        let slots = slots(table.len());
        std::iter::from_fn(|| {
            let slot = order.victim(&table, &slots)?;
            // Unit and slot are the same here.
            table.at_mut(slot).leave();
            Some(slot)
        })
        .collect()
    }

    #[test]
    fn the_least_worth_leaves_first_however_long_it_stays() {
        let (mut order, mut table) = (Lrfu::new(4), Table::new(&[4]).unwrap());
        let slots = slots(4);
        for i in 0..4 {
            let unit = table.at_mut(i);
            unit.settle(i);
            (0..=i).for_each(|_| order.used(unit));
        }
        order.tick();
        order.tick();
        assert_eq!(leave(&order, &table), [0, 1, 2, 3]);
        // a long time later 1 is used once: it is worth more than what is forgotten
        (0..30_000).for_each(|_| order.tick());
        assert_eq!(leave(&order, &table), [0, 1, 2, 3]);
        order.used(table.at_mut(1));
        assert_eq!(leave(&order, &table), [0, 2, 3, 1]);
        order.put_first(3, table.at_mut(3));
        assert_eq!(leave(&order, &table), [3, 0, 2, 1]);
        order.used(table.at_mut(3));
        order.used(table.at_mut(2));
        order.keep(table.at_mut(3));
        assert_eq!(leave(&order, &table), [0, 1, 2, 3]);
        // what is in use stays, and what was used since the last look is looked at again
        assert_eq!(order.victim(&table, &slots), Some(0));
        table.at_mut(0).pins = 1;
        order.used(table.at_mut(1));
        assert_eq!(leave(&order, &table), [2, 3, 1]);
    }

    #[test]
    fn what_is_near_stays_where_nearness_lasts() {
        let n = 100;
        let (mut order, mut table) = (Lrfu::new(n), Table::new(&[n]).unwrap());
        for i in 0..n {
            let unit = table.at_mut(i);
            unit.settle(i);
            order.used(unit);
        }
        let by_use = leave(&order, &table);
        // The lower its number the nearer a unit is, and those below 40 are due, or in every
        // second tick the others.
        let near = |turn: bool| (0..n as i8).map(move |i| if turn { i - 60 } else { 39 - i });
        for turns in [false, true] {
            for tick in 0..4 {
                order.tick();
                order.lean(0, near(turns && tick % 2 == 1), true);
            }
            order.tick();
            let left = leave(&order, &table);
            match turns {
                false => assert!((0..n).rev().eq(left), "the farthest first"),
                true => assert_eq!(left, by_use, "it changes too fast to tell"),
            }
        }
        // Without word of it in a tick it counts no longer.
        (0..4).for_each(|_| order.lean(0, near(false), true));
        order.tick();
        assert!((0..n).rev().eq(leave(&order, &table)));
        order.tick();
        assert_eq!(leave(&order, &table), by_use);
        // The first words are judged at once, where one follows the other.
        order.lean(0, near(false), false);
        assert_eq!(leave(&order, &table), by_use);
        order.lean(0, near(false), true);
        assert!((0..n).rev().eq(leave(&order, &table)));
    }

    #[test]
    fn of_many_equals_each_has_its_turn() {
        for times in [3, 16] {
            let n = times * VICTIMS as u32;
            let (mut order, mut table) = (Lrfu::new(n), Table::new(&[n]).unwrap());
            (0..n).for_each(|i| table.at_mut(i).settle(i));
            let slots = slots(n);
            let mut left = vec![0; n as usize];
            for _ in 0..times {
                (0..VALID).for_each(|_| order.tick());
                for _ in 0..VICTIMS {
                    left[order.victim(&table, &slots).unwrap() as usize] += 1;
                }
            }
            assert!(left.iter().all(|&times| times == 1));
        }
    }

    /// Where many leave in a tick, as of a cache smaller than what a token uses, what came since has
    /// to be looked at soon.
    #[test]
    fn few_are_looked_for_where_slots_are_few() {
        let n = 2 * MANY as u32;
        let (mut order, mut table) = (Lrfu::new(n), Table::new(&[n]).unwrap());
        order.resize(16 * 100);
        let slots = slots(1600);
        (0..1600).for_each(|i| table.at_mut(i).settle(i));
        assert!(order.victim(&table, &slots).is_some());
        assert!((1..=100).contains(&order.victims.len()));
        // And always some.
        order.resize(8);
        (0..100).for_each(|_| assert!(order.victim(&table, &slots).is_some()));
        assert_eq!(order.victims.len(), FEW);
    }

    /// Slots that are few are looked at alone, and give the same victims as the whole table; of equals
    /// each has its turn there, too.
    #[test]
    fn few_slots_leave_as_all_units_would() {
        let n = 4096;
        let (mut order, mut table) = (Lrfu::new(n), Table::new(&[n]).unwrap());
        order.resize(256);
        // Slots are taken by units far apart, in another order; one is empty and one is loading.
        let keys: Vec<u32> = (0..256).map(|slot| slot * 1999 % n).collect();
        for (slot, &flat) in (0..).zip(&keys) {
            let unit = table.at_mut(flat);
            order.expect(unit, f64::from(1 + slot % 97) / 100.0);
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
                Some((order.worth.level(table.at(flat).worth), slot))
            });
            next.collect::<Vec<_>>()
        };
        // So many that the table is looked at: those beyond say nothing.
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
    fn of_many_the_least_worth_leave() {
        let n = 2 * MANY as u32;
        let (mut order, mut table) = (Lrfu::new(n), Table::new(&[n]).unwrap());
        let mut random = fastrand::Rng::with_seed(1);
        let mut worths = Vec::new();
        for i in 0..n {
            let unit = table.at_mut(i);
            unit.settle(i);
            order.expect(unit, 0.01 + random.f64());
            worths.push(unit.worth);
        }
        let mut sorted = worths.clone();
        sorted.sort_unstable();
        let slots = slots(n);
        let mut last = 0;
        for gone in 1..=VICTIMS / 2 {
            let worth = worths[order.victim(&table, &slots).unwrap() as usize];
            // To a level, which has two steps.
            assert!(worth + 1 >= last && worth <= sorted[gone - 1] + 1);
            last = worth;
        }
    }
}
