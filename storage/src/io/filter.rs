//! Detects whether using io_uring would kill this process.
//!
//! A seccomp filter usually rejects a system call with an error number. Some filters kill the
//! process instead. Android's application filter does so for io_uring, even for an ordinary Linux
//! program started by an application. So under a filter, a child process tries it first.
#![allow(unsafe_code)]

use std::io;

/// Size of the kernel's `io_uring_params`; all zero means defaults.
const RING_PARAMS: usize = 120;

/// Why this thread must not call io_uring; `None` if it may try.
pub(crate) fn forbids_uring() -> Option<String> {
    // Without a filter nothing is forbidden. Filters are per thread.
    let status = std::fs::read_to_string("/proc/thread-self/status");
    if status.is_ok_and(|status| !is_filtered(&status)) {
        return None;
    }
    match child_asks() {
        Ok(status) if libc::WIFSIGNALED(status) => Some(match libc::WTERMSIG(status) {
            libc::SIGSYS => "a system call filter ends processes that use it (SIGSYS), as \
                             Android's does with applications"
                .into(),
            signal => format!("a process that tried it was ended by signal {signal}"),
        }),
        Ok(_) => None,
        Err(e) => Some(format!(
            "a system call filter is in force, and no child process can try it safely: {e}"
        )),
    }
}

/// Whether /proc/thread-self/status reports a filter. A kernel without seccomp has no such line.
fn is_filtered(status: &str) -> bool {
    let mode = status.lines().find_map(|l| l.strip_prefix("Seccomp:"));
    mode.is_some_and(|mode| mode.trim() != "0")
}

/// Calls io_uring in a child process and returns its exit status.
///
/// The child has its own copy of the memory: before Linux 5.16, killing a child that shares memory
/// with a core-dumping signal kills the parent too. It has no exit signal, so SIGCHLD handlers of
/// the program do not see it.
fn child_asks() -> io::Result<libc::c_int> {
    let none = 0 as libc::c_long;
    // SAFETY: without flags and without a stack of its own, the child is a plain copy of this
    // process with only this thread. Other threads may hold any lock at this moment, so the child
    // only makes system calls and exits without cleanup: no allocation, no lock, no panic. All
    // arguments are zero, so their order, which varies by architecture, does not matter.
    let pid = unsafe { libc::syscall(libc::SYS_clone, none, none, none, none, none) };
    if pid == 0 {
        ask_and_exit();
    }
    let pid = libc::pid_t::try_from(pid).unwrap_or(-1);
    if pid < 0 {
        return Err(io::Error::last_os_error());
    }
    let mut status = 0;
    loop {
        // SAFETY: waits for our own child, which only `__WCLONE` finds.
        if unsafe { libc::waitpid(pid, &mut status, libc::__WCLONE) } == pid {
            return Ok(status);
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::EINTR) {
            return Err(error);
        }
    }
}

/// Body of the child. It may only make system calls, see [`child_asks`].
fn ask_and_exit() -> ! {
    let mut params = [0u64; RING_PARAMS / 8];
    let (none, no_fd) = (0 as libc::c_long, -1 as libc::c_long);
    // SAFETY: system calls that affect only the child. SIGSYS gets its default action, so no
    // handler of the program runs here, and core dumps are disabled. The ring, if created, ends
    // with the child. The other two calls name no file and do nothing, but the filter still judges
    // them by their number.
    unsafe {
        libc::signal(libc::SIGSYS, libc::SIG_DFL);
        libc::prctl(libc::PR_SET_DUMPABLE, none, none, none, none);
        let entries = 1 as libc::c_long;
        libc::syscall(libc::SYS_io_uring_setup, entries, params.as_mut_ptr());
        libc::syscall(
            libc::SYS_io_uring_enter,
            no_fd,
            none,
            none,
            none,
            none,
            none,
        );
        libc::syscall(libc::SYS_io_uring_register, no_fd, none, none, none);
        libc::_exit(0)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, apply_filter};

    use super::*;
    use crate::io::probe_uring;

    #[test]
    fn a_filter_is_told_by_its_line() {
        assert!(is_filtered("Name:\tx\nSeccomp:\t2\nSeccomp_filters:\t1\n"));
        assert!(is_filtered("Seccomp:\t1\n"));
        assert!(!is_filtered("Seccomp:\t0\n"));
        assert!(!is_filtered("Name:\tx\n"));
    }

    #[test]
    fn a_child_comes_back_whole_where_nothing_forbids() {
        let status = child_asks().unwrap();
        assert!(
            libc::WIFEXITED(status) || libc::WTERMSIG(status) == libc::SIGSYS,
            "{status:#x}"
        );
    }

    /// Runs `body` on a thread where the filter answers system call `number` with `action`. `None`
    /// if no filter can be installed.
    fn filtered<T: Send>(
        number: libc::c_long,
        action: SeccompAction,
        body: impl FnOnce() -> T + Send,
    ) -> Option<T> {
        let rules = BTreeMap::from([(number, vec![])]);
        let arch = std::env::consts::ARCH.try_into();
        let filter = arch.and_then(|arch| {
            SeccompFilter::new(rules, SeccompAction::Allow, action, arch)?.try_into()
        });
        let filter: BpfProgram = match filter {
            Ok(filter) => filter,
            Err(e) => {
                eprintln!("SKIPPED: no filter for this machine: {e}");
                return None;
            }
        };
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| match apply_filter(&filter) {
                Ok(()) => Some(body()),
                Err(e) => {
                    eprintln!("SKIPPED: no filter can be set here: {e}");
                    None
                }
            });
            thread.join().unwrap()
        })
    }

    #[test]
    fn calls_that_would_end_the_process_are_not_made() {
        for number in [libc::SYS_io_uring_setup, libc::SYS_io_uring_enter] {
            for action in [SeccompAction::KillProcess, SeccompAction::Trap] {
                // Without the child this would kill the test program.
                let Some(facts) = filtered(number, action, probe_uring) else {
                    return;
                };
                assert!(facts.killed.is_some() && facts.features.is_empty());
                let why = facts.why_not().unwrap();
                assert!(why.contains("SIGSYS"), "{why}");
            }
        }
    }

    #[test]
    fn calls_that_are_refused_are_made_and_tell_why() {
        let refuse = SeccompAction::Errno(libc::EPERM as u32);
        let Some(facts) = filtered(libc::SYS_io_uring_setup, refuse, probe_uring) else {
            return;
        };
        assert_eq!((facts.killed, facts.errno), (None, Some(libc::EPERM)));
        let harmless = SeccompAction::Errno(libc::EPERM as u32);
        assert_eq!(
            filtered(libc::SYS_swapon, harmless, forbids_uring),
            Some(None)
        );
    }
}
