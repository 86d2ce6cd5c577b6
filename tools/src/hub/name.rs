//! Names of models: `owner/name`, with `:file` for one of several files.

use std::fmt;
use std::path::Path;

/// Beginnings of addresses that people copy from their browser or another program.
const ADDRESSES: [&str; 5] = [
    "https://huggingface.co/",
    "https://hf.co/",
    "huggingface.co/",
    "hf.co/",
    "hf://",
];

/// Endings of files, which are no names.
const FILES: [&str; 6] = ["gguf", "ember", "safetensors", "json", "bin", "txt"];

/// What ollama puts before names without an owner.
const OLLAMA: &str = "library";

/// A model's name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelName {
    /// The part in front of the slash.
    pub owner: String,
    /// The part after it.
    pub name: String,
    /// A file, or what is special in its name: `Q4_K_M`.
    pub file: Option<String>,
}

impl ModelName {
    /// The name in a text that may also be a path; `None` if it can only be one.
    pub fn parse(text: &Path) -> Option<Self> {
        let text = text.to_str()?;
        let address = ADDRESSES.iter().find_map(|start| text.strip_prefix(start));
        let text = address.unwrap_or(text).trim_end_matches('/');
        let (repo, file) = match text.split_once(':') {
            Some((repo, file)) => (repo, Some(file)),
            None => (text, None),
        };
        // owner/name/tree/main, owner/name/blob/main/file
        let mut parts = repo.splitn(5, '/');
        let [owner, name, page, _, path] = [(); 5].map(|()| parts.next());
        let page = page.filter(|page| ["tree", "blob", "resolve"].contains(page));
        let (repo, file) = match (address, owner, name, page) {
            (Some(_), Some(owner), Some(name), Some(_)) => {
                (&repo[..owner.len() + 1 + name.len()], path.or(file))
            }
            _ => (repo, file),
        };
        let ending = Path::new(repo).extension().and_then(|e| e.to_str());
        if ending.is_some_and(|ending| FILES.contains(&ending)) {
            return None;
        }
        let (owner, name) = repo.split_once('/').unwrap_or((OLLAMA, repo));
        let valid = is_part(owner) && is_part(name) && file != Some("");
        valid.then(|| Self {
            owner: owner.to_owned(),
            name: name.to_owned(),
            file: file.map(str::to_owned),
        })
    }

    /// The name without a file: `owner/name`.
    pub fn repo(&self) -> String {
        format!("{}/{}", self.owner, self.name)
    }

    /// Whether only ollama's store has such a name.
    pub fn is_of_ollama(&self) -> bool {
        self.owner == OLLAMA
    }
}

impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.is_of_ollama() {
            write!(f, "{}/", self.owner)?;
        }
        f.write_str(&self.name)?;
        match &self.file {
            Some(file) => write!(f, ":{file}"),
            None => Ok(()),
        }
    }
}

/// Whether this may be an owner or a name on a hub: no part of a path, such as `..`, among them.
fn is_part(text: &str) -> bool {
    let known = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    !text.is_empty() && text.len() <= 96 && !text.starts_with('.') && text.chars().all(known)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_paths_are_told_apart() {
        let name = |text: &str| ModelName::parse(Path::new(text)).map(|name| name.to_string());
        for (text, wanted) in [
            ("Qwen/Qwen3-8B-GGUF", Some("Qwen/Qwen3-8B-GGUF")),
            ("a/b.c:Q4_K_M", Some("a/b.c:Q4_K_M")),
            ("a/b:sub/file.gguf", Some("a/b:sub/file.gguf")),
            ("hf.co/a/b:Q4_K_M", Some("a/b:Q4_K_M")),
            ("https://huggingface.co/a/b/", Some("a/b")),
            ("https://huggingface.co/a/b/tree/main", Some("a/b")),
            ("hf.co/a/b/blob/main/s/f.gguf", Some("a/b:s/f.gguf")),
            ("a/b/blob/main/f.gguf", None),
            ("llama3.2:1b", Some("llama3.2:1b")),
            ("llama3.2", Some("llama3.2")),
            ("models/file.gguf", None),
            ("/models/a", None),
            ("./a/b", None),
            ("../b", None),
            ("a/..", None),
            ("a/b/c", None),
            ("a/b c", None),
            ("a/b:", None),
            ("a/", Some("a")),
            ("", None),
            ("model.ember", None),
        ] {
            assert_eq!(name(text).as_deref(), wanted, "{text}");
        }
    }
}
