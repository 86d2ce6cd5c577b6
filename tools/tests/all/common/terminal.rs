//! The program on a terminal of its own: a pseudo-terminal, which a test types into.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};

use crate::common::emberflow;

/// Longest wait for a text.
const PATIENCE: Duration = Duration::from_secs(120);

pub const ENTER: &str = "\r";
pub const ALT_ENTER: &str = "\x1b\r";
pub const CTRL_C: &str = "\x03";
pub const CTRL_D: &str = "\x04";
pub const CTRL_R: &str = "\x12";

/// A program and its terminal.
pub struct Terminal {
    child: Child,
    keys: File,
    /// The terminal as the program has it.
    slave: File,
    output: Receiver<Vec<u8>>,
    at: At,
    /// What was shown and not waited for yet, without escape sequences and carriage returns.
    shown: Vec<u8>,
}

/// Where in an escape sequence the output is.
#[derive(Clone, Copy, PartialEq)]
enum At {
    Text,
    Escape,
    /// CSI sequences end with a letter.
    Sequence,
}

impl At {
    /// Whether the next byte is text, and where it leads.
    fn next(self, byte: u8) -> (bool, Self) {
        match (self, byte) {
            (Self::Text, b'\x1b') => (false, Self::Escape),
            (Self::Text, byte) => (byte != b'\r', Self::Text),
            (Self::Escape, b'[') => (false, Self::Sequence),
            (Self::Sequence, byte) if !byte.is_ascii_alphabetic() => (false, Self::Sequence),
            (Self::Escape | Self::Sequence, _) => (false, Self::Text),
        }
    }
}

impl Terminal {
    /// Starts the program in `dir`. Standard output is a file there if `output` names one, else the terminal.
    pub fn start(args: &[&str], dir: &Path, output: Option<&str>) -> Self {
        Self::start_as(&emberflow(), args, dir, output)
    }

    /// As [`start`](Self::start), with the environment of `program`.
    pub fn start_as(program: &Command, args: &[&str], dir: &Path, output: Option<&str>) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        let name = PathBuf::from(std::ffi::OsStr::from_bytes(name.as_bytes()));
        let size = Winsize {
            ws_row: 24,
            ws_col: 80,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        tcsetwinsize(&master, size).unwrap();
        let mut slave = OpenOptions::new();
        // `setsid --ctty` makes it the program's own.
        let slave = slave.read(true).write(true).open(name).unwrap();
        let on = || Stdio::from(slave.try_clone().unwrap());
        let mut command = Command::new("setsid");
        command
            .args(["--ctty", env!("CARGO_BIN_EXE_emberflow")])
            .args(args)
            .current_dir(dir)
            .env("TERM", "xterm");
        for (name, value) in program.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        let out = output.map(|name| File::create(dir.join(name)).unwrap().into());
        command
            .stdin(on())
            .stdout(out.unwrap_or_else(on))
            .stderr(on());
        let child = command.spawn().unwrap();
        let mut from = File::from(master);
        let keys = from.try_clone().unwrap();
        let (sender, output) = channel();
        std::thread::spawn(move || {
            let mut buffer = vec![0; 4096];
            while let Ok(n @ 1..) = from.read(&mut buffer) {
                if sender.send(buffer[..n].to_vec()).is_err() {
                    return;
                }
            }
        });
        Self {
            child,
            keys,
            slave,
            output,
            at: At::Text,
            shown: Vec::new(),
        }
    }

    /// Presses keys.
    pub fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    /// Types a line.
    pub fn line(&mut self, text: &str) {
        self.press(text);
        self.press(ENTER);
    }

    /// Waits until `text` is shown after what was waited for before; returns what was shown up to it.
    pub fn wait(&mut self, text: &str) -> String {
        let start = Instant::now();
        loop {
            let shown = String::from_utf8_lossy(&self.shown).into_owned();
            if let Some(at) = shown.find(text) {
                let (before, after) = shown.split_at(at + text.len());
                self.shown = after.into();
                return before.to_owned();
            }
            let left = PATIENCE.saturating_sub(start.elapsed());
            match self.output.recv_timeout(left) {
                Ok(more) => self.take(&more),
                Err(why) => {
                    let ended = why == RecvTimeoutError::Disconnected;
                    panic!("no {text:?} (ended: {ended}) in {shown:?}");
                }
            }
        }
    }

    fn take(&mut self, output: &[u8]) {
        for &byte in output {
            let (text, at) = self.at.next(byte);
            self.at = at;
            if text {
                self.shown.push(byte);
            }
        }
    }

    /// Waits for the next prompt; returns what was shown before it.
    pub fn prompt(&mut self) -> String {
        self.wait("\n> ")
    }

    /// Waits for the end of the program; returns its exit code.
    pub fn end(&mut self) -> i32 {
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code().unwrap_or(-1);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!(
            "the program does not end: {}",
            String::from_utf8_lossy(&self.shown)
        );
    }

    /// Whether the terminal shows what is typed, line by line, as it did before the program.
    pub fn is_as_before(&self) -> bool {
        let usual = LocalModes::ECHO | LocalModes::ICANON | LocalModes::ISIG;
        tcgetattr(&self.slave).unwrap().local_modes.contains(usual)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
