"""A drawing of rectangles, lines, circles and text, written as SVG or PNG. As much as charts of costs need."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Literal

from isthmus.errors import NotInstalled, StorageError, UsageError

Anchor = Literal["start", "middle", "end"]
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'DejaVu Sans', sans-serif"
_PNG_SCALE = 2
_GLYPH = 0.56  # of the font size: the mean width of a letter


@dataclass(frozen=True, slots=True)
class Rect:
    """A filled rectangle."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    opacity: float = 1.0


@dataclass(frozen=True, slots=True)
class Polyline:
    """A line through points."""

    points: tuple[tuple[float, float], ...]
    colour: str
    width: float = 1.0
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Circle:
    """A filled circle; `title` shows under the pointer in SVG."""

    x: float
    y: float
    radius: float
    colour: str
    title: str = ""
    hollow: bool = False


@dataclass(frozen=True, slots=True)
class Text:
    """A line of text; y is its baseline."""

    x: float
    y: float
    text: str
    colour: str
    size: float = 12.0
    anchor: Anchor = "start"
    bold: bool = False

    @property
    def left(self) -> float:
        """Where it begins, about."""
        wide = text_width(self.text, self.size)
        return self.x - {"start": 0.0, "middle": wide / 2, "end": wide}[self.anchor]


Shape = Rect | Polyline | Circle | Text


@dataclass(slots=True)
class Drawing:
    """Shapes in order, the later ones on top; pixels, y downwards."""

    width: int
    height: int
    background: str | None = "#ffffff"
    title: str = ""
    shapes: list[Shape] = field(default_factory=list)

    def add(self, *shapes: Shape) -> None:
        """Puts shapes on top."""
        self.shapes.extend(shapes)

    def svg(self) -> str:
        """One `<svg>` element that needs nothing else."""
        ground = (
            f'<rect width="{self.width}" height="{self.height}" fill="{self.background}"/>'
            if self.background
            else ""
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" role="img" font-family="{FONT}"><title>{escape(self.title)}</title>{ground}'
            + "".join(_svg(shape) for shape in self.shapes)
            + "</svg>"
        )

    def write(self, path: Path) -> None:
        """To a file whose ending says how.

        Raises:
            UsageError: an ending that is neither .svg nor .png; NotInstalled: a PNG without Pillow; StorageError: no disk.
        """
        ending = path.suffix.lower()
        if ending not in (".svg", ".png"):
            raise UsageError(
                f"cannot draw a {ending or 'file without an ending'}",
                where=str(path),
                hint="use .svg or .png",
            )
        data = self.svg().encode() if ending == ".svg" else self._png()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        except OSError as error:
            raise StorageError(f"cannot write the chart: {error.strerror}", where=str(path)) from error

    def _png(self) -> bytes:
        from io import BytesIO

        try:
            from PIL import Image, ImageDraw, ImageFont
        except ImportError:
            raise NotInstalled("a chart as PNG (SVG needs nothing)", extra="train", module="Pillow") from None
        scale = _PNG_SCALE
        image = Image.new("RGB", (self.width * scale, self.height * scale), self.background or "#ffffff")
        canvas = ImageDraw.Draw(image, "RGBA")
        for shape in self.shapes:
            if isinstance(shape, Rect):
                box = (shape.x, shape.y, shape.x + shape.width, shape.y + shape.height)
                alpha = f"{shape.colour}{round(255 * shape.opacity):02x}"
                canvas.rectangle([edge * scale for edge in box], fill=alpha)
            elif isinstance(shape, Polyline):
                points = _dashes(shape.points) if shape.dashed else [shape.points]
                for piece in points:
                    line = [(x * scale, y * scale) for x, y in piece]
                    canvas.line(line, fill=shape.colour, width=max(1, round(shape.width * scale)))
            elif isinstance(shape, Circle):
                r = shape.radius
                box = (shape.x - r, shape.y - r, shape.x + r, shape.y + r)
                inside = "#ffffff" if shape.hollow else shape.colour
                canvas.ellipse(
                    [edge * scale for edge in box], fill=inside, outline=shape.colour, width=2 * scale
                )
            else:
                font = ImageFont.load_default(size=shape.size * scale)
                place = (shape.x * scale, shape.y * scale)
                anchor = {"start": "ls", "middle": "ms", "end": "rs"}[shape.anchor]
                bold = 1 if shape.bold else 0
                canvas.text(place, shape.text, fill=shape.colour, font=font, anchor=anchor, stroke_width=bold)
        buffer = BytesIO()
        image.save(buffer, "PNG", optimize=True)
        return buffer.getvalue()


def text_width(text: str, size: float) -> float:
    """Pixels, about: no font is at hand to ask."""
    return _GLYPH * size * len(text)


def nice_ticks(high: float, count: int = 5) -> list[float]:
    """From zero to at least `high`, in steps of 1, 2, 2.5 or 5 times a power of ten."""
    import math

    if not high > 0:
        return [0.0, 1.0]
    raw = high / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(nice * power for nice in (1, 2, 2.5, 5, 10) if nice * power >= raw * (1 - 1e-9))
    return [step * index for index in range(math.ceil(high / step - 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten, from at most `low` to at least `high`; both above zero."""
    import math

    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    ticks = [nice * 10.0**power for power in range(first, last + 1) for nice in (1, 2, 5)]
    below = max((tick for tick in ticks if tick <= low * (1 + 1e-9)), default=ticks[0])
    above = min((tick for tick in ticks if tick >= high * (1 - 1e-9)), default=ticks[-1])
    return [tick for tick in ticks if below <= tick <= above]


def _svg(shape: Shape) -> str:
    if isinstance(shape, Rect):
        fade = f' fill-opacity="{shape.opacity:g}"' if shape.opacity < 1 else ""
        return (
            f'<rect x="{shape.x:.1f}" y="{shape.y:.1f}" width="{shape.width:.1f}" height="{shape.height:.1f}" '
            f'fill="{shape.colour}"{fade}/>'
        )
    if isinstance(shape, Polyline):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
        dash = ' stroke-dasharray="5 4"' if shape.dashed else ""
        return (
            f'<polyline points="{points}" fill="none" stroke="{shape.colour}" stroke-width="{shape.width:g}"'
            f'{dash} stroke-linejoin="round"/>'
        )
    if isinstance(shape, Circle):
        fill = "#ffffff" if shape.hollow else shape.colour
        title = f"<title>{escape(shape.title)}</title>" if shape.title else ""
        return (
            f'<circle cx="{shape.x:.1f}" cy="{shape.y:.1f}" r="{shape.radius:g}" fill="{fill}" '
            f'stroke="{shape.colour}" stroke-width="2">{title}</circle>'
        )
    bold = ' font-weight="600"' if shape.bold else ""
    return (
        f'<text x="{shape.x:.1f}" y="{shape.y:.1f}" font-size="{shape.size:g}" fill="{shape.colour}" '
        f'text-anchor="{shape.anchor}"{bold}>{escape(shape.text)}</text>'
    )


def _dashes(points: tuple[tuple[float, float], ...]) -> list[tuple[tuple[float, float], ...]]:
    import math

    found: list[tuple[tuple[float, float], ...]] = []
    for (x0, y0), (x1, y1) in pairwise(points):
        length = math.hypot(x1 - x0, y1 - y0)
        at = 0.0
        while at < length:
            a, b = at / length, min(at + 5, length) / length
            found.append(((x0 + (x1 - x0) * a, y0 + (y1 - y0) * a), (x0 + (x1 - x0) * b, y0 + (y1 - y0) * b)))
            at += 9
    return found
