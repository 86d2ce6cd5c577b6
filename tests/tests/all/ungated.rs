//! FFNs of two matrices: inactive neurons are not read.

use std::path::{Path, PathBuf};

use emberflow_engine::{Lab, Options, Sparsity};
use emberflow_kernels::DType;
use emberflow_tests::widen::{Wider, widen};
use emberflow_tests::{Golden, case, counted, give, open, packed, roomy};

/// Families whose activation has exact zeros.
const CASES: [&str; 5] = ["opt", "nemotron", "nemotron_bias", "falcon", "falcon_new"];

#[test]
fn bundles_have_two_vectors() {
    let dir = tempfile::tempdir().unwrap();
    for name in CASES {
        let container = packed(&case(name), dir.path(), DType::F32);
        let container = emberflow_storage::container::Container::open(&container).unwrap();
        let g = container.geometry();
        assert_eq!((g.gate_len, g.rest_len), (4 * 36, 4 * 36), "{name}");
    }
}

/// Number of copies of each neuron.
const COPIES: usize = 11;

/// The case with more neurons, most of which get a bias that prevents them from firing: 97 % are zero
/// for a token, as published for OPT-6.7B (arXiv 2312.11514), and two clusters are a small part of it.
fn sparse_opt(dir: &Path) -> PathBuf {
    let neurons = format!("\"ffn_dim\": {}", 300 * COPIES);
    let wider = Wider {
        copies: COPIES,
        config: ("\"ffn_dim\": 300", &neurons),
        rows: &["fc1."],
        columns: "fc2.weight",
        change: |name, values| {
            for (i, value) in values.chunks_exact_mut(2).enumerate() {
                if name.ends_with("fc1.bias") && i % 20 > 0 {
                    value.copy_from_slice(&MINUS_20);
                }
            }
        },
    };
    widen(&case("opt"), &dir.join("opt"), &wider)
}

/// In bf16.
const MINUS_20: [u8; 2] = 0xC1A0_u16.to_le_bytes();

/// With half of the FFN in memory, far fewer bytes are read per token than by a dense pass over the
/// same file, and the text is the same.
#[test]
fn sparse_reads_are_fewer_than_dense_ones() {
    let dir = tempfile::tempdir().unwrap();
    let tokens = Golden::load(&case("opt"), "golden.json").tokens;
    let checkpoint = sparse_opt(dir.path());
    for quant in [DType::F32, DType::Q8] {
        let container = packed(&checkpoint, dir.path(), quant);
        let with = |sparsity| Options {
            sparsity,
            lab: Lab {
                gates_stay: true,
                ..Lab::default()
            },
            ..roomy(tokens.len())
        };
        let mut dense = open(&container, with(Sparsity::Dense));
        let mut exact = open(&container, with(Sparsity::Exact));
        let (expected, _) = counted(&mut dense, &tokens);
        for (share, times) in [(0.5, 1), (0.9, 3)] {
            give(&mut dense, share);
            give(&mut exact, share);
            let (full, all) = counted(&mut dense, &tokens);
            let (sparse, few) = counted(&mut exact, &tokens);
            assert!(full == expected && sparse == expected, "{quant:?}");
            let [read, most] = [few, all].map(|c| c.bytes_read / tokens.len() as u64);
            println!("{quant:?} at {share}: {read} bytes a token, dense {most}");
            assert!(30 * few.fired < few.possible, "{quant:?}: {few:?}");
            assert!(
                times * read < most,
                "{quant:?} at {share}: {read} bytes a token, dense {most}"
            );
        }
    }
}

/// Every budget gives the bits of the whole model in memory, for any residency.
#[test]
fn budgets_change_no_bit() {
    let dir = tempfile::tempdir().unwrap();
    for name in CASES {
        let case = case(name);
        let tokens = Golden::load(&case, "golden.json").tokens;
        let container = packed(&case, dir.path(), DType::Q4);
        let mut engine = open(&container, roomy(tokens.len()));
        let (expected, _) = counted(&mut engine, &tokens);
        for share in [0.0, 0.25, 0.5, 0.75, 0.1] {
            give(&mut engine, share);
            assert!(
                counted(&mut engine, &tokens).0 == expected,
                "{name}: {share}"
            );
        }
    }
}
