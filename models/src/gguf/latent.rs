//! Scores of latent attention under YaRN.

use crate::config::{Form, Rope, RopeScaling, yarn_attention};
use crate::error::Error;
use crate::metadata::ArchKeys;
use crate::mixers::latent::YARN_ALL;

const TENTH: f32 = 0.1;

/// Sets the factor of the scores in the form.
pub(super) fn scale_scores(
    keys: ArchKeys<'_>,
    rope: &mut Rope,
    head_dim: u32,
    form: &mut Form,
) -> Result<(), Error> {
    let all = keys.f32(YARN_ALL)?;
    let RopeScaling::Yarn {
        factor,
        attention_factor,
        ..
    } = &mut rope.scaling
    else {
        return Ok(());
    };
    if let Some(all) = all.filter(|all| *all != 0.0) {
        let scale = yarn_attention(*factor, all / TENTH);
        form.attention_scale = Some(scale * scale / (head_dim as f32).sqrt());
        // queries and keys have only the factor of the scores
        *attention_factor = 1.0;
    }
    Ok(())
}
