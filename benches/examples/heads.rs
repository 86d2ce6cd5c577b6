//! Speed with drafts of a model's own head (MTP) that are right as often as a script says. The head computes its drafts, then
//! the script replaces them, so times are those of a real head and its acceptance is any.
//!
//! ```sh
//! cargo run --release -p emberflow-benches --example heads -- MODEL.gguf 1.0,0.5,0.25 128 DISK [DRAFTS]
//! ```
//!
//! Arguments: an unpacked model with a head, shares of its FFN in memory, tokens, a disk (`auto`, `sim:nvme`), and drafts
//! per pass (otherwise as many as pay).

use std::error::Error;
use std::ops::ControlFlow;
use std::path::Path;

use emberflow_engine::{
    Budget, Draft, Engine, Generation, HiddenRows, Lab, MOST_DRAFTS, Model, Options, PlannedHead,
    Request, Speculation,
};
use emberflow_storage::io::IoChoice;

/// Probabilities that a draft is right, if those before it are.
const RIGHT: [f64; 4] = [0.0, 0.4, 0.6, 0.8];

/// Tokens of the prompt.
const PROMPT: u32 = 32;

/// A head whose drafts are replaced.
#[derive(Debug)]
struct Scripted {
    head: Box<dyn Draft>,
    text: Vec<u32>,
    right: f64,
    random: fastrand::Rng,
}

impl Draft for Scripted {
    fn reads_hidden(&self) -> bool {
        true
    }

    fn passed(&mut self, rows: HiddenRows<'_>) -> Result<(), emberflow_engine::Error> {
        self.head.passed(rows)
    }

    fn behind(&self, text: &[u32]) -> Option<usize> {
        self.head.behind(text)
    }

    fn catch_up(&mut self, text: &[u32]) -> Result<(), emberflow_engine::Error> {
        self.head.catch_up(text)
    }

    fn propose(
        &mut self,
        text: &[u32],
        depth: usize,
        _: f64,
        drafts: &mut Vec<u32>,
    ) -> Result<(), emberflow_engine::Error> {
        // The head's own certainty is that of random weights.
        self.head.propose(text, depth, 0.0, drafts)?;
        for (draft, known) in drafts.iter_mut().zip(&self.text[text.len()..]) {
            let right = self.random.f64() < self.right;
            *draft = if right { *known } else { (*known + 1) % 64 };
        }
        Ok(())
    }
}

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, shares, tokens, disk, drafts @ ..] = arguments.as_slice() else {
        return Err("usage: heads MODEL.gguf SHARES TOKENS DISK [DRAFTS]".into());
    };
    let depth = drafts.first().map(|drafts| drafts.parse()).transpose()?;
    let tokens = tokens.parse()?;
    let shares = shares.split(',').map(str::parse);
    let shares: Vec<f64> = shares.collect::<Result<_, _>>()?;
    println!(
        "| FFN in memory | plain tok/s | drafts right | tok/s | times plain | tokens per pass | rows per pass | ms per draft | bound | of bound |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    for share in shares {
        of_share(Path::new(model), share, tokens, (disk.parse()?, depth))?;
    }
    Ok(())
}

/// The lines of one share.
fn of_share(
    path: &Path,
    share: f64,
    tokens: usize,
    (io, depth): (IoChoice, Option<usize>),
) -> Outcome<()> {
    let prompt: Vec<u32> = (0..PROMPT).map(|at| 100 + at * 37 % 1000).collect();
    let context = PROMPT as usize + tokens + MOST_DRAFTS + 2;
    let options = |speculation| Options {
        context,
        prompt: PROMPT as usize,
        speculation,
        lab: Lab {
            io,
            ..Lab::default()
        },
        ..Options::new(Budget::FfnShare(share))
    };
    let generate = |engine: &mut Engine| -> Outcome<Generation> {
        let mut sequence = engine.new_sequence()?;
        let request = Request {
            max_tokens: tokens,
            ignore_eos: true,
            ..Request::default()
        };
        let mut on = |_| ControlFlow::Continue(());
        Ok(engine.generate(&mut sequence, &prompt, &request, &mut on)?)
    };
    // The first run fills the cache.
    let measure = |engine: &mut Engine| {
        generate(engine)?;
        generate(engine)
    };
    let plainly = || {
        let model = Model::of_checkpoint(path)?;
        measure(&mut Engine::open(model, options(Speculation::OFF))?)
    };
    for right in RIGHT {
        // Beside each other, because a disk's own cache may grow warm.
        let plain = plainly()?;
        let heads = Speculation {
            heads: true,
            depth,
            ..Speculation::OFF
        };
        let mut engine = Engine::open(Model::of_checkpoint(path)?, options(heads))?;
        let head = PlannedHead::of(path, engine.text(), engine.options())?;
        let head = head.ok_or("the model has no head")?.open(&engine)?;
        engine.set_draft(Box::new(Scripted {
            head,
            text: [&prompt[..], &plain.tokens, &[0; MOST_DRAFTS]].concat(),
            right,
            random: fastrand::Rng::with_seed(5),
        }));
        let found = measure(&mut engine)?;
        drop(engine);
        let again = plainly()?;
        if found.logits_hash != plain.logits_hash {
            return Err("another text".into());
        }
        let speed = |of: &Generation| {
            let time: f64 = of.latencies.iter().map(|time| time.as_secs_f64()).sum();
            of.latencies.len() as f64 / time
        };
        let [before, after, later] = [&plain, &found, &again].map(speed);
        let before = (before * later).sqrt();
        let drafts = found.drafts;
        let per_pass = (tokens - 1) as f64 / drafts.passes as f64;
        let making = drafts.time.as_secs_f64() / drafts.passes as f64;
        // Checks that cost as much as plain passes.
        let bound = per_pass * before / (1.0 + making * before);
        println!(
            "| {share} | {before:.1} | {right} | {after:.1} | {:.2} | {per_pass:.2} | {:.2} | {:.1} | {bound:.1} | {:.2} |",
            after / before,
            drafts.rows as f64 / drafts.passes as f64,
            1e3 * drafts.time.as_secs_f64() / drafts.heads.proposed.max(1) as f64,
            after / bound,
        );
    }
    Ok(())
}
