//! The files of a repository, and their checksums.

use std::fmt;
use std::path::{Component, Path};

use serde::Deserialize;
use sha1::Sha1;
use sha2::{Digest, Sha256};

/// The list of files as the hub sends it.
#[derive(Debug, Deserialize)]
pub struct Listed {
    /// The commit.
    pub sha: String,
    /// The files.
    pub siblings: Vec<ListedFile>,
}

/// A file as the hub lists it.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ListedFile {
    /// Its path.
    pub rfilename: String,
    /// Its length.
    pub size: Option<u64>,
    /// SHA-1 of its blob in git: the file itself, unless there is `lfs`.
    pub blob_id: Option<String>,
    /// Of a large file.
    pub lfs: Option<ListedLfs>,
}

/// A large file as the hub lists it.
#[derive(Debug, Deserialize)]
pub struct ListedLfs {
    /// Its checksum.
    #[serde(alias = "oid")]
    pub sha256: String,
    /// Its length.
    pub size: u64,
}

/// A repository at a commit.
#[derive(Debug)]
pub struct Repo {
    /// The commit.
    pub commit: String,
    /// Its files.
    pub files: Vec<RemoteFile>,
}

/// A file of a repository.
#[derive(Debug, Clone)]
pub struct RemoteFile {
    /// Its path.
    pub path: String,
    /// Its length.
    pub bytes: u64,
    /// Its checksum.
    pub checksum: Checksum,
}

/// The checksum of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Checksum {
    /// SHA-256 of the bytes, in hexadecimal digits.
    Sha256(String),
    /// SHA-1 of `blob LENGTH\0` and the bytes, as git has it.
    Git(String),
}

impl Repo {
    /// The repository of a hub's list. Files without a checksum, and names that are no relative paths, are left out.
    ///
    /// # Errors
    /// Why it is no repository.
    pub fn new(listed: Listed) -> Result<Self, String> {
        // It becomes a part of addresses.
        if !is_hex(&listed.sha, 40) {
            return Err("the commit is not a hash of git".into());
        }
        let files = listed.siblings.into_iter().filter_map(RemoteFile::new);
        Ok(Self {
            commit: listed.sha,
            files: files.collect(),
        })
    }
}

impl RemoteFile {
    fn new(listed: ListedFile) -> Option<Self> {
        if !is_inside(&listed.rfilename) {
            tracing::warn!("{:?} is not a file's name: left out", listed.rfilename);
            return None;
        }
        let (bytes, checksum) = match (listed.lfs, listed.blob_id) {
            (Some(lfs), _) if is_hex(&lfs.sha256, 64) => (lfs.size, Checksum::Sha256(lfs.sha256)),
            (None, Some(blob)) if is_hex(&blob, 40) => (listed.size?, Checksum::Git(blob)),
            _ => return None,
        };
        // No file is that long, and sums of lengths must not overflow.
        (bytes <= 1 << 60).then_some(Self {
            path: listed.rfilename,
            bytes,
            checksum,
        })
    }
}

impl Checksum {
    /// Starts to compute it for a file of this length.
    pub fn start(&self, bytes: u64) -> Hash {
        match self {
            Self::Sha256(_) => Hash::Sha256(Sha256::new()),
            Self::Git(_) => Hash::Git(Sha1::new().chain_update(format!("blob {bytes}\0"))),
        }
    }

    /// Whether the bytes that `hash` has seen have this checksum.
    pub fn is_of(&self, hash: Hash) -> bool {
        match (self, hash) {
            (Self::Sha256(wanted), Hash::Sha256(hash)) => *wanted == hex(&hash.finalize()),
            (Self::Git(wanted), Hash::Git(hash)) => *wanted == hex(&hash.finalize()),
            _ => false,
        }
    }
}

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sha256(hex) => write!(f, "sha256:{hex}"),
            Self::Git(hex) => write!(f, "git:{hex}"),
        }
    }
}

/// A checksum that is being computed.
#[derive(Debug, Clone)]
pub enum Hash {
    /// See [`Checksum::Sha256`].
    Sha256(Sha256),
    /// See [`Checksum::Git`].
    Git(Sha1),
}

impl Hash {
    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(hash) => hash.update(bytes),
            Self::Git(hash) => hash.update(bytes),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

/// Whether a name leads to a place below the folder that it is relative to, and to none of this program's files.
fn is_inside(name: &str) -> bool {
    let parts = || Path::new(name).components();
    let plain = |part: Component<'_>| matches!(part, Component::Normal(part) if part.len() <= 255);
    let strange = |c: char| c.is_control() || c == '\\';
    !name.is_empty() && name.len() < 1024 && name != "emberflow.json" && !name.starts_with(".partial") && parts().all(plain)
        // `a/./b` and `a//b` have the components of `a/b`
        && parts().count() == name.split('/').count()
        && !name.contains(strange)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_lead_elsewhere_are_left_out() {
        for name in [
            "",
            "/a",
            "../a",
            "a/../b",
            "a//b",
            "./a",
            "a/",
            "a\\b",
            "a\nb",
            "..",
            "emberflow.json",
        ] {
            assert!(!is_inside(name), "{name:?}");
        }
        for name in ["a", "a/b.gguf", ".gitattributes", "ü ä.gguf"] {
            assert!(is_inside(name), "{name:?}");
        }
    }

    /// The sums are those of `sha256sum` and `git hash-object` for a file of "hello\n".
    #[test]
    fn checksums_are_those_of_the_hub() {
        for checksum in [
            Checksum::Sha256(
                "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03".into(),
            ),
            Checksum::Git("ce013625030ba8dba906f756967f9e9ca394464a".into()),
        ] {
            let mut hash = checksum.start(6);
            hash.update(b"hel");
            hash.update(b"lo\n");
            assert!(checksum.is_of(hash.clone()), "{checksum}");
            hash.update(b"!");
            assert!(!checksum.is_of(hash));
        }
    }

    #[test]
    fn a_list_without_a_commit_is_refused() {
        let listed = |sha: &str| Listed {
            sha: sha.to_owned(),
            siblings: Vec::new(),
        };
        assert!(Repo::new(listed("../../api")).is_err());
        assert!(Repo::new(listed(&"a".repeat(40))).is_ok());
    }
}
