"""Tars, tables, stores and web servers as sources: what is taken, what is left out and why, and what is filtered."""

from __future__ import annotations

import io
import json
import tarfile
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL")
pytest.importorskip("pyarrow")

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from isthmus.core.encode import pieces, webdataset
from isthmus.core.encode.ahead import prepared
from isthmus.core.encode.buckets import bucket_table
from isthmus.core.encode.filters import allot
from isthmus.core.encode.folder import FolderSource
from isthmus.core.encode.pieces import units_of
from isthmus.core.encode.prepare import Prepared
from isthmus.core.encode.sources import ImageRecord, Rejected, open_source
from isthmus.core.recipe.pictures import Bounds, CaptionField, Pictures
from isthmus.core.recipe.schema import Buckets
from isthmus.errors import DataError, IsthmusError, StorageError, UsageError


def picture(
    colour: object = (200, 30, 30), size: tuple[int, int] = (40, 30), kind: str = "png", mode: str = "RGB"
) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size, colour).save(buffer, kind)  # type: ignore[arg-type]
    return buffer.getvalue()


def tar(path: Path, members: list[tuple[str, bytes]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as out:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))
    return path


def arrow(folder: Path, rows: list[dict[str, Any]], per_file: int) -> None:
    """As `datasets` saves it."""
    folder.mkdir(parents=True)
    names = [f"data-{at:05d}-of-00009.arrow" for at in range(-(-len(rows) // per_file))]
    for at, name in enumerate(names):
        table = pa.Table.from_pylist(rows[at * per_file : (at + 1) * per_file])
        with pa.ipc.new_stream(folder / name, table.schema) as writer:
            writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")


def taken(source: Any) -> dict[str, ImageRecord]:
    return {item.key: item for item in source if isinstance(item, ImageRecord)}


def refused(source: Any) -> dict[str, str]:
    return {item.key: item.reason for item in source if isinstance(item, Rejected)}


COLOURS = [(0, 40, 80), (40, 80, 120), (80, 120, 160), (120, 160, 200)]
CAPTIONS = [["one", "eins"], ["two"], ["three"], ["שלום \u202eabc\u202c 你好 🙂"]]


def test_one_set_of_pictures_reads_alike_from_every_kind_of_source(tmp_path: Path) -> None:
    rows = list(zip(COLOURS, CAPTIONS, strict=True))
    members, hugging, flat, plain = [], [], [], tmp_path / "folder"
    plain.mkdir()
    for at, (colour, captions) in enumerate(rows):
        data = picture(colour)
        members += [(f"{at:03}.png", data), (f"{at:03}.txt", "\n".join(captions).encode())]
        members += [(f"{at:03}.json", json.dumps({"url": f"https://e.org/{at}"}).encode())]
        flat.append({"image": data, "text": captions, "url": f"https://e.org/{at}"})
        hugging.append(
            {"image": {"bytes": data, "path": None}, "text": captions, "url": f"https://e.org/{at}"}
        )
        (plain / f"{at:03}.png").write_bytes(data)
        (plain / f"{at:03}.txt").write_text("\n".join(captions))
    tar(tmp_path / "tars" / "a.tar", members[:6])
    tar(tmp_path / "tars" / "b.tar", members[6:])
    # As img2dataset leaves it: tables and statistics beside the tars.
    pq.write_table(pa.table({"caption": ["x"], "url": ["y"]}), tmp_path / "tars" / "a.parquet")
    (tmp_path / "tars" / "a_stats.json").write_text("{}")
    (tmp_path / "parquet").mkdir()
    pq.write_table(pa.Table.from_pylist(flat), tmp_path / "parquet" / "rows.parquet", row_group_size=3)
    arrow(tmp_path / "hf", hugging, 3)
    memory = fsspec.filesystem("memory")
    memory.put(str(plain), "/encode-alike/pictures", recursive=True)
    expected_keys = {
        "tars": ["a/000", "a/001", "b/002", "b/003"],
        "parquet": ["rows.parquet#0:0", "rows.parquet#0:1", "rows.parquet#0:2", "rows.parquet#1:0"],
        "hf": [*(f"data-00000-of-00009.arrow:{at}" for at in range(3)), "data-00001-of-00009.arrow:0"],
        "folder": [f"{at:03}.png" for at in range(4)],
        "memory://encode-alike/pictures": [f"{at:03}.png" for at in range(4)],
    }
    for name, keys in expected_keys.items():
        source = open_source(name if "://" in name else str(tmp_path / name))
        found = taken(source)
        assert list(found) == keys, name
        assert [r.image.getpixel((5, 5)) for r in found.values()] == COLOURS, name
        assert [list(r.captions) for r in found.values()] == CAPTIONS, name
        assert refused(source) == {}
        survey = source.survey()
        assert (survey.most_captions, survey.sizes.total()) == (2, 4), name
        assert survey.pictures in (None, 4), name
        if name in ("tars", "parquet", "hf"):
            assert found[keys[1]].source == "https://e.org/1"
            assert len(units_of(source, max_bytes=1, max_pieces=99)) == 2
            assert len(units_of(source, max_bytes=10**9, max_pieces=99)) == 1
    memory.rm("/encode-alike", recursive=True)


def test_a_tars_bad_members_each_have_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webdataset, "MAX_BYTES", 20_000)
    good, text = picture(), ("txt", b"a caption")
    noise = Image.effect_noise((300, 300), 90)
    buffer = io.BytesIO()
    noise.save(buffer, "png")
    bomb = picture((0,), (10_000, 10_001), "png", "L")
    cases: dict[str, list[tuple[str, bytes]]] = {
        "fine": [("png", good), text],
        "cmyk": [("jpg", picture((0, 255, 255, 0), kind="jpeg", mode="CMYK")), text],
        "deep": [("png", picture(40_000, mode="I;16")), text],
        "clear": [("png", picture((1, 2, 3, 0), mode="RGBA")), text],
        "zero": [("jpg", b""), text],
        "cut": [("jpg", picture(kind="jpeg", size=(200, 200))[:-300]), text],
        "silent": [("png", good)],
        "blank": [("png", good), ("txt", b" \n\t ")],
        "latin": [("png", good), ("txt", b"\xff\xfe caf\xe9")],
        "number": [("png", good), ("json", b'{"caption": 5}')],
        "list": [("png", good), ("json", b"[1]")],
        "broken": [("png", good), ("json", b"{")],
        "long": [("png", good), ("txt", b"x" * 20_001)],
        "10kb": [("png", good), ("txt", b"word " * 2048)],
        "surrogate": [("png", good), ("json", b'{"caption": "a \\ud800 b\\u0000c"}')],
        "big": [("png", buffer.getvalue()), text],
        "orphan": [text],
    }  # fmt: skip
    members = [(f"{key}.{kind}", data) for key, parts in cases.items() for kind, data in parts]
    members += [("fine.png", good), ("fine.txt", b"again")]
    tar(tmp_path / "a.tar", members)
    source = open_source(str(tmp_path))
    found, reasons = taken(source), refused(source)
    assert set(found) == {f"a/{key}" for key in ("cmyk", "deep", "clear", "10kb", "surrogate", "fine")}
    why = {item.key: item.detail for item in source if isinstance(item, Rejected)}
    assert why["a/silent"] == "there is no txt, text, caption, captions"
    assert why["a/blank"] == "every caption is empty"
    assert why["a/zero"] == "an empty file"
    assert found["a/surrogate"].captions == ("a ? b c",)
    assert len(found["a/10kb"].captions[0]) == 10_239
    assert found["a/clear"].image.getpixel((0, 0)) == (255, 255, 255)
    assert Counter(reasons.values()) == {
        "unreadable": 2, "no-caption": 2, "bad-caption": 4, "caption-too-long": 1, "too-many-bytes": 1,
        "no-picture": 1, "duplicate": 1,
    }  # fmt: skip
    tar(tmp_path / "bomb" / "b.tar", [("x.png", bomb), ("x.txt", b"a bomb")])
    monkeypatch.undo()
    assert refused(open_source(str(tmp_path / "bomb"))) == {"b/x": "too-many-pixels"}


def test_a_tar_that_ends_too_soon_gives_what_it_holds_and_says_so(tmp_path: Path) -> None:
    whole = tar(
        tmp_path / "a.tar",
        [(f"{at}.{k}", picture() if k == "png" else b"t") for at in range(4) for k in ("png", "txt")],
    )
    whole.write_bytes(whole.read_bytes()[: 512 * 9])
    source = open_source(str(tmp_path))
    assert len(taken(source)) in (1, 2)
    assert refused(source) == {"a.tar": "truncated"}
    whole.write_bytes(b"\x89PNG no tar at all" * 99)
    assert refused(open_source(str(tmp_path))) == {"a.tar": "truncated"}


def test_nulls_keys_and_paths_in_a_table(tmp_path: Path) -> None:
    (tmp_path / "pics").mkdir()
    (tmp_path / "pics" / "a.png").write_bytes(picture())
    (tmp_path.parent / "outside.png").write_bytes(picture())
    rows = [
        {"id": "a", "image": None, "caption": "null picture"},
        {"id": "b", "image": "pics/a.png", "caption": "a path"},
        {"id": "b", "image": "pics/a.png", "caption": "the same key"},
        {"id": None, "image": "pics/a.png", "caption": "no key"},
        {"id": "c", "image": "pics/a.png", "caption": None},
        {"id": "d", "image": "../outside.png", "caption": "out"},
        {"id": "e", "image": "pics/gone.png", "caption": "gone"},
        {"id": "f", "image": f"{tmp_path}/pics/a.png", "caption": "a whole path"},
        {"id": "g", "image": "s3://elsewhere/a.png", "caption": "another store"},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    source = open_source(str(tmp_path), Pictures(key="id"))
    assert set(taken(source)) == {"t.parquet#0/b", "t.parquet#0/f"}
    reasons = [(item.key[-2:], item.reason) for item in source if isinstance(item, Rejected)]
    assert reasons == [
        ("/a", "missing"), ("/b", "duplicate"), (":3", "no-key"), ("/c", "no-caption"),
        ("/d", "escapes"), ("/e", "missing"), ("/g", "escapes"),
    ]  # fmt: skip
    with pytest.raises(UsageError, match=r"data.pictures.scores is beauty, which is no column"):
        open_source(str(tmp_path), Pictures(scores={"beauty": Bounds(min=1)}))
    (tmp_path / "t.parquet").write_bytes((tmp_path / "t.parquet").read_bytes()[:-20])
    with pytest.raises(DataError, match=r"cannot be read"):
        open_source(str(tmp_path))


def test_a_hugging_face_dataset_of_splits_or_of_chosen_rows_is_refused(tmp_path: Path) -> None:
    arrow(tmp_path / "d" / "train", [{"image": picture(), "text": "x"}], 1)
    (tmp_path / "d" / "dataset_dict.json").write_text("{}")
    with pytest.raises(UsageError, match="several splits"):
        open_source(str(tmp_path / "d"))
    state = tmp_path / "d" / "train" / "state.json"
    state.write_text(
        json.dumps({**json.loads(state.read_text()), "_indices_files": [{"filename": "i.arrow"}]})
    )
    with pytest.raises(UsageError, match="chosen by an index"):
        open_source(str(tmp_path / "d" / "train"))


def test_filters_are_counted_by_reason_and_captions_are_weighted(tmp_path: Path) -> None:
    rows = [
        {"img": picture(size=size), "long": "a long one", "short": "short", "score": score, "licence": licence}
        for size, score, licence in [
            ((64, 64), 6.0, "CC0"), ((64, 20), 6.0, "cc0"), ((300, 64), 6.0, "CC0"), ((64, 64), 4.9, "CC0"),
            ((64, 64), None, "CC0"), ((64, 64), float("nan"), "CC0"), ((64, 64), 6.0, "all rights reserved"),
            ((64, 64), 6.0, None), ((80, 64), 5.0, " cc0 "),
        ]
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    chosen = Pictures(
        image="img", min_side=32, max_ratio=2.0, scores={"score": Bounds(min=5)}, licence="licence", licences=["CC0"],
        captions=[CaptionField(field="long", weight=3), CaptionField(field="short")],
    )  # fmt: skip
    source = open_source(str(tmp_path), chosen)
    assert list(taken(source)) == ["t.parquet#0:0", "t.parquet#0:8"]
    assert Counter(refused(source).values()) == {
        "filter-size": 1, "filter-aspect": 1, "filter-score": 3, "filter-licence": 2,
    }  # fmt: skip
    (first, _) = taken(source).values()
    assert (first.captions, first.weights) == (("a long one", "short"), (3.0, 1.0))
    assert allot(first.captions, first.weights, 4) == ("a long one",) * 3 + ("short",)
    assert allot(first.captions, first.weights, 1) == ("a long one",)
    assert allot(("a", "b", "c"), (1.0, 1.0, 1.0), 2) == ("a", "b")
    # The same of a folder with a `.json` beside each picture, as img2dataset's `files` has it.
    folder = tmp_path / "files" / "00000"
    folder.mkdir(parents=True)
    for at, row in enumerate(rows):
        (folder / f"{at}.png").write_bytes(row.pop("img"))
        (folder / f"{at}.json").write_text(json.dumps(row))
    assert list(taken(FolderSource(folder, pictures=chosen))) == ["0.png", "8.png"]


def test_provenance_is_the_column_that_the_recipe_names(tmp_path: Path) -> None:
    rows = [{"image": picture(), "text": "x", "url": "http://a/1", "archive": "box 7"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")

    def of(pictures: Pictures) -> str:
        (found,) = taken(open_source(str(tmp_path), pictures)).values()
        return str(found.source)

    assert of(Pictures()) == "http://a/1"
    assert of(Pictures(provenance="archive")) == "box 7"


def test_pictures_that_are_too_tall_or_too_wide_are_left_out(tmp_path: Path) -> None:
    sizes = [(64, 64), (30, 64), (64, 30), (64, 40)]
    pq.write_table(
        pa.table({"image": [picture(size=size) for size in sizes], "text": ["x"] * 4}), tmp_path / "t.parquet"
    )
    for asked, left in (
        (Pictures(), 4),
        (Pictures(min_ratio=0.5), 3),
        (Pictures(min_ratio=0.5, max_ratio=2.0), 2),
    ):
        source = open_source(str(tmp_path), asked)
        assert len(list(taken(source))) == left
        assert Counter(refused(source).values()) == ({"filter-aspect": 4 - left} if left < 4 else {})


def test_a_source_that_changes_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": [picture()] * 80, "text": ["x"] * 80}), tmp_path / "t.parquet")
    source = open_source(str(tmp_path))
    reading = iter(source)
    next(reading)
    (tmp_path / "t.parquet").touch()
    pq.write_table(pa.table({"image": [picture()] * 81, "text": ["y"] * 81}), tmp_path / "u.parquet")
    (tmp_path / "u.parquet").rename(tmp_path / "t.parquet")
    with pytest.raises(DataError, match="the source changed while it was encoded"):
        list(reading)
    folder = tmp_path / "pics"
    folder.mkdir()
    (folder / "a.png").write_bytes(picture())
    (folder / "a.txt").write_text("x")
    pictures = FolderSource(folder)
    (piece,) = pictures.pieces
    (item,) = pictures.read(piece)
    assert isinstance(item, pieces.Pending)
    (folder / "a.png").write_bytes(picture(size=(80, 80)))
    with pytest.raises(Exception, match="changed"):
        item.load()


class _Server(BaseHTTPRequestHandler):
    """Serves files with ranges, and forgets its visitors' rights after some requests."""

    files: dict[str, bytes]
    rights = 10**9

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        type(self).rights -= 1
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        data = self.files.get(self.path)
        if data is None or self.rights < 0:
            self.send_response(404 if data is None else 403)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        span = self.headers.get("Range", "").removeprefix("bytes=")
        first, _, last = span.partition("-")
        part = data[int(first) : int(last) + 1] if span and body else data
        self.send_response(206 if span and body else 200)
        if span and body:
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        if body:
            self.wfile.write(part)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, type[_Server]]]:
    kind = type("Server", (_Server,), {"files": {}})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}", kind
        running.shutdown()
        thread.join()


def test_numbered_tars_come_from_a_web_server_and_a_refusal_half_way_is_one_line(
    tmp_path: Path, server: tuple[str, type[_Server]]
) -> None:
    pytest.importorskip("aiohttp")
    url, kind = server
    for at in range(3):
        whole = tar(tmp_path / f"{at}.tar", [("x.png", picture()), ("x.txt", b"x")])
        kind.files[f"/data/{at:02}.tar"] = whole.read_bytes()
    source = open_source(url + "/data/{00..02}.tar")
    assert list(taken(source)) == ["00/x", "01/x", "02/x"]
    with pytest.raises(UsageError, match="does not list its files"):
        open_source(url + "/data")
    with pytest.raises(IsthmusError, match="there is no such"):
        open_source(url + "/data/{00..03}.tar")
    kind.rights = 1
    reading = iter(source)
    assert isinstance(next(reading), ImageRecord)
    with pytest.raises(StorageError):
        list(reading)


def test_threads_keep_the_order_and_an_error_of_the_source_comes_at_its_place() -> None:
    table = bucket_table(Buckets(), [16], 8)

    def items() -> Iterator[Any]:
        for at in range(30):
            if at == 7:
                yield Rejected(key="7", reason="missing")
                continue
            data = picture((at, 0, 0), size=(400, 400) if at % 5 == 0 else (20, 20))
            if at == 11:
                data = data[:40]
            fields = {"text": f"caption {at}"}
            yield pieces.pending(str(at), len(data), lambda d=data, f=fields: (d, f), Pictures(), "test")
        raise StorageError("the store is gone")

    ready = prepared(items(), table, threads=4, ahead=5)
    for at, item in zip(range(30), ready, strict=False):
        assert item.key == str(at)
        if at in (7, 11):
            assert isinstance(item, Rejected)
        else:
            assert isinstance(item, Prepared)
            assert item.pixels[16][0, 0, 0] == at
    with pytest.raises(StorageError, match="the store is gone"):
        next(ready)
    # Whoever stops early leaves no thread behind.
    before = threading.active_count()
    some = prepared(items(), table, threads=2, ahead=2)
    next(some)
    some.close()
    assert threading.active_count() <= before


def test_a_file_beside_the_user_is_found_by_its_bare_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tar(tmp_path / "w-000.tar", [("0.png", picture()), ("0.txt", b"a caption")])
    for name in ("w-000.tar", "./w-000.tar", "w-{000..000}.tar"):
        assert list(taken(open_source(name))) == ["w-000/0"], name
