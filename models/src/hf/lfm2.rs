//! The size of LFM2's FFN.

use serde_json::Value;

use crate::error::Error;
use crate::json::Keys;

/// `Lfm2MLP`: the neurons of an FFN of size `ffn` by its key, which `block_ff_dim` overrides.
pub(super) fn adjusted_ffn(keys: &Keys, ffn: Option<u32>) -> Result<Option<u32>, Error> {
    let Some(ffn) = keys.u32("block_ff_dim")?.or(ffn) else {
        return Ok(None);
    };
    if !keys.bool("block_auto_adjust_ff_dim")?.unwrap_or(true) {
        return Ok(Some(ffn));
    }
    const FACTOR: &str = "block_ffn_dim_multiplier";
    // as computed by Python
    let factor = keys.read(FACTOR, "a number above 0", |value| {
        value.as_f64().filter(|factor| *factor > 0.0)
    })?;
    let two_thirds = u64::from(ffn) * 2 / 3;
    const UNIT: &str = "block_multiple_of";
    let unit = match keys.u32(UNIT)?.unwrap_or(256) {
        0 => return Err(keys.bad(UNIT, "1 or more")),
        unit => u64::from(unit),
    };
    // null means no rounding
    let is_null = keys.map().get(FACTOR).is_some_and(Value::is_null);
    let size = if is_null {
        Some(two_thirds)
    } else {
        ((factor.unwrap_or(1.0) * two_thirds as f64) as u64).checked_next_multiple_of(unit)
    };
    let size = size.and_then(|size| u32::try_from(size).ok());
    let expected = "a factor with a size below 2^32";
    size.map(Some).ok_or_else(|| keys.bad(FACTOR, expected))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::testing::keys_of;

    #[test]
    fn sizes_of_ffns_are_those_of_the_releases() {
        let read = |value: Value| keys_of(&value, |keys| adjusted_ffn(keys, Some(150)));
        let ffn = |value: Value| read(value).unwrap();
        assert_eq!(ffn(json!({"block_ff_dim": 12288})), Some(8192));
        assert_eq!(ffn(json!({"block_ff_dim": 10240})), Some(6912));
        let off = json!({"block_ff_dim": 10752, "block_auto_adjust_ff_dim": false});
        assert_eq!(ffn(off), Some(10752));
        let odd = json!({"block_ffn_dim_multiplier": 0.7, "block_multiple_of": 7});
        assert_eq!(ffn(odd), Some(70));
        assert_eq!(ffn(json!({"block_ffn_dim_multiplier": null})), Some(100));
        let too_large = json!({"block_ffn_dim_multiplier": 1e300});
        assert!(read(too_large).is_err());
    }
}
