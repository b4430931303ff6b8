"""Which blocks gather ahead."""

from __future__ import annotations

import pytest
from training import MODELS

from isthmus.core.models.families import blocks, build_from_config
from isthmus.core.models.presets import CLASSES
from isthmus.core.recipe.schema import Parallel
from isthmus.core.recipe.stages import Optimizer
from isthmus.core.train.blocks import prefetch_blocks
from isthmus.core.train.parallel import prepare


@pytest.mark.parametrize("family", ["dit", "mmdit", "unet"])
def test_blocks_of_a_transformer_know_their_successor_and_those_of_a_unet_do_not(family: str) -> None:
    model = build_from_config(
        CLASSES[family], MODELS[family] | ({} if family == "unet" else {"num_layers": 4}), 0
    )
    prepared = prepare(model, Optimizer(), Parallel(strategy="fsdp", precision="fp32"), cpu=True).model
    chain = blocks(prepared)
    told = [
        [state._fsdp_param_group.modules[0] for state in block._get_fsdp_state()._states_to_forward_prefetch]
        for block in chain
    ]
    if family == "unet":
        assert prefetch_blocks(prepared) == 0
        assert not any(told)
    else:
        assert prefetch_blocks(prepared) == 3
        assert told == [[following] for following in chain[1:]] + [[]]
