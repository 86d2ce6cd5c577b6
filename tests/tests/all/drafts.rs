//! Texts are the same with drafts and without, bit for bit.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::Ordering;

use emberflow_engine::{
    Admission, Draft, DraftCounts, Engine, Error, Generation, MOST_DRAFTS, Model, Options, Request,
    Sampling, Speculation, Stepped, Stepper, demo_container,
};
use emberflow_kernels::DType;
use emberflow_models::demo::Demo;
use emberflow_tests::{case, one_per_family, packed, roomy, squeeze};

/// Tokens of a text.
const LEN: usize = 40;

/// Knows the text, and is wrong at some places.
#[derive(Debug)]
struct Script {
    text: Vec<u32>,
    random: fastrand::Rng,
    /// Probability that a draft is right.
    right: f64,
    vocab: u32,
}

impl Draft for Script {
    fn behind(&self, text: &[u32]) -> Option<usize> {
        self.text.starts_with(text).then_some(0)
    }

    fn catch_up(&mut self, _: &[u32]) -> Result<(), Error> {
        unreachable!("never behind")
    }

    fn propose(
        &mut self,
        text: &[u32],
        depth: usize,
        _: f64,
        drafts: &mut Vec<u32>,
    ) -> Result<(), Error> {
        assert!(self.text.starts_with(text), "{text:?} of {:?}", self.text);
        for place in text.len()..text.len() + depth {
            let known = self.text.get(place).copied();
            let known = known.filter(|_| self.random.f64() < self.right);
            drafts.push(known.unwrap_or_else(|| self.random.u32(..self.vocab)));
        }
        Ok(())
    }
}

/// The text, its hash, and the tokens of the sequence afterwards.
fn generate(engine: &mut Engine, prompt: &[u32], sampling: Sampling) -> (Generation, Vec<u32>) {
    let mut sequence = engine.new_sequence().unwrap();
    let request = Request {
        max_tokens: LEN,
        sampling,
        ignore_eos: true,
        ..Request::default()
    };
    let mut on = |_| ControlFlow::Continue(());
    let made = engine.generate(&mut sequence, prompt, &request, &mut on);
    (made.unwrap(), sequence.tokens().to_vec())
}

fn prompt_of(engine: &Engine, seed: u64) -> Vec<u32> {
    let mut random = fastrand::Rng::with_seed(seed);
    let vocab = engine.config().vocab;
    (0..9).map(|_| random.u32(..vocab)).collect()
}

fn with(speculation: Speculation) -> Options {
    Options {
        speculation,
        ..roomy(LEN + 16)
    }
}

fn fixed(depth: usize, model: bool) -> Speculation {
    Speculation {
        lookup: !model,
        model,
        depth: Some(depth),
        ..Speculation::OFF
    }
}

/// Drafts of the model itself.
fn itself(depth: usize) -> Speculation {
    Speculation {
        memory: true,
        depth: Some(depth),
        ..Speculation::OFF
    }
}

/// Drafts that are right now and then, in every family, on every mixer: right and wrong ones leave no trace.
#[test]
fn drafts_change_no_bit_in_any_family() {
    let (mut families, mut taken, mut wrong) = (0, 0, 0);
    let mut again = BTreeSet::new();
    for folder in one_per_family() {
        let open = |options| Engine::open(Model::of_checkpoint(&folder).unwrap(), options).unwrap();
        let mut plain = open(roomy(LEN + 16));
        let prompt = prompt_of(&plain, 3);
        for (sampling, depth, right) in [
            (Sampling::default(), 4, 0.8),
            (Sampling::default(), MOST_DRAFTS, 0.5),
            (
                Sampling {
                    temperature: 0.9,
                    top_k: 40,
                    repetition_penalty: 1.1,
                    frequency_penalty: 0.2,
                    seed: 7,
                    ..Sampling::default()
                },
                3,
                0.7,
            ),
        ] {
            let (expected, ended) = generate(&mut plain, &prompt, sampling);
            let mut engine = open(with(fixed(depth, true)));
            let vocab = engine.config().vocab;
            engine.set_draft(Box::new(Script {
                text: [&prompt[..], &expected.tokens].concat(),
                random: fastrand::Rng::with_seed(11),
                right,
                vocab,
            }));
            let (found, sequence) = generate(&mut engine, &prompt, sampling);
            let name = folder.file_name().unwrap().to_string_lossy().into_owned();
            assert_eq!(found.tokens, expected.tokens, "{name}, {depth} drafts");
            assert_eq!(
                found.logits_hash, expected.logits_hash,
                "{name}, {depth} drafts"
            );
            assert!(
                ended.starts_with(&sequence),
                "{name}: the state has other tokens"
            );
            let drafts = found.drafts.model;
            assert!(drafts.proposed > 0, "{name}: no drafts");
            assert!(
                found.drafts.passes < LEN as u64,
                "{name}: as many passes as tokens"
            );
            if found.drafts.rows > found.drafts.passes + drafts.proposed {
                again.insert(name);
            }
            taken += drafts.taken;
            wrong += drafts.proposed - drafts.taken;
        }
        families += 1;
    }
    // Their recurrent state is not replayed: rows before a wrong draft are computed again.
    let expected = ["deepseek_v4", "jamba", "qwen4_exp"];
    assert_eq!(Vec::from_iter(&again), expected);
    assert!(
        families > 60 && taken > 1000 && wrong > 1000,
        "{families} {taken} {wrong}"
    );
}

/// Opens a fixture as it lies, or packed, or a bundled model.
fn open_as(name: &str, dir: &Path, options: Options) -> Engine {
    let model = match name.strip_prefix("packed ") {
        Some("demo") => Model::demo(),
        Some("demo-moe") => Model::open(demo_container(Demo::Experts).unwrap()),
        Some(name) => {
            let file = dir.join(format!("{name}.f32.ember"));
            if !file.exists() {
                packed(&case(name), dir, DType::F32);
            }
            Model::load(file)
        }
        None => Model::of_checkpoint(case(name)),
    };
    Engine::open(model.unwrap(), options).unwrap()
}

/// With little memory: drafts from the text itself, of the model itself, and as many as pay.
#[test]
fn drafts_change_no_bit_under_any_budget() {
    for name in [
        "qwen3",
        "qwen3_moe",
        // Recurrent state, also what is not replayed.
        "qwen3_next",
        "kimi_linear",
        "lfm2_moe",
        "nemotron_h",
        "falcon_h1",
        "jamba",
        "deepseek_v4",
        "qwen4_exp",
        "gemma3",
        "gemma3n",
        "packed demo",
        "packed demo-moe",
        "packed opt",
    ] {
        let dir = tempfile::tempdir().unwrap();
        let mut plain = open_as(name, dir.path(), roomy(LEN + 32));
        let prompt = prompt_of(&plain, 5).repeat(2);
        let (expected, _) = generate(&mut plain, &prompt, Sampling::default());
        for speculation in [
            Speculation::AUTO,
            fixed(1, false),
            fixed(5, false),
            itself(1),
            itself(3),
        ] {
            let mut options = Options {
                speculation,
                ..roomy(LEN + 32)
            };
            // Small models have more tiles than a pass needs at once.
            options.lab.tile = 1 << 9;
            let mut engine = open_as(name, dir.path(), options);
            let mut made = DraftCounts::default();
            for share in [1.0, 0.5, 0.0] {
                squeeze(&mut engine, share);
                let (found, _) = generate(&mut engine, &prompt, Sampling::default());
                let what = format!("{name} {speculation:?} {share}");
                assert_eq!(found.logits_hash, expected.logits_hash, "{what}");
                assert_eq!(found.tokens, expected.tokens, "{what}");
                made.proposed += found.drafts.memory.proposed;
                made.taken += found.drafts.memory.taken;
            }
            // The smallest memory holds all of the small FFN.
            if speculation == itself(3) && name != "falcon_h1" {
                assert!(made.proposed > 0, "{name}: {made:?}");
            }
            if speculation == itself(3) && name.starts_with("packed demo") {
                assert!(made.taken > 0, "{name}: {made:?}");
            }
        }
    }
}

/// A conversation goes on after a text whose last drafts were cut off by its end.
#[test]
fn a_conversation_goes_on_after_drafts() {
    for name in ["qwen3", "qwen3_next"] {
        let open =
            |options| Engine::open(Model::of_checkpoint(case(name)).unwrap(), options).unwrap();
        let talk = |engine: &mut Engine, expected: &[Vec<u32>]| {
            let mut sequence = engine.new_sequence().unwrap();
            let mut answers = Vec::new();
            let mut text = Vec::new();
            for (turn, max_tokens) in [5, 7, 3, 6].into_iter().enumerate() {
                text.extend(prompt_of(engine, turn as u64));
                if let Some(answer) = expected.get(turn) {
                    let vocab = engine.config().vocab;
                    engine.set_draft(Box::new(Script {
                        text: [&text[..], answer, &[1; MOST_DRAFTS]].concat(),
                        random: fastrand::Rng::with_seed(1),
                        right: 0.8,
                        vocab,
                    }));
                }
                let request = Request {
                    max_tokens,
                    ignore_eos: true,
                    ..Request::default()
                };
                let known = sequence.tokens().len();
                assert!(text.starts_with(sequence.tokens()));
                // The caller stops the text, also between two tokens of one pass.
                let mut left = max_tokens - 1;
                let mut on = |progress| match progress {
                    emberflow_engine::Progress::Prompt(_) => ControlFlow::Continue(()),
                    emberflow_engine::Progress::Token(_) => {
                        left -= 1;
                        if left == 0 {
                            ControlFlow::Break(())
                        } else {
                            ControlFlow::Continue(())
                        }
                    }
                };
                let made = engine.generate(&mut sequence, &text[known..], &request, &mut on);
                let made = made.unwrap();
                assert_eq!(made.tokens.len(), max_tokens - 1);
                text.extend(&made.tokens);
                answers.push((made.tokens, made.logits_hash));
            }
            answers
        };
        let expected = talk(&mut open(roomy(100)), &[]);
        let tokens: Vec<_> = expected.iter().map(|(tokens, _)| tokens.clone()).collect();
        let mut engine = open(Options {
            speculation: fixed(4, true),
            ..roomy(100)
        });
        assert_eq!(talk(&mut engine, &tokens), expected, "{name}");
        assert!(engine.draft_totals().model.taken > 0);
    }
}

/// A text whose pass with eight drafts is set aside, while another one comes and goes, and between two tokens of a pass.
#[test]
fn a_pass_with_drafts_can_be_set_aside() {
    for name in ["qwen3", "qwen3_next"] {
        let open =
            |options| Engine::open(Model::of_checkpoint(case(name)).unwrap(), options).unwrap();
        let mut plain = open(roomy(LEN + 16));
        let prompts = [1, 2].map(|seed| prompt_of(&plain, seed));
        let expected = [0, 1].map(|n| generate(&mut plain, &prompts[n], Sampling::default()).0);
        let mut engine = open(Options {
            batch: 2,
            preemption: true,
            speculation: fixed(MOST_DRAFTS, true),
            ..roomy(LEN + 16)
        });
        engine.set_draft(Box::new(Script {
            text: [&prompts[0][..], &expected[0].tokens].concat(),
            random: fastrand::Rng::with_seed(4),
            right: 0.9,
            vocab: engine.config().vocab,
        }));
        let sequences = [0, 1].map(|_| engine.new_sequence().unwrap());
        let mut stepper = Stepper::new(&mut engine);
        let flag = stepper.yield_flag();
        let admit = |stepper: &mut Stepper<'_>, n: usize, sequence| {
            let request = Request {
                max_tokens: LEN,
                ignore_eos: true,
                ..Request::default()
            };
            let admission = Admission {
                sequence,
                prompt: prompts[n].clone(),
                request,
                samples: 1,
                bias: Vec::new(),
                constraint: None,
            };
            stepper.admit(admission).unwrap()
        };
        let [first, second] = sequences;
        let mut tokens = 0;
        let one = admit(&mut stepper, 0, first);
        // Stops in the middle of what a pass has given, then in the middle of a pass.
        while tokens < 12 {
            if let Stepped::Passed { rows, events, .. } = stepper.step().unwrap() {
                tokens += events.len();
                if rows == 0 && tokens % 3 == 0 {
                    stepper.preempt(one);
                    stepper.resume(one);
                }
            }
        }
        while !matches!(stepper.step().unwrap(), Stepped::Yielded) {
            flag.store(true, Ordering::Relaxed);
        }
        stepper.preempt(one);
        let two = admit(&mut stepper, 1, second);
        flag.store(true, Ordering::Relaxed);
        assert!(matches!(stepper.step().unwrap(), Stepped::Yielded));
        stepper.preempt(two);
        [one, two].into_iter().for_each(|id| stepper.resume(id));
        while !stepper.is_empty() {
            stepper.step().unwrap();
        }
        for (id, expected) in [one, two].into_iter().zip(&expected) {
            let found = stepper.take(id).unwrap();
            assert_eq!(found.tokens, expected.tokens, "{name}");
            assert_eq!(found.logits_hash, expected.logits_hash, "{name}");
        }
        assert!(engine.draft_totals().model.taken > 0, "{name}");
    }
}
