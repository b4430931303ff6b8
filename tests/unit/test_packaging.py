"""A folder of code as one file: the same bytes for the same files, nothing from outside, nothing secret."""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from pathlib import Path

import pytest

from isthmus.core import packaging
from isthmus.core.packaging import digest_of, pack, unpack
from isthmus.errors import DataError, UsageError

PLUGIN = "from isthmus.core.plugins import hookimpl\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "mine"
    (place / "part").mkdir(parents=True)
    (place / "isthmus_plugin.py").write_text(PLUGIN)
    (place / "part" / "model.py").write_text("WIDTH = 8\n")
    (place / "settings.yaml").write_text("width: 8\n")
    return place


def test_the_same_files_are_the_same_package_whenever_and_wherever(folder: Path, tmp_path: Path) -> None:
    first = pack(str(folder))
    other = tmp_path / "elsewhere" / "copy"
    (other / "part").mkdir(parents=True)
    for name in ("settings.yaml", "part/model.py", "isthmus_plugin.py"):  # in another order
        (other / name).write_bytes((folder / name).read_bytes())
        os.utime(other / name, (1, 1))
        (other / name).chmod(0o700)
    second = pack(str(other))
    assert first.data == second.data
    assert first.sha256 == hashlib.sha256(first.data).hexdigest() == digest_of(first.reference)
    assert first.files == ("isthmus_plugin.py", "part/model.py", "settings.yaml")
    (other / "part" / "model.py").write_text("WIDTH = 9\n")
    assert pack(str(other)).sha256 != first.sha256
    assert digest_of("./mine") is None
    assert digest_of("sha256:short") is None


def test_it_comes_out_as_it_went_in(folder: Path, tmp_path: Path) -> None:
    package = pack(str(folder))
    target = tmp_path / "there"
    target.mkdir()
    unpack(package.data, package.sha256, target, where="x")
    found = {p.relative_to(target).as_posix(): p.read_bytes() for p in target.rglob("*") if p.is_file()}
    assert found == {name: (folder / name).read_bytes() for name in package.files}


def test_hidden_files_caches_and_keys_are_left_out(folder: Path) -> None:
    before = pack(str(folder)).sha256
    for name in (
        ".env",
        ".git/config",
        "__pycache__/a.pyc",
        "prod.env",
        "server.pem",
        "id_rsa",
        "part/.hidden",
        "credentials.json",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("AccountKey=abc\n")
    package = pack(str(folder))
    assert package.sha256 == before
    assert set(package.left_out) == {
        ".env", ".git", "__pycache__", "prod.env", "server.pem", "id_rsa", "part/.hidden", "credentials.json",
    }  # fmt: skip


def test_a_credential_in_a_file_is_refused_by_line_and_never_shown(folder: Path) -> None:
    (folder / "part" / "model.py").write_text("A = 1\nKEY = 'AKIAABCDEFGHIJKLMNOP'\n")
    with pytest.raises(UsageError, match=r"part/model.py:2: looks like an AWS access key") as caught:
        pack(str(folder))
    assert "AKIA" not in str(caught.value)


def test_links_lead_nowhere_else(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("mine alone")
    (folder / "link.txt").symlink_to(secret)
    with pytest.raises(UsageError, match=r"link\.txt is a link that leads out of the folder"):
        pack(str(folder))
    (folder / "link.txt").unlink()
    (folder / "all").symlink_to(tmp_path)
    with pytest.raises(UsageError, match="all is a link to a folder"):
        pack(str(folder))
    (folder / "all").unlink()
    (folder / "same.yaml").symlink_to(folder / "settings.yaml")
    assert "same.yaml" in pack(str(folder)).files


def test_what_is_no_folder_of_code_is_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        pack(str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match=r"has no isthmus_plugin\.py"):
        pack(str(folder / "part"))
    (folder / "part" / "model.py").write_text("def f(:\n")
    with pytest.raises(UsageError, match=r"part/model.py:1: does not parse: ") as caught:
        pack(str(folder))
    assert "\n" not in str(caught.value)


def test_size_and_number_of_files_have_limits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "weights.bin").write_bytes(bytes(2_000_000))
    monkeypatch.setattr(packaging, "MAX_BYTES", 2**20)
    with pytest.raises(UsageError, match=r"more than 1 MiB; the largest file is weights.bin with 2.0 MB"):
        pack(str(folder))
    (folder / "weights.bin").unlink()
    monkeypatch.setattr(packaging, "MAX_FILES", 2)
    with pytest.raises(UsageError, match="more than 2 files"):
        pack(str(folder))


def _zip(**files: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def _link() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        entry = zipfile.ZipInfo("link")
        entry.external_attr = 0o120777 << 16
        archive.writestr(entry, "/etc/passwd")
    return buffer.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        _zip(**{"../out.py": b"x"}),
        _zip(**{"/etc/out.py": b"x"}),
        _zip(**{"a/../../out.py": b"x"}),
        _zip(**{"..\\out.py": b"x"}),
        _zip(**{"c:out.py": b"x"}),
        _link(),
        b"no archive",
    ],
)
def test_a_package_that_reaches_out_is_refused(tmp_path: Path, data: bytes) -> None:
    target = tmp_path / "in" / "target"
    target.mkdir(parents=True)
    with pytest.raises(DataError):
        unpack(data, hashlib.sha256(data).hexdigest(), target, where="run/code/x.zip")
    assert [path for path in tmp_path.rglob("*") if path.is_file() or path.is_symlink()] == []


def test_one_flipped_bit_is_noticed(folder: Path, tmp_path: Path) -> None:
    package = pack(str(folder))
    spoilt = bytearray(package.data)
    spoilt[100] ^= 1
    with pytest.raises(DataError, match="is not what the run was begun with"):
        unpack(bytes(spoilt), package.sha256, tmp_path, where="run/code/x.zip")
