//! Where models lie on this machine: the folder of this program, and those of others, which are only read.

mod hugging_face;
mod llama_cpp;
mod lm_studio;
mod ollama;
mod own;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use serde::Serialize;

pub use self::hugging_face::home as hugging_face_home;
pub use self::own::{DownloadedFile, OwnStore, Removed, ambiguous, modified};
use super::name::ModelName;
use super::variant::{self, Variant, variants};

/// Folders in folders that are searched for files.
const DEPTH: usize = 3;

/// What ollama takes where no tag is given.
const LATEST: &str = "latest";

/// A model in a store.
#[derive(Debug, Clone, Serialize)]
pub struct Local {
    /// The store.
    pub store: &'static str,
    /// Its name there, `owner/name`.
    pub name: String,
    /// Which of the files of this name.
    pub file: String,
    /// The file, the first part, or the folder.
    pub path: PathBuf,
    /// Bytes of all its files.
    pub bytes: u64,
}

/// A folder with models.
trait Store {
    /// All its models. What cannot be read is left out.
    fn models(&self) -> Vec<Local>;
}

/// The models of all stores, those of this program first.
pub fn all() -> Vec<Local> {
    let own = OwnStore::open().map(|own| Box::new(own) as Box<dyn Store>);
    let others = [
        hugging_face::store(),
        ollama::store(),
        lm_studio::store(),
        llama_cpp::store(),
    ];
    let stores = own.into_iter().chain(others.into_iter().flatten());
    stores.flat_map(|store| store.models()).collect()
}

/// The models of this name in the first store that has any, in order of preference. A name with a file finds one at most,
/// and so does a name of ollama with its default tag.
pub fn find(name: &ModelName) -> Vec<Local> {
    let repo = name.repo();
    let mut here = all();
    // Some repositories have no owner.
    let same =
        |model: &Local| model.name.eq_ignore_ascii_case(&repo) || model.name == name.to_string();
    here.retain(same);
    let mut stores: Vec<&str> = here.iter().map(|model| model.store).collect();
    stores.dedup();
    let of_stores = stores.into_iter().map(|store| {
        let of_it: Vec<&Local> = here.iter().filter(|model| model.store == store).collect();
        matching(&of_it, name.file.as_deref())
    });
    of_stores
        .into_iter()
        .find(|models| !models.is_empty())
        .unwrap_or_default()
}

/// The one that `wanted` names, or without it all in order of preference.
fn matching(all: &[&Local], wanted: Option<&str>) -> Vec<Local> {
    let models = all.iter().enumerate();
    let models: Vec<Variant> = models
        .map(|(at, model)| Variant::file(&model.file, at))
        .collect();
    let latest = all.iter().any(|model| model.file == LATEST);
    let found = match wanted.or(latest.then_some(LATEST)) {
        Some(wanted) => variant::named(&models, wanted)
            .into_iter()
            .take(1)
            .collect(),
        None => variant::by_preference(&models),
    };
    let found = found.into_iter().map(|variant| all[variant.files[0]]);
    found.cloned().collect()
}

/// The path in an environment variable; `None` if it is unset or empty.
pub fn path_in(variable: &str) -> Option<PathBuf> {
    let given = std::env::var_os(variable).filter(|value| !value.is_empty());
    given.map(PathBuf::from)
}

/// The folder of an environment variable, or `otherwise` in the home folder.
fn folder(variable: &str, otherwise: &str) -> Option<PathBuf> {
    path_in(variable).or_else(|| Some(home()?.join(otherwise)))
}

/// The user's folder.
fn home() -> Option<PathBuf> {
    path_in("HOME")
}

/// `$XDG_CACHE_HOME`, or what stands for it.
fn caches() -> Option<PathBuf> {
    folder("XDG_CACHE_HOME", ".cache")
}

/// The complete models in the files of `root`.
fn models_below(root: &Path, store: &'static str, name: &str) -> Vec<Local> {
    let mut files = Vec::new();
    walk(root, "", DEPTH, &mut files);
    files.sort();
    let bytes = |file: &String| root.join(file).metadata().map_or(0, |facts| facts.len());
    let has_tokenizer = files.iter().any(|file| file == "tokenizer.json");
    let all = variants(&files)
        .into_iter()
        .filter(|variant| variant.complete && (!variant.folder || has_tokenizer));
    all.map(|variant| Local {
        store,
        name: name.to_owned(),
        path: match variant.folder {
            true => root.to_owned(),
            false => root.join(&files[variant.files[0]]),
        },
        bytes: variant.files.iter().map(|at| bytes(&files[*at])).sum(),
        file: variant.label,
    })
    .collect()
}

/// Appends the names of the files in `folder` and its folders, relative to the first one.
fn walk(folder: &Path, prefix: &str, depth: usize, out: &mut Vec<String>) {
    for name in entries(folder) {
        let path = folder.join(&name);
        // links are followed: the files of Hugging Face's cache are links
        match path.metadata() {
            Ok(facts) if facts.is_file() => out.push(format!("{prefix}{name}")),
            Ok(facts) if facts.is_dir() && depth > 0 && !name.starts_with('.') => {
                walk(&path, &format!("{prefix}{name}/"), depth - 1, out);
            }
            _ => {}
        }
    }
}

/// The names in a folder, sorted; none if it cannot be read.
fn entries(folder: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    let names = entries.flatten().map(|entry| entry.file_name());
    let mut names: Vec<String> = names.filter_map(|name| name.into_string().ok()).collect();
    names.sort();
    names
}

/// Folders `owner/name` below `root` with the models in each.
fn by_owner_and_name(root: &Path, store: &'static str) -> Vec<Local> {
    let owners = entries(root)
        .into_iter()
        .filter(|owner| !owner.starts_with('.'));
    let of_owner = |owner: String| {
        let names = entries(&root.join(&owner)).into_iter();
        let models = names.flat_map(|name| {
            let folder = root.join(&owner).join(&name);
            models_below(&folder, store, &format!("{owner}/{name}"))
        });
        models.collect::<Vec<_>>()
    };
    owners.flat_map(of_owner).collect()
}

/// A text file of moderate size.
fn read_small(path: &Path) -> Option<String> {
    const MOST: u64 = 1 << 20;
    let facts = path.metadata().ok()?;
    (facts.is_file() && facts.len() <= MOST).then(|| std::fs::read_to_string(path).ok())?
}

/// Whether `name` ends in `ending`.
fn ends(name: &str, ending: &str) -> bool {
    Path::new(name).extension() == Some(OsStr::new(ending))
}
