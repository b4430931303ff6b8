"""Refuses anything that looks like a credential: a recipe is shared, committed and copied into every run.

Messages never repeat the value.
"""

from __future__ import annotations

import re
from typing import Any

from isthmus.core.recipe.document import Path
from isthmus.core.recipe.problems import Problem

_NAMES = re.compile(
    r"(^|[_.-])(password|passwd|passphrase|secrets?|token|(api|access|account|private|secret)[_-]?key|credentials?"
    r"|connection[_-]?string|sas([_-]?token)?|auth|authorization|bearer)([_.-](id|value))?$",
    re.IGNORECASE,
)
_VALUES = [
    ("an AWS access key", re.compile(r"(?<![A-Z0-9])(AKIA|ASIA)[A-Z0-9]{16}(?![A-Z0-9])")),
    ("an Azure account key", re.compile(r"AccountKey=|(?<![A-Za-z0-9+/])[A-Za-z0-9+/]{86}==")),
    ("an Azure SAS token", re.compile(r"(?:^|[?&;])sig=|SharedAccessSignature", re.IGNORECASE)),
    ("a Hugging Face token", re.compile(r"\bhf_[A-Za-z0-9]{20,}")),
    ("a GitHub token", re.compile(r"\b(gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,})")),
    ("a private key", re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----")),
    ("an API key", re.compile(r"\bsk-[A-Za-z0-9_-]{20,}|\bAIza[A-Za-z0-9_-]{35}|\bxox[abprs]-[A-Za-z0-9-]{10,}")),
    ("a JSON web token", re.compile(r"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.")),
    ("a password in a URL", re.compile(r"\w://[^/\s:@]+:[^/\s@]+@")),
]  # fmt: skip
# Bare forms with no prefix of their own: 40 characters of an AWS secret key, 40 hex digits of a W&B key. Hex may
# also be a git revision, so it counts only as a whole value, and not where a revision is expected.
_BARE = re.compile(r"[A-Za-z0-9/+]{40}")
_HINT = "credentials come from the cloud's own chain (az login, aws sso login, a managed identity), never from a recipe"


def find_secrets(data: Any) -> list[Problem]:
    """A problem for each key that names a secret and each value that looks like one."""
    problems: list[Problem] = []
    pending: list[tuple[Path, Any]] = [((), data)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, dict):
            for key, inner in reversed(value.items()):
                if _kind(key, path):
                    problems.append(Problem(path, f"a key looks like {_kind(key, path)}", _HINT))
                elif _NAMES.search(key) and not isinstance(inner, (dict, list)):
                    problems.append(Problem((*path, key), "a recipe holds no secrets", _HINT))
                else:
                    pending.append(((*path, key), inner))
        elif isinstance(value, list):
            pending.extend(((*path, index), item) for index, item in reversed([*enumerate(value)]))
        elif isinstance(value, str):
            kind = _kind(value, path)
            if kind:
                problems.append(Problem(path, f"looks like {kind}", _HINT))
    return problems


def redact(line: str) -> str:
    """A message without anything that looks like a credential: it may quote a tag, a key or a path."""
    for _, pattern in _VALUES:
        if pattern.search(line):
            # A form may only name the secret, as `sig=` does; what follows goes with it.
            whole = re.compile(rf"(?:{pattern.pattern})[^\s&;,\"']*", pattern.flags)
            line = whole.sub(lambda found: f"{found[0][:3]}...", line)
    return line


def credential(line: str) -> str | None:
    """What kind of credential a line of any text file holds, by its unmistakable form; None: none."""
    return next((kind for kind, pattern in _VALUES if pattern.search(line)), None)


def _kind(value: str, path: Path) -> str | None:
    if len(value) < 4:
        return None
    for kind, pattern in _VALUES:
        if pattern.search(value):
            return kind
    whole = _BARE.fullmatch(value) is not None
    if (
        whole
        and not re.fullmatch(r"[0-9a-f]{40}", value)
        and re.search(r"\d", value)
        and re.search(r"[A-Z]", value)
    ):
        return "a secret key"
    if whole and re.fullmatch(r"[0-9a-f]{40}", value) and not (path and "revision" in str(path[-1])):
        return "an API key"
    return None
