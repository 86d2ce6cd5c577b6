//! Split models, laid out as `tools/gguf-split/gguf-split.cpp` of llama.cpp writes them: `split.no` and
//! `split.count` in 16 bits, `split.tensors.count` in 32, and all other keys in the first file alone.

use super::*;

const COUNT: usize = 3;

/// The parts of a llama, part by part; with `keys_alone` the first has no tensors
/// (`--no-tensor-first-split`).
fn parts(arch: &str, keys_alone: bool) -> Vec<Gguf> {
    let whole = Gguf::new(arch);
    let (first, parts) = (usize::from(keys_alone), COUNT - usize::from(keys_alone));
    let each = whole.tensors.len().div_ceil(parts);
    let short = |number: usize| Kv::Raw(2, (number as u16).to_le_bytes().to_vec());
    (0..COUNT)
        .map(|no| {
            let mut part = Gguf::new(arch);
            if no > 0 {
                part.keys.clear();
            }
            part.set("split.no", short(no));
            part.set("split.count", short(COUNT));
            part.set("split.tensors.count", Kv::I32(whole.tensors.len() as i32));
            part.tensors = match no.checked_sub(first) {
                None => Vec::new(),
                Some(at) => whole.tensors.chunks(each).nth(at).unwrap().to_vec(),
            };
            part
        })
        .collect()
}

fn name(part: usize) -> String {
    format!("tiny-{part:05}-of-{COUNT:05}.gguf")
}

fn write(folder: &Path, parts: &[Gguf]) {
    for (no, part) in parts.iter().enumerate() {
        std::fs::write(folder.join(name(no + 1)), part.bytes()).unwrap();
    }
}

/// The error of opening part `number` of a set.
fn refused(folder: &Path, number: usize) -> String {
    crate::open(&folder.join(name(number)))
        .err()
        .unwrap()
        .to_string()
}

#[test]
fn any_part_opens_the_whole_model() {
    let dir = tempfile::tempdir().unwrap();
    let whole = Gguf::new("llama");
    let expected = whole.open().unwrap();
    for keys_alone in [false, true] {
        write(dir.path(), &parts("llama", keys_alone));
        let mut fingerprints = Vec::new();
        for number in 1..=COUNT {
            let found = crate::open(&dir.path().join(name(number))).unwrap();
            assert_eq!(found.path(), dir.path().join(name(1)));
            assert_eq!(found.config().name, "tiny");
            assert_eq!(found.config(), expected.config());
            for info in expected.tensors() {
                let [a, b] = [&found, &expected].map(|from| read_all(from.as_ref(), info.id));
                assert_eq!(a, b, "{}", info.id);
            }
            fingerprints.push(found.fingerprint());
            let files = crate::files_of(&dir.path().join(name(number)));
            assert_eq!(files.len(), COUNT);
            assert_eq!(files[0], dir.path().join(name(number)));
        }
        fingerprints.dedup();
        assert_eq!(fingerprints.len(), 1);
    }
}

#[test]
fn missing_swapped_and_foreign_parts_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let at = |number: usize| dir.path().join(name(number));
    let whole = || write(dir.path(), &parts("llama", false));

    for missing in 1..=COUNT {
        whole();
        std::fs::remove_file(at(missing)).unwrap();
        let error = refused(dir.path(), missing % COUNT + 1);
        let expected = format!(
            "{}: file is missing: it is part {missing} of 3",
            name(missing)
        );
        assert!(error.contains(&expected), "{error}");
    }

    whole();
    std::fs::rename(at(2), at(9)).unwrap();
    std::fs::rename(at(3), at(2)).unwrap();
    std::fs::rename(at(9), at(3)).unwrap();
    for number in 1..=COUNT {
        let error = refused(dir.path(), number);
        assert!(error.contains("split.no is 2; expected 1"), "{error}");
    }

    // a set of as many parts with other tensors
    whole();
    let mut other = parts("qwen2", false);
    std::fs::write(at(2), other[1].bytes()).unwrap();
    let error = refused(dir.path(), 1);
    assert!(
        error.contains(&name(2)) && error.contains("of another set"),
        "{error}"
    );
    // one with the same numbers
    let total = parts("llama", false)[0].keys.last().unwrap().1.clone();
    other[1].set("split.tensors.count", total);
    std::fs::write(at(2), other[1].bytes()).unwrap();
    let error = refused(dir.path(), 3);
    assert!(
        error.contains("of another set") || error.contains("appears twice"),
        "{error}"
    );
    // one of more parts
    whole();
    let mut more = parts("llama", false);
    more[2].set("split.count", Kv::Raw(2, vec![4, 0]));
    write(dir.path(), &more);
    let error = refused(dir.path(), 1);
    assert!(error.contains("split.count is 4; expected 3"), "{error}");
    assert!(refused(dir.path(), 3).contains("as the file's name says"));
}

#[test]
fn parts_without_their_names_are_refused() {
    let parts = parts("llama", false);
    let dir = tempfile::tempdir().unwrap();
    let joined: Vec<u8> = parts.iter().flat_map(Gguf::bytes).collect();
    for (name, bytes) in [("renamed.gguf", parts[0].bytes()), ("joined.gguf", joined)] {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        let error = crate::open(&path).err().unwrap().to_string();
        assert!(error.contains("llama-gguf-split --merge"), "{error}");
        assert_eq!(crate::files_of(&path), [path]);
    }
    // a set of one file has any name
    let mut single = Gguf::new("llama");
    single.set("split.no", Kv::Raw(2, vec![0, 0]));
    single.set("split.count", Kv::Raw(2, vec![1, 0]));
    single.open().unwrap();
}
