"""What the comparisons with other programs share: facts of the machine, CSV, a chart."""

import csv
import os
import platform
import random
import string
from html import escape

COLOURS = ["#d9480f", "#1971c2", "#2f9e44", "#9c36b5", "#868e96", "#f59f00", "#0c8599", "#5c940d"]


def machine():
    """One line: processor, cores, kernel, memory."""
    name = platform.machine()
    with open("/proc/cpuinfo") as file:
        for line in file:
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Hardware"):
                name = value.strip()
                break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{name}, {os.cpu_count()} cores, Linux {platform.release()}, {memory:.1f} GiB of memory"


def letters(count):
    """A text of `count` characters, always the same, each a token of what `emberflow-lab synth` writes."""
    return "".join(random.Random(1).choices(string.digits + string.ascii_uppercase, k=count))


def write_csv(path, columns, rows):
    """Rows under their header; numbers with four digits."""
    with open(path, "w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(columns)
        for row in rows:
            out.writerow([f"{cell:.4f}" if isinstance(cell, float) else cell for cell in row])


def bars(path, title, panels):
    """One panel beside the other: (its name, [(name, median, low, high)]), each with its own scale."""
    width = 150 + 330 * len(panels)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 400" '
             f'font-family="sans-serif" font-size="12"><rect width="{width}" height="400" fill="white"/>'
             f'<text x="20" y="20" font-size="15">{escape(title)}</text>'
             f'<text x="20" y="38" font-size="10" fill="#555">{escape(machine())}</text>']
    names = list(dict.fromkeys(name for _, bars in panels for name, *_ in bars))
    for i, name in enumerate(names):
        parts.append(f'<text x="{330 * len(panels) + 10}" y="{70 + 18 * i}" '
                     f'fill="{COLOURS[i % len(COLOURS)]}">{escape(name)}</text>')
    for i, (panel, rows) in enumerate(panels):
        left, step = 30 + 330 * i, 280 / max(len(names), 1)
        top = max([high for *_, high in rows] + [1e-9]) * 1.1
        parts.append(f'<text x="{left}" y="390">{escape(panel)}</text>'
                     f'<path d="M{left} 370H{left + 280}" stroke="#868e96"/>')
        for name, median, low, high in rows:
            x, colour = left + step * names.index(name), COLOURS[names.index(name) % len(COLOURS)]
            y, y_low, y_high = (370 - 300 * value / top for value in (median, low, high))
            parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{step * 0.8:.1f}" height="{370 - y:.1f}" '
                         f'fill="{colour}" fill-opacity="0.75"/>'
                         f'<path d="M{x + step * 0.4:.1f} {y_low:.1f}V{y_high:.1f}" stroke="#212529"/>'
                         f'<text x="{x + step * 0.4:.1f}" y="{y_high - 4:.1f}" text-anchor="middle">'
                         f'{median:.2f}</text>')
    with open(path, "w") as file:
        file.write("\n".join(parts) + "</svg>\n")
