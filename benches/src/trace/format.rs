//! File format of an access trace.
//!
//! ```text
//!   0   8  magic     "EMBTRAC1"
//!   8   4  length    of the header, u32 little endian
//!  12      header    JSON: the model's sizes, the bundles' places, activation counts
//!          tokens    each: 1, or 2 where a sequence begins; for each layer the number of
//!                    neurons that are needed and their packed ids, ascending, each as its
//!                    distance to the last (the first to 0), LEB128
//!          end       0, number of tokens u64, xxh3 of everything before it u64
//! ```
//!
//! In a model with experts, a layer's chosen experts replace neurons.
//!
//! Written and read as a stream, one token at a time.

use std::io::{Read, Write};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

const MAGIC: &[u8; 8] = b"EMBTRAC1";

/// Longest header in bytes: counts for a few hundred million neurons.
const MAX_HEADER: u32 = 1 << 30;

/// Facts about the model that a replay needs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// Name of the model.
    pub model: String,
    /// Whether the trace records experts; then they replace neurons, and a whole expert replaces a
    /// bundle.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub experts: bool,
    /// Number of layers; each has one FFN.
    pub layers: usize,
    /// Neurons per FFN.
    pub neurons: usize,
    /// Bytes of a bundle on flash.
    pub stride: u32,
    /// Offset in a bundle at which a read of Up and Down begins.
    pub rest_read: u32,
    /// Alignment of direct reads in bytes.
    pub sector: u32,
    /// File offset of each FFN's bundles.
    pub offsets: Vec<u64>,
    /// Tokens of the container's statistics; 0 without.
    pub stats_tokens: u64,
    /// Activation counts by layer in packed order; empty without statistics.
    pub counts: Vec<Vec<u64>>,
}

impl Header {
    /// What the trace records, in words.
    pub fn unit(&self) -> &'static str {
        if self.experts { "experts" } else { "neurons" }
    }
}

/// Errors of a trace.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// An I/O error.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// Invalid contents.
    #[error("not a whole trace: {0}; record it again")]
    Bad(String),
}

/// Writes a trace.
pub struct Writer<W: Write> {
    out: Hashing<W>,
    layers: usize,
    tokens: u64,
    buffer: Vec<u8>,
}

struct Hashing<T> {
    inner: T,
    hash: Xxh3,
}

impl<W: Write> Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.hash.update(bytes);
        self.inner.write_all(bytes)
    }
}

impl<W: Write> Writer<W> {
    /// Begins a trace.
    pub fn new(inner: W, header: &Header) -> Result<Self, TraceError> {
        let mut out = Hashing {
            inner,
            hash: Xxh3::new(),
        };
        let json = serde_json::to_vec(header).map_err(std::io::Error::from)?;
        let len = u32::try_from(json.len()).ok().filter(|&n| n <= MAX_HEADER);
        let len = len.ok_or_else(|| TraceError::Bad("the header is too long".into()))?;
        out.write(MAGIC)?;
        out.write(&len.to_le_bytes())?;
        out.write(&json)?;
        Ok(Self {
            out,
            layers: header.layers,
            tokens: 0,
            buffer: Vec::new(),
        })
    }

    /// Appends a token: the needed neurons of each layer, ascending.
    pub fn token(&mut self, begins: bool, layers: &[Vec<u32>]) -> Result<(), TraceError> {
        debug_assert_eq!(layers.len(), self.layers);
        self.buffer.clear();
        self.buffer.push(if begins { 2 } else { 1 });
        for ids in layers {
            leb128(&mut self.buffer, ids.len() as u32);
            let mut last = 0;
            for &id in ids {
                leb128(&mut self.buffer, id - last);
                last = id;
            }
        }
        self.tokens += 1;
        self.out.write(&self.buffer)?;
        Ok(())
    }

    /// Ends the trace.
    pub fn finish(mut self) -> Result<W, TraceError> {
        self.out.write(&[0])?;
        self.out.write(&self.tokens.to_le_bytes())?;
        let sum = self.out.hash.digest();
        self.out.inner.write_all(&sum.to_le_bytes())?;
        self.out.inner.flush()?;
        Ok(self.out.inner)
    }
}

fn leb128(out: &mut Vec<u8>, mut n: u32) {
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

/// Reads a trace from a buffered source.
pub struct Reader<R: Read> {
    input: Hashing<R>,
    /// The header.
    pub header: Header,
    tokens: u64,
}

impl<R: Read> Hashing<R> {
    fn exact(&mut self, to: &mut [u8]) -> Result<(), TraceError> {
        self.inner.read_exact(to).map_err(|e| match e.kind() {
            std::io::ErrorKind::UnexpectedEof => TraceError::Bad("it ends too early".into()),
            _ => TraceError::Io(e),
        })?;
        self.hash.update(to);
        Ok(())
    }

    fn byte(&mut self) -> Result<u8, TraceError> {
        let mut byte = [0];
        self.exact(&mut byte)?;
        Ok(byte[0])
    }

    fn number(&mut self) -> Result<u32, TraceError> {
        let mut n = 0u32;
        for shift in (0..35).step_by(7) {
            let byte = self.byte()?;
            if shift == 28 && byte > 0x0f {
                break;
            }
            n |= u32::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(n);
            }
        }
        Err(TraceError::Bad("a number has more than 32 bits".into()))
    }
}

impl<R: Read> Reader<R> {
    /// Opens a trace and reads its header.
    pub fn new(inner: R) -> Result<Self, TraceError> {
        let mut input = Hashing {
            inner,
            hash: Xxh3::new(),
        };
        let mut magic = [0; 8];
        input.exact(&mut magic)?;
        if magic != *MAGIC {
            return Err(TraceError::Bad("it does not begin with EMBTRAC1".into()));
        }
        let mut len = [0; 4];
        input.exact(&mut len)?;
        let len = u32::from_le_bytes(len);
        if len > MAX_HEADER {
            return Err(TraceError::Bad(format!("a header of {len} bytes")));
        }
        // Read gradually, so that a false length costs no memory.
        let mut json = Vec::new();
        (&mut input.inner).take(len.into()).read_to_end(&mut json)?;
        input.hash.update(&json);
        let header: Header =
            serde_json::from_slice(&json).map_err(|e| TraceError::Bad(e.to_string()))?;
        check(&header).map_err(TraceError::Bad)?;
        Ok(Self {
            input,
            header,
            tokens: 0,
        })
    }

    /// Reads the next token's needed neurons by layer into `layers`. Returns whether it begins a
    /// sequence; `None` at the end, once that is verified.
    pub fn token(&mut self, layers: &mut Vec<Vec<u32>>) -> Result<Option<bool>, TraceError> {
        let begins = match self.input.byte()? {
            0 => return self.end().map(|()| None),
            1 => false,
            2 => true,
            other => return Err(TraceError::Bad(format!("a token begins with {other}"))),
        };
        layers.resize_with(self.header.layers, Vec::new);
        let neurons = self.header.neurons as u64;
        for ids in layers.iter_mut() {
            ids.clear();
            let count = self.input.number()?;
            if u64::from(count) > neurons {
                return Err(TraceError::Bad(format!("{count} of {neurons} neurons")));
            }
            let mut last = 0u64;
            for i in 0..count {
                let step = self.input.number()?;
                last += u64::from(step);
                if last >= neurons || (i > 0 && step == 0) {
                    return Err(TraceError::Bad(format!("neuron {last} of {neurons}")));
                }
                ids.push(last as u32);
            }
        }
        self.tokens += 1;
        Ok(Some(begins))
    }

    fn end(&mut self) -> Result<(), TraceError> {
        let mut word = [0; 8];
        self.input.exact(&mut word)?;
        let tokens = u64::from_le_bytes(word);
        if tokens != self.tokens {
            return Err(TraceError::Bad(format!(
                "{} tokens, its end says {tokens}",
                self.tokens
            )));
        }
        let sum = self.input.hash.digest();
        self.input.exact(&mut word)?;
        if u64::from_le_bytes(word) != sum {
            return Err(TraceError::Bad("the checksum does not match".into()));
        }
        // Bytes after the checksum were never verified.
        match std::io::copy(&mut self.input.inner, &mut std::io::sink())? {
            0 => Ok(()),
            more => Err(TraceError::Bad(format!("{more} bytes follow its end"))),
        }
    }
}

fn check(h: &Header) -> Result<(), String> {
    let total = h.layers.checked_mul(h.neurons);
    if h.layers == 0 || h.neurons == 0 || total.is_none_or(|n| n >= u32::MAX as usize) {
        return Err(format!("{} layers of {} neurons", h.layers, h.neurons));
    }
    if h.offsets.len() != h.layers || h.stride == 0 || h.rest_read >= h.stride || h.sector == 0 {
        return Err("the places of the bundles are not those of a container".into());
    }
    let last = u64::from(h.stride).checked_mul(h.neurons as u64);
    let fits = |o: &u64| last.is_some_and(|len| o.checked_add(len).is_some());
    if !h.offsets.iter().all(fits) {
        return Err("bundles beyond 2^64 bytes".into());
    }
    let counted = h.counts.is_empty()
        || h.counts.len() == h.layers && h.counts.iter().all(|c| c.len() == h.neurons);
    if !counted {
        return Err("activation counts of another model".into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    pub fn header() -> Header {
        Header {
            model: "m".into(),
            experts: false,
            layers: 2,
            neurons: 300,
            stride: 1024,
            rest_read: 512,
            sector: 512,
            offsets: vec![4096, 1 << 20],
            stats_tokens: 0,
            counts: Vec::new(),
        }
    }

    fn written() -> Vec<u8> {
        let mut w = Writer::new(Vec::new(), &header()).unwrap();
        w.token(true, &[vec![0, 1, 299], vec![]]).unwrap();
        w.token(false, &[vec![7], vec![128, 256]]).unwrap();
        w.finish().unwrap()
    }

    type Tokens = Vec<(bool, Vec<Vec<u32>>)>;

    fn read(bytes: &[u8]) -> Result<Tokens, TraceError> {
        let mut r = Reader::new(bytes)?;
        let (mut all, mut layers) = (Vec::new(), Vec::new());
        while let Some(begins) = r.token(&mut layers)? {
            all.push((begins, layers.clone()));
        }
        Ok(all)
    }

    #[test]
    fn round_trip() {
        let all = read(&written()).unwrap();
        assert_eq!(
            all,
            [
                (true, vec![vec![0, 1, 299], vec![]]),
                (false, vec![vec![7], vec![128, 256]])
            ]
        );
    }

    #[test]
    fn damaged_traces_are_refused() {
        let good = written();
        for cut in 0..good.len() {
            assert!(read(&good[..cut]).is_err(), "{cut}");
        }
        for more in [&b"\0"[..], &good] {
            let error = read(&[&good, more].concat()).unwrap_err().to_string();
            let reason = format!("{} bytes follow its end", more.len());
            assert!(error.contains(&reason), "{error}");
        }
        for at in 0..good.len() {
            for bit in [1, 0x80] {
                let mut bad = good.clone();
                bad[at] ^= bit;
                assert!(read(&bad).is_err(), "{at}");
            }
        }
    }
}
