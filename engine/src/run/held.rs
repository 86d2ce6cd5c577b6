//! Drafts of the model itself, computing only the FFN weights that are in memory: no second model, and nothing is read.

use super::log_probs::{log_probability, most_likely};
use crate::error::Error;
use crate::forward::pass::Pass;
use crate::forward::{Decoder, Hooks};
use crate::state::{Sequence, Span};

/// Makes drafts.
pub(super) struct HeldDrafts<'a> {
    pub decoder: &'a mut Decoder,
    pub pass: &'a mut Pass,
    /// Most drafts.
    pub depth: usize,
    /// After the first, one that is right with a lower probability costs more than it saves.
    pub least: f64,
}

impl HeldDrafts<'_> {
    /// Appends the most likely tokens after those of `span` to `drafts`. Leaves its sequence as it was.
    ///
    /// # Errors
    /// A failed read of an embedding.
    pub fn append(mut self, span: Span<'_>, drafts: &mut Vec<u32>) -> Result<(), Error> {
        let Span { sequence, tokens } = span;
        let len = sequence.len();
        let times = self.decoder.times;
        sequence.begin_drafts(std::mem::take(&mut self.decoder.scratch.state));
        let made = self.follow(sequence, tokens, drafts);
        self.decoder.scratch.state = sequence.end_drafts(len);
        // Their time is that of drafts.
        self.decoder.times = times;
        self.decoder.ffn.end_drafts();
        made
    }

    fn follow(
        &mut self,
        sequence: &mut Sequence,
        tokens: &[u32],
        drafts: &mut Vec<u32>,
    ) -> Result<(), Error> {
        let (mut last, mut sure) = ([0], 1.0);
        for place in 0..self.depth {
            let tokens = if place == 0 { tokens } else { &last };
            self.pass.begin(tokens.len());
            let hooks = Hooks {
                held_only: true,
                ..Hooks::default()
            };
            let spans = &mut [Span { sequence, tokens }];
            self.decoder.run(self.pass, spans, hooks)?;
            let row = self.pass.rows - 1;
            self.decoder.head(self.pass, row..row + 1)?;
            let logits = self.decoder.logits(0);
            last = [most_likely(logits)];
            drafts.extend(last);
            sure *= log_probability(logits, last[0]).exp();
            if sure < self.least {
                break;
            }
        }
        Ok(())
    }
}
