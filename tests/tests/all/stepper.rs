//! Many requests through one stepper: each text is the same as alone, regardless of the others.

use std::ops::ControlFlow;
use std::sync::atomic::Ordering;
use std::time::Duration;

use emberflow_engine::{
    Admission, Constraint, Engine, Error, Event, Logits, Request, Stepped, Stepper, Stop,
};
use emberflow_tests::kinds::{KINDS, Kind};
use emberflow_tests::{all_logits, bits, visited};
use fastrand::Rng;

use super::texts::{
    CONTEXT, Text, admit, alone, drain, engine, engine_of, options, prompt, request, text,
};

/// Only even tokens at even positions, only odd ones at odd positions, and the end after `most`.
#[derive(Debug, Clone)]
struct Alternating {
    taken: u32,
    most: u32,
}

impl Constraint for Alternating {
    fn prepare(&mut self) -> Result<(), String> {
        Ok(())
    }

    fn allows(&self, token: u32) -> bool {
        token % 2 == self.taken % 2
    }

    fn accept(&mut self, token: u32) -> Result<(), String> {
        assert!(self.allows(token));
        self.taken += 1;
        Ok(())
    }

    fn is_complete(&self) -> bool {
        self.taken == self.most
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

/// A constraint has a state per text, unaffected by preemption and other texts.
#[test]
fn constraints_hold_each_text_by_itself() {
    KINDS
        .into_iter()
        .for_each(constraints_hold_each_text_by_itself_of);
}

fn constraints_hold_each_text_by_itself_of(kind: Kind) {
    let admission = |stepper: &Stepper<'_>, samples| {
        let mut request = request(20, 7);
        request.sampling.temperature = 1.0;
        Admission {
            sequence: stepper.engine().new_sequence().unwrap(),
            prompt: kind.prompt(0, 10),
            request,
            samples,
            bias: Vec::new(),
            constraint: Some(Box::new(Alternating { taken: 0, most: 9 })),
        }
    };
    let mut one = engine_of(kind, 1, 0.5, false);
    let mut stepper = Stepper::new(&mut one);
    let wanted = admission(&stepper, 1);
    let id = stepper.admit(wanted).unwrap();
    drain(&mut stepper);
    let finished = stepper.take(id).unwrap();
    assert_eq!((finished.stop, finished.tokens.len()), (Stop::Complete, 9));
    assert!(
        finished
            .tokens
            .iter()
            .zip(0..)
            .all(|(token, at)| token % 2 == at % 2)
    );
    let wanted = text(finished);
    drop(stepper);
    drop(one);
    let mut engine = engine_of(kind, 4, 0.5, false);
    let mut stepper = Stepper::new(&mut engine);
    admit(&mut stepper, &kind.prompt(1, 12), request(15, 1), 1);
    let several = admission(&stepper, 3);
    let first = stepper.admit(several).unwrap();
    for _ in 0..4 {
        stepper.step().unwrap();
    }
    stepper.preempt(first);
    stepper.step().unwrap();
    stepper.resume(first);
    drain(&mut stepper);
    assert_eq!(text(stepper.take(first).unwrap()), wanted);
    for index in 1..3 {
        assert_eq!(
            stepper.take(first.sample(index)).unwrap().stop,
            Stop::Complete
        );
    }
}

#[test]
fn texts_are_what_they_are_alone_whatever_happens_to_others() {
    KINDS
        .into_iter()
        .for_each(texts_are_what_they_are_alone_whatever_happens_to_others_of);
}

fn texts_are_what_they_are_alone_whatever_happens_to_others_of(kind: Kind) {
    // Those with equal numbers share a prefix.
    let lens = [
        (0, 5, 20),
        (4, 45, 15),
        (1, 40, 12),
        (2, 1, 25),
        (4, 90, 9),
        (3, 17, 6),
        (5, 33, 30),
        (4, 93, 20),
    ];
    let mut one = engine_of(kind, 1, 0.5, false);
    let expected: Vec<Text> = lens
        .iter()
        .map(|&(n, len, tokens)| alone(&mut one, &kind.prompt(n, len), &request(tokens, n.into())))
        .collect();
    drop(one);
    for (seed, preemption) in [(1, true), (2, true), (3, false), (4, true)] {
        let share = if seed % 2 == 0 { 1.0 } else { 0.5 };
        let mut engine = engine_of(kind, lens.len(), share, preemption);
        let mut stepper = Stepper::new(&mut engine);
        let flag = stepper.yield_flag();
        let mut random = Rng::with_seed(seed);
        let (mut ids, mut waiting) = (Vec::new(), lens.to_vec());
        let (mut yielded, mut aside) = (0, Vec::new());
        while !waiting.is_empty() || !stepper.is_empty() {
            if !waiting.is_empty() && random.u64(..3) == 0 {
                let (n, len, tokens) = waiting.remove(0);
                ids.push(admit(
                    &mut stepper,
                    &kind.prompt(n, len),
                    request(tokens, n.into()),
                    1,
                ));
            }
            flag.store(random.u64(..2) == 0, Ordering::Relaxed);
            let stopped = matches!(stepper.step().unwrap(), Stepped::Yielded);
            yielded += usize::from(stopped);
            if stopped && !ids.is_empty() && random.u64(..2) == 0 {
                let id = ids[random.usize(..ids.len() as u64 as usize)];
                stepper.preempt(id);
                aside.push(id);
            }
            if random.u64(..4) == 0 || waiting.is_empty() {
                aside.drain(..).for_each(|id| stepper.resume(id));
            }
        }
        assert!(yielded > 20, "only {yielded} passes yielded");
        for (id, expected) in ids.into_iter().zip(&expected) {
            let finished = stepper.take(id).unwrap();
            assert_eq!(finished.stop, Stop::Length);
            assert_eq!(
                &text(finished),
                expected,
                "seed {seed}, preemption {preemption}"
            );
        }
    }
}

/// The bits of the means of some prompts' hidden states, `batch` at once. With more slots than
/// prompts they run together with a text that shares a prefix with two of them, and passes yield.
fn means(share: f64, batch: usize) -> Vec<Vec<u32>> {
    let mut engine = engine(batch, share, true);
    let mut stepper = Stepper::new(&mut engine);
    let flag = stepper.yield_flag();
    let mut waiting = vec![(3, 4, 90), (2, 1, 33), (1, 4, 45), (0, 0, 5)];
    let mut found = vec![Vec::new(); waiting.len()];
    let crowded = batch > waiting.len();
    if crowded {
        admit(&mut stepper, &prompt(4, 60), request(3, 1), 1);
        stepper.step().unwrap();
    }
    let asked = Request {
        mean_hidden: true,
        ..request(0, 0)
    };
    let mut ids = Vec::new();
    while !waiting.is_empty() || !stepper.is_empty() {
        while stepper.len() < batch
            && let Some((at, n, len)) = waiting.pop()
        {
            ids.push((admit(&mut stepper, &prompt(n, len), asked, 1), at));
        }
        flag.store(crowded, Ordering::Relaxed);
        let events = match stepper.step().unwrap() {
            Stepped::Passed { events, .. } => std::mem::take(events),
            Stepped::Yielded => continue,
            Stepped::Idle => panic!("somebody wants something"),
        };
        for event in events {
            if let Event::Hidden { id, mean } = event {
                let &(_, at) = ids.iter().find(|(of, _)| *of == id).unwrap();
                assert!(found[at].is_empty(), "told once");
                found[at] = mean.into_iter().map(f32::to_bits).collect();
                assert!(stepper.take(id).is_some(), "the text has ended");
            }
        }
    }
    found
}

#[test]
fn hidden_means_do_not_depend_on_budget_or_neighbours() {
    let wanted = means(1.0, 1);
    assert!(wanted.iter().all(|mean| !mean.is_empty()));
    assert_ne!(wanted[1], wanted[3]);
    assert!(means(0.2, 1) == wanted, "a small budget");
    assert!(means(0.5, 6) == wanted, "neighbours");
}

/// With little memory, groups of them may alternate.
#[test]
fn eight_texts_with_little_memory_are_what_they_are_alone() {
    const TEXTS: u32 = 8;
    let engine = |batch: usize, share| engine_of(Kind::Attention, batch, share, false);
    let mut one = engine(1, 0.08);
    let asked = |n: u32| (prompt(n, 12), request(40, n.into()));
    let expected: Vec<Text> = (0..TEXTS)
        .map(asked)
        .map(|(prompt, request)| alone(&mut one, &prompt, &request))
        .collect();
    drop(one);
    for share in [0.08, 1.0] {
        let mut engine = engine(TEXTS as usize, share);
        let mut stepper = Stepper::new(&mut engine);
        let ids: Vec<_> = (0..TEXTS)
            .map(asked)
            .map(|(prompt, request)| admit(&mut stepper, &prompt, request, 1))
            .collect();
        let mut groups = 0;
        loop {
            let live = stepper.len();
            match stepper.step().unwrap() {
                Stepped::Passed { rows, .. } => groups += usize::from(rows < live),
                Stepped::Yielded => {}
                Stepped::Idle => break,
            }
        }
        let found: Vec<_> = (ids.iter())
            .map(|&id| text(stepper.take(id).unwrap()))
            .collect();
        assert_eq!(found, expected);
        // with little memory, times decide
        assert!(
            share < 1.0 || groups == 0,
            "texts in memory share every pass"
        );
    }
}

/// A pass that yielded between two layers resumes without recomputation, also if others ran in
/// between.
#[test]
fn a_pass_that_was_set_aside_computes_nothing_twice() {
    KINDS
        .into_iter()
        .for_each(a_pass_that_was_set_aside_computes_nothing_twice_of);
}

fn a_pass_that_was_set_aside_computes_nothing_twice_of(kind: Kind) {
    let mut engine = engine_of(kind, 3, 1.0, true);
    let pairs = |stepper: &Stepper<'_>| stepper.engine().counters().possible;
    let of_token = visited(&engine);
    let mut stepper = Stepper::new(&mut engine);
    let flag = stepper.yield_flag();
    let before = pairs(&stepper);
    let long = admit(&mut stepper, &kind.prompt(0, 40), request(4, 0), 1);
    flag.store(true, Ordering::Relaxed);
    assert!(matches!(stepper.step().unwrap(), Stepped::Yielded));
    assert!(!flag.load(Ordering::Relaxed), "the step clears the flag");
    let share = (pairs(&stepper) - before) as f64 / of_token as f64;
    let begins = share > 0.0 || !stepper.engine().config().has_ffn(0);
    assert!(
        begins && share < 16.0,
        "one layer of 16 rows, not {share} tokens"
    );
    stepper.preempt(long);
    let short = admit(&mut stepper, &kind.prompt(1, 3), request(5, 1), 1);
    drain(&mut stepper);
    assert!(stepper.take(short).is_some());
    assert!(stepper.take(long).is_none(), "it is set aside");
    stepper.resume(long);
    drain(&mut stepper);
    assert!(stepper.take(long).is_some());
    // 40 + 3 of the long one, whose last token is not run; 3 + 4 of the short one
    assert_eq!(pairs(&stepper) - before, (43 + 7) * of_token);
}

#[test]
fn decoding_goes_on_beside_a_long_prompt() {
    let mut engine = engine(2, 1.0, false);
    let mut stepper = Stepper::new(&mut engine);
    let first = admit(&mut stepper, &prompt(0, 4), request(60, 0), 1);
    for _ in 0..3 {
        stepper.step().unwrap();
    }
    let second = admit(&mut stepper, &prompt(1, 200), request(5, 1), 1);
    let mut passes = 0;
    loop {
        let Stepped::Passed { rows, events, .. } = stepper.step().unwrap() else {
            panic!("both want something");
        };
        assert!(rows <= 16, "{rows} rows are more than a chunk");
        let of = |id| {
            let is = |e: &&Event| matches!(e, Event::Token { id: of, .. } if *of == id);
            events.iter().filter(is).count()
        };
        assert_eq!(of(first), 1, "a token in every pass");
        passes += 1;
        if of(second) == 1 {
            break;
        }
    }
    // 15 rows of each pass are the prompt's
    assert_eq!(passes, 200usize.div_ceil(15));
}

/// A text that decodes waits for a chunk only as long as it is known to take. Nothing was measured before: few rows are
/// tried. Then any number of rows takes less than the longest pause of all.
#[test]
fn prompts_beside_a_text_that_decodes_come_in_pieces_of_measured_length() {
    let mut options = options(2, 1.0, false);
    (options.lab.chunk, options.lab.pause) = (128, Duration::MAX);
    let [short, long] = [
        (prompt(0, 4), request(9, 0)),
        (prompt(1, 200), request(5, 1)),
    ];
    let mut engine = Engine::open(Kind::Attention.model(), options).unwrap();
    let expected = [&short, &long].map(|(prompt, request)| alone(&mut engine, prompt, request));
    let mut stepper = Stepper::new(&mut engine);
    let first = admit(&mut stepper, &short.0, short.1, 1);
    stepper.step().unwrap();
    let second = admit(&mut stepper, &long.0, long.1, 1);
    let mut rows = Vec::new();
    while rows.last() != Some(&2) {
        let Stepped::Passed { rows: of_pass, .. } = stepper.step().unwrap() else {
            panic!("both want something");
        };
        rows.push(of_pass);
    }
    assert_eq!(rows, [1 + 32, 128, 1 + 200 - 32 - 127, 2]);
    drain(&mut stepper);
    let found = [first, second].map(|id| text(stepper.take(id).unwrap()));
    assert_eq!(found, expected);
}

#[test]
fn one_that_stops_stops_alone() {
    KINDS.into_iter().for_each(one_that_stops_stops_alone_of);
}

fn one_that_stops_stops_alone_of(kind: Kind) {
    let mut one = engine_of(kind, 1, 0.5, false);
    let expected = alone(&mut one, &kind.prompt(1, 20), &request(15, 8));
    let expected_samples: Vec<Text> = (0..3)
        .map(|i| alone(&mut one, &kind.prompt(2, 30), &request(10, 4 + i)))
        .collect();
    drop(one);
    let mut engine = engine_of(kind, 5, 0.5, true);
    let mut stepper = Stepper::new(&mut engine);
    let first = admit(&mut stepper, &kind.prompt(0, 10), request(30, 0), 1);
    let second = admit(&mut stepper, &kind.prompt(1, 20), request(15, 8), 1);
    // the prompt of the first sample is only half done when it is cancelled: the next one continues
    // with it
    let drawn = admit(&mut stepper, &kind.prompt(2, 30), request(10, 4), 3);
    for _ in 0..3 {
        stepper.step().unwrap();
    }
    let stopped = stepper.cancel(first).unwrap();
    assert_eq!((stopped.stop, stopped.tokens.len()), (Stop::Caller, 3));
    let half = stepper.cancel(drawn).unwrap();
    assert!(half.sequence.len() < 30 && half.tokens.is_empty());
    drain(&mut stepper);
    assert_eq!(text(stepper.take(second).unwrap()), expected);
    for i in [1, 2] {
        let finished = stepper.take(drawn.sample(i)).unwrap();
        assert_eq!(text(finished), expected_samples[i], "sample {i}");
    }
    assert!(stepper.cancel(second).is_none(), "it is gone");
}

#[test]
fn a_prefix_that_is_there_is_not_computed_again() {
    for kind in KINDS {
        a_prefix_that_is_there_is_not_computed_again_of(kind, 0);
        a_prefix_that_is_there_is_not_computed_again_of(kind, 40);
    }
}

/// The second request begins with a sequence of `known` tokens, as one whose saved state was read.
fn a_prefix_that_is_there_is_not_computed_again_of(kind: Kind, known: usize) {
    let mut one = engine_of(kind, 1, 0.5, false);
    let mut long = kind.prompt(0, 100);
    long.extend(kind.prompt(7, 20));
    let expected = alone(&mut one, &long, &request(8, 3));
    drop(one);
    let mut engine = engine_of(kind, 2, 0.5, false);
    let of_token = visited(&engine);
    let mut stepper = Stepper::new(&mut engine);
    let mut sequence = stepper.engine().new_sequence().unwrap();
    if known > 0 {
        drop(sequence);
        let reader = admit(&mut stepper, &long[..known], request(0, 0), 1);
        sequence = loop {
            stepper.step().unwrap();
            if let Some(finished) = stepper.take(reader) {
                break finished.sequence;
            }
        };
    }
    let first = admit(&mut stepper, &kind.prompt(0, 100), request(40, 0), 1);
    for _ in 0..10 {
        stepper.step().unwrap();
    }
    let before = stepper.engine().counters().possible;
    let second = stepper.admit(Admission {
        sequence,
        prompt: long[known..].to_vec(),
        request: request(8, 3),
        samples: 1,
        bias: Vec::new(),
        constraint: None,
    });
    let second = second.unwrap();
    // The last one is not computed.
    let of_first = 139 - stepper.sequence_len(first).unwrap() as u64;
    while !stepper.is_empty() {
        stepper.step().unwrap();
    }
    let finished = stepper.take(second).unwrap();
    assert_eq!(text(finished), expected);
    // 20 tokens of the prompt that differ, the earlier ones that cannot be shared, 7 generated
    // ones, and those of the other
    let anew = 120 - kind.shared(100, 100) as u64;
    let rows = (stepper.engine().counters().possible - before) / of_token;
    assert_eq!(rows, anew + 7 + of_first);
}

#[test]
fn a_sequence_goes_back_as_far_as_its_state_was_kept() {
    for kind in KINDS {
        let mut engine = engine_of(kind, 2, 0.5, false);
        let vocab = engine.config().vocab as usize;
        let mut sequence = engine.new_sequence().unwrap();
        let mut go_on = |_| ControlFlow::Continue(());
        engine
            .generate(
                &mut sequence,
                &kind.prompt(3, 40),
                &request(10, 1),
                &mut go_on,
            )
            .unwrap();
        let text = sequence.tokens().to_vec();
        let expected = all_logits(&mut engine, &text, 16);
        for len in [text.len(), 45, 39, 20] {
            let reached = if len == text.len() {
                len
            } else {
                kind.shared(len, 40)
            };
            assert_eq!(sequence.reach(len), reached, "{kind:?}");
            let mut fork = sequence.fork_at(len).unwrap();
            assert_eq!(fork.tokens(), &text[..reached]);
            let mut found = Vec::new();
            for chunk in text[reached..].chunks(7) {
                let mut sink = |_: usize, logits: &[f32]| found.extend_from_slice(logits);
                engine
                    .forward(&mut fork, chunk, Logits::Each(&mut sink))
                    .unwrap();
            }
            assert!(
                bits(&found) == bits(&expected[reached * vocab..]),
                "{kind:?} from {len}"
            );
        }
        assert_eq!(sequence.truncate(45), kind.shared(45, 40));
        assert_eq!(sequence.len(), kind.shared(45, 40));
    }
}

#[test]
fn the_ledger_counts_pages_blocks_and_snapshots() {
    let of_delta_nets = 4 * (3 * 54 + 30 * 6);
    for (kind, floats) in [
        (Kind::Attention, 0),
        (Kind::ShortConv, 3 * 2 * 36),
        (Kind::DeltaNet, of_delta_nets),
        (Kind::Kda, 4 * (3 * 90 + 30 * 5)),
        (Kind::BoundedKda, 4 * (3 * 90 + 30 * 5)),
        (Kind::Latent, 0),
        (Kind::Mamba, 4 * (3 * 150 + 108 * 7)),
        (Kind::Sublayers, 4 * (2 * 72 + 30 * 7)),
        // and of the convolution over n-gram rows
        (Kind::NGrams, 3 * (3 * 54 + 30 * 6) + 9 * 4 * 36),
    ] {
        let engine = engine_of(kind, 3, 0.5, false);
        // a current state, the next one, two snapshots
        let each = CONTEXT as u64 * engine.position_bytes() + 4 * 4 * floats;
        assert_eq!(engine.memory().ledger.held("kv"), 3 * each, "{kind:?}");
    }
}

#[test]
fn what_does_not_fit_is_refused_and_harms_nobody() {
    KINDS
        .into_iter()
        .for_each(what_does_not_fit_is_refused_and_harms_nobody_of);
}

fn what_does_not_fit_is_refused_and_harms_nobody_of(kind: Kind) {
    let mut one = engine_of(kind, 1, 0.5, false);
    let expected = alone(&mut one, &kind.prompt(0, 10), &request(6, 0));
    drop(one);
    let mut engine = engine_of(kind, 2, 0.5, false);
    let mut stepper = Stepper::new(&mut engine);
    let id = admit(&mut stepper, &kind.prompt(0, 10), request(6, 0), 1);
    let sequence = stepper.engine().new_sequence().unwrap();
    let full = stepper.engine().new_sequence();
    assert!(matches!(full, Err(Error::KvFull { .. })), "{full:?}");
    let admission = |sequence, prompt: Vec<u32>, samples| Admission {
        sequence,
        prompt,
        request: request(1, 0),
        samples,
        bias: Vec::new(),
        constraint: None,
    };
    let long = stepper.admit(admission(sequence, kind.prompt(1, CONTEXT + 1), 1));
    assert!(matches!(long, Err(Error::ContextFull { .. })), "{long:?}");
    // A refused request releases its memory.
    let sequence = stepper.engine().new_sequence().unwrap();
    assert!(stepper.admit(admission(sequence, Vec::new(), 1)).is_err());
    let sequence = stepper.engine().new_sequence().unwrap();
    let many = stepper.admit(admission(sequence, kind.prompt(1, 3), 2));
    assert!(many.is_err());
    drain(&mut stepper);
    assert_eq!(text(stepper.take(id).unwrap()), expected);
}

/// Admitting a text next to others, and removing it, reads and computes nothing.
#[test]
fn joining_and_leaving_reads_nothing() {
    let mut engine = engine(8, 0.5, false);
    let mut stepper = Stepper::new(&mut engine);
    for n in 0..3 {
        admit(&mut stepper, &prompt(n, 4), request(200, n.into()), 1);
    }
    for _ in 0..8 {
        stepper.step().unwrap();
    }
    let before = stepper.engine().counters();
    for n in 10..41 {
        let id = admit(&mut stepper, &prompt(n, 40), request(10, n.into()), 1);
        assert!(stepper.cancel(id).is_some());
    }
    let after = stepper.engine().counters();
    assert_eq!((before.reads, before.fired), (after.reads, after.fired));
}
