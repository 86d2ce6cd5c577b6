//! Reading returns what was written.

use std::fs;
use std::os::unix::fs::FileExt;

use emberflow_storage::container::layout::Extent;
use emberflow_storage::container::{
    Container, TensorEntry, TensorRows, Unit, Writer, append_row, table_row,
};
use proptest::prelude::*;

use super::support::{Model, Packed, bare, full, random, tensor};

fn check_content(model: &Model, c: &Container) {
    let (spec, g) = (&model.spec, &model.spec.geometry);
    assert_eq!(c.meta(), spec.meta);
    assert_eq!(c.read_stats().unwrap(), spec.stats);
    assert_eq!(c.read_predictor().unwrap(), model.predictor());
    assert_eq!((c.geometry(), c.bundle_dtype()), (g, spec.bundle_dtype));

    assert_eq!(c.tensors().len(), spec.tensors.len());
    for (i, expected) in spec.tensors.iter().enumerate() {
        let entry = c.tensor(&expected.name).unwrap();
        assert_eq!(&entry.spec(), expected);
        assert_eq!(entry.offset % 64, 0);
        let mut bytes = vec![0; entry.len as usize];
        c.read_tensor(entry, &mut bytes).unwrap();
        assert_eq!(bytes, model.tensor(i));
        check_rows(c, entry, &bytes);
    }
    assert!(c.tensor("no such tensor").is_none());

    assert_eq!(c.banks().len(), spec.banks.len());
    for (b, expected) in spec.banks.iter().enumerate() {
        assert_eq!(c.bank(expected.layer, expected.expert), Some(b));
        assert_eq!(&c.banks()[b].spec(), expected);
        assert_eq!(c.banks()[b].offset % 4096, 0);
        let mut scales = vec![0; expected.neurons as usize * g.scales_per_neuron as usize];
        c.read_scales(b, &mut scales).unwrap();
        for n in 0..expected.neurons {
            let mut bundle = vec![0; g.stride as usize];
            let at = c.base() + c.neuron_offset(b, n);
            assert_eq!(at % u64::from(g.sector), 0);
            c.file().read_exact_at(&mut bundle, at).unwrap();
            c.check_bundle(b, n, &bundle).unwrap();
            let (gate, rest, s) = model.neuron(b, n);
            let (gate_end, rest_at) = (g.gate_len as usize, g.gate_span as usize);
            assert_eq!(bundle[..gate_end], gate);
            assert_eq!(bundle[rest_at..rest_at + g.rest_len as usize], rest);
            assert_eq!(scales[n as usize * s.len()..][..s.len()], s);
        }
    }
    assert_eq!(c.bank(99, 0), None);

    let mut last = (0, 0);
    let report = c.verify(&mut |done, total| last = (done, total)).unwrap();
    assert!(report.is_clean(), "{:?}", report.problems);
    assert_eq!(
        (report.bytes, last),
        (c.file_len(), (c.file_len(), c.file_len()))
    );
    assert_eq!(report.tensors, spec.tensors.len() as u64);
    assert_eq!(
        report.bundles,
        spec.banks.iter().map(|b| u64::from(b.neurons)).sum::<u64>()
    );
}

/// Rows read one by one are those of the tensor, and another row's bytes are damage.
fn check_rows(c: &Container, entry: &TensorEntry, bytes: &[u8]) {
    let count = entry.dims().first().map_or(0, |&rows| rows as usize);
    let whole = count > 0 && bytes.len() >= count && bytes.len().is_multiple_of(count);
    let row_len = bytes.len().checked_div(count).unwrap_or(0);
    let rows = c.rows(entry, count, row_len);
    assert_eq!(rows.is_ok(), whole, "{rows:?}");
    let Ok(rows) = rows else { return };
    assert_eq!(rows.stride(), rows.row_len());
    let stripe = c.stripes(entry).unwrap();
    for (r, row) in bytes.chunks_exact(rows.row_len()).enumerate() {
        let Extent { offset, len } = rows.read_of(r);
        assert!(len <= stripe.len && len <= TensorRows::most_read(c, entry, row_len) as u64);
        let mut read = vec![0; len as usize];
        c.file()
            .read_exact_at(&mut read, c.base() + offset)
            .unwrap();
        assert_eq!(c.check_row(&rows, r, &read).unwrap(), row);
        let last = read.len() - 1;
        read[last] ^= 1;
        let damaged = c.check_row(&rows, r, &read).unwrap_err().to_string();
        assert!(damaged.contains(entry.name()), "{damaged}");
        assert!(c.check_row(&rows, r, &read[1..]).is_err());
        assert!(c.check_row(&rows, count, &read).is_err());
    }
}

/// Bytes that this thread reads from files during `f`.
fn bytes_read(f: impl FnOnce()) -> u64 {
    let count = || {
        let io = fs::read_to_string("/proc/thread-self/io").unwrap();
        let line = io.lines().find_map(|line| line.strip_prefix("rchar: "));
        (line.unwrap().parse::<u64>().unwrap(), io.len() as u64)
    };
    let (before, own) = count();
    f();
    count().0 - before - own
}

/// A container with one tensor of `rows`, stored as a table or as a matrix.
fn with_rows(rows: &[Vec<u8>], table: bool) -> Packed {
    let mut bytes = Vec::new();
    for row in rows {
        if table {
            append_row(&mut bytes, row)
        } else {
            bytes.extend_from_slice(row)
        }
    }
    let dims = [rows.len() as u64, rows[0].len() as u64];
    let mut spec = bare().spec;
    spec.tensors = vec![tensor("table", &dims, bytes.len() as u64)];
    let packed = Packed::new(&[]);
    fs::remove_file(&packed.path).unwrap();
    let model = Model { spec, seed: 1 };
    let mut writer = Writer::create(&packed.path, model.spec.clone()).unwrap();
    writer.write_tensor(0, &bytes).unwrap();
    model.write_unit(&mut writer, Unit::Bank(0)).unwrap();
    writer.finish().unwrap();
    packed
}

/// Whether rows bring their checksums or not.
#[test]
fn opening_rows_reads_nothing() {
    let rows: Vec<Vec<u8>> = (0..5000).map(|n| vec![n as u8; 40]).collect();
    for table in [true, false] {
        let packed = with_rows(&rows, table);
        let c = Container::open(&packed.path).unwrap();
        let entry = c.tensor("table").unwrap();
        let read = bytes_read(|| drop(c.rows(entry, 5000, 40).unwrap()));
        assert_eq!(read, 0);
    }
}

#[test]
fn full_and_bare_containers() {
    for model in [full(), bare()] {
        let packed = Packed::new(&model.bytes());
        check_content(&model, &Container::open(&packed.path).unwrap());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..Default::default() })]

    /// Every row of a table is what was packed, and any flipped bit of it or of its checksum is found.
    #[test]
    fn rows_bring_their_checksums(seed: u64, count in 1..9usize, len in 1..70usize) {
        let mut rng = fastrand::Rng::with_seed(seed);
        let rows: Vec<Vec<u8>> = (0..count)
            .map(|_| std::iter::repeat_with(|| rng.u8(..)).take(len).collect())
            .collect();
        let packed = with_rows(&rows, true);
        let c = Container::open(&packed.path).unwrap();
        let entry = c.tensor("table").unwrap();
        let read = c.rows(entry, count, len).unwrap();
        for (r, row) in rows.iter().enumerate() {
            let Extent { offset, len: stored } = read.read_of(r);
            let mut stored = vec![0; stored as usize];
            c.file().read_exact_at(&mut stored, c.base() + offset).unwrap();
            prop_assert_eq!(c.check_row(&read, r, &stored).unwrap(), row.as_slice());
            prop_assert_eq!(table_row(&stored), (row.as_slice(), true));
            let bit = rng.usize(..8 * stored.len());
            stored[bit / 8] ^= 1 << (bit % 8);
            let damaged = c.check_row(&read, r, &stored).unwrap_err().to_string();
            prop_assert!(damaged.contains(&format!("(row {r})")), "{}", damaged);
            prop_assert!(!table_row(&stored).1);
            prop_assert!(c.check_row(&read, r, row).is_err());
            prop_assert!(c.check_row(&read, count, &stored).is_err());
        }
        prop_assert!(c.rows(entry, count, len + 1).is_err());
    }

    /// Odd sizes, all sectors and placements, several layers and experts, nothing at all.
    #[test]
    fn any_specification(seed: u64) {
        let model = random(seed);
        let packed = Packed::new(&model.bytes());
        check_content(&model, &Container::open(&packed.path).unwrap());
    }
}

#[test]
fn same_input_gives_the_same_bytes() {
    assert_eq!(full().bytes(), full().bytes());
}

/// A program contains its model: the container starts inside another file.
#[test]
fn inside_another_file() {
    let model = full();
    let bytes = model.bytes();
    let mut file = vec![0xAA; 3 * 512];
    file.extend_from_slice(&bytes);
    file.extend_from_slice(b"and something behind it");
    let packed = Packed::new(&file);
    let open = |base, len| {
        let file = fs::File::open(&packed.path).unwrap();
        Container::open_at(file, "the program".as_ref(), base, len)
    };
    check_content(&model, &open(3 * 512, bytes.len() as u64).unwrap());
    // One sector off the grid of direct I/O.
    let mut shifted = vec![0; 100];
    shifted.extend_from_slice(&bytes);
    fs::write(&packed.path, &shifted).unwrap();
    let error = open(100, bytes.len() as u64).unwrap_err().to_string();
    assert_eq!(
        error,
        "the program: the container starts at offset 100, expected a multiple of 512"
    );
    let error = open(0, 50).unwrap_err().to_string();
    assert!(error.contains("50 bytes are too few"), "{error}");
}

/// Sections, entries and padding add up to the file.
#[test]
fn sizes_add_up() {
    let packed = Packed::new(&full().bytes());
    let c = Container::open(&packed.path).unwrap();
    let sizes = c.section_sizes();
    let mut end = 4096;
    for s in sizes {
        assert_eq!(s.offset, end, "{}", s.section);
        end = (s.offset + s.len).next_multiple_of(4096);
    }
    assert_eq!(end, c.file_len());
    assert_eq!(sizes[7].payload, 280 + 28);
    assert_eq!(sizes[8].payload, 6 * 300);
    assert!(c.resident_bytes() > 0);
}
