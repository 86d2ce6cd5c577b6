//! Energy meters of the machine, if available.
//!
//! RAPL counts energy per CPU package: `/sys/class/powercap/intel-rapl:N/energy_uj` (the same name
//! on AMD). Only packages are summed: cores and graphics are subdomains, `psys` includes the
//! packages, and `intel-rapl-mmio` repeats them. Memory outside a package is not counted. Most
//! systems restrict the counters to root. Without RAPL, a discharging battery reports the power of
//! the whole machine, which is integrated over time. Both include all other processes.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Sampling interval. A package counter wraps after minutes, but battery power changes within
/// seconds.
const INTERVAL: Duration = Duration::from_millis(100);

/// Accumulates energy from one source.
#[derive(Debug)]
pub struct Meter {
    source: MeterSource,
    name: String,
    joules: f64,
    seen: Instant,
    /// Set once the source fails.
    lost: bool,
}

#[derive(Debug)]
enum MeterSource {
    Packages(Vec<Package>),
    Batteries { folders: Vec<PathBuf>, watts: f64 },
}

/// A microjoule counter that wraps at `range`.
#[derive(Debug)]
struct Package {
    counter: PathBuf,
    range: u64,
    last: u64,
}

impl Meter {
    /// Finds a meter below `sysfs`, normally `/sys`; `None` without one.
    pub fn find(sysfs: &Path) -> Option<Self> {
        Self::packages(sysfs).or_else(|| Self::batteries(sysfs))
    }

    /// Packages with readable counters. All or none, since a partial sum would be wrong.
    fn packages(sysfs: &Path) -> Option<Self> {
        let mut found = Vec::new();
        let mut names = Vec::new();
        for folder in folders(&sysfs.join("class/powercap")) {
            let file = folder.file_name()?.to_str()?;
            let whole = file.strip_prefix("intel-rapl:").is_some_and(is_number);
            let Some(name) = text(&folder.join("name")).filter(|n| n.starts_with("package")) else {
                continue;
            };
            if !whole {
                continue;
            }
            let counter = folder.join("energy_uj");
            found.push(Package {
                last: number(&counter)?,
                range: number(&folder.join("max_energy_range_uj"))?,
                counter,
            });
            names.push(name);
        }
        let name = format!("rapl {}", names.join(", "));
        (!found.is_empty()).then(|| Self::new(MeterSource::Packages(found), name))
    }

    /// Discharging batteries of the machine, excluding peripherals.
    fn batteries(sysfs: &Path) -> Option<Self> {
        let mut folders = folders(&sysfs.join("class/power_supply"));
        folders.retain(|folder| {
            let says = |file: &str, what: &str| text(&folder.join(file)).is_some_and(|t| t == what);
            says("type", "Battery") && !says("scope", "Device") && power(folder).is_some()
        });
        let names = folders.iter().filter_map(|f| f.file_name()?.to_str());
        let name = format!("battery {}", names.collect::<Vec<_>>().join(", "));
        let watts = folders.iter().filter_map(|f| power(f)).sum();
        let any = !folders.is_empty();
        any.then(|| Self::new(MeterSource::Batteries { folders, watts }, name))
    }

    fn new(source: MeterSource, name: String) -> Self {
        Self {
            source,
            name,
            joules: 0.0,
            seen: Instant::now(),
            lost: false,
        }
    }

    /// The meter: `rapl` or `battery`, with the names of its parts.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Samples the source if the last sample is older than 100 ms.
    pub fn look(&mut self) {
        if self.seen.elapsed() >= INTERVAL {
            self.joules();
        }
    }

    /// Joules since the meter was found. `None` once the source has failed, for example after a
    /// charger was connected.
    pub fn joules(&mut self) -> Option<f64> {
        let time = self.seen.elapsed();
        self.seen = Instant::now();
        match self.added(time) {
            Some(joules) if !self.lost => self.joules += joules,
            _ => self.lost = true,
        }
        (!self.lost).then_some(self.joules)
    }

    /// Joules during the last `time`.
    fn added(&mut self, time: Duration) -> Option<f64> {
        match &mut self.source {
            MeterSource::Packages(packages) => {
                let mut sum = 0;
                for package in packages {
                    sum += package.advance(number(&package.counter)?);
                }
                Some(sum as f64 / 1e6)
            }
            MeterSource::Batteries { folders, watts } => {
                let before = *watts;
                let now: Option<Vec<f64>> = folders.iter().map(|f| power(f)).collect();
                *watts = now?.iter().sum();
                Some((before + *watts) / 2.0 * time.as_secs_f64())
            }
        }
    }
}

impl Package {
    /// Microjoules since the last sample.
    fn advance(&mut self, now: u64) -> u64 {
        let added = match now.checked_sub(self.last) {
            Some(added) => added,
            // Wrapped.
            None => now.saturating_add(self.range.saturating_sub(self.last)),
        };
        self.last = now;
        added
    }
}

/// Discharge power of a battery in watts; `None` if unknown or not discharging.
fn power(battery: &Path) -> Option<f64> {
    let signed = |file: &str| text(&battery.join(file))?.parse::<f64>().ok();
    if text(&battery.join("status"))? != "Discharging" {
        return None;
    }
    // Some drivers report discharge current as negative.
    let watts = match signed("power_now") {
        Some(microwatts) => microwatts / 1e6,
        None => signed("current_now")? / 1e6 * (signed("voltage_now")? / 1e6),
    };
    Some(watts.abs())
}

fn folders(of: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(of).into_iter().flatten().flatten();
    let mut paths: Vec<_> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}

fn text(path: &Path) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

fn number(path: &Path) -> Option<u64> {
    text(path)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A fake `/sys` tree.
    struct Tree(tempfile::TempDir);

    impl Tree {
        fn new(files: &[(&str, &str)]) -> Self {
            let tree = Self(tempfile::tempdir().unwrap());
            files.iter().for_each(|(path, text)| tree.write(path, text));
            tree
        }

        fn write(&self, path: &str, text: &str) {
            let path = self.0.path().join("class").join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        }

        fn meter(&self) -> Option<Meter> {
            Meter::find(self.0.path())
        }
    }

    const TWO_PACKAGES: [(&str, &str); 18] = [
        ("powercap/intel-rapl:0/name", "package-0"),
        ("powercap/intel-rapl:0/energy_uj", "1000000"),
        ("powercap/intel-rapl:0/max_energy_range_uj", "262143328850"),
        ("powercap/intel-rapl:1/name", "package-1"),
        ("powercap/intel-rapl:1/energy_uj", "262143000000"),
        ("powercap/intel-rapl:1/max_energy_range_uj", "262143328850"),
        ("powercap/intel-rapl:2/name", "psys"),
        ("powercap/intel-rapl:2/energy_uj", "5"),
        ("powercap/intel-rapl:2/max_energy_range_uj", "262143328850"),
        ("powercap/intel-rapl:0:0/name", "core"),
        ("powercap/intel-rapl:0:0/energy_uj", "7"),
        (
            "powercap/intel-rapl:0:0/max_energy_range_uj",
            "262143328850",
        ),
        ("powercap/intel-rapl:1:0/name", "package-of-its-own"),
        ("powercap/intel-rapl:1:0/energy_uj", "7"),
        ("powercap/intel-rapl-mmio:0/name", "package-0"),
        ("powercap/intel-rapl-mmio:0/energy_uj", "1000000"),
        ("powercap/intel-rapl/enabled", "1"),
        ("power_supply/BAT0/type", "Battery"),
    ];

    #[test]
    fn packages_are_added_up_and_nothing_twice() {
        let tree = Tree::new(&TWO_PACKAGES);
        let mut meter = tree.meter().unwrap();
        assert_eq!(meter.name(), "rapl package-0, package-1");
        assert_eq!(meter.joules(), Some(0.0));
        tree.write("powercap/intel-rapl:0/energy_uj", "3500000");
        tree.write("powercap/intel-rapl:0:0/energy_uj", "2000000");
        tree.write("powercap/intel-rapl:2/energy_uj", "9000000");
        tree.write("powercap/intel-rapl-mmio:0/energy_uj", "3500000");
        assert_eq!(meter.joules(), Some(2.5));
        // 328,850 up to the wrap, 671,150 after it.
        tree.write("powercap/intel-rapl:1/energy_uj", "671150");
        assert_eq!(meter.joules(), Some(3.5));
        tree.write("powercap/intel-rapl:1/energy_uj", "1671150");
        assert_eq!(meter.joules(), Some(4.5));
    }

    #[test]
    fn an_unreadable_counter_gives_no_energy() {
        let tree = Tree::new(&TWO_PACKAGES);
        tree.write("powercap/intel-rapl:1/energy_uj", "");
        assert!(tree.meter().is_none());
        let tree = Tree::new(&TWO_PACKAGES);
        let mut meter = tree.meter().unwrap();
        tree.write("powercap/intel-rapl:0/energy_uj", "no number");
        assert_eq!(meter.joules(), None);
        // A sum with a gap would be wrong.
        tree.write("powercap/intel-rapl:0/energy_uj", "2000000");
        assert_eq!(meter.joules(), None);
        assert!(Tree::new(&[]).meter().is_none());
    }

    const BATTERY: [(&str, &str); 9] = [
        ("power_supply/AC/type", "Mains"),
        ("power_supply/BAT0/type", "Battery"),
        ("power_supply/BAT0/status", "Discharging"),
        ("power_supply/BAT0/current_now", "-2000000"),
        ("power_supply/BAT0/voltage_now", "10000000"),
        ("power_supply/mouse/type", "Battery"),
        ("power_supply/mouse/scope", "Device"),
        ("power_supply/mouse/status", "Discharging"),
        ("power_supply/mouse/power_now", "9000000000"),
    ];

    #[test]
    fn a_battery_is_metered_only_while_discharging() {
        let tree = Tree::new(&BATTERY);
        let mut meter = tree.meter().unwrap();
        assert_eq!(meter.name(), "battery BAT0");
        // 20 W, then 30 W on average.
        let second = Duration::from_secs(1);
        assert_eq!(meter.added(second), Some(20.0));
        tree.write("power_supply/BAT0/power_now", "40000000");
        assert_eq!(meter.added(second), Some(30.0));
        assert_eq!(meter.added(second / 2), Some(20.0));
        assert!(meter.joules().is_some());
        tree.write("power_supply/BAT0/status", "Charging");
        assert_eq!(meter.joules(), None);
        tree.write("power_supply/BAT0/status", "Discharging");
        assert_eq!(meter.joules(), None);
        tree.write("power_supply/BAT0/status", "Full");
        assert!(tree.meter().is_none());
    }
}
