//! The parameters of xIELU, lists with a number for each layer.

use crate::config::{Activation, XieluParameters};
use crate::error::Error;
use crate::metadata::Metadata;

/// The function of each layer.
pub(super) fn activations(metadata: &Metadata, layers: u32) -> Result<Vec<Activation>, Error> {
    let list = |part: &str| {
        // The only keys of a model without its architecture's name.
        let key = format!("xielu.{part}");
        let list = metadata.f32s(&key)?;
        match list.len() == layers as usize {
            true => Ok(list),
            false => Err(metadata.bad(&key, &format!("a number for each of {layers} layers"))),
        }
    };
    let positive = list("alpha_p")?;
    let rest = [list("alpha_n")?, list("beta")?, list("eps")?];
    let of_layer = |(layer, alpha_p): (usize, f32)| XieluParameters {
        alpha_p,
        alpha_n: rest[0][layer],
        beta: rest[1][layer],
        eps: rest[2][layer],
    };
    let all = positive.into_iter().enumerate().map(of_layer);
    Ok(all.map(XieluParameters::activation).collect())
}
