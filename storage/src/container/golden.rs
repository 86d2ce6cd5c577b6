//! The golden header: keeps the diagram, the constants and the encoded bytes in agreement.
//!
//! `tests/fixtures/header-v2.bin` is a superblock, a tensor record and a bank record, made from the
//! DATA LAYOUT diagram alone with another implementation of xxh3. It never changes.

use super::format::{
    BankEntry, SUPERBLOCK_LEN, Section, SectionEntry, Superblock, TENSOR_RECORD, TensorEntry,
};
use super::geometry::{BundleGeometry, Placement};
use super::layout::Extent;

const HEADER: &[u8] = include_bytes!("../../tests/fixtures/header-v2.bin");

#[test]
fn superblock_decodes_and_encodes_byte_equal() {
    let bytes: &[u8; SUPERBLOCK_LEN] = HEADER.first_chunk().expect("fixture");
    let mut sections = [SectionEntry::default(); Section::COUNT];
    for (i, (entry, section)) in (0u64..).zip(sections.iter_mut().zip(Section::ALL)) {
        let (offset, len) = (4096 * (i + 1), 1000 + i);
        entry.extent = Extent { offset, len };
        if section.has_checksum() {
            entry.xxh3 = 0xA0B0_C0D0_E0F0_0000 + i;
        }
    }
    let expected = Superblock {
        file_len: 0x0123_4567_89AB_C000,
        geometry: BundleGeometry {
            sector: 512,
            placement: Placement::Resident,
            gate_len: 2048,
            rest_len: 4096,
            gate_span: 2048,
            stride: 6144,
            scales_per_neuron: 768,
        },
        bundle_dtype: 9,
        sections,
    };
    assert_eq!(Superblock::decode(bytes).as_ref(), Ok(&expected));
    assert_eq!(&expected.encode(), bytes);
}

#[test]
fn records_decode_and_encode_byte_equal() {
    let (tensor, bank) = HEADER[SUPERBLOCK_LEN..].split_at(TENSOR_RECORD);
    let (tensor, bank) = (
        tensor.try_into().expect("size"),
        bank.try_into().expect("size"),
    );
    let expected = TensorEntry {
        name: "layers.3.attn.q".into(),
        dtype: 4,
        dims: vec![4096, 1024],
        offset: 0x1_0040,
        len: 0x20_0000,
        xxh3: 0xFEDC_BA98_7654_3210,
    };
    assert_eq!(TensorEntry::decode(tensor).as_ref(), Ok(&expected));
    assert_eq!(&expected.encode(), tensor);
    let expected = BankEntry {
        layer: 3,
        expert: 17,
        neurons: 11008,
        flags: 0x8000_0001,
        offset: 0x700_0000,
        len: 11008 * 6144,
        first_checksum: 3 * 11008,
        scales_offset: 0x6000,
        scales_xxh3: 0x1122_3344_5566_7788,
    };
    assert_eq!(BankEntry::decode(bank).as_ref(), Ok(&expected));
    assert_eq!(&expected.encode(), bank);
}
