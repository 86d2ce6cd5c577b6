//! Memory facts from the operating system: this process, the machine, its control groups.
//!
//! All of it is text under `/proc` and `/sys`, and any line may be missing or malformed. [`Mem`]
//! takes the root of that tree, so tests can use a synthetic one.

use std::path::{Path, PathBuf};

/// Percentage of the available memory for [`Mem::auto_budget`].
///
/// The rest is for the page cache, growth of other processes and optimistic reports (MemAvailable
/// counts mapped file pages on phones).
const AUTO_PERCENT: u64 = 75;

/// Bytes that [`Mem::auto_budget`] leaves to others on a machine with little memory. A machine with
/// less free memory starts to reclaim, and the budget would cause stalls instead of hits. A control
/// group's limit applies to this process, so nothing of it is left to others.
const AUTO_RESERVE: u64 = 128 << 20;

/// Least percentage of a machine's available memory for [`Mem::auto_budget`].
const AUTO_LEAST: u64 = 25;

/// Limits from here on mean "no limit": control groups use a huge page-rounded number.
const UNLIMITED: u64 = 1 << 60;

/// Reads memory facts under one root directory.
#[derive(Debug, Clone)]
pub struct Mem {
    root: PathBuf,
}

impl Default for Mem {
    fn default() -> Self {
        Self::system()
    }
}

impl Mem {
    /// The running system.
    #[must_use]
    pub fn system() -> Self {
        Self::at("/")
    }

    /// A tree with `proc` and `sys` below `root`.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    fn text(&self, path: &str) -> Option<String> {
        let bytes = std::fs::read(self.root.join(path.trim_start_matches('/'))).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Resident bytes of this process.
    #[must_use]
    pub fn rss(&self) -> Option<u64> {
        kib_field(&self.text("proc/self/status")?, "VmRSS")
    }

    /// Peak resident bytes of this process (`VmHWM`).
    #[must_use]
    pub fn peak_rss(&self) -> Option<u64> {
        kib_field(&self.text("proc/self/status")?, "VmHWM")
    }

    /// Bytes available without swapping, by the kernel's estimate.
    #[must_use]
    pub fn mem_available(&self) -> Option<u64> {
        kib_field(&self.text("proc/meminfo")?, "MemAvailable")
    }

    /// Bytes of the machine's memory.
    #[must_use]
    pub fn mem_total(&self) -> Option<u64> {
        kib_field(&self.text("proc/meminfo")?, "MemTotal")
    }

    /// The tightest control-group limit on this process in bytes (v1 and v2, all ancestors), or
    /// `None` without a limit.
    #[must_use]
    pub fn cgroup_limit(&self) -> Option<u64> {
        self.groups().into_iter().map(|g| g.limit).min()
    }

    /// Bytes this process can still allocate before its tightest control group is full, counting
    /// reclaimable file pages as free. `None` without a limit.
    #[must_use]
    pub fn cgroup_available(&self) -> Option<u64> {
        self.groups().into_iter().map(|g| g.available()).min()
    }

    /// Upper bound on this process's memory: the machine's memory, or its tightest control-group
    /// limit. `None` if the kernel reports neither.
    #[must_use]
    pub fn limit(&self) -> Option<Limit> {
        let machine = self.mem_total().map(|bytes| Limit {
            bytes,
            giver: Giver::Machine,
        });
        let group = self.cgroup_limit().map(|bytes| Limit {
            bytes,
            giver: Giver::ControlGroup,
        });
        machine.into_iter().chain(group).min_by_key(|l| l.bytes)
    }

    /// Bytes this process can still allocate, limited by the machine and its control groups. `None`
    /// if the kernel reports neither.
    #[must_use]
    pub fn available(&self) -> Option<u64> {
        match (self.mem_available(), self.cgroup_available()) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (one, other) => one.or(other),
        }
    }

    /// Most memory that this process can reach without swapping and without taking it from others:
    /// available memory plus what it already holds, on the machine and in each control group. File
    /// pages count as free, as the kernel drops them. `None` if the kernel reports neither.
    #[must_use]
    pub fn conceded(&self) -> Option<Limit> {
        let own = self.anonymous().unwrap_or(0);
        let machine = self.mem_available().map(|free| {
            let most = self.mem_total().unwrap_or(u64::MAX);
            Limit {
                bytes: free.saturating_add(own).min(most),
                giver: Giver::Machine,
            }
        });
        let groups = self.groups().into_iter().map(|group| Limit {
            bytes: group.conceded(own),
            giver: Giver::ControlGroup,
        });
        machine.into_iter().chain(groups).min_by_key(|l| l.bytes)
    }

    /// Resident bytes of this process that are not file pages.
    fn anonymous(&self) -> Option<u64> {
        let status = self.text("proc/self/status")?;
        let shared = kib_field(&status, "RssShmem").unwrap_or(0);
        Some(kib_field(&status, "RssAnon")?.saturating_add(shared))
    }

    /// A safe budget for the whole process: three quarters of its resident plus available memory, on
    /// the machine and in each control group. Leaves 128 MiB of the machine's memory to others, or
    /// three quarters of it if that is less. `None` if the kernel reports nothing.
    #[must_use]
    pub fn auto_budget(&self) -> Option<u64> {
        let own = self.rss().unwrap_or(0);
        let part = |reach: u64, percent| reach / 100 * percent;
        let machine = self.mem_available().map(|free| {
            let reach = free.saturating_add(own);
            let left = reach.saturating_sub(AUTO_RESERVE);
            part(reach, AUTO_PERCENT).min(left.max(part(reach, AUTO_LEAST)))
        });
        let group = self.cgroup_available();
        let group = group.map(|free| part(free.saturating_add(own), AUTO_PERCENT));
        machine.into_iter().chain(group).min()
    }

    /// Every control group of this process with a memory limit.
    fn groups(&self) -> Vec<Group> {
        let mut found = Vec::new();
        let Some(mounts) = self.text("proc/self/mountinfo") else {
            return found;
        };
        let Some(member) = self.text("proc/self/cgroup") else {
            return found;
        };
        for line in member.lines() {
            // "4:memory:/path" in v1, "0::/path" in v2.
            let mut parts = line.splitn(3, ':');
            let (Some(_), Some(controllers), Some(path)) =
                (parts.next(), parts.next(), parts.next())
            else {
                continue;
            };
            let version = if controllers.is_empty() {
                &V2
            } else if controllers.split(',').any(|c| c == "memory") {
                &V1
            } else {
                continue;
            };
            for (mount, inner) in mounts.lines().filter_map(|l| mount_of(l, version, path)) {
                self.walk_up(&mount, &inner, version, &mut found);
            }
        }
        found
    }

    /// Collects the limits of `mount/inner` and of every directory above it, up to the mount.
    fn walk_up(&self, mount: &str, inner: &str, version: &Version, found: &mut Vec<Group>) {
        let top = self.root.join(mount.trim_start_matches('/'));
        let inner = Path::new(inner.trim_matches('/'));
        if inner
            .components()
            .any(|c| !matches!(c, std::path::Component::Normal(_)))
        {
            return;
        }
        for dir in inner.ancestors() {
            if let Some(group) = version.read(&top.join(dir)) {
                found.push(group);
            }
        }
    }
}

/// Upper bound on a process's memory, and its source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limit {
    /// Bytes.
    pub bytes: u64,
    /// Source of the limit.
    pub giver: Giver,
}

/// What limits a process's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Giver {
    /// The memory of the machine.
    Machine,
    /// A control group of the process.
    ControlGroup,
}

struct Group {
    limit: u64,
    usage: u64,
    /// File pages not used recently, and those used recently.
    inactive: u64,
    active: u64,
}

impl Group {
    /// Bytes left under the limit once the inactive file pages are dropped.
    fn available(&self) -> u64 {
        let used = self.usage.saturating_sub(self.inactive);
        self.limit.saturating_sub(used)
    }

    /// Bytes that a member which holds `own` can reach in addition to the others.
    fn conceded(&self, own: u64) -> u64 {
        let files = self.inactive.saturating_add(self.active);
        let others = self.usage.saturating_sub(files.saturating_add(own));
        self.limit.saturating_sub(others)
    }
}

/// File names of one control-group version.
struct Version {
    fstype: &'static str,
    limits: &'static [&'static str],
    usage: &'static str,
    /// Keys in `memory.stat` of file pages: inactive and active.
    files: [&'static str; 2],
    /// Key in `memory.stat` of the tightest limit of all ancestors, seen or not.
    inherited: Option<&'static str>,
}

const V1: Version = Version {
    fstype: "cgroup",
    limits: &["memory.limit_in_bytes"],
    usage: "memory.usage_in_bytes",
    files: ["total_inactive_file", "total_active_file"],
    inherited: Some("hierarchical_memory_limit"),
};

const V2: Version = Version {
    fstype: "cgroup2",
    // Above `high` a group is throttled and reclaimed, which is as bad for us as full.
    limits: &["memory.max", "memory.high"],
    usage: "memory.current",
    files: ["inactive_file", "active_file"],
    inherited: None,
};

impl Version {
    fn read(&self, dir: &Path) -> Option<Group> {
        let number = |name: &str| -> Option<u64> {
            std::fs::read_to_string(dir.join(name))
                .ok()?
                .trim()
                .parse()
                .ok()
        };
        let stat = std::fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
        let counted = |wanted: &str| -> Option<u64> {
            let mut lines = stat.lines().filter_map(|l| l.split_once(' '));
            lines.find(|(key, _)| *key == wanted)?.1.trim().parse().ok()
        };
        let inherited = self.inherited.and_then(counted);
        let limit = (self.limits.iter())
            .filter_map(|name| number(name))
            .chain(inherited)
            .filter(|&n| n < UNLIMITED)
            .min()?;
        let [inactive, active] = self.files.map(|key| counted(key).unwrap_or(0));
        Some(Group {
            limit,
            usage: number(self.usage).unwrap_or(0),
            inactive,
            active,
        })
    }
}

/// If `line` of mountinfo mounts the wanted hierarchy: the mount point and the path of `member`
/// below it. A container sees its group as the mount's root, so that prefix is stripped.
fn mount_of(line: &str, version: &Version, member: &str) -> Option<(String, String)> {
    let (front, back) = line.split_once(" - ")?;
    let mut front = front.split(' ').skip(3);
    let (root, mount) = (front.next()?, front.next()?);
    let mut back = back.split(' ');
    let (fstype, _, options) = (back.next()?, back.next()?, back.next().unwrap_or(""));
    if fstype != version.fstype {
        return None;
    }
    if version.fstype == V1.fstype && !options.split(',').any(|o| o == "memory") {
        return None;
    }
    let inner = match member.strip_prefix(root.trim_end_matches('/')) {
        Some(rest) if rest.is_empty() || rest.starts_with('/') => rest,
        // Our group is outside the mount; use its root.
        _ => "",
    };
    Some((mount.to_owned(), inner.to_owned()))
}

/// Value in bytes of a line like `VmRSS:    1234 kB`.
fn kib_field(text: &str, key: &str) -> Option<u64> {
    let line = text
        .lines()
        .filter_map(|l| l.strip_prefix(key))
        .find_map(|l| l.strip_prefix(':'))?;
    let number: u64 = line.split_whitespace().next()?.parse().ok()?;
    number.checked_mul(1024)
}

/// Resident bytes of this process, on the running system.
#[must_use]
pub fn rss() -> Option<u64> {
    Mem::system().rss()
}

/// Peak resident bytes of this process (`VmHWM`), on the running system.
#[must_use]
pub fn peak_rss() -> Option<u64> {
    Mem::system().peak_rss()
}

/// Bytes available without swapping, on the running system.
#[must_use]
pub fn mem_available() -> Option<u64> {
    Mem::system().mem_available()
}

/// The tightest control-group limit on this process in bytes, on the running system.
#[must_use]
pub fn cgroup_limit() -> Option<u64> {
    Mem::system().cgroup_limit()
}

/// A safe budget for the whole process, on the running system.
#[must_use]
pub fn auto_budget() -> Option<u64> {
    Mem::system().auto_budget()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn tree(files: &[(&str, &str)]) -> (tempfile::TempDir, Mem) {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let mem = Mem::at(dir.path());
        (dir, mem)
    }

    const STATUS: &str = "Name:\tx\nVmPeak:\t 9 kB\nVmHWM:\t  2048 kB\nVmRSS:\t  1024 kB\n";
    const V1_MOUNT: &str = "30 20 0:25 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
        31 20 0:26 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n";
    const V2_MOUNT: &str = "31 20 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n";

    #[test]
    fn process_numbers_come_from_status() {
        let (_d, mem) = tree(&[("proc/self/status", STATUS)]);
        assert_eq!(mem.rss(), Some(MIB));
        assert_eq!(mem.peak_rss(), Some(2 * MIB));
    }

    #[test]
    fn missing_and_strange_text_gives_nothing() {
        let (_d, mem) = tree(&[
            (
                "proc/self/status",
                "VmRSS\nVmRSS: x kB\nVmHWM: 99999999999999999999 kB\n",
            ),
            ("proc/meminfo", "MemAvailable: 18446744073709551615 kB\n"),
            (
                "proc/self/cgroup",
                "nonsense\n0:\n::\n4:memory:/../../etc\n",
            ),
            (
                "proc/self/mountinfo",
                "short\n1 2 - \na b c d e - cgroup x memory\n",
            ),
        ]);
        assert_eq!(mem.rss(), None);
        assert_eq!(mem.peak_rss(), None);
        assert_eq!(mem.mem_available(), None);
        assert_eq!(mem.cgroup_limit(), None);
        assert_eq!(mem.auto_budget(), None);
        assert_eq!(Mem::at("/does/not/exist").auto_budget(), None);
    }

    #[test]
    fn v1_limit_is_found_on_an_ancestor() {
        let (_d, mem) = tree(&[
            ("proc/self/cgroup", "5:cpu:/z\n4:memory:/a/b\n"),
            ("proc/self/mountinfo", V1_MOUNT),
            (
                "sys/fs/cgroup/memory/memory.limit_in_bytes",
                "9223372036854771712\n",
            ),
            ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "1000\n"),
            ("sys/fs/cgroup/memory/a/memory.usage_in_bytes", "700\n"),
            (
                "sys/fs/cgroup/memory/a/memory.stat",
                "cache 1\ntotal_inactive_file 300\n",
            ),
            ("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "5000\n"),
        ]);
        assert_eq!(mem.cgroup_limit(), Some(1000));
        assert_eq!(mem.cgroup_available(), Some(600));
        let giver = Giver::ControlGroup;
        assert_eq!(mem.conceded(), Some(Limit { bytes: 600, giver }));
    }

    #[test]
    fn v1_tells_the_limit_of_an_ancestor_that_is_not_mounted() {
        let (_d, mem) = tree(&[
            ("proc/self/cgroup", "4:memory:/outside/inner\n"),
            ("proc/self/mountinfo", V1_MOUNT),
            (
                "sys/fs/cgroup/memory/memory.limit_in_bytes",
                "9223372036854771712\n",
            ),
            (
                "sys/fs/cgroup/memory/memory.stat",
                "cache 1\nhierarchical_memory_limit 5000\n",
            ),
        ]);
        assert_eq!(mem.cgroup_limit(), Some(5000));
    }

    #[test]
    fn what_others_hold_is_not_conceded_and_files_are() {
        let group = |anon: &str| {
            tree(&[
                ("proc/self/status", anon),
                ("proc/meminfo", "MemTotal: 9 kB\nMemAvailable: 8 kB\n"),
                ("proc/self/cgroup", "0::/app\n"),
                ("proc/self/mountinfo", V2_MOUNT),
                ("sys/fs/cgroup/app/memory.max", "10000\n"),
                ("sys/fs/cgroup/app/memory.current", "9000\n"),
                (
                    "sys/fs/cgroup/app/memory.stat",
                    "inactive_file 1000\nactive_file 2000\n",
                ),
            ])
        };
        // 6000 of the 9000 are not file pages; 2048 of these are this process's own
        let (_d, mem) = group("VmRSS: 5 kB\nRssAnon: 1 kB\nRssFile: 3 kB\nRssShmem: 1 kB\n");
        let conceded = mem.conceded().unwrap();
        assert_eq!(
            (conceded.bytes, conceded.giver),
            (10_000 - 6000 + 2048, Giver::ControlGroup)
        );
        assert_eq!(mem.cgroup_available(), Some(2000));
        // the machine is tighter: 8 KiB, plus what the process has
        let (_d, mem) = group("RssAnon: 9999 kB\n");
        let conceded = mem.conceded().unwrap();
        assert_eq!((conceded.bytes, conceded.giver), (9 << 10, Giver::Machine));
        assert_eq!(Mem::at("/does/not/exist").conceded(), None);
    }

    #[test]
    fn v2_takes_the_tighter_of_max_and_high() {
        let (_d, mem) = tree(&[
            ("proc/self/cgroup", "0::/user/app\n"),
            ("proc/self/mountinfo", V2_MOUNT),
            ("sys/fs/cgroup/user/memory.max", "max\n"),
            ("sys/fs/cgroup/user/app/memory.max", "4000\n"),
            ("sys/fs/cgroup/user/app/memory.high", "3000\n"),
            ("sys/fs/cgroup/user/app/memory.current", "2500\n"),
        ]);
        assert_eq!(mem.cgroup_limit(), Some(3000));
        assert_eq!(mem.cgroup_available(), Some(500));
        let giver = Giver::ControlGroup;
        assert_eq!(mem.limit(), Some(Limit { bytes: 3000, giver }));
        assert_eq!(mem.available(), Some(500));
    }

    #[test]
    fn a_containers_mount_root_is_taken_off() {
        let (_d, mem) = tree(&[
            ("proc/self/cgroup", "0::/docker/abc/inner\n"),
            (
                "proc/self/mountinfo",
                "31 20 0:26 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw\n",
            ),
            ("sys/fs/cgroup/memory.max", "8000\n"),
            ("sys/fs/cgroup/inner/memory.max", "7000\n"),
        ]);
        assert_eq!(mem.cgroup_limit(), Some(7000));
    }

    #[test]
    fn auto_budget_respects_the_tighter_side() {
        let meminfo = format!("MemTotal: 1 kB\nMemAvailable: {} kB\n", 4096 * 1024);
        let base = [
            ("proc/self/status", STATUS),
            ("proc/meminfo", meminfo.as_str()),
        ];
        let (_d, mem) = tree(&base);
        assert_eq!(mem.auto_budget(), Some(4097 * MIB / 100 * 75));
        let giver = Giver::Machine;
        assert_eq!(mem.limit(), Some(Limit { bytes: 1024, giver }));
        let limit = (300 * MIB).to_string();
        let mut capped = base.to_vec();
        capped.push(("proc/self/cgroup", "0::/\n"));
        capped.push(("proc/self/mountinfo", V2_MOUNT));
        capped.push(("sys/fs/cgroup/memory.max", &limit));
        let (d, mem) = tree(&capped);
        // a group's limit is the process's own, even if small
        assert_eq!(mem.auto_budget(), Some(301 * MIB / 100 * 75));
        std::fs::write(d.path().join("sys/fs/cgroup/memory.max"), "67108864").unwrap();
        assert_eq!(mem.auto_budget(), Some(65 * MIB / 100 * 75));
        // a machine's memory is shared with others, but they never get all of it
        for (available, budget) in [(299, 172), (200, 73), (159, 40), (63, 16), (3, 1)] {
            let meminfo = format!("MemAvailable: {} kB\n", available * 1024);
            let (_d, mem) = tree(&[("proc/self/status", STATUS), ("proc/meminfo", &meminfo)]);
            assert_eq!(
                mem.auto_budget().unwrap().div_ceil(MIB),
                budget,
                "{available}"
            );
        }
    }

    #[test]
    fn the_running_system_answers() {
        assert!(rss().unwrap() > 0);
        assert!(peak_rss().unwrap() >= rss().unwrap() / 2);
        assert!(auto_budget().unwrap() > 0);
    }
}
