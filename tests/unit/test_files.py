"""A file that is replaced is whole, whoever else replaces it."""

from __future__ import annotations

import multiprocessing
import threading
from pathlib import Path

import pytest

from isthmus.files import replace_file


def test_threads_of_one_process_replace_it_at_once(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    texts = [str(number) * 50_000 for number in range(8)]
    barrier = threading.Barrier(len(texts) + 1)
    failed: list[OSError] = []

    def write(text: str) -> None:
        barrier.wait()
        try:
            for _ in range(50):
                replace_file(path, text)
        except OSError as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    replace_file(path, texts[0])
    barrier.wait()
    while any(thread.is_alive() for thread in threads):
        assert path.read_text() in texts
    assert not failed
    assert path.read_text() in texts
    assert [entry.name for entry in tmp_path.iterdir()] == ["record.json"]


def _write_often(path: Path, text: str) -> None:
    for _ in range(50):
        replace_file(path, text)


def test_processes_replace_it_at_once(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    texts = [str(number) * 50_000 for number in range(4)]
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_write_often, args=(path, text)) for text in texts]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * len(texts)
    assert path.read_text() in texts
    assert [entry.name for entry in tmp_path.iterdir()] == ["record.json"]


def test_what_cannot_be_written_leaves_the_old_one_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    replace_file(path, "old")
    with pytest.raises(UnicodeEncodeError):
        replace_file(path, "\ud800")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["record.json"]
    with pytest.raises(FileNotFoundError):
        replace_file(tmp_path / "nowhere" / "record.json", b"new")
