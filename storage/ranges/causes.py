"""What a store's refusal means: whether another try can help, and the plain words for it. One place, for every client."""

from __future__ import annotations

import email.utils
import errno
import re
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EIO: "the device reported an I/O error",
    errno.EMFILE: "too many open files",
    errno.ENOTDIR: "a part of the path is a file",
    errno.ESTALE: "the mount went away",
    errno.ENOTCONN: "the mount went away",
    errno.ENODEV: "the mount went away",
    errno.EINTR: "the read was interrupted",
    errno.ETIMEDOUT: "timed out",
    errno.ECONNREFUSED: "the connection was refused",
    errno.ECONNRESET: "the connection was reset",
    errno.ECONNABORTED: "the connection was reset",
    errno.EPIPE: "the connection was reset",
    errno.EHOSTUNREACH: "the host cannot be reached",
    errno.ENETUNREACH: "the network cannot be reached",
}
"""What a store's refusal means, by errno: the one place of these words."""

_PASSING = {
    *(errno.ESTALE, errno.ENOTCONN, errno.EIO, errno.EINTR, errno.ETIMEDOUT, errno.EAGAIN, errno.ENODEV),
    *(errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE),
    *(errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN),
}
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENOTDIR}


class Kind(Enum):
    """What follows from a refusal."""

    PASSING = "another try may succeed"
    THROTTLED = "the store asks for fewer requests"
    DENIED = "fresh credentials may help, once"
    MISSING = "there is no such file"
    FINAL = "no try will succeed"


@dataclass(frozen=True, slots=True)
class Cause:
    """Why one try failed."""

    kind: Kind
    words: str
    """Plain words: no address, no signature, no dump of a library."""
    retry_after_s: float | None = None
    """How long the store asks to wait, where its client lets that be seen."""
    hint: str | None = None


class ReadFailed(Exception):
    """One try failed and the reader itself knows why."""

    def __init__(self, kind: Kind, words: str) -> None:
        super().__init__(words)
        self.cause = Cause(kind, words)


def cause_of(error: BaseException) -> Cause | None:
    """What an error of a store or of its client means; None for one that is no refusal (a mistake in a program)."""
    chain = list(_chain(error))
    for seen in chain:
        if isinstance(seen, ReadFailed):
            return seen.cause
    for judge in (_by_tls, _by_proxy, _by_status, _by_text, _by_errno, _by_name):
        for seen in chain:
            cause = judge(seen)
            if cause is not None:
                return cause
    return None


def words_of(error: BaseException) -> str:
    """One line of plain words for any error of a store, with what could be a secret cut out."""
    cause = cause_of(error)
    return cause.words if cause is not None else f"{type(error).__name__}: {redacted(str(error))}"


def redacted(text: str) -> str:
    """Text of a library on one short line, without query strings, keys and tokens."""
    line = " ".join(text.split())
    line = re.sub(r"\?[^\s\"')]+", "", line)
    line = re.sub(r"(://)[^/@\s]+@", r"\1", line)
    line = re.sub(
        r"(?i)\b(sig|signature|token|secret|password|accountkey|sharedaccesssignature|authorization|credential)"
        r"(\"?\s*[=:]\s*\"?)(bearer\s+)?[^\s\"',;&]+",
        r"\1\2***",
        line,
    )
    line = re.sub(r"\b(AKIA|ASIA)[A-Z0-9]{12,}\b", "***", line)
    return line if len(line) <= 160 else line[:157] + "..."


def by_status(status: int, code: str = "", retry_after: object = None) -> Cause | None:
    """The meaning of an HTTP answer: its status, the store's own code for it, and its Retry-After. None for success."""
    named = f"{status} {code}" if code else f"{status}"
    if status in {429, 503} or code in _THROTTLING:
        return Cause(Kind.THROTTLED, f"the store asks to slow down ({named})", seconds(retry_after))
    if code in _EXPIRED or status == 401:
        return Cause(
            Kind.DENIED, f"the store does not accept the credentials ({named})", hint=_CREDENTIALS_HINT
        )
    if code == "RequestTimeTooSkewed":
        words = f"this machine's clock and the store's differ ({named})"
        return Cause(Kind.DENIED, words, hint="set the clock: time is what signatures are made of")
    if status == 403:
        return Cause(Kind.DENIED, f"the store denies access ({named})", hint=_CREDENTIALS_HINT)
    if status in {404, 410} or code in _ABSENT:
        return Cause(Kind.MISSING, f"there is no such file ({named})")
    if status in {408, 425} or status >= 500 or code in _PASSING_CODES:
        return Cause(Kind.PASSING, f"the store failed ({named})", seconds(retry_after))
    if status >= 400:
        return Cause(Kind.FINAL, f"the store refused the request ({named})")
    return None


def seconds(retry_after: object) -> float | None:
    """A Retry-After header in seconds: a number, or a date."""
    if retry_after is None:
        return None
    text = str(retry_after).strip()
    try:
        return max(float(text), 0.0)
    except ValueError:
        try:
            return max(email.utils.parsedate_to_datetime(text).timestamp() - time.time(), 0.0)
        except ValueError:
            return None


_CERTIFICATE_HINT = "add its issuer to the system's certificates, or name a bundle in AWS_CA_BUNDLE"
_CREDENTIALS_HINT = "check the credentials in the environment"
_THROTTLING = {
    *(
        "SlowDown",
        "ServerBusy",
        "Throttling",
        "ThrottlingException",
        "RequestLimitExceeded",
        "TooManyRequests",
    ),
    *(
        "ThrottledException",
        "RequestThrottled",
        "BandwidthLimitExceeded",
        "ProvisionedThroughputExceededException",
    ),
}
_EXPIRED = {
    *("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired", "InvalidToken"),
    *("AuthenticationFailed", "InvalidAuthenticationInfo", "InvalidAccessKeyId", "SignatureDoesNotMatch"),
}
_ABSENT = {"NoSuchKey", "NoSuchBucket", "BlobNotFound", "ContainerNotFound", "ResourceNotFound"}
_PASSING_CODES = {
    "RequestTimeout",
    "InternalError",
    "OperationTimedOut",
    "IncompleteBody",
    "RequestTimeTooSkewed",
}


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, then what caused it, at most ten deep."""
    seen: BaseException | None = error
    for _ in range(10):
        if seen is None:
            return
        yield seen
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)


def _by_tls(error: BaseException) -> Cause | None:
    """TLS's errors are OSErrors whose numbers are their own."""
    if not isinstance(error, ssl.SSLError):
        return None
    if isinstance(error, ssl.SSLCertVerificationError):
        return Cause(
            Kind.FINAL,
            f"the server's certificate is not trusted ({redacted(error.verify_message)})",
            hint=_CERTIFICATE_HINT,
        )
    return Cause(Kind.PASSING, f"TLS failed ({redacted(error.reason or str(error))})")


def _by_proxy(error: BaseException) -> Cause | None:
    """http.client tells a proxy's refusal in words alone."""
    found = re.match(r"Tunnel connection failed: (\d{3})", str(error)) if isinstance(error, OSError) else None
    if found is None:
        return None
    kind = Kind.PASSING if found[1].startswith("5") or found[1] == "429" else Kind.FINAL
    return Cause(kind, f"the proxy does not connect us ({found[1]})", hint="see https_proxy and no_proxy")


def _by_status(error: BaseException) -> Cause | None:
    """botocore (`response`), azure-core (`status_code`, `error_code`), aiohttp (`status`): by the shape of their errors."""
    answer: Any = getattr(error, "response", None)
    if isinstance(answer, Mapping) and "Error" in answer:
        metadata = answer.get("ResponseMetadata") or {}
        code = str(answer["Error"].get("Code") or "")
        status = metadata.get("HTTPStatusCode") or (int(code) if code.isdigit() else 0)
        headers = metadata.get("HTTPHeaders") or {}
        return by_status(int(status), "" if code.isdigit() else code, headers.get("retry-after"))
    for name in ("status_code", "status"):
        status = getattr(error, name, None)
        if isinstance(status, int) and status:
            headers = getattr(error, "headers", None) or getattr(answer, "headers", None) or {}
            retry_after = headers.get("Retry-After") if isinstance(headers, Mapping) else None
            code = getattr(error, "error_code", None) or ""
            return by_status(status, str(getattr(code, "value", code)), retry_after)
    return None


def is_range_refusal(error: BaseException) -> bool:
    """Whether a store answered a range request with another range than was asked for, or with none (416)."""
    text = str(error)
    return "UnexpectedRange" in text or "status code: 416" in text


_TEXTS: list[tuple[str, Kind, str, str | None]] = [
    ("UnexpectedRange", Kind.PASSING, "the answer is of another range than was asked for", None),
    ("dns error|failed to lookup|name resolution", Kind.PASSING, "the host name cannot be resolved", None),
    ("ConnectionRefused", Kind.PASSING, "the connection was refused", None),
    ("ConnectionReset|BrokenPipe|ConnectionAborted", Kind.PASSING, "the connection was reset", None),
    ("IncompleteBody|IncompleteMessage|UnexpectedEof", Kind.PASSING, "the body ended early", None),
    ("kind: Timeout|TimedOut|timed out", Kind.PASSING, "no byte came within the limit", None),
    (
        "redirect|Redirect",
        Kind.FINAL,
        "the store sends us elsewhere: the bucket lies in another region",
        "set AWS_REGION to the bucket's region",
    ),
    (
        "invalid peer certificate|UnknownIssuer",
        Kind.FINAL,
        "the server's certificate is not trusted",
        _CERTIFICATE_HINT,
    ),
    (
        "RangeNotSupported|NotPartial",
        Kind.FINAL,
        "the server does not answer range requests",
        "serve the dataset from a server that does",
    ),
    (
        "BadScheme|builder error",
        Kind.FINAL,
        "the address is not allowed",
        "use https:// or an endpoint of http://",
    ),
    ("HttpError", Kind.PASSING, "the connection failed", None),
]


def _by_text(error: BaseException) -> Cause | None:
    """obstore's errors carry nothing but text: the status, the body, and a dump of the Rust error."""
    text = str(error)
    if not type(error).__module__.startswith("obstore") and "Server returned non-2xx" not in text:
        return None
    status = re.search(r"status code: (\d{3})", text)
    if status is not None:
        code = re.search(r"<Code>(\w{1,60})</Code>", text)
        return by_status(int(status[1]), code[1] if code else "")
    for pattern, kind, words, hint in _TEXTS:
        if re.search(pattern, text):
            return Cause(kind, words, hint=hint)
    return Cause(Kind.FINAL, redacted(text.partition("Debug source")[0]))


def _by_errno(error: BaseException) -> Cause | None:
    if isinstance(error, TimeoutError):
        return Cause(Kind.PASSING, "timed out")
    if type(error).__name__ == "gaierror":
        return Cause(Kind.PASSING, "the host name cannot be resolved")
    number = getattr(error, "errno", None)
    if not isinstance(error, OSError) or not isinstance(number, int):
        return None
    if number in _PASSING:
        return Cause(Kind.PASSING, REASONS.get(number) or error.strerror or errno.errorcode[number])
    if number in _FULL:
        return Cause(Kind.FINAL, REASONS[number])
    if number == errno.ENOENT:
        return Cause(Kind.MISSING, "there is no such file")
    return None


_BY_NAME: list[tuple[Kind, str, set[str]]] = [
    (
        Kind.PASSING,
        "timed out",
        {"ConnectTimeoutError", "ReadTimeoutError", "ServerTimeoutError", "ConnectTimeout", "ReadTimeout"},
    ),
    (
        Kind.PASSING,
        "the body ended early",
        {
            "IncompleteRead",
            "IncompleteReadError",
            "ClientPayloadError",
            "ResponseStreamingError",
            "FSTimeoutError",
        },
    ),
    (
        Kind.PASSING,
        "the connection failed",
        {
            *("EndpointConnectionError", "ConnectionClosedError", "HTTPClientError", "ProxyConnectionError"),
            *("ServerDisconnectedError", "ClientConnectorError", "ClientOSError", "ServiceRequestError"),
            *(
                "ClientConnectionError",
                "ServiceResponseError",
                "RemoteDisconnected",
                "ProtocolError",
                "HTTPException",
                "ConnectionError",
            ),
        },
    ),
    (Kind.PASSING, "the service that gives credentials does not answer", {"MetadataRetrievalError"}),
    (
        Kind.DENIED,
        "the store does not accept the credentials",
        {"ClientAuthenticationError", "CredentialRetrievalError", "UnauthorizedSSOTokenError"},
    ),
    (
        Kind.FINAL,
        "no credentials were found",
        {"NoCredentialsError", "PartialCredentialsError", "CredentialUnavailableError", "ProfileNotFound"},
    ),
]


def _by_name(error: BaseException) -> Cause | None:
    """Errors without a number, by the names of their classes (and bases), so that no client needs to be imported."""
    if isinstance(error, ConnectionError | EOFError):
        return Cause(Kind.PASSING, "the connection was reset")
    names = {base.__name__ for base in type(error).__mro__}
    for kind, words, known in _BY_NAME:
        if names & known:
            return Cause(kind, words, hint=_CREDENTIALS_HINT if "credentials" in words else None)
    if isinstance(error, PermissionError):
        return Cause(Kind.DENIED, "permission denied", hint=_CREDENTIALS_HINT)
    if isinstance(error, FileNotFoundError):
        return Cause(Kind.MISSING, "there is no such file")
    if isinstance(error, OSError):
        return Cause(Kind.FINAL, redacted(str(error)) or type(error).__name__)
    return None
