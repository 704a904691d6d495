#!/usr/bin/env python3
"""Draws docs/recording.svg: an agent's call fails, is repaired where it failed, and returns its value.

    scripts/recording.py [--check] [BINARY]

The script starts BINARY (default: target/release/sbcl-mcp) as an MCP server and draws its real answers. It fails if an answer
does not match the story. Two runs give the same bytes; --check compares them with the file and writes nothing.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import xml.etree.ElementTree as xml
from dataclasses import dataclass
from fractions import Fraction
from html import escape
from pathlib import Path

from mutants import Server

ROOT = Path(__file__).resolve().parent.parent
DRAWING = ROOT / "docs" / "recording.svg"

# The number of orders in the file that the job reads, and the number of the first order in yen.
ORDERS, FIRST_YEN = 100_000, 61_204
RATES = {"eur": Fraction(1), "usd": Fraction(9, 10), "jpy": Fraction(1, 160)}

JOB = """\
(defun eur (amount) amount)
(defun usd (amount) (* amount 9/10))
(defun revenue (file &optional (done 0) (euros 0))
  (dolist (order (uiop:read-file-forms file) (values done euros))
    (incf euros (apply #'funcall order))
    (incf done)))
(revenue "orders.lisp")"""
REPAIR = "(defun jpy (amount) (/ amount 160))"


def order(number):
    """Returns the currency and the amount of order `number`, counted from 1."""
    if number >= FIRST_YEN and number % 4 == 0:
        return "jpy", 160 * (number % 90 + 10)
    return ("eur", "usd")[number % 2], 10 * (number % 90 + 1)


def revenue(orders):
    return sum(amount * RATES[currency] for currency, amount in map(order, range(1, orders + 1)))


@dataclass
class Step:
    """A call, with patterns for the lines of the answer that are drawn, in order."""

    before: str  # the caption while the call is typed
    after: str  # the caption beside the answer
    tool: str
    arguments: dict
    lines: list
    reading: float  # seconds that the answer stands before the next call
    fails: bool = False


def story():
    done, euros = FIRST_YEN - 1, revenue(FIRST_YEN - 1)
    literal = re.escape
    currency, amount = order(FIRST_YEN)
    return [
        Step(f"An agent adds up {ORDERS:,} orders.",
             "JPY is not defined. The call is held where it failed.",
             "evaluate-lisp", {"on-error": "debug", "code": JOB},
             [r"\[ERROR\] UNDEFINED-FUNCTION", r"The function COMMON-LISP-USER::JPY is undefined\.", r"Held\. Restarts:",
              r"  1\. CONTINUE - Retry calling JPY\."], 3.0, fails=True),
        Step("What was it doing?",
             f"{done:,} orders are done, and their sum is still there.",
             "get-backtrace", {"from": 1, "max-frames": 1, "locals": True},
             [r"Backtrace \(live\) for UNDEFINED-FUNCTION \(1 of 4 frames\):", rf'  1: \(REVENUE "orders\.lisp" {done} {euros}\)',
              literal("     at evaluation 1, line 5: (incf euros (apply #'funcall order))"), r'     FILE = "orders\.lisp"',
              f"     DONE = {done}", f"     EUROS = {euros}", rf"     ORDER = \({currency.upper()} {amount}\)"], 3.8),
        Step("The agent defines what is missing,",
             "The agent defines what is missing,",
             "eval-in-frame", {"frame": 1, "code": REPAIR}, [r"=> JPY"], 0.9),
        Step("and resumes the call.",
             f"All {ORDERS:,} orders, without starting again.",
             "invoke-restart", {"restart": "CONTINUE"}, [f"=> {ORDERS}", f"=> {revenue(ORDERS)}"], 5.5),
    ]


def perform(server, step):
    """Calls a tool. Returns the lines to draw, with None in place of omitted lines."""
    result = server.call(step.tool, **step.arguments)
    text = result["content"][0]["text"]
    wanted, drawn = list(step.lines), []
    for line in text.splitlines():
        if wanted and re.fullmatch(wanted[0], line):
            wanted.pop(0)
            drawn.append(line)
        elif line.strip() and (not drawn or drawn[-1] is not None):
            drawn.append(None)
    if wanted or result.get("isError", False) != step.fails:
        missing = f"no line matches {wanted[0]!r}" if wanted else f"isError is not {step.fails}"
        sys.exit(f"recording: the answer of {step.tool} does not fit the recording: {missing}. The answer was\n{text}")
    return drawn


def record(binary):
    """Runs the story. Returns its steps, each with its answer."""
    with tempfile.TemporaryDirectory() as directory:
        with open(os.path.join(directory, "orders.lisp"), "w", encoding="utf-8") as file:
            file.writelines("({} {})\n".format(*order(number)) for number in range(1, ORDERS + 1))
        server = Server(os.path.abspath(binary), directory, structured=False)
        try:
            return [(step, perform(server, step)) for step in story()]
        finally:
            server.end()


# Sizes in pixels: the window, its title bar and its caption bar; the text, the height of a row and of an omission mark.
WIDTH, BAR, CAPTION, MARGIN, TOP, BOTTOM = 840, 38, 50, 22, 18, 12
SIZE, CHARACTER, LINE, CUT = 18, 10.84, 24, 16
BEFORE_CALL, BEFORE_ANSWER = 10, 4
COLUMNS = int((WIDTH - 2 * MARGIN) / CHARACTER)
# The number of rows above the visible part at the end: the first call except for its last line.
SCROLLED_AWAY = len(JOB.splitlines())
# Times in seconds: before the first call, per typed character, from a call to its answer, per scroll, and for the fade-out.
START, TYPING, ANSWERING, SCROLLING, FADE = 0.6, 1 / 75, 0.55, 0.3, 0.4

# CSS classes, each with its colours in the light and the dark theme.
COLOURS = {
    "screen": ("#ffffff", "#0d1117"), "bar": ("#f6f8fa", "#161b22"), "dot": ("#d0d7de", "#30363d"),
    "title": ("#59636e", "#9198a1"), "caption": ("#1f2328", "#f0f6fc"), "code": ("#1f2328", "#f0f6fc"),
    "answer": ("#4b535d", "#b1bac4"), "cut": ("#6e7781", "#767e88"), "arrow": ("#0969da", "#4493f8"),
    "tool": ("#0969da", "#58a6ff"), "json": ("#59636e", "#9198a1"), "string": ("#0a3069", "#a5d6ff"),
    "error": ("#cf222e", "#ff7b72"), "name": ("#8250df", "#d2a8ff"), "value": ("#116329", "#7ee787"),
}
EDGES = ("#d0d7de", "#3d444d")
BOLD = ("tool", "error", "value", "caption")
FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono','Liberation Mono',monospace"


def spans(kind, text):
    """Splits a row into pairs of CSS class and text."""
    if kind == "call":
        tool, arguments = text.split(" ", 1)
        return [("arrow", "→ "), ("tool", tool), ("json", " " + arguments)]
    if kind == "cut":
        return [("cut", text)]
    if kind == "code":
        return [("string" if part.startswith('"') else "code", part) for part in re.split(r'("[^"]*")', text) if part]
    if text.startswith("[ERROR]"):
        return [("error", text)]
    if text.startswith("=> "):
        return [("answer", "=> "), ("value", text[3:])]
    if local := re.fullmatch(r"([A-Z]+)( = )(.*)", text):
        return list(zip(("name", "answer", "value"), local.groups()))
    return [("answer", text)]


class Drawing:
    """The rows and captions of the recording, each with the time when it appears."""

    def __init__(self):
        self.rows, self.captions, self.scrolls = [], [], []
        self.y, self.time = 0.0, START

    def row(self, kind, text, typed=0.0):
        """Adds a row that takes `typed` seconds to appear."""
        if len(text) + 2 * (kind == "call") > COLUMNS:
            sys.exit(f"recording: the line is longer than {COLUMNS} characters: {text}")
        # An omission mark is raised to the middle of its row.
        self.rows.append((kind, text, self.y - 5 * (kind == "cut"), self.time, typed))
        self.time += typed
        self.y += CUT if kind == "cut" else LINE

    def caption(self, text):
        if not self.captions or self.captions[-1][0] != text:
            self.captions.append((text, self.time))

    def typed_row(self, kind, text):
        self.row(kind, text, typed=max(len(text), 1) * TYPING)

    def step(self, step, answer):
        if self.rows:
            self.y += BEFORE_CALL
        self.caption(step.before)
        begin = self.time
        arguments = {name: value for name, value in step.arguments.items() if name != "code"}
        self.typed_row("call", f"{step.tool} {json.dumps(arguments)}")
        for line in step.arguments.get("code", "").splitlines():
            self.typed_row("code", "  " + line)
        self.time += ANSWERING
        self.y += BEFORE_ANSWER
        self.caption(step.after)
        for line in answer:
            self.row("cut" if line is None else "answer", "…" if line is None else line)
        self.scrolls.append((begin, self.y))
        self.time += step.reading

    def svg(self, title, description):
        self.end, self.styles, self.keyframes = self.time + FADE, [], {}
        top = self.rows[SCROLLED_AWAY][2]
        height = self.y - top + TOP + BOTTOM
        total = BAR + height + CAPTION
        body = [
            f'<clipPath id="window"><rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{total - 1:g}" rx="10"/></clipPath>',
            f'<clipPath id="view"><rect y="{BAR + TOP - 4}" width="{WIDTH}" height="{height - TOP + 4:g}"/></clipPath>',
            '<g clip-path="url(#window)">',
            f'<rect class="screen" width="{WIDTH}" height="{total:g}"/>',
            f'<g clip-path="url(#view)"><g class="fade"><g transform="translate({MARGIN} {BAR + TOP - top + SIZE - 4:g})">',
            f"<g{self.animated(self.scrolling(self.y - top, top))}>",
            *(self.text_row(*row) for row in self.rows),
            "</g></g></g></g>",
            f'<rect class="bar" width="{WIDTH}" height="{BAR}"/>',
            *(f'<circle class="dot" cx="{MARGIN + 6 + 20 * number}" cy="{BAR / 2:g}" r="6"/>' for number in range(3)),
            f'<text class="title" x="{WIDTH / 2:g}" y="{BAR / 2 + 5:g}" text-anchor="middle">agent → sbcl-mcp</text>',
            f'<rect class="bar" y="{BAR + height:g}" width="{WIDTH}" height="{CAPTION}"/>',
            f'<path class="edge" d="M0 {BAR}H{WIDTH}M0 {BAR + height:g}H{WIDTH}"/>',
            *self.caption_rows(BAR + height + CAPTION / 2 + 6.5),
            "</g>",
            f'<rect class="edge" x="0.5" y="0.5" width="{WIDTH - 1}" height="{total - 1:g}" rx="10"/>',
        ]
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{total:g}" viewBox="0 0 {WIDTH} {total:g}" '
            'xml:space="preserve" role="img" aria-labelledby="title description">',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="description">{escape(description)}</desc>',
            self.style(), *body, "</svg>", ""])

    def percent(self, time):
        return f"{100 * time / self.end:.2f}%"

    def animated(self, keyframes):
        """Returns the class attribute of an element that these keyframes animate."""
        if keyframes not in self.keyframes:
            name = self.keyframes[keyframes] = f"k{len(self.keyframes)}"
            self.styles.append(f".{name}{{animation:{name} {self.end:.2f}s step-end infinite}}@keyframes {name}{{{keyframes}}}")
        return f' class="{self.keyframes[keyframes]}"'

    def appearing(self, time):
        return self.animated(f"0%{{opacity:0}}{self.percent(time)}{{opacity:1}}")

    def text_row(self, kind, text, y, time, typed):
        content = "".join(f'<tspan class="{name}">{escape(part, quote=False)}</tspan>'
                          for name, part in spans(kind, text.lstrip(" ")))
        indent = (len(text) - len(text.lstrip(" "))) * CHARACTER
        length = len(text.strip(" ")) + 2 * (kind == "call")
        x = f' x="{indent:.2f}"' * bool(indent)
        row = f'<text{x} y="{y:g}" textLength="{length * CHARACTER:.2f}" lengthAdjust="spacingAndGlyphs"'
        if not typed:
            return f"{row}{self.appearing(time)}>{content}</text>"
        # Typing is drawn by a cover that moves off the row character by character, with the cursor on its edge.
        start, end = self.percent(time), self.percent(time + typed)
        moved = f"transform:translateX({length * CHARACTER:.2f}px)"
        cover = (f"0%,{start}{{opacity:1;transform:none;animation-timing-function:steps({length},end)}}"
                 f"{end}{{opacity:1;{moved};animation-timing-function:step-start}}100%{{opacity:0;{moved}}}")
        width = length * CHARACTER + 4
        return (f"<g{self.appearing(time)}>{row}>{content}</text><g opacity=\"0\"{self.animated(cover)}>"
                f'<rect class="screen" x="{indent:.2f}" y="{y - SIZE:g}" width="{width:.2f}" height="{LINE}"/>'
                f'<rect class="cursor" x="{indent:.2f}" y="{y - SIZE + 3:g}" width="{CHARACTER:g}" height="{SIZE + 2}"/></g></g>')

    def scrolling(self, room, top):
        """Returns keyframes that scroll by whole rows when a step needs more room. The rows' final offset is `top` pixels up."""
        moves, at = [f"0%{{transform:translateY({top:g}px)}}"], 0.0
        for time, bottom in self.scrolls:
            wanted = next(row[2] for row in self.rows if row[2] >= bottom - room)
            if wanted > at:
                moves.append(f"{self.percent(time)}{{transform:translateY({top - at:g}px);animation-timing-function:ease-in-out}}"
                             f"{self.percent(time + SCROLLING)}{{transform:translateY({top - wanted:g}px)}}")
                at = wanted
        return "".join(moves)

    def caption_rows(self, y):
        ends = [time for _, time in self.captions[1:]] + [None]
        for (text, begin), end in zip(self.captions, ends):
            keyframes = f"0%{{opacity:0}}{self.percent(begin if begin > START else 0)}{{opacity:1}}"
            keyframes += f"{self.percent(end)}{{opacity:0}}" if end else ""
            hidden = ' opacity="0"' if end else ""
            yield (f'<g{hidden}{self.animated(keyframes)}><text class="caption" x="{WIDTH / 2:g}" y="{y:g}" '
                   f'text-anchor="middle">{escape(text)}</text></g>')

    def style(self):
        fade = f"0%,{self.percent(self.time)}{{opacity:1}}100%{{opacity:0}}"
        both = [{name: pair[theme] for name, pair in COLOURS.items()} for theme in (0, 1)]
        light, dark = ("".join(f".{name}{{fill:{colour}}}" for name, colour in theme.items()) +
                       f".edge{{stroke:{edge}}}.cursor{{fill:{theme['tool']}}}" for theme, edge in zip(both, EDGES))
        return "\n".join([
            "<style>",
            f"text{{font:{SIZE}px {FONT};white-space:pre}}.edge{{fill:none}}",
            ",".join(f".{name}" for name in BOLD) + "{font-weight:600}",
            ".title,.caption{font-family:system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif}.title{font-size:15px}",
            ".caption{font-size:20px}",
            light, f"@media (prefers-color-scheme:dark){{{dark}}}",
            # Without animations, for viewers who prefer reduced motion, the picture shows its final state.
            "@media (prefers-reduced-motion:no-preference){",
            f".fade{{animation:fade {self.end:.2f}s linear infinite}}@keyframes fade{{{fade}}}",
            *self.styles, "}", "</style>"])


def draw(recorded):
    drawing = Drawing()
    for step, answer in recorded:
        drawing.step(step, answer)
    drawing.time -= FADE
    description = (
        f"A call that adds up {ORDERS:,} orders fails after {FIRST_YEN - 1:,}, as the function JPY is undefined, and is held. "
        "get-backtrace shows the local variables with the sum so far. eval-in-frame defines JPY, invoke-restart resumes the "
        f"call, and it returns {ORDERS} orders and {revenue(ORDERS)} euros.")
    return drawing.svg("A failed Lisp call is repaired where it failed, and returns its value", description)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with docs/recording.svg, and write nothing")
    parser.add_argument("binary", nargs="?", default=ROOT / "target" / "release" / "sbcl-mcp")
    arguments = parser.parse_args()
    if not os.path.exists(arguments.binary):
        sys.exit(f"recording: there is no {arguments.binary}: run make build")
    drawn = draw(record(arguments.binary))
    xml.fromstring(drawn)
    if arguments.check:
        if DRAWING.read_text(encoding="utf-8") != drawn:
            sys.exit("recording: docs/recording.svg is out of date: run make recording")
    else:
        DRAWING.write_text(drawn, encoding="utf-8")
        print(f"docs/recording.svg: {len(drawn.encode())} bytes")


if __name__ == "__main__":
    main()
