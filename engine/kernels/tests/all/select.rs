//! The largest values are found, in their order, on every instruction set.

use emberflow_kernels::{Cpu, argmax};
use proptest::prelude::*;

/// Values with many equal ones, infinities and NaN among them.
fn value() -> impl Strategy<Value = f32> {
    prop_oneof![
        8 => (-20i32..20).prop_map(|v| v as f32 / 4.0),
        4 => -100.0f32..100.0,
        1 => prop::sample::select(vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0]),
    ]
}

/// All values but NaN, sorted.
fn sorted(x: &[f32]) -> Vec<(f32, u32)> {
    let mut all: Vec<(f32, u32)> = x.iter().copied().zip(0..).collect();
    all.retain(|(v, _)| !v.is_nan());
    all.sort_by(|a, b| b.0.partial_cmp(&a.0).unwrap().then(a.1.cmp(&b.1)));
    all
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..Default::default() })]

    #[test]
    fn the_largest_are_found(x in prop::collection::vec(value(), 0..700), k in 0usize..90) {
        let mut expected = sorted(&x);
        let first = expected.first().map(|(_, i)| *i as usize);
        prop_assert_eq!(argmax(&x), first);
        expected.truncate(k);
        for cpu in Cpu::all() {
            prop_assert_eq!(cpu.argmax(&x), first, "{}", cpu.name());
            let mut best = vec![(9.0, 9)];
            cpu.top_k(&x, k, &mut best);
            prop_assert_eq!(&best, &expected, "{}", cpu.name());
        }
    }
}

#[test]
fn finding_the_largest_does_not_allocate() {
    let x: Vec<f32> = (0..5000).map(|i| i as f32).collect();
    let k = 40;
    let mut best = Vec::with_capacity(2 * k + 64);
    let (before, room) = (best.as_ptr(), best.capacity());
    Cpu::detect().top_k(&x, k, &mut best);
    assert_eq!((best.as_ptr(), best.capacity()), (before, room));
    assert_eq!(best[0], (4999.0, 4999));
    assert_eq!(best[39], (4960.0, 4960));
}
