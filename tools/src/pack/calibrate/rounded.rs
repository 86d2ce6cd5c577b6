//! Rounded matrices: of one layer in memory, of all layers in files next to the output.
//!
//! A layer's file holds the stored rows of its matrices: attention, then expert by expert, in the order of [`ROLES`]
//! and the checkpoint's order of neurons, followed by a checksum. It is renamed to its final name once complete.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use emberflow_engine::meta::Calibration;
use emberflow_kernels::DType;
use emberflow_models::config::ModelConfig;
use emberflow_models::names::{Required, Role, TensorId, required};
use xxhash_rust::xxh3::xxh3_64;

use crate::{Failure, atomic};

/// Roles of a layer's matrices, in the order of rounding.
pub const ROLES: [Role; 19] = [
    Role::Q,
    Role::K,
    Role::V,
    Role::QGate,
    Role::LatentQ,
    Role::LatentKv,
    Role::O,
    Role::ConvIn,
    Role::ConvOut,
    Role::DeltaIn,
    Role::DeltaGate,
    Role::DeltaGateIn,
    Role::DeltaDecays,
    Role::DeltaOut,
    Role::MambaIn,
    Role::MambaOut,
    Role::Gate,
    Role::Up,
    Role::Down,
];

/// Those whose input is that of a layer's mixer.
pub const INPUTS: [Role; 12] = [
    Role::Q,
    Role::K,
    Role::V,
    Role::QGate,
    Role::LatentQ,
    Role::LatentKv,
    Role::ConvIn,
    Role::DeltaIn,
    Role::DeltaGate,
    Role::DeltaGateIn,
    Role::DeltaDecays,
    Role::MambaIn,
];

/// Those that compute the output of a mixer.
pub const OUTPUTS: [Role; 4] = [Role::O, Role::ConvOut, Role::DeltaOut, Role::MambaOut];

/// A matrix as stored in a container.
#[derive(Debug, Clone)]
pub struct StoredRows {
    /// Block format.
    pub dtype: DType,
    /// Elements of a row.
    pub cols: usize,
    /// Rows; each has its quants, then its scales.
    pub bytes: Vec<u8>,
}

/// The matrices of a layer that have been rounded.
#[derive(Debug, Default)]
pub struct LayerRows(BTreeMap<(u32, usize), StoredRows>);

impl LayerRows {
    /// The matrix of a role and expert.
    pub fn get(&self, id: TensorId) -> Option<&StoredRows> {
        self.0.get(&place_of(id)?)
    }

    /// Adds a matrix.
    pub fn put(&mut self, id: TensorId, rows: StoredRows) {
        if let Some(place) = place_of(id) {
            self.0.insert(place, rows);
        }
    }

    /// Writes the layer's file.
    ///
    /// # Errors
    /// I/O errors.
    pub fn save(&self, path: &Path) -> Result<(), Failure> {
        let rows = self.0.values();
        let mut bytes: Vec<u8> = rows.flat_map(|rows| &rows.bytes).copied().collect();
        bytes.extend(xxh3_64(&bytes).to_le_bytes());
        atomic::write(path, &bytes)
    }
}

/// Sort key of a matrix in its layer's file; `None` if it is not stored there.
fn place_of(id: TensorId) -> Option<(u32, usize)> {
    let role = ROLES.iter().position(|&role| role == id.role)?;
    // Mixers come before the experts.
    let expert = if id.role.is_bundled() {
        id.expert + 1
    } else {
        0
    };
    Some((expert, role))
}

/// Position of a matrix in its layer's file.
#[derive(Debug, Clone, Copy)]
struct MatrixRange {
    offset: u64,
    stride: usize,
}

/// All rounded matrices of a model, in files.
#[derive(Debug)]
pub struct Rounded {
    summary: Calibration,
    layers: Vec<(PathBuf, File)>,
    places: BTreeMap<TensorId, MatrixRange>,
}

impl Rounded {
    /// Opens and checks the files at `paths`, one per layer. `stored` gives the format of a matrix, `None` if it is
    /// not in the file.
    ///
    /// # Errors
    /// I/O errors, and a failed check for a damaged file.
    pub fn open(
        paths: Vec<PathBuf>,
        config: &ModelConfig,
        summary: Calibration,
        stored: &dyn Fn(TensorId) -> Option<DType>,
    ) -> Result<Self, Failure> {
        let mut places = BTreeMap::new();
        let mut by_layer: BTreeMap<u32, BTreeMap<(u32, usize), Required>> = BTreeMap::new();
        for tensor in required(config) {
            if let Some(place) = place_of(tensor.id) {
                by_layer
                    .entry(tensor.id.layer)
                    .or_default()
                    .insert(place, tensor);
            }
        }
        let mut layers = Vec::with_capacity(paths.len());
        for (layer, path) in (0..).zip(paths) {
            let mut offset = 0;
            for shape in by_layer
                .get(&layer)
                .into_iter()
                .flat_map(|all| all.values())
            {
                if let Some(dtype) = stored(shape.id) {
                    let stride = dtype.row_bytes(shape.cols);
                    places.insert(shape.id, MatrixRange { offset, stride });
                    offset += (shape.rows * stride) as u64;
                }
            }
            let bytes = std::fs::read(&path).map_err(Failure::file(&path))?;
            if !is_whole(&bytes, offset) {
                return Err(Failure::Fault(format!(
                    "{} is damaged: delete it and run the command again",
                    path.display()
                )));
            }
            let file = File::open(&path).map_err(Failure::file(&path))?;
            layers.push((path, file));
        }
        Ok(Self {
            summary,
            layers,
            places,
        })
    }

    /// How the matrices were calibrated.
    pub fn summary(&self) -> &Calibration {
        &self.summary
    }

    /// Whether the matrix is stored here.
    pub fn has(&self, id: TensorId) -> bool {
        self.places.contains_key(&id)
    }

    /// Reads consecutive stored rows, starting at row `first`, into `out`.
    ///
    /// # Errors
    /// I/O errors.
    pub fn read(&self, id: TensorId, first: usize, out: &mut [u8]) -> Result<(), Failure> {
        let layer = self.layers.get(id.layer as usize);
        let (Some(place), Some((path, file))) = (self.places.get(&id), layer) else {
            return Err(Failure::Fault(format!("{id} was not rounded")));
        };
        let at = place.offset + (first * place.stride) as u64;
        file.read_exact_at(out, at).map_err(Failure::file(path))
    }
}

/// Whether a layer's file has `rows` bytes of rows and a matching checksum.
fn is_whole(bytes: &[u8], rows: u64) -> bool {
    match bytes.split_last_chunk() {
        Some((body, sum)) => body.len() as u64 == rows && xxh3_64(body) == u64::from_le_bytes(*sum),
        None => false,
    }
}
