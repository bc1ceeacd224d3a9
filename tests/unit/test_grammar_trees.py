"""Any well-formed strategy tree is read, each node under its own path."""

from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pairs import examples
from tests.unit.plan_requests import strategy_of

from whale_train.errors import Fault
from whale_train.strategies.grammar.nodes import Node, Pipeline, read_strategy

counts = st.integers(1, 64)
patterns = st.sampled_from(["*", "head", "encoder.*", ["a", "b.c"]])


def optional(**values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=values)


def nodes(inside: str | None, depth: int) -> st.SearchStrategy[Any]:
    """One node that has a meaning directly inside a node of kind `inside`."""
    deeper = {} if depth == 0 else {"of": None}

    def body(kind: str, **values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        if deeper:
            values["of"] = trees(kind, depth - 1)
        return st.builds(lambda given: {kind: given}, optional(**values))

    split = body(
        "split",
        degree=counts | st.just("auto"),
        dim=st.sampled_from(["auto", "tensor", "vocabulary", "experts", "sequence"]),
        modules=patterns,
    ) | body(
        "split",
        degree=counts,
        dim=st.just("context"),
        attention=st.sampled_from(["auto", "heads", "ring"]),
    ).filter(lambda node: "dim" in node["split"])
    if inside == "split":
        return split
    choices = [split]
    choices.append(body("replicate", degree=counts, zero=st.integers(0, 3), modules=patterns))
    if inside == "pipeline":
        recompute = st.sampled_from(["none", "full", "auto"])
        choices.append(body("stage", modules=patterns | st.just("auto"), recompute=recompute))
    if depth and inside not in ("pipeline", "stage"):
        stages = st.lists(nodes("pipeline", depth - 1), min_size=1, max_size=3)
        schedules = st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"])
        rest = optional(micro_batches=counts | st.just("auto"), schedule=schedules)
        choices.append(
            st.builds(
                lambda stages, rest: {"pipeline": {"stages": stages, **rest}},
                counts | stages,
                rest,
            )
        )
    return st.one_of(choices)


def trees(inside: str | None, depth: int) -> st.SearchStrategy[Any]:
    node = nodes(inside, depth)
    return node | st.lists(node, min_size=1, max_size=2).map(_beside)


def _beside(listed: list[Any]) -> list[Any]:
    """Beside a replicate a split is one of the head, along its classes."""
    if any("replicate" in node for node in listed):
        for node in listed:
            node.get("split", {}).pop("dim", None)
            node.get("split", {}).pop("attention", None)
    return listed


def written(value: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The path and body of each node of a tree as written, found without the reader."""
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield from written(item, f"{path}[{i}]")
    elif isinstance(value, dict):
        ((primitive, body),) = value.items()
        yield f"{path}.{primitive}", body
        for key in ("of", "stages"):
            yield from written(body.get(key), f"{path}.{primitive}.{key}")


def read_paths(graph: tuple[Node, ...]) -> Iterator[str]:
    for node in graph:
        yield node.path
        inner = node.stages if isinstance(node, Pipeline) else node.of
        if isinstance(inner, tuple):
            yield from read_paths(inner)


@settings(max_examples=examples(60))
@given(trees(None, 3))
def test_well_formed_trees_parse_and_keep_their_paths(tree: Any) -> None:
    paths = [path for path, _ in written(tree, "strategy.graph")]
    assert list(read_paths(strategy_of({"graph": tree}).graph)) == paths


@settings(max_examples=examples(60))
@given(trees(None, 2), st.data())
def test_an_unknown_key_anywhere_is_named_by_its_path(tree: Any, data: st.DataObject) -> None:
    path, body = data.draw(st.sampled_from(list(written(tree, "strategy.graph"))))
    body["unheard_of"] = 1
    faults: list[Fault] = []
    assert read_strategy({"graph": tree}, "mine", faults) is None
    assert [fault.key for fault in faults] == [f"{path}.unheard_of"]
