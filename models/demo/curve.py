#!/usr/bin/env python3
"""Draws the training log as an SVG: curve.py log.csv curve.svg [trigram_loss]."""

import csv
import sys

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 360, 52, 52, 24, 44
LOSS = (1.0, 6.0)
ACTIVITY = (0.0, 0.6)
COLOURS = {"train loss": "#2563eb", "held-out loss": "#dc2626", "FFN activity": "#16a34a"}


def main():
    rows = list(csv.DictReader(open(sys.argv[1])))
    trigram = float(sys.argv[3]) if len(sys.argv) > 3 else None
    end = max(float(row["tokens"]) for row in rows)

    def x(tokens):
        return LEFT + (WIDTH - LEFT - RIGHT) * float(tokens) / end

    def y(value, scale):
        value = min(max(float(value), scale[0]), scale[1])
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - scale[0]) / (scale[1] - scale[0])

    def line(column, scale, colour):
        points = " ".join(f"{x(r['tokens']):.1f},{y(r[column], scale):.1f}" for r in rows if r[column])
        return f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{points}"/>'

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
           'font-family="sans-serif" font-size="12">',
           f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>']
    for step in range(6):
        loss = LOSS[0] + step
        at = y(loss, LOSS)
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#e5e7eb"/>')
        out.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{loss:.0f}</text>')
        share = ACTIVITY[1] * step / 5
        out.append(f'<text x="{WIDTH - RIGHT + 8}" y="{at + 4:.1f}">{share:.0%}</text>')
    for million in range(0, int(end / 1e6) + 1, 2):
        out.append(f'<text x="{x(million * 1e6):.1f}" y="{HEIGHT - BOTTOM + 18}" '
                   f'text-anchor="middle">{million} M</text>')
    out.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">tokens seen</text>')
    out.append(line("loss", LOSS, COLOURS["train loss"]))
    out.append(line("heldout_loss", LOSS, COLOURS["held-out loss"]))
    out.append(line("activity", ACTIVITY, COLOURS["FFN activity"]))
    if trigram:
        at = y(trigram, LOSS)
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" '
                   'stroke="#6b7280" stroke-dasharray="6 4"/>')
        out.append(f'<text x="{WIDTH - RIGHT - 4}" y="{at - 5:.1f}" text-anchor="end" '
                   'fill="#6b7280">trigram, held-out</text>')
    for i, (name, colour) in enumerate(COLOURS.items()):
        out.append(f'<text x="{LEFT + 300 + i * 120}" y="{TOP - 6}" fill="{colour}">{name}</text>')
    out.append("</svg>")
    open(sys.argv[2], "w").write("\n".join(out) + "\n")


if __name__ == "__main__":
    main()
