//! A sequence's state leaves the process and comes back in another engine with the same bits.

use std::ops::{ControlFlow, Range};

use emberflow_engine::{Engine, Logits, Model, Options, Request, Restored, Sequence};
use emberflow_tests::{one_per_family, roomy};

/// Tokens of the prompt and of the answer.
const PROMPT: usize = 61;
const ANSWER: usize = 10;

/// State of a sequence as bytes: of ranges of positions, and of snapshots.
struct State {
    tokens: Vec<u32>,
    pieces: Vec<(Range<usize>, Vec<u8>)>,
    snapshots: Vec<(usize, Vec<u8>)>,
}

impl State {
    fn of(sequence: &Sequence, cuts: &[usize]) -> Self {
        let ends = cuts.iter().copied().chain([sequence.len()]);
        let mut first = 0;
        let pieces = ends.map(|end| {
            let (range, mut bytes) = (first..end, Vec::new());
            first = end;
            sequence.write_positions(range.clone(), &mut bytes).unwrap();
            assert_eq!(bytes.len() as u64, sequence.saved_bytes(range.clone()));
            (range, bytes)
        });
        let pieces = pieces.collect();
        let lens = sequence.snapshots();
        let snapshots = lens.map(|len| (len, sequence.snapshot(len).unwrap().to_vec()));
        Self {
            tokens: sequence.tokens().to_vec(),
            pieces,
            snapshots: snapshots.collect(),
        }
    }

    /// Restores the first pieces, and the snapshots up to a length.
    fn restore(&self, empty: Sequence, pieces: usize, most: usize) -> Sequence {
        let mut restored = Restored::new(empty);
        for (range, bytes) in &self.pieces[..pieces] {
            let mut bytes = &bytes[..];
            restored
                .positions(&self.tokens[range.clone()], &mut bytes)
                .unwrap();
            assert!(bytes.is_empty());
        }
        for (len, block) in self.snapshots.iter().filter(|(len, _)| *len <= most) {
            restored.snapshot(*len, &mut &block[..]).unwrap();
        }
        restored.finish()
    }
}

fn tokens(engine: &Engine, count: usize) -> Vec<u32> {
    let mut random = fastrand::Rng::with_seed(11);
    let vocab = engine.config().vocab;
    (0..count).map(|_| random.u32(..vocab)).collect()
}

/// Bits of the logits after each of `tokens`.
fn logits(engine: &mut Engine, sequence: &mut Sequence, tokens: &[u32]) -> Vec<Vec<u32>> {
    let mut all = Vec::new();
    for token in tokens {
        let mut each = |_, row: &[f32]| all.push(row.iter().map(|x| x.to_bits()).collect());
        let wanted = Logits::Each(&mut each);
        engine
            .forward(sequence, std::slice::from_ref(token), wanted)
            .unwrap();
    }
    all
}

#[test]
fn state_comes_back_bit_for_bit_in_every_family() {
    let (mut families, mut recurrent, mut by_context) = (0, 0, 0);
    for folder in one_per_family() {
        let open = |options| Engine::open(Model::of_checkpoint(&folder).unwrap(), options).unwrap();
        let mut first = open(roomy(PROMPT + ANSWER + 20));
        let all = tokens(&first, PROMPT + 20);
        let (prompt, further) = all.split_at(PROMPT);
        let mut sequence = first.new_sequence().unwrap();
        let request = Request {
            max_tokens: ANSWER,
            ignore_eos: true,
            ..Request::default()
        };
        let mut on = |_| ControlFlow::Continue(());
        first
            .generate(&mut sequence, prompt, &request, &mut on)
            .unwrap();
        let mut random = fastrand::Rng::with_seed(families);
        let mut cuts = [random.usize(1..30), 32, random.usize(33..64)];
        cuts.sort_unstable();
        let state = State::of(&sequence, &cuts);
        let goes_back = sequence.goes_back();
        assert_eq!(
            state.snapshots.is_empty(),
            goes_back,
            "{}",
            folder.display()
        );
        recurrent += u64::from(!goes_back);
        drop(sequence);

        // Other page sizes, and others beside it.
        let again = |context| {
            open(Options {
                batch: 2,
                ..roomy(context)
            })
        };
        let mut second = again(700.min(first.config().max_context as usize));
        if first.state_identity() != second.state_identity() {
            // Rotary angles of some models depend on the context.
            second = again(PROMPT + ANSWER + 20);
            by_context += 1;
        }
        assert_eq!(first.state_identity(), second.state_identity());
        assert_eq!(first.is_recurrent(), !goes_back);
        for (pieces, most) in [(4, usize::MAX), (4, PROMPT), (3, usize::MAX), (1, 0)] {
            let mut back = state.restore(second.new_sequence().unwrap(), pieces, most);
            let end = state.pieces[pieces - 1].0.end;
            let lens = state.snapshots.iter().map(|(len, _)| *len);
            let snapshot = lens.filter(|&len| len <= end.min(most)).max();
            let expected = if goes_back {
                end
            } else {
                snapshot.unwrap_or(0)
            };
            assert_eq!(
                back.tokens(),
                &state.tokens[..expected],
                "{}",
                folder.display()
            );
            let mut whole = first.new_sequence().unwrap();
            for chunk in state.tokens[..expected].chunks(first.chunk()) {
                first.forward(&mut whole, chunk, Logits::None).unwrap();
            }
            let (found, wanted) = (
                logits(&mut second, &mut back, &further[..6]),
                logits(&mut first, &mut whole, &further[..6]),
            );
            assert!(found == wanted, "{}: {pieces} pieces", folder.display());
        }
        families += 1;
    }
    assert!(families > 20 && recurrent > 4, "{families} {recurrent}");
    assert!((1..5).contains(&by_context), "{by_context}");
}

#[test]
fn what_is_cut_off_or_too_long_leaves_what_came_before() {
    let mut engine = Engine::open(Model::demo().unwrap(), roomy(200)).unwrap();
    let all = tokens(&engine, 120);
    let mut sequence = engine.new_sequence().unwrap();
    for chunk in all.chunks(engine.chunk()) {
        engine.forward(&mut sequence, chunk, Logits::None).unwrap();
    }
    let state = State::of(&sequence, &[40, 90]);
    drop(sequence);
    let (range, bytes) = &state.pieces[1];
    let mut restored = Restored::new(engine.new_sequence().unwrap());
    restored
        .positions(&all[..40], &mut &state.pieces[0].1[..])
        .unwrap();
    for len in [0, 1, bytes.len() / 2, bytes.len() - 1] {
        let cut = restored.positions(&all[range.clone()], &mut &bytes[..len]);
        assert!(cut.is_err() && restored.len() == 40, "{len}");
    }
    let room = vec![1; restored.room() + 1];
    assert!(restored.positions(&room, &mut std::io::repeat(0)).is_err());
    restored
        .positions(&all[range.clone()], &mut &bytes[..])
        .unwrap();
    assert_eq!(restored.finish().tokens(), &all[..90]);

    let other = Engine::open(
        Model::demo().unwrap(),
        Options {
            kv: emberflow_kernels::DType::F16,
            ..roomy(200)
        },
    );
    assert_ne!(engine.state_identity(), other.unwrap().state_identity());
}
