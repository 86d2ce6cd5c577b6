//! `emberflow-lab trace`: records which neurons or experts a run needs, and replays that on caches.

mod belady;
mod eviction;
mod format;
mod record;
mod shipped;
mod simulate;

pub use format::{Header, Reader, TraceError, Writer};

use crate::cli::TraceCommand;
use emberflow::Failure;

/// Runs the command.
pub fn command(command: &TraceCommand) -> Result<(), Failure> {
    match command {
        TraceCommand::Record(args) => record::command(args),
        TraceCommand::Simulate(args) => simulate::command(args),
    }
}

/// A trace in memory.
pub(crate) struct Trace {
    pub header: Header,
    pub tokens: usize,
    /// Needed neurons or experts as `layer × neurons + packed id`, layer after layer, token after
    /// token.
    keys: Vec<u32>,
    /// Start of each layer of each token in `keys`, plus the end.
    starts: Vec<u32>,
}

impl Trace {
    pub fn load(path: &std::path::Path) -> Result<Self, Failure> {
        let file = std::fs::File::open(path).map_err(Failure::file(path))?;
        let bad = |e: TraceError| match e {
            TraceError::Io(e) => Failure::file(path)(e),
            e => Failure::Fault(format!("{}: {e}", path.display())),
        };
        let mut reader = Reader::new(std::io::BufReader::new(file)).map_err(bad)?;
        let neurons = reader.header.neurons as u32;
        let (mut keys, mut starts) = (Vec::new(), vec![0]);
        let mut layers = Vec::new();
        let mut tokens = 0;
        while reader.token(&mut layers).map_err(bad)?.is_some() {
            tokens += 1;
            for (l, ids) in (0u32..).zip(&layers) {
                keys.extend(ids.iter().map(|id| l * neurons + id));
                let end = u32::try_from(keys.len()).map_err(|_| {
                    Failure::usage(format!(
                        "{}: more than 2^32 accesses; record fewer tokens with --limit",
                        path.display()
                    ))
                })?;
                starts.push(end);
            }
        }
        Ok(Self {
            header: reader.header,
            tokens,
            keys,
            starts,
        })
    }

    /// Number of steps: layers × tokens.
    pub fn steps(&self) -> usize {
        self.starts.len() - 1
    }

    /// Keys of one step: one layer of one token.
    pub fn step(&self, step: usize) -> &[u32] {
        &self.keys[self.range(step)]
    }

    /// Index range of a step in `keys`.
    pub fn range(&self, step: usize) -> std::ops::Range<usize> {
        self.starts[step] as usize..self.starts[step + 1] as usize
    }

    /// All accesses.
    pub fn keys(&self) -> &[u32] {
        &self.keys
    }

    /// Number of neurons of the model.
    pub fn universe(&self) -> usize {
        self.header.layers * self.header.neurons
    }

    #[cfg(test)]
    pub fn of(neurons: usize, steps: &[&[u32]]) -> Self {
        let mut trace = Self {
            header: Header {
                model: "test".into(),
                experts: false,
                layers: 1,
                neurons,
                stride: 1024,
                rest_read: 0,
                sector: 512,
                offsets: vec![0],
                stats_tokens: 0,
                counts: Vec::new(),
            },
            tokens: steps.len(),
            keys: steps.concat(),
            starts: vec![0],
        };
        for step in steps {
            let end = trace.starts[trace.starts.len() - 1] + step.len() as u32;
            trace.starts.push(end);
        }
        trace
    }
}
