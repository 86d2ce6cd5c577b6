//! Heads for multi-token prediction predict what transformers computes, and change no bit of a text.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use emberflow_engine::{
    Admission, Bias, Draft, Engine, Error, Generation, HiddenRows, MOST_DRAFTS, Model, Options,
    PlannedHead, Request, Sampling, Speculation, Stepper, open_with_heads,
};
use emberflow_models::{is_mtp_head, mtp_head_beside};
use emberflow_tests::{Golden, fixtures, roomy};

/// The reference of a head.
#[derive(serde::Deserialize)]
struct HeadGolden {
    /// What the head drafts after the first token of the continuation, run again on its own drafts.
    chain: Vec<u32>,
    /// The continuation.
    greedy: Vec<u32>,
}

/// Folders and GGUF files of models with a head.
fn models() -> Vec<(PathBuf, PathBuf)> {
    let cases = std::fs::read_dir(fixtures().join("heads")).unwrap();
    let mut cases: Vec<PathBuf> = cases.map(|entry| entry.unwrap().path()).collect();
    cases.sort();
    let both = |case: PathBuf| {
        [
            (case.clone(), case.clone()),
            (case.join("model.gguf"), case),
        ]
    };
    cases.into_iter().flat_map(both).collect()
}

fn heads(depth: Option<usize>) -> Speculation {
    Speculation {
        heads: true,
        depth,
        ..Speculation::OFF
    }
}

fn open(path: &Path, speculation: Speculation) -> Engine {
    let options = Options {
        speculation,
        ..roomy(64)
    };
    Engine::open(Model::of_checkpoint(path).unwrap(), options).unwrap()
}

fn head_of(path: &Path, engine: &Engine) -> Box<dyn Draft> {
    let head = PlannedHead::of(path, engine.text(), engine.options());
    head.unwrap().expect("a head").open(engine).unwrap()
}

/// The length of a text, and what was proposed after it.
type Proposal = (usize, Vec<u32>);

/// A head whose drafts are remembered, or replaced by those of a script.
#[derive(Debug)]
struct Spy {
    head: Box<dyn Draft>,
    seen: Arc<Mutex<Vec<Proposal>>>,
    script: Option<Script>,
}

/// Knows the text, and is right with this probability.
#[derive(Debug)]
struct Script {
    text: Vec<u32>,
    right: f64,
    random: fastrand::Rng,
}

impl Draft for Spy {
    fn reads_hidden(&self) -> bool {
        self.head.reads_hidden()
    }

    fn passed(&mut self, rows: HiddenRows<'_>) -> Result<(), Error> {
        self.head.passed(rows)
    }

    fn behind(&self, text: &[u32]) -> Option<usize> {
        self.head.behind(text)
    }

    fn catch_up(&mut self, text: &[u32]) -> Result<(), Error> {
        self.head.catch_up(text)
    }

    fn propose(
        &mut self,
        text: &[u32],
        depth: usize,
        _: f64,
        drafts: &mut Vec<u32>,
    ) -> Result<(), Error> {
        self.head.propose(text, depth, 0.0, drafts)?;
        if let Some(script) = &mut self.script {
            assert!(script.text.starts_with(text));
            for (draft, known) in drafts.iter_mut().zip(&script.text[text.len()..]) {
                let right = script.random.f64() < script.right;
                *draft = if right { *known } else { 0 };
            }
        }
        let seen = (text.len(), drafts.clone());
        self.seen.lock().unwrap().push(seen);
        Ok(())
    }
}

/// The drafts after `prompt` and each of the tokens `then`, to which the continuation is forced.
fn drafts(path: &Path, prompt: &[u32], then: &[u32], depth: usize) -> Vec<Proposal> {
    let mut engine = open(path, heads(Some(depth)));
    let head = head_of(path, &engine);
    let seen: Arc<Mutex<Vec<_>>> = Arc::default();
    engine.set_draft(Box::new(Spy {
        head,
        seen: Arc::clone(&seen),
        script: None,
    }));
    for count in 1..=then.len() {
        let text = [prompt, &then[..count - 1]].concat();
        let sequence = engine.new_sequence().unwrap();
        let mut stepper = Stepper::new(&mut engine);
        stepper
            .admit(Admission {
                sequence,
                prompt: text,
                request: Request {
                    max_tokens: 8,
                    ignore_eos: true,
                    ..Request::default()
                },
                samples: 1,
                bias: vec![Bias {
                    token: then[count - 1],
                    add: f32::INFINITY,
                }],
                constraint: None,
            })
            .unwrap();
        while !stepper.is_empty() {
            stepper.step().unwrap();
        }
        // After these the text is another.
        seen.lock().unwrap().truncate(count);
    }
    drop(engine);
    Arc::into_inner(seen).unwrap().into_inner().unwrap()
}

#[test]
fn heads_draft_what_transformers_does() {
    let models = models();
    assert_eq!(models.len(), 12);
    for (path, case) in models {
        let golden = Golden::load(&case, "golden.json");
        let text = std::fs::read_to_string(case.join("golden.json")).unwrap();
        let of_head: HeadGolden = serde_json::from_str(&text).unwrap();
        let name = path.display();

        let found = drafts(&path, &golden.tokens, &of_head.greedy[..1], 4);
        let first = golden.tokens.len() + 1;
        assert_eq!(found[0], (first, of_head.chain.clone()), "{name}");

        let all = std::fs::read(case.join(&golden.logits)).unwrap();
        let all = all.as_chunks::<4>().0.iter().copied();
        let all: Vec<f32> = all.map(f32::from_le_bytes).collect();
        let [pairs, vocab] = golden.shape;
        let found = drafts(&path, &golden.tokens[..1], &golden.tokens[1..], 1);
        let mut compared = 0;
        for (len, drafts) in found {
            let Some(logits) = all[..pairs * vocab].chunks(vocab).nth(len - 2) else {
                continue;
            };
            let mut order: Vec<usize> = (0..vocab).collect();
            order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
            if logits[order[0]] - logits[order[1]] > 1e-3 {
                assert_eq!(drafts, [order[0] as u32], "{name}, after {len} tokens");
                compared += 1;
            }
        }
        assert!(compared + 2 >= pairs, "{name}: {compared}");
    }
}

/// A text of 20 tokens.
fn generate(engine: &mut Engine, prompt: &[u32], sampling: Sampling) -> Generation {
    let mut sequence = engine.new_sequence().unwrap();
    let request = Request {
        max_tokens: 20,
        sampling,
        ignore_eos: true,
        ..Request::default()
    };
    let mut on = |_| ControlFlow::Continue(());
    let made = engine.generate(&mut sequence, prompt, &request, &mut on);
    made.unwrap()
}

fn samplings() -> [Sampling; 2] {
    let drawn = Sampling {
        temperature: 0.8,
        seed: 3,
        ..Sampling::default()
    };
    [Sampling::default(), drawn]
}

fn check(found: &Generation, expected: &Generation, what: &str) {
    assert_eq!(found.tokens, expected.tokens, "{what}");
    assert_eq!(found.logits_hash, expected.logits_hash, "{what}");
}

/// llama.cpp's converter writes heads into files of their own, too.
#[test]
fn a_head_in_a_file_of_its_own_drafts_the_same() {
    let mut found = 0;
    for (whole, case) in models() {
        let [model, head] =
            ["model.gguf", "mtp-model.gguf"].map(|name| case.join("split").join(name));
        if !model.exists() || whole.is_dir() {
            continue;
        }
        assert!(is_mtp_head(&head).unwrap() && !is_mtp_head(&model).unwrap());
        assert!(!is_mtp_head(&whole).unwrap());
        let error = Model::of_checkpoint(&head).err().unwrap().to_string();
        assert!(error.contains("without its model"), "{error}");
        assert_eq!(mtp_head_beside(&model).as_ref(), Some(&head));
        assert_eq!(mtp_head_beside(&whole), None);
        let prompt = Golden::load(&case, "golden.json").tokens;
        let expected = generate(
            &mut open(&model, Speculation::OFF),
            &prompt,
            Sampling::default(),
        );
        let mut drafts = Vec::new();
        for (model, head) in [(&whole, None), (&model, Some(head.clone())), (&model, None)] {
            let options = Options {
                speculation: heads(Some(2)),
                head,
                ..roomy(64)
            };
            let opened = Model::of_checkpoint(model).unwrap();
            let mut engine = open_with_heads(opened, options, |_| Ok::<_, Error>(())).unwrap();
            let made = generate(&mut engine, &prompt, Sampling::default());
            check(&made, &expected, &model.display().to_string());
            drafts.push((made.drafts.heads.proposed, made.drafts.heads.taken));
        }
        assert!(drafts[0].0 > 0, "{whole:?}");
        assert!(
            drafts.iter().all(|made| *made == drafts[0]),
            "{whole:?}: {drafts:?}"
        );
        found += 1;
    }
    assert_eq!(found, 4);
}

#[test]
fn a_head_of_another_model_is_an_error() {
    let split =
        |name: &str, file: &str| fixtures().join("heads").join(name).join("split").join(file);
    let open = |head: PathBuf| {
        let options = Options {
            head: Some(head),
            speculation: Speculation::AUTO,
            ..roomy(64)
        };
        let model = Model::of_checkpoint(split("glm4_moe", "model.gguf")).unwrap();
        open_with_heads(model, options, |_| Ok::<_, Error>(()))
    };
    assert!(open(split("glm4_moe", "mtp-model.gguf")).is_ok());
    let other = open(split("qwen3_next", "mtp-model.gguf")).err().unwrap();
    assert!(matches!(other, Error::NotItsHead { .. }), "{other}");
    let none = open(split("glm4_moe", "model.gguf")).err().unwrap();
    assert!(matches!(none, Error::NotItsHead { .. }), "{none}");
    let dir = tempfile::tempdir().unwrap();
    let damaged = dir.path().join("mtp-model.gguf");
    let bytes = std::fs::read(split("glm4_moe", "mtp-model.gguf")).unwrap();
    std::fs::write(&damaged, &bytes[..bytes.len() / 2]).unwrap();
    assert!(open(damaged.clone()).is_err());
    // Of its own accord a model does without.
    let model = dir.path().join("model.gguf");
    std::fs::copy(split("glm4_moe", "model.gguf"), &model).unwrap();
    assert_eq!(mtp_head_beside(&model), Some(damaged));
    let options = Options {
        speculation: Speculation::AUTO,
        ..roomy(64)
    };
    let model = Model::of_checkpoint(&model).unwrap();
    assert!(open_with_heads(model, options, |_| Ok::<_, Error>(())).is_ok());
}

#[test]
fn heads_are_found_by_their_names() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| dir.path().join(name);
    let head = fixtures().join("heads/glm4_moe/split/mtp-model.gguf");
    std::fs::copy(&head, file("blob")).unwrap();
    assert!(is_mtp_head(&file("blob")).unwrap());
    for name in ["mtp-a.gguf", "mtp-b-Q4_0.gguf", "mtp-b.gguf"] {
        std::fs::copy(&head, file(name)).unwrap();
    }
    std::fs::create_dir(file("mtp-folder.gguf")).unwrap();
    for (model, head) in [
        ("a.gguf", Some("mtp-a.gguf")),
        ("a-00002-of-00003.gguf", Some("mtp-a.gguf")),
        ("b-Q4_0.gguf", Some("mtp-b-Q4_0.gguf")),
        ("c.gguf", None),
        ("mtp-a.gguf", None),
        ("folder.gguf", None),
        ("a", None),
    ] {
        assert_eq!(mtp_head_beside(&file(model)), head.map(file), "{model}");
    }
}

#[test]
fn heads_change_no_bit() {
    let mut proposed = 0;
    for (path, case) in models() {
        let prompt = Golden::load(&case, "golden.json").tokens.repeat(2);
        for sampling in samplings() {
            let expected = generate(&mut open(&path, Speculation::OFF), &prompt, sampling);
            for speculation in [heads(Some(1)), heads(Some(4)), Speculation::AUTO] {
                let options = Options {
                    speculation,
                    ..roomy(64)
                };
                let model = Model::of_checkpoint(&path).unwrap();
                let mut engine = open_with_heads(model, options, |_| Ok::<_, Error>(())).unwrap();
                let what = format!("{} {speculation:?}", path.display());
                // The second time the head has seen the text already.
                for _ in 0..2 {
                    let found = generate(&mut engine, &prompt, sampling);
                    check(&found, &expected, &what);
                    let of = found.drafts.heads.proposed;
                    assert!(of > 0 || speculation.depth.is_none(), "{what}: no drafts");
                    proposed += of;
                }
            }
        }
    }
    assert!(proposed > 1000, "{proposed}");
}

#[test]
fn drafts_of_heads_are_taken_as_often_as_they_are_right() {
    for (path, case) in models() {
        let prompt = Golden::load(&case, "golden.json").tokens;
        for sampling in samplings() {
            let expected = generate(&mut open(&path, Speculation::OFF), &prompt, sampling);
            for right in [0.0, 0.4, 0.6, 0.8, 1.0] {
                let mut engine = open(&path, heads(Some(3)));
                let head = head_of(&path, &engine);
                engine.set_draft(Box::new(Spy {
                    head,
                    seen: Arc::default(),
                    script: Some(Script {
                        text: [&prompt[..], &expected.tokens, &[0; MOST_DRAFTS]].concat(),
                        right,
                        random: fastrand::Rng::with_seed(9),
                    }),
                }));
                let found = generate(&mut engine, &prompt, sampling);
                check(&found, &expected, &format!("{} {right}", path.display()));
                let passes = found.drafts.passes;
                let most = [(0.0, 19), (0.4, 18), (0.6, 15), (0.8, 13), (1.0, 5)];
                let most = most.iter().find(|of| of.0 == right).unwrap().1;
                assert!(passes <= most, "{path:?} {right}: {passes} passes");
            }
        }
    }
}
