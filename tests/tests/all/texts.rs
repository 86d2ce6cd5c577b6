//! Texts of a stepper, and of an engine alone.

use std::ops::ControlFlow;

use emberflow_engine::{
    Admission, Budget, Engine, Finished, Lab, Options, Request, RequestId, Sampling, Stepped,
    Stepper,
};
use emberflow_tests::kinds::Kind;

pub(super) const CONTEXT: usize = 256;

pub(super) fn engine(batch: usize, share: f64, preemption: bool) -> Engine {
    engine_of(Kind::Attention, batch, share, preemption)
}

pub(super) fn engine_of(kind: Kind, batch: usize, share: f64, preemption: bool) -> Engine {
    Engine::open(kind.model(), options(batch, share, preemption)).unwrap()
}

pub(super) fn options(batch: usize, share: f64, preemption: bool) -> Options {
    Options {
        budget: Budget::FfnShare(share),
        threads: 2,
        batch,
        context: CONTEXT,
        preemption,
        lab: Lab {
            chunk: 16,
            ..Lab::default()
        },
        ..Options::default()
    }
}

/// A prompt of `len` tokens, different for each `n`.
pub(super) fn prompt(n: u32, len: usize) -> Vec<u32> {
    Kind::Attention.prompt(n, len)
}

pub(super) fn request(max_tokens: usize, seed: u64) -> Request {
    Request {
        max_tokens,
        sampling: Sampling {
            temperature: 0.9,
            seed,
            ..Sampling::default()
        },
        ignore_eos: true,
        ..Request::default()
    }
}

/// Result of a text: its tokens and the hash over its logits.
pub(super) type Text = (Vec<u32>, u64);

pub(super) fn alone(engine: &mut Engine, prompt: &[u32], request: &Request) -> Text {
    let mut sequence = engine.new_sequence().unwrap();
    let done = engine
        .generate(&mut sequence, prompt, request, &mut |_| {
            ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!(sequence.len(), prompt.len() + done.tokens.len() - 1);
    (done.tokens, done.logits_hash)
}

pub(super) fn admit(
    stepper: &mut Stepper<'_>,
    prompt: &[u32],
    request: Request,
    samples: usize,
) -> RequestId {
    let sequence = stepper.engine().new_sequence().unwrap();
    let admission = Admission {
        sequence,
        prompt: prompt.to_vec(),
        request,
        samples,
        bias: Vec::new(),
        constraint: None,
    };
    stepper.admit(admission).unwrap()
}

pub(super) fn text(finished: Finished) -> Text {
    (finished.tokens, finished.logits_hash)
}

/// Steps until no request can run.
pub(super) fn drain(stepper: &mut Stepper<'_>) {
    loop {
        match stepper.step().unwrap() {
            Stepped::Idle => return,
            Stepped::Yielded | Stepped::Passed { .. } => {}
        }
    }
}
