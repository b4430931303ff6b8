"""Clients of AWS, and what AWS says as one line: which error it is for us, and what to do about it.

boto3 is imported when the first client is made. Which endpoints, credentials and profile it takes, its own chain decides.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import isthmus
from isthmus.core.recipe.secrets import redact
from isthmus.errors import IsthmusError, NotInstalled, PreflightRefused, StorageError, UsageError

Client = Any
"""A boto3 client; boto3 ships no types."""

ATTEMPTS = 8
"""Of one call, botocore's own: adaptive retries slow down where the service asks for fewer requests."""
_LONGEST = 400

_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"}
_NOBODY = {
    "InvalidClientTokenId", "UnrecognizedClientException", "SignatureDoesNotMatch", "AuthFailure",
    "InvalidAccessKeyId", "IncompleteSignature", "InvalidSignatureException", "MissingAuthenticationToken",
    "InvalidToken",
}  # fmt: skip
_DENIED = {
    "AccessDenied",
    "AccessDeniedException",
    "UnauthorizedOperation",
    "AuthorizationError",
    "403",
    "Forbidden",
}
_THROTTLED = {
    "Throttling", "ThrottlingException", "ThrottledException", "TooManyRequestsException", "RequestLimitExceeded",
    "SlowDown", "RequestThrottled", "RequestThrottledException", "PriorRequestNotComplete",
}  # fmt: skip
_CAPACITY = ("capacityerror", "insufficientcapacity", "insufficientinstancecapacity", "insufficient capacity")

_LOGIN = "aws sso login, or choose a profile: AWS_PROFILE=<name>"


class Clients:
    """boto3 clients of one region, made when they are first asked for.

    Args:
        region: None takes the environment's.
        session: a boto3 session to use instead of a new one.
    """

    def __init__(self, region: str | None = None, session: Any = None) -> None:
        self._region = region
        self._session = session
        self._made: dict[tuple[str, str | None, int], Client] = {}

    @property
    def session(self) -> Any:
        """The boto3 session. Raises NotInstalled, UsageError."""
        if self._session is None:
            if importlib.util.find_spec("boto3") is None:
                raise NotInstalled("the sagemaker backend", extra="sagemaker", module="boto3")
            import boto3

            with errors("open an AWS session"):
                self._session = boto3.Session(region_name=self._region)
        return self._session

    @property
    def region(self) -> str:
        """The region. Raises UsageError when nobody names one."""
        import os

        # boto3 itself looks at AWS_DEFAULT_REGION only.
        found = self._region or os.environ.get("AWS_REGION") or self.session.region_name
        if not found:
            raise UsageError(
                "no AWS region is known",
                hint="--set backends.sagemaker.region=us-east-1, or set AWS_REGION",
            )
        return str(found)

    def __call__(self, service: str, *, region: str | None = None, attempts: int = ATTEMPTS) -> Client:
        """A client with adaptive retries. Raises UsageError, NotInstalled."""
        key = (service, region, attempts)
        if key not in self._made:
            session = self.session
            from botocore.config import Config

            config = Config(
                retries={"mode": "adaptive", "total_max_attempts": attempts},
                connect_timeout=10,
                read_timeout=60,
                user_agent_extra=f"isthmus/{isthmus.__version__}",
            )
            with errors(f"reach {service}"):
                self._made[key] = session.client(service, region_name=region or self.region, config=config)
        return self._made[key]


@contextmanager
def errors(action: str, where: str | None = None) -> Iterator[None]:
    """Turns what boto3 raises while it does `action` into one line of ours; our own errors pass."""
    try:
        yield
    except IsthmusError:
        raise
    except Exception as error:
        translated = translate(error, action, where)
        if translated is None:
            raise
        raise translated from error


def code_of(error: BaseException) -> str:
    """AWS's code of an error, empty when it has none."""
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def message_of(error: BaseException) -> str:
    """AWS's words, without what looks like a credential, on one line."""
    response = getattr(error, "response", None)
    text = str(response.get("Error", {}).get("Message", "")) if isinstance(response, dict) else ""
    text = redact(" ".join((text or str(error)).split()))
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def is_missing(error: BaseException) -> bool:
    """Whether AWS says that there is no such thing; SageMaker says it as a ValidationException."""
    code, message = code_of(error), message_of(error).lower()
    if code in ("ResourceNotFound", "ResourceNotFoundException", "NoSuchEntity", "404", "NoSuchBucket"):
        return True
    return code == "ValidationException" and ("not found" in message or "could not find" in message)


def is_denied(error: BaseException) -> bool:
    """Whether AWS says that these credentials may not do that."""
    return code_of(error) in _DENIED


def is_passing(error: BaseException) -> bool:
    """Whether trying again later may help: no connection, throttled, or an error of the service's own."""
    from botocore.exceptions import ClientError, HTTPClientError
    from botocore.exceptions import ConnectionError as BotoConnectionError

    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return code_of(error) in _THROTTLED or int(status or 0) >= 500
    return isinstance(error, (HTTPClientError, BotoConnectionError, OSError))


def translate(error: BaseException, action: str, where: str | None = None) -> IsthmusError | None:
    """Our error for one of boto3's; None when it is none of boto3's.

    Args:
        action: what was tried, as it goes on after "cannot".
    """
    from botocore import exceptions as boto

    if isinstance(error, boto.ClientError):
        return _refusal(error, action, where)
    if isinstance(error, (boto.NoCredentialsError, boto.PartialCredentialsError)):
        return UsageError("no AWS credentials were found", where=where, hint=_LOGIN)
    if isinstance(error, (boto.CredentialRetrievalError, boto.SSOError, boto.TokenRetrievalError)):
        return UsageError(
            "the AWS credentials cannot be had; a login may have expired", where=where, hint=_LOGIN
        )
    if isinstance(error, boto.ProfileNotFound):
        return UsageError(message_of(error), where=where, hint="aws configure list-profiles")
    if isinstance(error, (boto.NoRegionError, boto.InvalidRegionError)):
        return UsageError(message_of(error), where=where, hint="set backends.sagemaker.region or AWS_REGION")
    if isinstance(error, boto.EndpointConnectionError):
        return StorageError(
            f"cannot {action}: no connection to {error.kwargs.get('endpoint_url', 'AWS')}",
            where=where,
            hint="is the network there, and is there a region of that name?",
        )
    if is_passing(error):
        return StorageError(
            f"cannot {action}: {message_of(error)}", where=where, hint="the network; try again"
        )
    if isinstance(error, boto.BotoCoreError):
        return UsageError(f"cannot {action}: {message_of(error)}", where=where)
    return None


def _refusal(error: Any, action: str, where: str | None) -> IsthmusError:
    code, message = code_of(error), message_of(error)
    low = f"{code} {message}".lower()
    if code in _EXPIRED:
        return UsageError("the AWS credentials have expired", where=where, hint=_LOGIN)
    if code in _NOBODY:
        return UsageError(f"AWS does not accept the credentials ({code})", where=where, hint=_LOGIN)
    if code in _DENIED:
        return UsageError(
            f"no permission to {action}: {message}", where=where, hint="let an administrator allow it"
        )
    if code == "ResourceLimitExceeded" or "service limit" in low:
        return PreflightRefused(
            f"cannot {action}: over the account's quota: {message}",
            where=where,
            hint="ask for more in Service Quotas, or use another sku, region or tier",
        )
    if any(word in low for word in _CAPACITY):
        return PreflightRefused(
            f"cannot {action}: no capacity: {message}",
            where=where,
            hint="try again later, or another sku, region or tier",
        )
    if is_passing(error):
        what = "AWS asks for fewer requests" if code in _THROTTLED else message
        return StorageError(f"cannot {action}: {what}", where=where, hint="try again in a minute")
    if code == "ValidationException" and "role" in low:
        return UsageError(
            f"cannot {action}: {message}",
            where=where,
            hint="backends.sagemaker.role_arn must exist and trust sagemaker.amazonaws.com",
        )
    return UsageError(
        f"cannot {action}: {message}" + (f" ({code})" if code else ""),
        where=where,
        hint="`isthmus doctor RECIPE --backend sagemaker` looks at all that a job needs",
    )
