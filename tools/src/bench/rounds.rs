//! Interleaved runs of variants, and comparison of their logits.

use std::collections::BTreeSet;
use std::time::Instant;

use super::child::{Outcome, Run};
use crate::Failure;
use crate::stats::Range;
use crate::tell::tell;

/// Runs of one variant.
#[derive(Debug, Clone)]
pub struct Series {
    /// Name in progress messages.
    pub name: String,
    /// In order of the rounds.
    pub runs: Vec<Run>,
    /// Why the variant was rejected, if it was.
    pub refused: Option<String>,
}

impl Series {
    /// Median and range of a value over the rounds.
    pub fn range(&self, of: impl Fn(&Run) -> f64) -> Range {
        let mut values: Vec<f64> = self.runs.iter().map(of).collect();
        Range::of(&mut values)
    }

    /// The first run, for values that do not vary.
    pub fn first(&self) -> Option<&Run> {
        self.runs.first()
    }
}

/// Runs the variant with this index, given the results so far.
type RunOne<'a> = dyn FnMut(usize, &[Series]) -> Result<Outcome, Failure> + 'a;

/// Runs every variant once per round, in order, and reports progress on standard error. `before` is called at the
/// start of each round. Rejected variants are not run again.
///
/// # Errors
/// The first failure of a run.
pub fn in_turns(
    names: &[String],
    rounds: u32,
    before: &mut dyn FnMut() -> Result<(), Failure>,
    run: &mut RunOne<'_>,
) -> Result<Vec<Series>, Failure> {
    let mut all: Vec<Series> = names
        .iter()
        .map(|name| Series {
            name: name.clone(),
            runs: Vec::new(),
            refused: None,
        })
        .collect();
    let (start, total) = (Instant::now(), names.len() * rounds as usize);
    for round in 0..rounds as usize {
        before()?;
        for i in 0..names.len() {
            if all[i].refused.is_some() {
                continue;
            }
            let said = match run(i, &all)? {
                Outcome::Done(run) => {
                    let said = speeds(&run);
                    all[i].runs.push(*run);
                    said
                }
                Outcome::Refused(why) => {
                    all[i].refused = Some(why.clone());
                    why
                }
            };
            let done = round * names.len() + i + 1;
            let left = start.elapsed().as_secs_f64() / done as f64 * (total - done) as f64;
            tell(format_args!(
                "[{done:>3}/{total}, {left:.0} s to go] {}: {said}",
                names[i]
            ));
        }
    }
    Ok(all)
}

fn speeds(run: &Run) -> String {
    if run.details.ms.is_empty() {
        let n = run.prompt_tokens;
        return format!(
            "prompt of {n} tokens, {:.1} tok/s",
            run.prefill_tokens_per_s
        );
    }
    format!(
        "{:.2} tok/s, I/O wait {:.1} %, hits {:.1} %",
        run.decode_tokens_per_s,
        100.0 * run.wait_share(),
        100.0 * run.hit_rate()
    )
}

/// Comparison of runs by the hash of their logits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Agreement {
    /// Hash that most runs have.
    pub hash: String,
    /// Number of compared runs.
    pub runs: usize,
    /// Names of variants with another hash.
    pub differing: Vec<String>,
}

impl Agreement {
    /// Compares runs of the same prompt and seed, up to the length of the shortest.
    pub fn of<'a>(series: impl Iterator<Item = &'a Series>) -> Self {
        let runs: Vec<(&str, &Run)> = series
            .flat_map(|s| s.runs.iter().map(|run| (s.name.as_str(), run)))
            .collect();
        let tokens = |run: &Run| run.generated_tokens;
        let shortest = runs.iter().map(|(_, r)| tokens(r)).min().unwrap_or(0);
        let longest = runs.iter().max_by_key(|(_, r)| tokens(r));
        let hash = longest.map_or(String::new(), |(_, r)| r.logits_hash.clone());
        let at = |run: &Run| {
            // The first token has no entry.
            let entry = shortest.checked_sub(2);
            let part = entry.and_then(|i| run.details.logits_hash.get(i).cloned());
            match part {
                Some(part) if tokens(run) > shortest => part,
                _ => run.logits_hash.clone(),
            }
        };
        let first = runs.first().map(|(_, r)| at(r));
        let other: BTreeSet<String> = (runs.iter())
            .filter(|(_, run)| Some(at(run)) != first)
            .map(|(name, _)| (*name).to_owned())
            .collect();
        Self {
            hash,
            runs: runs.len(),
            differing: other.into_iter().collect(),
        }
    }

    /// Combines two comparisons; the hash is that of the first.
    pub fn and(mut self, other: Self) -> Self {
        self.runs += other.runs;
        self.differing.extend(other.differing);
        self
    }

    /// Whether all hashes are equal.
    pub fn equal(&self) -> bool {
        self.differing.is_empty()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A run with these hashes after each token but the first.
    pub fn run(hashes: &[&str]) -> Run {
        let n = hashes.len();
        let value = serde_json::json!({
            "model": "m", "prompt_tokens": 1, "generated_tokens": n + 1,
            "prefill_tokens_per_s": 1.0, "decode_tokens_per_s": 1.0,
            "memory": {"budget_bytes": 1, "peak_rss_bytes": null, "hot": 0, "ffn_resident_share": 1.0},
            "io": {"bytes_read": 0}, "plan": {"chunk": 1}, "policy": "full",
            "logits_hash": hashes.last().copied().unwrap_or("first"),
            "details": {
                "memory_gb_per_s": 0.0, "dense_bytes": 1, "kv_bytes_per_position": 1, "hot_cut": 0.0,
                "ms": vec![1.0; n], "ffn_ms": vec![0.5; n], "predict_ms": vec![0.0; n],
                "wait_ms": vec![0.5; n], "hit_rate": vec![1.0; n],
                "needed_share": vec![0.1; n], "ffn_bytes": vec![1; n], "bytes_read": vec![0; n],
                "reads": vec![0; n], "logits_hash": hashes,
            },
        });
        serde_json::from_value(value).unwrap()
    }

    pub fn series(name: &str, runs: Vec<Run>) -> Series {
        Series {
            name: name.into(),
            runs,
            refused: None,
        }
    }

    #[test]
    fn runs_agree_as_far_as_all_go() {
        let long = series("long", vec![run(&["a", "b", "c"])]);
        let short = series("short", vec![run(&["a", "b"])]);
        let agreement = Agreement::of([&long, &short].into_iter());
        assert!(agreement.equal() && agreement.runs == 2);
        assert_eq!(agreement.hash, "c");
        let other = series("other", vec![run(&["a", "b", "c"]), run(&["a", "x", "y"])]);
        let agreement = Agreement::of([&long, &short, &other].into_iter());
        assert_eq!(agreement.differing, ["other"]);
        // With one token, only the hash of the run exists.
        let one = series("one", vec![run(&[])]);
        assert!(Agreement::of([&one, &one].into_iter()).equal());
    }

    #[test]
    fn variants_take_turns_until_they_are_refused() {
        let names = ["a".to_owned(), "b".to_owned()];
        let (mut order, mut rounds) = (Vec::new(), 0);
        let all = in_turns(
            &names,
            2,
            &mut || {
                rounds += 1;
                Ok(())
            },
            &mut |i, done| {
                order.push((i, done[0].runs.len()));
                Ok(if i == 1 {
                    Outcome::Refused("too small".into())
                } else {
                    Outcome::Done(Box::new(run(&["h"])))
                })
            },
        )
        .unwrap();
        assert_eq!((order, rounds), (vec![(0, 0), (1, 1), (0, 1)], 2));
        assert_eq!(all[0].runs.len(), 2);
        assert_eq!(all[1].refused.as_deref(), Some("too small"));
        assert_eq!(all[0].range(Run::wait_share).median, 0.5);
    }
}
