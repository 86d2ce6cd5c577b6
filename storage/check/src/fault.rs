//! Broken primitives, to prove that the models detect them.

use std::sync::OnceLock;

/// Environment variable with the name of the fault to inject.
pub const VARIABLE: &str = "EMBERFLOW_CHECK_FAULT";

/// One broken primitive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Fences do nothing.
    Fence,
    /// Signals to one waiter are lost.
    NotifyOne,
    /// Signals to all waiters are lost.
    NotifyAll,
}

impl Fault {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Fence, Self::NotifyOne, Self::NotifyAll];

    /// Name in [`VARIABLE`].
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Fence => "fence",
            Self::NotifyOne => "notify-one",
            Self::NotifyAll => "notify-all",
        }
    }

    pub(crate) fn is_on(self) -> bool {
        static CHOSEN: OnceLock<Option<Fault>> = OnceLock::new();
        let chosen = CHOSEN.get_or_init(|| {
            let name = std::env::var(VARIABLE).ok()?;
            Self::ALL.into_iter().find(|f| f.name() == name)
        });
        *chosen == Some(self)
    }
}
