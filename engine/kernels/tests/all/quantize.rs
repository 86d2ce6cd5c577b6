//! Stored rows: exact bytes, error bounds, the q8 fixed point, and refused input.

use emberflow_kernels::{
    Activations, Cpu, DType, GROUP, LONGEST, Outliers, QuantizeError, Row, SuperBlock, error_bound,
    nibble, outlier_channels, outliers, quantize_q4c, quantize_row, store_q4_row, store_q4k_row,
    super_blocks, with_scale_per_token,
};
use proptest::prelude::*;

fn quantize(dtype: DType, src: &[f32]) -> Result<(Vec<u8>, Vec<u8>), QuantizeError> {
    // Filled with junk: every byte has to be written.
    let mut quants = vec![0xa5; dtype.quants_bytes(src.len())];
    let mut scales = vec![0xa5; dtype.scales_bytes(src.len())];
    quantize_row(dtype, src, &mut quants, &mut scales)?;
    Ok((quants, scales))
}

fn restored(dtype: DType, src: &[f32]) -> Vec<f32> {
    let (quants, scales) = quantize(dtype, src).unwrap();
    let mut out = vec![f32::NAN; src.len()];
    Cpu::detect().dequantize(Row::split(dtype, src.len(), &quants, &scales), &mut out);
    out
}

fn max_abs(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |max, v| max.max(v.abs()))
}

#[test]
fn q4_bytes() {
    // Scale 1, from the −8; the last group has one element and padding.
    let src: Vec<f32> = (0..32)
        .map(|i| (i % 16) as f32 - 8.0)
        .chain([4.0])
        .collect();
    let (quants, scales) = quantize(DType::Q4, &src).unwrap();
    let first: Vec<u8> = (0..16).map(|i| i | i << 4).collect();
    assert_eq!(quants[..16], first);
    // 4 / −8 = −0.5; 4 / −0.5 + 8 = 0; padding is nibble 8.
    assert_eq!(quants[16], 0x80);
    assert!(quants[17..].iter().all(|&b| b == 0x88));
    assert_eq!(scales, [0x00, 0x3c, 0x00, 0xb8]);
}

proptest! {
    /// A block of Q4_0 is `(quant − 8) × scale` with any f16 scale, and often has no −8.
    #[test]
    fn q4_0_is_stored_without_loss(
        scale in (1u16..0x7c00, any::<bool>()).prop_map(|(bits, minus)| bits | u16::from(minus) << 15),
        low in -8i8..=0,
        quants in prop::collection::vec(0u32..16, GROUP),
    ) {
        let scale = half::f16::from_bits(scale).to_f32();
        let quants = quants.iter().map(|&q| f32::from((q as i8 - 8).max(low)));
        let src: Vec<f32> = quants.map(|q| q * scale).collect();
        prop_assert_eq!(restored(DType::Q4, &src), src);
    }
}

#[test]
fn q8_bytes() {
    let mut src = vec![0.0f32; 40];
    (src[0], src[1], src[31]) = (-254.0, 127.0, 3.0);
    src[32] = 1e-9; // below what an f16 scale can hold: the group is zero
    let (quants, scales) = quantize(DType::Q8, &src).unwrap();
    assert_eq!(scales, [0x00, 0x40, 0x00, 0x00]);
    // 127 / 2 = 63.5 and 3 / 2 = 1.5 round away from zero.
    assert_eq!((quants[0], quants[1], quants[31]), (-127i8 as u8, 64, 2));
    assert!(quants[2..31].iter().chain(&quants[32..]).all(|&b| b == 0));
}

#[test]
fn zero_rows_have_zero_scales() {
    for dtype in [DType::Q8, DType::Q4] {
        let (_, scales) = quantize(dtype, &[0.0; 70]).unwrap();
        assert!(
            scales
                .chunks(2)
                .all(|s| f32::from(half::f16::from_le_bytes([s[0], s[1]])) == 0.0)
        );
        assert!(restored(dtype, &[0.0; 70]).iter().all(|&w| w == 0.0));
    }
}

#[test]
fn input_that_is_not_finite_is_named() {
    for dtype in DType::ALL {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut src = vec![1.0f32; 50];
            src[37] = bad;
            match quantize(dtype, &src) {
                Err(QuantizeError::NotFinite { index: 37, .. }) => {}
                other => panic!("{dtype} {bad}: {other:?}"),
            }
        }
    }
    let message = QuantizeError::NotFinite {
        index: 37,
        value: f32::NAN,
    }
    .to_string();
    assert_eq!(message, "element 37 is NaN, expected a finite number");
}

#[test]
fn input_beyond_the_range_is_named() {
    // f16 ends at 65504; q8 at 127 times and q4 at 8 times that; bf16 near the end of f32.
    let cases = [
        (DType::F16, 65_504.0, 65_520.0),
        (DType::Q8, 8.3e6, 8.33e6),
        (DType::Q4, 524_000.0, 524_200.0),
        // 63 minimums or 15 · 63 steps
        (DType::Q4k, 4e6, 6.2e7),
        (DType::BF16, 3.38e38, f32::MAX),
    ];
    for (dtype, good, bad) in cases {
        let mut src = vec![1.0f32; 50];
        src[40] = good;
        assert!(quantize(dtype, &src).is_ok(), "{dtype}");
        src[40] = -bad;
        match quantize(dtype, &src) {
            Err(QuantizeError::OutOfRange {
                index: 40,
                dtype: at,
                ..
            }) => assert_eq!(at, dtype),
            other => panic!("{dtype}: {other:?}"),
        }
    }
}

fn rows() -> impl Strategy<Value = Vec<f32>> {
    (prop::collection::vec(-1.0f32..1.0, 0..200), -35i32..15)
        .prop_map(|(row, e)| row.into_iter().map(|w| w * (e as f32).exp2()).collect())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    #[test]
    fn errors_stay_within_the_bound(row in rows()) {
        for dtype in DType::ALL.into_iter().filter(|&dtype| dtype != DType::Mxfp4) {
            let restored = restored(dtype, &row);
            let group_len = dtype.span();
            for (group, stored) in row.chunks(group_len).zip(restored.chunks(group_len)) {
                let bound = error_bound(dtype, max_abs(group));
                // The bound of a whole row holds too: it grows with the magnitude.
                prop_assert!(bound <= error_bound(dtype, max_abs(&row)));
                for (w, w2) in group.iter().zip(stored) {
                    let error = (f64::from(*w) - f64::from(*w2)).abs();
                    prop_assert!(error <= f64::from(bound), "{dtype}: {w:e} -> {w2:e}, bound {bound:e}");
                }
            }
        }
    }

    /// Requantising what was stored changes nothing, as long as the scale is a normal f16
    /// (a subnormal one has too few bits to be found again).
    #[test]
    fn q8_is_a_fixed_point(row in prop::collection::vec(-1.0f32..1.0, 1..200), e in -6i32..20) {
        let row: Vec<f32> = row.into_iter().map(|w| w * (e as f32).exp2()).collect();
        prop_assume!(row.chunks(32).all(|g| max_abs(g) / 127.0 > 6.2e-5));
        let (quants, scales) = quantize(DType::Q8, &row).unwrap();
        let again = quantize(DType::Q8, &restored(DType::Q8, &row)).unwrap();
        prop_assert_eq!((quants, scales), again);
    }

    #[test]
    fn float_formats_round_to_nearest(row in rows()) {
        prop_assert_eq!(restored(DType::F32, &row), row.clone());
        let halves: Vec<f32> = row.iter().map(|&w| half::f16::from_f32_const(w).into()).collect();
        prop_assert_eq!(restored(DType::F16, &row), halves);
        let halves: Vec<f32> = row.iter().map(|&w| half::bf16::from_f32_const(w).into()).collect();
        prop_assert_eq!(restored(DType::BF16, &row), halves);
    }
}

/// The bound is not a bluff: it is within a small factor of the worst error seen.
#[test]
fn the_bound_is_tight() {
    for (dtype, factor) in [
        (DType::F16, 1.1),
        (DType::BF16, 1.1),
        (DType::Q8, 1.1),
        (DType::Q4, 1.1),
    ] {
        let mut worst: f64 = 0.0;
        for seed in 0..2000u32 {
            // One element of magnitude 1, the opposite one, and a ramp between them.
            let row: Vec<f32> = (0..32)
                .map(|i| match i {
                    0 => 1.0,
                    1 => -1.0,
                    _ => ((seed * 31 + i) % 1999) as f32 / 1000.0 - 1.0,
                })
                .collect();
            for (w, w2) in row.iter().zip(restored(dtype, &row)) {
                worst = worst.max((f64::from(*w) - f64::from(w2)).abs());
            }
        }
        let bound = f64::from(error_bound(dtype, 1.0));
        let exponent_slack = if dtype.is_grouped() { 1.0 } else { 2.0 }; // 1.0 starts a binade
        assert!(
            worst * factor * exponent_slack >= bound,
            "{dtype}: worst {worst:e}, bound {bound:e}"
        );
    }
}

/// Roughly normal rows: the squared error is the bound that the format was chosen for.
#[test]
fn q4k_has_a_third_less_squared_error_than_q4() {
    let mut random = fastrand::Rng::with_seed(7);
    let row: Vec<f32> = (0..64 * 256)
        .map(|_| (0..12).map(|_| random.f32() - 0.5).sum())
        .collect();
    let norm: f64 = row.iter().map(|&w| f64::from(w).powi(2)).sum();
    let [q4, q4k] = [DType::Q4, DType::Q4k].map(|dtype| {
        let errors = row.iter().zip(restored(dtype, &row));
        errors.map(|(w, r)| f64::from(w - r).powi(2)).sum::<f64>() / norm
    });
    assert!(q4k < q4 * 2.0 / 3.0, "q4k {q4k:.5}, q4 {q4:.5}");
}

proptest! {
    /// Reading a row as super-blocks and storing it again changes no byte, whatever its length.
    #[test]
    fn q4k_rows_rounded_elsewhere_hold_the_values_they_were_given(
        quants in prop::collection::vec(0u8..16, 1..700),
        seed: u64,
    ) {
        let mut random = fastrand::Rng::with_seed(seed);
        let n = quants.len();
        let groups = n.div_ceil(GROUP);
        let mut six = |first: usize| {
            let mut six = [0u8; 8];
            let used = six.iter_mut().take(groups - first);
            used.for_each(|six| *six = random.u8(..64));
            six
        };
        let block = |first| SuperBlock {
            d: half::f16::from_f32(0.25).to_bits(),
            dmin: half::f16::from_f32(-3.5).to_bits(),
            scales: six(first),
            mins: six(first),
        };
        let blocks: Vec<_> = (0..groups).step_by(8).map(block).collect();
        let mut row = vec![0xa5; DType::Q4k.row_bytes(n)];
        store_q4k_row(&quants, &blocks, &mut row);
        let view = Row::inline(DType::Q4k, n, &row);
        let again: Vec<_> = super_blocks(view.scales(), groups).collect();
        prop_assert_eq!(&again, &blocks);
        let mut values = vec![0.0; n];
        Cpu::detect().dequantize(view, &mut values);
        for (i, value) in values.into_iter().enumerate() {
            prop_assert_eq!(nibble(view.quants(), i), quants[i]);
            let (scale, min) = blocks[i / 256].factors(i / GROUP % 8);
            prop_assert_eq!(value, f32::from(quants[i]).mul_add(scale, -min));
        }
    }

    #[test]
    fn q4_rows_rounded_elsewhere_hold_the_values_they_were_given(
        quants in prop::collection::vec(0u8..16, 1..300),
        seed in 1u16..1000,
    ) {
        let scales: Vec<f32> = (0..quants.len().div_ceil(GROUP))
            .map(|g| f32::from(seed) * 0.25 - g as f32)
            .collect();
        let stored: Vec<u16> = scales.iter().map(|&s| half::f16::from_f32(s).to_bits()).collect();
        let mut row = vec![0xa5; DType::Q4.row_bytes(quants.len())];
        store_q4_row(&quants, &stored, &mut row);
        let mut values = vec![f32::NAN; quants.len()];
        Cpu::detect().dequantize(Row::inline(DType::Q4, quants.len(), &row), &mut values);
        for (i, (value, quant)) in values.iter().zip(&quants).enumerate() {
            prop_assert_eq!(*value, (f32::from(*quant) - 8.0) * scales[i / GROUP]);
        }
    }
}

/// Any block of mxfp4 comes back as the same numbers, and other numbers are refused.
#[test]
fn mxfp4_is_exact_or_refused() {
    let mut random = fastrand::Rng::with_seed(3);
    for round in 0..2000 {
        let n = [32, 64, 33, 7][round % 4];
        let dtype = DType::Mxfp4;
        let quants: Vec<u8> = (0..dtype.quants_bytes(n)).map(|_| random.u8(..)).collect();
        let scales: Vec<u8> = (0..dtype.scales_bytes(n))
            .map(|_| random.u8(..250))
            .collect();
        let mut values = vec![f32::NAN; n];
        Cpu::detect().dequantize(Row::split(dtype, n, &quants, &scales), &mut values);
        assert_eq!(restored(dtype, &values), values);
    }
    for (values, index) in [
        (vec![0.3; 40], 0),
        ([vec![1.0; 39], vec![5.0]].concat(), 32),
    ] {
        match quantize(DType::Mxfp4, &values) {
            // all equal values are exact
            Ok(_) if index == 0 => panic!("0.3 is no power of two times a small number"),
            Err(QuantizeError::NotExact { index: at, .. }) => assert_eq!(at, index),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(
        restored(DType::Mxfp4, &[0.0, 6.0, -0.5, 1.0]),
        [0.0, 6.0, -0.5, 1.0]
    );
    assert_eq!(restored(DType::Mxfp4, &[0.0; 40]), [0.0; 40]);
}

/// A row in q4c holds its outliers to 1/254 of the largest of them, and the others as though they were
/// alone.
#[test]
fn outliers_are_stored_in_8_bits() {
    let mut random = fastrand::Rng::with_seed(5);
    let n = 300;
    let mut row: Vec<f32> = (0..n).map(|_| random.f32() - 0.5).collect();
    let channels = [3, 64, 100, 250, 299];
    assert_eq!(channels.len(), outliers(n));
    let rest = row.clone();
    for (k, &c) in channels.iter().enumerate() {
        row[usize::from(c)] = [80.0, -40.0, 3.0, 0.1, -60.0][k];
    }
    let importance: Vec<f32> = row.iter().map(|w| w.abs()).collect();
    let largest = outlier_channels(&importance);
    assert!(largest.windows(2).all(|pair| pair[0] < pair[1]));
    assert!([3, 64, 100, 299].iter().all(|c| largest.contains(c)) && !largest.contains(&250));

    let mut bytes = vec![0xa5; DType::Q4c.row_bytes(n)];
    let (quants, scales) = bytes.split_at_mut(DType::Q4c.quants_bytes(n));
    quantize_q4c(&row, &channels, quants, scales).unwrap();
    let stored = Row::inline(DType::Q4c, n, &bytes);
    let its = Outliers::of(stored);
    assert_eq!(
        its.each().map(|(_, c)| c as u16).collect::<Vec<_>>(),
        channels
    );
    let mut values = vec![0.0; n];
    Cpu::detect().dequantize(stored, &mut values);
    for (i, (&w, &value)) in row.iter().zip(&values).enumerate() {
        let bound = match channels.contains(&(i as u16)) {
            true => 80.0 / 254.0 * 1.001,
            false => error_bound(DType::Q4c, max_abs(&rest)),
        };
        assert!((w - value).abs() <= bound, "{i}: {w} is stored as {value}");
    }
}

#[test]
fn rows_that_are_too_long_for_one_sum_are_refused() {
    for dtype in [DType::Q8c, DType::Q4c] {
        let message = quantize(dtype, &vec![1.0; LONGEST + 1])
            .unwrap_err()
            .to_string();
        let expected = format!(
            "rows of 131073 elements are too long for {dtype}, which takes 131072; use q8 or q4"
        );
        assert_eq!(message, expected);
        // The largest sum there is: every weight and every activation at its end.
        let (quants, scales) = quantize(dtype, &vec![-1.0; LONGEST]).unwrap();
        let mut x = Activations::default();
        for cpu in Cpu::all() {
            let cpu = with_scale_per_token(cpu, true);
            cpu.quantize_activations(&vec![1.0; LONGEST], 1, &mut x);
            let row = Row::split(dtype, LONGEST, &quants, &scales);
            let product = cpu.dot_q(row, x.token(0));
            assert!(
                (product / -(LONGEST as f32) - 1.0).abs() < 1e-5,
                "{dtype} {product}"
            );
        }
    }
}
