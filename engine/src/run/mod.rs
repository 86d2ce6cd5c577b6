//! Requests and the decode loop.
//!
//! The [`Stepper`] is the only decode loop. [`crate::Engine::generate`],
//! [`crate::Engine::generate_batch`] and all other callers use it.

mod batch;
mod clock;
mod events;
mod generate;
mod groups;
mod heads;
mod held;
mod log_probs;
mod pace;
mod parked;
mod prompt;
mod repetition;
mod request;
pub mod spans;
mod stepper;
mod text;

pub use batch::{Batch, Continuation};
pub use clock::{Energy, Step};
pub use events::{Admission, Event, Finished, Stepped};
pub use generate::{Generation, Progress};
pub use heads::{PlannedHead, open_with_heads};
pub use log_probs::{LogProb, LogProbs, log_probability, most_likely};
pub use repetition::{Repetition, Tail};
pub use request::{Request, RequestId, Stop};
pub use stepper::Stepper;
