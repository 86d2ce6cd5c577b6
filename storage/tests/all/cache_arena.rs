//! The arena's public interface: slots, the shelf, retiring, alignment.

use emberflow_storage::arena::{Arena, ArenaError, ArenaOptions};

fn arena(slots: u32, len: usize) -> Arena {
    Arena::new(slots, len, 512, ArenaOptions::default()).unwrap()
}

#[test]
fn slots_are_aligned_disjoint_and_zero_at_first() {
    let mut a = arena(9, 1024);
    let mut slots: Vec<_> = std::iter::from_fn(|| a.take()).collect();
    assert_eq!(slots.len(), 9);
    for (i, s) in slots.iter_mut().enumerate() {
        assert!(s.as_slice().iter().all(|&b| b == 0));
        assert_eq!(s.as_slice().as_ptr() as usize % 512, 0);
        s.as_mut_slice().fill(i as u8 + 1);
    }
    for (i, s) in slots.iter().enumerate() {
        assert!(s.as_slice().iter().all(|&b| b == i as u8 + 1));
    }
    for s in slots {
        a.put(s);
    }
    assert_eq!(a.free(), 9);
}

#[test]
fn impossible_geometry_is_refused() {
    for (n, len, align) in [(0, 512, 512), (4, 0, 512), (4, 700, 512), (4, 512, 0)] {
        let err = Arena::new(n, len, align, ArenaOptions::default()).unwrap_err();
        assert!(matches!(err, ArenaError::Geometry { .. }), "{err}");
    }
    assert!(Arena::new(u32::MAX - 1, 1 << 50, 512, ArenaOptions::default()).is_err());
}

#[test]
fn what_is_on_the_shelf_can_be_read_and_taken_back() {
    let mut a = arena(2, 512);
    let mut slot = a.take().unwrap();
    slot.as_mut_slice().fill(5);
    let index = slot.index();
    assert!(a.shelved(index).is_none() && a.unshelve(index).is_none());
    a.shelve(slot);
    let (one, two) = (a.shelved(index).unwrap(), a.shelved(index).unwrap());
    assert!(one == two && one == [5; 512]);
    // Shrinking does not affect the shelf.
    a.set_limit(0);
    assert!(a.take().is_none());
    assert_eq!(a.shelved(index).unwrap(), [5; 512]);
    let slot = a.unshelve(index).unwrap();
    assert!(a.shelved(index).is_none() && a.unshelve(index).is_none());
    a.put(slot);
    a.set_limit(2);
    assert_eq!(a.free(), 2);
    assert!(a.shelved(index).is_none() && a.shelved(7).is_none());
}

#[test]
#[should_panic(expected = "own arena")]
fn a_slot_of_another_arena_is_not_shelved() {
    let (mut a, mut b) = (arena(1, 512), arena(1, 512));
    let s = a.take().unwrap();
    b.shelve(s);
}

#[test]
fn slots_outlive_their_arena() {
    let mut a = arena(2, 512);
    let mut s = a.take().unwrap();
    drop(a);
    s.as_mut_slice().fill(7);
    assert_eq!(s.as_slice()[511], 7);
}

#[test]
fn retired_slots_lose_their_memory_and_are_not_handed_out() {
    // 1 KiB slots: four share a page, so retiring must not wipe a neighbour in use.
    let mut a = arena(16, 1024);
    let mut slots: Vec<_> = std::iter::from_fn(|| a.take()).collect();
    slots.iter_mut().for_each(|s| s.as_mut_slice().fill(9));
    let keep = slots.remove(9);
    slots.into_iter().for_each(|s| a.put(s));
    a.set_limit(4);
    assert_eq!(a.free(), 4);
    assert!(keep.as_slice().iter().all(|&b| b == 9));
    a.put(keep);
    a.set_limit(16);
    let again: Vec<_> = std::iter::from_fn(|| a.take()).collect();
    assert_eq!(again.len(), 16);
    for s in &again {
        let want = if s.index() < 4 { 9 } else { 0 };
        assert!(
            s.as_slice().iter().all(|&b| b == want),
            "slot {}",
            s.index()
        );
    }
}

#[test]
#[should_panic(expected = "own arena")]
fn a_slot_of_another_arena_is_refused() {
    let (mut a, mut b) = (arena(1, 512), arena(1, 512));
    let s = a.take().unwrap();
    b.put(s);
}

#[test]
fn large_arenas_start_on_a_huge_page() {
    let mut a = arena(1024, 8192);
    let first = a.take().unwrap().as_slice().as_ptr();
    assert_eq!(first as usize % (2 << 20), 0);
}

#[test]
fn an_arena_grows_in_place_up_to_its_capacity() {
    let mut a = Arena::with_limit(1, 5000, 512, 512, ArenaOptions::default()).unwrap();
    assert_eq!((a.limit(), a.capacity(), a.bytes()), (1, 5000, 4096));
    let mut first = a.take().unwrap();
    first.as_mut_slice().fill(3);
    let at = first.index();
    a.shelve(first);
    assert!(a.take().is_none());
    a.set_limit(5000);
    let others: Vec<_> = std::iter::from_fn(|| a.take()).collect();
    assert_eq!(others.len(), 4999);
    assert!(a.shelved(at).unwrap().iter().all(|&b| b == 3));
    // Lower again with all slots out: none can be taken until they return.
    a.set_limit(2);
    assert!(a.take().is_none());
    for slot in others {
        a.put(slot);
    }
    assert_eq!(a.free(), 1);
    a.set_limit(9000);
    assert_eq!((a.limit(), a.free()), (5000, 4999));
}

#[test]
fn a_charge_is_whole_pages() {
    assert_eq!(Arena::charge(0, 512), 0);
    assert_eq!(Arena::charge(1, 512) % 4096, 0);
    assert_eq!(Arena::charge(8, 1 << 20), 8 << 20);
    assert_eq!(Arena::charge(u32::MAX, usize::MAX), u64::MAX);
}
