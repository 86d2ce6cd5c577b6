//! A provider, and the sessions that compute its graphs.

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

/// The library of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Its path.
    pub path: String,
    /// Its build.
    pub build: String,
    /// Whether it has the provider that is wanted.
    pub has_provider: bool,
}

/// Loads the library, one with a provider if there are several, and says whether it has that.
///
/// # Errors
/// There is none that can be used: what to install. Or it cannot load the provider.
pub fn list(wanted: Provider) -> Result<Listed, Error> {
    let library = library(&|path| wanted.is_beside(path))?;
    Ok(Listed {
        path: library.path.display().to_string(),
        build: library.build.clone(),
        has_provider: wanted.is_available(&library)?,
    })
}

/// Timed runs of a graph, of which the fastest counts.
const RUNS: usize = 3;

/// Rows or tokens that a run could compute in the time that launching it takes, where times must not decide.
const FIXED: f64 = 32.0;

/// Largest deviation of sums in floats of 16 bits, as a share of the largest: some units of 2^-11 for each of some hundred
/// additions in another order. Broken ones are off by about the largest.
const HALVES_APART: f64 = 1.0 / 64.0;

/// A graph that returned other sums than those of integers.
fn wrong_sums(provider: Provider) -> Error {
    Error::broken(format!("the provider {provider} computes wrong sums"))
}

/// Whole sums that came out, `count` of each; those of graphs of floats in `buffer`.
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

/// A provider, and the graphs that it has.
pub struct Npu {
    library: Library,
    provider: Provider,
    /// Where compiled graphs are.
    cache: Option<Cache>,
    /// What the graphs of a form compute with.
    numbers: HashMap<Form, Numbers>,
    sessions: HashMap<Key, Session>,
    /// Times of graphs, also of those that were given back.
    times: HashMap<(Form, Numbers), TimedTiles>,
    /// Those of which a graph returned other sums than those of integers.
    inexact: HashSet<(Form, Numbers)>,
    groups: GroupSessions,
    /// Graphs that failed in another process.
    given_up: HashSet<Wanted>,
    /// Called whenever a graph was compiled or tried.
    progress: fn(),
    compiled: u64,
    runs: u64,
    /// Operands of a short tile, padded.
    rows: Vec<u8>,
    tokens: Vec<i8>,
    outliers: [Vec<i8>; 2],
    /// Tokens and what they meet of outliers by channel, and whole sums, for graphs of floats.
    across: [Vec<i8>; 2],
    /// Which tokens these are, for graphs of which width.
    placed: Option<(Range<usize>, usize)>,
    sums: Vec<i32>,
}

impl Npu {
    /// Opens a provider.
    ///
    /// # Errors
    /// There is no library, or it does not have the provider: what to install.
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

    /// The same with a folder for graphs that it has compiled, if it has a compiler: they are of use as long as the
    /// [`versions`](Self::versions) are the same.
    #[must_use]
    pub fn with_cache(self, folder: Option<&Path>) -> Self {
        let folder = folder.filter(|_| self.provider.compiles());
        let cache = folder.map(|at| Cache::new(at, self.provider.name(), &self.versions()));
        Self { cache, ..self }
    }

    /// The same, which calls `progress` whenever a graph was compiled or tried.
    #[must_use]
    pub fn telling(self, progress: fn()) -> Self {
        Self { progress, ..self }
    }

    /// Name of the library, its build, and a name for the versions of all other libraries and drivers.
    pub fn versions(&self) -> String {
        versions(&self.library.path, &self.library.build)
    }

    /// Whether it takes graphs of integers, so that it knows sums by group; found out with a small one.
    ///
    /// # Errors
    /// The provider does not start, as without its device or driver.
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

    /// Whether all graphs for rows that are prepared returned the sums of integers when they were tried.
    pub fn is_exact(&self) -> bool {
        let exact = |(&form, &numbers)| !self.inexact.contains(&(form, numbers));
        self.numbers.iter().all(exact)
    }

    /// Whose graphs these are.
    pub fn provider(&self) -> Provider {
        self.provider
    }

    /// Graphs compiled so far.
    pub fn compiled(&self) -> u64 {
        self.compiled
    }

    /// Graphs run so far, besides those that were timed.
    pub fn runs(&self) -> u64 {
        self.runs
    }

    /// Makes the graphs for rows of a form, unless there are some: of all sizes, so that none is compiled while a token is
    /// computed (PowerInfer-2 §4.1.3 makes that of the next batch size ready during attention). Takes the time of each, unless
    /// it is known.
    ///
    /// # Errors
    /// The provider does not take one as a whole, or has no memory for it.
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

    /// Makes the graphs for rows of a form with such numbers, and takes their times unless they are known.
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

    /// Seconds of a run of a graph, the fastest of some, whose sums are those of integers. Of a provider that may compute with
    /// floats of 16 bits sums may be apart, and the number is always the same, so that no text depends on times.
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

    /// Gives all graphs back.
    pub fn clear(&mut self) {
        self.sessions.clear();
        self.numbers.clear();
        self.groups.clear();
    }

    /// The session of a graph that is compiled, or that is a file's.
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
            // It may not know how, and what it refuses is told without a file.
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

    /// What sessions are made by.
    fn builder(&self) -> Result<SessionBuilder, Error> {
        let builder = Session::builder(&self.library.environment).map_err(Error::of)?;
        // What it refuses is an error of this program, with what it says.
        let builder = builder.with_log_level(LogLevel::Fatal).map_err(Error::of)?;
        let builder = builder.with_intra_threads(1).map_err(Error::of)?;
        // Threads that spin take the cores of those that compute.
        let builder = builder.with_intra_op_spinning(false).map_err(Error::of)?;
        let builder = builder.with_inter_op_spinning(false).map_err(Error::of)?;
        self.provider.register(builder, &self.library)
    }

    /// Multiplies rows with tokens: calls `then` with the sums of tile after tile.
    ///
    /// # Errors
    /// The form is not prepared, lengths do not fit it, or the provider fails.
    pub fn multiply(
        &mut self,
        form: Form,
        of: Operands<'_>,
        mut then: impl FnMut(Sums<'_>),
    ) -> Result<(), Error> {
        let [height, width] = of
            .counts(form)
            .ok_or_else(|| Error::broken("rows and tokens of other lengths than the graphs'"))?;
        let numbers = self.numbers.get(&form).copied();
        let times = numbers.and_then(|of| self.times.get(&(form, of)).cloned());
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
                    of,
                    &mut then,
                );
            }
        });
        result
    }

    /// Puts some tokens, and what they meet of outliers, by channel, as graphs of floats for `width` tokens read them.
    fn put_across(&mut self, form: Form, of: Operands<'_>, tokens: &Range<usize>, width: usize) {
        let some =
            |all: &'_ [i8], len: usize| tokens.start * len..(tokens.end * len).min(all.len());
        let (len, count) = (form.groups * GROUP, form.outliers());
        let [x, picked] = &mut self.across;
        x.resize(form.float_row_bytes() * width, 0);
        form.put_across(&of.tokens[some(of.tokens, len)], width, x);
        picked.resize(count * width, 0);
        let met = &of.outliers[1][some(of.outliers[1], count)];
        form.put_picked(met, width, picked);
    }

    /// Multiplies a tile.
    fn tile(
        &mut self,
        key: Key,
        [rows, tokens]: [Range<usize>; 2],
        of: Operands<'_>,
        then: &mut impl FnMut(Sums<'_>),
    ) -> Result<(), Error> {
        let (form, Tile { height, width }) = (key.form, key.tile);
        if key.numbers != Numbers::Integers && self.placed != Some((tokens.clone(), width)) {
            self.put_across(form, of, &tokens, width);
            self.placed = Some((tokens.clone(), width));
        }
        let session = self.sessions.get_mut(&key);
        let session = session.ok_or_else(|| Error::broken("such rows are not prepared"))?;
        let (count, integers) = (form.outliers(), key.numbers == Numbers::Integers);
        let weights = rows_of_run(key, of.rows, &rows, &mut self.rows)?;
        let x = match integers {
            true => {
                let len = form.groups * GROUP;
                let x = padded(of.tokens, &tokens, width, len, &mut self.tokens);
                tensor([width, form.groups, GROUP], x)?
            }
            false => tensor([form.float_row_bytes(), width], &self.across[0])?,
        };
        let mut inputs = ort::inputs![WEIGHTS => weights, TOKENS => x];
        if count > 0 {
            let ([its, picked], [its_room, room]) = (of.outliers, &mut self.outliers);
            let its = padded(its, &rows, height, count, its_room);
            let picked = match integers {
                true => tensor([width, count], padded(picked, &tokens, width, count, room))?,
                false => tensor([count, width], &self.across[1])?,
            };
            inputs.push((OUTLIERS.into(), tensor([height, count], its)?.into()));
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
