"""lm-eval's `local-completions` against `emberflow perplexity`: lm_eval_agrees.py PROGRAM TEXT

Takes documents of TEXT that fit a window, lets lm-eval ask the server for the
log-probabilities of their tokens, and compares bits per byte. Needs the packages
`lm_eval[api]==0.4.13` and `transformers`; asks no other machine for anything.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

PROGRAM, TEXT = os.path.abspath(sys.argv[1]), pathlib.Path(sys.argv[2])
DOCUMENTS, BYTES, WINDOW = 12, 1200, 1024
TASK = """task: heldout
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


def documents():
    """Beginnings of the text's documents, in whole lines."""
    found = []
    for whole in TEXT.read_text().split("<|endoftext|>\n"):
        text = ""
        for line in whole.splitlines(keepends=True):
            if len((text + line).encode()) > BYTES:
                break
            text += line
        if len(text) > BYTES // 4:
            found.append(text)
    return found[:DOCUMENTS]


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


def theirs(folder, texts):
    """The same by lm-eval."""
    checkpoint = folder / "checkpoint"
    subprocess.run([PROGRAM, "export", "-o", checkpoint], check=True, capture_output=True)
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "heldout.yaml").write_text(TASK.format(data=data))
    server = subprocess.Popen(
        [PROGRAM, "serve", "--port", "0", "--alias", "demo", "--context", str(WINDOW)],
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
        }
        options = ",".join(f"{name}={value}" for name, value in options.items())
        ask = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--tasks", "heldout"]
        ask += ["--include_path", folder, "--model_args", options, "--output_path", folder / "out"]
        offline = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
        asked = subprocess.run(ask, env={**os.environ, **offline}, capture_output=True, text=True)
        assert asked.returncode == 0, asked.stderr
    finally:
        server.terminate()
        server.wait()
    (results,) = (folder / "out").rglob("results_*.json")
    return json.loads(results.read_text())["results"]["heldout"]["bits_per_byte,none"]


def main():
    texts = documents()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        a, b = ours(folder, texts), theirs(folder, texts)
    print(f"{len(texts)} documents: emberflow {a:.6f}, lm-eval {b:.6f} bits per byte")
    assert abs(a / b - 1) < 1e-3


main()
