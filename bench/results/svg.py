"""A small writer of SVG: marks, lines and texts on a ground of their own, readable where the reader's page is light or dark.

Coordinates are pixels from the left upper corner. Colours are Okabe and Ito's, which colour-blind readers can tell apart; marks differ in shape too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

FONT_PX = 12
# Of the font's size: the mean width of a character of common sans-serif fonts, rounded up.
CHARACTER_EM = 0.58
STYLE = """
text { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
text.title { font-size: 14px; font-weight: 600 }
text.muted { fill: #59636e }
.ground { fill: #ffffff }
.grid { stroke: #d1d9e0; stroke-width: 1; fill: none }
.axis { stroke: #818b98; stroke-width: 1; fill: none }
.ink { fill: #1f2328; stroke: #1f2328 }
.blue { fill: #0072b2; stroke: #0072b2 }
.orange { fill: #d55e00; stroke: #d55e00 }
.green { fill: #009e73; stroke: #009e73 }
.purple { fill: #a04a7d; stroke: #a04a7d }
.line { fill: none; stroke-width: 2 }
.thin { stroke-width: 1.2 }
.dashed { stroke-dasharray: 6 4 }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc }
  text.muted { fill: #9198a1 }
  .ground { fill: #0d1117 }
  .grid { stroke: #2f353d }
  .axis { stroke: #656c76 }
  .ink { fill: #f0f6fc; stroke: #f0f6fc }
  .blue { fill: #56b4e9; stroke: #56b4e9 }
  .orange { fill: #e69f00; stroke: #e69f00 }
  .green { fill: #3fc79a; stroke: #3fc79a }
  .purple { fill: #e39ac4; stroke: #e39ac4 }
  .line { fill: none }
}
"""


def width_of(text: str) -> float:
    """Pixels that a text of FONT_PX takes, at most: it is not known which font the reader has."""
    return len(text) * FONT_PX * CHARACTER_EM


class Svg:
    """A picture of `width` pixels that grows downwards. title, description: what is read out to who cannot see it."""

    def __init__(self, width: int, title: str, description: str) -> None:
        self.width = width
        self.title, self.description = title, description
        self._parts: list[str] = []

    def text(self, x: float, y: float, text: str, classes: str = "", anchor: str = "start") -> None:
        """`y` is the baseline."""
        self._add("text", escape(text), x=x, y=y, text_anchor=anchor, classes=classes)

    def line(self, points: Sequence[tuple[float, float]], classes: str) -> None:
        self._add("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), classes=classes)

    def dot(self, x: float, y: float, classes: str) -> None:
        self._add("circle", cx=x, cy=y, r=4, classes=classes)

    def diamond(self, x: float, y: float, classes: str) -> None:
        self._polygon([(x, y - 5.5), (x + 5.5, y), (x, y + 5.5), (x - 5.5, y)], classes)

    def bar(self, x: float, y: float, classes: str) -> None:
        """An upright mark."""
        self._polygon([(x - 1.5, y - 9), (x + 1.5, y - 9), (x + 1.5, y + 9), (x - 1.5, y + 9)], classes)

    def written(self, height: float) -> str:
        """The file's text."""
        size = f'viewBox="0 0 {self.width} {height:.0f}" width="{self.width}" height="{height:.0f}"'
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title description">'
        )
        return "\n".join(
            (
                head,
                f'<title id="title">{escape(self.title)}</title>',
                f'<desc id="description">{escape(self.description)}</desc>',
                f"<style>{STYLE}</style>",
                f'<rect class="ground" width="{self.width}" height="{height:.0f}"/>',
                *self._parts,
                "</svg>\n",
            )
        )

    def _polygon(self, points: Iterable[tuple[float, float]], classes: str) -> None:
        self._add("polygon", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), classes=classes)

    def _add(self, tag: str, content: str = "", classes: str = "", **attributes: float | str) -> None:
        facts = {"class": classes} if classes else {}
        facts |= {
            name.replace("_", "-"): value if isinstance(value, str) else f"{value:.1f}"
            for name, value in attributes.items()
        }
        inside = " ".join(f'{name}="{value}"' for name, value in facts.items())
        self._parts.append(f"<{tag} {inside}>{content}</{tag}>" if content else f"<{tag} {inside}/>")


class Scale:
    """Values onto pixels, straight or by logarithm; `ticks` are round numbers that enclose the values."""

    def __init__(
        self, values: Sequence[float], first_px: float, last_px: float, is_log: bool = False
    ) -> None:
        self.is_log = is_log
        self.ticks = (_log_ticks if is_log else _even_ticks)(min(values), max(values))
        self._first_px, self._last_px = first_px, last_px

    def __call__(self, value: float) -> float:
        low, high = self._place(self.ticks[0]), self._place(self.ticks[-1])
        return self._first_px + (self._last_px - self._first_px) * (self._place(value) - low) / (high - low)

    def _place(self, value: float) -> float:
        return math.log(value) if self.is_log else value


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten, from the last one below to the first one above."""
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    steps = [round(factor * 10.0**power, 10) for power in powers for factor in (1, 2, 5)]
    first = max(number for number, step in enumerate(steps) if step <= low)
    last = min(number for number, step in enumerate(steps) if step >= high)
    return steps[first : max(last, first + 1) + 1]


def _even_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, about `most` steps of them."""
    if low == high:
        low, high = low - 0.5, high + 0.5
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 10) for number in range(first, last + 1)]
