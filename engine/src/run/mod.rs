//! Requests, and the loop that turns them into tokens.
//!
//! The [`Stepper`] is the only decode loop there is. [`crate::Engine::generate`],
//! [`crate::Engine::generate_batch`] and every other caller are its clients.

mod batch;
mod clock;
mod events;
mod generate;
mod request;
mod spans;
mod stepper;
mod text;

pub use batch::{Batch, Sample};
pub use clock::{Energy, Step};
pub use events::{Admission, Event, Finished, Stepped};
pub use generate::{Generation, Progress};
pub use request::{Request, RequestId, Stop};
pub use stepper::Stepper;
