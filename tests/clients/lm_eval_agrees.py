"""lm-eval's `local-completions` against what it should find: lm_eval_agrees.py PROGRAM TEXT [--record]

Two tasks made of TEXT. `heldout` takes documents that fit a window: bits per byte are those of
`emberflow perplexity`. `easy` asks as arc_easy does, which of four lines follows: every log-likelihood is
that of lm-eval's `hf` model to a thousandth, and so is every word on whether the
line is the likeliest. The numbers of `hf` lie in lm_eval_hf.json; --record finds them anew, which needs torch.

Needs the packages `lm_eval[api]==0.4.13` and `transformers`; asks no other machine for anything.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

PROGRAM, TEXT = os.path.abspath(sys.argv[1]), pathlib.Path(sys.argv[2])
GOLDEN = pathlib.Path(__file__).with_name("lm_eval_hf.json")
DOCUMENTS, BYTES, WINDOW = 12, 1200, 1024
QUESTIONS, CHOICES = 16, 4
HELDOUT = """task: heldout
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: bits_per_byte
"""
EASY = """task: easy
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
"""


def wholes():
    return TEXT.read_text().split("<|endoftext|>\n")


def documents():
    """Beginnings of the text's documents, in whole lines."""
    found = []
    for whole in wholes():
        text = ""
        for line in whole.splitlines(keepends=True):
            if len((text + line).encode()) > BYTES:
                break
            text += line
        if len(text) > BYTES // 4:
            found.append(text)
    return found[:DOCUMENTS]


def questions():
    """Beginnings of documents with the line that follows and lines of others. Every second one is the
    document's last line, after which the model may end the text."""
    short = [whole.splitlines(keepends=True) for whole in wholes()]
    short = [lines for lines in short if len(lines) > 4 and len("".join(lines).encode()) < BYTES]
    found = []
    for at, lines in enumerate(short[:QUESTIONS]):
        cut = len(lines) - 1 if at % 2 else len(lines) // 2
        others = [short[(at + step) % len(short)][1 + step % 3] for step in range(1, CHOICES)]
        answer = at % CHOICES
        choices = others[:answer] + [lines[cut]] + others[answer:]
        choices = [choice.strip() or "Examples" for choice in choices]
        choices = [choice + "\n" * (at % 2) for choice in choices]
        found.append({"question": "".join(lines[:cut]), "choices": choices, "answer": answer})
    return found


def ours(folder, texts):
    """Bits per byte over all documents, each in a window of its own."""
    bits = size = 0
    for text in texts:
        file = folder / "one.txt"
        file.write_text(text)
        ask = [PROGRAM, "perplexity", "-f", file, "--window", str(WINDOW), "--json"]
        found = json.loads(subprocess.run(ask, check=True, capture_output=True).stdout)
        assert found["bytes"] == len(text.encode()), found
        bits += found["bits_per_byte"] * found["bytes"]
        size += found["bytes"]
    return bits / size


def evaluate(folder, task, model, options):
    """What lm-eval finds: the task's results, and what it was answered for each sample."""
    options = ",".join(f"{name}={value}" for name, value in options.items())
    ask = [sys.executable, "-m", "lm_eval", "run", "--model", model, "--tasks", task, "--log_samples"]
    out = folder / f"{task}-{model}"
    ask += ["--include_path", folder, "--model_args", options, "--output_path", out]
    offline = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    asked = subprocess.run(ask, env={**os.environ, **offline}, capture_output=True, text=True)
    assert asked.returncode == 0, asked.stderr
    (results,) = out.rglob("results_*.json")
    (samples,) = out.rglob("samples_*.jsonl")
    samples = [json.loads(line) for line in samples.read_text().splitlines()]
    samples.sort(key=lambda sample: sample["doc_id"])
    return json.loads(results.read_text())["results"][task], samples


def served(folder, model, checkpoint, task, more=()):
    """The same of `emberflow serve`, with `more` options."""
    server = subprocess.Popen(
        [PROGRAM, "serve", *model, "--port", "0", "--alias", "demo", "--context", str(WINDOW)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        url = server.stdout.readline().strip()
        options = {
            "model": "demo",
            "base_url": f"{url}/v1/completions",
            "tokenizer_backend": "huggingface",
            "tokenizer": checkpoint,
            "tokenized_requests": True,
            "max_length": WINDOW,
            "num_concurrent": 1,
            "max_retries": 1,
            **dict(more),
        }
        return evaluate(folder, task, "local-completions", options)
    finally:
        server.terminate()
        server.wait()


def likelihoods(samples):
    """Of every choice: its log-likelihood, and whether it is the likeliest text."""
    return [[[float(ll), str(best) == "True"] for ll, best in s["filtered_resps"]] for s in samples]


def main():
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        checkpoint = folder / "checkpoint"
        subprocess.run([PROGRAM, "export", "-o", checkpoint], check=True, capture_output=True)
        texts = documents()
        data = folder / "heldout.jsonl"
        data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        (folder / "heldout.yaml").write_text(HELDOUT.format(data=data))
        data = folder / "easy.jsonl"
        data.write_text("".join(json.dumps(question) + "\n" for question in questions()))
        (folder / "easy.yaml").write_text(EASY.format(data=data))
        if "--record" in sys.argv:
            options = {"pretrained": checkpoint, "dtype": "float32"}
            results, samples = evaluate(folder, "easy", "hf", options)
            golden = {"acc": results["acc,none"], "likelihoods": likelihoods(samples)}
            GOLDEN.write_text(json.dumps(golden) + "\n")

        a = ours(folder, texts)
        b = served(folder, [], checkpoint, "heldout")[0]["bits_per_byte,none"]
        print(f"{len(texts)} documents: emberflow {a:.6f}, lm-eval {b:.6f} bits per byte")
        assert abs(a / b - 1) < 1e-3

        # As `hf` computes: with the checkpoint's own numbers, and keys and values in f32.
        exact = folder / "exact.ember"
        pack = [PROGRAM, "pack", checkpoint, "-o", exact, "--quant", "f32"]
        subprocess.run(pack, check=True, capture_output=True)
        # `hf` follows the tokenizer, which puts a token before each text; here it must be asked for.
        results, samples = served(folder, [exact, "--kv", "f32"], checkpoint, "easy", {"add_bos_token": True})
        golden, found = json.loads(GOLDEN.read_text()), likelihoods(samples)
        worst = 0.0
        for wanted, got in zip(golden["likelihoods"], found, strict=True):
            for (ll, best), (our_ll, our_best) in zip(wanted, got, strict=True):
                worst = max(worst, abs(ll - our_ll))
                assert best == our_best, (wanted, got)
        best = sum(best for sample in found for _, best in sample)
        print(
            f"{len(found)} questions, {best} likeliest choices: accuracy {results['acc,none']}, "
            f"log-likelihoods within {worst:.1e} of lm-eval's hf"
        )
        assert worst < 1e-3 and results["acc,none"] == golden["acc"] and best


main()
