"""Credentials are refused wherever they stand in a recipe, and never repeated."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.core.recipe import load_recipe, parse_recipe
from isthmus.core.recipe.secrets import find_secrets
from isthmus.errors import RecipeError

TEXT = Path(__file__).with_name("small_recipe.yaml").read_text("utf-8")

# Made up, and put together here so that no scanner of repositories takes this file for a leak.
VALUES = {
    "AWS access key": "AKIA" + "IOSFODNN7" + "ABCDEFG",
    "AWS temporary key": "ASIA" + "IOSFODNN7" + "ABCDEFG",
    "AWS secret key": "wJalrXUtnFEMI/K7MDENG/" + "bPxRfiCYzzzzzzzKEY",
    "Azure account key": "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/"
    + "KBHBeksoGM"
    + "A"
    + "Q==",
    "connection string": "DefaultEndpointsProtocol=https;AccountName=x;Account" + "Key=abcd1234",
    "SAS in a URL": "https://exampleaccount.blob.core.windows.net/c?sv=2024-01-01&si" + "g=abc%3D",
    "SAS in an az URI": "az://c@exampleaccount/x?si" + "g=abc",
    "Hugging Face": "hf_" + "a1B2" * 8,
    "GitHub": "ghp_" + "a1B2" * 9,
    "GitHub fine-grained": "github_pat_" + "a1B2" * 9,
    "Weights & Biases": "0123456789abcdef" * 2 + "01234567",
    "API key": "sk-" + "a1B2" * 8,
    "Slack": "xox" + "b-1234567890-abc",
    "web token": "eyJ" + "hbGciOiJIUzI1" + ".eyJ" + "zdWIiOiIxMjM0" + ".sig",
    "password in a URL": "https://user:" + "hunter2" + "@example.com/data",
    "PEM": "-----BEGIN RSA PRIVATE " + "KEY-----\nMIIE\n-----END RSA PRIVATE " + "KEY-----",
}
PLACES = [
    ("data.sources.0.uri", ("data", "sources", 0, "uri")),
    ("validation.prompts.0", ("validation", "prompts", 0)),
    ("backends.azure.environment.X", ("backends", "azure", "environment", "X")),
    ("model.config.dropout", ("model", "config", "dropout")),
    ("nowhere", ("nowhere",)),
]


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("place", [name for name, _ in PLACES])
def test_a_value_that_looks_like_a_credential(kind: str, place: str) -> None:
    secret = VALUES[kind]
    with pytest.raises(RecipeError) as caught:
        parse_recipe(TEXT, filename="r.yaml", overrides=[f"{place}={_quoted(secret)}"])
    text = str(caught.value)
    assert "looks like" in text
    assert "credentials come from" in text
    assert not _leaks(secret, text)


@pytest.mark.parametrize(
    "key",
    ["password", "db_password", "secret", "client_secret", "token", "hf_token", "api-key", "apikey", "accessKey",
     "account_key", "sas_token", "connection_string", "credential", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY",
     "private_key"],
)  # fmt: skip
def test_a_key_that_names_a_secret(key: str) -> None:
    (problem,) = find_secrets({"backends": {"azure": {key: "hunter2"}}})
    assert problem.path == ("backends", "azure", key)
    assert "hunter2" not in problem.line("r.yaml:3")


def test_a_secret_used_as_a_key_is_not_repeated() -> None:
    secret = VALUES["AWS access key"]
    with pytest.raises(RecipeError) as caught:
        parse_recipe(f"{TEXT}\n{secret}: 3\n", filename="r.yaml")
    assert "looks like an AWS access key" in str(caught.value)
    assert secret not in str(caught.value)


def test_a_secret_in_broken_yaml_is_not_repeated() -> None:
    secret = VALUES["Hugging Face"]
    for text in (
        f"a: [{secret}",
        f"{secret}: 1\n{secret}: 2",
        f"a: {secret}: b",
        f"&{secret} a: 1",
        f"a: !{secret} b",
    ):
        with pytest.raises(RecipeError) as caught:
            parse_recipe(text, filename="r.yaml")
        assert secret not in str(caught.value), text


def test_ordinary_values_are_not_secrets() -> None:
    assert find_secrets(
        {
            "max_tokens": 77,
            "text_tokens": 3,
            "tokenizer": "clip",
            "prompts": ["a secret garden", "the key to the city", "a token of love", "password"],
            "uri": "az://latents@exampleaccount.blob.core.windows.net/photos-v3/AKIA",
            "source": "laion/CLIP-ViT-bigG-14-laion2B-39B-b160k",
            "revision": "0123456789abcdef" * 2 + "01234567",
            "path": "/a/rather/long/path/with/forty/letters12",
            "author": "somebody",
            "key": "a column's name",
        }
    ) == []  # fmt: skip
    for name in ("quickstart", "sdxl-progressive", "sd3-medium", "pixart-512"):
        load_recipe(name)


def _quoted(text: str) -> str:
    from isthmus.core.recipe.dump import _quoted

    return _quoted(text)


def _leaks(secret: str, text: str) -> bool:
    """Whether eight characters in a row of the secret's own part are in a text."""
    own = secret.rpartition("=")[2] or secret
    own = own if len(own) >= 8 else secret[-12:]
    return any(own[start : start + 8] in text for start in range(max(1, len(own) - 7)))
