//! The cache of llama.cpp until March 2026: `OWNER_NAME_FILE.gguf`, and `manifest=OWNER=NAME=TAG.json`.
//!
//! Where an owner ends can only be told by a manifest, or by a file's name that begins as its repository's. Newer
//! versions use the cache of Hugging Face.

use std::path::PathBuf;

use super::super::variant::variants;
use super::{Local, Store, caches, ends, entries, path_in};

struct LlamaCpp(PathBuf);

/// The store, where the environment says it is.
pub(super) fn store() -> Option<Box<dyn Store>> {
    let root = path_in("LLAMA_CACHE").or_else(|| Some(caches()?.join("llama.cpp")))?;
    Some(Box::new(LlamaCpp(root)))
}

impl Store for LlamaCpp {
    fn models(&self) -> Vec<Local> {
        let names = entries(&self.0);
        let repos = names.iter().filter_map(|name| repo_of_manifest(name));
        let mut repos: Vec<(String, String)> = repos.collect();
        // The longest first: `o_n_x_file` may belong to `o/n` or to `o/n_x`.
        repos.sort_by_key(|(owner, name)| {
            std::cmp::Reverse((owner.len() + name.len(), name.clone()))
        });
        let files: Vec<String> = names
            .into_iter()
            .filter(|name| ends(name, "gguf"))
            .collect();
        let all = variants(&files)
            .into_iter()
            .filter(|variant| variant.complete);
        let local = |variant: super::Variant| {
            let path = |at: usize| self.0.join(&files[at]);
            let (name, file) = parts_of(&variant.label, &repos)?;
            Some(Local {
                store: "llama.cpp",
                name,
                file,
                path: path(variant.files[0]),
                bytes: variant
                    .files
                    .iter()
                    .map(|at| path(*at).metadata().map_or(0, |facts| facts.len()))
                    .sum(),
            })
        };
        all.filter_map(local).collect()
    }
}

/// The owner and name in the name of a manifest.
fn repo_of_manifest(name: &str) -> Option<(String, String)> {
    let mut parts = name.strip_prefix("manifest=")?.split('=');
    Some((parts.next()?.to_owned(), parts.next()?.to_owned()))
}

/// The repository, `owner/name`, and the file in the name of a cached file.
fn parts_of(label: &str, repos: &[(String, String)]) -> Option<(String, String)> {
    let of_manifest = repos.iter().find_map(|(owner, name)| {
        let file = label.strip_prefix(&format!("{owner}_{name}_"))?;
        Some((format!("{owner}/{name}"), file.to_owned()))
    });
    of_manifest.or_else(|| {
        // without a manifest: OWNER_MODEL-GGUF_FILE
        let (repo, file) = label.split_once("-GGUF_")?;
        let (owner, name) = repo.split_once('_')?;
        Some((format!("{owner}/{name}-GGUF"), file.to_owned()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_from_manifests_or_the_usual_ending() {
        let repos = [("a_b".to_owned(), "c_d".to_owned())];
        let parts = |label: &str| parts_of(label, &repos);
        assert_eq!(
            parts("a_b_c_d_e-Q4_0"),
            Some(("a_b/c_d".into(), "e-Q4_0".into()))
        );
        let usual = parts("ggml-org_gemma-3-1b-it-GGUF_gemma-3-1b-it-Q4_K_M");
        assert_eq!(
            usual,
            Some((
                "ggml-org/gemma-3-1b-it-GGUF".into(),
                "gemma-3-1b-it-Q4_K_M".into()
            ))
        );
        assert_eq!(parts("x_y_z"), None);
        assert_eq!(
            repo_of_manifest("manifest=o=n=latest.json"),
            Some(("o".into(), "n".into()))
        );
    }
}
