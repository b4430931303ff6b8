"""The model against what it is fed: latents, resolutions and text."""

from __future__ import annotations

from typing import Any

from isthmus.core.models.presets import CLASSES, PRESETS, config_comes_with_weights, model_config
from isthmus.core.models.profiles import PACKED, arguments, downsampling
from isthmus.core.recipe.document import Path
from isthmus.core.recipe.problems import Problem, closest
from isthmus.core.recipe.schema import Recipe, TextEncoder

_CONFIG: Path = ("model", "config")
_TEXT: Path = ("encoders", "text")
_LONGEST = {"clip": 77, "minilm": 512}
"""Positions that an encoder has; T5's are relative."""


def check_model(recipe: Recipe) -> list[Problem]:
    """Problems of the model and its encoders. Those of text and resolution follow once the model itself is sound."""
    if recipe.code is not None and recipe.model.family in CLASSES:
        message = f"is of a model.family of your own; {recipe.model.family} is one of isthmus's"
        return [Problem(("code",), message, "leave it out")]
    if recipe.model.family not in CLASSES:
        return [*_own_family(recipe), *_buckets(recipe, 1), *_encoders(recipe)]
    if config_comes_with_weights(recipe.model):
        # The configuration is read with the weights; the trainer checks the recipe against it.
        return [*_guidance(recipe, None), *_encoders(recipe)]
    problems = _configuration(recipe) or [
        *_latents(recipe, config := _full(recipe)),
        *_resolutions(recipe, config),
        *_conditioning(recipe, config),
        *_guidance(recipe, config),
    ]
    return [*problems, *_encoders(recipe)]


def _own_family(recipe: Recipe) -> list[Problem]:
    """A team's own family is known to the job, which has its code; a misspelt one of ours is known here."""
    family, model = recipe.model.family, recipe.model
    path: Path = ("model", "family")
    if recipe.code is None and not _plugins():
        guess = closest(family, CLASSES)
        hint = f"{', '.join(CLASSES)}, or one of your own, from `code` or an installed plugin"
        return [
            Problem(path, f"there is no family `{family}`", f"did you mean `{guess}`?" if guess else hint)
        ]
    if model.preset is not None:
        message = f"presets are of isthmus's families, model.family is {family}"
        return [Problem(("model", "preset"), message, "leave it out")]
    return _guidance(recipe, None)


def _plugins() -> bool:
    """Whether a package is installed that could announce a family."""
    from importlib import metadata

    return any(point.name != "builtin" for point in metadata.entry_points(group="isthmus"))


def _guidance(recipe: Recipe, config: dict[str, Any] | None) -> list[Problem]:
    if config is not None and recipe.model.family == "sana" and config["guidance_embeds"]:
        message = "a sana with an embedded guidance scale is distilled, which is not trained here"
        return [Problem((*_CONFIG, "guidance_embeds"), message, "leave it out")]
    if "guidance_embedding" not in recipe.model.model_fields_set:
        return []
    if recipe.model.family != "flux" or (config is not None and not config["guidance_embeds"]):
        message = "is of a flux with guidance_embeds, which this model is not"
        return [Problem(("model", "guidance_embedding"), message, "leave it out")]
    return []


def _full(recipe: Recipe) -> dict[str, Any]:
    class_name, config = model_config(recipe.model)
    return {**arguments(class_name), **config}


def _configuration(recipe: Recipe) -> list[Problem]:
    model = recipe.model
    if model.preset is None:
        if not model.config:
            return [Problem(("model",), "needs a `preset`, a `config`, or both", _presets(model.family))]
    elif model.preset not in PRESETS:
        guess = closest(model.preset, PRESETS)
        hint = f"did you mean `{guess}`?" if guess else _presets(model.family)
        return [Problem(("model", "preset"), f"there is no preset `{model.preset[:60]}`", hint)]
    elif PRESETS[model.preset].family != model.family:
        message = f"{model.preset} is a {PRESETS[model.preset].family}, model.family is {model.family}"
        return [Problem(("model", "preset"), message, _presets(model.family))]
    class_name = CLASSES[model.family]
    known = arguments(class_name)
    problems = []
    for name, value in model.config.items():
        if name not in known:
            guess = closest(name, known)
            hint = f"did you mean `{guess}`?" if guess else f"it takes {', '.join(known)}"
            problems.append(Problem((*_CONFIG, name), f"is not an argument of {class_name}", hint))
        else:
            problems += _argument(name, value, known[name])
    return problems


def _argument(name: str, value: Any, default: Any) -> list[Problem]:
    """Whether a value is of the kind that the class's default is; and sizes that arithmetic here divides by."""
    items = value if isinstance(value, list) and value else [value]
    for item in items:
        number = isinstance(item, (int, float)) and not isinstance(item, bool)
        if isinstance(default, bool):
            wrong = not isinstance(item, bool)
        elif isinstance(default, int):
            wrong = not number or isinstance(item, float) or (name in _SIZES and item < 1)
        elif isinstance(default, float):
            wrong = not number
        elif isinstance(default, str):
            wrong = not isinstance(item, str)
        elif isinstance(default, list):
            wrong = not isinstance(value, list) or not value or type(item) is not type(default[0])
        else:
            wrong = name in _SIZES and (not isinstance(item, int) or isinstance(item, bool) or item < 1)
        if wrong or (isinstance(value, list) and name in _SCALARS):
            kinds = {
                bool: "true or false",
                int: "a whole number above 0",
                float: "a number",
                str: "a text",
                list: "a list",
            }
            kind = kinds.get(type(default), "a whole number above 0")
            return [
                Problem((*_CONFIG, name), f"must be {kind}, as the class's default is", f"default: {default}")
            ]
    return []


_SCALARS = {
    "in_channels", "out_channels", "patch_size", "joint_attention_dim", "pooled_projection_dim", "caption_channels",
    "projection_class_embeddings_input_dim", "addition_time_embed_dim", "num_layers", "pos_embed_max_size",
}  # fmt: skip
_SIZES = _SCALARS | {"cross_attention_dim", "encoder_hid_dim"}


def _presets(family: str) -> str:
    return f"presets of {family}: {', '.join(name for name, preset in PRESETS.items() if preset.family == family)}"


def _latents(recipe: Recipe, config: dict[str, Any]) -> list[Problem]:
    channels = recipe.encoders.autoencoder.latent_channels
    takes, gives = config["in_channels"], config["out_channels"]
    packed = PACKED**2 if recipe.model.family == "flux" else 1
    problems = []
    if channels * packed != takes:
        message = f"encoders.autoencoder.latent_channels {channels} is not the model's in_channels {takes}"
        if packed > 1:
            message = (
                f"encoders.autoencoder.latent_channels {channels} x {packed} cells of a token is not the model's"
                f" in_channels {takes}"
            )
        problems.append(Problem(("encoders", "autoencoder", "latent_channels"), message))
    if packed > 1 and gives not in (None, takes):
        path = (*_CONFIG, "out_channels") if "out_channels" in recipe.model.config else _CONFIG
        problems.append(Problem(path, f"out_channels {gives} is not in_channels {takes}", "leave it out"))
    elif gives is not None and gives not in (takes, 2 * takes):
        message = f"out_channels {gives} is neither in_channels {takes} nor twice that (noise and variance)"
        problems.append(
            Problem((*_CONFIG, "out_channels") if "out_channels" in recipe.model.config else _CONFIG, message)
        )
    return problems


def _resolutions(recipe: Recipe, config: dict[str, Any]) -> list[Problem]:
    factor, cells = recipe.encoders.autoencoder.factor, downsampling(recipe.model.family, config)
    multiple = factor * cells
    what = "down-sampling" if recipe.model.family == "unet" else "patch_size"
    problems = []
    for index, stage in enumerate(recipe.stages):
        path: Path = ("stages", index, "resolution")
        if stage.resolution % multiple:
            message = (
                f"stages[{index}].resolution {stage.resolution} is not a multiple of {multiple}"
                f" (autoencoder factor {factor} x the model's {what} {cells})"
            )
            near = max(multiple, round(stage.resolution / multiple) * multiple)
            problems.append(Problem(path, message, f"nearest: {near}"))
        limit = config.get("pos_embed_max_size")
        if limit is not None and stage.resolution // multiple > limit:
            message = f"{stage.resolution} px are {stage.resolution // multiple} patches a side, pos_embed_max_size is {limit}"
            problems.append(Problem(path, message, f"at most {limit * multiple}"))
    return [*problems, *_buckets(recipe, cells)]


def _buckets(recipe: Recipe, cells: int) -> list[Problem]:
    factor = recipe.encoders.autoencoder.factor
    multiple = factor * cells
    what = "down-sampling" if recipe.model.family == "unet" else "patch_size"
    problems: list[Problem] = []
    buckets = recipe.data.buckets
    several = buckets.min_ratio < 1 or buckets.max_ratio > 1
    if several and buckets.step % multiple:
        message = f"{buckets.step} is not a multiple of {multiple} (autoencoder factor {factor} x the model's {what} {cells})"
        problems.append(
            Problem(
                ("data", "buckets", "step"), message, f"such as {max(multiple, 64 // multiple * multiple)}"
            )
        )
    if not several and "step" in buckets.model_fields_set:
        message = "has no effect while min_ratio and max_ratio are 1: all pictures are cut square"
        problems.append(Problem(("data", "buckets", "step"), message, "leave it out"))
    return problems


def _encoders(recipe: Recipe) -> list[Problem]:
    problems = []
    seen: dict[str, int] = {}
    for index, encoder in enumerate(recipe.encoders.text):
        if encoder.name in seen:
            message = f"`{encoder.name}` is already the name of encoders.text[{seen[encoder.name]}]"
            problems.append(Problem((*_TEXT, index, "name"), message))
        seen.setdefault(encoder.name, index)
        longest = _LONGEST.get(encoder.kind)
        if longest and encoder.max_tokens > longest:
            message = f"{encoder.max_tokens} is more than the {longest} positions of {encoder.kind}"
            problems.append(Problem((*_TEXT, index, "max_tokens"), message))
        if encoder.kind in ("t5", "gemma") and encoder.pooled_width is not None:
            problems.append(
                Problem(
                    (*_TEXT, index, "pooled_width"), f"{encoder.kind} has no pooled vector", "leave it out"
                )
            )
    autoencoder = recipe.encoders.autoencoder
    most = 3 * autoencoder.factor**2
    if autoencoder.kind == "patch_pca" and autoencoder.latent_channels > most:
        message = f"{autoencoder.latent_channels} is more than the {most} values of a patch of factor {autoencoder.factor}"
        problems.append(Problem(("encoders", "autoencoder", "latent_channels"), message))
    return problems


def _conditioning(recipe: Recipe, config: dict[str, Any]) -> list[Problem]:
    """The rules by which `core/models/conditioning.py` joins the encoders for each family."""
    encoders = recipe.encoders.text
    rules = {"unet": _unet, "dit": _dit, "mmdit": _mmdit, "sana": _sana, "flux": _flux}
    return rules[recipe.model.family](encoders, config)


def _unet(encoders: list[TextEncoder], config: dict[str, Any]) -> list[Problem]:
    problems = _same_tokens([*enumerate(encoders)])
    wanted = config["encoder_hid_dim"] or config["cross_attention_dim"]
    wanted = wanted[0] if isinstance(wanted, list) else wanted
    width = sum(encoder.width for encoder in encoders)
    if width != wanted:
        problems.append(_widths(encoders, width, "is not", "cross_attention_dim", wanted))
    pooled = [index for index, encoder in enumerate(encoders) if encoder.pooled_width is not None]
    if config["addition_embed_type"] != "text_time":
        return [*problems, *(_unused_pooled(index, "this unet takes no pooled vector") for index in pooled)]
    problems += [
        _unused_pooled(index, "this unet takes the last one's pooled vector") for index in pooled[:-1]
    ]
    sizes, total = config["addition_time_embed_dim"], config["projection_class_embeddings_input_dim"]
    if sizes is None or total is None:
        message = "addition_embed_type text_time needs addition_time_embed_dim and projection_class_embeddings_input_dim"
        return [*problems, Problem(_CONFIG, message)]
    needs = total - 6 * sizes
    if not pooled:
        message = "this unet takes a pooled vector, and no text encoder has a pooled_width"
        problems.append(Problem(_TEXT, message, f"the last one's pooled_width, {needs}"))
    elif encoders[pooled[-1]].pooled_width != needs:
        message = (
            f"{encoders[pooled[-1]].pooled_width} is not the {needs} that the model takes"
            f" (projection_class_embeddings_input_dim {total} - 6 x addition_time_embed_dim {sizes})"
        )
        problems.append(Problem((*_TEXT, pooled[-1], "pooled_width"), message))
    return problems


def _dit(encoders: list[TextEncoder], config: dict[str, Any]) -> list[Problem]:
    if len(encoders) != 1:
        return [Problem(_TEXT, f"a dit takes one text encoder, not {len(encoders)}")]
    name = "caption_channels" if config["caption_channels"] is not None else "cross_attention_dim"
    problems = []
    if encoders[0].width != config[name]:
        problems.append(_widths(encoders, encoders[0].width, "is not", name, config[name]))
    if encoders[0].pooled_width is not None:
        problems.append(_unused_pooled(0, "a dit takes no pooled vector"))
    return problems


def _mmdit(encoders: list[TextEncoder], config: dict[str, Any]) -> list[Problem]:
    wanted = config["joint_attention_dim"]
    clip = [(index, encoder) for index, encoder in enumerate(encoders) if encoder.kind == "clip"]
    problems = _same_tokens(clip)
    width = sum(encoder.width for _, encoder in clip)
    if width > wanted:
        problems.append(
            _widths([encoder for _, encoder in clip], width, "is more than", "joint_attention_dim", wanted)
        )
    for index, encoder in enumerate(encoders):
        if encoder.kind != "clip" and encoder.width != wanted:
            message = f"{encoder.width} is not the model's joint_attention_dim {wanted}"
            problems.append(Problem((*_TEXT, index, "width"), message))
    pooled = sum(encoder.pooled_width or 0 for encoder in encoders)
    if pooled != config["pooled_projection_dim"]:
        each = " + ".join(str(encoder.pooled_width) for encoder in encoders if encoder.pooled_width) or "none"
        message = f"pooled widths {each} = {pooled} are not the model's pooled_projection_dim {config['pooled_projection_dim']}"
        problems.append(Problem(_TEXT, message))
    return problems


def _sana(encoders: list[TextEncoder], config: dict[str, Any]) -> list[Problem]:
    if len(encoders) != 1:
        return [Problem(_TEXT, f"a sana takes one text encoder, not {len(encoders)}")]
    problems = []
    if encoders[0].width != config["caption_channels"]:
        problems.append(
            _widths(encoders, encoders[0].width, "is not", "caption_channels", config["caption_channels"])
        )
    if encoders[0].pooled_width is not None:
        problems.append(_unused_pooled(0, "a sana takes no pooled vector"))
    return problems


def _flux(encoders: list[TextEncoder], config: dict[str, Any]) -> list[Problem]:
    problems = []
    axes, head = config["axes_dims_rope"], config["attention_head_dim"]
    if len(axes) != 3 or sum(axes) != head or any(axis % 2 for axis in axes):
        path = (*_CONFIG, "axes_dims_rope")
        message = f"axes_dims_rope {axes} must be three even numbers that add up to attention_head_dim {head}"
        problems.append(Problem(path, message))
    sequence = [(index, encoder) for index, encoder in enumerate(encoders) if encoder.kind != "clip"]
    clips = [(index, encoder) for index, encoder in enumerate(encoders) if encoder.kind == "clip"]
    if len(sequence) != 1 or len(clips) != 1:
        message = f"a flux takes one clip, for its pooled vector, and one other encoder; not {len(clips)} and {len(sequence)}"
        return [*problems, Problem(_TEXT, message)]
    (index, tokens), (number, clip) = sequence[0], clips[0]
    wanted, pooled = config["joint_attention_dim"], config["pooled_projection_dim"]
    if tokens.width != wanted:
        message = f"{tokens.width} is not the model's joint_attention_dim {wanted}"
        problems.append(Problem((*_TEXT, index, "width"), message))
    if tokens.pooled_width is not None:
        problems.append(_unused_pooled(index, "a flux takes the clip's pooled vector"))
    if clip.pooled_width != pooled:
        message = f"{clip.pooled_width or 'none'} is not the model's pooled_projection_dim {pooled}"
        problems.append(Problem((*_TEXT, number, "pooled_width"), message))
    return problems


def _same_tokens(encoders: list[tuple[int, TextEncoder]]) -> list[Problem]:
    return [
        Problem(
            (*_TEXT, index, "max_tokens"),
            f"{encoder.max_tokens} is not the {encoders[0][1].max_tokens} of {encoders[0][1].name}: their tokens are"
            " joined along channels",
        )
        for index, encoder in encoders[1:]
        if encoder.max_tokens != encoders[0][1].max_tokens
    ]


def _widths(encoders: list[TextEncoder], width: int, relation: str, name: str, wanted: int) -> Problem:
    each = " + ".join(str(encoder.width) for encoder in encoders)
    total = f"{each} = {width}" if len(encoders) > 1 else each
    path: Path = (*_TEXT, 0, "width") if len(encoders) == 1 else _TEXT
    return Problem(path, f"the text is {total} wide, which {relation} the model's {name} {wanted}")


def _unused_pooled(index: int, message: str) -> Problem:
    return Problem((*_TEXT, index, "pooled_width"), f"would be unused: {message}", "leave it out")
