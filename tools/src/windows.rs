//! Chooses windows of a text for commands that learn from it.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use emberflow_models::config::ModelConfig;
use emberflow_models::tokenizer::Tokenizer;
use xxhash_rust::xxh3::Xxh3Default;

use crate::{Failure, size, text};

/// Tokens per window.
const WINDOW: usize = 512;

/// Upper bound of the bytes per token, on average over a window.
const BYTES_PER_TOKEN: usize = 16;

/// Maximum bytes of a text from a pipe, which is held in memory.
const PIPED: u64 = 64 << 20;

/// A text that is read in parts.
#[derive(Debug)]
pub struct Source {
    path: PathBuf,
    from: From,
    bytes: u64,
}

#[derive(Debug)]
enum From {
    File(File),
    Memory(Vec<u8>),
}

impl Source {
    /// Opens the text `path`. Pipes and devices are read into memory.
    ///
    /// # Errors
    /// A read error, or more than 64 MiB from a pipe.
    pub fn open(path: &Path) -> Result<Self, Failure> {
        let failed = |e| Failure::file(path)(e);
        let file = File::open(path).map_err(failed)?;
        let meta = file.metadata().map_err(failed)?;
        let (from, bytes) = if meta.is_file() {
            (From::File(file), meta.len())
        } else {
            let mut bytes = Vec::new();
            file.take(PIPED + 1)
                .read_to_end(&mut bytes)
                .map_err(failed)?;
            let len = bytes.len() as u64;
            if len > PIPED {
                return Err(Failure::usage(format!(
                    "{}: more than {} from a pipe; use a file, of which \
                         only the windows are read",
                    path.display(),
                    size::show(PIPED)
                )));
            }
            (From::Memory(bytes), len)
        };
        Ok(Self {
            path: path.to_owned(),
            from,
            bytes,
        })
    }

    /// A text in memory.
    pub fn of(bytes: Vec<u8>) -> Self {
        Self {
            path: PathBuf::new(),
            bytes: bytes.len() as u64,
            from: From::Memory(bytes),
        }
    }

    /// Hash of the whole text.
    ///
    /// # Errors
    /// A read error.
    pub fn hash(&self) -> Result<u64, Failure> {
        let mut hash = Xxh3Default::new();
        let mut at = 0;
        while at < self.bytes {
            let block = self.read(at, text::BLOCK)?;
            at += block.len() as u64;
            hash.update(&block);
        }
        Ok(hash.digest())
    }

    /// Reads up to `most` bytes at offset `at`.
    fn read(&self, at: u64, most: usize) -> Result<Vec<u8>, Failure> {
        let left = self.bytes.saturating_sub(at);
        let len = usize::try_from(left).map_or(most, |left| left.min(most));
        match &self.from {
            From::File(file) => {
                let mut bytes = vec![0; len];
                let read = file.read_exact_at(&mut bytes, at);
                read.map_err(Failure::file(&self.path))?;
                Ok(bytes)
            }
            From::Memory(bytes) => Ok(bytes[at as usize..][..len].to_vec()),
        }
    }
}

/// How much text to choose.
#[derive(Debug, Clone, Copy)]
pub struct Amount {
    /// Approximate tokens of all windows together.
    pub tokens: usize,
    /// Minimum number of windows.
    pub least: usize,
}

/// Chooses windows spread evenly over a text and tokenizes each, with BOS if the model wants it. A text with fewer
/// tokens than requested is taken whole.
///
/// # Errors
/// A usage error if the text is too short for the minimum number of windows, a read error, and tokenizer errors.
pub fn choose(
    tokenizer: &Tokenizer,
    config: &ModelConfig,
    text: &Source,
    amount: Amount,
) -> Result<Vec<Vec<u32>>, Failure> {
    let window = WINDOW.min(config.max_context as usize);
    let count = amount.tokens.div_ceil(window).max(amount.least);
    let start = &tokenizer.around().before;
    let body = window.saturating_sub(start.len()).max(1);
    let share = usize::try_from(text.bytes.div_ceil(count as u64)).unwrap_or(usize::MAX);
    let length = (body * BYTES_PER_TOKEN).min(share);
    let mut windows = Vec::new();
    for i in 0..count as u64 {
        let bytes = text.read(i * (text.bytes / count as u64), length)?;
        // A character cut at either end becomes U+FFFD, which is removed.
        let piece = String::from_utf8_lossy(&bytes);
        let piece = piece.trim_matches(char::REPLACEMENT_CHARACTER);
        let found = tokenizer.encode(piece, false)?;
        if let Some(&token) = found.iter().find(|&&token| token >= config.vocab) {
            let vocab = config.vocab;
            return Err(emberflow_engine::Error::Token { token, vocab }.into());
        }
        let mut ids = start.clone();
        ids.extend(found.into_iter().take(body));
        if ids.len() > start.len().max(1) {
            windows.push(ids);
        }
    }
    if windows.len() < amount.least {
        return Err(Failure::usage(format!(
            "the text gives {} windows, at least {} are needed; use a longer text",
            windows.len(),
            amount.least
        )));
    }
    Ok(windows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_where_windows_are_and_hashed_as_a_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("text");
        let bytes: Vec<u8> = (0..200_000u32).map(|i| (i % 251) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let file = Source::open(&path).unwrap();
        let memory = Source::of(bytes.clone());
        for source in [&file, &memory] {
            assert_eq!(source.read(199_990, 64).unwrap(), bytes[199_990..]);
            assert_eq!(source.read(7, 64).unwrap(), bytes[7..71]);
            assert_eq!(source.hash().unwrap(), xxhash_rust::xxh3::xxh3_64(&bytes));
        }
        let zeros = Source::open(Path::new("/dev/zero"))
            .unwrap_err()
            .to_string();
        assert!(zeros.contains("more than 64.0 MiB from a pipe"), "{zeros}");
    }
}
