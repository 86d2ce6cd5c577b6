//! A budget that changes while running: memory follows it, the text does not. A
//! file of its own, as it measures the whole process.

use std::ops::ControlFlow;

use emberflow::cli::ModelArg;
use emberflow::model::open_model;
use emberflow_engine::{Budget, Engine, Error, Options, Request, Sampling};
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

#[test]
fn memory_follows_the_budget_and_the_text_does_not() {
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
