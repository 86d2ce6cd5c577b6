//! Gaussian top-k gives exact zeros: neurons that do not fire are not read.

use std::path::{Path, PathBuf};

use emberflow_engine::{Ablation, Budget, Engine, Error, Lab, Model, Options, Sparsity};
use emberflow_kernels::DType;
use emberflow_storage::container::Container;
use emberflow_storage::io::{IoChoice, Profile, SimOptions};
use emberflow_tests::widen::{Wider, widen};
use emberflow_tests::{Golden, case, counted, give, open, packed, roomy};

/// The fixture of eleven layers, of which ten have gates that are zero for 95 %, with nine times its
/// neurons.
fn wide(dir: &Path) -> PathBuf {
    let wider = Wider {
        copies: 9,
        config: ("      150", "      1350"),
        rows: &["mlp.gate_proj", "mlp.up_proj"],
        columns: "down_proj.weight",
        change: |_, _| {},
    };
    widen(&case("gemma3n_whole"), &dir.join("gemma3n"), &wider)
}

#[test]
fn sparse_layers_read_what_fires() {
    let dir = tempfile::tempdir().unwrap();
    let tokens = Golden::load(&case("gemma3n_whole"), "golden.json").tokens;
    let checkpoint = wide(dir.path());
    for quant in [DType::F32, DType::Q4] {
        let container = packed(&checkpoint, dir.path(), quant);
        // Reads of whole clusters depend on the disk's read costs, which are fixed here.
        let with = |sparsity| Options {
            sparsity,
            lab: Lab {
                io: IoChoice::Sim(SimOptions::new(Profile::Nvme, 7)),
                ..Lab::default()
            },
            ..roomy(tokens.len())
        };
        let mut dense = open(&container, with(Sparsity::Dense));
        let mut exact = open(&container, with(Sparsity::Auto));
        assert_eq!(exact.sparsity(), Sparsity::Exact);
        let (expected, counts) = counted(&mut exact, &tokens);
        let fired = counts.fired as f64 / counts.possible as f64;
        assert!((0.1..0.2).contains(&fired), "{quant:?}: {fired} fire");
        for (share, part) in [(0.5, 0.7), (0.7, 0.3)] {
            give(&mut dense, share);
            give(&mut exact, share);
            let (full, all) = counted(&mut dense, &tokens);
            let (sparse, few) = counted(&mut exact, &tokens);
            assert!(full == expected && sparse == expected, "{quant:?}");
            let [read, most] = [few, all].map(|c| c.bytes_read as f64 / tokens.len() as f64);
            println!("{quant:?} at {share}: {read:.0} bytes a token, dense {most:.0}");
            // neurons in q4 are so short here that whole clusters are read instead
            assert!(
                read < part * most || quant == DType::Q4 && 10 * few.misses < all.misses,
                "{quant:?} at {share}: {read} bytes a token, dense {most:.0}"
            );
        }
    }
}

#[test]
fn what_needs_a_gate_alone_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let container = packed(&case("gemma3n"), dir.path(), DType::Q8);
    let refused = |change: &dyn Fn(&mut Options)| {
        let mut options = roomy(32);
        change(&mut options);
        let model = Model::open(Container::open(&container).unwrap()).unwrap();
        Engine::open(model, options).err().unwrap()
    };
    let predicted = refused(&|o| o.sparsity = Sparsity::Predicted);
    assert!(matches!(predicted, Error::NoPredictors), "{predicted}");
    let mapped = refused(&|o| o.lab.ablation = Ablation::Mmap);
    assert!(matches!(mapped, Error::GateTop { .. }), "{mapped}");
    let small = refused(&|o| o.budget = Budget::Bytes(1 << 20));
    assert!(matches!(small, Error::BudgetTooSmall { .. }), "{small}");
}
