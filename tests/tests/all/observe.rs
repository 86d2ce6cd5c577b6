//! Values seen by an observer of the FFNs.

use emberflow_engine::{FfnSeen, Lab, Logits, Options, Sparsity};
use emberflow_kernels::DType;
use emberflow_models::Checkpoint;
use emberflow_models::config::Activation;
use emberflow_models::names::{Role, TensorId};
use emberflow_tests::{Golden, all_logits, bits, fixtures, open, packed, roomy, squeeze};

/// For one layer: residual and normed input `[tokens × d]`, gates and hidden values
/// `[tokens × neurons]`.
#[derive(Default, PartialEq)]
struct Kept {
    residual: Vec<f32>,
    x: Vec<f32>,
    gates: Vec<f32>,
    hidden: Vec<f32>,
}

fn watch(engine: &mut emberflow_engine::Engine, tokens: &[u32], chunk: usize) -> Vec<Kept> {
    let layers = engine.config().layers as usize;
    let mut kept: Vec<Kept> = (0..layers).map(|_| Kept::default()).collect();
    let mut sequence = engine.new_sequence().unwrap();
    for part in tokens.chunks(chunk) {
        let mut keep = |seen: &FfnSeen<'_>| {
            let k = &mut kept[seen.layer];
            assert_eq!(seen.tokens, part.len());
            k.residual.extend_from_slice(seen.residual);
            k.x.extend_from_slice(seen.x);
            for t in 0..seen.tokens {
                let of = |v: &[f32]| v.iter().skip(t).step_by(seen.tokens).copied().collect();
                let (gates, hidden): (Vec<f32>, Vec<f32>) = (of(seen.gates), of(seen.hidden));
                k.gates.extend(gates);
                k.hidden.extend(hidden);
            }
        };
        engine
            .forward_observed(&mut sequence, part, Logits::Last, &mut keep)
            .unwrap();
    }
    kept
}

fn activated(activation: Activation, v: f64) -> f64 {
    match activation {
        Activation::Relu => v.max(0.0),
        Activation::Silu => v / (1.0 + (-v).exp()),
        other => panic!("{other:?} is not among the cases"),
    }
}

/// Gates and hidden values of layer `l` against those computed from the weights in f64.
fn check_layer(name: &str, source: &dyn Checkpoint, l: usize, k: &Kept) {
    let c = source.config();
    let (d, ffn) = (c.d_model as usize, c.ffn as usize);
    let read = |role| {
        let mut rows = vec![0.0; ffn * d];
        let id = TensorId::layer(role, l as u32);
        source.read_rows(id, 0, ffn, &mut rows).unwrap();
        rows
    };
    let (gate, up) = (read(Role::Gate), read(Role::Up));
    let mut fired = 0;
    for (t, x) in k.x.chunks_exact(d).enumerate() {
        let dot = |row: &[f32]| -> f64 {
            let terms = row
                .iter()
                .zip(x)
                .map(|(a, b)| f64::from(*a) * f64::from(*b));
            terms.sum()
        };
        for n in 0..ffn {
            let row = n * d..(n + 1) * d;
            let g = activated(c.ffn_kind.activation, dot(&gate[row.clone()]));
            let u = dot(&up[row]);
            let u = if c.ffn_kind.relu_on_up { u.max(0.0) } else { u };
            let (gate, hidden) = (k.gates[t * ffn + n], k.hidden[t * ffn + n]);
            assert!((f64::from(gate) - g).abs() < 1e-4, "{name}: {gate} {g}");
            assert!((f64::from(hidden) - g * u).abs() < 1e-4, "{name}: {hidden}");
            fired += u64::from(hidden != 0.0);
        }
    }
    assert!(fired > 0);
}

#[test]
fn gates_and_hidden_values_are_those_of_the_weights_whatever_the_budget() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["relu", "bamboo", "llama2"] {
        let case = fixtures().join("models").join(name);
        let tokens = Golden::load(&case, "golden.json").tokens;
        let container = packed(&case, dir.path(), DType::F32);
        let options = Options {
            lab: Lab {
                observe: true,
                ..Lab::default()
            },
            ..roomy(tokens.len())
        };
        let mut engine = open(&container, options.clone());
        let kept = watch(&mut engine, &tokens, 16);
        let expected = all_logits(
            &mut open(&container, roomy(tokens.len())),
            &tokens,
            tokens.len().min(16),
        );
        let logits = all_logits(&mut engine, &tokens, 16);
        assert!(
            bits(&expected) == bits(&logits),
            "{name}: watching changed the result"
        );

        let source = emberflow_models::open(&case).unwrap();
        let c = source.config();
        for (l, k) in kept.iter().enumerate() {
            assert_eq!(k.x.len(), tokens.len() * c.d_model as usize);
            assert_eq!(k.residual.len(), k.x.len());
            assert!(k.residual != k.x);
            check_layer(name, &*source, l, k);
        }

        // offloaded, token by token, and other chunk lengths
        for chunk in [1, 3] {
            let sparsity = if c.ffn_kind.activation.is_sparse() {
                Sparsity::Exact
            } else {
                Sparsity::Dense
            };
            let options = Options {
                sparsity,
                threads: 1,
                ..options.clone()
            };
            let mut engine = open(&container, options);
            squeeze(&mut engine, 0.4);
            assert!(
                watch(&mut engine, &tokens, chunk) == kept,
                "{name}: chunk {chunk}"
            );
        }
    }
}

#[test]
fn without_the_option_values_are_empty_and_inputs_are_there() {
    let dir = tempfile::tempdir().unwrap();
    let case = fixtures().join("models/relu");
    let container = packed(&case, dir.path(), DType::Q8);
    let mut engine = open(&container, roomy(4));
    let mut sequence = engine.new_sequence().unwrap();
    let mut seen = 0;
    let mut look = |s: &FfnSeen<'_>| {
        assert!(s.gates.is_empty() && s.hidden.is_empty());
        assert!(s.x.iter().any(|&x| x != 0.0));
        seen += 1;
    };
    engine
        .forward_observed(&mut sequence, &[1, 2], Logits::Last, &mut look)
        .unwrap();
    assert_eq!(seen, engine.config().layers);
}
