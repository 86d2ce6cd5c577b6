//! Containers of models without weights, for plans before a download.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use emberflow_engine::demo_container;
use emberflow_engine::meta::ContainerMeta;
use emberflow_models::config::ModelConfig;
use emberflow_models::demo::Demo;
use emberflow_models::names::TensorId;
use emberflow_models::{Checkpoint, Error, TensorInfo};
use emberflow_storage::container::{Container, Options, Writer};

use super::by_rows;
use super::by_source::decided;
use super::layout::PackLayout;
use super::options::PackOptions;
use crate::Failure;

/// A checkpoint with only a `config.json`.
struct Described {
    path: PathBuf,
    config: ModelConfig,
    tensors: Vec<TensorInfo>,
    tokenizer: String,
}

impl Described {
    /// Reads the configuration, and the tokenizer next to it if there is one.
    fn open(path: &Path) -> Result<Self, Failure> {
        let model = emberflow_models::describe(path)?;
        let tokenizer_path = path.with_file_name("tokenizer.json");
        let tokenizer = match std::fs::read_to_string(&tokenizer_path) {
            Ok(text) => text,
            Err(e) if e.kind() != ErrorKind::NotFound => {
                return Err(Failure::file(&tokenizer_path)(e));
            }
            // for sizes, another one suffices
            Err(_) => {
                let mut demo = demo_container(Demo::Dense)?;
                ContainerMeta::parse(&demo.take_meta(), demo.path())?.tokenizer
            }
        };
        Ok(Self {
            path: path.to_owned(),
            tensors: model.tensors(),
            config: model.config,
            tokenizer,
        })
    }
}

impl Checkpoint for Described {
    fn path(&self) -> &Path {
        &self.path
    }

    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn tokenizer_json(&self) -> &str {
        &self.tokenizer
    }

    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn read_rows(&self, _: TensorId, _: usize, _: usize, _: &mut [f32]) -> Result<(), Error> {
        Err(Error::NotACheckpoint {
            path: self.path.clone(),
            found: "a description without weights".into(),
        })
    }

    fn fingerprint(&self) -> u64 {
        0
    }
}

/// The container that `pack` would make with such options of the model that `config` describes, from weights in BF16 or
/// as its `quantization_config` says. Its weights are holes: it uses no disk space, and is deleted when it is closed.
///
/// # Errors
/// An unsupported configuration, or a file that cannot be created.
pub fn described(config: &Path, options: &PackOptions) -> Result<Container, Failure> {
    let source = Described::open(config)?;
    let folder = tempfile::tempdir().map_err(Failure::file(&std::env::temp_dir()))?;
    let path = folder.path().join("described.ember");
    let spec = match by_rows::applies(&source, options) {
        true => by_rows::described(&source, options)?,
        false => PackLayout::new(&source, &path, &decided(&source, options), None)?.spec,
    };
    let mut writer = Writer::create_with(&path, spec, Options::default())?;
    writer.leave_empty();
    writer.finish()?;
    Ok(Container::open(&path)?)
}
