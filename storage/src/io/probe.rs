//! What io_uring offers on this machine, for `emberflow doctor`. The engine decides by a trial read
//! instead (see [`super::IoChoice`]).

use io_uring::IoUring;

use super::filter;

/// io_uring support of this kernel, for this user.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UringFacts {
    /// Why it was not tried: a seccomp filter kills processes that use it. `None` if it was tried.
    pub killed: Option<String>,
    /// Error number of creating a ring; `None` on success.
    pub errno: Option<i32>,
    /// `/proc/sys/kernel/io_uring_disabled`: 0 enabled, 1 for privileged users only, 2 disabled.
    /// `None` on kernels without this setting (before 6.6).
    pub disabled: Option<u32>,
    /// Ring setup flags that work here and save interrupts and system calls.
    pub features: Vec<&'static str>,
}

impl UringFacts {
    /// Message why rings cannot be created; `None` if they can.
    #[must_use]
    pub fn why_not(&self) -> Option<String> {
        if self.killed.is_some() {
            return self.killed.clone();
        }
        let errno = self.errno?;
        Some(match (errno, self.disabled) {
            (_, Some(2)) => {
                "switched off for everybody by the sysctl kernel.io_uring_disabled = 2".into()
            }
            (libc::EPERM, Some(1)) => {
                "the sysctl kernel.io_uring_disabled = 1 leaves it to privileged users".into()
            }
            (libc::EPERM | libc::EACCES, _) => {
                "refused (EPERM), probably by a container's system call filter".into()
            }
            (libc::ENOSYS, _) => {
                "unknown to this kernel, or hidden by a system call filter (ENOSYS)".into()
            }
            (libc::ENOMEM, _) => "the limit of locked memory is too low (ENOMEM)".into(),
            (e, _) => std::io::Error::from_raw_os_error(e).to_string(),
        })
    }
}

/// Creates a few small rings and drops them.
#[must_use]
pub fn probe_uring() -> UringFacts {
    let switch = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").ok();
    let disabled = switch.and_then(|t| t.trim().parse().ok());
    let killed = filter::forbids_uring();
    if killed.is_some() {
        return UringFacts {
            killed,
            disabled,
            ..UringFacts::default()
        };
    }
    let errno = match IoUring::new(8) {
        Ok(_) => None,
        Err(e) => Some(e.raw_os_error().unwrap_or(libc::EIO)),
    };
    let mut features = Vec::new();
    if errno.is_none() {
        let works = |ring: std::io::Result<IoUring>| ring.is_ok();
        if works(IoUring::builder().setup_coop_taskrun().build(8)) {
            features.push("coop_taskrun");
        }
        if works(IoUring::builder().setup_single_issuer().build(8)) {
            features.push("single_issuer");
        }
        if works(
            IoUring::builder()
                .setup_single_issuer()
                .setup_defer_taskrun()
                .build(8),
        ) {
            features.push("defer_taskrun");
        }
    }
    UringFacts {
        killed,
        errno,
        disabled,
        features,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_name_the_switch_or_the_error() {
        let why = |errno, disabled| {
            let facts = UringFacts {
                errno,
                disabled,
                ..UringFacts::default()
            };
            facts.why_not().unwrap_or_default()
        };
        assert_eq!(why(None, Some(0)), "");
        assert!(why(Some(libc::EPERM), Some(2)).contains("io_uring_disabled = 2"));
        assert!(why(Some(libc::EPERM), Some(1)).contains("privileged"));
        assert!(why(Some(libc::EPERM), Some(0)).contains("filter"));
        assert!(why(Some(libc::ENOSYS), None).contains("ENOSYS"));
        assert!(why(Some(libc::EMFILE), None).contains("open files"));
    }

    #[test]
    fn the_probe_agrees_with_itself() {
        let facts = probe_uring();
        let not = facts.errno.is_some() || facts.killed.is_some();
        assert_eq!(facts.why_not().is_some(), not);
    }
}
