#!/usr/bin/env bash
# Every number of benches/README.md again: makes the models, runs each command, writes the tables.
#
#   benches/reproduce.sh DIR [PART...]
#
# DIR gets the models (15 GB) and is best on the disk that is to be measured. Parts, in this order, all of
# them by default: models, device, memory, disk, runs, steady, plan. `models` takes about half an hour on two
# cores, `steady`, which makes a model of its own, 20 minutes, `plan` as long, the others half an hour together.
# Nothing else should run. Settings from the environment: EMBERFLOW (the program), OUT (folder of the tables),
# THREADS (2), ROUNDS (5; fewer for a quick look), PYTHON (with llama-cpp-python for the comparisons with
# llama.cpp, which also need root and cgroup v1), SILU (the SiLU model of models/README.md, for its line of
# "Beside the paper").
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/.." && pwd)
if [ $# -lt 1 ] || [ "${1#-}" != "$1" ]; then
    sed -n '2,12s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
mkdir -p "$1"
dir=$(cd "$1" && pwd)
shift
emberflow=${EMBERFLOW:-$root/target/release/emberflow}
python=${PYTHON:-python3}
rounds=${ROUNDS:-5}
threads=${THREADS:-2}
out=${OUT:-$root/benches/results/$("$python" "$here/io/summarise.py" machine)}
mkdir -p "$out"
big=$dir/bamboo-7b            # .gguf, .ember with statistics
predicted=$big-predicted.ember
small=$dir/llama-1b

# Texts that a model makes up, their statistics, and the container in the order they give.
with_statistics() { # CHECKPOINT CONTAINER TEXTS TOKENS FLAGS...
    local checkpoint=$1 container=$2 texts=$3 tokens=$4 seed
    shift 4
    "$emberflow" pack "$checkpoint" -o "$container" "$@" --force
    for seed in $(seq "$texts"); do
        "$emberflow" run "$container" -p abc --ignore-eos -n "$tokens" --temp 1 --top-k 40 --seed "$seed"
    done >"$container.txt"
    "$emberflow" profile "$container" -f "$container.txt" -o "$container.stats" --force
    "$emberflow" pack "$checkpoint" -o "$container" "$@" --stats "$container.stats" --force
}

words() { # 3,900 words of the synthetic vocabulary in random order
    "$python" - <<'PYTHON'
import random
C, V = "bdfghklmnprstvwz", "aeiou"
syllable = lambda n: C[n % 80 % 16] + V[n % 80 // 16]
random.seed(7)
words = [syllable(k // 80) + syllable(k) + syllable(l) for k in range(390) for l in range(80)]
random.shuffle(words)
print(" ".join(words[:3900]))
PYTHON
}

models() {
    local q4=(--quant q4 --embedding-quant q4)
    "$emberflow" synth --shape bamboo-7b --active 0.10 --gate-rank 480 -o "$big.gguf" --force
    with_statistics "$big.gguf" "$big.ember" 1 1500 "${q4[@]}"
    words >"$dir/words.txt"
    "$emberflow" train-predictor "$big.ember" -f "$dir/words.txt" --kind low-rank --bytes 4.1 --tokens 2000 \
        -o "$predicted" --force
    "$emberflow" synth --shape llama-1b --act relu --active 0.10 -o "$small.gguf" --force
    with_statistics "$small.gguf" "$small.ember" 2 2000 "${q4[@]}"
    rm -rf "$dir/demo-hf"
    "$emberflow" export -o "$dir/demo-hf"
    with_statistics "$dir/demo-hf" "$dir/demo.ember" 8 480 --quant q8 --sector 512
}

bench() { "$emberflow" bench "$@" --out "$out" --force; }

device() {
    "$emberflow" bench device
    bench kernels
    bench cache
    bench predictor "$predicted"
    MILLIS=400 ROUNDS=$((rounds > 3 ? 3 : rounds)) EMBERFLOW=$emberflow "$here/io/compare_fio.sh"
    "$emberflow" bench io "$big.gguf" --save
    (cd "$root" && cargo bench -p emberflow-benches --bench cache --bench io -- --warm-up-time 1 --measurement-time 2)
}

memory() {
    for model in llama-1b bamboo-7b; do
        "$python" "$here/peers/compare_llama_cpp.py" "$dir/$model.gguf" "$dir/$model.ember" --emberflow "$emberflow" \
            --rounds "$rounds" --chunk 128 --csv "$out/$model.csv"
    done
    for mode in "" "--sparsity dense" "--oracle"; do
        # shellcheck disable=SC2086
        "$emberflow" bench decode "$big.ember" --threads "$threads" $mode
    done
    for mode in exact dense; do
        "$emberflow" bench decode "$big.ember" --threads "$threads" -n 12 --contexts 0,4096,16000 --sparsity "$mode"
    done
    "$emberflow" bench decode "$predicted" --threads "$threads" --contexts 64
    "$emberflow" bench decode "$predicted" --threads "$threads" --contexts 64 --ffn-resident 0.5
}

disk() {
    local offload=("$python" "$here/peers/offload.py" "$big.gguf" "$predicted" --emberflow "$emberflow" --read-ahead 8192)
    "${offload[@]}" --shares 0.5 --rounds "$rounds" --csv "$out/bamboo-7b-predicted-offload-50.csv"
    "${offload[@]}" --shares 0.25 --rounds $(((rounds + 1) / 2)) --policies full \
        --csv "$out/bamboo-7b-predicted-offload-25.csv"
}

runs() {
    local flags=(--threads "$threads" --rounds 1)
    bench latency "$predicted" "${flags[@]}" -n 512 --policies full
    bench prefill "$predicted" "${flags[@]}" --lengths 512
    bench batch "$predicted" "${flags[@]}"
    bench ablation "$predicted" "${flags[@]}" -n 8 --io sim:ufs4,sim:ufs31
    "$emberflow" bench sweep "$predicted" --threads "$threads" -n 24 --rounds 3 --policies full --out "$out/full" --force
    bench sweep "$predicted" "${flags[@]}" -n 24 --policies full,llmflash,mmap \
        --beside "$out/bamboo-7b-predicted-offload-50.csv"
    for model in "$dir/demo.ember" ${SILU:+"$SILU"}; do
        "$emberflow" bench sweep "$model" --threads "$threads" -n 96 --rounds "$rounds" --shares 50 \
            --policies full,llmflash --io sim:ufs4 --out "$out/table-6" --force
    done
}

# A model whose neurons fire for longer, so that the cache hits as often as the paper's.
steady() {
    local model=$dir/steady q4=(--quant q4 --embedding-quant q4)
    "$emberflow" synth --shape bamboo-7b --active 0.10 --gate-rank 480 --persistence 0.9 -o "$model.gguf" --force
    with_statistics "$model.gguf" "$model.ember" 1 800 "${q4[@]}"
    [ -f "$dir/words.txt" ] || words >"$dir/words.txt"
    "$emberflow" train-predictor "$model.ember" -f "$dir/words.txt" --kind low-rank --bytes 4.1 --tokens 1200 \
        -o "$model-predicted.ember" --force
    rm "$model.gguf" "$model.ember"
    "$emberflow" bench latency "$model-predicted.ember" --threads "$threads" --rounds 1 -n 512 --policies full \
        --out "$out/steady" --force
}

plan() {
    rm -f "$out/plan.csv"
    for model in "llama-1b 100" "demo 400"; do
        set -- $model
        "$python" "$here/plan/sweep.py" "$emberflow" "$dir/$1.ember" --io sim:nvme --tokens "$2" --runs 3 --budgets 8 \
            --csv "$out/plan.csv" --name "$1"
    done
    # With predictors, on the real disk.
    "$python" "$here/plan/sweep.py" "$emberflow" "$predicted" --tokens 65 --runs 1 --budgets 8 --csv "$out/plan.csv" \
        --name bamboo-7b-predicted
}

for part in "${@:-models device memory disk runs steady plan}"; do
    for one in $part; do
        case $one in
            models | device | memory | disk | runs | steady | plan) "$one" ;;
            *)
                echo "$one: expected models, device, memory, disk, runs, steady or plan" >&2
                exit 2
                ;;
        esac
    done
done
