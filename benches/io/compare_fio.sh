#!/usr/bin/env bash
# Our reads against fio's on the same file: throughput at the best depth, CPU time per read.
#
#   benches/io/compare_fio.sh [FILE]
#
# FILE should hold 4 GiB or more; without one a temporary file is written to the current folder.
# Settings from the environment: EMBERFLOW (the program), ROUNDS (3), SECONDS_PER_POINT (1),
# SIZE_GIB (4), MACHINE (name of the results folder), FIO_EXTRA (more options for fio).
# The machine should do nothing else. Rounds are interleaved, because devices of cloud machines
# drift; the table shows medians.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)

for program in fio python3; do
    if ! command -v "$program" >/dev/null; then
        echo "$program is missing: apt-get install $program" >&2
        exit 1
    fi
done
emberflow=${EMBERFLOW:-$root/target/release/emberflow}
if [ ! -x "$emberflow" ]; then
    echo "$emberflow is missing: cargo build --release" >&2
    exit 1
fi
rounds=${ROUNDS:-3}
time=${SECONDS_PER_POINT:-1}
machine=${MACHINE:-$(python3 "$here/summarise.py" machine)}
raw=$(mktemp -d)
trap 'rm -rf "$raw"' EXIT

file=${1:-}
if [ -z "$file" ]; then
    file=$PWD/.compare-fio-$$.tmp
    trap 'rm -rf "$raw" "$file"' EXIT
    echo "writing ${SIZE_GIB:=4} GiB to $file" >&2
    head -c "${SIZE_GIB}G" /dev/urandom >"$file"
    sync "$file"
fi

depths=(8 32 64 128)
for round in $(seq "$rounds"); do
    for size in 4KiB 8KiB 24KiB 64KiB 512KiB seq; do
        echo "round $round of $rounds: $size" >&2
        if [ "$size" = seq ]; then
            how=(--rw=read --bs=1M)
        else
            how=(--rw=randread --bs="${size%iB}" --norandommap --randrepeat=0)
        fi
        for depth in "${depths[@]}"; do
            # shellcheck disable=SC2086
            fio --name=x --filename="$file" --readonly --ioengine=io_uring --registerfiles=1 \
                --direct=1 --iodepth="$depth" "${how[@]}" --time_based --ramp_time=0.1 \
                --runtime="$time" --output-format=json ${FIO_EXTRA:-} \
                >"$raw/fio.$round.$size.$depth.json"
        done
        "$emberflow" bench io "$file" --sizes "$size" --ranges 0 --json \
            --depths "$(IFS=,; echo "${depths[*]}")" \
            --millis "$(python3 -c "print(round($time * 1000))")" >"$raw/ours.$round.$size.json"
    done
done
python3 "$here/summarise.py" table "$raw" "$root/benches/results/$machine/io.csv"
