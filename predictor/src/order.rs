//! Temperature order: packed id → original id.

/// Neurons sorted by falling activation count, ties by original id, so that
/// every hot/cold cut is a prefix of the packed order and the same statistics
/// always give the same file.
pub fn by_temperature(counts: &[u64]) -> Vec<u32> {
    let mut order: Vec<u32> = (0..counts.len() as u32).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(counts[i as usize]));
    order
}

/// The order of a checkpoint without statistics: packed id = original id.
pub fn original(neurons: usize) -> Vec<u32> {
    (0..neurons as u32).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn hottest_first_and_stable() {
        assert_eq!(super::by_temperature(&[1, 5, 1, 9]), [3, 1, 0, 2]);
        assert_eq!(super::original(3), [0, 1, 2]);
    }
}
