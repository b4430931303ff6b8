"""An Azure ML that really runs command jobs, for rehearsals and tests.

    with AzureMLEmulator(folder) as cloud:
        os.environ |= cloud.environment()       # before azure.ai.ml is imported
        ...                                     # MLClient(DefaultAzureCredential(), subscription, group, workspace)
        cloud.evict("my-job")

`python -m isthmus.emulators.azureml --port P --folder F` serves until it is interrupted. What it refuses, and by which rule
of the service: `isthmus.emulators.azureml.rules.RULES`. What it does not emulate: container images (this machine's files
serve as such, see `Image`), registries, pipelines and sweeps, several storage accounts, MPI; `rw_mount` outputs are folders
that are written to the store every second.
"""

from __future__ import annotations

from isthmus.emulators.azureml.emulator import AzureMLEmulator
from isthmus.emulators.azureml.nodes import Host
from isthmus.emulators.image import Image

__all__ = ["AzureMLEmulator", "Host", "Image"]
