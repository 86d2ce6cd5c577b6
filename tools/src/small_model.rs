//! Drafts of a small model with the same tokens (`--draft`).

use std::fmt;

use emberflow_engine::memory::MemoryPlan;
use emberflow_engine::{
    Budget, Draft, Engine, Error, Lab, Logits, MOST_DRAFTS, Model, Options, Sequence, Text,
    log_probability, most_likely,
};
use emberflow_storage::mem;

use crate::cli::EngineArgs;
use crate::{Failure, size};

/// Tokens that the small model computes at once.
const CHUNK: usize = 32;

/// Bytes of a buffer that each thread of the small model may have, as long as those of the other model.
const PER_THREAD: u64 = 1 << 20;

/// A small model in memory, and the text that it follows.
pub struct SmallModel {
    engine: Engine,
    sequence: Sequence,
    /// Tokens of both models.
    vocab: u32,
}

/// A small model, and the bytes that it will take in addition to those it has.
pub struct Opened {
    /// The model.
    pub model: Box<dyn Draft>,
    /// See [`Opened`].
    pub reserve: u64,
}

/// Opens `model` for texts of `target` of up to `context` tokens, within the memory of `args`.
///
/// # Errors
/// A model that cannot be opened or is too large, has other tokens, or whose state cannot go back.
pub fn open(
    model: Model,
    target: &Text,
    context: usize,
    args: &EngineArgs,
) -> Result<Opened, Failure> {
    check_tokens(target, &model)?;
    let vocab = target.config().vocab.min(model.text().config().vocab);
    let options = Options {
        threads: args.threads.unwrap_or(0).into(),
        context: context.min(model.text().config().max_context as usize),
        kv: args.kv.into(),
        lab: Lab {
            chunk: CHUNK,
            ..args.lab.clone()
        },
        ..Options::new(Budget::FfnShare(1.0))
    };
    let fits = |plan: &MemoryPlan| match args.memory {
        Budget::Bytes(budget) if plan.held() >= budget => Err(Failure::usage(format!(
            "the model of --draft takes {} of --memory {}: choose a smaller one, or more memory",
            size::show(plan.held()),
            size::show(budget)
        ))),
        _ => Ok(()),
    };
    let engine = Engine::open_watched(model, options, fits)?;
    let sequence = engine.new_sequence()?;
    if !sequence.goes_back() {
        return Err(Failure::usage(
            "--draft needs a model without recurrent layers: its state must go back after a wrong draft",
        ));
    }
    let planned = engine.memory().held();
    let reserve = planned.saturating_sub(mem::rss().unwrap_or(planned));
    let reserve = reserve + PER_THREAD * engine.threads() as u64;
    let model = Box::new(SmallModel {
        engine,
        sequence,
        vocab,
    });
    Ok(Opened { model, reserve })
}

/// Rejects a model with other tokens than `target`.
fn check_tokens(target: &Text, model: &Model) -> Result<(), Failure> {
    let [ours, theirs] = [target, model.text()].map(|text| text.tokenizer());
    let shared = ours.vocab_size().min(theirs.vocab_size());
    let differs = (0..shared).find(|&id| ours.id_to_token(id) != theirs.id_to_token(id));
    let Some(id) = differs else {
        return Ok(());
    };
    let named = [ours, theirs].map(|tokens| tokens.id_to_token(id).unwrap_or_default());
    Err(Failure::usage(format!(
        "--draft needs a model with the same tokens: token {id} is {:?} here and {:?} there; a smaller model of the \
         same family has them",
        named[0], named[1]
    )))
}

impl fmt::Debug for SmallModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = &self.engine.config().name;
        f.debug_struct("SmallModel").field("name", name).finish()
    }
}

impl SmallModel {
    /// Computes all but the last `left` tokens of `text` that are not yet computed.
    fn compute(&mut self, text: &[u32], left: usize) -> Result<(), Error> {
        let wanted = &text[..text.len().saturating_sub(left)];
        let known = self.sequence.tokens().iter().zip(wanted);
        let common = known.take_while(|(a, b)| a == b).count();
        let common = self.sequence.truncate(common);
        let chunk = self.engine.chunk();
        for tokens in wanted[common..].chunks(chunk) {
            self.engine
                .forward(&mut self.sequence, tokens, Logits::None)?;
        }
        Ok(())
    }

    /// Whether the model can follow `text` by `depth` tokens.
    fn knows(&self, text: &[u32], depth: usize) -> bool {
        let capacity = self.sequence.tokens().len() + self.sequence.room();
        text.len() + depth <= capacity && text.iter().all(|&token| token < self.vocab)
    }
}

impl Draft for SmallModel {
    fn behind(&self, text: &[u32]) -> Option<usize> {
        let known = self.sequence.tokens().iter().zip(text);
        let common = known.take_while(|(a, b)| a == b).count();
        (self.knows(text, MOST_DRAFTS)).then(|| text.len().saturating_sub(common))
    }

    fn catch_up(&mut self, text: &[u32]) -> Result<(), Error> {
        let missing = self.behind(text).unwrap_or(0);
        self.compute(text, 1 + missing.saturating_sub(CHUNK))
    }

    fn propose(
        &mut self,
        text: &[u32],
        depth: usize,
        least: f64,
        drafts: &mut Vec<u32>,
    ) -> Result<(), Error> {
        let Some(&last) = text.last().filter(|_| self.knows(text, depth)) else {
            return Ok(());
        };
        self.compute(text, 1)?;
        let (mut last, mut sure) = (last, 1.0);
        for _ in 0..depth {
            self.engine
                .forward(&mut self.sequence, &[last], Logits::Last)?;
            let logits = &self.engine.logits()[..self.vocab as usize];
            last = most_likely(logits);
            drafts.push(last);
            sure *= log_probability(logits, last).exp();
            if sure < least {
                break;
            }
        }
        Ok(())
    }
}
