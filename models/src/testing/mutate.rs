//! Random damage: whatever the bytes, opening and reading ends in an answer or
//! an error, never in a panic.

use std::os::unix::fs::FileExt;
use std::path::Path;

use super::*;

/// A small deterministic generator (xorshift64*).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % bound.max(1)
    }

    /// Damages `bytes` in one to three places, mostly near the front.
    fn damage(&mut self, bytes: &mut Vec<u8>, front: usize) {
        const NUMBERS: [u64; 6] = [
            0,
            1,
            0x7fff_ffff,
            u32::MAX as u64,
            i64::MAX as u64,
            u64::MAX,
        ];
        for _ in 0..1 + self.below(3) {
            let span = if self.below(8) == 0 {
                bytes.len()
            } else {
                front.min(bytes.len())
            };
            let at = self.below(span);
            let width = [1, 4, 8][self.below(3)].min(bytes.len() - at.min(bytes.len()));
            match self.below(8) {
                0 => bytes.truncate(at),
                1 => drop(bytes.drain(at..at + width)),
                2 => {
                    let byte = self.below(256) as u8;
                    bytes.insert(at, byte);
                }
                3 | 4 => {
                    let number = NUMBERS[self.below(NUMBERS.len())].to_le_bytes();
                    bytes[at..at + width].copy_from_slice(&number[..width]);
                }
                5 if !bytes.is_empty() => bytes[at] = b"0123456789-.[]{}\",:ent"[self.below(22)],
                _ if !bytes.is_empty() => bytes[at] ^= 1 << self.below(8),
                _ => (),
            }
        }
    }
}

/// Puts `bytes` into an existing file. Never through an empty one: ext4 takes
/// that for a replacement and waits for the disk each time.
fn overwrite(path: &Path, bytes: &[u8]) {
    let file = std::fs::File::options().write(true).open(path).unwrap();
    file.write_all_at(bytes, 0).unwrap();
    file.set_len(bytes.len() as u64).unwrap();
}

/// Opens and, where that succeeds, reads every row. True if it opened.
fn open_and_read(path: &Path) -> bool {
    let Ok(checkpoint) = crate::open(path) else {
        return false;
    };
    for info in checkpoint.tensors() {
        let mut out = vec![0.0; info.rows * info.cols];
        // A damaged weight may be NaN, and is then an error.
        let _ = checkpoint.read_rows(info.id, 0, info.rows, &mut out);
    }
    true
}

#[test]
fn damaged_gguf_files_never_panic() {
    let mut random = Random(0x9E37_79B9_7F4A_7C15);
    let (mut accepted, mut refused) = (0, 0);
    for arch in ["llama", "qwen2", "qwen3", "bamboo"] {
        let file = Gguf::new(arch);
        let good = file.bytes();
        std::fs::write(file.path(), &good).unwrap();
        for _ in 0..1500 {
            let mut bytes = good.clone();
            random.damage(&mut bytes, 4096);
            overwrite(&file.path(), &bytes);
            if open_and_read(&file.path()) {
                accepted += 1
            } else {
                refused += 1
            }
        }
    }
    // Damage to weights goes unseen, damage to the header does not.
    assert!(accepted > 100 && refused > 3000, "{accepted} {refused}");
}

#[test]
fn damaged_folders_never_panic() {
    let mut random = Random(0xD1B5_4A32_D192_ED03);
    let (mut accepted, mut refused) = (0, 0);
    for family in ["llama", "qwen2", "qwen3", "bamboo"] {
        let mut folder = Folder::new(family);
        folder.config["rope_scaling"] = serde_json::json!({"rope_type": "llama3", "factor": 8.0,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16});
        folder.texts.insert(
            "tokenizer_config.json",
            r#"{"bos_token":"<s>","chat_template":"x"}"#.into(),
        );
        folder.texts.insert(
            "generation_config.json",
            r#"{"eos_token_id":[2,3],"top_p":0.5}"#.into(),
        );
        folder.write();
        let names = [
            "model.safetensors",
            "config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "generation_config.json",
        ];
        for name in names {
            let path = folder.file(name);
            let good = std::fs::read(&path).unwrap();
            for _ in 0..300 {
                let mut bytes = good.clone();
                random.damage(&mut bytes, 4096);
                overwrite(&path, &bytes);
                if open_and_read(folder.path()) {
                    accepted += 1
                } else {
                    refused += 1
                }
            }
            overwrite(&path, &good);
            assert!(open_and_read(folder.path()), "{name} was not restored");
        }
    }
    assert!(accepted > 100 && refused > 3000, "{accepted} {refused}");
}
