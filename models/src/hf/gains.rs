//! Factors that Falcon-H1's `config.json` gives for inputs and results of matrices. They are applied to the matrices,
//! as in GGUF files.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use super::text_part::text_part;
use crate::config::ModelConfig;
use crate::error::Error;
use crate::families::{self, Quirk};
use crate::json::Keys;
use crate::names::Role;
use crate::store::{Found, Gains};

/// The factors of rows, by role.
pub(super) struct RoleGains(BTreeMap<Role, Gains>);

impl RoleGains {
    /// The factors in the parsed `config.json` of this configuration; none for families without such keys.
    pub(super) fn read(path: &Path, value: &Value, config: &ModelConfig) -> Result<Self, Error> {
        let mambas = config.form.mamba.as_ref();
        let mamba = match mambas.map(|of| of.shape) {
            Some(shape) if families::of(&config.family).has(Quirk::Gains) => shape,
            _ => return Ok(Self(BTreeMap::new())),
        };
        let (part, prefix) = text_part(path, value)?;
        let keys = Keys::new(path, &part)?.inside(prefix);
        let one = |key| Ok::<_, Error>(keys.f32(key)?.map_or(1.0, f64::from));
        let [before, after] = ["attention_in_multiplier", "attention_out_multiplier"].map(one);
        let [before, after] = [before?, after?];
        let [gate, down] = list(&keys, "mlp_multipliers")?;
        let sections = list::<5>(&keys, "ssm_multipliers")?;
        let input = one("ssm_in_multiplier")?;
        let shared = mamba.groups as usize * mamba.state_dim as usize;
        let sizes = [mamba.values(), mamba.values(), shared, shared];
        let starts = sizes.iter().scan(0, |end, size| {
            *end += size;
            Some(*end)
        });
        let starts = std::iter::once(0).chain(starts);
        let sections = starts.zip(sections.map(|factor| factor * input));
        let all = |factor: f64| vec![(0, factor)];
        let mut gains = BTreeMap::from([
            (Role::Q, all(before)),
            (Role::K, all(before * one("key_multiplier")?)),
            (Role::V, all(before)),
            (Role::O, all(after)),
            (Role::MambaIn, sections.collect()),
            (Role::MambaOut, all(one("ssm_out_multiplier")?)),
            (Role::Gate, all(gate)),
            (Role::Down, all(down)),
        ]);
        gains.retain(|_, of| of.iter().any(|(_, factor)| *factor != 1.0));
        let rounded = |of: Vec<(usize, f64)>| of.into_iter().map(|(row, x)| (row, x as f32));
        let gains = gains.into_iter();
        Ok(Self(
            gains
                .map(|(role, of)| (role, rounded(of).collect()))
                .collect(),
        ))
    }

    /// The tensors with their factors.
    pub(super) fn apply(&self, mut found: Vec<Found>) -> Vec<Found> {
        for tensor in &mut found {
            tensor.gains = self.0.get(&tensor.id.role).cloned().unwrap_or_default();
        }
        found
    }
}

/// A list of `N` numbers; ones without the key.
fn list<const N: usize>(keys: &Keys, key: &str) -> Result<[f64; N], Error> {
    let number = |value: &Value| value.as_f64().filter(|number| number.is_finite());
    let found = keys.read(key, &format!("a list of {N} numbers"), |value| {
        let list = value.as_array()?.iter().map(number);
        let list: Vec<f64> = list.collect::<Option<_>>()?;
        <[f64; N]>::try_from(list).ok()
    })?;
    Ok(found.unwrap_or([1.0; N]))
}
