//! The cache of `huggingface_hub`, which llama.cpp uses too since 2026.
//!
//! ```text
//! models--OWNER--NAME/refs/main             the commit
//! models--OWNER--NAME/snapshots/COMMIT/...  links to the files
//! ```

use std::path::PathBuf;

use super::{Local, Store, caches, entries, models_below, path_in, read_small};

struct HuggingFace(PathBuf);

/// `$HF_HOME`, or what stands for it.
pub fn home() -> Option<PathBuf> {
    path_in("HF_HOME").or_else(|| Some(caches()?.join("huggingface")))
}

/// The store, where the environment says it is.
pub(super) fn store() -> Option<Box<dyn Store>> {
    let root = path_in("HF_HUB_CACHE").or_else(|| Some(home()?.join("hub")))?;
    Some(Box::new(HuggingFace(root)))
}

impl Store for HuggingFace {
    fn models(&self) -> Vec<Local> {
        let repos = entries(&self.0).into_iter();
        repos
            .flat_map(|repo| self.of(&repo).unwrap_or_default())
            .collect()
    }
}

impl HuggingFace {
    /// The models of the repository in folder `repo`: those of its main branch, or of the newest commit with any.
    fn of(&self, repo: &str) -> Option<Vec<Local>> {
        let name = repo.strip_prefix("models--")?.replacen("--", "/", 1);
        let root = self.0.join(repo);
        let snapshots = root.join("snapshots");
        let main = read_small(&root.join("refs/main")).map(|commit| commit.trim().to_owned());
        let written = |commit: &String| {
            let facts = snapshots.join(commit).metadata();
            facts.and_then(|facts| facts.modified()).ok()
        };
        let mut commits = entries(&snapshots);
        commits.sort_by_key(|commit| (Some(commit) == main.as_ref(), written(commit)));
        let models = commits
            .iter()
            .rev()
            .map(|commit| models_below(&snapshots.join(commit), "huggingface", &name));
        models.into_iter().find(|models| !models.is_empty())
    }
}
