"""Tiny, randomly initialised models in their libraries' own file formats: for tests and rehearsals without a network.

They are real AutoencoderKL, AutoencoderDC, CLIP, T5 and Gemma models, loaded by the code that loads full-size ones; only their numbers
mean nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

WIDTH = 32
"""Of every text encoder's tokens."""
PROJECTION = 24
"""Of the pooled vector of the CLIP with projection."""
MAX_TOKENS = 16
_WORDS = "a an the red green blue yellow heart circle square dog cat photo of on in with"


def save_autoencoder(
    folder: Path, *, seed: int = 0, shift_factor: float | None = 0.1, latent_channels: int = 4
) -> Path:
    """An AutoencoderKL with a factor of 4."""
    import torch
    from diffusers import AutoencoderKL

    torch.manual_seed(seed)
    model = AutoencoderKL(
        block_out_channels=(8, 8, 16),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=latent_channels,
        scaling_factor=0.5,
        shift_factor=shift_factor,
    )
    model.save_pretrained(folder)
    return folder


def save_deep_autoencoder(folder: Path, *, seed: int = 0) -> Path:
    """An AutoencoderDC, as Sana uses, with 4 latent channels and a factor of 4."""
    import torch
    from diffusers import AutoencoderDC

    torch.manual_seed(seed)
    model = AutoencoderDC(
        latent_channels=4,
        attention_head_dim=8,
        encoder_block_types="ResBlock",
        decoder_block_types="ResBlock",
        encoder_block_out_channels=(8, 8, 16),
        decoder_block_out_channels=(8, 8, 16),
        encoder_layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        encoder_qkv_multiscales=((), (), ()),
        decoder_qkv_multiscales=((), (), ()),
        scaling_factor=0.5,
    )
    model.save_pretrained(folder)
    return folder


def save_gemma(folder: Path, *, seed: int = 0) -> Path:
    """A Gemma 2 of two layers, as Sana uses, with its tokenizer in the same folder."""
    import torch
    from transformers import Gemma2Config, Gemma2Model

    torch.manual_seed(seed)
    tokenizer = _tokenizer()
    config = Gemma2Config(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Gemma2Model(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_clip(folder: Path, *, projection: bool, seed: int = 0) -> Path:
    """A CLIP text model of three layers, with its tokenizer in the same folder."""
    import torch
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    torch.manual_seed(seed)
    tokenizer = _tokenizer()
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=MAX_TOKENS,
        projection_dim=PROJECTION,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = (CLIPTextModelWithProjection if projection else CLIPTextModel)(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_t5(folder: Path, *, seed: int = 0) -> Path:
    """A T5 encoder of two layers, with its tokenizer in the same folder."""
    import torch
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(seed)
    tokenizer = _tokenizer(start=False)
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=WIDTH,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    T5EncoderModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _tokenizer(*, start: bool = True) -> Any:
    """Words of a short list; `start` puts a first token before them, as CLIP does and T5 does not."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<unk>", "<s>", "</s>", *_WORDS.split()]
    numbers = {word: number for number, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if start else "$A </s>",
        special_tokens=[("<s>", numbers["<s>"]), ("</s>", numbers["</s>"])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=MAX_TOKENS,
    )
