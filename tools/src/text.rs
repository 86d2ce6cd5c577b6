//! A text as tokens, read and tokenised piece by piece: what it takes does not grow with it.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use emberflow_engine::Text;
use emberflow_models::tokenizer::Encoder;

use crate::Failure;

/// Bytes that are read at once.
pub const BLOCK: usize = 64 << 10;

/// Tokens of a window: `asked`, or `usual` where the model takes as many.
///
/// # Errors
/// Wrong usage, where the model does not take 2 to `most` tokens of that.
pub fn window(asked: Option<u32>, usual: u32, most: u32) -> Result<u32, Failure> {
    let window = asked.unwrap_or(usual.min(most));
    if window < 2 || window > most {
        return Err(Failure::usage(format!(
            "--window {window}: this model takes 2 to {most}"
        )));
    }
    Ok(window)
}

/// Bytes that come in blocks, as text.
#[derive(Debug, Default)]
pub struct Utf8 {
    /// The begin of a character.
    pending: Vec<u8>,
}

impl Utf8 {
    /// The text that `bytes` complete.
    ///
    /// # Errors
    /// Bytes that are not UTF-8.
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

    /// Nothing more comes.
    ///
    /// # Errors
    /// Half a character at the end.
    pub fn finish(self) -> std::io::Result<()> {
        match self.pending.is_empty() {
            true => Ok(()),
            false => Err(not_utf8()),
        }
    }
}

fn not_utf8() -> std::io::Error {
    let what = "the text is not valid UTF-8";
    std::io::Error::new(std::io::ErrorKind::InvalidData, what)
}

/// The tokens of a file, as they are asked for, without those that a model wants around a text.
pub struct Tokens<'a> {
    text: &'a Text,
    path: PathBuf,
    from: Box<dyn Read>,
    /// Bytes of the file, 0 where nobody knows.
    bytes: u64,
    /// Bytes read.
    read: u64,
    utf8: Utf8,
    /// None at the end of the file.
    encoder: Option<Encoder<'a>>,
    ready: Vec<u32>,
    /// Tokens still to give at the most.
    left: u64,
}

impl<'a> Tokens<'a> {
    /// The first `limit` tokens of the file `path`, or all. The first block is tokenised at once, so that a
    /// plan of memory that is made afterwards counts what the tokenizer takes.
    ///
    /// # Errors
    /// A file that cannot be opened, and those of [`Tokens::next`].
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

    /// The next `most` tokens, fewer at the end, none behind it.
    ///
    /// # Errors
    /// A file that cannot be read or is no text, or what the tokenizer refuses.
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

    /// All tokens that were not given yet.
    ///
    /// # Errors
    /// As [`Tokens::next`].
    pub fn rest(mut self) -> Result<Vec<u32>, Failure> {
        let mut all = self.next(usize::MAX)?;
        all.shrink_to_fit();
        Ok(all)
    }

    /// Bytes of the file, for a progress bar.
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
