//! GGUF files in parts, to change them.

use std::collections::BTreeMap;
use std::path::Path;

/// A file: its keys in order, and its tensors.
pub struct Gguf {
    /// Magic and version.
    start: Vec<u8>,
    keys: Vec<Key>,
    /// The tensors in order.
    pub tensors: Vec<Tensor>,
}

/// A key and the bytes of its value, after the type.
struct Key {
    name: String,
    kind: u32,
    value: Vec<u8>,
}

/// A tensor. Dimensions are in ggml's order: the innermost first.
#[derive(Clone)]
pub struct Tensor {
    /// Its name.
    pub name: String,
    /// Its dimensions.
    pub dims: Vec<u64>,
    kind: u32,
    data: Vec<u8>,
}

impl Tensor {
    /// The same under another name.
    pub fn renamed(&self, name: String) -> Self {
        Self {
            name,
            ..self.clone()
        }
    }

    /// A tensor of ones in f32.
    pub fn ones(name: String, dims: &[u64]) -> Self {
        let count: u64 = dims.iter().product();
        Self {
            name,
            dims: dims.to_vec(),
            kind: 0,
            data: 1f32.to_le_bytes().repeat(count as usize),
        }
    }
}

const U32: u32 = 4;
const TEXT: u32 = 8;
const LIST: u32 = 9;
const ALIGNMENT: usize = 32;

/// Bytes of a value of a type that has a fixed size.
fn size_of(kind: u32) -> usize {
    match kind {
        0 | 1 | 7 => 1,
        2 | 3 => 2,
        U32 | 5 | 6 => 4,
        10..=12 => 8,
        _ => panic!("type {kind}"),
    }
}

/// Bytes of a file, read from the front.
struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn take(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count);
        self.0 = rest;
        taken
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take(4).try_into().expect("4 bytes"))
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take(8).try_into().expect("8 bytes"))
    }

    fn text(&mut self) -> String {
        let len = self.u64() as usize;
        String::from_utf8(self.take(len).to_vec()).expect("a name")
    }

    fn skip_value(&mut self, kind: u32) {
        match kind {
            TEXT => {
                let len = self.u64() as usize;
                self.take(len);
            }
            LIST => {
                let (kind, count) = (self.u32(), self.u64());
                (0..count).for_each(|_| self.skip_value(kind));
            }
            _ => {
                self.take(size_of(kind));
            }
        }
    }
}

impl Gguf {
    /// Reads a file.
    pub fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).expect("a GGUF file");
        let mut rest = Rest(&bytes);
        let start = rest.take(8).to_vec();
        let [tensors, keys] = [rest.u64(), rest.u64()];
        let keys = (0..keys)
            .map(|_| {
                let (name, kind) = (rest.text(), rest.u32());
                let before = rest.0;
                rest.skip_value(kind);
                let value = before[..before.len() - rest.0.len()].to_vec();
                Key { name, kind, value }
            })
            .collect();
        let entries: Vec<(String, Vec<u64>, u32, u64)> = (0..tensors)
            .map(|_| {
                let (name, dims) = (rest.text(), rest.u32());
                let dims = (0..dims).map(|_| rest.u64()).collect();
                (name, dims, rest.u32(), rest.u64())
            })
            .collect();
        let first = (bytes.len() - rest.0.len()).next_multiple_of(ALIGNMENT);
        let data = &bytes[first..];
        // a tensor ends, with its padding, where the next one begins
        let begins = entries.iter().map(|entry| entry.3 as usize);
        let begins: BTreeMap<usize, ()> = begins.map(|begin| (begin, ())).collect();
        let tensors = entries.into_iter().map(|(name, dims, kind, begin)| {
            let begin = begin as usize;
            let end = begins.range(begin + 1..).next();
            let end = end.map_or(data.len(), |(end, ())| *end);
            Tensor {
                name,
                dims,
                kind,
                data: data[begin..end].to_vec(),
            }
        });
        Self {
            tensors: tensors.collect(),
            start,
            keys,
        }
    }

    /// Writes it.
    pub fn write(&self, path: &Path) {
        let mut out = self.start.clone();
        let text = |out: &mut Vec<u8>, text: &str| {
            out.extend((text.len() as u64).to_le_bytes());
            out.extend(text.as_bytes());
        };
        for count in [self.tensors.len(), self.keys.len()] {
            out.extend((count as u64).to_le_bytes());
        }
        for key in &self.keys {
            text(&mut out, &key.name);
            out.extend(key.kind.to_le_bytes());
            out.extend(&key.value);
        }
        let mut data = Vec::new();
        for tensor in &self.tensors {
            text(&mut out, &tensor.name);
            out.extend((tensor.dims.len() as u32).to_le_bytes());
            out.extend(tensor.dims.iter().flat_map(|dim| dim.to_le_bytes()));
            out.extend(tensor.kind.to_le_bytes());
            out.extend((data.len() as u64).to_le_bytes());
            data.extend(&tensor.data);
            data.resize(data.len().next_multiple_of(ALIGNMENT), 0);
        }
        out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
        out.extend(data);
        std::fs::write(path, out).expect("a GGUF file");
    }

    fn key(&self, name: &str) -> Option<&Key> {
        self.keys.iter().find(|key| key.name == name)
    }

    /// The architecture's name.
    pub fn arch(&self) -> String {
        let key = self.key("general.architecture").expect("an architecture");
        Rest(&key.value).text()
    }

    /// A number.
    pub fn u32(&self, name: &str) -> Option<u32> {
        let key = self.key(name).filter(|key| key.kind == U32)?;
        Some(Rest(&key.value).u32())
    }

    /// Sets a number, or adds it.
    pub fn set_u32(&mut self, name: &str, number: u32) {
        self.keys.retain(|key| key.name != name);
        self.keys.push(Key {
            name: name.into(),
            kind: U32,
            value: number.to_le_bytes().to_vec(),
        });
    }

    /// Appends to a list of integers, if the file has it with `len` of them, the largest or the smallest of
    /// them.
    pub fn grow(&mut self, name: &str, len: u64, largest: bool) {
        let Some(key) = (self.keys.iter_mut()).find(|key| key.name == name && key.kind == LIST)
        else {
            return;
        };
        let mut rest = Rest(&key.value);
        let (kind, count) = (rest.u32(), rest.u64());
        if count != len {
            return;
        }
        let entries = rest.0.chunks_exact(size_of(kind));
        // of integers that are not negative the most significant byte is last
        let by_value = |entry: &&[u8]| entry.iter().rev().copied().collect::<Vec<u8>>();
        let found = match largest {
            true => entries.max_by_key(by_value),
            false => entries.min_by_key(by_value),
        };
        let added = found.expect("a list").to_vec();
        key.value.extend(added);
        key.value[4..12].copy_from_slice(&(len + 1).to_le_bytes());
    }
}
