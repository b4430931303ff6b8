"""Back to a checkpoint from before a loss spike, and on without its samples.

The order makes a crash harmless at every point. First the checkpoints behind the skipped range go: a run that dies
here resumes from before the spike, meets it again (the window of losses is in the checkpoint) and decides the same.
Then the plan's segment is written, in one object; from here on no attempt delivers the range. Only then is the
checkpoint loaded. Every rank sees the same loss, so all of them get here; rank 0 decides once for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from isthmus.core.train.agreement import on_rank_0, shared
from isthmus.core.train.spikes import Spike, first_skipped, rewinds, without
from isthmus.errors import CheckpointError
from isthmus.storage.rundir import RunDirectory
from isthmus.storage.stream.plan import Plan

if TYPE_CHECKING:
    from isthmus.core.recipe.alive import LossSpike
    from isthmus.core.recipe.schema import Recipe
    from isthmus.core.train.setup import Setup
    from isthmus.core.train.trainer_state import TrainerState


@dataclass(frozen=True, slots=True)
class Decision:
    """What is done about a spike."""

    first: int | None
    """The first step whose samples are left out; None when training goes on as it is."""
    message: str


class GoBack(Exception):
    """A spike is to be undone; raised on every rank after the same step."""

    def __init__(self, spike: Spike, first: int) -> None:
        super().__init__(spike.message)
        self.spike, self.first = spike, first


def answer(spike: Spike, recipe: Recipe, run: RunDirectory) -> GoBack | None:
    """Tells of a spike, and whether training has to go back. To be entered by all ranks."""
    settings = recipe.on_loss_spike
    assert settings is not None

    def decide() -> Decision:
        decision = _decide(spike, settings, run)
        fields = {"metric": "loss_spike", "step": spike.last, "value": spike.loss, "bound": spike.median}
        run.event("alarm", **fields, z_score=spike.z_score, message=decision.message)
        print(f"warning: {decision.message}", flush=True)
        return decision

    decision = on_rank_0(decide)
    return None if decision.first is None else GoBack(spike, decision.first)


def _decide(spike: Spike, settings: LossSpike, run: RunDirectory) -> Decision:
    if settings.action == "alarm":
        return Decision(None, spike.message)
    plan = Plan.from_json(run.segments())
    done = rewinds(plan)
    if done >= settings.max_rewinds:
        why = f"not undone: on_loss_spike.max_rewinds {settings.max_rewinds} is used up"
        return Decision(None, f"{spike.message}; {why}")
    first = first_skipped(plan, spike.last - 1, settings.skip)
    before = [step for step in run.checkpoints() if step <= first]
    if not before:
        why = f"not undone: no checkpoint is from before step {first + 1}; a shorter checkpoint.every would leave one"
        return Decision(None, f"{spike.message}; {why}")
    what = f"back to the checkpoint of step {before[-1]}, on without the samples of steps {first + 1} to {spike.last}"
    return Decision(first, f"{spike.message}; {what}")


def go_back(back: GoBack, setup: Setup) -> TrainerState:
    """Undoes the steps since a checkpoint from before the spike; returns its state. To be entered by all ranks.

    No checkpoint may be in flight.
    """
    run, first = setup.run, back.first

    def change() -> None:
        for step in run.checkpoints():
            if step > first:
                run.remove_checkpoint(step)
        plan = Plan.from_json(run.segments())
        run.append_segment(without(plan, first, back.spike.last - 1).to_json())

    on_rank_0(change)
    loaded = setup.checkpoints.load(
        setup.state.identity, before=first + 1, allow_changed_data=setup.recipe.data.allow_changed
    )
    if loaded is None:
        raise shared(
            CheckpointError(f"no checkpoint from before step {first + 1} can be read", where=run.uri)
        )
    state = loaded.but(identity=setup.state.identity, stages=setup.state.stages)

    def tell() -> None:
        text = f"went back to the checkpoint of step {state.step}; steps {first + 1} to {back.spike.last} get other samples"
        run.event("note", metric="loss_spike", step=state.step, message=text)
        print(text, flush=True)

    on_rank_0(tell)
    return state
