//! Steady state does not allocate: a counting allocator over the whole process, engine and I/O
//! threads alike.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

use emberflow::cli::ModelArg;
use emberflow::model::open_model;
use emberflow_engine::{Budget, Engine, Lab, Logits, Options, Sampler, Sampling, Sparsity};
use emberflow_kernels::DType;
use emberflow_storage::io::IoChoice;
use emberflow_tests::{fixtures, packed};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is passed on unchanged to the system's allocator.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn sampler(vocab: usize) -> Sampler {
    let sampling = Sampling {
        temperature: 0.9,
        top_k: 40,
        top_p: 0.95,
        ..Sampling::default()
    };
    Sampler::new(sampling, vocab)
}

#[test]
fn a_token_allocates_nothing() {
    // one test, so that nothing else allocates at the same time
    let dir = tempfile::tempdir().expect("a folder");
    // Its embedding is not tied to the head, so rows of it are read.
    let untied = packed(&fixtures().join("models/bamboo"), dir.path(), DType::Q8);
    let recurrent = ["lfm2", "qwen3_5", "granitehybrid_dense"].map(|name| {
        let case = fixtures().join("models").join(name);
        packed(&case, dir.path(), DType::Q8)
    });
    let unpacked = fixtures().join("models/qwen3/model.gguf");
    for (model, io, sparsity, share) in [
        (None, IoChoice::Auto, Sparsity::Exact, 0.45),
        (None, IoChoice::Pread, Sparsity::Exact, 0.45),
        (None, IoChoice::Auto, Sparsity::Predicted, 0.45),
        (None, IoChoice::Auto, Sparsity::Predicted, 0.8),
        (Some(&untied), IoChoice::Auto, Sparsity::Exact, 0.45),
        (Some(&recurrent[0]), IoChoice::Auto, Sparsity::Auto, 0.45),
        (Some(&recurrent[1]), IoChoice::Auto, Sparsity::Auto, 0.45),
        (Some(&recurrent[2]), IoChoice::Auto, Sparsity::Auto, 0.45),
        // Its projections and its head are read for every token.
        (Some(&unpacked), IoChoice::Auto, Sparsity::Auto, 0.45),
    ] {
        let model = model.cloned();
        let model = open_model(&ModelArg { model }).expect("a model");
        let mut engine = Engine::open(
            model,
            Options {
                budget: Budget::FfnShare(share),
                sparsity,
                threads: 2,
                context: 256,
                lab: Lab {
                    io,
                    streams: true,
                    ..Lab::default()
                },
                ..Options::default()
            },
        )
        .expect("open");
        let mut sampler = sampler(engine.config().vocab as usize);
        let mut sequence = engine.new_sequence().unwrap();
        let prompt = engine.text().encode("A closure captures").expect("encode");
        engine
            .forward(&mut sequence, &prompt, Logits::Last)
            .expect("prefill");
        let mut step = |engine: &mut Engine| {
            let token = sampler.sample(engine.logits(), sequence.tokens());
            engine
                .forward(&mut sequence, &[token], Logits::Last)
                .expect("forward");
        };
        // queues and per-thread buffers reach their size
        for _ in 0..60 {
            step(&mut engine);
        }
        // On a loaded machine a thread may participate, or a full channel block, late for the first
        // time; allocations per token would be in every window.
        let windows: Vec<u64> = (0..3)
            .map(|_| {
                let before = ALLOCATIONS.load(Ordering::Relaxed);
                for _ in 0..60 {
                    step(&mut engine);
                }
                ALLOCATIONS.load(Ordering::Relaxed) - before
            })
            .collect();
        assert!(
            windows.contains(&0) && windows.iter().all(|&n| n < 10),
            "{windows:?} allocations in 60 tokens each with {io:?}, {sparsity:?}"
        );
    }
}
