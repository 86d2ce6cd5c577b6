"""How long short prompts wait for long ones: first_tokens.py PROGRAM [MODEL [REQUESTS [WORDS [LONG]]]]

Starts the server with default options, keeps LONG prompts of WORDS words running, as many as it runs at once unless
given, and asks short ones meanwhile, one after the other.
Prints percentiles of the time to the first token of both kinds.
"""

import json
import random
import subprocess
import sys
import threading
import time
import urllib.request

PROGRAM = sys.argv[1]
MODEL = sys.argv[2:3] if sys.argv[2:3] != ["demo"] else []
REQUESTS = int(sys.argv[3]) if len(sys.argv) > 3 else 100
WORDS = int(sys.argv[4]) if len(sys.argv) > 4 else 220
LONG = int(sys.argv[5]) if len(sys.argv) > 5 else 4


def first_token(url, prompt, answer):
    body = {"prompt": prompt, "max_tokens": answer, "stream": True, "ignore_eos": True}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode())
    start, first = time.monotonic(), None
    with urllib.request.urlopen(request) as response:
        for line in response:
            if first is None and line.startswith(b"data: {"):
                first = time.monotonic() - start
    return first


def words(count, seed):
    known = "vector slice value iterator returns element panics borrowed string pointer trait length".split()
    pick = random.Random(seed)
    return " ".join(pick.choice(known) for _ in range(count))


def percentiles(name, times):
    times = sorted(times)
    of = [1e3 * times[min(len(times) * p // 100, len(times) - 1)] for p in (50, 90, 99)]
    print(f"{name}: {len(times)} first tokens, p50 {of[0]:.0f} ms, p90 {of[1]:.0f} ms, p99 {of[2]:.0f} ms")


def main():
    command = [PROGRAM, "serve", *MODEL, "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    url = server.stdout.readline().strip()
    ends, long, short = threading.Event(), [], []

    def keep_asking(number):
        turn = 0
        while not ends.is_set():
            long.append(first_token(url, words(WORDS, f"{number} {turn}"), 4))
            turn += 1

    threads = [threading.Thread(target=keep_asking, args=(number,)) for number in range(LONG)]
    try:
        for thread in threads:
            thread.start()
        pick = random.Random(1)
        for number in range(REQUESTS):
            time.sleep(pick.uniform(0, 0.2))
            short.append(first_token(url, words(8, f"short {number}"), 4))
        ends.set()
        for thread in threads:
            thread.join()
    finally:
        server.terminate()
        server.wait()
    percentiles("short prompts", short)
    percentiles("long prompts", long)


main()
