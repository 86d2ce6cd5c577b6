//! Whose rows a pass has: short prompts beside long ones, and texts whose neurons do not fit in memory together.

use std::sync::atomic::Ordering;

use emberflow_engine::{Engine, Event, Stepped, Stepper};
use emberflow_storage::io::{IoChoice, Profile, SimOptions};
use emberflow_tests::kinds::Kind;
use emberflow_tests::{squeeze, visited};

use super::texts::{admit, alone, drain, engine, options, prompt, request, text};

/// Admits a short prompt behind three long ones, in the middle of a pass or between two. Returns the passes until its
/// first token.
fn passes_to_first_token(share: f64, yields: bool) -> usize {
    let asked = |n: u32, len| (prompt(n, len), request(6, n.into()));
    let all = [asked(0, 180), asked(1, 190), asked(2, 200), asked(3, 5)];
    let mut one = engine(1, share, false);
    let expected = all
        .each_ref()
        .map(|(prompt, request)| alone(&mut one, prompt, request));
    drop(one);
    let mut engine = engine(4, share, true);
    let (before, of_token) = (engine.counters().possible, visited(&engine));
    let mut stepper = Stepper::new(&mut engine);
    let mut ids = Vec::new();
    for (prompt, request) in &all[..3] {
        ids.push(admit(&mut stepper, prompt, *request, 1));
    }
    stepper.step().unwrap();
    if yields {
        stepper.yield_flag().store(true, Ordering::Relaxed);
        assert!(matches!(stepper.step().unwrap(), Stepped::Yielded));
    }
    let short = admit(&mut stepper, &all[3].0, all[3].1, 1);
    ids.push(short);
    let mut passes = 0;
    loop {
        let Stepped::Passed { events, .. } = stepper.step().unwrap() else {
            panic!("all want something");
        };
        passes += 1;
        let is = |e: &Event| matches!(e, Event::Token { id, .. } if *id == short);
        if events.iter().any(is) {
            break;
        }
    }
    drain(&mut stepper);
    let found: Vec<_> = ids
        .iter()
        .map(|&id| text(stepper.take(id).unwrap()))
        .collect();
    assert_eq!(found, expected);
    let rows: usize = all
        .iter()
        .map(|(prompt, request)| prompt.len() + request.max_tokens - 1)
        .sum();
    let computed = stepper.engine().counters().possible - before;
    assert_eq!(computed, rows as u64 * of_token, "nothing twice");
    passes
}

#[test]
fn a_short_prompt_does_not_wait_for_long_ones() {
    assert_eq!(passes_to_first_token(1.0, false), 1);
    assert_eq!(
        passes_to_first_token(1.0, true),
        1,
        "before the rest of a pass"
    );
    assert_eq!(passes_to_first_token(0.5, false), 1);
    // An own pass would read the weights again.
    assert!(passes_to_first_token(0.5, true) <= 2);
}

/// A stream of short prompts, each admitted in the middle of a long one's pass: until that one is complete, they get as
/// many rows as it has, and two chunks.
#[test]
fn a_stream_of_short_prompts_does_not_starve_a_long_one() {
    let mut engine = engine(2, 1.0, true);
    let mut stepper = Stepper::new(&mut engine);
    let flag = stepper.yield_flag();
    let long = admit(&mut stepper, &prompt(0, 200), request(1, 0), 1);
    let of_long = |e: &Event| matches!(e, Event::Token { id, .. } if *id == long);
    let (mut shorts, mut ended) = (0, false);
    let mut live = None;
    while !ended {
        flag.store(live.is_none(), Ordering::Relaxed);
        let yielded = match stepper.step().unwrap() {
            Stepped::Passed { events, .. } => {
                ended = events.iter().any(of_long);
                let of_short =
                    |e: &Event| matches!(e, Event::Token { id, .. } if Some(*id) == live);
                if events.iter().any(of_short) {
                    live.take().map(|id| stepper.take(id).unwrap());
                }
                false
            }
            Stepped::Yielded => true,
            Stepped::Idle => panic!("the long one wants something"),
        };
        if yielded {
            shorts += 1;
            live = Some(admit(&mut stepper, &prompt(shorts, 6), request(1, 0), 1));
        }
    }
    let rows = 6 * shorts;
    assert!((100..=200 + 2 * 16).contains(&rows), "{rows}");
}

/// Missed neurons of four texts on slow storage, `together` at once.
fn misses(together: usize) -> u64 {
    let mut options = options(4, 0.45, false);
    options.lab.io = IoChoice::Sim(SimOptions::new(Profile::Emmc, 7));
    options.lab.profiles = false;
    let mut engine = Engine::open(Kind::Attention.model(), options).unwrap();
    squeeze(&mut engine, 0.45);
    let mut stepper = Stepper::new(&mut engine);
    for first in (0..4).step_by(together) {
        for n in first..first + together as u32 {
            admit(&mut stepper, &prompt(n, 12), request(80, n.into()), 1);
        }
        drain(&mut stepper);
    }
    stepper.engine().counters().misses
}

/// With little memory, texts that decode together evict each other's neurons: then they alternate.
#[test]
fn texts_together_miss_little_more_than_one_after_the_other() {
    let [alone, together] = [1, 4].map(misses);
    assert!(
        together <= alone * 3 / 2,
        "{together} misses, {alone} alone"
    );
}
