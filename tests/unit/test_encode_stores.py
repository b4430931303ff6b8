"""Encoding out of and into real stores (moto, Azurite): the bytes of this machine, by range reads; refused half-way, and gone on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

import faulty as faults
from encoding import encoders, make_folder, make_models, make_parquet, make_tars, png, put, tree

from isthmus.core.encode import encode as module
from isthmus.core.encode.pretrained import locate
from isthmus.core.encode.sources import open_source
from isthmus.core.recipe import load_recipe
from isthmus.core.recipe.schema import Recipe
from isthmus.errors import DataError, IsthmusError
from isthmus.storage.filesystems import filesystem

if TYPE_CHECKING:
    from servers import Store

KINDS = ("tars", "parquet", "pictures")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encode-stores")
    make_models(folder / "models")
    make_tars(folder / "tars", 3, 6)
    make_parquet(folder / "parquet", 2, 8)
    make_folder(folder / "pictures", 9)
    for kind in KINDS:
        encode(f"{folder}/{kind}", f"{folder}/latents-{kind}", recipe(folder))
    return folder


@pytest.fixture(params=["s3", "blob"])
def store(request: pytest.FixtureRequest) -> Store:
    found: Store = request.getfixturevalue(request.param)
    return found


def recipe(folder: Path) -> Recipe:
    """Of tiny encoders, two resolutions and three shapes."""
    from json import dumps

    base = load_recipe(
        "quickstart",
        [f"encoders={dumps(encoders(f'{folder}/models'))}", "data.buckets={step: 8, min_ratio: 0.5, max_ratio: 2.0}",
         'validation.prompts=["a dog"]', "encode={source: a, dest: b}"],
    ).recipe  # fmt: skip
    stage = base.stages[0]
    return base.model_copy(update={"stages": [stage, stage.model_copy(update={"resolution": 16})]})


def encode(source: str, dest: str, chosen: Recipe, **options: Any) -> Any:
    return module.encode(
        open_source(source), dest, chosen, device="cpu", batch_size=4, threads=2, unit_bytes=1, **options
    )


def behind(store: Store, patch: pytest.MonkeyPatch, faulty: Callable[[str], faults.FaultyServer]) -> Any:
    """A server that misbehaves on demand in front of the store."""
    from servers import AZURITE_ACCOUNT, connection_string

    server = faulty(store.endpoint.removesuffix(f"/{AZURITE_ACCOUNT}"))
    if store.root.startswith("s3://"):
        patch.setenv("AWS_ENDPOINT_URL", server.url)
    else:
        patch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection_string(f"{server.url}/{AZURITE_ACCOUNT}"))
    return server


@pytest.mark.slow
def test_stores_give_and_take_the_bytes_of_this_machine(
    here: Path, store: Store, monkeypatch: pytest.MonkeyPatch, faulty: Callable[[str], faults.FaultyServer]
) -> None:
    put(here / "models", f"{store.root}/models")
    server = behind(store, monkeypatch, faulty)
    assert Path(locate(f"{store.root}/models/vae")[0], "config.json").is_file()
    for kind in KINDS:
        put(here / kind, f"{store.root}/{kind}")
        before = len(server.requests)
        encode(f"{store.root}/{kind}", f"{store.root}/latents-{kind}", recipe(here))
        assert tree(f"{store.root}/latents-{kind}") == tree(f"{here}/latents-{kind}"), kind
        ranges = [one for one in server.requests[before:] if one.method == "GET" and _range(one)]
        assert ranges, kind


def test_credentials_lost_half_way_are_one_line_and_the_same_command_goes_on(
    here: Path, store: Store, monkeypatch: pytest.MonkeyPatch, faulty: Callable[[str], faults.FaultyServer]
) -> None:
    put(here / "tars", f"{store.root}/tars")
    server = behind(store, monkeypatch, faulty)
    dest = f"{store.root}/latents-tars"
    # From the second tar on whoever reads or writes is a stranger.
    fault = faults.refused(403, "AuthenticationFailed" if store.root.startswith("az") else "AccessDenied")
    for method in ("GET", "PUT", "HEAD"):
        server.fail(fault, times=10**6, method=method, when=lambda _: bool(lost))
    lost: list[bool] = []
    read = module.items_of

    def reading(source: Any, unit: Any) -> Any:
        if unit.number == 1:
            lost.append(True)
        return read(source, unit)

    monkeypatch.setattr(module, "items_of", reading)
    with pytest.raises(IsthmusError) as caught:
        encode(f"{store.root}/tars", dest, recipe(here))
    assert "\n" not in str(caught.value)
    assert store.root.partition("://")[2].partition("/")[0] in str(caught.value)
    monkeypatch.undo()
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    done = [name for name in tree(dest) if name.startswith("_encode/unit-")]
    assert done == ["_encode/unit-00000.json"]
    encode(f"{store.root}/tars", dest, recipe(here))
    assert tree(dest) == tree(f"{here}/latents-tars")


def test_a_tar_or_picture_that_is_replaced_in_a_store_is_noticed(here: Path, store: Store) -> None:
    put(here / "tars", f"{store.root}/tars")
    put(here / "pictures", f"{store.root}/pictures")
    files, path = filesystem(f"{store.root}/tars")
    source = open_source(f"{store.root}/tars")
    files.pipe_file(f"{path}/001.tar", (here / "tars" / "002.tar").read_bytes())
    with pytest.raises(DataError, match="the source changed while it was encoded"):
        module.encode(source, f"{store.root}/latents", recipe(here), device="cpu", unit_bytes=1)
    pictures = open_source(f"{store.root}/pictures")
    files.pipe_file(f"{path[:-4]}pictures/000.png", png(99, 200))
    manifest = module.encode(pictures, f"{store.root}/latents-2", recipe(here), device="cpu")
    assert manifest.samples == 8
    rejected = tree(f"{store.root}/latents-2")["_rejected.jsonl"].decode()
    assert '"000.png"' in rejected
    assert '"changed"' in rejected


def _range(request: faults.Request) -> str:
    return request.header("Range") or request.header("x-ms-range")
