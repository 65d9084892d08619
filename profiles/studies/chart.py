"""Charts as SVG: horizontal stacked bars, and lines. Nothing but the standard library."""

import dataclasses
import math
import xml.etree.ElementTree as ET
from typing import Dict, List, Sequence, Tuple

# Okabe and Ito, "Color Universal Design" (2008): told apart by colour-blind readers too.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#999999", "#56B4E9")

WIDTH = 900
_CHARACTER = 6.8  # px of a character at 12 px, on the wide side


@dataclasses.dataclass(frozen=True)
class Bar:
    label: str
    parts: Dict[str, float]  # series: value; empty: only the note is shown
    note: str  # beside the bar


@dataclasses.dataclass(frozen=True)
class Line:
    name: str
    points: Sequence[Tuple[float, float]]
    dashed: bool = False


class _Canvas:
    def __init__(self, height: int, title: str):
        self.root = ET.Element(
            "svg",
            {
                "xmlns": "http://www.w3.org/2000/svg",
                "viewBox": f"0 0 {WIDTH} {height}",
                "font-family": "sans-serif",
                "font-size": "12",
            },
        )
        ET.SubElement(self.root, "title").text = title
        self.rectangle(0, 0, WIDTH, height, "white")
        self.text(WIDTH / 2, 22, title, "middle", size=15)

    def _add(self, tag: str, **attributes) -> ET.Element:
        return ET.SubElement(
            self.root,
            tag,
            {k.replace("_", "-"): f"{v:.1f}" if isinstance(v, float) else str(v) for k, v in attributes.items()},
        )

    def rectangle(self, x, y, width, height, colour):
        return self._add("rect", x=x, y=y, width=width, height=height, fill=colour)

    def text(self, x, y, text, anchor="start", size=12):
        self._add("text", x=x, y=y, text_anchor=anchor, font_size=size).text = text

    def line(self, x1, y1, x2, y2, colour="#cccccc"):
        self._add("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=colour)

    def curve(self, points, colour, dashed):
        self._add(
            "polyline",
            points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points),
            fill="none",
            stroke=colour,
            stroke_width=2,
            stroke_dasharray="6 4" if dashed else "none",
        )
        for x, y in points:
            self._add("circle", cx=float(x), cy=float(y), r=3, fill=colour)

    def legend(self, y, names, x=20.0):
        for index, name in enumerate(names):
            self.rectangle(x, y - 10, 12, 12, COLOURS[index % len(COLOURS)])
            self.text(x + 17, y, name)
            x += 40 + _CHARACTER * len(name)

    def to_text(self) -> str:
        ET.indent(self.root)
        return ET.tostring(self.root, encoding="unicode") + "\n"


def ticks(largest: float) -> List[float]:
    """From 0 to at least `largest`, four to ten of them, at 1, 2 or 5 times a power of ten."""
    if not (math.isfinite(largest) and largest > 0.0):
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(largest / 4.0))
    step = power * max(factor for factor in (1, 2, 5) if factor * power <= largest / 4.0)
    return [step * i for i in range(math.ceil(largest / step - 1e-9) + 1)]


def stacked_bars(title: str, axis: str, bars: Sequence[Bar]) -> str:
    """@param axis what values are, with the unit"""
    names = list(dict.fromkeys(name for bar in bars for name in bar.parts))
    row, top = 30, 62
    height = top + row * len(bars) + 50
    canvas = _Canvas(height, title)
    canvas.legend(46, names)
    left = 20 + _CHARACTER * max((len(bar.label) for bar in bars), default=0)
    right = WIDTH - 20 - _CHARACTER * max((len(bar.note) for bar in bars if bar.parts), default=0)
    marks = ticks(max((sum(bar.parts.values()) for bar in bars), default=0.0))
    scale = (right - left) / marks[-1]
    bottom = top + row * len(bars)
    for mark in marks:
        canvas.line(left + scale * mark, top, left + scale * mark, bottom)
        canvas.text(left + scale * mark, bottom + 16, f"{mark:g}", "middle")
    canvas.text((left + right) / 2, bottom + 36, axis, "middle")
    for index, bar in enumerate(bars):
        y = top + row * index
        canvas.text(left - 8, y + 19, bar.label, "end")
        x = left
        for name, value in bar.parts.items():
            if value > 0.0:
                canvas.rectangle(x, y + 4, scale * value, row - 8, COLOURS[names.index(name) % len(COLOURS)])
            x += scale * value
        canvas.text(x + 6, y + 19, bar.note)
    return canvas.to_text()


def lines(title: str, x_axis: str, y_axis: str, curves: Sequence[Line]) -> str:
    """Both axes begin at 0. Curves of one name have one colour."""
    height, left, right, top, bottom = 460, 80, WIDTH - 30, 70, 400
    canvas = _Canvas(height, title)
    names = list(dict.fromkeys(curve.name for curve in curves))
    canvas.legend(46, names)
    every = [point for curve in curves for point in curve.points]
    x_marks = ticks(max((x for x, _ in every), default=0.0))
    y_marks = ticks(max((y for _, y in every), default=0.0))
    x_scale, y_scale = (right - left) / x_marks[-1], (bottom - top) / y_marks[-1]
    for mark in x_marks:
        canvas.line(left + x_scale * mark, top, left + x_scale * mark, bottom)
        canvas.text(left + x_scale * mark, bottom + 18, f"{mark:g}", "middle")
    for mark in y_marks:
        canvas.line(left, bottom - y_scale * mark, right, bottom - y_scale * mark)
        canvas.text(left - 8, bottom - y_scale * mark + 4, f"{mark:,g}", "end")
    canvas.text((left + right) / 2, bottom + 42, x_axis, "middle")
    canvas.text(left, top - 8, y_axis)
    for curve in curves:
        points = [(left + x_scale * x, bottom - y_scale * y) for x, y in curve.points]
        canvas.curve(points, COLOURS[names.index(curve.name) % len(COLOURS)], curve.dashed)
    return canvas.to_text()
