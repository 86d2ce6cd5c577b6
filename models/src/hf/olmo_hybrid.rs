//! OLMo Hybrid: layers with attention norm outputs, and may have no rotary positions.

use crate::config::Form;
use crate::error::Error;
use crate::json::Keys;

/// Sets both in the form of so many layers.
pub(super) fn olmo_hybrid(keys: &Keys, layers: u32, form: &mut Form) -> Result<(), Error> {
    form.late_norms = true;
    if !is_rotated(keys)? {
        form.nope_layers = (0..layers).collect();
    }
    Ok(())
}

/// Whether queries and keys are rotated: a base of null means no. Without a base, releases of transformers disagree.
fn is_rotated(keys: &Keys) -> Result<bool, Error> {
    const BASE: &str = "rope_theta";
    let object = keys.object("rope_parameters", "rope_parameters.")?;
    let inside = object.filter(|object| object.map().contains_key(BASE));
    match (inside, keys.get(BASE)) {
        (Some(object), _) => Ok(object.get(BASE).is_some()),
        (None, Some(_)) => Ok(true),
        (None, None) => Err(keys.missing(
            "rope_parameters.rope_theta",
            "a number, or null if there are no rotary positions",
        )),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::testing::keys_of;

    #[test]
    fn a_base_tells_whether_there_are_positions() {
        let mut form = Form::default();
        let none = json!({"rope_parameters": {"rope_theta": null}});
        keys_of(&none, |keys| olmo_hybrid(keys, 5, &mut form)).unwrap();
        assert!(form.late_norms && form.nope_layers.len() == 5);
        let rotated = |value: Value| keys_of(&value, is_rotated);
        assert!(rotated(json!({"rope_theta": 1e4})).unwrap());
        assert!(rotated(json!({"rope_parameters": {"rope_theta": 1e4}})).unwrap());
        for unsaid in [json!({}), json!({"rope_parameters": null})] {
            let refused = rotated(unsaid).unwrap_err().to_string();
            assert!(refused.contains("rope_theta"), "{refused}");
        }
    }
}
