//! A checkpoint as a model, without packing: matrices are read from its files and multiplied in its own block formats.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;

use emberflow_kernels::DType;
use emberflow_models::config::ModelConfig;
use emberflow_models::names::Role;
use emberflow_models::{Checkpoint, StoredTensor, StoredTensors};
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
        Self::open(unpacked(path.as_ref())?)
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
        let (mut container, quant) = container_of(source, path)?;
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
pub fn unpacked(path: &Path) -> Result<Container, Error> {
    Ok(container_of(emberflow_models::open(path)?, path)?.0)
}

/// A container of the tensors of a checkpoint, and the formats of its weights.
fn container_of(source: Box<dyn Checkpoint>, path: &Path) -> Result<(Container, Quant), Error> {
    let c = source.config().clone();
    let mut meta = ContainerMeta::of(source.as_ref(), no_formats());
    let quantization = source.quantization();
    let Some(tensors) = source.into_stored() else {
        return Err(Error::Unpacked {
            path: path.to_path_buf(),
            what: "a description without weights",
        });
    };
    let quant = formats(tensors.tensors(), quantization);
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
    let container = Container::outside(Outside {
        path: path.to_path_buf(),
        meta: json,
        geometry: geometry(&c, path)?,
        bundle_dtype: NO_BUNDLES.code(),
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
    fn read(&self, tensor: usize, dst: &mut [u8]) -> io::Result<()> {
        self.0.read(tensor, 0, dst).map_err(io::Error::other)
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

/// The most frequent formats by weight class, by bytes. The whole has the name that the checkpoint states.
fn formats(tensors: &[StoredTensor], stated: Option<&str>) -> Quant {
    let most = |of: &dyn Fn(Role) -> bool| {
        let mut bytes = BTreeMap::<DType, u64>::new();
        for tensor in tensors.iter().filter(|tensor| of(tensor.id.role)) {
            *bytes.entry(tensor.dtype).or_default() += tensor.bytes();
        }
        let most = bytes.iter().max_by_key(|(_, bytes)| **bytes);
        let most = most.map_or(DType::F32, |(dtype, _)| *dtype);
        (most.name().to_owned(), bytes.len() > 1)
    };
    let (ffn, first) = most(&Role::is_bundled);
    let (attention, second) = most(&Role::is_projection);
    let (embedding, third) = most(&|role| matches!(role, Role::Embed | Role::Head));
    let whole = stated.map_or_else(|| most(&|_| true).0.to_uppercase(), str::to_owned);
    Quant {
        ffn,
        attention,
        embedding,
        mixed: first || second || third,
        whole: Some(whole),
    }
}

/// What [`formats`] replaces once the tensors are known.
fn no_formats() -> Quant {
    Quant {
        ffn: String::new(),
        attention: String::new(),
        embedding: String::new(),
        mixed: false,
        whole: None,
    }
}

/// Geometry of bundles that do not exist, which every container states.
fn geometry(c: &ModelConfig, path: &Path) -> Result<BundleGeometry, Error> {
    let d = c.bundle_width() as usize;
    let rest = 2 - u32::from(c.ffn_kind.ungated);
    let [q, s] = [NO_BUNDLES.quants_bytes(d), NO_BUNDLES.scales_bytes(d)];
    let [q, s] = [q, s].map(|n| u32::try_from(n).unwrap_or(u32::MAX));
    let (rest_q, rest_s) = (q.saturating_mul(rest), s.saturating_mul(rest));
    BundleGeometry::choose(q, s, rest_q, rest_s, 4096, Prefer::Inline).map_err(|source| {
        Error::from(emberflow_storage::Error::Layout {
            path: path.to_path_buf(),
            source,
        })
    })
}
