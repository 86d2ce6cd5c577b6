//! A budget that changes during a run: memory follows it, the text does not change. A separate
//! file, as it measures the whole process.

use std::ops::ControlFlow;

use emberflow::cli::ModelArg;
use emberflow::model::open_model;
use emberflow_engine::{Budget, Engine, Error, Lab, Options, Request, Sampling};
use emberflow_storage::mem;

fn tokens(engine: &mut Engine) -> Vec<u32> {
    let mut sequence = engine.new_sequence().unwrap();
    let prompt = engine.text().encode("The borrow checker").expect("encode");
    let request = Request {
        max_tokens: 24,
        sampling: Sampling::default(),
        ignore_eos: true,
        ..Request::default()
    };
    engine
        .generate(&mut sequence, &prompt, &request, &mut |_| {
            ControlFlow::Continue(())
        })
        .expect("generate")
        .tokens
}

/// Memory after each pass of a long prompt, whose chunks take memory from the cache, and of the text after
/// it.
fn keeps_to_its_budget_in_a_long_prompt() {
    let options = Options {
        budget: Budget::FfnShare(0.3),
        threads: 4,
        context: 600,
        lab: Lab {
            io: "sim:emmc".parse().expect("a disk"),
            ..Lab::default()
        },
        ..Options::default()
    };
    let model = open_model(&ModelArg { model: None }).expect("the bundled model");
    let mut engine = Engine::open(model, options).expect("open");
    let budget = engine.memory().budget();
    let prompt: Vec<u32> = (0..500).map(|i| 40 + (i * 31) % 900).collect();
    let request = Request {
        max_tokens: 8,
        ignore_eos: true,
        ..Request::default()
    };
    let mut look = |_| {
        let rss = mem::rss().expect("rss");
        assert!(rss <= budget, "{rss} bytes, {budget} allowed");
        ControlFlow::Continue(())
    };
    let usual = engine.chunk();
    for _ in 0..2 {
        let mut sequence = engine.new_sequence().expect("a sequence");
        let all = engine.generate(&mut sequence, &prompt, &request, &mut look);
        assert_eq!(all.expect("generate").tokens.len(), 8);
        assert!(engine.prompt_chunk() > usual && engine.chunk() == usual);
    }
}

#[test]
fn memory_follows_the_budget_and_the_text_does_not() {
    keeps_to_its_budget_in_a_long_prompt();
    let model = open_model(&ModelArg { model: None }).expect("the bundled model");
    let options = Options {
        budget: Budget::FfnShare(1.0),
        threads: 1,
        context: 64,
        ..Options::default()
    };
    let mut engine = Engine::open(model, options).expect("open");
    let expected = tokens(&mut engine);
    let full = mem::rss().expect("rss");
    assert!(full <= engine.memory().budget());
    for share in [0.7, 0.4, 0.0, 0.2, 0.5, 1.0, 0.0, 1.0] {
        let budget = engine.needs().budget_for_share(share);
        engine.set_budget(budget).expect("set_budget");
        let at_once = mem::rss().expect("rss");
        assert!(
            at_once <= budget,
            "{share}: {at_once} bytes at once, {budget} allowed"
        );
        assert_eq!(tokens(&mut engine), expected, "{share}");
        let later = mem::rss().expect("rss");
        assert!(
            later <= budget,
            "{share}: {later} bytes after a run, {budget} allowed"
        );
        if share == 0.0 {
            assert!(
                later + (4 << 20) < full,
                "{full} bytes when full, {later} after shrinking"
            );
        }
    }
    assert!(matches!(
        engine.set_budget(1 << 20),
        Err(Error::BudgetTooSmall { .. })
    ));
    assert_eq!(tokens(&mut engine), expected, "after a refused budget");
}
