//! Stateless random bits by position, so any thread can generate any row.

use emberflow_models::names::{Role, TensorId};

/// The finaliser of SplitMix64, a bijection without visible structure.
#[inline]
pub fn mix(mut x: u64) -> u64 {
    x ^= x >> 30;
    x = x.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^= x >> 27;
    x = x.wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Weyl increment of SplitMix64.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Key of one row of one tensor.
pub fn stream(seed: u64, id: TensorId, row: usize) -> u64 {
    let mut key = mix(seed.wrapping_add(STEP));
    let tensor = u64::from(id.layer) << 32 | role_number(id.role) << 16 | u64::from(id.expert);
    for part in [tensor, row as u64] {
        key = mix(key ^ part.wrapping_mul(STEP).wrapping_add(STEP));
    }
    key
}

/// Word `index` of a row's stream.
#[inline]
pub fn word(key: u64, index: u64) -> u64 {
    mix(key.wrapping_add((index + 1).wrapping_mul(STEP)))
}

/// Numbers of the matrices; they determine what a seed generates.
fn role_number(role: Role) -> u64 {
    match role {
        Role::Embed => 1,
        Role::Head => 2,
        Role::Q => 3,
        Role::K => 4,
        Role::V => 5,
        Role::O => 6,
        Role::Gate => 7,
        Role::Up => 8,
        Role::Down => 9,
        Role::Router => 10,
        _ => 0,
    }
}
