"""Every error that isthmus raises on purpose.

::

    IsthmusError                exit 1   something failed; the run's data is safe
    ├── UsageError              exit 2   the user can fix it: a flag, a path, a name
    │   ├── RecipeError         exit 2   one or more problems in a recipe, each with its place
    │   ├── NotInstalled        exit 2   an extra is missing; says which
    │   ├── PluginError         exit 2   the backend or denoiser that was asked for comes from a broken plugin
    │   ├── DatasetNotFound     exit 2   no latent dataset where the recipe says there is one
    │   ├── DatasetMismatch     exit 2   the dataset was made with other encoders, or is another one than the run's
    │   ├── WorldSizeError      exit 2   this many ranks cannot share the lanes or the batch
    │   ├── PlaceNotFound       exit 2   a bucket or container that does not exist
    │   ├── RunExists           exit 2   the run directory holds a run of another recipe
    │   └── RunNotFound         exit 2   no run of that name or at that place
    ├── PreflightRefused        exit 3   a check before launch failed; nothing was started
    ├── DataError               exit 1   a shard's bytes are wrong
    │   └── CorruptShard        exit 1   names shard, row group, row and column
    ├── CheckpointError         exit 1   a checkpoint is damaged or does not fit
    ├── StorageError            exit 1   disk full, read-only, unreachable
    ├── LeaseLost               exit 1   another attempt owns the run directory
    ├── TrainingFailed          exit 1   loss not finite for too long, a rank died
    ├── Stopped                 exit 4   stopped on request or by the budget; not to be restarted
    └── Preempted               exit 75  evicted after a checkpoint; resume me

An error is one line (``str(error)``) and, where there is one, a hint: what to do about it.
The command line prints both and exits with ``exit_code``; a traceback only with ``ISTHMUS_DEBUG=1``.
"""

from __future__ import annotations

from typing import ClassVar


class IsthmusError(Exception):
    """Base of all errors here: a one-line message, an optional place and an optional hint.

    Args:
        message: what is wrong, one line.
        where: file, line, field, shard or URI it is about; printed before the message.
        hint: what the user can do; printed after it.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = " ".join(message.split())
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        line = f"{self.where}: {self.message}" if self.where else self.message
        return f"{line} ({self.hint})" if self.hint else line

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process borders in tests and pools; the default would lose where and hint.
        return (_rebuild, (type(self), self.__dict__.copy()))


def _rebuild(cls: type[IsthmusError], state: dict[str, object]) -> IsthmusError:
    error = cls.__new__(cls)
    Exception.__init__(error, state["message"])
    error.__dict__.update(state)
    return error


class UsageError(IsthmusError):
    """The user can fix it: a flag, a path, a name."""

    exit_code = 2


class RecipeError(UsageError):
    """One or more problems in a recipe.

    Args:
        problems: one line each, ``file:line: path.to.field: what is wrong (what is allowed)``.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(self.problems)


class NotInstalled(UsageError):
    """An optional dependency is missing.

    Args:
        what: what needs it, such as ``training`` or ``az:// paths``.
        extra: the extra that brings it, such as ``train``.
        module: the module that could not be imported.
    """

    def __init__(self, what: str, *, extra: str, module: str) -> None:
        super().__init__(
            f"{what} needs {module}, which is not installed",
            hint=f"pip install 'isthmus[{extra}]'",
        )


class PluginError(UsageError):
    """The backend or denoiser that was asked for comes from a plugin, or the recipe's code, that is broken."""


class DatasetNotFound(UsageError):
    """No latent dataset where the recipe says there is one."""


class DatasetMismatch(UsageError):
    """The dataset was made with other encoders, or is not the one this run was trained on."""


class WorldSizeError(UsageError):
    """This many ranks cannot share the lanes or the batch; the message lists the world sizes that can."""


class PlaceNotFound(UsageError):
    """A bucket or container that does not exist, or a folder in which something was to be written.

    Args:
        where: the URI.
    """

    def __init__(self, where: str) -> None:
        super().__init__(
            "there is no such bucket or container" if "://" in where else "there is no such folder",
            where=where,
            hint="correct the name, or make it first",
        )


class RunExists(UsageError):
    """The run directory holds a run of another recipe."""


class RunNotFound(UsageError):
    """No run of that name or at that place."""


class PreflightRefused(IsthmusError):
    """A check before launch failed; nothing was started."""

    exit_code = 3


class DataError(IsthmusError):
    """A shard's bytes are wrong, or a read failed past its retries."""


class CorruptShard(DataError):
    """Damaged data in a shard.

    Args:
        message: what is wrong.
        shard: the file's name within the dataset.
        row_group: the block's index in the file.
        row: the row within the block, when one row is to blame.
        column: the column, when one is to blame.
    """

    def __init__(
        self,
        message: str,
        *,
        shard: str,
        row_group: int | None = None,
        row: int | None = None,
        column: str | None = None,
        hint: str | None = None,
    ) -> None:
        parts = [f"shard {shard}"]
        if row_group is not None:
            parts.append(f"row group {row_group}")
        if row is not None:
            parts.append(f"row {row}")
        if column is not None:
            parts.append(f"column {column}")
        super().__init__(
            message,
            where=", ".join(parts),
            hint=hint or "copy the shard again from its source, or encode it again",
        )
        self.shard, self.row_group, self.row, self.column = shard, row_group, row, column


class CheckpointError(IsthmusError):
    """A checkpoint is damaged or does not fit the model."""


class StorageError(IsthmusError):
    """A store refused: disk full, read-only, unreachable, no permission."""


class LeaseLost(IsthmusError):
    """Another attempt owns the run directory."""


class TrainingFailed(IsthmusError):
    """Training cannot go on: loss not finite for too long, or a rank died."""


class Stopped(IsthmusError):
    """Stopped on request or by the budget; must not be restarted by itself."""

    exit_code = 4


class Preempted(IsthmusError):
    """Evicted after a checkpoint was committed; resume me."""

    exit_code = 75
