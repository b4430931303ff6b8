"""The service's errors, as its JSON protocol tells them."""

from __future__ import annotations

SERVER_SIDE = {"InternalFailure": 500, "InternalServerError": 500, "ServiceUnavailable": 503}


class ServiceError(Exception):
    """An error that a client library turns into a ClientError with this code.

    Args:
        code: such as ValidationException.
        message: as the service words it.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = SERVER_SIDE.get(code, 400)


class ValidationException(ServiceError):
    """The request is refused as it stands."""

    def __init__(self, message: str) -> None:
        super().__init__("ValidationException", message)
