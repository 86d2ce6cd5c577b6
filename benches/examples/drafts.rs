//! Speed with drafts by kind and number per pass, beside what the governor chooses.
//!
//! ```sh
//! cargo run --release -p emberflow-benches --example drafts -- MODEL.gguf 0.5,0.25 48 DISK PROMPT.txt…
//! ```
//!
//! Arguments: a model, shares of its FFN in memory, tokens, a disk (`auto`, `sim:nvme`), and files with a prompt each. Texts are
//! greedy, and the same in each line.

use std::error::Error;
use std::ops::ControlFlow;
use std::path::Path;

use emberflow_engine::{
    Budget, Engine, Generation, Lab, MOST_DRAFTS, Model, Options, Request, Speculation,
};
use emberflow_storage::io::IoChoice;

/// Fixed numbers of drafts per pass.
const DEPTHS: [usize; 4] = [1, 2, 4, 8];

/// Tokens that fill the cache before a run is measured.
const WARM: usize = 12;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// The runs of one share of the FFN and one prompt.
struct Runs<'a> {
    path: &'a Path,
    share: f64,
    io: IoChoice,
    prompt: &'a str,
    tokens: usize,
}

/// What a run gave.
struct Measured {
    speed: f64,
    made: Generation,
}

impl Runs<'_> {
    fn run(&self, speculation: Speculation) -> Outcome<Measured> {
        let model = Model::of_checkpoint(self.path)?;
        let prompt = model.text().encode(self.prompt)?;
        let options = Options {
            context: prompt.len() + self.tokens + MOST_DRAFTS + 2,
            prompt: prompt.len(),
            speculation,
            lab: Lab {
                io: self.io,
                ..Lab::default()
            },
            ..Options::new(Budget::FfnShare(self.share))
        };
        let mut engine = Engine::open(model, options)?;
        let mut run = |tokens: usize| -> Outcome<Generation> {
            let mut sequence = engine.new_sequence()?;
            let request = Request {
                max_tokens: tokens,
                ignore_eos: true,
                ..Request::default()
            };
            let mut on = |_| ControlFlow::Continue(());
            Ok(engine.generate(&mut sequence, &prompt, &request, &mut on)?)
        };
        run(WARM)?;
        let made = run(self.tokens)?;
        let time: f64 = made.latencies.iter().map(|time| time.as_secs_f64()).sum();
        let speed = made.latencies.len() as f64 / time;
        Ok(Measured { speed, made })
    }

    fn lines(&self, name: &str) -> Outcome<()> {
        let plain = self.run(Speculation::OFF)?;
        let kinds = [
            (
                "n-grams",
                Speculation {
                    lookup: true,
                    ..Speculation::OFF
                },
            ),
            (
                "memory",
                Speculation {
                    memory: true,
                    ..Speculation::OFF
                },
            ),
        ];
        let mut found = Vec::new();
        for (kind, speculation) in kinds {
            for depth in DEPTHS {
                let depth = Some(depth);
                let run = self.run(Speculation {
                    depth,
                    ..speculation
                })?;
                found.push((kind, depth, run));
            }
        }
        found.push(("auto", None, self.run(Speculation::AUTO)?));
        let again = self.run(Speculation::OFF)?;
        let speed = (plain.speed + again.speed) / 2.0;
        let fixed = found.iter().filter(|(_, depth, _)| depth.is_some());
        let best = fixed.map(|(_, _, run)| run.speed).fold(speed, f64::max);
        println!(
            "| {} | {name} | none | 0 | {:.2}, {:.2} | | 1.00 | 1.00 | {:.2} |",
            self.share,
            plain.speed,
            again.speed,
            speed / best
        );
        for (kind, depth, Measured { speed: found, made }) in found {
            if made.logits_hash != plain.made.logits_hash {
                return Err("another text".into());
            }
            let drafts = made.drafts;
            let [proposed, taken] = [drafts.lookup, drafts.memory]
                .iter()
                .fold([0, 0], |[all, right], of| {
                    [all + of.proposed, right + of.taken]
                });
            println!(
                "| {} | {name} | {kind} | {} | {found:.2} ({:.2}) | {:.2} | {:.2} | {:.2} | {:.2} |",
                self.share,
                depth.map_or("chosen".to_owned(), |depth| depth.to_string()),
                found / speed,
                taken as f64 / (proposed as f64).max(1.0),
                (made.tokens.len() - 1) as f64 / (drafts.passes as f64).max(1.0),
                drafts.rows as f64 / (drafts.passes as f64).max(1.0),
                found / best,
            );
        }
        Ok(())
    }
}

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, shares, tokens, disk, prompts @ ..] = arguments.as_slice() else {
        return Err("usage: drafts MODEL.gguf SHARES TOKENS DISK PROMPT.txt…".into());
    };
    println!(
        "| FFN in memory | prompt | drafts | per pass | tok/s (times plain) | right | tokens per pass | rows per pass | of the best fixed |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for share in shares.split(',') {
        for prompt in prompts {
            let name = Path::new(prompt).file_stem().unwrap_or_default();
            let runs = Runs {
                path: Path::new(model),
                share: share.parse()?,
                io: disk.parse()?,
                prompt: &std::fs::read_to_string(prompt)?,
                tokens: tokens.parse()?,
            };
            runs.lines(&name.to_string_lossy())?;
        }
    }
    Ok(())
}
