"""How a step is spread over the ranks, through Accelerate: ddp, fsdp (FSDP2) and hsdp, on CPU and GPU alike.

One code path for both devices needs one workaround: on a CPU, Accelerate ignores the FSDP plugin and silently
prepares DDP. So the state that Accelerate's own GPU branch would set is set here for both, and what comes
out is checked: an fsdp or hsdp run that does not hold DTensors on the right mesh does not start.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from isthmus.core.models.families import block_classes, blocks
from isthmus.core.recipe.schema import Parallel
from isthmus.core.recipe.stages import Optimizer as OptimizerSettings
from isthmus.core.train.blocks import prefetch_blocks, recompute
from isthmus.core.train.optimizers import make_optimizer, reset_optimizer
from isthmus.core.train.weights import full, trained_parameters
from isthmus.errors import TrainingFailed, UsageError

PROCESS_GROUP_TIMEOUT = datetime.timedelta(minutes=15)
"""Where no recipe says. A collective that takes longer means that a rank is gone; the others then fail instead of
hanging. In training the recipe's is longer than the watchdog waits, which names the rank before its peers give up."""


@dataclass(slots=True)
class Engine:
    """A model and its optimizer, prepared for this process."""

    accelerator: Any
    model: nn.Module
    """As prepared: call this one."""
    optimizer: torch.optim.Optimizer
    """torch's own, over the prepared parameters."""
    parameters: dict[str, nn.Parameter]
    """Clean name -> trained parameter."""
    device: torch.device
    rank: int
    world_size: int
    sharded: bool
    """Whether parameters are DTensors."""
    compute_dtype: torch.dtype
    """Dtype that inputs are given in: the sharded parameters' while computing, float32 under autocast."""

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """Mixed precision of replicas; sharded models compute in their sharding policy's dtype instead."""
        if self.sharded:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[None] = self.accelerator.autocast()
        return context

    @contextlib.contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        """Around a micro-batch's forward and backward pass: only the `last` one exchanges gradients."""
        if last or self.world_size == 1:
            yield
        else:
            with self.accelerator.no_sync(self.model):
                yield

    def clip(self, max_norm: float) -> Tensor:
        """Scale gradients down to `max_norm`; returns their global norm before, the same on every rank."""
        # Not through Accelerate: it compares lists of all parameters on every call.
        norm: Tensor = torch.nn.utils.clip_grad_norm_(self.parameters.values(), max_norm)
        return full(norm)

    def reshard(self) -> None:
        """Let go of gathered parameters, so that the next forward pass gathers the present ones."""
        if self.sharded:
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor


def join_processes(*, cpu: bool, timeout: datetime.timedelta = PROCESS_GROUP_TIMEOUT) -> tuple[int, int]:
    """Join torchrun's process group, or make one of this process alone; returns (rank, world size)."""
    backend = "gloo" if cpu else f"cpu:gloo,cuda:{collectives(os.environ)}"
    if not cpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        if "RANK" in os.environ and "MASTER_ADDR" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    return dist.get_rank(), dist.get_world_size()


def collectives(environ: Mapping[str, str]) -> str:
    """What exchanges gradients between GPUs: nccl, or what a cloud's image brings in its place.

    ISTHMUS_COLLECTIVES names it as `module:name`: the module registers the name with torch when it is imported.

    Raises:
        UsageError: the image does not have it.
    """
    module, _, name = environ.get("ISTHMUS_COLLECTIVES", "").partition(":")
    if not module:
        return "nccl"
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"the image does not have {module}: {error}", hint="leave it out: NCCL is the default"
        ) from error
    if name not in dist.Backend.backend_list:
        raise UsageError(f"{module} does not register {name!r} with torch")
    return name


def shard_size(parallel: Parallel, world_size: int, local_world_size: int) -> int:
    """Ranks that share one copy of the model.

    Raises:
        UsageError: `shard_size` does not divide the world size, or makes hsdp another strategy.
    """
    if parallel.strategy == "ddp":
        return 1
    if parallel.strategy == "fsdp":
        return world_size
    size = parallel.shard_size or min(local_world_size, world_size)
    if world_size % size:
        raise UsageError(
            f"shard_size {size} does not divide the world size {world_size}", where="parallel.shard_size"
        )
    if size == 1 and world_size > 1:
        raise UsageError(
            "hsdp with shard_size 1 shards nothing", where="parallel.shard_size", hint="use strategy ddp"
        )
    return size


def prepare(
    model: nn.Module, settings: OptimizerSettings, parallel: Parallel, *, cpu: bool | None = None
) -> Engine:
    """Prepare `model` (of `build_denoiser`) and its optimizer for training in this process.

    Raises:
        TrainingFailed: the prepared model does not hold what the strategy promises.
    """
    import accelerate
    from accelerate.utils import DataLoaderConfiguration

    cpu = not torch.cuda.is_available() if cpu is None else cpu
    rank, world_size = join_processes(cpu=cpu)
    sharded = parallel.strategy != "ddp"
    bf16 = parallel.precision == "bf16"
    _set_determinism(parallel.deterministic)
    if parallel.activation_checkpointing:
        recompute(model, every=2 if parallel.activation_checkpointing == "selective" else 1)
    if parallel.compile:
        backend = "inductor" if parallel.compile is True else parallel.compile
        for block in blocks(model):
            block.compile(backend=backend)
    _forget_accelerate()
    plugin = _sharding_plugin(model, bf16) if sharded else None
    accelerator = accelerate.Accelerator(
        cpu=cpu,
        mixed_precision="bf16" if bf16 and not sharded else "no",
        fsdp_plugin=plugin,
        kwargs_handlers=[accelerate.DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
        dataloader_config=DataLoaderConfiguration(),
    )
    if sharded:
        local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        _force_sharding(accelerator, plugin, shard_size(parallel, world_size, local_world), world_size)
    if not sharded:
        model.to(accelerator.device)
    optimizer = make_optimizer(model, settings, cpu=cpu)
    prepared, wrapped = accelerator.prepare(model, optimizer)
    engine = Engine(
        accelerator=accelerator,
        model=prepared,
        optimizer=wrapped.optimizer,
        parameters=trained_parameters(prepared),
        device=accelerator.device if not sharded else torch.device("cpu" if cpu else "cuda"),
        rank=rank,
        world_size=world_size,
        sharded=sharded,
        compute_dtype=torch.bfloat16 if bf16 and sharded else torch.float32,
    )
    _check(engine, parallel)
    if sharded:
        prefetch_blocks(prepared)
    reset_optimizer(engine.optimizer)
    return engine


def _set_determinism(wanted: bool) -> None:
    """torch's deterministic kernels for this process, or its usual ones."""
    if wanted:
        # cuBLAS reads it with its first product; without it, torch refuses products in this mode.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(wanted)
    torch.backends.cudnn.deterministic = wanted
    # cuDNN's search for the fastest kernel, off by default, may choose another one in each process.
    torch.backends.cudnn.benchmark = False


def _forget_accelerate() -> None:
    """Clear Accelerate's global state and its variables: the recipe alone says how to train."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")):
            del os.environ[name]


def _sharding_plugin(model: nn.Module, bf16: bool) -> Any:
    from accelerate import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecisionPolicy

    names = sorted(kind.__name__ for kind in block_classes(model))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else None,
        reduce_dtype=torch.float32 if bf16 else None,
        # Inputs are cast where they are made: a cast here would round timesteps and sizes to 8 bits.
        cast_forward_inputs=False,
    )
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        mixed_precision_policy=policy,
        auto_wrap_policy="transformer_based_wrap" if names else "no_wrap",
        transformer_cls_names_to_wrap=names,
        cpu_ram_efficient_loading=False,
        state_dict_type="SHARDED_STATE_DICT",
    )


def _force_sharding(accelerator: Any, plugin: Any, size: int, world_size: int) -> None:
    """Set what Accelerate's GPU branch sets for FSDP2, on any device, and the mesh for hsdp."""
    from accelerate import ParallelismConfig
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    for state in (AcceleratorState._shared_state, PartialState._shared_state):
        state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    if size < world_size:
        mesh = ParallelismConfig(dp_replicate_size=world_size // size, dp_shard_size=size)
        accelerator.state.parallelism_config = mesh
        accelerator.state.device_mesh = mesh.get_device_mesh(accelerator.device.type)
        mesh._validate_accelerator(accelerator)


def _check(engine: Engine, parallel: Parallel) -> None:
    """Hold the prepared model to what the strategy promises."""
    kinds = {isinstance(weight, DTensor) for weight in engine.parameters.values()}
    if kinds != {engine.sharded}:
        raise TrainingFailed(
            f"strategy {parallel.strategy} must {'' if engine.sharded else 'not '}hold DTensors, "
            "and Accelerate prepared something else",
            hint="this version of Accelerate is not one that isthmus was tested with",
        )
    if not engine.sharded:
        return
    world = engine.world_size
    size = shard_size(parallel, world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
    shape = (world,) if size == world else (world // size, size)
    placements = (Shard(0),) if size == world else (Replicate(), Shard(0))
    for name, weight in engine.parameters.items():
        assert isinstance(weight, DTensor)
        found = (tuple(weight.device_mesh.mesh.shape), tuple(weight.placements))
        if found != (shape, placements):
            raise TrainingFailed(
                f"{name} is placed {found[1]} on a mesh of {found[0]}, "
                f"strategy {parallel.strategy} needs {placements} on {shape}"
            )
    held = {id(weight) for group in engine.optimizer.param_groups for weight in group["params"]}
    if held != {id(weight) for weight in engine.parameters.values()}:
        raise TrainingFailed("the optimizer does not hold the sharded parameters")
