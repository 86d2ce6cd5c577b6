//! A layer whose experts are narrower or wider than the residual stream.

use super::{Decoder, Hooks};
use crate::error::Error;
use crate::ffn::{FfnSeen, LayerInput};
use crate::input::Input;
use crate::pass::Pass;
use crate::router_ahead::likely_banks;
use crate::trace;

impl Decoder {
    /// Experts between two projections, and a shared one, into `scratch.out`; see
    /// [`crate::narrow_experts`].
    pub(super) fn run_narrow(
        &mut self,
        number: usize,
        pass: &Pass,
        hooks: &mut Hooks<'_, '_>,
    ) -> Result<(), Error> {
        let (on, c, ffn, s) = (&self.on, &self.config, &mut self.ffn, &mut self.scratch);
        let (n, d, layers) = (pass.rows, c.d_model as usize, &self.weights.layers);
        let layer = &layers[number];
        let (Some(narrow), Some(router), Some(mixture)) =
            (&layer.narrow, &layer.router, &c.mixture)
        else {
            return Ok(());
        };
        let place = c.ffn_place(number as u32);
        let bank = ffn.store.layout.banks_of(place).start;
        (ffn.store.tracer).section(&trace::ROUTER, [number as u64, 0]);
        let input = Input::new(on.cpu, &s.normed[..n * d], n, &mut s.input);
        s.routes.choose(on, router, mixture, input, &mut s.rows);
        if n == 1 {
            let units = s.routes.visited().map(|expert| bank + expert);
            ffn.store.read_chosen(place, units)?;
        }
        narrow.begin(on, n, s);
        let row = (n == 1).then(|| (s.routes.first_token(), &pass.x[..d]));
        let ahead = likely_banks(&mut self.ahead, &ffn.store, on, c, layers, number, row);
        let units = s.routes.units(bank, n, None);
        let [latent, sums, _] = narrow.buffers(n, &mut s.block);
        let input = Input::new(on.cpu, latent, n, &mut s.input);
        let at = LayerInput {
            ahead,
            ..LayerInput::alone(place, &units, input, latent)
        };
        ffn.layer(on, &at, sums)?;
        if let Some(observer) = &mut hooks.observer {
            observer(&ffn.seen(FfnSeen {
                layer: place,
                tokens: n,
                residual: latent,
                x: latent,
                dense: &[],
                choices: s.routes.choices(n),
                gates: &[],
                hidden: &[],
            }));
        }
        drop(units);
        narrow.end(on, c.ffn_kind, n, s);
        Ok(())
    }
}
