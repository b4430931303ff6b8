"""`isthmus data repack`, `merge`, `split`, `filter`: what they print, and what they refuse in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import rewriting

from isthmus.cli.app import main


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(rewriting.write(tmp_path_factory.mktemp("rewrite") / "data", 40))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["data", *arguments])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def test_repack_says_what_it_wrote(data, tmp_path, capsys):
    code, out, _ = run(
        capsys,
        "repack",
        data,
        str(tmp_path / "out"),
        "--row-group-size",
        "8",
        "--shard-size",
        "16 rows",
        "--json",
    )
    assert code == 0
    told = json.loads(out)
    (dataset,) = told["datasets"]
    assert (dataset["samples"], dataset["dataset"], told["left_out"]) == (40, str(tmp_path / "out"), 0)
    _, out, _ = run(capsys, "stats", str(tmp_path / "out"))
    assert "40 samples" in out
    assert dataset["fingerprint"] in out


def test_split_and_merge_there_and_back(data, tmp_path, capsys):
    code, out, _ = run(capsys, "split", data, str(tmp_path / "parts"), "--parts", "train=3/4,val=0.25")
    assert code == 0
    assert out.count("wrote ") == 2
    parts = [str(tmp_path / "parts" / name) for name in ("train", "val")]
    code, _, _ = run(capsys, "merge", *parts, str(tmp_path / "again"), "--order", "size-class")
    assert code == 0
    assert rewriting.rows_of(tmp_path / "again") == rewriting.rows_of(Path(data))
    code, out, _ = run(capsys, "verify", str(tmp_path / "again"))
    assert code == 0


def test_filter_says_how_many_are_left_out(data, tmp_path, capsys):
    code, out, _ = run(capsys, "filter", data, str(tmp_path / "out"), "--where", "bucket = '2:1'")
    assert code == 0
    assert "26 samples left out" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["repack", "SRC", "DEST", "--row-group-size", "many"], "--row-group-size is a size such as"),
        (["repack", "SRC", "DEST", "--shard-size", "0"], "--shard-size is a size such as"),
        (["repack", "SRC", "DEST", "--order", "random"], "--order is bucket, size-class or source"),
        (["repack", "SRC", "DEST", "--compression", "gzip"], "--compression is none, zstd, lz4 or snappy"),
        (["repack", "SRC", "DEST", "--compression", "zstd"], "compressed files hold one size class"),
        (["repack", "SRC", "DEST", "--threads", "1000"], "threads must be from 0 to 64"),
        (["repack", "NOTHING", "DEST"], "no latent dataset here"),
        (["repack", "SRC", "SRC"], "onto itself"),
        (["repack", "SRC", "gs://bucket/x"], "no file system for gs://"),
        (["merge", "SRC", "SRC", "DEST"], "named twice"),
        (["merge", "SRC", "DEST"], "at least two datasets"),
        (["merge", "SRC", "SRC", "DEST", "--duplicates", "keep"], "--duplicates is refuse or skip"),
        (["split", "SRC", "DEST"], "the shares must be at least two"),
        (["split", "SRC", "DEST", "--parts", "a=0.5,b=x"], "`b=x` is no part and its share"),
        (["split", "SRC", "DEST", "--parts", "a=0.5,a=0.5"], "named twice"),
        (["split", "SRC", "DEST", "--parts", "a=1/0,b=1"], "`a=1/0` is no part and its share"),
        (["split", "SRC", "DEST", "--by", "colour"], "--by is hash, bucket, size-class or where"),
        (["split", "SRC", "DEST", "--where", "true"], "--where is for --by where"),
        (["split", "SRC", "DEST", "--by", "bucket", "--parts", "a,b"], "--parts does not go with --by bucket"),
        (["split", "SRC", "DEST", "--by", "bucket", "--seed", "1"], "--seed is for --by hash"),
        (["split", "SRC", "DEST", "--by", "where"], "needs the predicate"),
        (["split", "SRC", "DEST", "--by", "where", "--where", "true", "--parts", "a"], "--parts names two parts"),
        (["filter", "SRC", "DEST", "--where", "width >"], "it ends where a column or a value is expected"),
        (["filter", "SRC", "DEST", "--where", "width > 10000"], "no sample is left"),
        (["filter", "SRC", "DEST", "--where", "caption2 = ''"], "no column caption2; did you mean caption?"),
    ],
)  # fmt: skip
def test_what_is_refused_is_one_line(data, tmp_path, capsys, arguments, said):
    places = {"SRC": data, "DEST": str(tmp_path / "dest"), "NOTHING": str(tmp_path / "nothing")}
    code, out, err = run(capsys, *(places.get(word, word) for word in arguments))
    assert code == 2
    assert out == ""
    assert said in err
    assert err.startswith("error: ")
    assert err.count("error: ") == 1
    assert not (tmp_path / "dest").exists()
