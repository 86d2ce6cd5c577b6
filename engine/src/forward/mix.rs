//! The step that runs a layer's mixer.

use super::at::At;
use super::hooks::AttentionSeen;
use crate::mixer::{LayerPass, Mixed, Mixer};

/// `out = mixer(normed)`.
#[derive(Debug)]
pub(crate) struct Mix {
    pub mixer: Mixer,
}

impl Mix {
    pub fn run(&self, at: &mut At<'_, '_, '_, '_>) {
        let (rows, width, number) = (at.pass.rows, at.width(), at.layer);
        let given = at.hooks.between.filter(|_| number == 0);
        let layer = LayerPass {
            config: at.config,
            number,
            rope: at.rope.of(number),
            given: given.and_then(|between| between.stored),
        };
        self.mixer.run(at.on, layer, at.spans, at.scratch);
        if let Some(observer) = &mut at.hooks.attention {
            let Mixed { mixed, stored } = self.mixer.seen(rows, at.scratch);
            observer(&AttentionSeen {
                layer: number,
                tokens: rows,
                x: &at.scratch.normed[..width],
                mixed,
                stored,
            });
        }
    }
}
