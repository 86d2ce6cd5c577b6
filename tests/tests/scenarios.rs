//! The bundled model under random budgets, budget changes, engines, threads and faults: the tokens
//! and every logit equal those of the resident run, or the run ends with an error. Each failure
//! prints the seed that repeats it.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use emberflow::cli::ModelArg;
use emberflow::model::open_model;
use emberflow_engine::memory::Needs;
use emberflow_engine::{Budget, Engine, Error, Lab, Logits, Options, Phases, Sparsity};
use emberflow_storage::io::{Faults, IoChoice, Profile, SimOptions};
use emberflow_storage::mem;
use fastrand::Rng;

const PROMPT: &str = "The borrow checker";
const TOKENS: usize = 12;

/// Memory is measured for the whole process: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// All of them, or the one named by `EMBERFLOW_SEED`, to repeat a failure.
fn seeds(all: Range<u64>) -> Range<u64> {
    match std::env::var("EMBERFLOW_SEED").map(|seed| seed.parse()) {
        Ok(Ok(seed)) => seed..seed + 1,
        _ => all,
    }
}

fn share(random: &mut Rng) -> f64 {
    random.u64(..=1000) as f64 / 1000.0
}

fn open(options: Options) -> Result<Engine, Error> {
    let model = open_model(&ModelArg { model: None }).expect("the bundled model");
    Engine::open(model, options)
}

/// Plans independent of this machine, with reads by `io`.
fn lab(io: IoChoice) -> Lab {
    Lab {
        io,
        profiles: false,
        ..Lab::default()
    }
}

fn options(budget: Budget) -> Options {
    Options {
        budget,
        threads: 1,
        context: 64,
        lab: lab(IoChoice::Auto),
        ..Options::default()
    }
}

fn simulated(random: &mut Rng, faults: Faults) -> IoChoice {
    let profiles = [Profile::Ufs4, Profile::Ufs31, Profile::Nvme, Profile::Emmc];
    let profile = profiles[random.usize(..4)];
    IoChoice::Sim(SimOptions::new(profile, random.u64(..)).faulty(faults))
}

/// Generates greedily, changing the budget before some of the tokens.
fn generate(
    engine: &mut Engine,
    budgets: &mut dyn FnMut(&mut Engine) -> Result<(), Error>,
) -> Result<(Vec<u32>, Vec<u32>), Error> {
    let mut bits = Vec::new();
    let tokens = generate_into(engine, budgets, &mut bits)?;
    Ok((tokens, bits))
}

/// The same; `bits` also has the logits before an error.
fn generate_into(
    engine: &mut Engine,
    budgets: &mut dyn FnMut(&mut Engine) -> Result<(), Error>,
    bits: &mut Vec<u32>,
) -> Result<Vec<u32>, Error> {
    let prompt = engine.text().encode(PROMPT)?;
    let mut sequence = engine.new_sequence().unwrap();
    for chunk in prompt.chunks(engine.chunk()) {
        engine.forward(&mut sequence, chunk, Logits::Last)?;
    }
    let mut tokens = Vec::new();
    for _ in 0..TOKENS {
        bits.extend(engine.logits().iter().map(|l| l.to_bits()));
        let token = emberflow_kernels::argmax(engine.logits()).expect("finite logits") as u32;
        tokens.push(token);
        budgets(engine)?;
        engine.forward(&mut sequence, &[token], Logits::Last)?;
    }
    Ok(tokens)
}

fn resident(sparsity: Sparsity) -> (Vec<u32>, Vec<u32>) {
    let mut engine = open(Options {
        sparsity,
        ..options(Budget::FfnShare(1.0))
    })
    .expect("open");
    generate(&mut engine, &mut |_| Ok(())).expect("resident run")
}

#[test]
fn recoverable_faults_and_changing_budgets_change_no_bit() {
    recover(0..50);
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn more_recoverable_faults_and_changing_budgets_change_no_bit() {
    recover(50..200);
}

#[test]
fn damage_ends_the_run_and_never_changes_it() {
    damage(1000..1030);
}

#[test]
#[ignore = "long: `.ci/run long` runs it"]
fn more_damage_ends_the_run_and_never_changes_it() {
    damage(1030..1100);
}

/// Random scenarios with recoverable faults: short reads, interruptions, delays, reordering. Nothing may change, and memory
/// stays within the budget.
fn recover(scenarios: Range<u64>) {
    let count = (scenarios.end - scenarios.start) as usize;
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let exact = resident(Sparsity::Exact);
    let predicted = resident(Sparsity::Predicted);
    assert!(exact != predicted, "predictors left nothing out");
    let (mut changed_residency, mut partly) = (0, 0);
    let mut read = 0;
    for seed in seeds(scenarios) {
        let mut random = Rng::with_seed(seed);
        let faults = Faults {
            short: random.u16(..200),
            again: random.u16(..200),
            delay: random.u16(..200),
            shuffle: random.u8(..2) == 0,
            ..Faults::default()
        };
        let io = match random.u8(..4) {
            0 => IoChoice::Auto,
            1 => IoChoice::Pread,
            _ => simulated(&mut random, faults),
        };
        let modes = [Sparsity::Exact, Sparsity::Dense, Sparsity::Predicted];
        let sparsity = modes[[0, 0, 0, 1, 2, 2, 2][random.usize(..7)]];
        let expected = match sparsity {
            Sparsity::Predicted => &predicted,
            _ => &exact,
        };
        let mut engine = open(Options {
            threads: 1 + random.usize(..3),
            sparsity,
            lab: Lab {
                chunk: 1 + random.usize(..20),
                phases: [Phases::One, Phases::Two][random.usize(..2)],
                ..lab(io)
            },
            ..options(Budget::FfnShare(share(&mut random)))
        })
        .unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        let first = engine.memory().gate_banks;
        let found = generate(&mut engine, &mut |engine| {
            if random.u8(..3) == 0 {
                // About a twelfth and an eighth of the FFN are held with the Gate rows of some layers.
                let range = [1.0, 0.15][random.usize(..2)];
                let needs = Needs {
                    process_peak: 0,
                    ..*engine.needs()
                };
                let bytes = needs.budget_for_share(range * share(&mut random));
                engine.set_budget(bytes)?;
                changed_residency += usize::from(engine.memory().gate_banks != first);
                partly += usize::from(engine.memory().gates_partly());
            }
            Ok(())
        })
        .unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        assert!(found == *expected, "seed {seed}: the output changed");
        read += engine.counters().misses;
        let (rss, budget) = (mem::rss().expect("rss"), engine.memory().budget());
        assert!(
            rss <= budget,
            "seed {seed}: {rss} bytes held, {budget} allowed"
        );
    }
    if read > 0 && std::env::var_os("EMBERFLOW_SEED").is_some() {
        return;
    }
    assert!(read > 500 * count as u64, "only {read} neurons were read");
    assert!(
        changed_residency > count / 10,
        "only {changed_residency} changes"
    );
    assert!(
        partly > count / 25,
        "Gate rows of some layers only {partly} times"
    );
}

/// Faults that cannot be recovered end the run with an error that says where, unless the run did
/// not reach them; they never change a bit, including the output before the error: prefetched
/// damage that is needed must not be used in computation.
fn damage(scenarios: Range<u64>) {
    let count = scenarios.end - scenarios.start;
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let modes = [Sparsity::Exact, Sparsity::Predicted];
    let expected = modes.map(|sparsity| resident(sparsity).1);
    let (mut ended, mut foreseen) = (0, 0);
    for seed in seeds(scenarios) {
        let mut random = Rng::with_seed(seed);
        let faults = Faults {
            eio: [0, 3][random.usize(..2)],
            flip: [1, 3, 20][random.usize(..3)],
            ..Faults::default()
        };
        let io = simulated(&mut random, faults);
        let mode = random.usize(..2);
        let opened = open(Options {
            sparsity: modes[mode],
            lab: Lab {
                phases: [Phases::Auto, Phases::One][random.usize(..2)],
                ..lab(io)
            },
            ..options(Budget::FfnShare(0.1 + 0.8 * share(&mut random)))
        });
        let outcome = opened.and_then(|mut engine| {
            let mut found = Vec::new();
            let outcome = generate_into(&mut engine, &mut |_| Ok(()), &mut found);
            assert!(
                expected[mode].starts_with(&found),
                "seed {seed}: the output changed"
            );
            foreseen += engine.counters().guessed_needed;
            if outcome.is_err() {
                let again = generate(&mut engine, &mut |_| Ok(()));
                assert!(again.is_err(), "seed {seed}: went on after a failure");
            }
            outcome
        });
        if let Err(e) = outcome {
            ended += 1;
            let message = e.to_string();
            assert!(
                message.contains("bundled model") && message.contains("offset"),
                "seed {seed}: {message:?} does not say where"
            );
        }
    }
    if std::env::var_os("EMBERFLOW_SEED").is_none() {
        assert!(ended > count / 20, "only {ended} runs met a fault");
        assert!(
            foreseen > 50 * count,
            "only {foreseen} neurons were foreseen"
        );
    }
}
