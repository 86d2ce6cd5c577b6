//! One text under two budgets.

use std::ops::ControlFlow;

use emberflow_engine::{Budget, Engine, Model, Options, Request};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = Model::demo()?; // or Model::load("model.ember")?
    let prompt = model.text().encode("A vector is")?;
    let budget = Budget::Bytes(64 << 20); // for the whole process
    let mut engine = Engine::open(model, Options::new(budget))?;
    let mut sequence = engine.new_sequence()?;
    let mut print = |text: &str| {
        print!("{text}");
        ControlFlow::Continue(()) // or Break(()), to stop
    };
    let first = engine.generate_text(&mut sequence, &prompt, &Request::default(), &mut print)?;

    engine.set_budget(38 << 20)?; // between two tokens, if need be; memory goes back at once
    sequence.clear();
    let again = engine.generate_text(&mut sequence, &prompt, &Request::default(), &mut print)?;
    assert_eq!(first.logits_hash, again.logits_hash); // no text depends on the budget
    let done = again.counters;
    println!("\n{} reads, {} bytes", done.reads, done.bytes_read);
    Ok(())
}
