//! Reads and tokenizes a text block by block, in constant memory.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use emberflow_engine::Text;
use emberflow_models::tokenizer::Encoder;

use crate::Failure;

/// Bytes read at once.
pub const BLOCK: usize = 64 << 10;

/// Tokens per window: `asked`, else the smaller of `usual` and `most`.
///
/// # Errors
/// A usage error if `asked` is not between 2 and `most`.
pub fn window(asked: Option<u32>, usual: u32, most: u32) -> Result<u32, Failure> {
    let window = asked.unwrap_or(usual.min(most));
    if window < 2 || window > most {
        return Err(Failure::usage(format!(
            "--window {window}: this model allows 2 to {most}"
        )));
    }
    Ok(window)
}

/// Decodes UTF-8 that arrives in blocks.
#[derive(Debug, Default)]
pub struct Utf8 {
    /// Start of an incomplete character.
    pending: Vec<u8>,
}

impl Utf8 {
    /// Text completed by `bytes`.
    ///
    /// # Errors
    /// Invalid UTF-8.
    pub fn push(&mut self, bytes: &[u8]) -> std::io::Result<String> {
        self.pending.extend_from_slice(bytes);
        let valid = match std::str::from_utf8(&self.pending) {
            Ok(text) => text.len(),
            Err(e) if e.error_len().is_none() => e.valid_up_to(),
            Err(_) => return Err(not_utf8()),
        };
        let rest = self.pending.split_off(valid);
        let text = String::from_utf8(std::mem::replace(&mut self.pending, rest));
        text.map_err(|_| not_utf8())
    }

    /// Ends the input.
    ///
    /// # Errors
    /// An incomplete character at the end.
    pub fn finish(self) -> std::io::Result<()> {
        if self.pending.is_empty() {
            Ok(())
        } else {
            Err(not_utf8())
        }
    }
}

fn not_utf8() -> std::io::Error {
    let what = "the text is not valid UTF-8";
    std::io::Error::new(std::io::ErrorKind::InvalidData, what)
}

/// Iterates over the tokens of a file, without BOS and EOS.
pub struct Tokens<'a> {
    text: &'a Text,
    path: PathBuf,
    from: Box<dyn Read>,
    /// File size in bytes; 0 if unknown.
    bytes: u64,
    /// Bytes read.
    read: u64,
    utf8: Utf8,
    /// `None` at the end of the file.
    encoder: Option<Encoder<'a>>,
    ready: Vec<u32>,
    /// Tokens that may still be returned.
    left: u64,
}

impl<'a> Tokens<'a> {
    /// The first `limit` tokens of the file `path`, or all. Tokenizes the first block at once, so that a memory plan
    /// made afterwards counts the tokenizer's memory.
    ///
    /// # Errors
    /// A file that cannot be opened, and errors of [`Tokens::next`].
    pub fn open(text: &'a Text, path: &Path, limit: Option<u64>) -> Result<Self, Failure> {
        let file = File::open(path).map_err(Failure::file(path))?;
        let mut tokens = Self {
            text,
            path: path.to_owned(),
            bytes: file.metadata().map_or(0, |m| m.len()),
            from: Box::new(file),
            read: 0,
            utf8: Utf8::default(),
            encoder: Some(text.tokenizer().encoder()),
            ready: Vec::new(),
            left: limit.unwrap_or(u64::MAX),
        };
        tokens.read_on(&mut vec![0; BLOCK])?;
        Ok(tokens)
    }

    /// The next tokens, at most `most`; fewer only at the end of the text.
    ///
    /// # Errors
    /// A read error, invalid UTF-8, or a tokenizer error.
    pub fn next(&mut self, most: usize) -> Result<Vec<u32>, Failure> {
        let most = most.min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let mut block = vec![0; BLOCK];
        while self.ready.len() < most && self.encoder.is_some() {
            self.read_on(&mut block)?;
        }
        let rest = self.ready.split_off(most.min(self.ready.len()));
        let next = std::mem::replace(&mut self.ready, rest);
        self.left -= next.len() as u64;
        Ok(next)
    }

    /// All remaining tokens.
    ///
    /// # Errors
    /// As [`Tokens::next`].
    pub fn rest(mut self) -> Result<Vec<u32>, Failure> {
        let mut all = self.next(usize::MAX)?;
        all.shrink_to_fit();
        Ok(all)
    }

    /// File size in bytes, for a progress bar.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes read so far.
    pub fn bytes_read(&self) -> u64 {
        self.read
    }

    fn read_on(&mut self, block: &mut [u8]) -> Result<(), Failure> {
        let failed = |e| Failure::file(&self.path)(e);
        let n = match self.from.read(block) {
            Ok(n) => n,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => return Ok(()),
            Err(e) => return Err(failed(e)),
        };
        let known = self.ready.len();
        self.read += n as u64;
        match n {
            0 => {
                std::mem::take(&mut self.utf8).finish().map_err(failed)?;
                if let Some(encoder) = self.encoder.take() {
                    encoder.finish(&mut self.ready)?;
                }
            }
            n => {
                let piece = self.utf8.push(&block[..n]).map_err(failed)?;
                if let Some(encoder) = &mut self.encoder {
                    encoder.push(&piece, &mut self.ready)?;
                }
            }
        }
        Ok(self.text.check(&self.ready[known..])?)
    }
}
