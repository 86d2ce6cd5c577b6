//! The terminal during computation: typed input is not echoed into the output, and waits for the
//! next prompt. The line mode of terminals, which cuts lines after 4095 bytes, is off.

use std::io::{IsTerminal, stderr, stdin};
use std::sync::{Mutex, PoisonError};

use rustix::termios::{
    InputModes, LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcsetattr,
};

use crate::tell::tell_part;

/// The settings that the program found.
static FOUND: Mutex<Option<Termios>> = Mutex::new(None);

/// Terminals mark pasted text, or stop marking it: a paste during the output stays one text.
const MARK_PASTE: &str = "\x1b[?2004h";
const DO_NOT_MARK_PASTE: &str = "\x1b[?2004l";

/// Whether the terminal on standard input can edit lines.
pub fn edits_lines() -> bool {
    let plain = ["dumb", "cons25", "emacs"];
    let kind = std::env::var("TERM").unwrap_or_default();
    stdin().is_terminal() && !plain.contains(&&*kind.to_ascii_lowercase())
}

/// A quiet terminal, until this is dropped or [`restore`] is called.
#[derive(Debug)]
pub struct Quiet(());

impl Quiet {
    /// Makes the terminal on standard input quiet. Ctrl-C still interrupts.
    ///
    /// # Errors
    /// Standard input is no terminal.
    pub fn start() -> std::io::Result<Self> {
        let found = tcgetattr(stdin())?;
        let mut quiet = found.clone();
        quiet.local_modes -= LocalModes::ECHO | LocalModes::ICANON;
        // Enter that is typed ahead is not Ctrl-J.
        quiet.input_modes -= InputModes::ICRNL;
        quiet.special_codes[SpecialCodeIndex::VMIN] = 1;
        quiet.special_codes[SpecialCodeIndex::VTIME] = 0;
        *FOUND.lock().unwrap_or_else(PoisonError::into_inner) = Some(found);
        tcsetattr(stdin(), OptionalActions::Now, &quiet)?;
        let quiet = Self(());
        quiet.mark_pastes();
        Ok(quiet)
    }

    /// Line editors end the marking of pastes with their line.
    pub fn mark_pastes(&self) {
        if stderr().is_terminal() {
            tell_part(MARK_PASTE);
        }
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        restore();
    }
}

/// Restores the terminal, also when the program exits at once.
pub fn restore() {
    let found = FOUND.lock().unwrap_or_else(PoisonError::into_inner).take();
    let Some(found) = found else {
        return;
    };
    if stderr().is_terminal() {
        tell_part(DO_NOT_MARK_PASTE);
    }
    // The terminal may be gone.
    let _ = tcsetattr(stdin(), OptionalActions::Now, &found);
}
