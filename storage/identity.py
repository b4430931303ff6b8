"""Azure's identity of this process: one, whoever asks for a token, so that what cannot log in is asked once.

azure-identity's chain of credentials takes seconds where it finds nobody, and the clients of Blob try again, with pauses, whatever
it says: a command that looks at five places would take minutes to say five times that nobody is logged in.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from isthmus.storage.ranges.causes import Cause, Kind, ReadFailed

LIMIT_S = 30.0
"""For which the chain may look for somebody."""
REMEMBERED_S = 120.0
"""For which nobody is asked again after nobody was found: longer than a command that looks at places one after the other."""
HINT = (
    "log in with `az login`, or set AZURE_CLIENT_ID with its secret; a key: AZURE_STORAGE_CONNECTION_STRING"
)
_EARLY_S = 300.0
"""Before its end a token is asked for anew."""


class NoLogin(ReadFailed):
    """azure-identity found nobody. No error of azure-core: its clients would try again."""

    def __init__(self, words: str) -> None:
        super().__init__(Kind.FINAL, words)
        self.cause = Cause(Kind.FINAL, words, hint=HINT)


class Identity:
    """A token credential, as azure-core and obstore take one. Safe to use from several threads.

    A failure is remembered, and given to whoever asks next, as long as nobody was ever found: then it says that there is no
    login. Later it is a disturbance, such as of a machine's metadata service, and goes to who asked, as azure-identity says it.

    Args:
        make: makes the credential that is asked; None: azure-identity's default chain.
        limit_s: see `LIMIT_S`.
    """

    def __init__(self, make: Callable[[], Any] | None = None, *, limit_s: float = LIMIT_S) -> None:
        self._make, self._limit_s = make or _chain, limit_s
        self._lock = threading.Lock()
        self._credential: Any = None
        self._tokens: dict[tuple[str, ...], Any] = {}
        self._worked = False
        self._failed: tuple[float, str] | None = None
        self._environment: object = None

    def __repr__(self) -> str:
        return "Identity()"  # fsspec tells file systems apart by it

    def get_token(self, *scopes: str, **more: Any) -> Any:
        """An AccessToken for the scopes.

        Raises:
            NoLogin: nobody was found, now or a moment ago.
            azure.core.exceptions.AzureError: it worked before, and does not now.
        """
        with self._lock:
            if (environment := _environment()) != self._environment:
                # Somebody else is meant now.
                self._environment, self._worked = environment, False
                self._reset()
            plain = not any(more.get(name) for name in ("claims", "tenant_id"))
            token = self._tokens.get(scopes) if plain else None
            if token is not None and token.expires_on - time.time() > _EARLY_S:
                return token
            if self._failed is not None and time.monotonic() - self._failed[0] < REMEMBERED_S:
                raise NoLogin(self._failed[1])
            token = self._ask(scopes, more)
            self._worked, self._failed = True, None
            if plain:
                self._tokens[scopes] = token
            return token

    def forget(self) -> None:
        """The next who asks has somebody looked for anew: a token was refused."""
        with self._lock:
            self._reset()

    def close(self) -> None:
        """Nothing: it is others', too."""

    def _reset(self) -> None:
        self._credential, self._failed = None, None
        self._tokens.clear()

    def _ask(self, scopes: tuple[str, ...], more: dict[str, Any]) -> Any:
        if self._credential is None:
            self._credential = self._make()
        credential, answer = self._credential, SimpleQueue[tuple[Any, BaseException | None]]()

        def ask() -> None:
            try:
                answer.put((credential.get_token(*scopes, **more), None))
            except BaseException as error:  # noqa: BLE001  it is raised where it was asked for
                answer.put((None, error))

        # What hangs in a login cannot be ended; at least nobody waits for it.
        threading.Thread(target=ask, name="azure-identity", daemon=True).start()
        try:
            token, error = answer.get(timeout=self._limit_s)
        except Empty:
            error = _unanswered(self._limit_s)
            token, self._credential = None, None
        if error is None:
            return token
        if self._worked or not _of_azure(error):
            raise error
        words = str(error) if isinstance(error, TimeoutError) else "nobody is logged in to Azure"
        self._failed = time.monotonic(), words
        raise NoLogin(words) from error


class AsyncIdentity:
    """An `Identity` for clients that run in an event loop, which it does not hold up."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    def __repr__(self) -> str:
        return f"AsyncIdentity({self._identity!r})"

    async def get_token(self, *scopes: str, **more: Any) -> Any:
        """See `Identity`."""
        import asyncio  # not for everybody who opens a file

        return await asyncio.to_thread(self._identity.get_token, *scopes, **more)

    async def close(self) -> None:
        """Nothing: it is others', too."""

    async def __aenter__(self) -> AsyncIdentity:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None


def _environment() -> object:
    """What decides who is found, beside logins on the disk."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("AZURE_", "IDENTITY_", "MSI_", "IMDS_"))
    }


def _chain() -> Any:
    from azure.identity import DefaultAzureCredential

    return DefaultAzureCredential()


def _of_azure(error: BaseException) -> bool:
    return isinstance(error, TimeoutError) or any(
        base.__name__ == "AzureError" for base in type(error).__mro__
    )


def _unanswered(limit_s: float) -> BaseException:
    return TimeoutError(f"Azure's login did not answer within {limit_s:g} s")


def shared() -> Identity:
    """The process's own."""
    return _SHARED


_SHARED = Identity()
