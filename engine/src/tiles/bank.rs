//! The matrices of one bank, and what a token visits of a layer's banks.

use emberflow_kernels::Compute;
use emberflow_models::config::{Bank, ModelConfig};
use emberflow_models::names::{Role, TensorId, bundled};
use emberflow_storage::container::Container;

use crate::error::Error;
use crate::input::Input;
use crate::loader::Loader;
use crate::matrix::Matrix;

/// The matrices of a dense FFN, or of an expert.
#[derive(Debug)]
pub(super) struct TileBank {
    /// `[neurons × d]`.
    gate: Matrix,
    /// The same; `None` without a gate projection.
    up: Option<Matrix>,
    /// `[d × neurons]`.
    pub down: Matrix,
}

impl TileBank {
    pub fn load(from: &Loader<'_>, c: &ModelConfig, bank: Bank) -> Result<Self, Error> {
        let [d, neurons] = [c.bundle_width(), bank.neurons].map(|n| n as usize);
        let read = |role, rows, cols| from.of_bank(id(role, bank), rows, cols);
        Ok(Self {
            gate: read(Role::Gate, neurons, d)?,
            up: if c.ffn_kind.ungated {
                None
            } else {
                Some(read(Role::Up, neurons, d)?)
            },
            down: read(Role::Down, d, neurons)?,
        })
    }

    pub fn neurons(&self) -> usize {
        self.gate.rows()
    }

    /// Products of Gate and Up.
    pub fn before(
        &self,
        on: &Compute,
        input: Input<'_>,
        scratch: &mut [Vec<f32>],
        gates: &mut [f32],
        ups: &mut [f32],
    ) {
        match &self.up {
            Some(up) => {
                let both = &mut [(&self.gate, gates), (up, ups)];
                Matrix::matmul_all(on, both, input, scratch);
            }
            None => self.gate.matmul(on, input, scratch, gates),
        }
    }
}

/// What a token visits of a layer.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Visited {
    /// Rows that are multiplied, and their bytes.
    pub rows: f64,
    pub bytes: u64,
}

/// What a token visits of the matrices of layer `layer`: of a mixture, the mean of its experts for each chosen one.
pub(crate) fn visited(container: &Container, c: &ModelConfig, layer: u32) -> Visited {
    let d = f64::from(c.bundle_width());
    let of = |bank: Bank| {
        let rows = |role| match role {
            Role::Down => d,
            _ => f64::from(bank.neurons),
        };
        let bytes = |role| {
            container
                .tensor(&id(role, bank).to_string())
                .map_or(0, |of| of.len)
        };
        let roles = bundled(c).iter();
        roles.fold([0.0; 2], |[all, sum], &role| {
            [all + rows(role), sum + bytes(role) as f64]
        })
    };
    let experts = c.mixture_of(layer).map_or(1, |_| c.experts);
    let chosen = c.mixture_of(layer).map_or(1, |mixture| mixture.chosen);
    let share = f64::from(chosen) / f64::from(experts.max(1));
    let [rows, bytes] = c.banks_of(layer).fold([0.0; 2], |[rows, bytes], bank| {
        let share = if bank.expert < experts { share } else { 1.0 };
        let [more, of_bank] = of(bank);
        [rows + share * more, bytes + share * of_bank]
    });
    Visited {
        rows,
        bytes: bytes as u64,
    }
}

fn id(role: Role, bank: Bank) -> TensorId {
    TensorId {
        role,
        layer: bank.layer,
        expert: bank.expert,
    }
}
