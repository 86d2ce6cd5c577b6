#!/usr/bin/env bash
# Every number of benches/README.md again: makes the models, runs each command, writes the CSV files,
# makes the page and the README's picture from them.
#
#   benches/reproduce.sh DIR [PART...]
#
# DIR gets the models (15 GB) and is best on the disk that is to be measured. Parts, in this order, all of
# them by default: models, device, memory, disk, runs, steady, plan, page. On two cores `models` takes half an
# hour, `steady`, which makes a model of its own, 20 minutes, `plan` as long, the others an hour and a half
# together. Nothing else should run. A part that is measured alone replaces its own files; the page then has
# what is of the same commit as its headline (part `disk`), and names the commands for the rest.
#
# Settings from the environment: EMBERFLOW (the program, beside which emberflow-lab lies; built here else), OUT (folder of the files), THREADS
# (2), ROUNDS (5; fewer for a quick look), PYTHON (with llama-cpp-python for the comparisons with llama.cpp,
# which also need root and cgroup v1), SILU (the SiLU model of models/README.md, for its line of "Beside the
# papers"). `device` needs fio for its comparison.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/.." && pwd)
if [ $# -lt 1 ] || [ "${1#-}" != "$1" ]; then
    sed -n '2,18s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
mkdir -p "$1"
dir=$(cd "$1" && pwd)
shift
python=${PYTHON:-python3}
rounds=${ROUNDS:-5}
threads=${THREADS:-2}
out=${OUT:-$root/benches/results/$("$python" "$here/io/summarise.py" machine)}
mkdir -p "$out"
out=$(cd "$out" && pwd)
big=$dir/bamboo-7b            # .gguf, .ember with statistics
predicted=$big-predicted.ember
small=$dir/llama-1b

# The last commit that changed the program, so that pages and scripts can change between two parts.
program=(engine storage predictor models tools benches/src Cargo.toml Cargo.lock ':!*.md' ':!*/tests/*')
commit=$(git -C "$root" log -1 --format=%h -- "${program[@]}")
git -C "$root" diff --quiet HEAD -- "${program[@]}" || commit=$commit-changed
if [ -z "${EMBERFLOW:-}" ]; then
    cargo build --release --manifest-path "$root/Cargo.toml" -p emberflow -p emberflow-benches
fi
emberflow=${EMBERFLOW:-${CARGO_TARGET_DIR:-$root/target}/release/emberflow}

# What the page says of the machine.
{
    fact() { printf '%s,"%s"\n' "$1" "$2"; }
    cpuinfo() { sed -n "s/^$1[[:space:]]*: *//p" /proc/cpuinfo | head -1; }
    echo what,value
    fact processor "$(cpuinfo 'model name')"
    fact details "$(lscpu 2>/dev/null | sed -n 's/^L3 cache: *\(.*\)/L3 cache \1/p' | head -1)"
    fact cores "$(nproc)"
    fact memory "$(awk '/^MemTotal/ { printf "%.0f GiB", $2 / 1048576 }' /proc/meminfo)"
    fact kernel "Linux $(uname -r | cut -d- -f1)"
    fact disk "$(findmnt -no SOURCE,FSTYPE -T "$dir" | tr -s ' ' ' ')"
    fact llama.cpp "$("$python" -c 'import llama_cpp; print("llama-cpp-python", llama_cpp.__version__)' 2>/dev/null || echo none)"
} >"$out/machine.csv"
[ -f "$out/measured.csv" ] || echo file,commit,date,rounds >"$out/measured.csv"

# measure FILE ROUNDS COMMAND...: the command writes $csv. FILE counts as measured when it has ended well.
measure() {
    local file=$1 times=$2 kept
    shift 2
    csv=$out/$file
    kept=$(grep -v "^$file," "$out/measured.csv")
    printf '%s\n' "$kept" >"$out/measured.csv"
    rm -f "$csv"
    echo "== $file: $*" >&2
    "$@"
    [ -s "$csv" ] || { echo "$file was not written" >&2; exit 1; }
    echo "$file,$commit,$(date -u +%F),$times" >>"$out/measured.csv"
}

# The same for a benchmark of the program, and of the laboratory.
bench() { "$emberflow" bench "$@" --csv "$csv" --force; }
lab() { "$emberflow-lab" "$@" --csv "$csv" --force; }

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
    "$emberflow-lab" synth --shape bamboo-7b --active 0.10 --gate-rank 480 -o "$big.gguf" --force
    with_statistics "$big.gguf" "$big.ember" 1 1500 "${q4[@]}"
    words >"$dir/words.txt"
    "$emberflow" train-predictor "$big.ember" -f "$dir/words.txt" --kind low-rank --bytes 4.1 --tokens 2000 \
        -o "$predicted" --force
    "$emberflow-lab" synth --shape llama-1b --act relu --active 0.10 -o "$small.gguf" --force
    with_statistics "$small.gguf" "$small.ember" 2 2000 "${q4[@]}"
    rm -rf "$dir/demo-hf"
    "$emberflow" export -o "$dir/demo-hf"
    with_statistics "$dir/demo-hf" "$dir/demo.ember" 8 480 --quant q8 --sector 512
}

reads() {
    MILLIS=400 ROUNDS=3 EMBERFLOW=$emberflow CSV=$csv "$here/io/compare_fio.sh"
}

device() {
    measure kernels.csv 5 lab kernels
    measure cache.csv 5 lab cache
    measure predictor.csv 5 lab predictor "$predicted"
    if command -v fio >/dev/null; then
        measure fio.csv 3 reads
    else
        echo "fio is missing: its comparison is left out" >&2
    fi
    "$emberflow" bench io "$big.gguf" --save
}

has_llama() {
    "$python" -c "import llama_cpp" 2>/dev/null && return
    echo "$python has no llama_cpp: the comparisons with llama.cpp are left out" >&2
    return 1
}

beside_llama() {
    "$python" "$here/peers/compare_llama_cpp.py" "$1.gguf" "$1.ember" --emberflow "$emberflow" --rounds "$rounds" \
        --threads "$threads" --chunk 128 --csv "$csv"
}

memory() {
    local decode=(bench decode --threads "$threads")
    if has_llama; then
        measure in-memory-llama-1b.csv "$rounds" beside_llama "$small"
        measure in-memory-bamboo-7b.csv "$rounds" beside_llama "$big"
    fi
    measure decode-dense.csv 1 "${decode[@]}" "$big.ember" --sparsity dense
    measure decode-exact.csv 1 "${decode[@]}" "$big.ember"
    measure decode-oracle.csv 1 lab decode --threads "$threads" "$big.ember" --oracle
    measure decode-predicted.csv 1 "${decode[@]}" "$predicted" --sparsity predicted --contexts 64
    measure decode-predicted-50.csv 1 "${decode[@]}" "$predicted" --sparsity predicted --contexts 64 \
        --ffn-resident 0.5
    decode+=(-n 12 --contexts 0,4096,16000 "$big.ember" --sparsity)
    measure decode-contexts-exact.csv 1 "${decode[@]}" exact
    measure decode-contexts-dense.csv 1 "${decode[@]}" dense
}

offload() { # SHARE ROUNDS POLICIES
    "$python" "$here/peers/offload.py" "$big.gguf" "$predicted" --emberflow "$emberflow" --threads "$threads" \
        --read-ahead 8192 --shares "$1" --rounds "$2" --policies "$3" --csv "$csv"
}

disk() {
    local fewer=$(((rounds + 1) / 2))
    has_llama || return 0
    measure offload-50.csv "$rounds" offload 0.5 "$rounds" full,llmflash
    measure offload-25.csv "$fewer" offload 0.25 "$fewer" full
    measure offload-75.csv "$fewer" offload 0.75 "$fewer" full
    measure offload-100.csv "$fewer" offload 1 "$fewer" full
}

runs() {
    local flags=("$predicted" --threads "$threads" --rounds)
    measure sweep.csv 3 bench sweep "${flags[@]}" 3 -n 24 --policies full
    measure sweep-policies.csv 1 bench sweep "${flags[@]}" 1 -n 24 --policies full,llmflash,mmap
    measure latency.csv 1 lab latency "${flags[@]}" 1 -n 512 --policies full
    measure prefill.csv 3 lab prefill "${flags[@]}" 3 --lengths 512
    measure batch.csv 1 lab batch "${flags[@]}" 1
    measure ladder.csv 1 lab ablation "${flags[@]}" 1 -n 8 --io sim:ufs4,sim:ufs31
    flags=(--threads "$threads" --rounds "$rounds" -n 96 --shares 50 --policies full,llmflash --io sim:ufs4)
    measure table-6-relu.csv "$rounds" bench sweep "$dir/demo.ember" "${flags[@]}"
    if [ -n "${SILU:-}" ]; then
        measure table-6-silu.csv "$rounds" bench sweep "$SILU" "${flags[@]}"
    fi
}

# A model whose neurons fire for longer, so that the cache hits as often as the paper's.
steady() {
    local model=$dir/steady q4=(--quant q4 --embedding-quant q4)
    "$emberflow-lab" synth --shape bamboo-7b --active 0.10 --gate-rank 480 --persistence 0.9 -o "$model.gguf" --force
    with_statistics "$model.gguf" "$model.ember" 1 800 "${q4[@]}"
    [ -f "$dir/words.txt" ] || words >"$dir/words.txt"
    "$emberflow" train-predictor "$model.ember" -f "$dir/words.txt" --kind low-rank --bytes 4.1 --tokens 1200 \
        -o "$model-predicted.ember" --force
    rm "$model.gguf" "$model.ember"
    measure latency-steady.csv 1 lab latency "$model-predicted.ember" --threads "$threads" --rounds 1 -n 512 \
        --policies full
}

plans() {
    local sweep=("$python" "$here/plan/sweep.py" "$emberflow") made=(--budgets 8 --csv "$csv")
    "${sweep[@]}" "$small.ember" --io sim:nvme --tokens 100 --runs 3 "${made[@]}" --name llama-1b
    "${sweep[@]}" "$dir/demo.ember" --io sim:nvme --tokens 400 --runs 3 "${made[@]}" --name demo
    # With predictors, on the real disk.
    "${sweep[@]}" "$predicted" --tokens 65 --runs 1 "${made[@]}" --name bamboo-7b-predicted
}

plan() {
    measure plan.csv 3 plans
}

page() {
    case $out in
        "$root"/*) ;;
        *)
            echo "$out lies outside the repository: no page is made of it" >&2
            return
            ;;
    esac
    (cd "$root" && cargo run --release -p emberflow-benches --example report -- "$out")
}

for part in "${@:-models device memory disk runs steady plan page}"; do
    for one in $part; do
        case $one in
            models | device | memory | disk | runs | steady | plan | page) "$one" ;;
            *)
                echo "$one: expected models, device, memory, disk, runs, steady, plan or page" >&2
                exit 2
                ;;
        esac
    done
done
