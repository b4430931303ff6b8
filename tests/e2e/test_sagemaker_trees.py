"""Our worker as the user's program of AWS's own tools: the /opt/ml tree that they read, the variables that they set.

Neither passes a SIGTERM on, so our jobs start `start.py` themselves; but a team that has their tools in its image, or puts
our step into a pipeline of theirs, gets the same run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from images import image
from opt_ml import as_host, can_unshare, drivers, lay_out, network, toolkit
from training import figures, recipe_data, rows, trained

from isthmus.backends import payload
from isthmus.backends.settle import settle
from isthmus.backends.spec import Rendered
from isthmus.storage.rundir import RunDirectory

pytestmark = pytest.mark.long
needs_root = pytest.mark.skipif(not can_unshare(), reason="needs root, for namespaces as hosts")

TRAINING_JOB = "tiny-01"


class Job:
    """One job of some hosts, started by one of AWS's tools.

    Args:
        place: for everything.
        nodes: hosts, of one process each.
        data: a latent dataset, copied into a channel of each host.
    """

    def __init__(self, place: Path, nodes: int, data: str, **env: str) -> None:
        self.place = place
        self.nodes = nodes
        self.hosts = [f"algo-{number}" for number in range(1, nodes + 1)]
        self.run = RunDirectory(place / "rün mit Leerzeichen")
        self.env = env
        self.recipe = recipe_data("/opt/ml/input/data/data0", compute__nodes=nodes, compute__gpus_per_node=1)
        files = {"recipe.yaml": json.dumps(self.recipe), "start.py": payload.START}
        job = Rendered(
            backend="sagemaker",
            run_id="tiny",
            run_uri=self.run.uri,
            job_id=TRAINING_JOB,
            request={},
            files=files,
        )
        self.folder = Path(payload.put(job))
        self.data = Path(data)
        self.python = image(place / "image")
        self.output: dict[str, str] = {}
        self.trees: dict[str, Path] = {}

    def hyperparameters(self, **more: str) -> dict[str, str]:
        """start.py's options, as both tools turn them into arguments."""
        told = {"run": self.run.uri, "job": TRAINING_JOB, "cluster": "sagemaker", **more}
        return {name: json.dumps(value) for name, value in told.items()}

    def by_toolkit(self) -> dict[str, int]:
        """What a PyTorch image of AWS's runs: `train`, of sagemaker-training."""
        packages = next((self.place / "image" / "lib").glob("python3*/site-packages"))
        (packages / "toolkit.pth").write_text(f"{toolkit()}\n")
        command = [str(self.python), "-c", "from sagemaker_training.cli.train import main; main()"]
        options = self.hyperparameters(
            sagemaker_program="start.py", sagemaker_submit_directory="/opt/ml/input/data/isthmus"
        )
        more = {"SAGEMAKER_TRAINING_MODULE": "sagemaker_pytorch_container.training:main"}
        return self._run(command, options, "isthmus", **more)

    def by_driver(self) -> dict[str, int]:
        """What the SDK's ModelTrainer sends: `sm_train.sh`, made of its own template, which runs the basic driver."""
        templates: dict[str, Any] = {}
        exec((drivers() / "templates.py").read_text(), templates)
        script = templates["TRAIN_SCRIPT_TEMPLATE"].format(
            working_dir="cd /opt/ml/input/data/code \n",
            install_requirements="",
            execute_driver=templates["EXECUTE_BASIC_SCRIPT_DRIVER"],
        )
        sent = self.place / "sm_drivers"
        shutil.copytree(drivers() / "container_drivers", sent)
        (sent / "sm_train.sh").write_text(script.lstrip())
        (sent / "sourcecode.json").write_text(json.dumps({"entry_script": "start.py", "source_dir": "code"}))
        (sent / "distributed.json").write_text("{}")
        bin_folder = self.place / "bin"
        bin_folder.mkdir()
        for name in ("python3", "pip3"):  # it looks for both by name
            (bin_folder / name).symlink_to(self.python if name == "python3" else "/bin/true")
        command = ["/bin/bash", "/opt/ml/input/data/sm_drivers/sm_train.sh"]
        return self._run(
            command,
            self.hyperparameters(),
            "code",
            PATH=f"{self.python.parent}:{bin_folder}:{os.environ['PATH']}",
        )

    def _run(self, command: list[str], options: dict[str, str], code: str, **env: str) -> dict[str, int]:
        environment = {
            "PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "TRAINING_JOB_NAME": TRAINING_JOB,
            "AWS_DEFAULT_REGION": "us-east-1", "OMP_NUM_THREADS": "1", "ISTHMUS_LOOK_EVERY_S": "1", **self.env, **env,
        }  # fmt: skip
        channels = {code: self.folder, "data0": self.data}
        if (self.place / "sm_drivers").exists():
            channels["sm_drivers"] = self.place / "sm_drivers"
        with ExitStack() as stack:
            namespaces: list[str | None] = [None]
            if self.nodes > 1:
                namespaces = list(stack.enter_context(network(self.nodes)))
            processes = {}
            for host, namespace in zip(self.hosts, namespaces, strict=True):
                name = host if namespace else "localhost"
                tree = self.trees[host] = lay_out(
                    self.place / "trees", name, self.hosts if namespace else [name],
                    interface="eth0" if namespace else "lo", channels=channels, hyperparameters=options,
                )  # fmt: skip
                log = (self.place / f"{host}.log").open("w")
                stack.callback(log.close)
                processes[host] = subprocess.Popen(
                    as_host(name, tree, command, namespace),
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
                stack.callback(processes[host].kill)
            codes = {host: process.wait(240) for host, process in processes.items()}
        self.output = {host: (self.place / f"{host}.log").read_text() for host in self.hosts}
        return codes

    def failure(self, host: str) -> str:
        """What the cloud would show."""
        file = self.trees[host] / "output" / "failure"
        return file.read_text() if file.exists() else ""


@pytest.fixture(params=["toolkit", "driver"])
def tool(request: pytest.FixtureRequest) -> str:
    """Which of AWS's tools is the container's first process."""
    (toolkit if request.param == "toolkit" else drivers)()
    return str(request.param)


def start(job: Job, tool: str) -> dict[str, int]:
    """Exit codes of the hosts."""
    return job.by_toolkit() if tool == "toolkit" else job.by_driver()


@needs_root
@pytest.mark.root
@pytest.mark.parametrize("nodes", [1, 2])
def test_it_trains_as_their_users_program(
    tmp_path: Path, latents: dict[str, str], tool: str, nodes: int
) -> None:
    """Long: real training on one host and on two, whose ranks meet over a network of their own."""
    job = Job(tmp_path, nodes, latents["dit"])
    codes = start(job, tool)
    assert codes == dict.fromkeys(job.hosts, 0), job.output
    assert settle("finished", job.run.events()).state == "finished"
    (started,) = job.run.events("started")
    assert (started["job"], started["nodes"], started["world_size"]) == (TRAINING_JOB, nodes, nodes)
    assert not any(job.failure(host) for host in job.hosts)
    theirs = "Invoking user script" if tool == "toolkit" else "Running Basic Script driver"
    for host in job.hosts:
        assert theirs in job.output[host], "their tool started it"
        assert job.output[host].count("isthmus: the image has no isthmus; the job brings") == 1
    # The same losses, bit for bit, as here without any of it.
    recipe = tmp_path / "here.yaml"
    job.recipe["data"]["sources"][0]["uri"] = latents["dit"]
    job.recipe["compute"] |= {"nodes": 1, "gpus_per_node": nodes}
    recipe.write_text(json.dumps(job.recipe))
    here = trained(recipe, tmp_path / "here", nodes)
    assert figures(rows(job.run.uri)) == figures(here)


@needs_root
@pytest.mark.root
def test_the_second_hosts_cause_is_everybodys(tmp_path: Path, latents: dict[str, str], tool: str) -> None:
    """Long: two hosts. AWS's tools put down an exit code and the end of the output; the run directory has the cause."""
    plan = {
        "ISTHMUS_TRAINER_MODULE": "isthmus.core.rehearsal",
        "ISTHMUS_REHEARSAL": '{"0": "wait", "1": "usage"}',
    }
    job = Job(tmp_path, 2, latents["dit"], **plan)
    codes = start(job, tool)
    assert 0 not in codes.values(), job.output
    status = settle("failed", job.run.events(), cause="exit code 1")
    assert (status.state, status.exit_code, status.cause) == ("failed", 2, "shard 3: no such column")
    for host in job.hosts:
        assert "shard 3: no such column" in job.failure(host), (host, job.failure(host), job.output[host])


@pytest.fixture(autouse=True)
def _python_is_found() -> None:
    if not Path(sys.executable).resolve().is_relative_to("/opt"):
        return
    pytest.skip("this Python lies below /opt, which the hosts' own hides")
