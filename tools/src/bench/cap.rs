//! A memory limit for a child that includes the page cache, for fair mmap runs.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A memory control group for one run at a time.
pub struct Cap {
    dir: PathBuf,
}

impl Cap {
    /// A group limited to `bytes`, page cache included.
    ///
    /// # Errors
    /// Why it cannot be created, such as missing permission or controller.
    pub fn new(bytes: u64) -> Result<Self, String> {
        let name = format!("emberflow-bench-{}", std::process::id());
        let places = [
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            ("/sys/fs/cgroup", "memory.max"),
        ];
        let mut reason = "no memory control group".to_owned();
        for (root, limit) in places {
            let cap = Self {
                dir: Path::new(root).join(&name),
            };
            let made = std::fs::create_dir(&cap.dir)
                .and_then(|()| std::fs::write(cap.dir.join(limit), bytes.to_string()));
            match made {
                Ok(()) => return Ok(cap),
                Err(e) => reason = format!("{}: {e}", cap.dir.display()),
            }
        }
        Err(reason)
    }

    /// A command that starts `program` in the group.
    pub fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]);
        command.arg(self.dir.join("cgroup.procs")).arg(program);
        command
    }
}

impl Drop for Cap {
    fn drop(&mut self) {
        // A group that still contains processes stays until the next boot.
        let _ = std::fs::remove_dir(&self.dir);
    }
}

/// Evicts a file from the page cache, because pages already cached are not charged to the group.
pub fn forget(file: &Path) {
    let mut input = std::ffi::OsString::from("if=");
    input.push(file);
    let mut command = Command::new("dd");
    command.arg(input).args(["iflag=nocache", "count=0"]);
    // If this fails, the page cache stays warm, as the note on the run says.
    let _ = command.stdin(Stdio::null()).stderr(Stdio::null()).status();
}
