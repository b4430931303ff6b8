"""Whether a stage fits into a GPU's memory, before anything starts: the arithmetic, and the smallest change that fits.

With P parameters and n ranks to a copy (1 under ddp, all ranks under fsdp, `shard_size` under hsdp) a rank holds 4 P / n
bytes each of weights, gradients and EMA, and 8 P / n for AdamW's moments (Rajbhandari et al. 2020, ZeRO, section 3.1, for
fp32 master weights; here the gradients stay fp32 too). Beside these: under ddp autocast's bf16 copies of the weights (2 P),
under fsdp and hsdp the blocks that are gathered at a time. Activations are what autograd keeps of one image
(`core/models/profiles.json`, in bf16; twice that in fp32) times the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from isthmus.core.models.mixer_figures import mixer_figures
from isthmus.core.models.profiles import Profile, arguments, profile
from isthmus.core.recipe.schema import Recipe

Checkpointing = bool | Literal["selective"]
USABLE = 0.94
"""Of the memory: the rest goes to the driver, kernels' workspaces and what lies between blocks."""

GPU_BYTES = {
    "a100-40gb": int(39.39 * 2**30),
    "a100-80gb": int(79.15 * 2**30),
    "h100-80gb": int(79.11 * 2**30),
    "h200-141gb": int(139.72 * 2**30),
    "b200-180gb": int(178.35 * 2**30),
    "l40s-48gb": int(44.39 * 2**30),
    "a10g-24gb": int(22.05 * 2**30),
}
"""Bytes of one GPU as PyTorch's out-of-memory messages give its total capacity; less than the name says in GiB."""

MUON_BLOCK_SHARE = 0.9
"""Of the parameters: matrices of the blocks, for which muon keeps one moment instead of two."""
EIGHT_BIT_BYTES = 2.1
"""Of both moments of a parameter under adamw_8bit, scales and the few in float32 included; 3.1 for Sana 1600m's odd widths."""
_GATHERED_BLOCKS = 3  # the one that computes, the next one, and the one before, not yet let go


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a recipe can change about memory."""

    micro_batch_size: int
    checkpointing: Checkpointing
    strategy: str
    shards: int
    """Ranks that share one copy of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """Bytes that autograd keeps of one image's forward pass."""

    plain: int
    recomputed: int
    """With every block recomputed."""

    @classmethod
    def of(cls, profile: Profile | None, resolution: int, precision: str) -> Images | None:
        """From a model's profile; None when it has none at that resolution."""
        if profile is None or resolution not in profile.activation_bytes:
            return None
        wide = 2 if precision == "fp32" else 1
        return cls(
            plain=wide * profile.activation_bytes[resolution],
            recomputed=wide * profile.checkpointed_activation_bytes[resolution],
        )

    def each(self, checkpointing: Checkpointing) -> int:
        """Bytes of an image under a setting; selective recomputes every second block."""
        if checkpointing == "selective":
            return (self.plain + self.recomputed) // 2
        return self.recomputed if checkpointing else self.plain


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """What one GPU holds in a stage, in bytes."""

    stage: int
    parameters: int
    gradients: int
    optimizer: int
    ema: int
    working: int
    """Copies of weights in the precision that computes: all of them under ddp and autocast, some blocks when sharded."""
    activations: int
    micro_batch_size: int
    bytes_per_image: int
    gpu: str
    gpu_bytes: int
    fits: bool
    change: str | None = None
    """The smallest change of the recipe that fits, as `--set` takes it; None when it fits or nothing would."""
    estimated: bool = False
    """Whether activations were interpolated between the profile's resolutions."""

    @property
    def total(self) -> int:
        """All of it."""
        held = self.parameters + self.gradients + self.optimizer + self.ema
        return held + self.working + self.activations

    def arithmetic(self) -> str:
        """One line: the terms, their sum, and what there is."""
        parts = [("weights", self.parameters), ("gradients", self.gradients), ("optimizer", self.optimizer)]
        parts += [("EMA", self.ema), ("working copies", self.working)]
        sums = " + ".join(f"{name} {gigabytes(size)}" for name, size in parts if size)
        about = " (interpolated)" if self.estimated else ""
        return (
            f"{sums} + activations {gigabytes(self.activations)} ({self.micro_batch_size} images x "
            f"{self.bytes_per_image / 1e9:.2f}{about}) = {gigabytes(self.total)} GB of {gigabytes(self.gpu_bytes)} GB, "
            f"{100 * USABLE:.0f} % of which can be used"
        )


def memory_fit(recipe: Recipe, stage: int, *, gpu: str | None = None) -> MemoryFit | None:
    """What a GPU of the recipe holds in a stage, and whether it fits.

    Args:
        stage: its index.
        gpu: another GPU than the recipe's.

    Returns:
        None where the recipe trains on CPU, or the model's figures are not in `core/models/profiles.json`: a configuration
        that comes with its weights, a team's own family, an unknown preset.
    """
    gpu = gpu or recipe.compute.gpu
    known = profile(recipe.model)
    if gpu not in GPU_BYTES or known is None:
        return None
    chosen = recipe.stages[stage]
    images, estimated = _images(recipe, known, stage)
    world_size = recipe.compute.nodes * recipe.compute.gpus_per_node
    now = Setting(
        micro_batch_size=chosen.micro_batch_size,
        checkpointing=recipe.parallel.activation_checkpointing,
        strategy=recipe.parallel.strategy,
        shards=shards(recipe),
    )
    held = _held(recipe, known, now)
    capacity = GPU_BYTES[gpu]

    def need(setting: Setting) -> int:
        return sum(_held(recipe, known, setting)) + setting.micro_batch_size * images.each(
            setting.checkpointing
        )

    fits = need(now) <= USABLE * capacity
    change = None
    if not fits:
        rank_batch = max(1, chosen.global_batch_size // world_size)
        other = smallest_change(
            now,
            lambda setting: need(setting) <= USABLE * capacity,
            world_size=world_size,
            rank_batch_size=rank_batch,
        )
        change = change_text(now, other, stage) if other else None
    weights, gradients, optimizer, ema, working = held
    return MemoryFit(
        stage=stage,
        parameters=weights,
        gradients=gradients,
        optimizer=optimizer,
        ema=ema,
        working=working,
        activations=now.micro_batch_size * images.each(now.checkpointing),
        micro_batch_size=now.micro_batch_size,
        bytes_per_image=images.each(now.checkpointing),
        gpu=gpu,
        gpu_bytes=capacity,
        fits=fits,
        change=change,
        estimated=estimated,
    )


def shards(recipe: Recipe) -> int:
    """Ranks that share one copy of the model under the recipe's strategy."""
    parallel, compute = recipe.parallel, recipe.compute
    world_size = compute.nodes * compute.gpus_per_node
    if parallel.strategy == "ddp":
        return 1
    if parallel.strategy == "fsdp":
        return world_size
    return min(parallel.shard_size or compute.gpus_per_node, world_size)


def _held(recipe: Recipe, known: Profile, setting: Setting) -> tuple[int, int, int, int, int]:
    """Bytes of weights, gradients, optimizer, EMA and working copies, whatever the batch."""
    count, ranks = known.parameters, setting.shards
    four = 4 * count // ranks
    moments = {"adamw": 2.0, "adamw_8bit": EIGHT_BIT_BYTES / 4, "muon": 2 - MUON_BLOCK_SHARE}[
        recipe.optimizer.name
    ]
    wide = 4 if recipe.parallel.precision == "fp32" else 2
    if setting.strategy == "ddp":
        # Nothing is gathered; in fp32 nothing is copied either.
        working = 2 * count if recipe.parallel.precision == "bf16" else 0
    elif ranks == 1:
        working = 0
    else:
        block = count // _block_count(known)
        working = min(_GATHERED_BLOCKS * wide * block + 4 * block, (wide + 4) * count)
    return four, four, int(moments * four), four, working


def _block_count(known: Profile) -> int:
    """Blocks that are sharded on their own (`core/models/families.py`: WRAP)."""
    config: Mapping[str, Any] = {**arguments(known.class_name), **known.config}
    if known.class_name == "UNet2DConditionModel":
        levels = len(config["block_out_channels"])
        each = config["layers_per_block"]
        layers = each if isinstance(each, int) else max(each)
        # One residual block a layer on the way down, one more a level on the way up, two in the middle.
        return int(levels * (2 * layers + 1) + 2)
    return max(1, int(config.get("num_layers") or 1) + int(config.get("num_single_layers") or 0))


def _images(recipe: Recipe, known: Profile, stage: int) -> tuple[Images, bool]:
    """Activation bytes of one image of a stage; whether they were interpolated."""
    chosen = recipe.stages[stage]
    # The same latent, seen with the profile's autoencoder.
    resolution = chosen.resolution * known.factor / recipe.encoders.autoencoder.factor
    found = Images.of(known, int(resolution), recipe.parallel.precision) if resolution % 1 == 0 else None
    estimated = found is None
    if found is None:
        wide = 2 if recipe.parallel.precision == "fp32" else 1
        found = Images(
            plain=wide * _between(known.activation_bytes, resolution),
            recomputed=wide * _between(known.checkpointed_activation_bytes, resolution),
        )
    if chosen.token_mask_ratio:
        # With fused attention the bytes of a block are linear in its tokens.
        kept = 1 - chosen.token_mask_ratio
        all_of = _mixer(recipe, known, resolution)
        found = Images(
            plain=int((found.plain - all_of.plain) * kept) + all_of.plain,
            recomputed=int((found.recomputed - all_of.recomputed) * kept) + all_of.recomputed,
        )
    return found, estimated


def _mixer(recipe: Recipe, known: Profile, resolution: float) -> Images:
    """The patch mixer's part of an image's bytes: it sees all tokens."""
    if recipe.model.patch_mixer is None:
        return Images(plain=0, recomputed=0)
    config = {**arguments(known.class_name), **known.config}
    tokens = int((resolution / (known.factor * known.patch_size)) ** 2)
    found = mixer_figures(recipe.model, config, tokens, known.text_tokens)
    wide = 2 if recipe.parallel.precision == "fp32" else 1
    return Images(plain=wide * found.activation_bytes, recomputed=wide * found.checkpointed_activation_bytes)


def _between(figures: Mapping[int, int], resolution: float) -> int:
    """On the line in pixels through the two nearest resolutions: with attention fused, activations grow with the tokens."""
    at = resolution**2
    known = sorted((pixels**2, value) for pixels, value in figures.items())
    if len(known) == 1:
        return int(known[0][1] * at / known[0][0])
    (low, a), (high, b) = sorted(sorted(known, key=lambda entry: abs(entry[0] - at))[:2])
    return max(1, int(a + (b - a) * (at - low) / (high - low)))


def smallest_change(
    now: Setting, fits: Callable[[Setting], bool], *, world_size: int, rank_batch_size: int
) -> Setting | None:
    """The first setting that fits, in the order of what a change costs in speed; None when none does."""
    candidates = changes(now, world_size=world_size, rank_batch_size=rank_batch_size)
    return next((setting for setting in candidates if fits(setting)), None)


def changes(now: Setting, *, world_size: int, rank_batch_size: int) -> Iterator[Setting]:
    """Settings by what they cost in speed: smaller micro-batches, then recomputing, then sharding, then all of it."""
    recomputing: list[Checkpointing] = [now.checkpointing]
    options: list[Checkpointing] = ["selective", True]
    recomputing += [option for option in options if _more(option, now.checkpointing)]
    sharding = [now]
    if now.shards < world_size:
        sharding.append(replace(now, strategy="fsdp", shards=world_size))
    # A fraction of the micro-batch costs little as long as it is not tiny.
    all_smaller = smaller_micro_batches(now.micro_batch_size, rank_batch_size)
    half = [size for size in all_smaller if 4 * size >= now.micro_batch_size]
    for sizes in ([now.micro_batch_size, *half], [now.micro_batch_size, *all_smaller]):
        for base in sharding:
            for checkpointing in recomputing:
                for size in sizes:
                    yield replace(base, micro_batch_size=size, checkpointing=checkpointing)


def smaller_micro_batches(micro_batch_size: int, rank_batch_size: int) -> list[int]:
    """Smaller micro-batches that divide the rank's batch, largest first."""
    return [size for size in range(micro_batch_size - 1, 0, -1) if rank_batch_size % size == 0]


def change_text(now: Setting, setting: Setting, stage: int) -> str:
    """What differs, as `--set` takes it: `stages.1.micro_batch_size=4 and parallel.strategy=fsdp`."""
    changed = []
    if setting.micro_batch_size != now.micro_batch_size:
        changed.append(f"stages.{stage}.micro_batch_size={setting.micro_batch_size}")
    if setting.checkpointing != now.checkpointing:
        changed.append(f"parallel.activation_checkpointing={str(setting.checkpointing).lower()}")
    if setting.strategy != now.strategy:
        changed.append(f"parallel.strategy={setting.strategy}")
    return " and ".join(changed)


def gigabytes(size: float) -> str:
    """`10.3`, of bytes."""
    return f"{size / 1e9:.1f}"


def _more(option: Checkpointing, than: Checkpointing) -> bool:
    order: list[Checkpointing] = [False, "selective", True]
    return order.index(option) > order.index(than)
