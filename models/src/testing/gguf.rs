//! Builds GGUF files for tests.

use std::path::PathBuf;

use tempfile::TempDir;

use super::*;
use crate::error::Error;

/// A metadata value to write.
#[derive(Clone)]
pub(crate) enum Kv {
    U8(u8),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(u8),
    Text(String),
    U64(u64),
    /// Elements of one type; the type is written even for an empty list.
    List(u32, Vec<Kv>),
    /// A type number and raw bytes, without interpretation.
    Raw(u32, Vec<u8>),
}

pub(crate) fn text(text: &str) -> Kv {
    Kv::Text(text.to_owned())
}

impl Kv {
    fn kind(&self) -> u32 {
        match self {
            Self::U8(_) => 0,
            Self::U32(_) => 4,
            Self::I32(_) => 5,
            Self::F32(_) => 6,
            Self::Bool(_) => 7,
            Self::Text(_) => 8,
            Self::List(..) => 9,
            Self::U64(_) => 10,
            Self::Raw(kind, _) => *kind,
        }
    }

    fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::U8(value) | Self::Bool(value) => out.push(*value),
            Self::U32(value) => out.extend(value.to_le_bytes()),
            Self::I32(value) => out.extend(value.to_le_bytes()),
            Self::F32(value) => out.extend(value.to_le_bytes()),
            Self::U64(value) => out.extend(value.to_le_bytes()),
            Self::Text(text) => write_text(out, text),
            Self::Raw(_, bytes) => out.extend(bytes),
            Self::List(kind, list) => {
                out.extend(kind.to_le_bytes());
                out.extend((list.len() as u64).to_le_bytes());
                list.iter().for_each(|value| value.write(out));
            }
        }
    }
}

fn write_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// A tensor entry and its bytes. Dimensions are innermost first.
#[derive(Clone)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) dims: Vec<u64>,
    pub(crate) kind: u32,
    /// Overrides the offset with a false one.
    pub(crate) offset: Option<u64>,
    pub(crate) bytes: Vec<u8>,
}

/// A GGUF file being built: change it, then open it.
pub(crate) struct Gguf {
    dir: TempDir,
    pub(crate) magic: [u8; 4],
    pub(crate) version: u32,
    pub(crate) keys: Vec<(String, Kv)>,
    pub(crate) tensors: Vec<Entry>,
    pub(crate) alignment: usize,
}

impl Gguf {
    /// A complete F32 file with the standard weights; a tensor's weights are
    /// named after its GGUF name and given in presented order.
    pub(crate) fn new(arch: &str) -> Self {
        let powerinfer = arch == "bamboo";
        let mut file = Self {
            dir: TempDir::new().unwrap(),
            magic: if powerinfer { *b"PWRI" } else { *b"GGUF" },
            version: 3,
            keys: vec![("general.architecture".into(), text(arch))],
            tensors: Vec::new(),
            alignment: 32,
        };
        for (key, value) in [
            ("context_length", Kv::U32(64)),
            ("embedding_length", Kv::U32(D as u32)),
            ("block_count", Kv::U32(LAYERS as u32)),
            ("feed_forward_length", Kv::U32(FFN as u32)),
            ("attention.head_count", Kv::U32(HEADS as u32)),
            ("attention.head_count_kv", Kv::U32(KV_HEADS as u32)),
            ("attention.key_length", Kv::U32(HEAD_DIM as u32)),
            ("attention.value_length", Kv::U32(HEAD_DIM as u32)),
            ("attention.layer_norm_rms_epsilon", Kv::F32(1e-5)),
            ("rope.freq_base", Kv::F32(1000.0)),
        ] {
            file.set(&format!("{arch}.{key}"), value);
        }
        file.set_vocab();
        file.add("token_embd.weight", &[VOCAB, D], Order::AsIs);
        file.add("output_norm.weight", &[D], Order::AsIs);
        file.add("output.weight", &[VOCAB, D], Order::AsIs);
        (0..LAYERS).for_each(|layer| file.add_layer(arch, layer));
        file
    }

    /// Eleven tokens of a sentence-piece vocabulary.
    fn set_vocab(&mut self) {
        let tokens = [
            "<unk>", "<s>", "</s>", "a", "b", "c", "d", "e", "f", "g", "h",
        ];
        let kinds = [2, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1].map(Kv::I32);
        self.set("tokenizer.ggml.model", text("llama"));
        self.set(
            "tokenizer.ggml.tokens",
            Kv::List(8, tokens.map(text).to_vec()),
        );
        self.set(
            "tokenizer.ggml.scores",
            Kv::List(6, vec![Kv::F32(0.0); tokens.len()]),
        );
        self.set("tokenizer.ggml.token_type", Kv::List(5, kinds.to_vec()));
        self.set("tokenizer.ggml.bos_token_id", Kv::U32(1));
        self.set("tokenizer.ggml.eos_token_id", Kv::U32(2));
    }

    /// The standard weights of one layer.
    fn add_layer(&mut self, arch: &str, layer: usize) {
        let powerinfer = arch == "bamboo";
        let rope = if matches!(arch, "llama" | "bamboo") {
            Order::Interleaved
        } else {
            Order::AsIs
        };
        let (q, kv) = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM);
        let mut add = |name: &str, shape: &[usize], order| {
            self.add(&format!("blk.{layer}.{name}"), shape, order)
        };
        add("attn_norm.weight", &[D], Order::AsIs);
        add("ffn_norm.weight", &[D], Order::AsIs);
        add("attn_q.weight", &[q, D], rope);
        add("attn_k.weight", &[kv, D], rope);
        add("attn_v.weight", &[kv, D], Order::AsIs);
        add("attn_output.weight", &[D, q], Order::AsIs);
        add("ffn_gate.weight", &[FFN, D], Order::AsIs);
        add("ffn_up.weight", &[FFN, D], Order::AsIs);
        if powerinfer {
            add("ffn_down_t.weight", &[FFN, D], Order::AsIs);
            add("fc1.weight", &[4 + layer, D], Order::AsIs);
            add("fc2.weight", &[FFN, 4 + layer], Order::AsIs);
        } else {
            add("ffn_down.weight", &[FFN, D], Order::Transposed);
        }
        if arch == "qwen2" {
            add("attn_q.bias", &[q], Order::AsIs);
            add("attn_k.bias", &[kv], Order::AsIs);
            add("attn_v.bias", &[kv], Order::AsIs);
        }
        if arch == "qwen3" {
            add("attn_q_norm.weight", &[HEAD_DIM], Order::AsIs);
            add("attn_k_norm.weight", &[HEAD_DIM], Order::AsIs);
        }
    }

    /// Sets a key, in place if it exists.
    pub(crate) fn set(&mut self, key: &str, value: Kv) {
        match self.keys.iter_mut().find(|(existing, _)| existing == key) {
            Some((_, old)) => *old = value,
            None => self.keys.push((key.to_owned(), value)),
        }
    }

    pub(crate) fn unset(&mut self, key: &str) {
        let before = self.keys.len();
        self.keys.retain(|(existing, _)| existing != key);
        assert_eq!(self.keys.len(), before - 1, "{key}");
    }

    /// Adds an F32 tensor whose presented shape and weights are the standard ones.
    pub(crate) fn add(&mut self, name: &str, shape: &[usize], order: Order) {
        let presented = |index| weight(name, index);
        let cols = shape[shape.len() - 1];
        let rows = if shape.len() == 1 { 1 } else { shape[0] };
        let mut values = Vec::new();
        let mut dims: Vec<u64> = shape.iter().rev().map(|&dim| dim as u64).collect();
        match order {
            Order::AsIs => values.extend((0..rows * cols).map(presented)),
            Order::Transposed => {
                dims.reverse();
                (0..cols).for_each(|col| {
                    values.extend((0..rows).map(|row| presented(row * cols + col)))
                });
            }
            Order::Interleaved => {
                // Pair i of a head: its rows i and i + half, next to each other.
                let (unit, count) = if shape.len() == 1 {
                    (1, cols)
                } else {
                    (cols, rows)
                };
                for head in 0..count / HEAD_DIM {
                    for pair in 0..HEAD_DIM / 2 {
                        for part in [0, HEAD_DIM / 2] {
                            let row = head * HEAD_DIM + part + pair;
                            values.extend((row * unit..(row + 1) * unit).map(presented));
                        }
                    }
                }
            }
        }
        let bytes = values.into_iter().flat_map(f32::to_le_bytes).collect();
        self.tensors.retain(|tensor| tensor.name != name);
        self.tensors.push(Entry {
            name: name.to_owned(),
            dims,
            kind: 0,
            offset: None,
            bytes,
        });
    }

    pub(crate) fn tensor(&mut self, name: &str) -> &mut Entry {
        self.tensors
            .iter_mut()
            .find(|tensor| tensor.name == name)
            .unwrap()
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.dir.path().join("tiny.gguf")
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = self.magic.to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.keys.len() as u64).to_le_bytes());
        for (key, value) in &self.keys {
            write_text(&mut out, key);
            out.extend(value.kind().to_le_bytes());
            value.write(&mut out);
        }
        let mut data: Vec<u8> = Vec::new();
        for tensor in &self.tensors {
            write_text(&mut out, &tensor.name);
            out.extend((tensor.dims.len() as u32).to_le_bytes());
            tensor
                .dims
                .iter()
                .for_each(|dim| out.extend(dim.to_le_bytes()));
            out.extend(tensor.kind.to_le_bytes());
            out.extend(tensor.offset.unwrap_or(data.len() as u64).to_le_bytes());
            data.extend(&tensor.bytes);
            data.resize(data.len().next_multiple_of(self.alignment), 0);
        }
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        out.extend(data);
        out
    }

    pub(crate) fn open(&self) -> Result<Box<dyn Checkpoint>, Error> {
        self.open_bytes(&self.bytes())
    }

    pub(crate) fn open_bytes(&self, bytes: &[u8]) -> Result<Box<dyn Checkpoint>, Error> {
        std::fs::write(self.path(), bytes).unwrap();
        crate::open(&self.path())
    }

    /// The error from opening it.
    pub(crate) fn refused(&self) -> Error {
        match self.open() {
            Err(error) => error,
            Ok(_) => panic!("a bad file was accepted"),
        }
    }
}

/// How a tensor's presented weights are stored in the file.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Order {
    AsIs,
    Transposed,
    Interleaved,
}
