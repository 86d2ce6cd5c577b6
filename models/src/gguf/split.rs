//! Models split into several GGUF files, as written by `llama-gguf-split` and llama.cpp's
//! converter.
//!
//! ```text
//! NAME-00001-of-00003.gguf   the metadata, and tensors or none
//! NAME-00002-of-00003.gguf   tensors, and of the metadata the keys below alone
//! NAME-00003-of-00003.gguf
//!
//! split.no              place in the set, from 0
//! split.count           number of files
//! split.tensors.count   tensors of all files together
//! ```
//!
//! llama.cpp expects the first file; here any part may be named. Parts must keep their names, in one
//! folder.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::header::{self, Header};
use crate::error::Error;
use crate::file::DataFile;
use crate::metadata::Metadata;

const NO: &str = "split.no";
const COUNT: &str = "split.count";
const TENSORS: &str = "split.tensors.count";

/// A model's files, with the metadata of the first and the tensors of all.
pub(super) struct Set {
    /// The common part of the files' names, without number and ending.
    pub(super) name: String,
    pub(super) files: Vec<DataFile>,
    pub(super) header: Header,
}

/// The name of a part: `PREFIX-00002-of-00003.gguf`.
struct PartName {
    prefix: String,
    /// From 1.
    number: u32,
    count: u32,
}

impl PartName {
    fn parse(path: &Path) -> Option<Self> {
        let stem = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
        let (rest, count) = stem.rsplit_once("-of-")?;
        let (prefix, number) = rest.rsplit_once('-')?;
        let parse = |digits: &str| {
            let plain = digits.len() >= 5 && digits.bytes().all(|b| b.is_ascii_digit());
            plain.then(|| digits.parse::<u32>().ok())?
        };
        let (number, count) = (parse(number)?, parse(count)?);
        (1..=count).contains(&number).then(|| Self {
            prefix: prefix.to_owned(),
            number,
            count,
        })
    }

    /// The path of part `number`, from 1, in the folder of `path`.
    fn of(&self, path: &Path, number: u32) -> PathBuf {
        let Self { prefix, count, .. } = self;
        path.with_file_name(format!("{prefix}-{number:05}-of-{count:05}.gguf"))
    }
}

/// The common part of the names of a set of files of which `path` is one.
pub(super) fn prefix(path: &Path) -> Option<String> {
    Some(PartName::parse(path)?.prefix)
}

/// The existing parts of the set of `path`; none unless its name is that of a part.
pub(super) fn parts_of(path: &Path) -> Vec<PathBuf> {
    let Some(name) = PartName::parse(path) else {
        return Vec::new();
    };
    // A split.count has 16 bits.
    let all = (1..=name.count.min(u16::MAX.into())).map(|number| name.of(path, number));
    all.filter(|part| part.exists()).collect()
}

/// Opens the model with `path` as its only file or any part.
pub(super) fn open(path: &Path) -> Result<Set, Error> {
    let file = DataFile::open(path)?;
    let header = header::read(&file)?;
    match header.metadata.u32(COUNT)? {
        Some(count) if count > 1 => open_parts(path, count, file, header),
        _ => Ok(Set {
            name: path.file_stem().map_or_else(
                || "model".into(),
                |stem| stem.to_string_lossy().into_owned(),
            ),
            files: vec![file],
            header,
        }),
    }
}

/// Opens the `count` parts next to `path`, which is one of them and already open.
fn open_parts(path: &Path, count: u32, file: DataFile, header: Header) -> Result<Set, Error> {
    let Some(name) = PartName::parse(path) else {
        let why = format!(
            "this is a part of a split model, and the others are found by their names; give it the \
             name it was written with, such as NAME-00001-of-{count:05}.gguf, or join the parts \
             with llama-gguf-split --merge (parts that are concatenated are no file)"
        );
        return Err(header.metadata.unsupported(COUNT, &why));
    };
    if name.count != count {
        let expected = format!("{}, as the file's name says", name.count);
        return Err(header.metadata.bad(COUNT, &expected));
    }
    let mut named = Some((file, header));
    let (mut files, mut whole): (Vec<DataFile>, Option<Header>) = (Vec::new(), None);
    let mut total = None;
    for number in 1..=count {
        let (file, mut header) = match named.take_if(|_| number == name.number) {
            Some(named) => named,
            None => open_part(&name.of(path, number), number, count)?,
        };
        check_part(&header.metadata, number, count, &mut total)?;
        for tensor in &mut header.tensors {
            tensor.file = files.len();
        }
        match &mut whole {
            None => whole = Some(header),
            Some(whole) => whole.tensors.append(&mut header.tensors),
        }
        files.push(file);
    }
    let header = whole.ok_or_else(|| Error::MissingFile {
        path: path.to_owned(),
        why: "the set has no parts".into(),
    })?;
    check_tensors(&files, &header)?;
    Ok(Set {
        name: name.prefix,
        files,
        header,
    })
}

fn open_part(path: &Path, number: u32, count: u32) -> Result<(DataFile, Header), Error> {
    if !path.exists() {
        return Err(Error::MissingFile {
            path: path.to_owned(),
            why: format!(
                "it is part {number} of {count} of the model; put all parts into one folder, with the \
                 names they were published with"
            ),
        });
    }
    let file = DataFile::open(path)?;
    let header = header::read(&file)?;
    Ok((file, header))
}

/// Checks that a file is the part that its name says, of the same set as those before it. `total`:
/// the number of tensors that the parts declare.
fn check_part(
    part: &Metadata,
    number: u32,
    count: u32,
    total: &mut Option<u32>,
) -> Result<(), Error> {
    if part.u32(COUNT)? != Some(count) {
        let expected = format!("{count}, as in the other parts: it is a file of another set");
        return Err(part.bad(COUNT, &expected));
    }
    if part.u32(NO)? != Some(number - 1) {
        let expected = format!(
            "{}, as its name says part {number}: the file has the name of another part",
            number - 1
        );
        return Err(part.bad(NO, &expected));
    }
    let tensors = part.u32(TENSORS)?;
    let of_first = *total.get_or_insert(tensors.unwrap_or_default());
    if tensors != Some(of_first) {
        let expected = format!("{of_first}, as in part 1: it is a file of another set");
        return Err(part.bad(TENSORS, &expected));
    }
    Ok(())
}

/// Checks that the parts contain as many tensors as they declare, each once.
fn check_tensors(files: &[DataFile], header: &Header) -> Result<(), Error> {
    let mut names = BTreeSet::new();
    if let Some(twice) = header.tensors.iter().find(|t| !names.insert(&t.name)) {
        return Err(Error::Duplicate {
            path: files[twice.file].path.clone(),
            what: "tensor",
            name: twice.name.clone(),
        });
    }
    if header.metadata.u32(TENSORS)? != u32::try_from(names.len()).ok() {
        let expected = format!(
            "{}, the tensors of all parts together: one of them is of another set",
            names.len()
        );
        return Err(header.metadata.bad(TENSORS, &expected));
    }
    Ok(())
}
