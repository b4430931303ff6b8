"""`isthmus data stats --sheet`: the pictures on it are those that were encoded, and captions of any script can be read."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("PIL")
from pictured import CAPTIONS, Picture, decoded, make_pictured, photograph
from PIL import Image, ImageDraw

from isthmus.cli.app import main
from isthmus.core.encode.looking import looks, open_autoencoder
from isthmus.core.encode.patch_pca import PatchPCA
from isthmus.core.encode.sheet import TILE, contact_sheet
from isthmus.core.encode.tiny import save_autoencoder
from isthmus.core.sample.fonts import Fonts, files
from isthmus.core.sample.lettering import Lettering, cleaned, right_to_left, script
from isthmus.errors import UsageError
from isthmus.storage.shards import open_dataset
from isthmus.storage.shards.synthetic import TINY, write_synthetic

PICTURES = [photograph(number, 64 if number % 5 else 32) for number in range(20)]
BROAD = any(path.stem == "DejaVuSans" for path in files())
needs_fonts = pytest.mark.skipif(
    not BROAD, reason="DejaVu is not installed: apt-get install fonts-dejavu-core"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PatchPCA]:
    place = tmp_path_factory.mktemp("pictured") / "data"
    place.mkdir()
    return place, make_pictured(place, PICTURES, CAPTIONS)


def test_rows_are_decoded_to_the_pictures_that_were_encoded(data: tuple[Path, PatchPCA]) -> None:
    root, fitted = data
    dataset = open_dataset(str(root))
    seen = list(looks(dataset, open_autoencoder(dataset), rows=20, resolution=64))
    assert sorted(look.key for look in seen) == [f"picture-{number:05d}" for number in range(20)]
    for look in seen:
        number = int(look.key[-5:])
        np.testing.assert_array_equal(look.picture, decoded(fitted, PICTURES[number]))
        assert look.caption == CAPTIONS[number % len(CAPTIONS)]
        assert look.original_size == (PICTURES[number].shape[0] * 10, 640)
        assert (look.bucket, look.source) == ("1:1" if number % 5 else "2:1", "drawn")
    few = [look.key for look in looks(dataset, fitted, rows=5, resolution=64, seed=1)]
    assert few == [look.key for look in looks(dataset, fitted, rows=5, resolution=64, seed=1)]
    assert few != [look.key for look in looks(dataset, fitted, rows=5, resolution=64, seed=2)]


def run(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> Any:
    with pytest.raises(SystemExit) as ended:
        main(["data", "stats", *map(str, arguments)])
    captured = capsys.readouterr()
    assert ended.value.code == code, captured.err
    return captured


def test_the_sheet_holds_every_picture_where_a_tile_is(
    data: tuple[Path, PatchPCA], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, fitted = data
    target = tmp_path / "sheet.png"
    found = json.loads(run(capsys, root, "--sheet", target, "--pictures", 6, "--json").out)
    assert found["sheet"] == {"file": str(target), "rows": 6, "resolution": 64}
    sheet = np.asarray(Image.open(target).convert("RGB"))
    dataset = open_dataset(str(root))
    for look in looks(dataset, fitted, rows=6, resolution=64):
        enlarged = np.asarray(
            Image.fromarray(look.picture).resize(
                (look.picture.shape[1] * 3, look.picture.shape[0] * 3), Image.Resampling.NEAREST
            )
        )
        assert contains(sheet, enlarged), look.key
    assert target.read_bytes() == again(tmp_path, root, capsys), "the same bytes each time"


def again(tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> bytes:
    run(capsys, root, "--sheet", tmp_path / "again.png", "--pictures", 6)
    return (tmp_path / "again.png").read_bytes()


def contains(sheet: Picture, part: Picture) -> bool:
    """Whether a picture is pasted somewhere."""
    corner = part[0, 0]
    for top, left in np.argwhere((sheet == corner).all(2)):
        cut = sheet[top : top + part.shape[0], left : left + part.shape[1]]
        if cut.shape == part.shape and (cut == part).all():
            return True
    return False


def test_a_sheet_goes_to_any_store_and_needs_the_autoencoder_that_fits(
    data: tuple[Path, PatchPCA], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import fsspec

    root, _ = data
    run(capsys, root, "--sheet", f"memory://{tmp_path.name}/sheet.png", "--pictures", 2)
    content = fsspec.filesystem("memory").cat(f"/{tmp_path.name}/sheet.png")
    assert Image.open(io.BytesIO(content)).width > TILE
    other = tmp_path / "other"
    other.mkdir()
    make_pictured(other, [photograph(number + 100) for number in range(4)])
    said = run(
        capsys, root, "--sheet", tmp_path / "x.png", "--autoencoder", other / "autoencoder", code=2
    ).err
    assert "made with another autoencoder" in said
    write_synthetic(str(tmp_path / "bare"), 8, TINY)
    said = run(capsys, tmp_path / "bare", "--sheet", tmp_path / "x.png", code=2).err
    assert "no patch_pca autoencoder" in said
    assert "--autoencoder" in said


def test_latents_of_a_real_autoencoder_class_are_decoded_by_the_one_that_is_named(tmp_path: Path) -> None:
    from isthmus.core.encode.autoencoders import DiffusersAutoencoder
    from isthmus.storage.shards import AutoencoderSpec, DatasetSpec

    model = DiffusersAutoencoder(str(save_autoencoder(tmp_path / "vae")), device="cpu")
    spec = DatasetSpec(
        AutoencoderSpec("diffusers", model.fingerprint, 4, 4, 0.5, 0.1), TINY.text, (32,), 1, ("1:1",)
    )
    write_synthetic(str(tmp_path / "data"), 8, spec)
    dataset = open_dataset(str(tmp_path / "data"))
    with pytest.raises(UsageError, match="not beside them"):
        open_autoencoder(dataset)
    (look,) = looks(
        dataset, open_autoencoder(dataset, str(tmp_path / "vae"), device="cpu"), rows=1, resolution=32
    )
    assert look.picture.shape == (32, 32, 3)


def test_what_could_disturb_neighbours_is_left_out_of_a_caption() -> None:
    assert cleaned("a\u202eb\u2066c\x00\x1b[31m\n\t d  e\ud800") == "abc[31m d e"
    assert cleaned("\u0627\u200c\u0628") == "\u0627\u200c\u0628", "joiners belong to the script"
    assert cleaned("  ") == ""
    assert [right_to_left(text) for text in ("abc", "שלום abc", "123 قط", "42", "")] == [
        False,
        True,
        True,
        False,
        False,
    ]
    assert [script(char) for char in ("中", "ก", "☃", "a")] == ["CJK", "THAI", "symbols", "LATIN"]


def ink(letters: Lettering, text: str, width: int = 220) -> Picture:
    """A text as it is drawn."""
    image = Image.new("RGB", (width, 90), (255, 255, 255))
    draw = ImageDraw.Draw(image)
    for at, line in enumerate(letters.lines(text, width, 4)):
        letters.draw(draw, 0, at * letters.height, width, line, (0, 0, 0))
    return np.asarray(image)


@needs_fonts
def test_captions_are_drawn_in_their_scripts_with_letters_and_not_with_boxes() -> None:
    letters = Lettering(14)
    box = ink(letters, "□" * 5)
    for text in ("красное", "καρδιά", "שלום", "قطأس", "čšžřť"):
        assert not letters.lacking
        drawn = ink(letters, text)
        assert (drawn < 128).sum() > 50
        assert not np.array_equal(drawn, box)
        letters.lines(text, 200, 2)
    assert not letters.lacking


@needs_fonts
def test_text_that_is_read_from_the_right_stands_at_the_right_and_is_joined_and_ordered() -> None:
    letters = Lettering(14)
    if not letters.shapes:
        pytest.skip("Pillow without libraqm")
    drawn = ink(letters, "قط أسود")
    columns = np.flatnonzero((drawn < 128).any(2).any(0))
    assert columns.max() > 210
    assert columns.min() > 100
    # Joined letters are narrower than the same letters one by one.
    alone = sum(letters.width(char) for char in "بيبي")
    assert letters.width("بيبي") < 0.9 * alone
    # In Hebrew the first letter is the rightmost.
    first, both = ink(letters, "א"), ink(letters, "אבגד")
    right = slice(-8, None)
    np.testing.assert_array_equal(first[:18, right] < 128, both[:18, right] < 128)


def test_lines_fit_and_what_is_too_long_ends_with_dots() -> None:
    letters = Lettering(14)
    lines = letters.lines("some words that are far too long for two short lines of text", 120, 2)
    assert len(lines) == 2
    assert all(line.width <= 120 for line in lines)
    assert lines[1].runs[-1][0].endswith("…")
    (one,) = letters.lines("short", 120, 2)
    assert one.runs[0][0] == "short"
    unbroken = letters.lines("x" * 200, 120, 3)
    assert len(unbroken) == 3
    assert all(line.width <= 120 for line in unbroken)
    assert letters.lines("", 120, 2) == []
    assert len(letters.lines("word " * 20_000, 120, 4)) == 4, "a caption of 100 KB"


def test_a_character_that_no_font_has_is_a_box_and_the_sheet_says_so() -> None:
    letters = Lettering(14)
    rare = "\U000e0100x"[1:] + "\U00012000\U00012001"  # cuneiform
    letters.lines(rare, 200, 2)
    if letters.lacking:
        assert letters.lacking == {"CUNEIFORM": 2}
    seen = looks_of("\U00012000" * 3)
    assert contact_sheet(seen, ["a heading"]).height > TILE


def looks_of(caption: str) -> list[Any]:
    from isthmus.core.encode.looking import Look

    return [Look("k", caption, "", "1:1", 64, (0, 0), False, photograph(1))]


def test_a_font_of_the_users_is_asked_first_and_one_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a font"):
        Fonts(14, [str(tmp_path / "nothing.ttf")])
    (tmp_path / "text.ttf").write_text("no font")
    with pytest.raises(UsageError, match="not a font"):
        Fonts(14, [str(tmp_path / "text.ttf")])
    if files():
        last = files()[-1]
        try:
            fonts = Fonts(14, [str(last)])
        except UsageError:
            return  # bitmaps of one size
        assert fonts[fonts.fallback].path == str(last)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--pictures", "3"], "--pictures is of a sheet"),
        (["--seed", "0"], "--seed is of a sheet"),
        (["--sheet", "x.jpg"], "a sheet is a PNG"),
        (["--sheet", "x.png", "--resolution", "65"], "no latents at 65 px"),
        (["--sheet", "x.png", "--recipe", "quickstart", "--autoencoder", "y"], "both name an autoencoder"),
        (["--sheet", "x.png", "--autoencoder", "/nowhere"], "no patch_pca autoencoder at /nowhere"),
        (["--sheet", "x.png", "--font", "/nowhere.ttf"], "not a font"),
    ],
)
def test_mistakes_are_one_line(
    data: tuple[Path, PatchPCA], capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    said = run(capsys, data[0], *arguments, code=2).err
    assert words in said
    assert "Traceback" not in said
