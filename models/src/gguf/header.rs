//! The header of a GGUF file, versions 2 and 3, little-endian.
//!
//! ```text
//! magic      4 bytes: GGUF, or PWRI where PowerInfer wrote the file
//! version    u32
//! tensors    u64: number of tensor entries
//! keys       u64: number of metadata entries
//! metadata   keys × { key: string, type: u32, value }
//! entries    tensors × { name: string, n: u32, dims: n × u64, type: u32, offset: u64 }
//! padding    to a multiple of general.alignment (32 if the key is absent)
//! data       each entry's offset counts from here, a multiple of the alignment
//! ```
//! A string is a u64 length and that many bytes; an array is an element type, a
//! u64 count and the elements. Dimensions are listed innermost first.

use emberflow_kernels::Block;
use std::collections::BTreeSet;
use std::io::{BufReader, Read};

use crate::dtype::DType;
use crate::error::Error;
use crate::file::DataFile;
use crate::metadata::{Metadata, Value};
use crate::store::shape_text;

/// Maximum header length in bytes; vocabularies take a few MiB.
const MAX_HEADER: u64 = 256 << 20;
/// Maximum array elements in the metadata, over all arrays.
const MAX_ELEMENTS: u64 = 1 << 23;
/// Maximum nesting of arrays.
const MAX_DEPTH: u32 = 4;
/// Maximum length of a key or tensor name in bytes.
const MAX_NAME: usize = u16::MAX as usize;
/// Maximum dimensions of a tensor.
const MAX_DIMS: u32 = 4;
const MAX_ALIGNMENT: u32 = 1 << 20;
const DEFAULT_ALIGNMENT: u32 = 32;

/// Supported element types.
pub(super) const DTYPES: &str = "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, \
     IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ4_NL, IQ4_XS, TQ1_0, TQ2_0, MXFP4, Q1_0, Q2_0";

/// A parsed header.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) magic: [u8; 4],
    pub(super) metadata: Metadata,
    pub(super) tensors: Vec<Raw>,
}

/// A tensor entry whose bytes are inside the file.
#[derive(Debug)]
pub(super) struct Raw {
    pub(super) name: String,
    /// Outermost dimension first.
    pub(super) shape: Vec<usize>,
    pub(super) dtype: DType,
    /// Index into the files of the set; 0 for a model in one file.
    pub(super) file: usize,
    /// From the start of the file.
    pub(super) offset: u64,
    bytes: u64,
}

/// Reads and checks the whole header.
pub(super) fn read(file: &DataFile) -> Result<Header, Error> {
    let (mut header, end) = parse(file)?;
    let alignment = alignment(&header.metadata)?;
    let data = end.next_multiple_of(alignment);
    place(file, &mut header.tensors, data, alignment)?;
    Ok(header)
}

/// Bytes of the header of a file that may be only the beginning of one; `None` if it ends within its header.
pub(super) fn len(file: &DataFile) -> Result<Option<u64>, Error> {
    match parse(file) {
        Ok((_, end)) => Ok(Some(end)),
        Err(Error::Truncated { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Reads the header without its padding, and its length; tensors have their offsets within the data.
fn parse(file: &DataFile) -> Result<(Header, u64), Error> {
    let mut cursor = Cursor {
        file,
        reader: BufReader::new(file.reader()),
        at: 0,
        elements: MAX_ELEMENTS,
    };
    let magic = cursor.bytes("the magic")?;
    let version = cursor.u32("the version")?;
    if !matches!(version, 2 | 3) {
        let found = match version.swap_bytes() {
            1..=3 => format!("{version:#x}, a big-endian file"),
            _ => version.to_string(),
        };
        return Err(cursor.bad(4, "the version", found, "2 or 3, little-endian"));
    }
    let tensors = cursor.u64("the number of tensors")?;
    let keys = cursor.u64("the number of keys")?;

    // Do not allocate by untrusted counts: a forged count runs into the end of the file.
    let mut metadata = Metadata::new(&file.path);
    for _ in 0..keys {
        let key = cursor.name("a key")?;
        let value = cursor.value(&key)?;
        metadata.insert(key, value)?;
    }
    let mut list = Vec::new();
    let mut names = BTreeSet::new();
    for _ in 0..tensors {
        let tensor = cursor.tensor()?;
        if !names.insert(tensor.name.clone()) {
            return Err(Error::Duplicate {
                path: file.path.clone(),
                what: "tensor",
                name: tensor.name,
            });
        }
        list.push(tensor);
    }
    let header = Header {
        magic,
        metadata,
        tensors: list,
    };
    Ok((header, cursor.at))
}

fn alignment(metadata: &Metadata) -> Result<u64, Error> {
    const KEY: &str = "general.alignment";
    match metadata.u32(KEY)?.unwrap_or(DEFAULT_ALIGNMENT) {
        value if value.is_power_of_two() && value <= MAX_ALIGNMENT => Ok(value.into()),
        _ => Err(metadata.bad(KEY, &format!("a power of two, at most {MAX_ALIGNMENT}"))),
    }
}

/// Turns offsets within the data into file positions, and checks that tensors are aligned, inside
/// the file and disjoint.
fn place(file: &DataFile, tensors: &mut [Raw], data: u64, alignment: u64) -> Result<(), Error> {
    for tensor in &mut *tensors {
        if !tensor.offset.is_multiple_of(alignment) {
            return Err(Error::TensorRange {
                path: file.path.clone(),
                tensor: tensor.name.clone(),
                found: format!("at offset {}", tensor.offset),
                expected: format!("a multiple of {alignment}"),
            });
        }
        let start = data.checked_add(tensor.offset);
        let end = start.and_then(|start| start.checked_add(tensor.bytes));
        match (start, end) {
            (Some(start), Some(end)) if end <= file.len => tensor.offset = start,
            _ => {
                return Err(Error::Truncated {
                    path: file.path.clone(),
                    what: format!("tensor {}", tensor.name),
                    needed: end.unwrap_or(u64::MAX),
                    len: file.len,
                });
            }
        }
    }
    tensors.sort_by_key(|tensor| tensor.offset);
    for pair in tensors.windows(2) {
        let [before, after] = pair else { continue };
        let end = before.offset + before.bytes;
        if end > after.offset {
            return Err(Error::TensorRange {
                path: file.path.clone(),
                tensor: after.name.clone(),
                found: format!("at byte {}", after.offset),
                expected: format!("{end} or later, where {} ends", before.name),
            });
        }
    }
    Ok(())
}

/// The element type with ggml's number `id`, or a description of an unsupported one.
fn dtype(id: u32) -> Result<DType, String> {
    if let Some(block) = Block::from_gguf(id) {
        return Ok(DType::Block(block));
    }
    Ok(match id {
        0 => DType::F32,
        1 => DType::F16,
        26 => DType::I32,
        30 => DType::Bf16,
        _ => {
            let name = OTHER_TYPES.iter().find(|(number, _)| *number == id);
            return Err(name.map_or_else(
                || format!("number {id}, which ggml does not use"),
                |(_, name)| (*name).to_owned(),
            ));
        }
    })
}

/// ggml's other types by number (`enum ggml_type` in ggml.h), including removed ones.
const OTHER_TYPES: [(u32, &str); 16] = [
    (4, "Q4_2 (removed from ggml)"),
    (5, "Q4_3 (removed from ggml)"),
    (9, "Q8_1"),
    (15, "Q8_K"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (31, "Q4_0_4_4 (removed from ggml)"),
    (32, "Q4_0_4_8 (removed from ggml)"),
    (33, "Q4_0_8_8 (removed from ggml)"),
    (36, "IQ4_NL_4_4 (removed from ggml)"),
    (37, "IQ4_NL_4_8 (removed from ggml)"),
    (38, "IQ4_NL_8_8 (removed from ggml)"),
    (40, "NVFP4"),
];

/// Reads the header sequentially, never past the end of the file.
struct Cursor<'a> {
    file: &'a DataFile,
    reader: BufReader<&'a std::fs::File>,
    /// Bytes read so far.
    at: u64,
    /// Array elements still allowed.
    elements: u64,
}

impl Cursor<'_> {
    /// Checks that `count` more bytes exist before anything is allocated for them.
    fn claim(&mut self, count: u64, what: &str) -> Result<(), Error> {
        let needed = self.at.saturating_add(count);
        let (path, len) = (self.file.path.clone(), self.file.len);
        if needed > len {
            return Err(Error::Truncated {
                path,
                what: what.into(),
                needed,
                len,
            });
        }
        if needed > MAX_HEADER {
            return Err(Error::TooLarge {
                path,
                what: "the gguf header".into(),
                found: needed,
                limit: MAX_HEADER,
            });
        }
        self.at = needed;
        Ok(())
    }

    fn fill(&mut self, out: &mut [u8]) -> Result<(), Error> {
        let path = || self.file.path.clone();
        self.reader.read_exact(out).map_err(|source| Error::Io {
            path: path(),
            op: "read",
            source,
        })
    }

    fn bytes<const N: usize>(&mut self, what: &str) -> Result<[u8; N], Error> {
        self.claim(N as u64, what)?;
        let mut out = [0; N];
        self.fill(&mut out)?;
        Ok(out)
    }

    fn u32(&mut self, what: &str) -> Result<u32, Error> {
        self.bytes(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Result<u64, Error> {
        self.bytes(what).map(u64::from_le_bytes)
    }

    fn string(&mut self, what: &str) -> Result<String, Error> {
        let length = self.u64(what)?;
        let start = self.at;
        self.claim(length, what)?;
        let mut bytes = vec![0; length as usize];
        self.fill(&mut bytes)?;
        String::from_utf8(bytes).map_err(|error| Error::NotUtf8 {
            path: self.file.path.clone(),
            offset: start + error.utf8_error().valid_up_to() as u64,
        })
    }

    /// A key or a tensor's name.
    fn name(&mut self, what: &str) -> Result<String, Error> {
        let at = self.at;
        let name = self.string(what)?;
        if name.len() > MAX_NAME {
            let found = format!("{} bytes long", name.len());
            return Err(self.bad(at, what, found, &format!("at most {MAX_NAME}")));
        }
        Ok(name)
    }

    /// The value of `key`, preceded by its type.
    fn value(&mut self, key: &str) -> Result<Value, Error> {
        let what = format!("the value of {key}");
        let kind = self.u32(&what)?;
        self.typed(kind, &what, 0)
    }

    fn typed(&mut self, kind: u32, what: &str, depth: u32) -> Result<Value, Error> {
        let at = self.at;
        Ok(match kind {
            0 => Value::Uint(u8::from_le_bytes(self.bytes(what)?).into()),
            1 => Value::Int(i8::from_le_bytes(self.bytes(what)?).into()),
            2 => Value::Uint(u16::from_le_bytes(self.bytes(what)?).into()),
            3 => Value::Int(i16::from_le_bytes(self.bytes(what)?).into()),
            4 => Value::Uint(self.u32(what)?.into()),
            5 => Value::Int(i32::from_le_bytes(self.bytes(what)?).into()),
            6 => Value::Float(f32::from_le_bytes(self.bytes(what)?).into()),
            7 => match self.bytes(what)? {
                [0] => Value::Bool(false),
                [1] => Value::Bool(true),
                [other] => return Err(self.bad(at, what, other.to_string(), "0 or 1, for a bool")),
            },
            8 => Value::Text(self.string(what)?),
            9 => self.array(what, depth)?,
            10 => Value::Uint(self.u64(what)?),
            11 => Value::Int(i64::from_le_bytes(self.bytes(what)?)),
            12 => Value::Float(f64::from_le_bytes(self.bytes(what)?)),
            _ => {
                return Err(self.bad(at - 4, what, format!("of type {kind}"), "a type of 0 to 12"));
            }
        })
    }

    fn array(&mut self, what: &str, depth: u32) -> Result<Value, Error> {
        let at = self.at;
        if depth == MAX_DEPTH {
            return Err(self.bad(
                at,
                what,
                "nested deeper".into(),
                &format!("at most {MAX_DEPTH} arrays in each other"),
            ));
        }
        let kind = self.u32(what)?;
        let count = self.u64(what)?;
        self.elements = match self.elements.checked_sub(count) {
            Some(left) => left,
            None => {
                let (path, what) = (
                    self.file.path.clone(),
                    format!("{what} (in elements, with all arrays before it)"),
                );
                return Err(Error::TooLarge {
                    path,
                    what,
                    found: count,
                    limit: MAX_ELEMENTS,
                });
            }
        };
        let mut list = Vec::new();
        for _ in 0..count {
            list.push(self.typed(kind, what, depth + 1)?);
        }
        Ok(Value::List(list))
    }

    /// One entry, with its offset relative to the start of the data.
    fn tensor(&mut self) -> Result<Raw, Error> {
        let name = self.name("a tensor's name")?;
        let what = format!("the entry of tensor {name}");
        let at = self.at;
        let count = self.u32(&what)?;
        if !(1..=MAX_DIMS).contains(&count) {
            return Err(self.bad(
                at,
                &what,
                format!("{count} dimensions"),
                &format!("1 to {MAX_DIMS}"),
            ));
        }
        let mut shape = Vec::new();
        for _ in 0..count {
            let dim = self.u64(&what)?;
            match usize::try_from(dim) {
                Ok(dim @ 1..) => shape.insert(0, dim),
                _ => {
                    return Err(self.bad(
                        self.at - 8,
                        &what,
                        format!("a dimension of {dim}"),
                        "1 or more",
                    ));
                }
            }
        }
        let dtype = dtype(self.u32(&what)?).map_err(|found| Error::WrongDtype {
            path: self.file.path.clone(),
            tensor: name.clone(),
            found,
            supported: DTYPES.into(),
        })?;
        let offset = self.u64(&what)?;
        let [outer @ .., cols] = shape.as_slice() else {
            return Err(self.bad(at, &what, "no dimension".into(), "1 or more"));
        };
        let rows = outer
            .iter()
            .try_fold(1usize, |rows, &dim| rows.checked_mul(dim));
        match rows.and_then(|rows| dtype.bytes(rows, *cols)) {
            Some(bytes) => Ok(Raw {
                name,
                shape,
                dtype,
                file: 0,
                offset,
                bytes,
            }),
            None => Err(Error::WrongShape {
                path: self.file.path.clone(),
                tensor: name,
                found: shape_text(&shape),
                expected: format!(
                    "a size that fits in 64 bits, in rows of a multiple of {} for {}",
                    dtype.block().0,
                    dtype.name()
                ),
            }),
        }
    }

    fn bad(&self, offset: u64, what: &str, found: String, expected: &str) -> Error {
        let path = self.file.path.clone();
        Error::Header {
            path,
            offset,
            what: what.into(),
            found,
            expected: expected.into(),
        }
    }
}
