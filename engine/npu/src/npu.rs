//! A provider, and the sessions that compute its graphs.

mod groups;

use std::collections::HashMap;
use std::ops::Range;

use ort::session::Session;
use ort::value::{PrimitiveTensorElementType, TensorRef, ValueRef};

use crate::error::Error;
use crate::graph::{Form, GROUP, OUTLIERS, PICKED, SUMS, TOKENS, Tile, WEIGHTS, Weights};
use crate::groups::GroupSessions;
use crate::library::{Library, library};
use crate::provider::Provider;
use crate::tiles::divide;

/// The library of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Its path.
    pub path: String,
    /// Its build.
    pub build: String,
    /// The providers that it has.
    pub providers: Vec<Provider>,
}

impl Listed {
    fn of(library: &Library) -> Result<Self, Error> {
        let mut providers = Vec::new();
        for provider in Provider::ALL {
            if provider.is_available()? {
                providers.push(provider);
            }
        }
        Ok(Self {
            path: library.path.display().to_string(),
            build: library.build.clone(),
            providers,
        })
    }
}

/// Loads the library, and says what it has.
///
/// # Errors
/// There is none that can be used: what to install.
pub fn list() -> Result<Listed, Error> {
    Listed::of(&library()?)
}

/// Sums of a tile that was computed.
#[derive(Debug, Clone)]
pub struct Sums<'a> {
    /// Rows and tokens of the tile.
    pub rows: Range<usize>,
    /// See `rows`.
    pub tokens: Range<usize>,
    /// Sum `(g, row, token)` is at `g · group + row · width + token`, rows and tokens counted from the tile's first. Where they
    /// are by row, `g` is 0, and 1 of its outliers.
    pub sums: &'a [i32],
    /// Distance of groups.
    pub group: usize,
    /// Distance of rows.
    pub width: usize,
}

/// Which graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    form: Form,
    tile: Tile,
}

/// A provider, and the graphs that it has.
pub struct Npu {
    library: Library,
    provider: Provider,
    listed: Listed,
    sessions: HashMap<Key, Session>,
    groups: GroupSessions,
    compiled: u64,
    runs: u64,
    /// Operands of a short tile, padded.
    rows: Vec<u8>,
    tokens: Vec<i8>,
    outliers: [Vec<i8>; 2],
}

impl Npu {
    /// Opens a provider.
    ///
    /// # Errors
    /// There is no library, or it does not have the provider: what to install.
    pub fn open(provider: Provider) -> Result<Self, Error> {
        let library = library()?;
        let listed = Listed::of(&library)?;
        if !listed.providers.contains(&provider) {
            return Err(Error::broken(format!(
                "the ONNX Runtime in {} has no provider {provider}: {}",
                listed.path,
                provider.advice()
            )));
        }
        Ok(Self {
            library,
            provider,
            listed,
            sessions: HashMap::new(),
            groups: GroupSessions::new(),
            compiled: 0,
            runs: 0,
            rows: Vec::new(),
            tokens: Vec::new(),
            outliers: [Vec::new(), Vec::new()],
        })
    }

    /// The library.
    pub fn listed(&self) -> &Listed {
        &self.listed
    }

    /// Graphs compiled so far.
    pub fn compiled(&self) -> u64 {
        self.compiled
    }

    /// Graphs run so far.
    pub fn runs(&self) -> u64 {
        self.runs
    }

    /// Makes the graphs for rows of a form, unless there are some: of all sizes, so that none is compiled while a token is
    /// computed (PowerInfer-2 §4.1.3 makes that of the next batch size ready during attention).
    ///
    /// # Errors
    /// The provider does not take one as a whole, or has no memory for it.
    pub fn prepare(&mut self, form: Form) -> Result<(), Error> {
        for tile in form.tiles() {
            let key = Key { form, tile };
            if !self.sessions.contains_key(&key) {
                let session = self.session(&form.model(tile))?;
                self.sessions.insert(key, session);
                self.compiled += 1;
            }
        }
        Ok(())
    }

    /// Gives all graphs back.
    pub fn clear(&mut self) {
        self.sessions.clear();
        self.groups.clear();
    }

    fn session(&self, model: &[u8]) -> Result<Session, Error> {
        let builder = Session::builder(&self.library.environment).map_err(Error::of)?;
        let builder = builder.with_intra_threads(1).map_err(Error::of)?;
        // Threads that spin take the cores of those that compute.
        let builder = builder.with_intra_op_spinning(false).map_err(Error::of)?;
        let mut builder = builder.with_inter_op_spinning(false).map_err(Error::of)?;
        if self.provider != Provider::Cpu {
            builder = builder.with_disable_cpu_fallback().map_err(Error::of)?;
        }
        let provider = [self.provider.dispatch()];
        let mut builder = builder
            .with_execution_providers(provider)
            .map_err(Error::of)?;
        builder.commit_from_memory(model).map_err(|e| {
            Error::broken(format!(
                "the provider {} does not take a graph: {}; --device none does without it",
                self.provider,
                Error::of(e)
            ))
        })
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
        let tiles = form.tiles();
        let mut widths: Vec<usize> = tiles.iter().map(|tile| tile.width).collect();
        widths.dedup();
        let mut result = Ok(());
        divide(width, &widths, |its_tokens, width| {
            let of_width = tiles.iter().filter(|tile| tile.width == width);
            let heights: Vec<usize> = of_width.map(|tile| tile.height).collect();
            divide(height, &heights, |its_rows, height| {
                if result.is_ok() {
                    let tile = Tile { height, width };
                    let place = [its_rows, its_tokens.clone()];
                    result = self.tile(Key { form, tile }, place, of, &mut then);
                }
            });
        });
        result
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
        let session = self.sessions.get_mut(&key);
        let session = session.ok_or_else(|| Error::broken("such rows are not prepared"))?;
        let weights = padded(of.rows, &rows, height, form.row_bytes, &mut self.rows);
        let x = padded(
            of.tokens,
            &tokens,
            width,
            form.groups * GROUP,
            &mut self.tokens,
        );
        let shape = [height, form.row_bytes];
        let weights = match form.weights {
            Weights::Bytes => tensor(shape, bytemuck::cast_slice::<u8, i8>(weights))?,
            Weights::Nibbles(_) => tensor(shape, weights)?,
        };
        let x = tensor([width, form.groups, GROUP], x)?;
        let mut inputs = ort::inputs![WEIGHTS => weights, TOKENS => x];
        let count = form.outliers();
        if count > 0 {
            let ([its, picked], [its_room, room]) = (of.outliers, &mut self.outliers);
            let its = padded(its, &rows, height, count, its_room);
            let picked = padded(picked, &tokens, width, count, room);
            inputs.push((OUTLIERS.into(), tensor([height, count], its)?.into()));
            inputs.push((PICKED.into(), tensor([width, count], picked)?.into()));
        }
        self.runs += 1;
        let outputs = session.run(inputs).map_err(Error::of)?;
        let sums = outputs
            .get(SUMS)
            .ok_or_else(|| Error::broken("no sums came out"))?;
        let (_, sums) = sums.try_extract_tensor::<i32>().map_err(Error::of)?;
        if sums.len() != form.sums() * height * width {
            return Err(Error::broken("sums of another shape came out"));
        }
        then(Sums {
            rows,
            tokens,
            sums,
            group: height * width,
            width,
        });
        Ok(())
    }
}

/// All rows and tokens of a product.
#[derive(Debug, Clone, Copy)]
pub struct Operands<'a> {
    /// Rows as they are stored, one after the other.
    pub rows: &'a [u8],
    /// Activations, `[tokens × groups × 32]`.
    pub tokens: &'a [i8],
    /// Of a form with outliers: those of each row, `[rows × count]`, and the activations that they meet,
    /// `[tokens × count]`.
    pub outliers: [&'a [i8]; 2],
}

impl Operands<'_> {
    /// The number of rows and of tokens; `None` if lengths do not fit.
    fn counts(&self, form: Form) -> Option<[usize; 2]> {
        let of = |len: usize, one: usize| len.checked_div(one).filter(|count| count * one == len);
        let rows = of(self.rows.len(), form.row_bytes)?;
        let tokens = of(self.tokens.len(), form.groups * GROUP)?;
        let lens = self.outliers.map(<[i8]>::len);
        (lens == [rows, tokens].map(|count| count * form.outliers())).then_some([rows, tokens])
    }
}

/// Memory as a tensor, without a copy.
fn tensor<'a, T, const N: usize>(shape: [usize; N], values: &'a [T]) -> Result<ValueRef<'a>, Error>
where
    T: PrimitiveTensorElementType + std::fmt::Debug + Clone + 'static,
{
    let tensor = TensorRef::from_array_view((shape, values)).map_err(Error::of)?;
    Ok(tensor.into_dyn())
}

/// The items `some` of `all`, of `len` values each, as `count` items: where they are, or padded with zeros in `buffer`.
fn padded<'a, T: Copy + Default>(
    all: &'a [T],
    some: &Range<usize>,
    count: usize,
    len: usize,
    buffer: &'a mut Vec<T>,
) -> &'a [T] {
    let items = &all[some.start * len..some.end * len];
    if some.len() == count {
        return items;
    }
    buffer.clear();
    buffer.extend_from_slice(items);
    buffer.resize(count * len, T::default());
    buffer
}
