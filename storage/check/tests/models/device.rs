//! The `pread` pool: signals are omitted only if no thread waits.

use emberflow_storage_check::io::{IoChoice, IoEngine, Read};
use emberflow_storage_check::limits::Limits;
use emberflow_storage_check::source;

use super::{LEN, arena, check, file, is_page, page};

fn read_all(lanes: u32, pages: &'static [u8], preemptions: usize) {
    check(preemptions, move || {
        let limits = Limits {
            lanes,
            depth: 4,
            pieces: 1,
            ..Limits::TINY
        };
        let source = source(file()).unwrap();
        let mut engine = IoEngine::open(source, IoChoice::Pread, limits).unwrap();
        let mut arena = arena(pages.len() as u32);
        let mut read = |&n: &u8| Read::new(n.into(), page(n), LEN as u32, arena.take().unwrap());
        let mut batch: Vec<_> = pages.iter().map(&mut read).collect();
        engine.submit(&mut batch);
        let mut done = Vec::new();
        while !engine.is_idle() {
            engine.wait(&mut done, true).unwrap();
        }
        assert_eq!(done.len(), pages.len());
        for c in done {
            c.result.unwrap();
            assert!(is_page(c.slot.as_slice(), c.tag as u8));
        }
    });
}

#[test]
fn two_lanes_finish_everything() {
    read_all(2, &[1, 5, 9], 3);
}

/// Dropping an engine with commands on its lanes.
#[test]
fn lanes_end_after_their_work() {
    check(3, || {
        let limits = Limits {
            lanes: 2,
            depth: 4,
            pieces: 1,
            ..Limits::TINY
        };
        let source = source(file()).unwrap();
        let mut engine = IoEngine::open(source, IoChoice::Pread, limits).unwrap();
        let mut arena = arena(2);
        let mut read = |n: u8| Read::new(n.into(), page(n), LEN as u32, arena.take().unwrap());
        engine.submit(&mut vec![read(1), read(6)]);
        engine.wait(&mut Vec::new(), false).unwrap();
    });
}
