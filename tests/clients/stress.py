"""Many rude clients at once: stress.py PROGRAM [SECONDS [CLIENTS]]

Starts the server on the bundled model under a budget. Clients ask, stream, break off, stall, send
rubbish and huge bodies, and read slowly. Checks that every answer is the one that the same request
gets alone, that the process stays within its budget, that memory, connections and requests are gone
when the clients are, and that the server starts again after kill -9.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time

PROGRAM = sys.argv[1]
SECONDS = float(sys.argv[2]) if len(sys.argv) > 2 else 600
CLIENTS = int(sys.argv[3]) if len(sys.argv) > 3 else 64
MIB = 1 << 20
BUDGET = 96
# What a process keeps of memory that it has freed.
SLACK = 4 * MIB
PROMPTS = [
    "A vector is a contiguous growable array type, written as",
    "The borrow checker",
    "Returns the number of elements in the",
    "# Struct Arc\n\n",
    "impl Iterator for",
    "Panics if the index is out of bounds.",
]


class Server:
    def __init__(self):
        command = [PROGRAM, "serve", "--port", "0", "--memory", f"{BUDGET}MiB", "--parallel", "4", "--queue", "48"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.host, self.port = self.process.stdout.readline().strip().removeprefix("http://").split(":")

    def status(self, name):
        """A number of bytes of /proc/PID/status."""
        for line in open(f"/proc/{self.process.pid}/status"):
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024

    def descriptors(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    async def open(self):
        return await asyncio.open_connection(self.host, self.port)


def request(path, body, method="POST"):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def completion(number):
    """The request of this number: greedy and drawn ones, of both classes."""
    seed = random.Random(number)
    return {
        "prompt": seed.choice(PROMPTS),
        "max_tokens": seed.randint(1, 48),
        "temperature": seed.choice([0, 0.9]),
        "seed": number,
        "ignore_eos": True,
        "priority": seed.choice([0, 1]),
    }


async def ask(server, path, body, method="POST"):
    """Status and body of a whole answer."""
    reader, writer = await server.open()
    writer.write(request(path, body, method))
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


async def text_of(server, body):
    """Text of a completion that waits for its turn."""
    while True:
        status, answer = await ask(server, "/v1/completions", body)
        if status == 200:
            return json.loads(answer)["choices"][0]["text"]
        assert status == 429, (status, answer)
        await asyncio.sleep(0.2)


class Clients:
    def __init__(self, server, wanted):
        self.server, self.wanted = server, wanted
        self.counts = {}

    async def whole(self):
        number = random.randrange(len(self.wanted))
        assert await text_of(self.server, completion(number)) == self.wanted[number], number

    async def streamed(self, pause=0.0, leaves=False):
        number = random.randrange(len(self.wanted))
        reader, writer = await self.server.open()
        writer.write(request("/v1/completions", {**completion(number), "stream": True}))
        text, chunks = "", random.randint(1, 6)
        status = int((await reader.readline()).split()[1])
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                choice = json.loads(line[6:])["choices"]
                text += choice[0]["text"] if choice else ""
                chunks -= 1
                if leaves and chunks == 0:
                    break
                await asyncio.sleep(pause)
        writer.close()
        assert status in (200, 429), status
        assert leaves or status == 429 or text == self.wanted[number], number

    async def slow(self):
        await self.streamed(pause=0.3)

    async def leaves(self):
        await self.streamed(leaves=True)

    async def leaves_at_once(self):
        _, writer = await self.server.open()
        writer.write(request("/v1/completions", completion(random.randrange(99))))
        await writer.drain()
        writer.transport.abort()

    async def stalls(self):
        whole = request("/v1/completions", completion(1))
        _, writer = await self.server.open()
        writer.write(whole[: random.randrange(len(whole))])
        await asyncio.sleep(random.uniform(0, 25))
        writer.close()

    async def rubbish(self):
        reader, writer = await self.server.open()
        writer.write(random.randbytes(random.randrange(1, 4000)) + b"\r\n\r\n")
        await asyncio.wait_for(reader.read(), 40)
        writer.close()

    async def wrong(self):
        body = random.choice([b"{", b"[]", b'{"prompt": 3}', b'{"prompt": "a", "n": -1}', b"[" * 5000, random.randbytes(99)])
        status, answer = await ask(self.server, "/v1/completions", body)
        assert status in (400, 429), (status, answer)

    async def huge(self):
        reader, writer = await self.server.open()
        size = random.choice([1, 20, 2000]) * MIB
        writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode())
        try:
            for _ in range(min(size // MIB, 20)):
                writer.write(b"x" * MIB)
                await asyncio.wait_for(writer.drain(), 5)
        except (ConnectionError, TimeoutError):
            pass
        writer.transport.abort()

    async def looks(self):
        path = random.choice(["/metrics", "/health", "/stats", "/slots", "/", "/nothing", "/v1/models"])
        status, _ = await ask(self.server, path, b"", "GET")
        assert status == (404 if path == "/nothing" else 200), (path, status)

    async def run(self, end):
        kinds = [self.whole, self.whole, self.streamed, self.slow, self.leaves, self.leaves_at_once]
        kinds += [self.stalls, self.rubbish, self.wrong, self.huge, self.looks]
        while time.monotonic() < end:
            kind = random.choice(kinds)
            try:
                await asyncio.wait_for(kind(), 120)
            except (ConnectionError, IndexError, asyncio.IncompleteReadError):
                # A server that refuses may close before all is sent: nothing was answered.
                assert kind in (self.huge, self.rubbish, self.wrong, self.stalls), kind
            self.counts[kind.__name__] = self.counts.get(kind.__name__, 0) + 1


async def quiet(server):
    """Waits until nothing runs; returns memory and descriptors then."""
    for _ in range(400):
        _, metrics = await ask(server, "/metrics", b"", "GET")
        numbers = dict(line.split() for line in metrics.decode().splitlines() if line[0] != "#")
        busy = float(numbers["emberflow_requests_processing"]) + float(numbers["emberflow_requests_deferred"])
        if busy == 0 and server.descriptors() <= server.idle:
            return server.status("VmRSS"), server.descriptors()
        await asyncio.sleep(0.2)
    raise AssertionError("requests or connections are left")


async def main():
    server = Server()
    wanted = [await text_of(server, completion(number)) for number in range(40)]
    server.idle = server.descriptors()
    # Once, so that all that is made once is there.
    await asyncio.gather(*(Clients(server, wanted).run(time.monotonic() + 5) for _ in range(CLIENTS)))
    before, _ = await quiet(server)
    clients = Clients(server, wanted)
    end = time.monotonic() + SECONDS
    await asyncio.gather(*(clients.run(end) for _ in range(CLIENTS)))
    after, _ = await quiet(server)
    peak = server.status("VmHWM")
    print(f"{CLIENTS} clients, {SECONDS:.0f} s: {dict(sorted(clients.counts.items()))}")
    print(f"memory {before / MIB:.1f} MiB before, {after / MIB:.1f} after, peak {peak / MIB:.1f} of {BUDGET}")
    assert peak <= BUDGET * MIB and after <= before + SLACK
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    server = Server()
    assert await text_of(server, completion(0)) == wanted[0]
    server.process.terminate()
    assert server.process.wait() == 0
    print("every answer as alone; killed, and the same after")


asyncio.run(main())
