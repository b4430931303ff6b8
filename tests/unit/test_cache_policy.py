"""What a cache keeps: by the order that was published, measured against the best choice in hindsight and against LRU."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np
import pytest

from isthmus.storage.ranges.cache_policy import (
    Forecast,
    Future,
    Plan,
    Upcoming,
    latest_first,
    make_way,
)
from isthmus.storage.stream.lines import Lines, SourceBlocks
from isthmus.storage.stream.order import Order
from isthmus.storage.stream.plan import Segment

Reads = list[tuple[str, int]]


def plan(reads: Reads, rest: dict[str, float] | None = None) -> Plan:
    return Plan("data").then(reads, rest or {})


def future(reads: Reads, name: str, size: int = 100, rest: dict[str, float] | None = None) -> Future:
    return Forecast([plan(reads, rest)]).of("data", name, size)


def way(
    wanted: str, room: int, kept: list[str], reads: Reads, **options: dict[str, float]
) -> list[str] | None:
    """What makes way for a file of 100 bytes."""
    forecast = Forecast([plan(reads, **options)])
    futures = [(name, forecast.of("data", name, 100), 100) for name in kept]
    return make_way(forecast.of("data", wanted, 100), 100, room, latest_first(futures))


def test_upcoming_reads_go_as_they_are_made_even_out_of_order_and_in_pieces() -> None:
    upcoming = Upcoming()
    upcoming.add([("a", 10), ("b", 10), ("a", 10)])
    assert upcoming.made("b", 10)
    assert upcoming.left() == [("a", 10), ("a", 10)]
    assert upcoming.made("a", 4)
    assert upcoming.left() == [("a", 6), ("a", 10)]
    assert not upcoming.made("c", 1)
    upcoming.add([(f"f{number}", 1) for number in range(1000)])
    assert upcoming.made("f999", 1)
    assert len(upcoming.left()) == 256  # what lies far behind a read that was made will not come
    upcoming.clear()
    assert upcoming.left() == []


def test_a_plan_knows_what_is_ahead_of_where_the_rank_is() -> None:
    here = plan([("a", 10), ("b", 10), ("a", 10), ("c", 10)])
    assert here.ahead() == ["a", "b", "c"]
    assert Plan(here.dataset, here.names, here.file, here.size, {}, done=25).ahead() == ["a", "c"]


def test_ranks_are_added_up_on_one_clock() -> None:
    one, two = plan([("a", 10), ("b", 10)]), plan([("c", 10), ("a", 10)], {"b": 2.0})
    forecast = Forecast([one, two])
    assert forecast.of("data", "a", 50).times.tolist() == [0, 10]
    assert forecast.of("data", "a", 50).bytes == 20
    assert forecast.of("data", "b", 50).total.tolist() == [10, 110]
    assert forecast.of("data", "b", 50).times.tolist() == [10, math.inf]
    assert forecast.of("other", "a", 50).first == math.inf


def test_room_is_filled_only_with_files_of_which_enough_is_read() -> None:
    first = ("x", 100)
    assert way("a", 100, [], [first, ("a", 50)]) == []
    assert way("a", 100, [], [first, ("a", 49)]) is None
    assert way("a", 100, [], [("a", 10), first], rest={"": 1.0}) == []
    assert way("a", 99, [], [first, ("a", 100)]) is None
    # What is read of a file before it can be there needs no copy.
    assert way("a", 100, [], [("a", 100), ("a", 49)]) is None


def test_what_is_never_needed_again_goes_first_then_what_is_needed_last() -> None:
    reads = [("x", 100), ("new", 100), ("new", 100), ("soon", 10), ("late", 10)]
    assert way("new", 0, ["soon", "gone", "late"], reads) == ["gone"]
    assert way("new", 0, ["soon", "late"], reads) == ["late"]
    # Once before anything else is needed saves nothing: the file would be fetched for the one read.
    assert way("new", 0, ["soon", "late"], [reads[0], *reads[2:]]) is None


def test_a_file_that_is_still_needed_does_not_make_way_for_one_block() -> None:
    blocks = [(name, 10) for _ in range(10) for name in ("new", "kept", "other")]
    assert way("new", 0, ["kept", "other"], blocks) is None
    # A source that is repeated four times is worth more than one that is not.
    assert way("new", 0, ["kept"], blocks + [("new", 10)] * 30) == ["kept"]


def test_a_folder_that_must_shrink_makes_way_for_more_than_the_file() -> None:
    assert way("a", -150, ["x", "y", "z"], [("b", 100), ("a", 100)]) == ["x", "y", "z"]


# --- on the real order ---


def reading_order(files: int, blocks: int, epochs: int, repeats: Sequence[int] = (1,)) -> Iterator[str]:
    """The files whose blocks one rank reads over some epochs, by the first step that needs each block.

    Each of the sources has so many files, and is read `repeats` times in an epoch.
    """
    total = files * blocks
    sources = [
        SourceBlocks(np.zeros(total, np.int64), np.full(total, 8, np.int64), Fraction(repeat))
        for repeat in repeats
    ]
    lines = Lines(sources, seed=3, stage=0, lanes=4, window=64)
    order = Order(lines, [Segment(0, 0, 0, 32)])
    seen: set[tuple[int, ...]] = set()
    for step in range(epochs * sum(repeats) * total * 8 // 32):
        rows = order.step(step).rows
        for read in np.stack([rows.source, rows.block, rows.epoch, rows.appearance], 1).tolist():
            if tuple(read) not in seen:
                seen.add(tuple(read))
                yield f"s{read[0]}f{read[1] // blocks}"


def ours(reads: list[str], block: int, size: int, room: int, horizon: int) -> int:
    """Bytes from the store when files are brought by our rules, one at most after each read."""
    cached: dict[str, None] = {}
    fetched = 0
    for at, name in enumerate(reads):
        forecast = Forecast([plan([(one, block) for one in reads[at : at + horizon]])])
        kept = latest_first((one, forecast.of("data", one, size), size) for one in cached)
        for wanted in [one for one in dict.fromkeys(reads[at : at + 16]) if one not in cached]:
            victims = make_way(forecast.of("data", wanted, size), size, room - size * len(cached), kept)
            if victims is not None:
                for victim in victims:
                    del cached[victim]
                cached[wanted] = None
                fetched += size
                break
        fetched += 0 if name in cached else block
    return fetched


def lru(reads: list[str], block: int, size: int, room: int) -> int:
    """Bytes from the store when every missing file is brought and the least recently used goes."""
    cached: OrderedDict[str, None] = OrderedDict()
    fetched = 0
    for name in reads:
        if name not in cached:
            fetched += size
            while size * (len(cached) + 1) > room:
                cached.popitem(last=False)
        cached[name] = None
        cached.move_to_end(name)
    return fetched


def best(reads: list[str], size: int, room: int) -> int:
    """Belady's minimum for files that are read in one go, with the choice to keep none."""
    following: dict[str, list[int]] = {}
    for at in range(len(reads) - 1, -1, -1):
        following.setdefault(reads[at], []).append(at)
    cached: set[str] = set()
    fetched = 0
    for name in reads:
        following[name].pop()
        fetched += 0 if name in cached else size
        cached.add(name)
        if size * len(cached) > room:
            cached.remove(max(cached, key=lambda one: following[one][-1] if following[one] else len(reads)))
    return fetched


@pytest.mark.parametrize(("share", "repeats"), [(0.25, (1,)), (0.5, (1,)), (0.3, (1, 3))])
def test_files_of_one_block_are_kept_nearly_as_well_as_in_hindsight(
    share: float, repeats: tuple[int, ...]
) -> None:
    files, epochs, size = 40, 4, 100
    reads = list(reading_order(files, 1, epochs, repeats))
    room = int(share * len(set(reads)) * size)
    mine = ours(reads, size, size, room, len(reads) // 2)
    figures = {"ours": mine, "best": best(reads, size, room), "LRU": lru(reads, size, size, room)}
    saved = {name: round(1 - fetched / (size * len(reads)), 3) for name, fetched in figures.items()}
    print(f"saved of {len(reads)} reads, repeats {repeats}, room for {share:.0%}: {saved}")
    assert figures["best"] <= mine < figures["LRU"]
    assert saved["ours"] > 0.8 * saved["best"]


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_files_of_many_blocks_stay_where_lru_fetches_every_file_for_a_block(share: float) -> None:
    files, blocks, epochs, block = 12, 16, 4, 100
    reads = list(reading_order(files, blocks, epochs))
    size, room = blocks * block, int(share * files * blocks * block)
    streamed = block * len(reads)
    mine = ours(reads, block, size, room, 2 * files * blocks)
    least_recent = lru(reads, block, size, room)
    print(
        f"fetched at {share:.0%} room: ours {mine / streamed:.3f} of streaming, LRU {least_recent / streamed:.2f}"
    )
    # Files that are kept from the start on are fetched once: nothing does better than that by much.
    assert mine <= (1 - share * (epochs - 1) / epochs + 0.03) * streamed
    assert least_recent > 5 * streamed
