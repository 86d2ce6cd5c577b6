//! A checkpoint as a model, without packing: matrices are read from its files and multiplied in its own block formats.

use std::io;
use std::path::Path;
use std::sync::Arc;

use emberflow_kernels::DType;
use emberflow_models::config::ModelConfig;
use emberflow_models::{Bands, Checkpoint, StoredTensor, StoredTensors};
use emberflow_storage::container::{
    BundleGeometry, Container, Outside, OutsideTensors, Prefer, TensorSpec,
};

use crate::error::Error;
use crate::meta::{ContainerMeta, Quant};
use crate::model::{Model, Text};

/// Bundle geometry and format of a model that has no bundles.
const NO_BUNDLES: DType = DType::Q8;

impl Model {
    /// The model in a checkpoint: a GGUF file, any part of a split one, a Hugging Face folder or a `.safetensors` file.
    /// Nothing is copied or written.
    ///
    /// # Errors
    /// What [`emberflow_models::open`] returns, or an error of [`Model::open`].
    pub fn of_checkpoint(path: impl AsRef<Path>) -> Result<Self, Error> {
        Self::open(unpacked(path.as_ref(), Bands::Small)?)
    }

    /// The first head for multi-token prediction of the checkpoint `path`, a model of one layer; `None` if it has none that is
    /// implemented, or if it is not of the model with this `text`.
    ///
    /// # Errors
    /// As [`Model::of_checkpoint`], of the head's tensors.
    pub(crate) fn mtp_head(path: &Path, text: &Text) -> Result<Option<Self>, Error> {
        let Some(source) = emberflow_models::open_mtp_head(path)? else {
            return Ok(None);
        };
        let (config, of) = (source.config().clone(), text.config());
        // Another model's, or a file that was replaced meanwhile.
        let same = |c: &ModelConfig| (c.d_model, c.vocab, c.tied_head);
        if same(&config) != same(of) || config.family != of.family {
            return Ok(None);
        }
        let (mut container, quant) = container_of(source, path, Bands::Small)?;
        container.take_meta();
        Ok(Some(Self {
            container,
            text: text.of_head(config, quant),
        }))
    }
}

/// A container of the tensors of the checkpoint `path`.
///
/// # Errors
/// As [`Model::of_checkpoint`].
pub fn unpacked(path: &Path, bands: Bands) -> Result<Container, Error> {
    Ok(container_of(emberflow_models::open(path)?, path, bands)?.0)
}

/// A container of the tensors of a checkpoint, and the formats of its weights.
fn container_of(
    source: Box<dyn Checkpoint>,
    path: &Path,
    bands: Bands,
) -> Result<(Container, Quant), Error> {
    let c = source.config().clone();
    let unknown = Quant::of_matrices(std::iter::empty(), None);
    let mut meta = ContainerMeta::of(source.as_ref(), unknown);
    let quantization = source.quantization();
    let Some(tensors) = source.into_stored(bands) else {
        return Err(Error::Unpacked {
            path: path.to_path_buf(),
            what: "a description without weights",
        });
    };
    let formats = tensors.tensors().iter();
    let formats = formats.map(|of| (of.id.role, of.dtype, of.bytes()));
    let quant = Quant::of_matrices(formats, quantization);
    meta.quant = quant.clone();
    // Room for the tokenizer with its quotes escaped: while a buffer grows, it may be in memory twice.
    let mut json = Vec::with_capacity(meta.tokenizer.len() / 4 * 5);
    serde_json::to_writer(&mut json, &meta).map_err(|e| Error::Metadata {
        path: path.to_path_buf(),
        reason: e.to_string(),
    })?;
    // Not by their names, which may be other files' by now.
    let files = tensors.files().into_iter();
    let files = files.map(|(name, file)| (name.to_path_buf(), Arc::clone(file)));
    let files = files.collect();
    let tensors: Arc<dyn StoredTensors> = tensors.into();
    let specs = tensors.tensors().iter().enumerate();
    let specs = specs.map(|(number, of)| (spec(of), tensors.place(number)));
    let (geometry, bundle_dtype) = unpacked_geometry(&c, path)?;
    let container = Container::outside(Outside {
        path: path.to_path_buf(),
        meta: json,
        geometry,
        bundle_dtype,
        files,
        tensors: specs.collect(),
        reader: Arc::new(Unpacked(Arc::clone(&tensors))),
    })?;
    // What the container knows of the files is as new as their headers.
    tensors.check_unchanged()?;
    Ok((container, quant))
}

/// Reads tensors of a checkpoint.
#[derive(Debug)]
struct Unpacked(Arc<dyn StoredTensors>);

impl OutsideTensors for Unpacked {
    fn read(&self, tensor: usize, first: usize, dst: &mut [u8]) -> io::Result<()> {
        self.0.read(tensor, first, dst).map_err(io::Error::other)
    }
}

fn spec(of: &StoredTensor) -> TensorSpec {
    TensorSpec {
        name: of.id.to_string(),
        dtype: of.dtype.code(),
        dims: vec![of.rows as u64, of.cols as u64],
        len: of.bytes(),
    }
}

/// Geometry and format of bundles that do not exist, which every container states.
///
/// # Errors
/// A model that is too wide for bundles.
pub fn unpacked_geometry(c: &ModelConfig, path: &Path) -> Result<(BundleGeometry, u32), Error> {
    let d = c.bundle_width() as usize;
    let rest = 2 - u32::from(c.ffn_kind.ungated);
    let [q, s] = [NO_BUNDLES.quants_bytes(d), NO_BUNDLES.scales_bytes(d)];
    let [q, s] = [q, s].map(|n| u32::try_from(n).unwrap_or(u32::MAX));
    let (rest_q, rest_s) = (q.saturating_mul(rest), s.saturating_mul(rest));
    let geometry = BundleGeometry::choose(q, s, rest_q, rest_s, 4096, Prefer::Inline);
    let geometry = geometry.map_err(|source| emberflow_storage::Error::Layout {
        path: path.to_path_buf(),
        source,
    })?;
    Ok((geometry, NO_BUNDLES.code()))
}
