//! Exact integer products on an NPU, by ONNX Runtime: sums of groups of 32 weights and activations.
//!
//! ```text
//! sum[g][row][token] = Σ_j  weight[row][g][j] · activation[token][g][j]        |sum| < 2^24, so any order gives it
//! ```
//!
//! NPUs compute static graphs: there is one for each of some numbers of rows and tokens (`tiles.rs`, after HeteroInfer,
//! §4.1), and what is left is padded. Weights are inputs of a graph, so that rows which come from flash are read where they
//! are. Scales are the caller's: they are floats, of which no two processors have the same sums.
//!
//! The library is looked for when an NPU is asked for (`library.rs`). Apart from the provider `cpu` nothing is left to the
//! library's own kernels: a graph that a provider does not take as a whole is an error.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use ort::ep::{self, ExecutionProvider, ExecutionProviderDispatch};
use ort::session::Session;
use ort::value::TensorRef;

mod graph;
mod library;
mod onnx;
mod tiles;

pub use graph::{Form, RAISED, Weights};
use graph::{GROUP, SUMS, TOKENS, Tile, WEIGHTS};
use library::{Library, library};
use tiles::divide;
pub use tiles::{RUN_BYTES, WIDTHS};

/// Tells versions of the graphs from each other.
pub const GRAPHS: u32 = 1;

/// An error of the library or of a provider.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Error(pub String);

/// Who computes graphs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Provider {
    /// ONNX Runtime's own kernels for processors.
    Cpu,
    /// Intel's OpenVINO: its NPU where there is one.
    OpenVino,
    /// Qualcomm's QNN: the Hexagon NPU.
    Qnn,
    /// Apple's Core ML: the Neural Engine.
    CoreMl,
}

impl Provider {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Cpu, Self::OpenVino, Self::Qnn, Self::CoreMl];

    /// The one to expect on such a machine: of Apple, of Arm, or of another.
    pub const HERE: Self = if cfg!(target_vendor = "apple") {
        Self::CoreMl
    } else if cfg!(target_arch = "aarch64") {
        Self::Qnn
    } else {
        Self::OpenVino
    };

    /// Its name on command lines.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::OpenVino => "openvino",
            Self::Qnn => "qnn",
            Self::CoreMl => "coreml",
        }
    }

    /// Whether the library has it.
    fn is_available(self) -> Result<bool, Error> {
        let available = match self {
            Self::Cpu => ep::CPU::is_available(),
            Self::OpenVino => ep::OpenVINO::is_available(),
            Self::Qnn => ep::QNN::is_available(),
            Self::CoreMl => ep::CoreML::is_available(),
        };
        available.map_err(failed)
    }

    /// The provider for a session; a failure to register it is an error.
    fn dispatch(self) -> ExecutionProviderDispatch {
        let provider = match self {
            Self::Cpu => ep::CPU::default().with_arena_allocator(false).build(),
            Self::OpenVino => ep::OpenVINO::default().with_device_type("NPU").build(),
            Self::Qnn => ep::QNN::default().with_backend_path(QNN).build(),
            Self::CoreMl => ep::CoreML::default().build(),
        };
        provider.error_on_failure()
    }

    /// How to get it.
    fn advice(self) -> &'static str {
        match self {
            Self::Cpu => "install the package onnxruntime",
            Self::OpenVino => "`pip install onnxruntime-openvino` in place of onnxruntime",
            Self::Qnn => "`pip install onnxruntime-qnn` in place of onnxruntime",
            Self::CoreMl => "use the package onnxruntime for macOS",
        }
    }
}

/// QNN's library for the Hexagon NPU, by the names that its package has.
const QNN: &str = if cfg!(windows) {
    "QnnHtp.dll"
} else {
    "libQnnHtp.so"
};

impl fmt::Display for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Provider {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let known = Self::ALL.into_iter().find(|known| known.name() == name);
        known.ok_or_else(|| format!("no provider of NPUs is called {name:?}"))
    }
}

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
    /// Sum `(g, row, token)` is at `g · group + row · width + token`, rows and tokens counted from the tile's first.
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
    /// Rows and tokens of a short tile, padded.
    rows: Vec<u8>,
    tokens: Vec<u8>,
}

/// An error of the library, of one line.
fn failed(e: impl fmt::Display) -> Error {
    let text = e.to_string();
    Error(text.lines().collect::<Vec<_>>().join(" "))
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
            return Err(Error(format!(
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
            rows: Vec::new(),
            tokens: Vec::new(),
        })
    }

    /// The library.
    pub fn listed(&self) -> &Listed {
        &self.listed
    }

    /// Makes the graphs for rows of a form, unless there are some.
    ///
    /// # Errors
    /// The provider does not take one as a whole, or has no memory for it.
    pub fn prepare(&mut self, form: Form) -> Result<(), Error> {
        for tile in form.tiles() {
            let key = Key { form, tile };
            if !self.sessions.contains_key(&key) {
                let session = self.session(&form.model(tile))?;
                self.sessions.insert(key, session);
            }
        }
        Ok(())
    }

    /// Gives all graphs back.
    pub fn clear(&mut self) {
        self.sessions.clear();
    }

    fn session(&self, model: &[u8]) -> Result<Session, Error> {
        let builder = Session::builder(&self.library.environment).map_err(failed)?;
        let builder = builder.with_intra_threads(1).map_err(failed)?;
        // Threads that spin take the cores of those that compute.
        let builder = builder.with_intra_op_spinning(false).map_err(failed)?;
        let mut builder = builder.with_inter_op_spinning(false).map_err(failed)?;
        if self.provider != Provider::Cpu {
            builder = builder.with_disable_cpu_fallback().map_err(failed)?;
        }
        let provider = [self.provider.dispatch()];
        let mut builder = builder.with_execution_providers(provider).map_err(failed)?;
        builder.commit_from_memory(model).map_err(|e| {
            let Error(why) = failed(e);
            Error(format!(
                "the provider {} does not take a graph: {why}; --device none does without it",
                self.provider
            ))
        })
    }

    /// Multiplies rows, which lie one after the other, with tokens, `[tokens × groups × 32]` activations + [`RAISED`]: calls
    /// `then` with the sums of tile after tile.
    ///
    /// # Errors
    /// The form is not prepared, lengths do not fit it, or the provider fails.
    pub fn multiply(
        &mut self,
        form: Form,
        rows: &[u8],
        tokens: &[u8],
        mut then: impl FnMut(Sums<'_>),
    ) -> Result<(), Error> {
        let token_bytes = form.groups * GROUP;
        if token_bytes == 0 || rows.len() % form.row_bytes != 0 || tokens.len() % token_bytes != 0 {
            return Err(Error(
                "rows and tokens of other lengths than the graphs'".into(),
            ));
        }
        let (height, width) = (rows.len() / form.row_bytes, tokens.len() / token_bytes);
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
                    let of = [its_rows, its_tokens.clone()];
                    result = self.tile(Key { form, tile }, of, [rows, tokens], &mut then);
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
        [all_rows, all_tokens]: [&[u8]; 2],
        then: &mut impl FnMut(Sums<'_>),
    ) -> Result<(), Error> {
        let (form, Tile { height, width }) = (key.form, key.tile);
        let session = self.sessions.get_mut(&key);
        let session = session.ok_or_else(|| Error("such rows are not prepared".into()))?;
        let weights = whole(all_rows, &rows, height, form.row_bytes, &mut self.rows);
        let x = whole(
            all_tokens,
            &tokens,
            width,
            form.groups * GROUP,
            &mut self.tokens,
        );
        let weights = TensorRef::from_array_view(([height, form.row_bytes], weights));
        let x = TensorRef::from_array_view(([width, form.groups, GROUP], x));
        let inputs =
            ort::inputs![WEIGHTS => weights.map_err(failed)?, TOKENS => x.map_err(failed)?];
        let outputs = session.run(inputs).map_err(failed)?;
        let sums = outputs
            .get(SUMS)
            .ok_or_else(|| Error("no sums came out".into()))?;
        let (_, sums) = sums.try_extract_tensor::<i32>().map_err(failed)?;
        if sums.len() != form.groups * height * width {
            return Err(Error("sums of another shape came out".into()));
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

/// Some of what lies one after the other, `of` bytes each: `count` of it, where it is, or padded in `room`.
fn whole<'a>(
    all: &'a [u8],
    some: &Range<usize>,
    count: usize,
    of: usize,
    room: &'a mut Vec<u8>,
) -> &'a [u8] {
    let there = &all[some.start * of..some.end * of];
    if some.len() == count {
        return there;
    }
    room.clear();
    room.extend_from_slice(there);
    room.resize(count * of, 0);
    room
}

#[cfg(test)]
mod tests;
