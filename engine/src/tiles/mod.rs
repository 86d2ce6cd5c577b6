//! FFNs whose matrices lie row by row, in the block format of the file that they come from.
//!
//! ```text
//! y[a..b] = W[a..b] · x                 whole rows: a result does not depend on how a matrix is divided
//! bank      hidden = act(Gate·x + bias) · (Up·x + bias)     out = Down·hidden
//! layer     out[row] = Σ weight × bank(input[row]), banks in ascending order
//! ```
//!
//! Down is stored by rows too, so all products of integer formats are integers. No neuron is skipped: `ffn` does that, for
//! packed models. `layout` cuts matrices into tiles, `store` holds and reads tiles, `bank` multiplies, `room` has the buffers.

mod bank;
mod layout;
mod room;
mod store;

use emberflow_kernels::Compute;
use emberflow_models::config::{Activation, FfnKind, ModelConfig};
use emberflow_predictor::{Sums, top_multiple};

use crate::activation::{Gating, of_up};
use crate::error::Error;
use crate::ffn::{BankWork, Bias, LayerInput, Rows};
use crate::input::Input;
use crate::loader::Loader;
use bank::TileBank;
pub(crate) use bank::{TileAccess, Visited, visited};
pub use layout::TileReads;
pub(crate) use layout::{TileLayout, is_tiled, whole_bytes};
pub(crate) use room::{TileRoom, TileSizes};
pub(crate) use store::TileStore;

/// The FFN of a layer.
#[derive(Debug)]
pub(crate) struct TileFfn {
    /// Number of the FFN among those of the model.
    place: usize,
    banks: Vec<TileBank>,
    kind: FfnKind,
    gating: Gating,
    /// Bytes that a token visits.
    visited: u64,
}

impl TileFfn {
    /// The matrices of layer `layer`; `None` if it has no FFN. Loads those that do not lie in tiles.
    pub fn load(
        from: &Loader<'_>,
        layout: &TileLayout,
        c: &ModelConfig,
        layer: u32,
    ) -> Result<Option<Self>, Error> {
        if !c.has_ffn(layer) {
            return Ok(None);
        }
        let place = c.ffn_place(layer);
        let banks = (layout.first_bank(place)..)
            .zip(c.banks_of(layer))
            .map(|(number, bank)| TileBank::load(from, layout, c, number, bank))
            .collect::<Result<Vec<_>, _>>()?;
        let top = c.form.gate_top.get(layer as usize).copied();
        let activation: Option<Activation> = c.form.activations.get(place).copied();
        Ok(Some(Self {
            place,
            banks,
            kind: c.ffn_kind,
            gating: Gating {
                activation: activation.unwrap_or(c.ffn_kind.activation),
                cut: 0.0,
                top: top.filter(|&share| share > 0.0).map(top_multiple),
            },
            visited: visited(from.container, c, layer).bytes,
        }))
    }

    /// Bytes that the FFNs of a model take, without slots and resident matrices.
    pub fn bytes_for(layout: &TileLayout) -> u64 {
        let banks = layout.banks.len() * size_of::<TileBank>();
        TileStore::bytes_for(layout) + banks as u64
    }

    /// Bytes of weights read per token.
    pub fn bytes_per_token(&self) -> u64 {
        self.visited
    }

    /// (Neuron, row) pairs of these units.
    pub fn pairs(&self, units: &[BankWork<'_>]) -> u64 {
        let pairs = |unit: &BankWork<'_>| self.banks[unit.bank as usize].neurons * unit.rows.len();
        units.iter().map(pairs).sum::<usize>() as u64
    }

    /// `out[row] = Σ weight × bank(input[row])` over the units of the row, in their order, without Down's biases. For drafts,
    /// only over the banks that are in memory.
    ///
    /// # Errors
    /// A failed read, or a file that has changed.
    pub fn run(
        &self,
        at: &LayerInput<'_>,
        by: &mut TileAccess<'_>,
        room: &mut TileRoom,
        out: &mut [f32],
    ) -> Result<(), Error> {
        let (d, on) = (at.input.n(), by.on);
        out.fill(0.0);
        let blocks = |rows: usize| (0..rows).step_by(TileSizes::ROWS);
        let visits = at.units.iter().flat_map(|unit| {
            let number = self.banks[unit.bank as usize].number;
            blocks(unit.rows.len()).map(move |_| number)
        });
        if !at.held_only {
            by.tiles.begin_layer(by.io, self.place, visits)?;
        }
        for unit in at.units {
            let bank = &self.banks[unit.bank as usize];
            for first in blocks(unit.rows.len()) {
                if at.held_only && !by.tiles.begin_held(bank.number) {
                    continue;
                }
                let count = (unit.rows.len() - first).min(TileSizes::ROWS);
                let TileRoom {
                    gathered,
                    gates,
                    ups,
                    sums,
                    input,
                } = &mut *room;
                let neurons = bank.neurons;
                let gates = &mut gates[..count * neurons];
                let ups = match self.kind.ungated {
                    true => &mut [],
                    false => &mut ups[..count * neurons],
                };
                let x = match (unit.rows, unit.scales) {
                    (Rows::All(_), None) => at.input.range(first, count),
                    (rows, scales) => {
                        let gathered = &mut gathered[..count * d];
                        for (to, place) in gathered.chunks_exact_mut(d).zip(first..) {
                            to.copy_from_slice(&at.input.x[rows.row(place) * d..][..d]);
                            if let Some(scales) = scales {
                                to.iter_mut().for_each(|x| *x *= scales[place]);
                            }
                        }
                        Input::new(on.cpu, gathered, count, input)
                    }
                };
                bank.before(by, x, gates, ups)?;
                self.activate(on, unit.bias, neurons, gates, ups);
                let hidden = Input::new(on.cpu, gates, count, input);
                let sums = &mut sums[..count * d];
                bank.after(by, hidden, sums)?;
                by.tiles.end_visit();
                for (sum, place) in sums.chunks_exact(d).zip(first..) {
                    let out = &mut out[unit.rows.row(place) * d..][..d];
                    let weight = unit.weights.map_or(1.0, |weights| weights[place]);
                    for (y, sum) in out.iter_mut().zip(sum) {
                        *y += weight * sum;
                    }
                }
            }
        }
        Ok(())
    }

    /// Hidden values in place of `gates`, the products of Gate; `ups` are those of Up, `[rows × neurons]` each.
    fn activate(
        &self,
        on: &Compute,
        bias: Bias<'_>,
        neurons: usize,
        gates: &mut [f32],
        ups: &[f32],
    ) {
        (on.workers).for_each_part_mut(gates, neurons, &|_, first, part| {
            for (gates, row) in part.chunks_exact_mut(neurons).zip(first..) {
                add(gates, bias.gate);
                match self.gating.top {
                    None => self.gating.activate(on.cpu, gates),
                    Some(multiple) => {
                        let mut sums = Sums::with_capacity(1);
                        let cutoff = sums.moments(gates, 1).map(|of| of.above(multiple)).next();
                        self.gating.apply(on.cpu, cutoff.as_slice(), gates);
                    }
                }
                let ups = ups.get(row * neurons..).unwrap_or(&[]);
                for (n, (gate, up)) in gates.iter_mut().zip(ups).enumerate() {
                    *gate *= of_up(self.kind, up + bias.up.get(n).copied().unwrap_or(0.0));
                }
            }
        });
    }
}

/// Adds a bias, if there is one.
fn add(values: &mut [f32], bias: &[f32]) {
    for (value, bias) in values.iter_mut().zip(bias) {
        *value += bias;
    }
}
