#!/usr/bin/env python3
"""Extracts clean text from the documentation that the Rust toolchain installs.

Writes `train.txt`, `heldout.txt` (whole documents, chosen by hash) and
`sources.json` (counts). Documents are separated by a line `<|endoftext|>`.
Uses the standard library only; the same toolchain gives the same bytes.
"""

import argparse
import hashlib
import json
import multiprocessing
import pathlib
import re
import subprocess
from html.parser import HTMLParser

END_OF_TEXT = "<|endoftext|>"
# A block is kept the first time it is seen, so prose comes before API pages
# and `std` before the crates it re-exports.
ORDER = [
    "book", "rust-by-example", "reference", "nomicon", "cargo", "rustc",
    "rustdoc", "error_codes", "edition-guide", "embedded-book", "style-guide",
    "unstable-book", "clippy", "std", "core", "alloc", "proc_macro", "test",
]
SKIPPED_FOLDERS = {
    "es", "ja", "ko", "zh", "fonts", "css", "theme", "img", "images", "arch",
    "core_arch", "core_simd", "simd", "std_float", "intrinsics",
    "first-edition", "second-edition", "2018-edition",
}
SKIPPED_FILES = {"print.html", "all.html", "toc.html", "searchindex.html", "404.html"}
# From here on a rustdoc page lists impls that other pages already describe.
CUTS = [
    f'id="{name}"' for name in (
        "trait-implementations", "implementors", "foreign-impls",
        "synthetic-implementations", "blanket-implementations",
    )
]
SKIPPED_TAGS = {"nav", "button", "script", "style", "svg", "noscript", "rustdoc-toolbar", "title"}
SKIPPED_CLASSES = {
    "test-arrow", "src", "since", "rightside", "hideme", "anchor", "doc-anchor",
    "rustdoc-breadcrumbs", "sub-heading", "boring", "buttons", "tooltip",
    "item-info", "stab", "sidetoc", "nav-wrapper", "footnote-reference",
}
VOID_TAGS = {"br", "img", "hr", "input", "meta", "link", "wbr", "col", "source"}
HEADINGS = {f"h{n}": n for n in range(1, 7)}
BLOCKS = {"p", "div", "section", "ul", "ol", "table", "tr", "blockquote", "dl", "dd",
          "details", "summary", "figure", "figcaption", "thead", "tbody", "article"}


class Extractor(HTMLParser):
    """Turns one page into a list of (kind, text); kind is h1..h6, p or code."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.blocks = []
        self.buffer = []
        self.skip_stack = []
        self.heading = None
        self.in_pre = False
        self.list_item = False

    def flush(self, kind="p"):
        text = "".join(self.buffer)
        self.buffer = []
        if kind == "code":
            text = "\n".join(line.rstrip() for line in text.strip("\n").split("\n"))
        else:
            text = re.sub(r"\s+", " ", text).strip().strip("|").strip()
            if kind == "p" and self.list_item and text:
                text = "- " + text
                self.list_item = False
        if text.strip():
            self.blocks.append((kind, text))

    def handle_starttag(self, tag, attrs):
        if self.skip_stack:
            if tag not in VOID_TAGS:
                self.skip_stack.append(tag)
            return
        classes = (dict(attrs).get("class") or "").split()
        if tag in SKIPPED_TAGS or SKIPPED_CLASSES.intersection(classes):
            if tag not in VOID_TAGS:
                self.skip_stack.append(tag)
            return
        if tag == "pre":
            self.flush()
            self.in_pre = True
        elif self.in_pre:
            if tag == "br" or (tag == "div" and "where" in classes):
                self.buffer.append("\n")
        elif tag in HEADINGS:
            self.flush()
            self.heading = tag
        elif tag in ("li", "dt"):
            self.flush()
            self.list_item = True
        elif tag == "dd":
            self.buffer.append(": ")
        elif tag in ("td", "th"):
            self.buffer.append(" | ")
        elif tag == "code" and self.heading is None:
            self.buffer.append("`")
        elif tag == "br":
            self.buffer.append(" ")
        elif tag in BLOCKS and self.heading is None:
            self.flush()

    def handle_endtag(self, tag):
        if self.skip_stack:
            # Unclosed tags inside a skipped element end with it.
            if tag in self.skip_stack:
                while self.skip_stack.pop() != tag:
                    pass
            return
        if tag == "pre":
            self.flush("code")
            self.in_pre = False
            self.list_item = False
        elif self.in_pre:
            return
        elif tag in HEADINGS:
            self.flush(tag)
            self.heading = None
        elif tag == "code" and self.heading is None:
            self.buffer.append("`")
        elif tag in ("li", "dd"):
            self.flush()
            self.list_item = False
        elif tag in BLOCKS and self.heading is None:
            self.flush()

    def handle_data(self, data):
        if not self.skip_stack:
            self.buffer.append(data)


def page_blocks(path):
    """Returns the blocks of one page, or nothing for a redirect or an empty page."""
    html = pathlib.Path(path).read_text(encoding="utf-8", errors="replace")
    if 'http-equiv="refresh"' in html:
        return []
    start = html.find("<main")
    if start < 0:
        return []
    end = html.find("</main>", start)
    body = html[start:end if end > 0 else len(html)]
    for cut in CUTS:
        at = body.find(cut)
        if at > 0:
            body = body[:body.rfind("<", 0, at)]
    extractor = Extractor()
    extractor.feed(body)
    extractor.flush()
    return extractor.blocks


def pages(root):
    """Lists the pages to read in a fixed order."""
    for book in ORDER:
        for path in sorted((root / book).rglob("*.html")):
            parts = path.relative_to(root).parts
            if path.name not in SKIPPED_FILES and not SKIPPED_FOLDERS.intersection(parts[:-1]):
                yield path


def fingerprint(text):
    """Identifies a block; digits are folded so that u8 and u64 pages count once."""
    folded = re.sub(r"[0-9]+(_[0-9]+)*", "0", re.sub(r"\s+", " ", text))
    return hashlib.blake2b(folded.encode(), digest_size=10).digest()


def without_repeats(blocks, seen):
    """Drops blocks seen before and headings that are left without content."""
    kept = []
    for kind, text in blocks:
        if kind not in HEADINGS and len(text) > 24:
            key = fingerprint(text)
            if key in seen:
                continue
            seen.add(key)
        kept.append((kind, text))
    result = []
    for at, (kind, text) in enumerate(kept):
        if kind in HEADINGS:
            following = kept[at + 1][0] if at + 1 < len(kept) else "h1"
            if following in HEADINGS and HEADINGS[following] <= HEADINGS[kind]:
                continue
        result.append((kind, text))
    return result


def render(blocks):
    """Formats blocks in the Markdown subset the model is to learn."""
    parts = []
    for at, (kind, text) in enumerate(blocks):
        if kind in HEADINGS:
            parts.append("#" * HEADINGS[kind] + " " + text)
        elif kind == "code":
            parts.append(f"```\n{text}\n```")
        else:
            tight = parts and text.startswith("- ") and blocks[at - 1][1].startswith("- ")
            if tight and blocks[at - 1][0] == "p":
                parts[-1] += "\n" + text
            else:
                parts.append(text)
    return "\n\n".join(parts).replace(END_OF_TEXT, "") + "\n"


def question_form(blocks):
    """A document's opening as a question and its answer, or None if it has no opening.

    Teaches the chat template's markers; the words stay those of the documentation.
    """
    if len(blocks) < 2 or blocks[0][0] not in ("h1", "h2"):
        return None
    size, taken = 0, []
    for block in blocks[1:]:
        size += len(block[1])
        if block[0] in ("h1", "h2") or (taken and size > 1200):
            break
        taken.append(block)
    answer = render(taken).strip() if taken else ""
    if len(answer) < 120 or len(answer) > 2000:
        return None
    return f"<|user|>\nExplain: {blocks[0][1]}<|end|>\n<|assistant|>\n{answer}<|end|>\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", type=pathlib.Path, help="share/doc/rust/html of a toolchain")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--heldout-percent", type=float, default=3.0)
    parser.add_argument("--excerpt", type=pathlib.Path, help="also write a held-out excerpt here")
    parser.add_argument("--excerpt-bytes", type=int, default=150_000)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    root = args.docs
    if root is None:
        sysroot = subprocess.run(["rustc", "--print", "sysroot"], check=True,
                                 capture_output=True, text=True).stdout.strip()
        root = pathlib.Path(sysroot) / "share/doc/rust/html"
    args.out.mkdir(parents=True, exist_ok=True)

    paths = list(pages(root))
    seen, titles = set(), set()
    train, held, questions = [], [], []
    counts = {}
    with multiprocessing.Pool(args.jobs) as pool:
        for path, blocks in zip(paths, pool.imap(page_blocks, paths, chunksize=16)):
            name = path.relative_to(root).as_posix()
            blocks = without_repeats(blocks, seen)
            text = render(blocks)
            if len(text) < 200 or text in titles:
                continue
            titles.add(text)
            share = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") / 2**32
            is_held = share * 100 < args.heldout_percent
            book = counts.setdefault(name.split("/")[0], {"documents": 0, "bytes": 0, "heldout": 0})
            book["documents"] += 1
            book["bytes"] += len(text.encode())
            book["heldout"] += is_held
            (held if is_held else train).append((name, text))
            if not is_held:
                question = question_form(blocks)
                if question:
                    questions.append((name, question))

    def joined(documents):
        return "".join(f"{text}{END_OF_TEXT}\n" for _, text in documents)

    (args.out / "train.txt").write_text(joined(train + questions), encoding="utf-8")
    (args.out / "heldout.txt").write_text(joined(held), encoding="utf-8")
    counts["question_form_documents"] = len(questions)
    counts["question_form_bytes"] = len(joined(questions).encode())
    (args.out / "sources.json").write_text(json.dumps(counts, indent=1) + "\n")
    if args.excerpt:
        # Spread over all books: order by hash, stop at the size asked for.
        excerpt, size = [], 0
        for name, text in sorted(held, key=lambda d: hashlib.sha256(d[1].encode()).digest()):
            if len(text) < 20_000 and size + len(text.encode()) <= args.excerpt_bytes:
                excerpt.append((name, text))
                size += len(text.encode()) + len(END_OF_TEXT) + 1
        args.excerpt.write_text(joined(excerpt), encoding="utf-8")
    print(json.dumps(counts, indent=1))


if __name__ == "__main__":
    main()
