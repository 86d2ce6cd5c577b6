//! The layers of Nemotron-H, which have a single sublayer each.

use crate::config::Form;
use crate::error::Error;
use crate::metadata::ArchKeys;
use crate::mixers::layers::others;

/// Neurons of FFNs or of experts, layer by layer.
const FFN: &str = "feed_forward_length";
/// Heads of keys and values, layer by layer.
pub(super) const KV_HEADS: &str = "attention.head_count_kv";

/// The one nonzero number in a list with one number per layer, and the layers with it. Layers for multi-token
/// prediction may follow.
pub(super) fn listed(
    of: ArchKeys<'_>,
    key: &str,
    layers: u32,
    further: bool,
) -> Result<(Option<u32>, Vec<u32>), Error> {
    let list = of.u32s(key)?;
    let own = list.iter().copied().find(|&number| number != 0);
    let alike = list.iter().all(|&n| n == 0 || Some(n) == own);
    let fits = list.len() == layers as usize || further && list.len() > layers as usize;
    if !fits || !alike {
        let expected = format!("0 or the same number for each of {layers} layers");
        return Err(of.bad(key, &expected));
    }
    let with = (0..layers).zip(list).filter(|(_, number)| *number != 0);
    Ok((own, with.map(|(layer, _)| layer).collect()))
}

/// The number of an FFN's neurons.
pub(super) fn ffn(of: ArchKeys<'_>, layers: u32) -> Result<u32, Error> {
    let (ffn, _) = listed(of, FFN, layers, true)?;
    ffn.ok_or_else(|| of.bad(FFN, "a number above 0 for some layers"))
}

/// Sets the layers in the form. Returns the heads of keys and values, and the layers without them and without neurons.
pub(super) fn sublayers(
    of: ArchKeys<'_>,
    layers: u32,
    form: &mut Form,
) -> Result<(Option<u32>, Vec<u32>), Error> {
    let (heads, attention) = listed(of, KV_HEADS, layers, true)?;
    let (_, fed) = listed(of, FFN, layers, true)?;
    if let Some(layer) = fed.iter().find(|layer| attention.contains(layer)) {
        let expected = format!("0 for layer {layer}, which has an FFN");
        return Err(of.bad(KV_HEADS, &expected));
    }
    form.without_ffn = others(Some(&fed), layers);
    let headless = others(Some(&[&fed[..], &attention].concat()), layers);
    form.without_mixer = fed;
    Ok((heads, headless))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::families;
    use crate::metadata::{Metadata, Value};

    fn read(heads: &[u64], ffn: &[u64]) -> Result<(Form, Vec<u32>), Error> {
        let (_, arch) = families::find_arch("nemotron_h").unwrap();
        let mut metadata = Metadata::new(Path::new("model.gguf"));
        for (key, list) in [(KV_HEADS, heads), (FFN, ffn)] {
            let list = list.iter().map(|&n| Value::Uint(n)).collect();
            let key = format!("nemotron_h.{key}");
            metadata.insert(key, Value::List(list)).unwrap();
        }
        let mut form = Form::default();
        let (_, headless) = sublayers(arch.keys(&metadata), 4, &mut form)?;
        Ok((form, headless))
    }

    #[test]
    fn layers_are_told_by_their_heads_and_neurons() {
        // the fifth is for multi-token prediction
        let (form, headless) = read(&[0, 2, 0, 0, 2], &[0, 0, 7, 0, 7]).unwrap();
        assert_eq!(form.without_ffn, [0, 1, 3]);
        assert_eq!(form.without_mixer, [2]);
        assert_eq!(headless, [0, 3]);
        for (heads, ffn) in [
            ([0, 2, 0, 3], [0, 0, 7, 0]),
            ([0, 2, 0, 0], [0, 0, 7, 8]),
            ([0, 2, 2, 0], [0, 0, 7, 0]),
        ] {
            assert!(read(&heads, &ffn).is_err());
        }
        assert!(read(&[0, 2, 0], &[0, 0, 7, 0]).is_err());
    }
}
