//! GB/s at which one thread puts rows of q4 in tiles, and at which it copies them.

use std::hint::black_box;
use std::time::Instant;

use emberflow_opencl::{TILE_ROWS, Tiles};

/// The fastest of some runs.
fn rate(bytes: usize, mut run: impl FnMut()) -> f64 {
    let seconds = (0..9).map(|_| {
        let start = Instant::now();
        run();
        start.elapsed().as_secs_f64()
    });
    bytes as f64 / seconds.fold(f64::INFINITY, f64::min) / 1e9
}

fn main() {
    for width in [512, 2048, 4096, 14_336] {
        let (quants, scales) = (width / 2, width / 16);
        let tiles = Tiles {
            quants,
            scales,
            scale: 2,
        };
        // More than caches hold.
        let count = (256 << 20) / tiles.len();
        let rows = vec![7u8; count * tiles.len()];
        let mut to = vec![0u8; tiles.len()];
        let all: Vec<[&[u8]; 2]> = rows
            .chunks_exact(quants + scales)
            .map(|row| {
                let (quants, scales) = row.split_at(quants);
                [quants, scales]
            })
            .collect();
        let tiled = rate(rows.len(), || {
            for some in all.chunks_exact(TILE_ROWS) {
                tiles.fill(some, black_box(&mut to));
            }
        });
        let copied = rate(rows.len(), || {
            for some in all.chunks_exact(TILE_ROWS) {
                let mut at = 0;
                for part in some.iter().flatten() {
                    black_box(&mut to)[at..at + part.len()].copy_from_slice(part);
                    at += part.len();
                }
            }
        });
        println!("width {width}: {tiled:.1} GB/s in tiles, {copied:.1} copied");
    }
}
