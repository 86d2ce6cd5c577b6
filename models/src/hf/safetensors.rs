//! Safetensors headers, one file or many.
//!
//! ```text
//! byte 0        u64, little-endian: length n of the header
//! byte 8        n bytes of JSON: {name: {dtype, shape, data_offsets: [begin, end]}}
//! byte 8 + n    tensor data; offsets count from here, without gaps or overlaps
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Component, Path};

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};

use crate::error::Error;
use crate::file::{DataFile, read_text};
use crate::json::json_error;
use crate::store::{Packed, shape_text};

/// The supported element types.
pub(super) const DTYPES: &str =
    "F32, F16, BF16, F8_E4M3 with scales for blocks, and codes of a quantization_config";

/// Longest header, the format's own limit.
const MAX_HEADER: u64 = 100_000_000;
/// Maximum length of a shard index.
const MAX_INDEX: u64 = 64 << 20;
/// Maximum shards; each stays open.
const MAX_SHARDS: usize = 512;

/// A tensor as described by its file, whose bytes are inside the file.
#[derive(Debug)]
pub(super) struct Raw {
    pub(super) name: String,
    pub(super) dtype: String,
    pub(super) shape: Vec<usize>,
    /// From the start of the file.
    pub(super) offset: u64,
    /// The parts of a matrix that was joined from several tensors.
    pub(super) packed: Option<Packed>,
    /// File and position of the exponents of such a matrix in MXFP4.
    pub(super) powers: Option<(usize, u64)>,
}

#[derive(serde::Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (u64, u64),
}

/// The header's entries in file order, to detect repeated names.
struct Entries(Vec<(String, Entry)>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct InOrder;
        impl<'de> Visitor<'de> for InOrder {
            type Value = Entries;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut list = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                    } else {
                        list.push((name, map.next_value()?));
                    }
                }
                Ok(Entries(list))
            }
        }
        deserializer.deserialize_map(InOrder)
    }
}

/// Bytes per element of the format's types, supported or not.
pub(super) fn element_bytes(dtype: &str) -> Option<u64> {
    match dtype {
        "BOOL" | "U8" | "I8" | "F8_E5M2" | "F8_E4M3" | "F8_E8M0" => Some(1),
        "I16" | "U16" | "F16" | "BF16" => Some(2),
        "I32" | "U32" | "F32" => Some(4),
        "I64" | "U64" | "F64" => Some(8),
        _ => None,
    }
}

/// Reads and checks one file's header.
pub(super) fn read_header(file: &DataFile) -> Result<Vec<Raw>, Error> {
    let truncated = |what: &str, needed| Error::Truncated {
        path: file.path.clone(),
        what: what.into(),
        needed,
        len: file.len,
    };
    let mut length = [0; 8];
    file.read_at(&mut length, 0, &|| "the header's length".into())?;
    let length = u64::from_le_bytes(length);
    if length > MAX_HEADER {
        let what = "the safetensors header".into();
        return Err(Error::TooLarge {
            path: file.path.clone(),
            what,
            found: length,
            limit: MAX_HEADER,
        });
    }
    let data_start = 8 + length;
    if data_start > file.len {
        return Err(truncated("the header", data_start));
    }
    let mut header = vec![0; length as usize];
    file.read_at(&mut header, 8, &|| "the header".into())?;
    let Entries(mut entries) =
        serde_json::from_slice(&header).map_err(|error| json_error(&file.path, &error))?;

    entries.sort_by(|a, b| (a.1.data_offsets, &a.0).cmp(&(b.1.data_offsets, &b.0)));
    let mut names = BTreeSet::new();
    let mut end_before = 0;
    let mut list = Vec::with_capacity(entries.len());
    for (name, entry) in &entries {
        if !names.insert(name) {
            return Err(Error::Duplicate {
                path: file.path.clone(),
                what: "tensor",
                name: name.clone(),
            });
        }
        end_before = check_entry(file, name, entry, end_before)?;
        list.push(Raw {
            name: name.clone(),
            dtype: entry.dtype.clone(),
            shape: entry.shape.clone(),
            offset: data_start + entry.data_offsets.0,
            packed: None,
            powers: None,
        });
        if end_before > file.len - data_start {
            return Err(truncated(
                &format!("tensor {name}"),
                data_start.saturating_add(end_before),
            ));
        }
    }
    if data_start + end_before != file.len {
        return Err(Error::Header {
            path: file.path.clone(),
            offset: data_start + end_before,
            what: "the end of the last tensor".into(),
            found: (data_start + end_before).to_string(),
            expected: format!("{}, the end of the file", file.len),
        });
    }
    Ok(list)
}

/// Checks that a tensor starts at the end of the previous one and has the length of its shape and
/// type; returns its end.
fn check_entry(file: &DataFile, name: &str, entry: &Entry, end_before: u64) -> Result<u64, Error> {
    let (begin, end) = entry.data_offsets;
    let range = |found: String, expected: String| {
        Err(Error::TensorRange {
            path: file.path.clone(),
            tensor: name.to_owned(),
            found,
            expected,
        })
    };
    if begin != end_before {
        return range(
            format!("bytes {begin}..{end}"),
            format!("a start at {end_before}, where the one before ends"),
        );
    }
    let Some(element) = element_bytes(&entry.dtype) else {
        return Err(Error::WrongDtype {
            path: file.path.clone(),
            tensor: name.to_owned(),
            found: entry.dtype.clone(),
            supported: DTYPES.into(),
        });
    };
    let bytes = entry
        .shape
        .iter()
        .try_fold(element, |bytes, &dim| bytes.checked_mul(dim as u64));
    if end.checked_sub(begin) != bytes || bytes.is_none() {
        let size = bytes.map_or_else(
            || "a size that overflows".into(),
            |bytes| format!("{bytes} bytes"),
        );
        return range(
            format!("bytes {begin}..{end}"),
            format!("{size}, for {} {}", entry.dtype, shape_text(&entry.shape)),
        );
    }
    Ok(end)
}

/// Opens the shards named by an index; every tensor must be in its shard.
pub(super) fn open_shards(
    folder: &Path,
    index_path: &Path,
) -> Result<Vec<(DataFile, Vec<Raw>)>, Error> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let text = read_text(index_path, MAX_INDEX)?.unwrap_or_default();
    let index: Index =
        serde_json::from_str(&text).map_err(|error| json_error(index_path, &error))?;

    let mut shards: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (tensor, shard) in &index.weight_map {
        let mut parts = Path::new(shard).components();
        if !matches!((parts.next(), parts.next()), (Some(Component::Normal(name)), None) if name == shard.as_str())
        {
            let (path, tensor, shard) = (index_path.to_owned(), tensor.clone(), shard.clone());
            return Err(Error::ShardOutside {
                path,
                tensor,
                shard,
            });
        }
        shards.entry(shard).or_default().push(tensor);
    }
    if shards.len() > MAX_SHARDS {
        let (path, what) = (
            index_path.to_owned(),
            "the list of shards (in entries)".into(),
        );
        return Err(Error::TooLarge {
            path,
            what,
            found: shards.len() as u64,
            limit: MAX_SHARDS as u64,
        });
    }
    let mut opened = Vec::with_capacity(shards.len());
    for (shard, tensors) in shards {
        let path = folder.join(shard);
        if !path.exists() {
            let why = format!("{} names it; fetch all shards", index_path.display());
            return Err(Error::MissingFile { path, why });
        }
        let file = DataFile::open(&path)?;
        let header = read_header(&file)?;
        let present: BTreeSet<&str> = header.iter().map(|raw| raw.name.as_str()).collect();
        if let Some(tensor) = tensors.into_iter().find(|tensor| !present.contains(tensor)) {
            return Err(Error::NotInShard {
                path,
                tensor: tensor.to_owned(),
            });
        }
        opened.push((file, header));
    }
    Ok(opened)
}
