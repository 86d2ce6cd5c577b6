//! An open provider with its graphs.

mod groups;
mod tensors;
mod tried;

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::Path;
use std::time::Instant;

use ort::compiler::ModelCompiler;
use ort::logging::LogLevel;
use ort::session::Session;
use ort::session::builder::SessionBuilder;
use ort::value::DynValue;

use self::tensors::{padded, rows_of_run, tensor};
use crate::cache::Cache;
use crate::driver::versions;
use crate::error::Error;
use crate::graph::{
    Form, GROUP, Key, Numbers, OUTLIERS, PICKED, SUMS, Summed, TOKENS, Tile, WEIGHTS, Weights,
};
use crate::groups::GroupSessions;
use crate::library::{Library, library};
use crate::onnx::Graph;
use crate::operands::{Operands, Sums};
use crate::provider::Provider;
use crate::tiles::TimedTiles;
use crate::trial::Trial;
use crate::wanted::Wanted;

/// ONNX Runtime on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Path of the library.
    pub path: String,
    /// Build of the library.
    pub build: String,
    /// Whether it has the requested provider.
    pub has_provider: bool,
}

/// Loads ONNX Runtime, if possible with the provider, and says whether it has it.
///
/// # Errors
/// No usable library (with what to install), or a provider that cannot be loaded.
pub fn list(wanted: Provider) -> Result<Listed, Error> {
    let library = library(&|path| wanted.is_beside(path))?;
    Ok(Listed {
        path: library.path.display().to_string(),
        build: library.build.clone(),
        has_provider: wanted.is_available(&library)?,
    })
}

/// Timed runs per graph; the fastest counts.
const RUNS: usize = 3;

/// Assumed cost of a launch in rows or tokens, for providers whose division must not depend on times.
const FIXED: f64 = 32.0;

/// Maximum error of sums in 16-bit floats, relative to the largest sum: some units of 2^-11 for each of some hundred
/// additions. Broken kernels are off by about the largest sum.
const HALVES_APART: f64 = 1.0 / 64.0;

/// The error for a graph with wrong sums.
fn wrong_sums(provider: Provider) -> Error {
    Error::broken(format!("the provider {provider} computes wrong sums"))
}

/// The integer sums of a graph's output for `count` (row, token) pairs; those of float graphs are put in `buffer`.
fn whole<'a>(
    form: Form,
    numbers: Numbers,
    found: Option<&'a DynValue>,
    count: usize,
    buffer: &'a mut Vec<i32>,
) -> Result<&'a [i32], Error> {
    let found = found.ok_or_else(|| Error::broken("no sums came out"))?;
    let other_shape = || Error::broken("sums of another shape came out");
    let sums = match numbers {
        Numbers::Integers => found.try_extract_tensor::<i32>().map_err(Error::of)?.1,
        Numbers::Floats(_) => {
            let (_, found) = found.try_extract_tensor::<f32>().map_err(Error::of)?;
            if found.len() != form.float_sums() * count {
                return Err(other_shape());
            }
            form.add_pieces(found, buffer);
            buffer
        }
    };
    match sums.len() == form.sums() * count {
        true => Ok(sums),
        false => Err(other_shape()),
    }
}

/// An open provider with its graphs.
pub struct Npu {
    library: Library,
    provider: Provider,
    /// Files with compiled graphs.
    cache: Option<Cache>,
    /// Arithmetic of the graphs of each prepared form.
    numbers: HashMap<Form, Numbers>,
    sessions: HashMap<Key, Session>,
    /// Times of graphs, kept after the graphs are freed.
    times: HashMap<(Form, Numbers), TimedTiles>,
    /// Forms of which a graph was within tolerance but not exact.
    inexact: HashSet<(Form, Numbers)>,
    groups: GroupSessions,
    /// Graphs that failed in another process.
    given_up: HashSet<Wanted>,
    /// Called after each compilation and each trial of a graph.
    progress: fn(),
    compiled: u64,
    runs: u64,
    /// Padded rows of a short tile.
    rows: Vec<u8>,
    /// Padded tokens of a short tile.
    tokens: Vec<i8>,
    /// Padded outliers of a short tile, and their activations.
    outliers: [Vec<i8>; 2],
    /// For float graphs: transposed tokens, and transposed activations of outlier channels.
    across: [Vec<i8>; 2],
    /// Tokens in `across`, and the width that they are padded to.
    placed: Option<(Range<usize>, usize)>,
    /// For float graphs: integer sums.
    sums: Vec<i32>,
}

impl Npu {
    /// Opens a provider.
    ///
    /// # Errors
    /// No library, or one without the provider, with what to install.
    pub fn open(provider: Provider) -> Result<Self, Error> {
        let library = library(&|path| provider.is_beside(path))?;
        if !provider.is_available(&library)? {
            let advice = match provider.advice() {
                Ok(advice) => {
                    format!("{advice}, or set EMBERFLOW_ONNXRUNTIME to the path of one that has it")
                }
                Err(needs) => needs.into(),
            };
            return Err(Error::broken(format!(
                "the ONNX Runtime in {} has no provider {provider}: {advice}",
                library.path.display(),
            )));
        }
        Ok(Self {
            library,
            provider,
            cache: None,
            numbers: HashMap::new(),
            sessions: HashMap::new(),
            times: HashMap::new(),
            inexact: HashSet::new(),
            groups: GroupSessions::new(),
            given_up: HashSet::new(),
            progress: || {},
            compiled: 0,
            runs: 0,
            rows: Vec::new(),
            tokens: Vec::new(),
            outliers: [Vec::new(), Vec::new()],
            across: [Vec::new(), Vec::new()],
            placed: None,
            sums: Vec::new(),
        })
    }

    /// Saves compiled graphs in a folder, if the provider has a compiler. They are valid as long as
    /// [`versions`](Self::versions) does not change.
    #[must_use]
    pub fn with_cache(self, folder: Option<&Path>) -> Self {
        let folder = folder.filter(|_| self.provider.compiles());
        let cache = folder.map(|path| Cache::new(path, self.provider.name(), &self.versions()));
        Self { cache, ..self }
    }

    /// Calls `progress` after each compilation and each trial of a graph.
    #[must_use]
    pub fn telling(self, progress: fn()) -> Self {
        Self { progress, ..self }
    }

    /// Identifies the library, its build, and the versions of all other libraries and drivers.
    pub fn versions(&self) -> String {
        versions(&self.library.path, &self.library.build)
    }

    /// Whether the provider supports integer graphs, and with them sums by group. Compiles a small one to find out.
    ///
    /// # Errors
    /// The provider does not start, for example without its device or driver.
    pub fn knows_integers(&self) -> Result<bool, Error> {
        let form = Form {
            weights: Weights::Bytes,
            summed: Summed::ByGroup,
            groups: 1,
            row_bytes: GROUP + 2,
        };
        let small = Tile {
            height: 8,
            width: 1,
        };
        self.builder().map_err(|e| {
            let (provider, path) = (self.provider, self.library.path.display());
            Error::broken(format!(
                "the provider {provider} of {path} does not start: {e}: install the device's driver"
            ))
        })?;
        Ok(match self.provider.numbers() {
            [Numbers::Integers] => true,
            numbers if numbers.contains(&Numbers::Integers) => {
                let graph = form.added(Graph::new("sums"), small, Numbers::Integers);
                graph.is_some_and(|graph| self.session(&graph.model()).is_ok())
            }
            _ => false,
        })
    }

    /// Whether all prepared graphs for rows returned exact sums in their trials.
    pub fn is_exact(&self) -> bool {
        let exact = |(&form, &numbers)| !self.inexact.contains(&(form, numbers));
        self.numbers.iter().all(exact)
    }

    /// The provider.
    pub fn provider(&self) -> Provider {
        self.provider
    }

    /// Number of graphs compiled so far.
    pub fn compiled(&self) -> u64 {
        self.compiled
    }

    /// Number of runs so far, without timed ones.
    pub fn runs(&self) -> u64 {
        self.runs
    }

    /// Compiles and times the graphs of a form, unless it is prepared. All sizes are compiled now, so that none is compiled
    /// while a token waits (PowerInfer-2 §4.1.3 prepares the next batch size during attention).
    ///
    /// # Errors
    /// The provider cannot compute a graph as a whole, or has no memory for it.
    pub fn prepare(&mut self, form: Form) -> Result<(), Error> {
        if self.numbers.contains_key(&form) {
            return Ok(());
        }
        let mut refused = None;
        for &numbers in self.provider.numbers() {
            match self.prepare_with(form, numbers) {
                Ok(()) => {
                    if let Some(error) = &refused {
                        tracing::warn!(provider = %self.provider, %error, "computes with floats instead of integers");
                    }
                    tracing::debug!(provider = %self.provider, ?form, ?numbers, "graphs");
                    self.numbers.insert(form, numbers);
                    return Ok(());
                }
                Err(e) => {
                    self.sessions.retain(|key, _| key.form != form);
                    refused = refused.or(Some(e));
                }
            }
        }
        Err(refused.unwrap_or_else(|| Error::broken("no graphs")))
    }

    /// Compiles the graphs of a form with the given numbers, and times them unless their times are known.
    fn prepare_with(&mut self, form: Form, numbers: Numbers) -> Result<(), Error> {
        for tile in form.tiles(numbers) {
            let graph = form.added(Graph::new("sums"), tile, numbers).ok_or_else(|| {
                Error::broken(format!(
                    "the provider {} knows rows with one scale only: pack the model with --quant q8c or q4c",
                    self.provider
                ))
            })?;
            let session = self.compiled_session(&graph.model())?;
            self.sessions.insert(
                Key {
                    form,
                    tile,
                    numbers,
                },
                session,
            );
            self.compiled += 1;
            (self.progress)();
        }
        if !self.times.contains_key(&(form, numbers)) {
            let timed = form.tiles(numbers).into_iter().map(|tile| {
                let seconds = self.tried(Key {
                    form,
                    tile,
                    numbers,
                })?;
                (self.progress)();
                Ok((tile, seconds))
            });
            let timed = timed.collect::<Result<_, Error>>()?;
            tracing::debug!(?form, ?timed, "seconds of graphs");
            self.times.insert((form, numbers), TimedTiles(timed));
        }
        Ok(())
    }

    /// Checks a graph's sums and returns the seconds of its fastest run. For a provider that may compute in 16-bit floats,
    /// sums may differ a little and the time is a formula, so that no text depends on measurements.
    fn tried(&mut self, key: Key) -> Result<f64, Error> {
        let (form, Tile { height, width }) = (key.form, key.tile);
        self.placed = None;
        let trial = Trial::new(form, [height, width], height as u64);
        let may_differ = key.numbers != Numbers::Integers && self.provider.halves();
        let (place, mut apart) = ([0..height, 0..width], 0.0);
        let compare = &mut |sums: Sums<'_>| apart = trial.apart(&sums);
        self.tile(key, place.clone(), trial.operands(), compare)?;
        if apart > if may_differ { HALVES_APART } else { 0.0 } {
            return Err(wrong_sums(self.provider));
        }
        if apart > 0.0 {
            self.inexact.insert((form, key.numbers));
        }
        if may_differ {
            return Ok((height as f64 + FIXED) * (width as f64 + FIXED));
        }
        let mut best = f64::INFINITY;
        for _ in 0..RUNS {
            let start = Instant::now();
            self.tile(key, place.clone(), trial.operands(), &mut |_| {})?;
            best = best.min(start.elapsed().as_secs_f64());
        }
        Ok(best)
    }

    /// Frees all graphs.
    pub fn clear(&mut self) {
        self.sessions.clear();
        self.numbers.clear();
        self.groups.clear();
    }

    /// Creates the session of a graph from the cache, or compiles and caches it.
    fn compiled_session(&self, model: &[u8]) -> Result<Session, Error> {
        let Some(cache) = &self.cache else {
            return self.session(model);
        };
        if let Some(compiled) = cache.get(model) {
            match self.session(&compiled) {
                Ok(session) => return Ok(session),
                Err(error) => tracing::debug!(%error, "a saved graph is refused"),
            }
        }
        let builder = self.builder()?;
        let compile = || -> ort::Result<_> {
            let compiler = ModelCompiler::new(builder)?.with_model_from_memory(model)?;
            compiler.with_embed_ep_context()?.compile_to_buffer()
        };
        let compiled = match compile() {
            Ok(compiled) => compiled,
            // The provider may not support saving; compiling without a file reports other errors.
            Err(error) => {
                tracing::debug!(%error, "a compiled graph cannot be saved");
                return self.session(model);
            }
        };
        cache.put(model, &compiled);
        self.session(&compiled).or_else(|_| self.session(model))
    }

    pub(crate) fn session(&self, model: &[u8]) -> Result<Session, Error> {
        let mut builder = self.builder()?;
        builder.commit_from_memory(model).map_err(|e| {
            Error::broken(format!(
                "the provider {} does not take a graph: {}",
                self.provider,
                Error::of(e)
            ))
        })
    }

    /// Builder of sessions of this provider.
    fn builder(&self) -> Result<SessionBuilder, Error> {
        let builder = Session::builder(&self.library.environment).map_err(Error::of)?;
        // Failures are returned as errors with ONNX Runtime's message, so it need not log them.
        let builder = builder.with_log_level(LogLevel::Fatal).map_err(Error::of)?;
        let builder = builder.with_intra_threads(1).map_err(Error::of)?;
        // Spinning threads would take cores from computing ones.
        let builder = builder.with_intra_op_spinning(false).map_err(Error::of)?;
        let builder = builder.with_inter_op_spinning(false).map_err(Error::of)?;
        self.provider.register(builder, &self.library)
    }

    /// Multiplies rows with tokens, and calls `then` with the sums of each tile.
    ///
    /// # Errors
    /// The form is not prepared, lengths do not match, or the provider fails.
    pub fn multiply(
        &mut self,
        form: Form,
        operands: Operands<'_>,
        mut then: impl FnMut(Sums<'_>),
    ) -> Result<(), Error> {
        let [height, width] = operands
            .counts(form)
            .ok_or_else(|| Error::broken("rows and tokens of other lengths than the graphs'"))?;
        let numbers = self.numbers.get(&form).copied();
        let times = numbers.and_then(|numbers| self.times.get(&(form, numbers)).cloned());
        let (numbers, times) =
            (numbers.zip(times)).ok_or_else(|| Error::broken("such rows are not prepared"))?;
        self.placed = None;
        let mut result = Ok(());
        times.divide([height, width], |tile, place| {
            if result.is_ok() {
                self.runs += 1;
                result = self.tile(
                    Key {
                        form,
                        tile,
                        numbers,
                    },
                    place,
                    operands,
                    &mut then,
                );
            }
        });
        result
    }

    /// Transposes a range of tokens, and their activations of outlier channels, for float graphs of `width` tokens.
    fn put_across(
        &mut self,
        form: Form,
        operands: Operands<'_>,
        tokens: &Range<usize>,
        width: usize,
    ) {
        let range =
            |values: &[i8], len: usize| tokens.start * len..(tokens.end * len).min(values.len());
        let (len, count) = (form.groups * GROUP, form.outliers());
        let [x, picked] = &mut self.across;
        x.resize(form.float_row_bytes() * width, 0);
        form.put_across(&operands.tokens[range(operands.tokens, len)], width, x);
        picked.resize(count * width, 0);
        let [_, activations] = operands.outliers;
        form.put_picked(&activations[range(activations, count)], width, picked);
    }

    /// Multiplies a tile.
    fn tile(
        &mut self,
        key: Key,
        [rows, tokens]: [Range<usize>; 2],
        operands: Operands<'_>,
        then: &mut impl FnMut(Sums<'_>),
    ) -> Result<(), Error> {
        let (form, Tile { height, width }) = (key.form, key.tile);
        if key.numbers != Numbers::Integers && self.placed != Some((tokens.clone(), width)) {
            self.put_across(form, operands, &tokens, width);
            self.placed = Some((tokens.clone(), width));
        }
        let session = self.sessions.get_mut(&key);
        let session = session.ok_or_else(|| Error::broken("such rows are not prepared"))?;
        let (count, integers) = (form.outliers(), key.numbers == Numbers::Integers);
        let weights = rows_of_run(key, operands.rows, &rows, &mut self.rows)?;
        let x = match integers {
            true => {
                let len = form.groups * GROUP;
                let x = padded(operands.tokens, &tokens, width, len, &mut self.tokens);
                tensor([width, form.groups, GROUP], x)?
            }
            false => tensor([form.float_row_bytes(), width], &self.across[0])?,
        };
        let mut inputs = ort::inputs![WEIGHTS => weights, TOKENS => x];
        if count > 0 {
            let [outliers, picked] = operands.outliers;
            let [outlier_buffer, picked_buffer] = &mut self.outliers;
            let outliers = padded(outliers, &rows, height, count, outlier_buffer);
            let picked = match integers {
                true => {
                    let picked = padded(picked, &tokens, width, count, picked_buffer);
                    tensor([width, count], picked)?
                }
                false => tensor([count, width], &self.across[1])?,
            };
            inputs.push((OUTLIERS.into(), tensor([height, count], outliers)?.into()));
            inputs.push((PICKED.into(), picked.into()));
        }
        let outputs = session.run(inputs).map_err(Error::of)?;
        let (found, count) = (outputs.get(SUMS), height * width);
        let sums = whole(form, key.numbers, found, count, &mut self.sums)?;
        then(Sums {
            rows,
            tokens,
            sums,
            group: count,
            width,
        });
        Ok(())
    }
}
