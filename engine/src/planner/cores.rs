//! Core selection for the I/O thread and the compute threads.
//!
//! On heterogeneous CPUs storage is much slower when driven from a small core (PowerInfer-2
//! §2.3.2), and the scheduler moves threads that mostly sleep to small cores. On homogeneous CPUs
//! the scheduler does better than pinning: an I/O thread pinned to a busy core waits for its time
//! slice.

use std::path::Path;

/// Core for the I/O thread next to `threads` compute threads. `None` if all cores are equal or
/// unknown.
pub fn io_core(threads: usize) -> Option<usize> {
    choose(&capacities(Path::new("/sys/devices/system/cpu")), threads)
}

/// Cores for `threads` compute threads, strongest first, without the core of the I/O thread. One
/// small core among large ones would delay every barrier. `None` if cores are equal, unknown or too
/// few.
pub fn compute_cores(threads: usize, io_core: Option<usize>) -> Option<Vec<usize>> {
    let cores = capacities(Path::new("/sys/devices/system/cpu"));
    strongest(cores, threads, io_core)
}

fn strongest(
    mut cores: Vec<(usize, u64)>,
    threads: usize,
    io_core: Option<usize>,
) -> Option<Vec<usize>> {
    choose(&cores, threads)?;
    cores.retain(|core| Some(core.0) != io_core);
    cores.sort_by_key(|core| (std::cmp::Reverse(core.1), core.0));
    let chosen: Vec<usize> = cores.into_iter().take(threads).map(|c| c.0).collect();
    (chosen.len() == threads).then_some(chosen)
}

/// Capacity of each core, by number: `cpu_capacity`, else the maximum clock.
fn capacities(root: &Path) -> Vec<(usize, u64)> {
    let number =
        |path: &Path| -> Option<u64> { std::fs::read_to_string(path).ok()?.trim().parse().ok() };
    let Ok(entries) = std::fs::read_dir(root) else {
        return Vec::new();
    };
    let mut cores: Vec<(usize, u64)> = entries
        .flatten()
        .filter_map(|entry| {
            let core = entry
                .file_name()
                .to_str()?
                .strip_prefix("cpu")?
                .parse()
                .ok()?;
            let dir = entry.path();
            let strength = number(&dir.join("cpu_capacity"))
                .or_else(|| number(&dir.join("cpufreq/cpuinfo_max_freq")))?;
            Some((core, strength))
        })
        .collect();
    cores.sort_unstable();
    cores
}

/// The last core of the strongest kind, if that kind has several cores or compute leaves one free;
/// else of the next kind. Low core numbers serve interrupts.
fn choose(cores: &[(usize, u64)], threads: usize) -> Option<usize> {
    let least = cores.iter().map(|c| c.1).min()?;
    let most = cores.iter().map(|c| c.1).max()?;
    // Turbo clocks of equal cores differ by a few percent.
    if least * 10 >= most * 8 {
        return None;
    }
    let cores_of = |strength: u64| cores.iter().filter(move |c| c.1 == strength);
    if cores_of(most).count() > 1 || threads < cores.len() {
        return cores_of(most).next_back().map(|c| c.0);
    }
    let next = cores.iter().map(|c| c.1).filter(|&s| s < most).max()?;
    cores_of(next).next_back().map(|c| c.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn io_runs_on_a_strong_core_if_cores_differ() {
        // A phone: one prime, three big, four little cores.
        let phone = [
            (0, 300),
            (1, 300),
            (2, 300),
            (3, 300),
            (4, 780),
            (5, 780),
            (6, 780),
            (7, 1024),
        ];
        assert_eq!(choose(&phone, 4), Some(7));
        assert_eq!(choose(&phone, 8), Some(6));
        assert_eq!(choose(&[(0, 400), (1, 1024), (2, 1024)], 3), Some(2));
        assert_eq!(
            strongest(phone.to_vec(), 4, Some(7)),
            Some(vec![4, 5, 6, 0])
        );
        assert_eq!(strongest(phone.to_vec(), 2, None), Some(vec![7, 4]));
        assert_eq!(strongest(phone.to_vec(), 8, Some(7)), None);
        assert_eq!(strongest(vec![(0, 1024), (1, 1024)], 2, None), None);
    }

    #[test]
    fn equal_cores_are_left_to_the_scheduler() {
        assert_eq!(choose(&[(0, 1024), (1, 1024)], 2), None);
        assert_eq!(choose(&[(0, 4_700_000), (1, 4_900_000)], 1), None);
        assert_eq!(choose(&[], 2), None);
    }

    #[test]
    fn capacities_are_read_from_sysfs() {
        let dir = tempfile::tempdir().unwrap();
        let put = |at: &str, text: &str| {
            let path = dir.path().join(at);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        put("cpu0/cpu_capacity", "446\n");
        put("cpu1/cpufreq/cpuinfo_max_freq", "1024\n");
        put("cpu2/online", "1\n");
        put("cpufreq/policy0", "x");
        assert_eq!(capacities(dir.path()), [(0, 446), (1, 1024)]);
        assert_eq!(capacities(&dir.path().join("none")), []);
    }
}
