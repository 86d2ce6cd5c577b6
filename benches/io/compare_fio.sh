#!/usr/bin/env bash
# Our reads against fio's on the same file: throughput at the best depth, CPU time per read.
#
#   benches/io/compare_fio.sh [FILE]
#
# FILE should hold 4 GiB or more; without one a temporary file is written to the current folder.
# Settings from the environment: EMBERFLOW (the program), ROUNDS (3), MILLIS per point
# (1000), SIZE_GIB (4), MACHINE (name of the results folder), CSV (the file), FIO_EXTRA (more options for fio).
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
millis=${MILLIS:-1000}
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

with_fio() { # round size depth
    local how=(--rw=randread --bs="${2%iB}" --norandommap --randrepeat=0)
    if [ "$2" = seq ]; then
        how=(--rw=read --bs=1M)
    fi
    # shellcheck disable=SC2086
    fio --name=x --filename="$file" --readonly --ioengine=io_uring --registerfiles=1 \
        --direct=1 --iodepth="$3" "${how[@]}" --time_based --ramp_time=100ms \
        --runtime="${millis}ms" --output-format=json ${FIO_EXTRA:-} >"$raw/fio.$1.$2.$3.json"
}

with_emberflow() { # round size depth
    "$emberflow" bench io "$file" --sizes "$2" --depths "$3" --ranges 0 --millis "$millis" \
        --rounds 1 --json >"$raw/ours.$1.$2.$3.json"
}

for round in $(seq "$rounds"); do
    echo "round $round of $rounds" >&2
    for size in 4KiB 8KiB 24KiB 64KiB 512KiB seq; do
        for depth in 8 32 64 128; do
            # Whoever comes first may find a rested device, so they take turns.
            if ((round % 2)); then
                with_fio "$round" "$size" "$depth"
                with_emberflow "$round" "$size" "$depth"
            else
                with_emberflow "$round" "$size" "$depth"
                with_fio "$round" "$size" "$depth"
            fi
        done
    done
done
python3 "$here/summarise.py" table "$raw" "${CSV:-$root/benches/results/$machine/fio.csv}"
