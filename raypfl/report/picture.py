"""What all pictures share: their size and colours, labels at the ends of lines, and an alternative text.

Figures are made without pyplot: nothing global is touched, and a notebook shows a picture by its own HTML.
"""

from __future__ import annotations

import base64
import html
import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from raypfl.records.files import replacing
from raypfl.records.storage import Place, place

WIDTH = 4.6
"""Inches. A phone shows this width at about four fifths, so that letters stay readable."""
DPI = 200
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Of Okabe and Ito, without the yellow, which is too light for lines on white."""
DASHES: tuple[Any, ...] = ("solid", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.5, 1.5, 1.5)))
GREY = "#666666"
LONGEST = 24
"""Letters of a label at the end of a line."""
FEW_DECADES = 3
STYLE: Any = {
    "font.size": 9.5,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9.5,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.6,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.fonttype": "none",
}


@dataclass(frozen=True)
class Picture:
    """A figure that says what it shows."""

    name: str
    """Of its file, without the ending."""
    title: str
    alt: str
    """What somebody who does not see it should know."""
    figure: Figure
    caption: str = ""
    """How it is to be read."""

    @cached_property
    def png(self) -> bytes:
        """The picture as a PNG file."""
        buffer = io.BytesIO()
        with mpl.rc_context(STYLE), warnings.catch_warnings():
            # A small picture with long labels is still a picture.
            warnings.filterwarnings("ignore", "constrained_layout not applied", UserWarning)
            self.figure.savefig(buffer, format="png", dpi=DPI, metadata={"Title": self.title})
        return buffer.getvalue()

    def save(self, path: str | Place) -> Place:
        """Write the PNG file.

        Raises:
            StorageError: it cannot be written.
        """
        where = place(path)
        with replacing(where) as temporary:
            temporary.write_bytes(self.png)
        return where

    @property
    def image(self) -> str:
        """An HTML image that holds the picture itself."""
        width, height = (round(100 * inches) for inches in self.figure.get_size_inches())
        data = base64.b64encode(self.png).decode()
        return (
            f'<img src="data:image/png;base64,{data}" alt="{html.escape(self.alt)}" '
            f'width="{width}" height="{height}">'
        )

    def __repr__(self) -> str:
        return f"Picture({self.name!r}: {self.title}. {self.alt})"

    def _repr_html_(self) -> str:
        caption = f"<figcaption>{html.escape(self.caption)}</figcaption>" if self.caption else ""
        return f"<figure><b>{html.escape(self.title)}</b><br>{self.image}{caption}</figure>"


class Pictures(tuple[Picture, ...]):
    """Several pictures, which a notebook shows one below another."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return "".join(picture._repr_html_() for picture in self)


class Pen(NamedTuple):
    """How one setting is drawn, the same in all pictures."""

    color: str
    linestyle: Any


def pens(labels: Sequence[str]) -> dict[str, Pen]:
    """Colours first, then dashes, so that as many lines as there are can be told apart."""
    return {
        label: Pen(COLOURS[place % len(COLOURS)], DASHES[place // len(COLOURS) % len(DASHES)])
        for place, label in enumerate(labels)
    }


def new_figure(height: float = 3.0, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """A figure `WIDTH` wide with one Axes or an array of them."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        return figure, figure.subplots(rows, columns, **options)


def height_for(labels: int) -> float:
    """Inches that leave room for so many labels one below another."""
    return max(3.0, 1.0 + 0.15 * labels)


def label_ends(axes: Axes, ends: Sequence[tuple[str, float, float, Pen]]) -> None:
    """Write labels to the right of lines, moved apart where they would overlap.

    Args:
        axes: with all its lines, and its limits set.
        ends: label, x and y of the line's last point, and pen, of each line.
    """
    if not ends:
        return
    inches = axes.get_window_extent().height / axes.figure.dpi
    transform = axes.transData + axes.transAxes.inverted()
    points = np.array([transform.transform((x, y)) for _, x, y, _ in ends])
    heights = points[:, 1].clip(0, 1)
    places = apart(heights, gap=min(0.145 / inches, 1 / len(ends)))
    for (label, _, _, pen), end, height, level in zip(ends, points[:, 0], heights, places, strict=True):
        # Of a line that ends early, thin, so that it does not look as if it went on.
        width = 0.9 if end > 0.9 else 0.4
        options: Any = {"color": pen.color, "transform": axes.transAxes, "clip_on": False}
        axes.plot((end, 1.06), (height, level), linestyle=pen.linestyle, linewidth=width, **options)
        axes.text(
            1.07,
            level,
            label if len(label) <= LONGEST else f"{label[: LONGEST - 1]}…",
            fontsize=8.5,
            va="center",
            **options,
        )


def apart(wanted: np.ndarray, gap: float) -> np.ndarray:
    """Places in [0, 1], as near to those that are wanted as they can be with so much between neighbours.

    Labels that touch form a block, which stands where the mean of its members would.
    """
    order = wanted.argsort(kind="stable")
    blocks = [[float(y)] for y in wanted[order]]

    def middle(block: list[float]) -> float:
        half = gap * len(block) / 2
        return min(max(sum(block) / len(block), half), 1 - half)

    def touch(below: list[float], above: list[float]) -> bool:
        return middle(above) - middle(below) < gap * (len(above) + len(below)) / 2 - 1e-12

    while touching := [i for i, pair in enumerate(pairwise(blocks)) if touch(*pair)]:
        at = touching[0]
        blocks[at : at + 2] = [blocks[at] + blocks[at + 1]]
    placed = [
        middle(block) + gap * (place - (len(block) - 1) / 2)
        for block in blocks
        for place in range(len(block))
    ]
    out = np.empty(len(wanted))
    out[order] = placed
    return out


def spread(axes: Axes, size: int) -> None:
    """Whole rounds on the x axis, and room for points at both ends."""
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.margins(x=0.02 if size > 1 else 0.5)


def plain_numbers(axis: XAxis | YAxis) -> None:
    """On a logarithmic axis, each decade, and between them where there are few, as plain numbers."""
    low, high = axis.get_view_interval()
    few = high < 10**FEW_DECADES * low
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
