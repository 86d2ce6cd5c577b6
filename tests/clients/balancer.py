"""Two replicas behind HAProxy, by docs/haproxy.cfg: balancer.py PROGRAM"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

PROGRAM = sys.argv[1]


def replica():
    process = subprocess.Popen([PROGRAM, "serve", "--port", "0", "--parallel", "12"], stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().strip().removeprefix("http://")


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def chat(address, messages):
    body = {"messages": messages, "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(f"http://{address}/v1/chat/completions", json.dumps(body).encode())
    answer = json.load(urllib.request.urlopen(request, timeout=60))
    return answer["choices"][0]["message"]["content"], answer["usage"]


def served(address):
    """Requests that a replica has answered."""
    metrics = urllib.request.urlopen(f"http://{address}/metrics", timeout=10).read().decode()
    (line,) = [line for line in metrics.splitlines() if line.startswith("emberflow_requests_total ")]
    return int(line.split()[1])


def wait_for(address):
    for _ in range(100):
        try:
            return urllib.request.urlopen(f"http://{address}/health", timeout=5)
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise AssertionError("no replica behind the balancer")


def main():
    (one, first), (two, second) = replica(), replica()
    listen = f"127.0.0.1:{free_port()}"
    names = {"REPLICA1": first, "REPLICA2": second, "LISTEN": listen}
    balancer = subprocess.Popen(["haproxy", "-f", "docs/haproxy.cfg"], env={**os.environ, **names})
    try:
        wait_for(listen)
        system = {"role": "system", "content": "You explain Rust's standard library to beginners."}
        conversations = [[system][: n % 2] + [{"role": "user", "content": f"What is item {n}?"}] for n in range(12)]
        for turn in range(3):
            for messages in conversations:
                text, usage = chat(listen, messages)
                known = usage["prompt_tokens_details"]["cached_tokens"]
                assert turn == 0 or known > usage["prompt_tokens"] // 2, (turn, usage)
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
        counts = served(first), served(second)
        assert sum(counts) == 36 and min(counts) > 0, counts
        one.kill()
        one.wait()
        time.sleep(3)
        for messages in conversations:
            chat(listen, messages)
        assert served(second) == counts[1] + len(conversations)
        print(f"two replicas answered {counts[0]} and {counts[1]}, and one alone the rest")
    finally:
        for process in (balancer, one, two):
            process.kill()


main()
