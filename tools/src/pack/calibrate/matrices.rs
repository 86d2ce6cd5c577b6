//! Rounds single matrices against the covariance of their inputs.

use std::path::PathBuf;

use emberflow_kernels::{Compute, DType, QuantizeError, outlier_channels};
use emberflow_models::Checkpoint;
use emberflow_models::config::ModelConfig;
use emberflow_models::names::{Role, TensorId};
use emberflow_predictor::rounding::{ChannelRounder, Covariance, Inputs, Rounder};

use super::pass::DOWN_BLOCK;
use super::rounded::{LayerRows, ROLES, StoredRows};
use crate::Failure;
use crate::pack::options::PackOptions;
use crate::pack::write::add_squares;

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
    // q8c loses too little, MXFP4 nothing.
    let rounds = dtype.is_grouped() && !matches!(dtype, DType::Q8c | DType::Mxfp4);
    ROLES.contains(&role) && !deeper && rounds
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

    /// Rounds matrices that read the same inputs.
    pub(super) fn rows(
        &self,
        ids: &[TensorId],
        inputs: Covariance,
        rounded: &mut LayerRows,
    ) -> Result<(), Failure> {
        let inputs = Inputs::new(&self.on, inputs.size(), inputs.mean());
        let is_per_channel = |&id: &TensorId| self.options.dtype_of(id).is_per_channel();
        let (channels, groups): (Vec<_>, Vec<_>) = ids.iter().copied().partition(is_per_channel);
        for id in channels {
            let rounder = ChannelRounder::for_rows(&inputs, self.outliers(id, &inputs)?);
            rounded.put(
                id,
                self.by_batch(id, |_, values| rounder.rows(values).map(Some))?,
            );
        }
        if !groups.is_empty() {
            let rounder = Rounder::for_rows(&inputs);
            for id in groups {
                rounded.put(
                    id,
                    self.by_batch(id, |dtype, values| rounder.rows(dtype, values))?,
                );
            }
        }
        Ok(())
    }

    /// Rounds a matrix batch by batch of its rows.
    fn by_batch(
        &self,
        id: TensorId,
        round: impl Fn(DType, &[f32]) -> Result<Option<Vec<u8>>, QuantizeError>,
    ) -> Result<StoredRows, Failure> {
        let dtype = self.options.dtype_of(id);
        let (count, cols) = self.shape(id);
        let mut bytes = Vec::with_capacity(count * dtype.row_bytes(cols));
        let mut values = Vec::new();
        for first in (0..count).step_by(BATCH) {
            let these = BATCH.min(count - first);
            values.resize(these * cols, 0.0);
            self.source.read_rows(id, first, these, &mut values)?;
            bytes.extend(self.stored(id, dtype, round(dtype, &values))?);
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
        for (block, covariance) in hidden.into_iter().enumerate() {
            let size = covariance.size();
            values.resize(size * cols, 0.0);
            (self.source).read_rows(id, block * DOWN_BLOCK, size, &mut values)?;
            let inputs = Inputs::new(&self.on, size, covariance.mean());
            let stored = if dtype.is_per_channel() {
                let rounder = ChannelRounder::for_columns(&inputs);
                rounder.columns(cols, &values).map(Some)
            } else {
                Rounder::for_columns(&inputs).columns(dtype, cols, &values)
            };
            bytes.extend(self.stored(id, dtype, stored)?);
        }
        Ok(StoredRows { dtype, cols, bytes })
    }

    /// The input channels of a matrix whose outliers matter most: squared weights times the energy of their inputs (after
    /// AWQ, arXiv 2306.00978).
    fn outliers(&self, id: TensorId, inputs: &Inputs<'_>) -> Result<Vec<u16>, Failure> {
        let (count, cols) = self.shape(id);
        let mut importance = vec![0.0; cols];
        let mut values = Vec::new();
        for first in (0..count).step_by(BATCH) {
            let these = BATCH.min(count - first);
            values.resize(these * cols, 0.0);
            self.source.read_rows(id, first, these, &mut values)?;
            add_squares(&values, &mut importance);
        }
        let energies = (0..cols).map(|input| inputs.energy(input));
        (importance.iter_mut().zip(energies)).for_each(|(sum, energy)| *sum *= energy);
        Ok(outlier_channels(&importance))
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
        rows: Result<Option<Vec<u8>>, QuantizeError>,
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
