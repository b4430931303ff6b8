"""A bucket, container or folder that is not there is the user's to correct: exit code 2 and a line, whatever the command."""

from __future__ import annotations

from pathlib import Path

import pytest
import rewriting

from isthmus.cli.app import main
from isthmus.errors import StorageError
from isthmus.storage.filesystems import filesystem
from isthmus.storage.rundir.store import open_store

_NOWHERE = {"s3": "s3://no-such-bucket-of-ours", "blob": "az://no-such-container"}


@pytest.mark.parametrize("kind", ["s3", "blob"])
def test_every_command_says_that_a_bucket_is_missing_and_makes_none(
    kind: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    request.getfixturevalue(kind)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("ISTHMUS_DEBUG", raising=False)
    here, there = str(rewriting.write(tmp_path / "data", 12)), f"{_NOWHERE[kind]}/data"
    out, where = str(tmp_path / "out"), "width > 1"
    missing = "there is no such bucket or container"
    for arguments, says in (
        (["copy", there, out], missing),
        (["copy", here, there], missing),
        (["repack", here, there], missing),
        (["split", here, there, "--by", "bucket"], missing),
        (["filter", here, there, "--where", where], missing),
        (["encode", "emoji", there, "--recipe", "quickstart"], missing),
        (["encode", there, out, "--recipe", "quickstart"], "there is no such place"),
        (["verify", there], "no latent dataset here"),
        (["stats", there], "no latent dataset here"),
        (["bench", there], "no latent dataset here"),
        (["filter", there, out, "--where", where], "no latent dataset here"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["data", *arguments])
        said = capsys.readouterr().err
        assert (ended.value.code, says in said) == (2, True), (arguments, said)
        assert "Traceback" not in said
    with pytest.raises(StorageError, match=f"cannot write: {missing}$"):
        open_store(there).write("run.json", b"{}")
    store, _ = filesystem(there)
    store.invalidate_cache()
    assert not store.exists(_NOWHERE[kind])


def test_a_file_where_a_folder_is_copied_from_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "file").write_text("x")
    with pytest.raises(SystemExit) as ended:
        main(["data", "copy", str(tmp_path / "file"), str(tmp_path / "out")])
    assert ended.value.code == 2
    assert "no folder" in capsys.readouterr().err
