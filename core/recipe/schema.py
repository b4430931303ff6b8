"""The recipe's schema: what may be written, with its unit and meaning. Strict: an unknown key is an error.

The docstring under each field becomes its description in the JSON schema and in the reference page.
Checks that need more than one section are in :mod:`isthmus.core.recipe.checks`.
"""

from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from isthmus.core.recipe.alive import LossSpike, NamedTracker, Watchdog
from isthmus.core.recipe.encoding import Encode
from isthmus.core.recipe.patch_mixer import PatchMixer
from isthmus.core.recipe.pictures import Pictures
from isthmus.core.recipe.stages import EMA, Objective, Optimizer, Positive, Section, Stage
from isthmus.core.recipe.units import Duration, Every, Interval, Repeat, Size

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,47}$")]


def _place(value: Any) -> Any:
    """One message for the whole union, in words."""

    def uris(part: Any) -> bool:
        several = (
            isinstance(part, list) and bool(part) and all(isinstance(item, str) and item for item in part)
        )
        return several or (isinstance(part, str) and bool(part))

    if uris(value) or (isinstance(value, dict) and all(uris(part) for part in value.values())):
        return value
    raise ValueError("a URI or path, a list of roots, or one of these for each backend")


def _run_place(value: Any) -> Any:
    parts = value.values() if isinstance(value, dict) else [value]
    if all(isinstance(part, str) and part for part in parts):
        return value
    raise ValueError("a URI or path, or one for each backend")


Place = Annotated[str | list[str] | dict[str, str | list[str]], BeforeValidator(_place)]
"""A URI, several roots of the same data, or one of these for each backend."""
RunPlace = Annotated[str | dict[str, str], BeforeValidator(_run_place)]
"""A URI, or one for each backend."""


class Model(Section):
    """The denoiser."""

    family: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,47}$")]
    """Diffusers' UNet2DConditionModel (unet), PixArtTransformer2DModel (dit), SD3Transformer2DModel (mmdit), SanaTransformer2DModel (sana), FluxTransformer2DModel (flux); or the name of a team's own, from `code` or a plugin."""
    preset: str | None = None
    """A named configuration of that family, such as `sdxl`, `sd3-medium`, `pixart-512`."""
    config: dict[str, Any] = {}  # noqa: RUF012
    """Arguments of the diffusers class; over the preset's where there is one. Of a team's own family: what its `build` is given."""
    init_from: RunPlace | None = None
    """A diffusers checkpoint (safetensors) whose weights a new run starts from: a folder or URI of a pipeline or of its denoiser, `hf://OWNER/NAME@COMMIT` of the hub, or one for each backend. Without `preset` and `config` it also gives the configuration."""
    patch_mixer: PatchMixer | None = None
    """A small transformer that all image tokens pass before a stage's `token_mask_ratio` leaves some out, and in sampling (MicroDiT); of dit, mmdit and flux. It is part of the model: diffusers' class and pipeline do not know it."""
    guidance_embedding: Annotated[float, Field(ge=0)] = 1.0
    """The guidance scale that a flux with `guidance_embeds` is told, in training and sampling; 1 is none."""


class Autoencoder(Section):
    """What turned pictures into latents, and turns samples back into pictures."""

    kind: Literal["diffusers", "patch_pca"]
    """diffusers: any of its autoencoders of pictures, such as AutoencoderKL (4 or 16 channels) and AutoencoderDC; patch_pca: the quickstart's closed-form linear autoencoder."""
    source: str
    """A folder, a URI or a hub name; for patch_pca the folder beside the shards it was fitted for."""
    latent_channels: Positive
    """Channels of a latent."""
    factor: Positive
    """Pixels per latent cell along one side."""


class TextEncoder(Section):
    """One text encoder; its tokens and pooled vector are columns of the shards."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")]
    """The column's name, such as `clip_l` or `t5`."""
    kind: Literal["clip", "t5", "gemma", "minilm"]
    """clip, t5 and gemma: transformers' classes (gemma: Gemma 1 to 3, as Sana uses); minilm: the sentence encoder that the quickstart brings."""
    source: str
    """A folder, a URI or a hub name."""
    max_tokens: Positive
    """Tokens stored for a caption; longer ones are cut."""
    width: Positive
    """Width of a token's embedding."""
    pooled_width: Positive | None = None
    """Width of the pooled vector, when the encoder's is used."""


class Encoders(Section):
    """What the shards were made with; checked against the dataset's fingerprints."""

    autoencoder: Autoencoder
    """Between pictures and latents."""
    text: Annotated[list[TextEncoder], Field(min_length=1)]
    """In the order in which the model joins them."""


class Source(Section):
    """One latent dataset."""

    uri: Place
    """Where it is: a URI or path, a list of roots, or one of these for each backend."""
    repeat: Repeat = Fraction(1)
    """Appearances of each sample in an epoch; fractions such as 1/2 or 1.5 are allowed."""


class Buckets(Section):
    """Aspect classes, fixed when a dataset is encoded."""

    step: Positive = 64
    """Widths and heights are multiples of this many pixels at the largest resolution."""
    min_ratio: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Smallest width / height."""
    max_ratio: Annotated[float, Field(ge=1)] = 1.0
    """Largest width / height."""


class Data(Section):
    """Where the latents are and how they are read."""

    sources: Annotated[list[Source], Field(min_length=1)]
    """Latent datasets, mixed by their repeats."""
    access: Literal["stream", "mount", "download"] = "stream"
    """stream: range reads from the store; mount: FastFile on SageMaker, ro_mount on Azure ML; download: a cache of whole shards on the node."""
    shuffle_window: Positive = 16384
    """Samples that are shuffled together, over all ranks and buckets."""
    lanes: Annotated[int, Field(gt=0, le=2**20)]
    """Deterministic sample streams. world size | lanes | global batch size, so at least the largest world size."""
    memory_limit: Size = 4_000_000_000
    """Per rank, for blocks read ahead; a launch whose order needs more is refused."""
    allow_changed: bool = False
    """Go on with a run whose data is no longer what it was begun with: samples before and after come from other epochs, so one may be seen twice or not at all."""
    checksums: bool = True
    """Compare what is read with the index's checksums; false saves a pass over the bytes and finds no flipped bit."""
    read_depth: Literal["auto"] | Annotated[int, Field(gt=0, le=256)] = "auto"
    """Blocks that a rank reads at the same time; auto: as many as hide the store's latency at the pace of training."""
    retry_budget: Duration = 300.0
    """How long a read that fails is tried again before the run fails; shorter than wait_limit."""
    wait_limit: Duration = 600.0
    """How long a step waits for its batch before the run fails; the message says for which block."""
    cache_limit: Size | None = None
    """download only: bytes of a node's disk that cached shards may take; null: what the data needs."""
    cache_directory: str | None = None
    """download only: a folder on the node; null: $ISTHMUS_CACHE_DIR, or one in the system's temporary folder."""
    buckets: Buckets = Buckets.model_construct()
    """How `isthmus data encode` cuts pictures; one choice for a dataset."""
    pictures: Pictures = Pictures.model_construct()
    """Which pictures `isthmus data encode` takes of its source, and what the source's columns are called."""


def _no_fp8(value: Any) -> Any:
    if isinstance(value, str) and value.lower().startswith(("fp8", "float8")):
        raise ValueError(
            "bf16 or fp32 (fp8 is not in this version: no GPU that computes in it was at hand to try it)"
        )
    return value


class Parallel(Section):
    """How a step is spread over the ranks."""

    strategy: Literal["ddp", "fsdp", "hsdp"] = "fsdp"
    """ddp: replicas; fsdp: FSDP2 over all ranks; hsdp: shards within `shard_size` ranks, replicas across."""
    shard_size: Positive | None = None
    """hsdp only: ranks that share one copy; default the processes of one node."""
    precision: Annotated[Literal["fp32", "bf16"], BeforeValidator(_no_fp8)] = "bf16"
    """Of the forward and backward pass; weights, reductions and optimizer stay fp32."""
    compile: bool | Literal["inductor", "aot_eager"] = False
    """torch.compile per block; a name chooses the compiler's backend."""
    activation_checkpointing: bool | Literal["selective"] = False
    """Recompute each block's activations in the backward pass; selective: every second block's."""
    deterministic: bool = False
    """Only kernels that give the same bits each time, at some cost in speed; a model with an operation that has none fails."""


class Checkpoint(Section):
    """When the state is saved and how much is kept."""

    every: Every = Interval(steps=1000)
    """`1000 steps` or `15 min`."""
    keep: Positive = 3
    """Newest committed checkpoints kept; older ones go after a new one is committed."""
    keep_every: Positive | None = None
    """Checkpoints at multiples of this many steps are never removed."""
    asynchronous: bool = True
    """Training stands still only while the state is copied to memory of the host; false: until the checkpoint is in the store."""
    wait_limit: Duration = 60.0
    """How long training waits, when a checkpoint is due, for the one that is still being written; then the new one is left out and a note says so."""
    retry_budget: Duration = 300.0
    """How long a store that refuses or is away is tried again, from its first failure, before the run fails."""


class Validation(Section):
    """What is watched during training."""

    prompts: list[str] = []  # noqa: RUF012
    """Captions drawn as a grid; their embeddings are stored beside the shards when encoding."""
    every: Every = Interval(steps=1000)
    """Rhythm of grids and validation loss."""
    loss_by_timestep: bool = False
    """Measure the loss at even timesteps over held-out samples."""
    sources: list[Source] = []  # noqa: RUF012
    """Held-out datasets for the loss; empty: a fixed set of training samples, marked as such."""
    samples: Positive = 256
    """Samples the loss is taken over."""
    timestep_bins: Positive = 8
    """Even timesteps, and bins of the reported loss."""
    guidance_scale: Annotated[float, Field(ge=1)] = 4.0
    """Classifier-free guidance of the grids; 1 is none."""
    sampling_steps: Positive = 25
    """Denoising steps of the grids."""
    scheduler: Literal["auto", "flow_match_euler", "ddim", "euler", "dpmsolver"] = "auto"
    """diffusers scheduler; auto: flow_match_euler for flow, ddim otherwise."""


class Offer(Section):
    """Somewhere to go, in order of preference."""

    backend: str
    """Such as `azure` or `sagemaker`."""
    region: str | None = None
    """The cloud's name of it, such as `italynorth` or `us-east-1`; absent: the backend's setting."""
    tier: Literal["on_demand", "spot", "reserved"] = "on_demand"
    """spot covers Azure's low priority."""
    sku: str | None = None
    """The cloud's name of the machine, when the GPU and count leave a choice."""


class Compute(Section):
    """How many machines of what kind."""

    nodes: Positive = 1
    """Machines."""
    gpus_per_node: Positive = 8
    """GPUs of a node; processes of a node where `gpu` is `none`. World size = nodes x gpus_per_node."""
    gpu: Literal[
        "none", "a100-40gb", "a100-80gb", "h100-80gb", "h200-141gb", "b200-180gb", "l40s-48gb", "a10g-24gb"
    ]
    """none: train on CPU."""
    offers: list[Offer] = []  # noqa: RUF012
    """In order: where to go, and where to go next."""
    max_restarts: Annotated[int, Field(ge=0)] = 10
    """Restarts after preemption before giving up."""


class Threshold(Section):
    """Bounds of one metric; a breach that lasts `for` raises an alarm event."""

    min: float | Literal["auto"] | None = None
    """auto derives the expected figure from the recipe."""
    max: float | None = None
    """Highest value without an alarm."""
    for_: Annotated[Duration, Field(alias="for")] = 600.0
    """How long it must last."""


class Monitor(Section):
    """Thresholds watched during training, per node."""

    gpu_utilization: Threshold | None = None
    """Percent busy, mean of a node's GPUs."""
    gpu_memory: Threshold | None = None
    """Percent of GPU memory used, mean of a node's GPUs."""
    gpu_energy_kilojoules: Threshold | None = None
    """Energy of a node's GPUs within `for`; 8 A100 at 400 W need 312 s for 1000 kJ."""
    fabric_gigabytes_per_s: Threshold | None = None
    """Bytes received over InfiniBand or EFA by a node."""
    data_wait: Threshold | None = None
    """Percent of step time spent waiting for data."""


class Budget(Section):
    """Caps over all restarts; the run checkpoints and stops when one is reached."""

    max_usd: Annotated[float, Field(gt=0)] | None = None
    """US dollars."""
    max_hours: Annotated[float, Field(gt=0)] | None = None
    """Hours of running, summed over attempts."""


class Recipe(Section):
    """Everything about a training run, cloud-neutral, with a small section for each backend."""

    version: Literal[1]
    """Of the recipe format."""
    name: Name
    """Lower-case letters, digits and dashes; run ids start with it."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Of initial weights, sample order, noise and timesteps."""
    model: Model
    """The denoiser that is trained."""
    encoders: Encoders
    """What the shards were made with."""
    data: Data
    """Where the latents are and how they are read."""
    objective: Objective = Objective.model_construct()
    """What the model learns to predict."""
    optimizer: Optimizer = Optimizer.model_construct()
    """How weights are updated."""
    stages: Annotated[list[Stage], Field(min_length=1)]
    """Progressive training, in order."""
    parallel: Parallel = Parallel.model_construct()
    """How a step is spread over the ranks."""
    ema: EMA = EMA.model_construct()
    """The averaged weights that are sampled and exported."""
    checkpoint: Checkpoint = Checkpoint.model_construct()
    """When the state is saved."""
    validation: Validation = Validation.model_construct()
    """Grids and validation loss."""
    compute: Compute
    """The machines."""
    run_directory: RunPlace
    """Where runs are written; a URI, or one for each backend. A run lives in `<run_directory>/<run id>`."""
    code: str | None = None
    """A folder of the team's own code with an `isthmus_plugin.py` that announces its denoisers for `model.family`; copied into the run by content hash (`core/packaging.py`), which a run keeps."""
    monitor: Monitor = Monitor.model_construct()
    """Alarms."""
    watchdog: Watchdog = Watchdog.model_construct()
    """What notices that training hangs, drags or is about to run out of disk."""
    on_loss_spike: LossSpike | None = None
    """What to do when the loss leaves its range; null: nothing."""
    trackers: list[NamedTracker] = []  # noqa: RUF012
    """Where else the figures are shown: `tensorboard`, `mlflow`, `wandb`, or sections with more."""
    budget: Budget = Budget.model_construct()
    """Caps on time and money."""
    encode: Encode | None = None
    """Makes a run encode pictures instead of training; `isthmus data encode --backend` fills it in."""
    backends: dict[str, dict[str, Any]] = {}  # noqa: RUF012
    """One section for each backend; the backend's own model validates it."""
