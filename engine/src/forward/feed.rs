//! The step that runs an FFN: the only one whose weights may be on flash.

use std::sync::Arc;

use super::at::At;
use super::narrow_experts::ExpertBuffers;
use super::router_ahead::{Upcoming, likely_banks};
use crate::error::Error;
use crate::ffn::{
    BankWork, Bias, FfnBiases, FfnSeen, LayerInput, NextLayer, Rows, add_down_biases,
};
use crate::input::Input;
use crate::norm::Norm;
use crate::tiles::{TileAccess, TileFfn};
use crate::trace;

/// Which units of the layer a step computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Units {
    /// The layer's only bank, for all rows.
    Dense,
    /// The banks that the rows visit, with a shared expert.
    Routed,
    /// Of these only the last, a dense FFN; the others follow in the same layer.
    Beside,
    /// Of these all but the last.
    Experts,
}

/// Input and output of an FFN.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Through {
    /// From `scratch.normed` into `scratch.out`.
    Out,
    /// From `scratch.normed` into `scratch.parallel`.
    Parallel,
    /// Between the projections around experts of another width.
    Narrow(ExpertBuffers),
}

/// `norm(FFN(input))`.
#[derive(Debug)]
pub(crate) struct Feed {
    /// Index of the layer among those with an FFN.
    pub place: usize,
    pub units: Units,
    pub through: Through,
    pub biases: Option<Arc<FfnBiases>>,
    /// Norm of the output, before it is added to that of other FFNs of the layer.
    pub norm: Option<Norm>,
    /// For guesses of the next layer's experts and, if it `guesses` them, its neurons.
    pub next: Option<Upcoming>,
    pub guesses: bool,
    /// The matrices, if they lie by rows; otherwise the store has the neurons.
    pub tiles: Option<Arc<TileFfn>>,
}

impl Feed {
    pub fn run(&self, at: &mut At<'_, '_, '_, '_>) -> Result<(), Error> {
        let (rows, d) = (at.pass.rows, at.config.d_model as usize);
        let (ffn, s, x) = (&mut *at.ffn, &mut *at.scratch, &at.pass.x[..rows * d]);
        let bank = match self.tiles {
            Some(_) => 0,
            None => ffn.store.layout.banks_of(self.place).start,
        };
        let token = (rows == 1).then(|| (s.routes.first_token(), x));
        let ahead = match &self.next {
            Some(next) if self.tiles.is_none() && !at.hooks.held_only => {
                let place = self.place + 1;
                likely_banks(at.ahead, &ffn.store, at.on, at.config, next, place, token)
            }
            _ => &[],
        };
        let biases = self.biases.as_deref();
        let dense = [BankWork {
            bank,
            rows: Rows::All(rows),
            weights: None,
            scales: None,
            bias: Bias::of(biases, 0),
            hidden: None,
        }];
        let routed = match self.units {
            Units::Dense => Vec::new(),
            Units::Routed | Units::Beside | Units::Experts => s.routes.units(bank, rows, biases),
        };
        let last = routed.len().saturating_sub(1);
        let (units, then): (&[_], &[_]) = match self.units {
            Units::Dense => (&dense, &[]),
            Units::Routed => (&routed, &[]),
            Units::Beside => (&routed[last..], &routed[..last]),
            Units::Experts => (&routed[..last], &[]),
        };
        let (from, residual, out) = match self.through {
            Through::Out => (&s.normed[..rows * d], x, &mut s.out[..]),
            Through::Parallel => (&s.normed[..rows * d], x, &mut s.parallel[..]),
            Through::Narrow(buffers) => {
                let [latent, sums, _] = buffers.split(rows, &mut s.block);
                (&*latent, &*latent, sums)
            }
        };
        let next = (self.next.as_ref()).filter(|_| self.guesses && !at.hooks.held_only);
        let layer = LayerInput {
            then,
            next: next.map(|next| NextLayer {
                norm: next.norm.as_deref(),
                bias: Bias::of(next.biases.as_deref(), 0).gate,
            }),
            ahead,
            held_only: at.hooks.held_only,
            ..LayerInput::alone(
                self.place,
                units,
                Input::new(at.on.cpu, from, rows, &mut s.input),
                residual,
            )
        };
        match &self.tiles {
            None => ffn.layer(at.on, &layer, out)?,
            Some(tiles) => {
                at.tracer.section(&trace::FFN, [self.place as u64, 0]);
                let out = &mut out[..from.len()];
                let Some(store) = at.tiles else {
                    let first = format!("FFN {} has no store for its tiles", self.place);
                    return Err(Error::Failed { first });
                };
                let mut access = TileAccess {
                    on: at.on,
                    tiles: store,
                    io: &mut ffn.store,
                    scratch: &mut s.rows,
                };
                tiles.run(&layer, &mut access, &mut s.tiles, out)?;
                add_down_biases(units, from.len() / rows, out);
                ffn.count_all(tiles.pairs(units));
            }
        }
        if let Some(norm) = &self.norm {
            norm.rows_inplace(at.on.cpu, &mut out[..from.len()]);
        }
        let Some(observer) = &mut at.hooks.observer else {
            return Ok(());
        };
        if self.units == Units::Beside {
            // The experts' step shows it.
            at.dense.extend_from_slice(from);
            return Ok(());
        }
        observer(&ffn.seen(FfnSeen {
            layer: self.place,
            tokens: rows,
            residual,
            x: from,
            dense: &at.dense,
            choices: match self.units {
                Units::Dense => &[],
                _ => s.routes.choices(rows),
            },
            gates: &[],
            hidden: &[],
        }));
        Ok(())
    }
}
