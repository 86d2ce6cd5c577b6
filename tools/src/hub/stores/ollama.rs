//! The store of ollama.
//!
//! ```text
//! manifests/registry.ollama.ai/library/NAME/TAG   {"layers": [{"mediaType", "digest": "sha256:...", "size"}]}
//! manifests/hf.co/OWNER/NAME/TAG                  from Hugging Face
//! blobs/sha256-...                                the layers
//! ```
//!
//! An owner at ollama's registry is another one than an owner of this name at Hugging Face: those models are left out.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::{Local, Store, entries, folder, read_small};

/// The layer that is a GGUF file.
const MODEL: &str = "application/vnd.ollama.image.model";

/// A layer that changes the model.
const ADAPTER: &str = "application/vnd.ollama.image.adapter";

/// Where the service keeps its models on Linux.
const OF_THE_SERVICE: &str = "/usr/share/ollama/.ollama/models";

struct Ollama(Vec<PathBuf>);

#[derive(Deserialize)]
struct Manifest {
    layers: Vec<Layer>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Layer {
    media_type: String,
    digest: String,
}

/// The store, where the environment says it is, and that of the service.
pub(super) fn store() -> Option<Box<dyn Store>> {
    let mut roots: Vec<PathBuf> = folder("OLLAMA_MODELS", ".ollama/models")
        .into_iter()
        .collect();
    if std::env::var_os("OLLAMA_MODELS").is_none() {
        roots.push(OF_THE_SERVICE.into());
    }
    Some(Box::new(Ollama(roots)))
}

impl Store for Ollama {
    fn models(&self) -> Vec<Local> {
        self.0.iter().flat_map(|root| models_of(root)).collect()
    }
}

fn models_of(root: &Path) -> Vec<Local> {
    let manifests = root.join("manifests");
    let library = ("registry.ollama.ai".to_owned(), "library".to_owned());
    let owners = ["hf.co", "huggingface.co"].into_iter().flat_map(|host| {
        let owners = entries(&manifests.join(host)).into_iter();
        owners.map(move |owner| (host.to_owned(), owner))
    });
    let mut all = Vec::new();
    for (host, owner) in std::iter::once(library).chain(owners) {
        let folder = manifests.join(host).join(&owner);
        for name in entries(&folder) {
            for tag in entries(&folder.join(&name)) {
                let manifest = folder.join(&name).join(&tag);
                all.extend(model(root, &manifest, &format!("{owner}/{name}"), tag));
            }
        }
    }
    all
}

/// The model of one manifest; `None` if it has none in a GGUF file.
fn model(root: &Path, manifest: &Path, name: &str, tag: String) -> Option<Local> {
    let manifest: Manifest = serde_json::from_str(&read_small(manifest)?).ok()?;
    if manifest
        .layers
        .iter()
        .any(|layer| layer.media_type == ADAPTER)
    {
        return None;
    }
    let mut models = manifest
        .layers
        .iter()
        .filter(|layer| layer.media_type == MODEL);
    // the parts of a split one are no file that runs
    let (layer, None) = (models.next()?, models.next()) else {
        return None;
    };
    let hex = layer.digest.strip_prefix("sha256:")?;
    if !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    let path = root.join("blobs").join(format!("sha256-{hex}"));
    let bytes = path.metadata().ok()?.len();
    Some(Local {
        store: "ollama",
        name: name.to_owned(),
        file: tag,
        path,
        bytes,
    })
}
