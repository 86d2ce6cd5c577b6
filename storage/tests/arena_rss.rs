//! An arena never uses more memory than its charge, for any page size of the kernel. Residency is
//! read from the kernel's account of the mapping itself, so other memory of the process does not
//! interfere.

use emberflow_storage::arena::{Arena, ArenaOptions, Slot};

const SLOT: usize = 24 << 10;
const CAPACITY: u32 = 2048;
const MIB: u64 = 1 << 20;

/// Address of the arena: its first slot is the first to be handed out.
fn start(arena: &mut Arena) -> usize {
    let slot = arena.take().expect("a free slot");
    let at = slot.as_slice().as_ptr() as usize;
    arena.put(slot);
    at
}

/// Sum of one field over the mappings of the arena, in bytes.
fn account(start: usize, field: &str) -> u64 {
    let range = start..start + CAPACITY as usize * SLOT;
    let smaps = std::fs::read_to_string("/proc/self/smaps").expect("smaps");
    let (mut inside, mut sum, mut mapped) = (false, 0, 0);
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let first = words.next().unwrap_or_default();
        if let Some((from, to)) = first.split_once('-') {
            let hex = |s| usize::from_str_radix(s, 16).expect("an address");
            let (from, to) = (hex(from), hex(to));
            inside = range.contains(&from) && to <= range.end;
            mapped += if inside { to - from } else { 0 };
        } else if inside && first.strip_suffix(':') == Some(field) {
            let kib: u64 = words.next().expect("a number").parse().expect("a number");
            sum += kib * 1024;
        }
    }
    assert_eq!(mapped, range.len(), "the mapping is not found as a whole");
    sum
}

fn rss(start: usize) -> u64 {
    account(start, "Rss")
}

fn take_all(arena: &mut Arena) -> Vec<Slot> {
    std::iter::from_fn(|| arena.take()).collect()
}

/// Writes the first byte of every `step`-th slot, or whole slots with a step of 1.
fn touch(arena: &mut Arena, step: usize) {
    let mut slots = take_all(arena);
    for slot in slots.iter_mut().step_by(step) {
        let bytes = if step == 1 { SLOT } else { 1 };
        slot.as_mut_slice()[..bytes].fill(7);
    }
    slots.into_iter().for_each(|s| arena.put(s));
}

fn arena(limit: u32, options: ArenaOptions) -> Arena {
    Arena::with_limit(limit, CAPACITY, SLOT, 4096, options).expect("48 MiB of addresses")
}

const HUGE: ArenaOptions = ArenaOptions {
    huge_pages: true,
    lock: false,
    populate: false,
};

#[test]
fn a_charge_is_never_exceeded() {
    let plain = ArenaOptions::default();
    for options in [plain, HUGE] {
        let mut arena = arena(1, options);
        let at = start(&mut arena);
        // Limits below, at, and just beyond huge pages (85.3 slots make one); down and up again.
        for limit in [
            1, 84, 86, 300, 301, 1365, 1024, 1000, 90, 1, 700, 2048, 2, 171,
        ] {
            arena.set_limit(limit);
            let charge = arena.bytes();
            let what = format!("limit {limit}, {options:?}");
            assert!(rss(at) <= charge, "{what}: before use");
            touch(&mut arena, 50);
            assert!(rss(at) <= charge, "{what}: touched here and there");
            touch(&mut arena, 1);
            assert_eq!(rss(at), charge, "{what}: full");
        }
        arena.set_limit(0);
        assert_eq!(rss(at), 0);
    }
}

#[test]
fn slots_that_come_home_late_give_their_memory_back() {
    let mut arena = arena(CAPACITY, HUGE);
    let at = start(&mut arena);
    touch(&mut arena, 1);
    let slots = take_all(&mut arena);
    arena.set_limit(100);
    let (few, many): (Vec<_>, Vec<_>) = slots.into_iter().partition(|s| s.index() % 64 == 63);
    many.into_iter().for_each(|s| arena.put(s));
    let late = few.len() as u64 * SLOT as u64;
    assert!(rss(at) > arena.bytes() && rss(at) <= arena.bytes() + late);
    few.into_iter().for_each(|s| arena.put(s));
    assert_eq!(rss(at), arena.bytes());
}

#[test]
fn huge_pages_are_used_where_the_kernel_has_them() {
    let setting = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    if setting.is_ok_and(|s| !s.contains("[never]")) {
        let mut huge = arena(1024, HUGE);
        let at = start(&mut huge);
        touch(&mut huge, 1);
        // 24 MiB at best; memory may be too fragmented for all of it
        println!("{} MiB on huge pages", account(at, "AnonHugePages") / MIB);
        assert!(account(at, "AnonHugePages") >= 4 * MIB);
        // Growing continues with huge pages.
        let before = account(at, "AnonHugePages");
        huge.set_limit(CAPACITY);
        touch(&mut huge, 1);
        assert!(account(at, "AnonHugePages") >= before + 4 * MIB);
    } else {
        eprintln!("SKIPPED: no transparent huge pages here");
    }
    let mut small = arena(1024, ArenaOptions::default());
    let at = start(&mut small);
    touch(&mut small, 1);
    assert_eq!(account(at, "AnonHugePages"), 0);
}

#[test]
fn populated_memory_is_there_before_it_is_used() {
    let options = ArenaOptions {
        populate: true,
        ..HUGE
    };
    let mut arena = arena(500, options);
    let at = start(&mut arena);
    if rss(at) == 0 {
        eprintln!("SKIPPED: this kernel cannot populate");
        return;
    }
    assert_eq!(rss(at), arena.bytes());
    arena.set_limit(1500);
    assert_eq!(rss(at), arena.bytes());
    arena.set_limit(400);
    assert_eq!(rss(at), arena.bytes());
}

/// In parts, by several threads, while the slots are in use.
#[test]
fn memory_can_be_populated_beside_its_use() {
    for (limit, parts) in [(2048, 1), (2048, 7), (1000, 64), (3, 4)] {
        let mut arena = arena(limit, HUGE);
        let at = start(&mut arena);
        touch(&mut arena, 3);
        let pages = arena.pages();
        assert_eq!(pages.len() as u64, arena.bytes());
        let all: Vec<_> = (0..parts).map(|part| pages.part(part, parts)).collect();
        assert_eq!(
            all.iter().map(|part| part.len()).sum::<usize>(),
            pages.len()
        );
        let supported = std::thread::scope(|scope| {
            let done: Vec<_> = all
                .iter()
                .map(|part| scope.spawn(|| part.populate()))
                .collect();
            done.into_iter().all(|thread| thread.join().unwrap())
        });
        if !supported {
            eprintln!("SKIPPED: the kernel populates no memory");
            return;
        }
        assert_eq!(rss(at), arena.bytes(), "{limit} in {parts}");
        let slots = take_all(&mut arena);
        assert_eq!(slots.len(), limit as usize);
        let touched = |slot: &&Slot| slot.index().is_multiple_of(3);
        assert!((slots.iter().filter(touched)).all(|slot| slot.as_slice()[0] == 7));
        let own = slots[0].pages();
        assert!(own.len() >= SLOT && own.populate());
    }
}

#[test]
fn locking_is_all_or_nothing_and_follows_the_limit() {
    let options = ArenaOptions { lock: true, ..HUGE };
    // Within the 64 KiB that every user may lock, on Android too, unless others took them.
    let mut arena = arena(2, options);
    let at = start(&mut arena);
    touch(&mut arena, 1);
    let locked = |arena: &Arena| {
        let bytes = account(at, "Locked");
        assert_eq!(arena.locked(), bytes == arena.bytes(), "{bytes} locked");
        arena.locked()
    };
    if !locked(&arena) {
        eprintln!("SKIPPED: nothing may be locked here");
        return;
    }
    arena.set_limit(CAPACITY);
    touch(&mut arena, 1);
    if !locked(&arena) {
        eprintln!("48 MiB may not be locked here; the first 48 KiB still are");
        assert_eq!(account(at, "Locked"), 2 * SLOT as u64);
    }
    // Locked memory is released like other memory.
    for limit in [1000, 2, 1] {
        arena.set_limit(limit);
        assert_eq!(rss(at), arena.bytes());
        locked(&arena);
    }
}
