"""What Azure refuses, as one line that says whether another offer, another login or only another try may help."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from isthmus.core.recipe.secrets import redact
from isthmus.errors import IsthmusError, NotInstalled, PreflightRefused, UsageError
from isthmus.storage.identity import NoLogin

_LOGIN = "az login, a managed identity, or AZURE_CLIENT_ID with its secret in the environment"
_NO_ROOM = re.compile(
    r"quota|cores? limit|insufficient.*capacity|no capacity|capacity.*(?:not|un)available|SkuNotAvailable"
    r"|(?:vm ?size|sku).*not (?:supported|available)|OperationNotAllowed|AllocationFailed|OverconstrainedAllocation",
    re.IGNORECASE,
)
_URL_SECRET = re.compile(r"(https?://[^\s?'\"]+)\?[^\s'\"]+")


class Unreachable(IsthmusError):
    """Azure did not answer, or asks for fewer requests: nobody knows whether a request had its effect."""


class Denied(UsageError):
    """401 or 403."""


class Missing(UsageError):
    """404."""


def status_of(error: BaseException) -> int | None:
    """The HTTP status of an azure-core error."""
    code = getattr(error, "status_code", None)
    return code if isinstance(code, int) else None


def words_of(error: BaseException) -> str:
    """The service's own words in one line, without a SAS or token."""
    inner = getattr(error, "error", None)
    text = getattr(inner, "message", None) or getattr(error, "message", None) or str(error)
    code = getattr(inner, "code", None)
    first = next((line.strip() for line in str(text).splitlines() if line.strip()), type(error).__name__)
    first = re.sub(r"^\((\w+)\)\s*", r"\1: ", first)
    if code and str(code) not in first:
        first = f"{code}: {first}"
    return redact(_URL_SECRET.sub(r"\1?...", first))[:500]


def translate(error: BaseException, doing: str) -> IsthmusError:
    """The error in isthmus' words.

    Args:
        error: what the SDK raised.
        doing: what was tried, such as `submit the job`.
    """
    from azure.core import exceptions as azure

    if isinstance(error, IsthmusError):
        return error
    words = words_of(error)
    status = status_of(error)
    if isinstance(error, NoLogin) or (isinstance(error, azure.ClientAuthenticationError) and status is None):
        # azure-identity found no credential, or one that has expired.
        more = f": {error.cause.words}" if isinstance(error, NoLogin) else ""
        return Denied(f"no valid Azure credential{more}", where=doing, hint=_LOGIN)
    if status == 401:
        return Denied(f"Azure does not accept the credential: {words}", where=doing, hint=_LOGIN)
    if status == 403:
        hint = (
            "ask for the role AzureML Data Scientist on the workspace (Compute Operator to create clusters)"
        )
        return Denied(f"no permission: {words}", where=doing, hint=hint)
    if status == 404:
        return Missing(
            words, where=doing, hint="check subscription, resource group and names in backends.azure"
        )
    if status == 429:
        return Unreachable(f"Azure asks for fewer requests: {words}", where=doing, hint="try again")
    if status is not None and status >= 500:
        return Unreachable(f"Azure answers {status}: {words}", where=doing, hint="try again")
    if isinstance(error, (azure.ServiceRequestError, azure.ServiceResponseError, azure.IncompleteReadError)):
        return Unreachable(f"the connection failed: {words}", where=doing, hint="try again")
    if _NO_ROOM.search(words):
        hint = "ask for quota in the Azure portal, or name another of compute.offers"
        return PreflightRefused(words, where=doing, hint=hint)
    if isinstance(error, azure.AzureError) or type(error).__module__.startswith(("azure.", "marshmallow.")):
        return UsageError(f"refused: {words}", where=doing)
    raise error


@contextmanager
def azure_errors(doing: str) -> Iterator[None]:
    """Turns what the SDK raises into one line."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise NotInstalled("the azure backend", extra="azure", module=error.name or "azure") from error
    except IsthmusError:
        raise
    except Exception as error:
        raise translate(error, doing) from error
