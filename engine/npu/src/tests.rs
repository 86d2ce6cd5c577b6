//! Compares graphs on the CPU with plain integer arithmetic. Without ONNX Runtime the tests are skipped, or fail if
//! `EMBERFLOW_NEEDS_ONNXRUNTIME` is set, as in CI, which runs them with ONNX Runtime's kernels and with OpenVINO's.

use crate::graph::GROUP;
use crate::onnx::{Element, Graph};
use crate::{Form, GroupForm, Npu, Operands, Provider, Summed, Sums, Weights, list};

/// The stand-in for an NPU.
fn npu() -> Option<Npu> {
    match Npu::open(Provider::for_tests().unwrap()) {
        Ok(npu) => Some(npu),
        Err(e) => {
            let needed = std::env::var_os("EMBERFLOW_NEEDS_ONNXRUNTIME").is_some();
            assert!(!needed, "{e}");
            eprintln!("SKIPPED: {e}");
            None
        }
    }
}

/// Random rows and tokens.
struct Case {
    form: Form,
    rows: Vec<u8>,
    tokens: Vec<i8>,
    outliers: [Vec<i8>; 2],
}

impl Case {
    fn new(form: Form, [rows, tokens]: [usize; 2]) -> Self {
        let mut random = fastrand::Rng::with_seed((31 * rows + tokens) as u64);
        let mut bytes = vec![0; rows * form.row_bytes];
        random.fill(&mut bytes);
        // Includes the largest products.
        bytes[0] = 0x80;
        let len = tokens * form.groups * GROUP;
        let mut x: Vec<i8> = (0..len).map(|_| random.i8(-127..)).collect();
        x.iter_mut().take(1).for_each(|x| *x = -127);
        let outliers = [rows, tokens].map(|count| {
            let count = count * form.outliers();
            (0..count).map(|_| random.i8(-127..)).collect()
        });
        Self {
            form,
            rows: bytes,
            tokens: x,
            outliers,
        }
    }

    fn operands(&self) -> Operands<'_> {
        Operands {
            rows: &self.rows,
            tokens: &self.tokens,
            outliers: self.outliers.each_ref().map(Vec::as_slice),
        }
    }

    /// Sum `s` of a row and a token.
    fn expected(&self, row: usize, token: usize, s: usize) -> i32 {
        match (self.form.summed, s) {
            (Summed::ByGroup, group) => self.sum(row, token, group),
            (Summed::ByRow(_), 0) => (0..self.form.groups).map(|g| self.sum(row, token, g)).sum(),
            (Summed::ByRow(count), _) => {
                let item = |values: &[i8], i: usize| values[i * count..][..count].to_vec();
                let pairs = item(&self.outliers[0], row)
                    .into_iter()
                    .zip(item(&self.outliers[1], token));
                pairs.map(|(w, x)| i32::from(w) * i32::from(x)).sum()
            }
        }
    }

    fn weight(&self, row: usize, group: usize, j: usize) -> i32 {
        let bytes = self.form.weights.group_bytes();
        let stored = &self.rows[row * self.form.row_bytes + group * bytes..][..bytes];
        match self.form.weights {
            Weights::Bytes => i32::from(stored[j] as i8),
            Weights::Nibbles(offset) => {
                let byte = stored[j % bytes];
                i32::from(byte >> (4 * (j / bytes)) & 15) - i32::from(offset)
            }
        }
    }

    fn sum(&self, row: usize, token: usize, group: usize) -> i32 {
        let x = &self.tokens[(token * self.form.groups + group) * GROUP..][..GROUP];
        let products = x
            .iter()
            .enumerate()
            .map(|(j, &x)| self.weight(row, group, j) * i32::from(x));
        products.sum()
    }
}

/// Compares all products with plain sums, each within `off` of the expected one; returns the largest error.
fn compare(npu: &mut Npu, forms: &[Form], sizes: &[[usize; 2]], off: impl Fn(i32) -> i32) -> i32 {
    let mut most = 0;
    for &form in forms {
        let prepared = npu.prepare(form);
        prepared.unwrap_or_else(|e| panic!("{form:?}: {e}"));
        for &size in sizes {
            let case = Case::new(form, size);
            let mut seen = 0;
            let compare = |tile: Sums<'_>| {
                for (r, row) in tile.rows.clone().enumerate() {
                    for (t, token) in tile.tokens.clone().enumerate() {
                        for g in 0..form.sums() {
                            let found = tile.sums[g * tile.group + r * tile.width + t];
                            let expected = case.expected(row, token, g);
                            let apart = (found - expected).abs();
                            assert!(
                                apart <= off(expected),
                                "{form:?} {size:?}: {found} {expected}"
                            );
                            most = most.max(apart);
                        }
                        seen += 1;
                    }
                }
            };
            npu.multiply(form, case.operands(), compare).unwrap();
            assert_eq!(seen, size[0] * size[1]);
        }
    }
    most
}

/// Forms with the given sums and numbers of groups, and odd lengths of scales.
fn forms(summed: &[Summed], groups: &[usize]) -> Vec<Form> {
    let weights = [Weights::Bytes, Weights::Nibbles(8), Weights::Nibbles(0)];
    let form = |weights: Weights, &summed: &Summed, &groups: &usize| Form {
        weights,
        summed,
        groups,
        row_bytes: groups * weights.group_bytes() + 2 * groups + 5,
    };
    let forms = weights.into_iter().flat_map(|weights| {
        let summed = summed.iter();
        summed.flat_map(move |summed| {
            groups
                .iter()
                .map(move |groups| form(weights, summed, groups))
        })
    });
    forms.collect()
}

const SIZES: [[usize; 2]; 6] = [[1, 1], [130, 1], [128, 5], [200, 40], [7, 300], [1100, 1]];

#[test]
fn sums_are_exact() {
    let Some(mut npu) = npu() else { return };
    let summed = [Summed::ByGroup, Summed::ByRow(0), Summed::ByRow(9)];
    compare(&mut npu, &forms(&summed, &[1, 3, 17]), &SIZES, |_| 0);
}

/// The sum of a row of `byte` and a token of -127.
fn sum_of_all(npu: &mut Npu, form: Form, byte: u8) -> i32 {
    npu.prepare(form).unwrap();
    let (rows, x) = (vec![byte; form.row_bytes], vec![-127; form.groups * GROUP]);
    let operands = Operands {
        rows: &rows,
        tokens: &x,
        outliers: [&[]; 2],
    };
    let mut found = Vec::new();
    npu.multiply(form, operands, |sums| found.push(sums.sums[0]))
        .unwrap();
    assert_eq!(found.len(), 1);
    found[0]
}

/// 32-bit floats give exact sums, also of rows with several pieces; 16-bit floats are close.
#[test]
fn sums_of_floats_are_exact_or_near() {
    if npu().is_none() {
        return;
    }
    let summed = [Summed::ByRow(0), Summed::ByRow(9)];
    let forms = forms(&summed, &[1, 17, 33, 70]);
    let mut floats = vec![Provider::CpuFloats];
    // Qualcomm's simulator, if its package is installed.
    if Npu::open(Provider::QnnCpu).is_ok() {
        floats.push(Provider::QnnCpu);
    }
    for provider in floats {
        let mut npu = Npu::open(provider).unwrap();
        compare(&mut npu, &forms, &SIZES, |_| 0);
        assert!(npu.is_exact(), "{provider}");
        // Only largest products. Pieces of nibbles have more channels.
        let bytes = Form {
            groups: 128,
            row_bytes: 4100,
            ..forms[0]
        };
        assert_eq!(sum_of_all(&mut npu, bytes, 0x80), 4096 * 128 * 127);
        let nibbles = Form {
            weights: Weights::Nibbles(8),
            groups: 512,
            row_bytes: 512 * 16,
            ..bytes
        };
        assert_eq!(sum_of_all(&mut npu, nibbles, 0), 16384 * 8 * 127);
    }
    let mut halves = Npu::open(Provider::CpuHalves).unwrap();
    let off = compare(&mut halves, &forms, &SIZES, |sum| 1024 + sum.abs() / 256);
    assert!(off > 0 && !halves.is_exact());
    halves.clear();
    assert!(halves.is_exact());
}

/// A provider without integer products refuses sums by group, with advice.
#[test]
fn sums_by_group_need_integers() {
    if npu().is_none() {
        return;
    }
    let mut npu = Npu::open(Provider::CpuFloats).unwrap();
    let error = npu.prepare(forms(&[Summed::ByGroup], &[2])[0]).unwrap_err();
    assert!(error.to_string().contains("q8c"), "{error}");
}

/// Experts in a group have the sums that each has alone, with any number of tokens, and share runs.
#[test]
fn groups_of_experts_have_the_sums_of_each() {
    let Some(mut npu) = npu() else { return };
    let summed = [Summed::ByRow(0), Summed::ByRow(9), Summed::ByGroup];
    compare_groups(&mut npu, &summed);
    // Qualcomm's simulator, if its package is installed.
    for provider in [Provider::CpuFloats, Provider::QnnCpu] {
        match Npu::open(provider) {
            Ok(mut npu) => compare_groups(&mut npu, &summed[..2]),
            Err(e) => assert_eq!(provider, Provider::QnnCpu, "{e}"),
        }
    }
}

fn compare_groups(npu: &mut Npu, summed: &[Summed]) {
    let forms = [Weights::Bytes, Weights::Nibbles(8), Weights::Nibbles(0)];
    for (weights, summed) in forms
        .into_iter()
        .flat_map(|weights| summed.iter().map(move |&summed| (weights, summed)))
    {
        // In the second case larger groups need several runs, the last one short.
        for (groups, rows, capacity) in [(3, 160, 16), (9, 450, 64)] {
            let row_bytes = groups * weights.group_bytes() + 2 * groups + 5;
            let form = Form {
                weights,
                summed,
                groups,
                row_bytes,
            };
            let group = GroupForm {
                form,
                rows,
                capacity,
            };
            npu.prepare(form).unwrap();
            npu.prepare_groups(group).unwrap();
            for count in [1, 3, 4, 7, 16, 21] {
                let tokens = |expert: usize| [capacity, 0, 1, capacity / 2 + 1][expert % 4];
                let cases = (0..count).map(|expert| Case::new(form, [rows, tokens(expert)]));
                let cases: Vec<Case> = cases.collect();
                let operands: Vec<Operands<'_>> = cases.iter().map(Case::operands).collect();
                let mut seen = vec![0; count];
                let compare = |expert: usize, tile: Sums<'_>| {
                    for (r, row) in tile.rows.clone().enumerate() {
                        for (t, token) in tile.tokens.clone().enumerate() {
                            for g in 0..form.sums() {
                                let found = tile.sums[g * tile.group + r * tile.width + t];
                                let expected = cases[expert].expected(row, token, g);
                                assert_eq!(found, expected, "{group:?}, {expert} of {count}");
                            }
                            seen[expert] += 1;
                        }
                    }
                };
                let ran = npu.multiply_group(group, &operands, compare).unwrap();
                let pairs: Vec<usize> = (0..count).map(|expert| rows * tokens(expert)).collect();
                assert_eq!(seen, pairs);
                assert!(ran.rows >= (count * capacity) as u64);
                if count == 16 && groups == 3 {
                    assert!(ran.runs <= 2, "{ran:?}");
                }
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_an_error() {
    let Some(mut npu) = npu() else { return };
    let form = Form {
        weights: Weights::Bytes,
        summed: Summed::ByGroup,
        groups: 2,
        row_bytes: 68,
    };
    let none = |_: Sums<'_>| {};
    fn plain<'a>(rows: &'a [u8], tokens: &'a [i8]) -> Operands<'a> {
        let outliers = [&[][..]; 2];
        Operands {
            rows,
            tokens,
            outliers,
        }
    }
    let unprepared = npu
        .multiply(form, plain(&[0; 68], &[0; 64]), none)
        .unwrap_err();
    assert!(unprepared.to_string().contains("not prepared"));
    npu.prepare(form).unwrap();
    assert!(npu.multiply(form, plain(&[0; 68], &[0; 64]), none).is_ok());
    let group = GroupForm {
        form,
        rows: 1,
        capacity: 16,
    };
    let multiply = |npu: &mut Npu, rows: &[u8], tokens: &[i8]| {
        npu.multiply_group(group, &[plain(rows, tokens)], |_, _| {})
    };
    let unprepared = multiply(&mut npu, &[0; 68], &[0; 64]).unwrap_err();
    assert!(unprepared.to_string().contains("not prepared"));
    npu.prepare_groups(group).unwrap();
    assert!(multiply(&mut npu, &[0; 68], &[0; 64]).is_ok());
    assert!(multiply(&mut npu, &[0; 136], &[0; 64]).is_err());
    assert!(multiply(&mut npu, &[0; 68], &[0; 17 * 64]).is_err());
    assert!(npu.multiply(form, plain(&[0; 67], &[0; 64]), none).is_err());
    assert!(npu.multiply(form, plain(&[0; 68], &[0; 63]), none).is_err());
    npu.clear();
    assert!(npu.multiply(form, plain(&[0; 68], &[0; 64]), none).is_err());
}

/// OpenVINO has no bitwise operators; ONNX Runtime's own kernels must not take over.
#[test]
fn what_a_provider_does_not_take_is_no_other_ones_work() {
    if npu().is_none() {
        return;
    }
    let model = Graph::new("bits")
        .input("a", Element::U8, &[4])
        .input("b", Element::U8, &[4])
        .output("both", Element::U8, &[4])
        .node("BitwiseAnd", &["a", "b"], "both", None)
        .model();
    let session = |provider| Npu::open(provider).unwrap().session(&model).err();
    assert!(session(Provider::Cpu).is_none());
    let provider = Provider::for_tests().unwrap();
    let refused = session(provider);
    assert_eq!(refused.is_some(), provider != Provider::Cpu, "{refused:?}");
}

#[test]
fn a_provider_that_is_not_there_is_named() {
    if npu().is_none() {
        return;
    }
    for provider in Provider::ALL {
        assert_eq!(provider.name().parse(), Ok(provider));
        if !list(provider).unwrap().has_provider {
            let error = Npu::open(provider).err().unwrap().to_string();
            assert!(
                error.contains(provider.name()) && error.contains("onnxruntime"),
                "{error}"
            );
        }
    }
    assert!("gpu".parse::<Provider>().is_err());
}
