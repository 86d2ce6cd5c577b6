//! Rounds single matrices against the covariance of their inputs.

use std::path::PathBuf;

use emberflow_kernels::{Compute, DType, outlier_channels};
use emberflow_models::Checkpoint;
use emberflow_models::config::ModelConfig;
use emberflow_models::names::{Role, TensorId};
use emberflow_predictor::rounding::{Covariance, Rounder};

use super::pass::DOWN_BLOCK;
use super::rounded::{ROLES, StoredRows};
use crate::Failure;
use crate::pack::options::PackOptions;
use crate::pack::write::{add_squares, round};

/// Rows read and rounded at once.
const BATCH: usize = 1024;

/// Whether matrices of this role and format are calibrated. Queries projected from a latent vector,
/// with or without pools, and gates of KDA are not: their input is not the layer's.
pub(crate) fn is_calibrated(c: &ModelConfig, role: Role, dtype: DType) -> bool {
    let latent = c.form.latent.and_then(|latent| latent.query_rank);
    let deeper = match role {
        Role::Q => latent.is_some() || c.form.pooled.is_some(),
        Role::DeltaGate => c.form.kda.is_some(),
        // beside that of attention, whose input is the one that is gathered
        Role::MambaOut => c.form.mamba.as_ref().is_some_and(|of| of.beside),
        _ => false,
    };
    ROLES.contains(&role) && !deeper && dtype.is_grouped() && dtype != DType::Mxfp4
}

/// A running calibration: the checkpoint, storage formats and files.
pub(super) struct Calibrator<'a> {
    pub(super) source: &'a dyn Checkpoint,
    pub(super) options: &'a PackOptions,
    pub(super) on: Compute,
    /// Tokens for which the layers have inputs.
    pub(super) vocabulary: Vec<u32>,
    pub(super) folder: PathBuf,
    /// Prefix of the names of this run's files.
    pub(super) name: String,
}

impl Calibrator<'_> {
    /// Storage format of a layer's matrix.
    pub(super) fn dtype(&self, role: Role, layer: u32) -> DType {
        self.options.dtype_of(TensorId::layer(role, layer))
    }

    /// Rounds the rows of a matrix with `rounder`.
    pub(super) fn rows(&self, id: TensorId, rounder: &Rounder<'_>) -> Result<StoredRows, Failure> {
        let dtype = self.options.dtype_of(id);
        let (count, cols) = self.shape(id);
        let mut bytes = Vec::with_capacity(count * dtype.row_bytes(cols));
        let mut values = Vec::new();
        if dtype.is_per_channel() {
            let channels = self.outliers(id, rounder)?;
            return self.nearest(id, Some(&channels));
        }
        for first in (0..count).step_by(BATCH) {
            let these = BATCH.min(count - first);
            values.resize(these * cols, 0.0);
            self.source.read_rows(id, first, these, &mut values)?;
            let stored = rounder.rows(dtype, &values);
            bytes.extend(self.stored(id, dtype, stored)?);
        }
        Ok(StoredRows { dtype, cols, bytes })
    }

    /// Rounds Down, whose stored rows are neurons, that is, columns of the matrix.
    pub(super) fn down(
        &self,
        id: TensorId,
        hidden: Vec<Covariance>,
    ) -> Result<StoredRows, Failure> {
        let dtype = self.options.dtype_of(id);
        let (_, cols) = self.shape(id);
        let mut bytes = Vec::new();
        let mut values = Vec::new();
        if dtype.is_per_channel() {
            return self.nearest(id, None);
        }
        for (block, covariance) in hidden.into_iter().enumerate() {
            let size = covariance.size();
            values.resize(size * cols, 0.0);
            (self.source).read_rows(id, block * DOWN_BLOCK, size, &mut values)?;
            let rounder = Rounder::for_columns(&self.on, size, covariance.mean());
            let stored = rounder.columns(dtype, cols, &values);
            bytes.extend(self.stored(id, dtype, stored)?);
        }
        Ok(StoredRows { dtype, cols, bytes })
    }

    /// The input channels of a matrix whose outliers matter most: squared weights times the energy of their inputs (after
    /// AWQ, arXiv 2306.00978).
    fn outliers(&self, id: TensorId, rounder: &Rounder<'_>) -> Result<Vec<u16>, Failure> {
        let (count, cols) = self.shape(id);
        let mut importance = vec![0.0; cols];
        let mut values = Vec::new();
        for first in (0..count).step_by(BATCH) {
            let these = BATCH.min(count - first);
            values.resize(these * cols, 0.0);
            self.source.read_rows(id, first, these, &mut values)?;
            add_squares(&values, &mut importance);
        }
        let energies = rounder.energies();
        (importance.iter_mut().zip(energies)).for_each(|(sum, energy)| *sum *= energy);
        Ok(outlier_channels(&importance))
    }

    /// Rounds the rows of a matrix to the nearest integers, with one scale for a row. `channels` are its outliers; without them
    /// each row has its own.
    fn nearest(&self, id: TensorId, channels: Option<&Vec<u16>>) -> Result<StoredRows, Failure> {
        let dtype = self.options.dtype_of(id);
        let (count, cols) = self.shape(id);
        let mut bytes = vec![0; count * dtype.row_bytes(cols)];
        let mut values = vec![0.0; cols];
        for (row, out) in bytes.chunks_exact_mut(dtype.row_bytes(cols)).enumerate() {
            self.source.read_rows(id, row, 1, &mut values)?;
            let (quants, scales) = out.split_at_mut(dtype.quants_bytes(cols));
            let rounded = round(dtype, &values, channels, quants, scales);
            self.stored(id, dtype, rounded.map(|()| Some(Vec::new())))?;
        }
        Ok(StoredRows { dtype, cols, bytes })
    }

    /// Rows and columns of a matrix.
    pub(super) fn shape(&self, id: TensorId) -> (usize, usize) {
        let mut tensors = self.source.tensors().iter();
        let found = tensors.find(|t| t.id == id);
        found.map_or((0, 0), |t| (t.rows, t.cols))
    }

    /// The stored rows, or a failed check that names the weight.
    fn stored(
        &self,
        id: TensorId,
        dtype: DType,
        rows: Result<Option<Vec<u8>>, emberflow_kernels::QuantizeError>,
    ) -> Result<Vec<u8>, Failure> {
        let why = match rows {
            Ok(Some(rows)) => return Ok(rows),
            Ok(None) => "the format has no scales".to_owned(),
            Err(error) => error.to_string(),
        };
        Err(Failure::Fault(format!(
            "{}: tensor {id} cannot be rounded to {}: {why}",
            self.source.path().display(),
            dtype.name()
        )))
    }
}
