//! The matrices of one bank, and what a token visits of a layer's banks.

use emberflow_kernels::Compute;
use emberflow_models::config::{Bank, ModelConfig};
use emberflow_models::names::{Role, bundled};
use emberflow_storage::container::Container;

use super::layout::{TileLayout, id};
use super::store::TileStore;
use crate::error::Error;
use crate::input::Input;
use crate::loader::Loader;
use crate::matrix::{Matrix, TiledMatrix};
use crate::store::NeuronStore;

/// A matrix of a bank.
#[derive(Debug)]
enum BankMatrix {
    /// Its rows are served by the [`TileStore`].
    Tiled(TiledMatrix),
    /// It cannot be read by rows, so it is resident.
    Whole(Matrix),
}

/// The matrices of a dense FFN, or of an expert.
#[derive(Debug)]
pub(super) struct TileBank {
    /// Its number among all banks.
    pub number: u32,
    pub neurons: usize,
    /// `[neurons × d]`.
    gate: BankMatrix,
    /// The same; `None` without a gate projection.
    up: Option<BankMatrix>,
    /// `[d × neurons]`.
    down: BankMatrix,
}

/// Access to tiles during a pass, and the threads that multiply them.
pub(crate) struct TileAccess<'a> {
    pub on: &'a Compute,
    pub tiles: &'a mut TileStore,
    pub io: &'a mut NeuronStore,
    /// A buffer for each thread.
    pub scratch: &'a mut [Vec<f32>],
}

impl BankMatrix {
    fn matmul(
        &self,
        by: &mut TileAccess<'_>,
        input: Input<'_>,
        y: &mut [f32],
    ) -> Result<(), Error> {
        match self {
            Self::Tiled(of) => (by.tiles).matmul(by.io, *of, by.on, input, by.scratch, y),
            Self::Whole(of) => {
                of.matmul(by.on, input, by.scratch, y);
                Ok(())
            }
        }
    }
}

impl TileBank {
    /// Bank `bank`, number `number` of `layout`. Loads the matrices that do not lie in tiles.
    pub fn load(
        from: &Loader<'_>,
        layout: &TileLayout,
        c: &ModelConfig,
        number: u32,
        bank: Bank,
    ) -> Result<Self, Error> {
        let [d, neurons] = [c.bundle_width(), bank.neurons].map(|n| n as usize);
        let read = |which, role, rows, cols| {
            let tiled = layout.matrix(number, which).map(BankMatrix::Tiled);
            // Checks the shape.
            from.entry(id(role, bank), rows, cols)?;
            let whole = || from.of_bank(id(role, bank), rows, cols);
            tiled.map_or_else(|| whole().map(BankMatrix::Whole), Ok)
        };
        Ok(Self {
            number,
            neurons,
            gate: read(0, Role::Gate, neurons, d)?,
            up: if c.ffn_kind.ungated {
                None
            } else {
                Some(read(1, Role::Up, neurons, d)?)
            },
            down: read(2, Role::Down, d, neurons)?,
        })
    }

    /// Products of Gate and Up.
    pub fn before(
        &self,
        by: &mut TileAccess<'_>,
        input: Input<'_>,
        gates: &mut [f32],
        ups: &mut [f32],
    ) -> Result<(), Error> {
        self.gate.matmul(by, input, gates)?;
        self.up
            .as_ref()
            .map_or(Ok(()), |up| up.matmul(by, input, ups))
    }

    /// Products of Down.
    pub fn after(
        &self,
        by: &mut TileAccess<'_>,
        input: Input<'_>,
        sums: &mut [f32],
    ) -> Result<(), Error> {
        self.down.matmul(by, input, sums)
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
