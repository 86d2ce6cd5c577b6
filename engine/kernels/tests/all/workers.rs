//! The pool calls everyone once, hands out each item once, and survives panics.

use std::{
    cell::RefCell,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use emberflow_kernels::{BlockList, Columns, Lane, Lanes, Workers};

#[test]
fn every_thread_runs_once_per_call() {
    for threads in [0, 1, 2, 3, 8] {
        let workers = Workers::new(threads, None);
        assert_eq!(workers.threads(), threads.max(1));
        let calls: Vec<AtomicUsize> = (0..workers.threads())
            .map(|_| AtomicUsize::new(0))
            .collect();
        for _ in 0..2000 {
            workers.run(&|i| {
                calls[i].fetch_add(1, Relaxed);
            });
        }
        assert!(calls.iter().all(|c| c.load(Relaxed) == 2000), "{threads}");
    }
}

#[test]
fn chunks_cover_the_slice_once() {
    let workers = Workers::new(3, None);
    for len in [0, 1, 7, 64, 1000] {
        for chunk_len in [1, 3, 64, 5000] {
            let mut data = vec![0u32; len];
            workers.for_each_chunk_mut(&mut data, chunk_len, &|_, index, chunk| {
                for (i, value) in chunk.iter_mut().enumerate() {
                    *value += (index * chunk_len + i) as u32 + 1;
                }
            });
            assert!(
                data.iter().enumerate().all(|(i, v)| *v == i as u32 + 1),
                "{len} {chunk_len}"
            );
        }
    }
}

#[test]
fn what_is_complete_is_handed_on_in_order_by_the_caller() {
    let caller = std::thread::current().id();
    for threads in [1, 2, 3] {
        let workers = Workers::new(threads, None);
        for (len, unit, part) in [(0, 3, 2), (1, 3, 2), (1000, 3, 2), (1000, 7, 1), (64, 1, 0)] {
            for beside in [0, len / 2, len] {
                let (mut data, mut seen) = (vec![0u32; len], Vec::new());
                let (mut other, mut seen_beside) = (vec![0u64; beside], Vec::new());
                let mut third = vec![0u8; len.div_ceil(unit)];
                let lanes = Lanes {
                    units: len.div_ceil(unit),
                    first: Lane::new(&mut data, unit),
                    second: Lane::new(&mut other, unit),
                    third: Lane::new(&mut third, 1),
                };
                let mut stretches = 0;
                workers.for_each_part_then(
                    lanes,
                    part,
                    &|first, part, other, third| {
                        third.iter_mut().for_each(|value| *value += 1);
                        for (i, value) in part.iter_mut().enumerate() {
                            *value += (first * unit + i) as u32 + 1;
                        }
                        for (i, value) in other.iter_mut().enumerate() {
                            *value += 2 * (first * unit + i) as u64 + 1;
                        }
                    },
                    &mut |first, stretch: &[u32], other: &[u64], third: &[u8]| {
                        assert_eq!(std::thread::current().id(), caller);
                        assert_eq!(third.len(), stretch.len().div_ceil(unit));
                        assert!(third.iter().all(|&n| n == 1));
                        stretches += 1;
                        assert_eq!(first * unit, seen.len());
                        seen.extend_from_slice(stretch);
                        seen_beside.extend_from_slice(other);
                    },
                );
                assert!((1..=len as u32).eq(seen.iter().copied()), "{len} {unit}");
                assert_eq!(seen, data);
                assert!(
                    (0..beside as u64)
                        .map(|i| 2 * i + 1)
                        .eq(seen_beside.iter().copied())
                );
                assert_eq!(seen_beside, other);
                // Not all at the end: alone, the caller hands on each part that it has computed.
                let units = len.div_ceil(unit);
                let parts = units.div_ceil(part.max(1).max(units.div_ceil(64)));
                let alone = threads == 1;
                assert!(stretches <= parts && (!alone || stretches == parts));
            }
        }
    }
}

/// Rows, width and stride.
const MATRICES: [(usize, usize, usize); 5] =
    [(0, 5, 5), (1, 5, 5), (4, 10, 13), (7, 1, 1), (3, 0, 4)];

/// As many zeros as a matrix takes.
fn elements(rows: usize, width: usize, stride: usize) -> Vec<usize> {
    vec![0; rows.checked_sub(1).map_or(0, |last| last * stride + width)]
}

/// Every element was counted once at its place, and what lies between rows is left alone.
fn assert_covered(data: &[usize], width: usize, stride: usize) {
    for (i, value) in data.iter().enumerate() {
        let expected = if i % stride < width { i + 1 } else { 0 };
        assert_eq!(*value, expected, "width {width}, stride {stride}");
    }
}

#[test]
fn column_blocks_cover_the_matrix_once_and_spare_the_gap() {
    let workers = Workers::new(3, None);
    for (rows, width, stride) in MATRICES {
        let mut data = elements(rows, width, stride);
        let mut states = vec![0usize; 3];
        let matrix = Columns::new(&mut data, rows, stride, width);
        workers.for_each_column_block(matrix, 3, &mut states, &|seen, first, mut block| {
            *seen += block.width();
            for r in 0..block.rows() {
                for (c, value) in block.row_mut(r).iter_mut().enumerate() {
                    *value += 1 + r * stride + first + c;
                }
            }
        });
        assert_eq!(states.iter().sum::<usize>(), width);
        assert_covered(&data, width, stride);
    }
}

#[test]
fn listed_blocks_are_passed_once_and_the_others_never() {
    let workers = Workers::new(3, None);
    let (rows, width, stride) = (3, 100, 103);
    for blocks in [
        vec![],
        vec![0],
        vec![4, 5, 6, 7, 8, 20, 33],
        (0..34).collect(),
    ] {
        for group in [1, 4, 7, 50] {
            let mut data = vec![0usize; rows * stride];
            let matrix = Columns::new(&mut data, rows, stride, width);
            let mut states = [0; 3];
            let listed = BlockList {
                numbers: &blocks,
                group,
            };
            workers.for_each_block_of(listed, matrix, 3, &mut states, &|seen, first, mut block| {
                *seen += block.width();
                let (from, to) = (first / 3, (first + block.width() - 1) / 3);
                assert_eq!(from / group, to / group, "one group");
                for r in 0..block.rows() {
                    block.row_mut(r).iter_mut().for_each(|value| *value += 1);
                }
            });
            let of = |col: usize| usize::from(col < width && blocks.contains(&(col as u32 / 3)));
            assert!(data.iter().enumerate().all(|(at, &n)| n == of(at % stride)));
            let seen: usize = (0..width).map(of).sum();
            assert_eq!(states.iter().sum::<usize>(), seen);
        }
    }
}

#[test]
#[should_panic(expected = "ascending order")]
fn a_block_is_listed_once() {
    let mut data = vec![0usize; 12];
    let matrix = Columns::new(&mut data, 1, 12, 12);
    let listed = BlockList {
        numbers: &[1, 1],
        group: 4,
    };
    Workers::new(2, None).for_each_block_of(listed, matrix, 3, &mut [(); 2], &|_, _, _| {});
}

#[test]
fn tiles_cover_the_matrix_once_and_spare_the_gap() {
    let workers = Workers::new(3, None);
    for (rows, width, stride) in MATRICES {
        let mut data = elements(rows, width, stride);
        let matrix = Columns::new(&mut data, rows, stride, width);
        workers.for_each_tile(matrix, 2, 3, &|row, column, mut tile| {
            for r in 0..tile.rows() {
                for (c, value) in tile.row_mut(r).iter_mut().enumerate() {
                    *value += 1 + (row + r) * stride + column + c;
                }
            }
        });
        assert_covered(&data, width, stride);
    }
}

#[test]
#[should_panic(expected = "do not fit")]
fn a_matrix_must_fit_its_slice() {
    Columns::new(&mut [0.0f32; 11], 3, 5, 2);
}

#[test]
#[should_panic(expected = "overlap")]
fn rows_must_not_overlap() {
    Columns::new(&mut [0.0f32; 100], 3, 5, 6);
}

#[test]
fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
    let workers = Workers::new(4, None);
    for round in 0..200 {
        let culprit = round % 5; // 4 = nobody
        let finished = AtomicUsize::new(0);
        let result = catch_unwind(AssertUnwindSafe(|| {
            workers.run(&|i| {
                if i == culprit {
                    panic!("thread {i}");
                }
                finished.fetch_add(1, Relaxed);
            });
        }));
        if culprit == 4 {
            assert!(result.is_ok());
            assert_eq!(finished.load(Relaxed), 4);
        } else {
            let payload = result.unwrap_err();
            assert_eq!(
                payload.downcast_ref::<String>().unwrap(),
                &format!("thread {culprit}")
            );
            assert_eq!(finished.load(Relaxed), 3, "all others finish first");
        }
    }
}

#[test]
fn everyone_may_panic_at_once() {
    let workers = Workers::new(4, None);
    assert!(catch_unwind(AssertUnwindSafe(|| workers.run(&|_| panic!("all")))).is_err());
    workers.run(&|_| {});
}

#[test]
fn the_panic_of_an_item_reaches_the_caller_once_no_item_is_running() {
    let workers = Workers::new(3, None);
    for culprit in [0, 50, 99] {
        let (begun, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let result = catch_unwind(AssertUnwindSafe(|| {
            workers.for_each_chunk(100, &|_, item| {
                begun.fetch_add(1, Relaxed);
                assert_ne!(item, culprit, "the culprit");
                done.fetch_add(1, Relaxed);
            });
        }));
        assert!(result.is_err());
        assert_eq!(begun.load(Relaxed), done.load(Relaxed) + 1);
        workers.run(&|_| {});
    }
}

/// Threads that sleep, or that the system does not let run, must not hold up the others.
#[test]
fn a_run_does_not_wait_for_threads_that_have_not_come() {
    let workers = Workers::new(3, None);
    let came = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&came);
    workers.observe(move |_, part| {
        counter.fetch_add(1, Relaxed);
        part();
    });
    // One run without all threads shows it; where threads wake faster than a run begins, as in an emulator
    // on a loaded machine, it takes many.
    let without_all = (0..2000).any(|_| {
        let before = came.load(Relaxed);
        // Long enough for all to sleep.
        std::thread::sleep(Duration::from_millis(1));
        let items: Vec<AtomicUsize> = (0..5).map(|_| AtomicUsize::new(0)).collect();
        workers.for_each_chunk(items.len(), &|_, item| {
            items[item].fetch_add(1, Relaxed);
        });
        assert!(items.iter().all(|i| i.load(Relaxed) == 1));
        came.load(Relaxed) - before < 3
    });
    assert!(without_all, "all threads took part in every run");
    // One that is there and busy is waited for.
    let slow = AtomicUsize::new(0);
    workers.for_each_chunk(3, &|_, _| {
        std::thread::sleep(Duration::from_millis(5));
        slow.fetch_add(1, Relaxed);
    });
    assert_eq!(slow.load(Relaxed), 3);
}

/// Each item waits for the other, so that one thread alone would not get through.
#[test]
fn items_are_computed_at_the_same_time() {
    let workers = Workers::new(2, None);
    let begun = AtomicUsize::new(0);
    let since = Instant::now();
    workers.for_each_chunk(2, &|_, _| {
        begun.fetch_add(1, Relaxed);
        while begun.load(Relaxed) < 2 && since.elapsed() < Duration::from_secs(20) {
            std::thread::yield_now();
        }
        assert_eq!(begun.load(Relaxed), 2, "the other item waits for this one");
    });
}

#[test]
fn parts_grow_shorter_to_the_end() {
    let workers = Workers::new(2, None);
    let lens = Mutex::new(Vec::new());
    let mut data = vec![0u8; 3 * 100];
    workers.for_each_part_mut(&mut data, 3, &|_, first, part| {
        part.iter_mut().for_each(|n| *n += 1);
        lens.lock().unwrap().push((first, part.len() / 3));
    });
    assert!(data.iter().all(|&n| n == 1));
    let mut lens = lens.into_inner().unwrap();
    lens.sort_unstable();
    let lens: Vec<usize> = lens.into_iter().map(|(_, len)| len).collect();
    // A quarter of what is left, for two threads.
    assert_eq!((lens[0], lens[1], lens.last()), (25, 18, Some(&1)));
    assert!(lens.is_sorted_by(|a, b| a >= b), "{lens:?}");
}

#[test]
fn a_nested_run_is_refused_and_does_not_hang() {
    for threads in [1, 3] {
        let workers = Workers::new(threads, None);
        let nested = catch_unwind(AssertUnwindSafe(|| workers.run(&|_| workers.run(&|_| {}))));
        assert!(nested.is_err());
        for items in [1, 5] {
            let nested = catch_unwind(AssertUnwindSafe(|| {
                workers.for_each_chunk(1, &|_, _| workers.for_each_chunk(items, &|_, _| {}));
            }));
            assert!(nested.is_err());
        }
        workers.run(&|_| {});
        // Another pool may be used inside.
        let inner = Workers::new(2, None);
        let calls = AtomicUsize::new(0);
        workers.run(&|_| {
            inner.run(&|_| {
                calls.fetch_add(1, Relaxed);
            });
        });
        assert_eq!(calls.load(Relaxed), 2 * threads);
    }
}

#[test]
fn several_callers_take_turns() {
    let workers = Workers::new(3, None);
    let calls = [const { AtomicUsize::new(0) }; 4];
    let running = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for (caller, calls) in calls.iter().enumerate() {
            let (workers, running) = (&workers, &running);
            scope.spawn(move || {
                for _ in 0..300 {
                    workers.run(&|_| {
                        // The caller's byte counts its threads; those of the others are zero.
                        let one = 1 << (8 * caller);
                        let others = running.fetch_add(one, Relaxed) & !(0xff << (8 * caller));
                        assert_eq!(others, 0, "two runs at once");
                        calls.fetch_add(1, Relaxed);
                        running.fetch_sub(one, Relaxed);
                    });
                }
            });
        }
    });
    for calls in &calls {
        assert_eq!(calls.load(Relaxed), 300 * 3);
    }
}

#[test]
fn sleeping_workers_wake_up_again() {
    let workers = Workers::new(2, None);
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(2));
        let calls = AtomicUsize::new(0);
        workers.run(&|_| {
            calls.fetch_add(1, Relaxed);
        });
        assert_eq!(calls.load(Relaxed), 2);
    }
}

thread_local! {
    /// Lives as long as the thread that put it here.
    static ALIVE: RefCell<Option<Arc<()>>> = const { RefCell::new(None) };
}

#[test]
fn the_threads_of_a_dropped_pool_are_gone() {
    for _ in 0..100 {
        let alive = Arc::new(());
        let workers = Workers::new(3, None);
        workers.run(&|thread| {
            if thread > 0 {
                ALIVE.set(Some(Arc::clone(&alive)));
            }
        });
        assert_eq!(Arc::strong_count(&alive), 3);
        drop(workers);
        assert_eq!(Arc::strong_count(&alive), 1);
    }
}

#[test]
fn threads_are_pinned_where_that_is_possible() {
    let first = core_affinity::get_core_ids().unwrap()[0].id;
    let workers = Workers::new(3, Some(&[first]));
    assert_eq!(workers.pinned(), 2);
    // Each to its own: the first started thread is number 1, the second wraps around.
    let one = Workers::new(3, Some(&[first, usize::MAX]));
    assert_eq!(one.pinned(), 1);
    // Cores that do not exist, and no cores at all: unpinned, and working.
    for cores in [&[1_000_000_000, usize::MAX][..], &[]] {
        let workers = Workers::new(3, Some(cores));
        assert_eq!((workers.threads(), workers.pinned()), (3, 0));
        workers.run(&|_| {});
    }
}

#[test]
fn pairs_of_chunks_go_together() {
    let workers = Workers::new(3, None);
    let (mut one, mut other) = (vec![0; 7 * 3], vec![0; 7 * 2]);
    workers.for_each_chunk_pair_mut([&mut one, &mut other], [3, 2], |index, a, b| {
        a.fill(index);
        b.fill(index + 10);
    });
    assert_eq!(one, (0..21).map(|i| i / 3).collect::<Vec<_>>());
    assert_eq!(other, (0..14).map(|i| i / 2 + 10).collect::<Vec<_>>());
}
