//! What drafts gave.

use serde::Serialize;

use crate::drafts::DraftCounts;
use crate::run::Generation;

/// Drafts of a text.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct SpeculationReport {
    /// The source of most drafts: `ngram` (earlier occurrences of the text's end), `memory` (the model itself, computing only
    /// what is in memory), `heads` (the model's head for multi-token prediction) or `model` (a small model).
    pub kind: &'static str,
    /// Drafts that were checked.
    pub proposed: u64,
    /// Drafts that the text took.
    pub taken: u64,
    /// Tokens generated per pass, without the first one.
    pub tokens_per_pass: f64,
    /// Rows per pass.
    pub rows_per_pass: f64,
    /// Milliseconds per token spent on making drafts.
    pub draft_ms: f64,
    /// Bytes that as many passes as tokens would have read in addition, if each read as much as these passes.
    pub bytes_saved: u64,
}

impl SpeculationReport {
    /// `None` if nothing was drafted.
    pub fn of(generation: &Generation) -> Option<Self> {
        let totals = generation.drafts;
        let kinds = [
            ("ngram", totals.lookup),
            ("memory", totals.memory),
            ("heads", totals.heads),
            ("model", totals.model),
        ];
        let all = DraftCounts {
            proposed: kinds.iter().map(|(_, counts)| counts.proposed).sum(),
            taken: kinds.iter().map(|(_, counts)| counts.taken).sum(),
        };
        let (kind, _) = kinds
            .into_iter()
            .max_by_key(|(_, counts)| counts.proposed)?;
        let tokens = generation.latencies.len() as f64;
        if all.proposed == 0 || totals.passes == 0 || tokens == 0.0 {
            return None;
        }
        let each = 1.0 / totals.passes as f64;
        let read = totals.bytes as f64 * each;
        Some(Self {
            kind,
            proposed: all.proposed,
            taken: all.taken,
            tokens_per_pass: tokens * each,
            rows_per_pass: totals.rows as f64 * each,
            draft_ms: 1e3 * totals.time.as_secs_f64() / tokens,
            bytes_saved: (read * all.taken as f64) as u64,
        })
    }

    /// In a line.
    pub(super) fn summary(&self) -> String {
        let Self {
            taken, proposed, ..
        } = self;
        let kind = match self.kind {
            "model" => "a small model",
            "heads" => "the model's own head",
            "memory" => "what is in memory",
            _ => "the text",
        };
        let cost = match self.draft_ms {
            ms if ms >= 0.1 => format!("; {ms:.1} ms/token to make them"),
            _ => String::new(),
        };
        format!(
            "{taken} of {proposed} from {kind} taken; {:.2} tokens and {:.2} rows per pass{cost}",
            self.tokens_per_pass, self.rows_per_pass
        )
    }
}
