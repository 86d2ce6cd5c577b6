#!/usr/bin/env python3
"""Memory of ONNX Runtime's graphs for a model's FFN: shared by all layers, or one for each layer.

    benches/shared_graphs.py [--layers N] [--d N] [--neurons N] [--widths N,N,..] [--provider NAME]

Gate and Up in bytes, as the engine's NPU devices multiply them. Each row is measured in a process of its own:

    shared   a graph for each width of tokens; 128 rows of weights are an input, whosever layer they are
    own      a graph for each width and matrix of each layer, with its weights inside (initialisers)

Prints graphs, bytes of weights, growth of resident memory after each graph has run once: in all, and without one copy
of the weights; and for each width the milliseconds of all rows of a matrix, the fastest of ten runs through all matrices.
Default is the bundled model. Needs the Python packages onnx, numpy, and onnxruntime or onnxruntime-openvino (for the
provider OpenVINOExecutionProvider).
"""

import argparse
import ctypes
import gc
import os
import subprocess
import sys
import time

import numpy
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

ROWS = 128
CHUNK = 1 << 20


def resident():
    """Resident bytes of this process, without what its allocator could give back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def session(provider, rows, d, width, weights=None):
    """A static graph of exact sums; weights are an input, unless they are given."""
    value = helper.make_tensor_value_info
    inputs = [value("x", TensorProto.INT8, [d, width])]
    inside = []
    if weights is None:
        inputs.insert(0, value("w", TensorProto.INT8, [rows, d]))
    else:
        inside.append(numpy_helper.from_array(weights, "w"))
    sums = [value("sums", TensorProto.INT32, [rows, width])]
    node = helper.make_node("MatMulInteger", ["w", "x"], ["sums"])
    graph = helper.make_graph([node], "sums", inputs, sums, inside)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.enable_cpu_mem_arena = False
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=[provider])


def one(way, args):
    """Graphs, seconds to make them, and bytes by which this process grew."""
    random = numpy.random.default_rng(1)
    matrices = 2 * args.layers
    whole = lambda: random.integers(-127, 128, (args.neurons, args.d), numpy.int8)
    # The library's own memory is not that of graphs.
    session(args.provider, ROWS, args.d, 1).run(None, {"w": numpy.zeros((ROWS, args.d), numpy.int8), "x": numpy.zeros((args.d, 1), numpy.int8)})
    before, took, graphs, held = resident(), 0.0, [], []
    for width in args.widths if way == "shared" else []:
        start = time.monotonic()
        graphs.append((session(args.provider, ROWS, args.d, width), width))
        took += time.monotonic() - start
    for _ in range(matrices):
        weights = whole()
        if way == "shared":
            held.append(weights)
            continue
        for width in args.widths:
            start = time.monotonic()
            graphs.append((session(args.provider, args.neurons, args.d, width, weights), width))
            took += time.monotonic() - start
    for graph, width in graphs:
        x = {"x": numpy.ones((args.d, width), numpy.int8)}
        if way == "shared":
            x["w"] = held[-1][:ROWS]
        graph.run(None, x)
    print(len(graphs), took, resident() - before, *milliseconds(graphs, held, args))


def milliseconds(graphs, held, args):
    """For each width, of all rows of a matrix."""
    for width in args.widths:
        x, best = {"x": numpy.ones((args.d, width), numpy.int8)}, float("inf")
        its = [graph for graph, of in graphs if of == width]
        for _ in range(10):
            start = time.monotonic()
            for graph in its if not held else []:
                graph.run(None, x)
            for weights in held:
                for row in range(0, args.neurons - ROWS + 1, ROWS):
                    its[0].run(None, x | {"w": weights[row : row + ROWS]})
            best = min(best, time.monotonic() - start)
        whole = args.neurons if not held else args.neurons // ROWS * ROWS
        yield 1e3 * best / (2 * args.layers) * args.neurons / whole


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--d", type=int, default=320)
    parser.add_argument("--neurons", type=int, default=960)
    parser.add_argument("--widths", type=lambda of: [int(n) for n in of.split(",")], default=[1, 32, 128, 256])
    parser.add_argument("--provider", default="CPUExecutionProvider")
    parser.add_argument("--way", choices=["shared", "own"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        return one(args.way, args)
    weights = 2 * args.layers * args.neurons * args.d / CHUNK
    print(f"onnxruntime {onnxruntime.__version__}, {weights:.1f} MiB of weights")
    widths = "".join(f"{width:9}" for width in args.widths)
    print("way      graphs   made in s   grew by MiB   without the weights   ms:" + widths)
    for way in ["shared", "own"]:
        done = subprocess.run([sys.executable, *sys.argv, "--way", way], capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        count, took, grew, *times = done.stdout.split()
        grew = int(grew) / CHUNK
        print(f"{way:8} {count:>6} {float(took):11.2f} {grew:13.1f} {grew - weights:21.1f}      {''.join(f'{float(ms):9.3f}' for ms in times)}")


if __name__ == "__main__":
    main()
