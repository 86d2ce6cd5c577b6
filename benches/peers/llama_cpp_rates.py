#!/usr/bin/env python3
"""Decode and prefill rates of llama.cpp on one GGUF file, in tokens per second.

usage: llama_cpp_rates.py MODEL.gguf THREADS DECODE_TOKENS PREFILL_TOKENS [repack|mmap]
`repack` (the default) lets it copy weights into its own layout, `mmap` leaves them in the
mapped file. Prints: decode prefill version
"""

import sys
import time

import llama_cpp


def main() -> None:
    path, threads, decode, prefill = sys.argv[1], *map(int, sys.argv[2:5])
    if sys.argv[5:] == ["mmap"]:
        defaults = llama_cpp.llama_model_default_params

        def without_copies():
            params = defaults()
            params.use_extra_bufts = False
            return params

        llama_cpp.llama_model_default_params = without_copies
        llama_cpp.llama_cpp.llama_model_default_params = without_copies
    model = llama_cpp.Llama(
        path,
        n_ctx=max(decode, prefill) + 64,
        n_batch=512,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
    )
    rates = [0.0, 0.0]
    if decode:
        model.eval([1, 5, 6, 7])
        start = time.perf_counter()
        for token in range(decode):
            model.eval([8 + token])
        rates[0] = decode / (time.perf_counter() - start)
    if prefill:
        model.reset()
        start = time.perf_counter()
        model.eval(list(range(3, 3 + prefill)))
        rates[1] = prefill / (time.perf_counter() - start)
    print(f"{rates[0]:.3f} {rates[1]:.3f} {llama_cpp.__version__}")


if __name__ == "__main__":
    main()
