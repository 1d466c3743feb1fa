"""Danger: a part of a model eats another part's slice, or a slice that moves when later ones are declared."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from monolith.errors import ConfigError
from monolith.features import Ragged
from monolith.original import FusedLayout
from monolith.original.fused_layout import layout_name
from monolith.original.slices import EmbeddingSlices
from monolith.table import SGD, Segment, Zeros

BATCH = {
    "user": torch.tensor([1, 2, 3]),
    "item": torch.tensor([7, 7, 8]),
    "clicks": Ragged.from_lists([[7, 8], [], [8]]),
    **{f"fc_slot_{n}": torch.tensor([n, n + 1, n]) for n in (1, 2, 3)},
}


def test_slices_are_those_of_the_whole_embeddings() -> None:
    slices = EmbeddingSlices()
    slices.create_embedding_feature_column("clicks", combiner="mean", shared_name="item")
    bias = slices.lookup_embedding_slice(["user", "item"], "bias", Segment(dim=1), out_type="add_n")
    first = slices.lookup_embedding_slice([("user", 2), ("item", 3)], "vec", out_type="concat")
    stacked = slices.lookup_embedding_slice({"item": 3, "clicks": 3}, "vec", out_type="stack")
    again = slices.lookup_embedding_slice(["user"], "bias", Segment(dim=1))
    layout = FusedLayout(slices.configs, segments=slices.segments)
    rows, out = layout.embeddings(BATCH), layout(BATCH)
    user, item, clicks = rows["user"], rows["item"], rows["clicks"]
    assert (user.shape[1], item.shape[1]) == (3, 4)
    assert torch.equal(bias(out), user[:, :1] + item[:, :1])
    assert torch.equal(first(out), torch.cat([user[:, 1:], item[:, 1:]], dim=1))
    assert torch.equal(stacked(out), torch.stack([item[:, 1:], clicks[:, 1:]], dim=1))
    (alone,) = again(out)
    assert torch.equal(alone, user[:, :1])
    torch.testing.assert_close(clicks[2], item[2])
    assert bias.outputs == (layout_name("bias", ["user", "item"]),)


GROUPS: dict[str | None, Callable] = {
    "add_n": lambda a, b: a + b,
    "concat": lambda a, b: torch.cat([a, b], dim=1),
    "stack": lambda a, b: torch.stack([a, b], dim=1),
    None: lambda a, b: (a, b),
}


@pytest.mark.parametrize("group_by", ["add_n", "concat"])
@pytest.mark.parametrize("out_type", GROUPS)
def test_groups_of_slots(out_type: str | None, group_by: str) -> None:
    slices = EmbeddingSlices()
    segment = Segment(dim=2)
    lookup = slices.lookup_embedding_slice([[1, 2], [3, 1]], "vec", segment, group_out_type=group_by, out_type=out_type)
    layout = FusedLayout(slices.configs, segments=slices.segments)
    one, two, three = (layout.embeddings(BATCH)[f"fc_slot_{n}"] for n in (1, 2, 3))
    group = (lambda a, b: a + b) if group_by == "add_n" else (lambda a, b: torch.cat([a, b], dim=1))
    expected = GROUPS[out_type](group(one, two), group(three, one))
    torch.testing.assert_close(lookup(layout(BATCH)), expected, rtol=0, atol=0)


def test_one_group_is_still_stacked() -> None:
    slices = EmbeddingSlices()
    lookup = slices.lookup_embedding_slice([[1, 2]], "vec", Segment(dim=2), out_type="stack")
    assert lookup(FusedLayout(slices.configs)(BATCH)).shape == (3, 1, 2)


def test_a_slice_trains_with_its_own_optimizer_and_sequences_stay_sequences() -> None:
    slices = EmbeddingSlices()
    slices.create_embedding_feature_column("clicks", combiner="first_n", max_seq_length=2)
    still = slices.lookup_embedding_slice(
        ["clicks"], "still", Segment(dim=1, initializer=Zeros(), optimizer=SGD(learning_rate=0.0))
    )
    moved = slices.lookup_embedding_slice(
        ["clicks"], "moved", Segment(dim=2, initializer=Zeros(), optimizer=SGD(learning_rate=1.0))
    )
    layout = FusedLayout(slices.configs, segments=slices.segments)
    out = layout(BATCH)
    assert moved(out)[0].shape == (3, 2, 2)
    (still(out)[0].sum() + moved(out)[0].sum()).backward()
    layout.embeddings.step()
    out = layout(BATCH)
    assert still(out)[0].abs().sum() == 0
    assert moved(out)[0][0].tolist() == [[-1.0, -1.0], [-2.0, -2.0]]


def declare(*calls: Callable[[EmbeddingSlices], object]) -> None:
    slices = EmbeddingSlices()
    for call in calls:
        call(slices)


WRONG: dict[str, tuple[Callable[[EmbeddingSlices], object], ...]] = {
    "nothing": (lambda s: s.lookup_embedding_slice([], "vec", Segment(dim=1)),),
    "no dim": (lambda s: s.lookup_embedding_slice(["user"], "vec"),),
    "a mixture": (lambda s: s.lookup_embedding_slice(["user", ("item", 2)], "vec", Segment(dim=1)),),
    "another dim": (
        lambda s: s.lookup_embedding_slice(["user"], "vec", Segment(dim=1)),
        lambda s: s.lookup_embedding_slice(["user"], "vec", Segment(dim=2)),
    ),
    "another join": (
        lambda s: s.lookup_embedding_slice(["user", "item"], "vec", Segment(dim=1)),
        lambda s: s.lookup_embedding_slice(["user", "item"], "vec", Segment(dim=1), out_type="add_n"),
    ),
    "described late": (
        lambda s: s.lookup_embedding_slice(["user"], "vec", Segment(dim=1)),
        lambda s: s.create_embedding_feature_column("user", combiner="mean"),
    ),
}


@pytest.mark.parametrize("calls", WRONG.values(), ids=WRONG)
def test_what_cannot_be_is_refused(calls: tuple[Callable[[EmbeddingSlices], object], ...]) -> None:
    with pytest.raises(ConfigError):
        declare(*calls)
