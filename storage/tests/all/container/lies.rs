//! One test per kind of invalid field. The forger knows the format: it repairs all checksums after
//! its edit, so that the invalid field itself must be detected.

use emberflow_storage::container::{Container, LayoutError};
use emberflow_storage::{Error, Part};

use super::forger::{
    BANKS, BUNDLES, CHECKSUMS, DENSE, Forger, META, PREDICTOR, SCALES, STATS, TENSORS,
};
use super::support::{Packed, bare, full, open, read_all};

/// Opens the full container after `edit` and repaired checksums.
fn refused(edit: impl FnOnce(&mut Forger)) -> Error {
    refused_from(full().bytes(), edit)
}

fn refused_from(bytes: Vec<u8>, edit: impl FnOnce(&mut Forger)) -> Error {
    let mut forger = Forger::new(bytes);
    edit(&mut forger);
    forger.seal();
    open(&forger.bytes).unwrap_err()
}

/// The layout error of a refusal.
fn layout(error: Error) -> LayoutError {
    match error {
        Error::Layout { source, .. } => source,
        other => panic!("expected a layout error, got: {other}"),
    }
}

macro_rules! assert_is {
    ($error:expr, $pattern:pat $(if $guard:expr)?) => {{
        let error = $error;
        assert!(matches!(error, $pattern $(if $guard)?), "{error}");
    }};
}

#[test]
fn shorter_than_a_superblock() {
    assert_is!(
        open(&full().bytes()[..4095]).unwrap_err(),
        Error::TooShort { len: 4095, .. }
    );
    assert_is!(open(b"").unwrap_err(), Error::TooShort { len: 0, .. });
}

#[test]
fn another_magic() {
    let error = refused(|f| f.bytes[..4].copy_from_slice(b"GGUF"));
    assert!(
        error
            .to_string()
            .contains("starts with \"GGUFFLOW\", expected \"EMBRFLOW\""),
        "{error}"
    );
}

#[test]
fn another_version() {
    assert_is!(refused(|f| f.put32(8, 1)), Error::Version { found: 1, .. });
}

#[test]
fn damaged_superblock() {
    let mut bytes = full().bytes();
    bytes[40] ^= 1;
    assert_is!(open(&bytes).unwrap_err(), Error::SuperblockChecksum { .. });
}

#[test]
fn another_superblock_length() {
    assert_is!(
        refused(|f| f.put32(12, 8192)),
        Error::SuperblockLength { found: 8192, .. }
    );
}

#[test]
fn reserved_bytes_in_use() {
    assert_is!(
        refused(|f| f.bytes[4000] = 1),
        Error::Reserved { offset: 4000, .. }
    );
    let at = Forger::entry(BUNDLES) + 16;
    assert_is!(refused(|f| f.put64(at, 9)), Error::Reserved { offset, .. } if offset == at as u64);
}

#[test]
fn unknown_scale_placement() {
    assert_is!(
        refused(|f| f.put32(28, 2)),
        Error::ScalePlacement { found: 2, .. }
    );
}

#[test]
fn truncated() {
    let bytes = full().bytes();
    let error = open(&bytes[..bytes.len() - 1]).unwrap_err();
    assert_is!(error, Error::Truncated { expected, found, .. } if found + 1 == expected);
}

#[test]
fn appended() {
    let mut bytes = full().bytes();
    bytes.push(0);
    assert_is!(open(&bytes).unwrap_err(), Error::Trailing { expected, found, .. } if found == expected + 1);
}

#[test]
fn contradicting_geometry() {
    // (position, value, reported field)
    for (at, value, name) in [
        (24, 513, "sector"),
        (24, 0, "sector"),
        (32, 0, "gate_len"),
        (32, u32::MAX, "gate_len"),
        (36, 0, "rest_len"),
        (36, u32::MAX, "rest_len"),
        (40, 99, "gate_span"),
        (44, 1024, "stride"),
        (44, 0, "stride"),
        (48, 0, "scales_per_neuron"),
        (48, u32::MAX, "scales_per_neuron"),
    ] {
        let error = layout(refused(|f| f.put32(at, value)));
        assert_is!(error, LayoutError::Geometry { field, .. } if field == name);
    }
    // Inline scales with a size.
    let error = layout(refused(|f| f.put32(28, 0)));
    assert_is!(
        error,
        LayoutError::Geometry {
            field: "scales_per_neuron",
            ..
        }
    );
}

/// The file is longer, and the superblock says so; the sections do not need it.
#[test]
fn padded_at_the_end() {
    let error = refused(|f| {
        f.bytes.extend_from_slice(&[0; 4096]);
        f.put64(16, f.bytes.len() as u64);
    });
    assert_is!(error, Error::FileLength { expected, found, .. } if found == expected + 4096);
}

#[test]
fn section_beyond_the_end() {
    for (offset, len) in [(1 << 40, 128), (u64::MAX, 128), (u64::MAX - 127, 128)] {
        let error = refused(|f| {
            f.put64(Forger::entry(TENSORS), offset);
            f.put64(Forger::entry(TENSORS) + 8, len);
        });
        assert_is!(error, Error::SectionBounds { .. });
    }
}

#[test]
fn half_a_record() {
    for section in [TENSORS, BANKS] {
        let error = refused(|f| f.put64(Forger::entry(section) + 8, 100));
        assert_is!(error, Error::SectionRecords { len: 100, .. });
    }
}

#[test]
fn more_than_the_format_allows() {
    for (section, len, name) in [
        (TENSORS, 128 * ((1 << 18) + 1), "tensor directory"),
        (BANKS, 64 * ((1 << 17) + 1), "bank directory"),
        (META, (256 << 20) + 1, "metadata length"),
        (STATS, (1 << 30) + 1, "statistics length"),
        (PREDICTOR, u64::MAX, "predictor length"),
    ] {
        let error = layout(refused(|f| f.put64(Forger::entry(section) + 8, len)));
        assert_is!(error, LayoutError::Limit { what, .. } if what == name);
    }
    for (at, name) in [
        (0, "layer number"),
        (4, "expert number"),
        (8, "neurons of a bank"),
    ] {
        let error = layout(refused(|f| f.put32(f.start(BANKS) + at, u32::MAX)));
        assert_is!(error, LayoutError::Limit { what, .. } if what == name);
    }
    let error = layout(refused(|f| f.put64(f.start(TENSORS) + 112, 1 << 60)));
    assert_is!(
        error,
        LayoutError::Limit {
            what: "dense tensors",
            ..
        }
    );
}

/// Sections may neither leave gaps, nor overlap, nor have a length other than the counts give.
#[test]
fn section_out_of_place() {
    for section in META..=BUNDLES {
        // The sections behind BUNDLES' neighbour still fit the file when moved to the front.
        let error = refused(|f| {
            if section == TENSORS || section == BANKS {
                // Directories must stay readable: move their bytes as well.
                let from = f.start(section);
                f.bytes.copy_within(from..from + 512, 24576 + 1024);
                f.put64(Forger::entry(section), 24576 + 1024);
            } else {
                f.put64(Forger::entry(section), 4096 * 20);
            }
        });
        assert_is!(error, Error::SectionPlace { .. });
    }
    for section in [CHECKSUMS, SCALES, DENSE, BUNDLES] {
        let error = refused(|f| {
            let at = Forger::entry(section) + 8;
            f.put64(at, f.u64_at(at) - 1);
        });
        assert_is!(error, Error::SectionPlace { .. });
    }
}

#[test]
fn damaged_section() {
    for section in [META, TENSORS, BANKS, CHECKSUMS] {
        let mut f = Forger::new(full().bytes());
        let at = f.start(section);
        f.bytes[at] ^= 0x80;
        assert_is!(open(&f.bytes).unwrap_err(), Error::SectionChecksum { offset, .. } if offset == at as u64);
    }
    for section in [STATS, PREDICTOR] {
        let mut f = Forger::new(full().bytes());
        let at = f.start(section);
        f.bytes[at] ^= 0x80;
        let error = read_all(&open(&f.bytes).unwrap()).unwrap_err();
        assert_is!(error, Error::SectionChecksum { offset, .. } if offset == at as u64);
    }
}

#[test]
fn malformed_tensor_record() {
    // (position in the record, value): behind the name, not UTF-8, five dimensions, an unused
    // dimension.
    for (at, value) in [(63, b'x'), (0, 0xFF), (68, 5), (96, 1)] {
        let error = refused(|f| {
            let start = f.start(TENSORS);
            f.bytes[start + 128 + at] = value;
        });
        assert_is!(error, Error::Record { index: 1, .. });
    }
}

#[test]
fn nameless_tensor() {
    let error = layout(refused(|f| {
        let start = f.start(TENSORS);
        f.bytes[start..start + 64].fill(0);
    }));
    assert_is!(error, LayoutError::TensorName { index: 0, .. });
    for bad in [b' ', b'\n', 0x7F] {
        let error = layout(refused(|f| {
            let start = f.start(TENSORS);
            f.bytes[start] = bad;
        }));
        assert_is!(error, LayoutError::TensorName { index: 0, .. });
    }
}

#[test]
fn two_tensors_of_one_name() {
    let error = layout(refused(|f| {
        let start = f.start(TENSORS);
        f.bytes.copy_within(start..start + 64, start + 128);
    }));
    assert_is!(
        error,
        LayoutError::DuplicateTensor {
            first: 0,
            second: 1,
            ..
        }
    );
}

#[test]
fn impossible_shape() {
    for (at, value) in [(72, 0), (80, 0), (72, u64::MAX)] {
        let error = layout(refused(|f| f.put64(f.start(TENSORS) + at, value)));
        assert_is!(error, LayoutError::TensorShape { .. });
    }
    let error = layout(refused(|f| {
        let start = f.start(TENSORS);
        f.bytes[start + 68..start + 104].fill(0);
    }));
    assert_is!(error, LayoutError::TensorShape { .. });
}

#[test]
fn tensor_without_bytes() {
    let error = layout(refused(|f| f.put64(f.start(TENSORS) + 112, 0)));
    assert_is!(error, LayoutError::TensorEmpty { .. });
}

#[test]
fn tensor_out_of_place() {
    let error = refused(|f| {
        let at = f.start(TENSORS) + 128 + 104;
        f.put64(at, f.u64_at(at) + 64);
    });
    assert_is!(error, Error::TensorPlace { found, expected, .. } if found == expected + 64);
    // A longer tensor moves what follows, so the section no longer fits.
    let error = refused(|f| f.put64(f.start(TENSORS) + 128 + 112, 10_000));
    assert_is!(error, Error::SectionPlace { .. });
}

#[test]
fn damaged_tensor() {
    let mut f = Forger::new(full().bytes());
    let at = f.start(DENSE);
    f.bytes[at + 279] ^= 4;
    let container = open(&f.bytes).unwrap();
    let error = container
        .read_tensor(&container.tensors()[0], &mut [0; 280])
        .unwrap_err();
    assert!(
        error.to_string().contains("tensor embed at offset"),
        "{error}"
    );
    assert_is!(error, Error::TensorChecksum { offset, .. } if offset == at as u64);
}

#[test]
fn banks_out_of_order() {
    // Bank 1 becomes layer 0 expert 0 a second time.
    let error = layout(refused(|f| f.put32(f.start(BANKS) + 64, 0)));
    assert_is!(error, LayoutError::BankOrder { index: 1, .. });
    // Bank 0 comes after bank 1.
    let error = layout(refused(|f| f.put32(f.start(BANKS), 2)));
    assert_is!(error, LayoutError::BankOrder { index: 1, .. });
}

#[test]
fn bank_without_neurons() {
    let error = layout(refused(|f| f.put32(f.start(BANKS) + 8, 0)));
    assert_is!(error, LayoutError::BankEmpty { index: 0, .. });
}

#[test]
fn bank_out_of_place() {
    for (at, name) in [
        (16, "offset"),
        (24, "length"),
        (32, "first checksum"),
        (40, "scales offset"),
    ] {
        let error = refused(|f| {
            let at = f.start(BANKS) + 64 + at;
            f.put64(at, f.u64_at(at) + 1);
        });
        assert_is!(error, Error::BankPlace { layer: 1, expert: 0, field, .. } if field == name);
    }
    // Without resident scales there is nothing to hash.
    let error = refused_from(bare().bytes(), |f| f.put64(f.start(BANKS) + 48, 1));
    assert_is!(
        error,
        Error::BankPlace {
            field: "scales checksum",
            ..
        }
    );
    let error = refused(|f| f.put64(f.start(BANKS) + 56, 1));
    assert_is!(error, Error::Record { index: 0, .. });
    // More neurons than the file has checksums.
    let error = refused(|f| f.put32(f.start(BANKS) + 8, 4));
    assert_is!(error, Error::SectionPlace { .. });
}

#[test]
fn damaged_bundle() {
    let packed = Packed::new(&full().bytes());
    let container = Container::open(&packed.path).unwrap();
    let bytes = full().bytes();
    // Layer 1 expert 0 neuron 1: stride 512, Gate part [0, 100).
    let at = container.neuron_offset(1, 1) as usize;
    let mut bundle = bytes[at..at + 512].to_vec();
    container.check_bundle(1, 1, &bundle).unwrap();
    bundle[99] ^= 1;
    let error = container.check_bundle(1, 1, &bundle).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("gate part of layer 1 expert 0 neuron 1 at offset"),
        "{text}"
    );
    assert_is!(error, Error::BundleChecksum { part: Part::Gate, offset, .. } if offset == at as u64);
    bundle[99] ^= 1;
    // The last byte is padding, and counts.
    bundle[511] ^= 1;
    let error = container.check_rest(1, 1, &bundle[100..]).unwrap_err();
    assert_is!(error, Error::BundleChecksum { part: Part::Rest, offset, .. } if offset == at as u64 + 100);
    // The bytes of another neuron.
    assert_is!(
        container.check_gate(1, 0, &bundle[..100]).unwrap_err(),
        Error::BundleChecksum { .. }
    );
}

#[test]
fn damaged_scales() {
    let mut f = Forger::new(full().bytes());
    let at = f.start(SCALES);
    f.bytes[at + 3 * 39] ^= 1;
    let container = open(&f.bytes).unwrap();
    container.read_scales(0, &mut [0; 3 * 39]).unwrap();
    let error = container.read_scales(1, &mut [0; 2 * 39]).unwrap_err();
    assert_is!(
        error,
        Error::ScalesChecksum {
            layer: 1,
            expert: 0,
            ..
        }
    );
}

#[test]
fn something_in_a_gap() {
    let mut f = Forger::new(full().bytes());
    f.bytes[4096 + 15] = 1;
    let report = open(&f.bytes).unwrap().verify(&mut |_, _| {}).unwrap();
    assert_eq!(report.problem_count, 1);
    assert_eq!(report.problems[0].offset, 4111);
    assert_eq!(
        report.problems[0].what,
        "the gap at offset 4111 is not zero"
    );
}

/// Requests for nonexistent entries give an error, not a panic.
#[test]
fn asking_beyond_the_end() {
    let c = open(&full().bytes()).unwrap();
    assert_eq!(c.neuron_offset(3, 0), u64::MAX);
    assert_eq!(c.neuron_offset(0, 3), u64::MAX);
    assert_is!(
        c.check_gate(3, 0, &[0; 100]).unwrap_err(),
        Error::Index { what: "bank", .. }
    );
    assert_is!(
        c.check_gate(0, 3, &[0; 100]).unwrap_err(),
        Error::Index { what: "neuron", .. }
    );
    assert_is!(
        c.check_gate(0, u32::MAX, &[0; 100]).unwrap_err(),
        Error::Index { .. }
    );
    assert_is!(
        c.check_gate(0, 0, &[0; 99]).unwrap_err(),
        Error::Length { .. }
    );
    assert_is!(
        c.check_rest(0, 0, &[0; 413]).unwrap_err(),
        Error::Length { .. }
    );
    assert_is!(
        c.check_bundle(0, 0, &[0; 511]).unwrap_err(),
        Error::Length { .. }
    );
    assert_is!(c.read_scales(3, &mut []).unwrap_err(), Error::Index { .. });
    assert_is!(
        c.read_scales(0, &mut [0; 1]).unwrap_err(),
        Error::Length { .. }
    );
    assert_is!(
        c.read_tensor(&c.tensors()[0], &mut [0; 1]).unwrap_err(),
        Error::Length { .. }
    );
}

/// The checksum of a stripe that is not that of its bytes: found when one of its rows is read, and by `verify`.
#[test]
fn stripe_of_other_bytes() {
    let mut forger = Forger::new(full().bytes());
    let neurons: u64 = full().spec.banks.iter().map(|b| u64::from(b.neurons)).sum();
    let at = forger.start(CHECKSUMS) + 8 * neurons as usize;
    forger.bytes[at] ^= 1;
    forger.seal();
    let packed = Packed::new(&forger.bytes);
    let container = Container::open(&packed.path).unwrap();
    let entry = container.tensor("embed").unwrap();
    let rows = container.rows(entry, 10, 28).unwrap();
    let read = rows.read_of(3);
    let bytes = &forger.bytes[read.offset as usize..][..read.len as usize];
    let error = container.check_row(&rows, 3, bytes).unwrap_err();
    assert_is!(error, Error::TensorChecksum { ref name, .. } if name == "embed");
    let report = container.verify(&mut |_, _| {}).unwrap();
    assert_eq!(report.problem_count, 1);
    assert!(report.problems[0].what.contains("embed"), "{report:?}");
}

/// One checksum more than there are stripes.
#[test]
fn more_stripes_than_tensors_have() {
    let error = refused(|f| {
        let at = Forger::entry(CHECKSUMS) + 8;
        let neurons: u64 = full().spec.banks.iter().map(|b| u64::from(b.neurons)).sum();
        let stripes = full().spec.tensors.len() as u64;
        f.put64(at, 8 * neurons + 4 * (stripes + 1));
    });
    assert_is!(error, Error::SectionPlace { .. });
}
