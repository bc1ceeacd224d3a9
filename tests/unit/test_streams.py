"""Streams: their places, ends and states, by classes of no library."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from whale_train.data.sources.own_samples import Samples
from whale_train.data.stream import StreamDataset, StreamReader, json_fault, state_fault_of


class Counted:
    """The numbers below `given`, each with a draw, from the one after the last on."""

    def __init__(self, given: int, wrong: str = "") -> None:
        self.given, self.wrong, self.at = given, wrong, 0

    def __iter__(self) -> Iterator[dict[str, float]]:
        if self.wrong == "empty":
            return
        first, self.at = (self.at, self.at) if self.at < self.given else (0, 0)
        for number in range(first, self.given):
            if self.wrong != "late":
                self.at = number + 1
            yield {"x": number, "drawn": random.random()}
            self.at = number + 1
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": (self.at,) if self.wrong == "tuple" else self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def stream(given: int, length: int | None = None, wrong: str = "") -> StreamDataset:
    source = Samples("Counted", lambda: Counted(given, wrong), None, None, {})
    return StreamDataset(source, (), length, True)


def draw(place: int) -> int:
    return 1000 + place


def test_a_stream_begins_anew_where_it_ends() -> None:
    read = list(StreamReader(stream(3, 3), draw).read(7))
    assert [place for place, _ in read] == list(range(7))
    assert [sample["x"] for _, sample in read] == [0, 1, 2, 0, 1, 2, 0]
    expected = [random.Random(draw(place)).random() for place in range(7)]
    assert [sample["drawn"] for _, sample in read] == expected


@pytest.mark.parametrize("place", range(8))
def test_a_state_goes_on_at_any_place(place: int) -> None:
    whole = list(StreamReader(stream(3, 3), draw).read(9))
    reader = StreamReader(stream(3, 3), draw)
    list(reader.read(place))
    again = StreamReader(stream(3, 3), draw, place, reader.state())
    assert list(again.read(9 - place)) == whole[place:]


class Sticky(Counted):
    """Begins where its state was loaded, whenever it is gone through; counts its passes."""

    def __init__(self) -> None:
        super().__init__(4)
        self.first = self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = self.at = state["at"]

    def __iter__(self) -> Iterator[dict[str, float]]:
        for number in range(self.first, 4):
            self.at = number + 1
            yield {"x": number + 10 * self.epoch}


def test_every_pass_is_of_an_object_of_its_own() -> None:
    dataset = StreamDataset(Samples("Sticky", Sticky, None, None, {}), (), None, True)
    reader = StreamReader(dataset, draw)
    whole = [sample["x"] for _, sample in reader.read(6)]
    again = StreamReader(dataset, draw, 6, reader.state())
    whole += [sample["x"] for _, sample in again.read(6)]
    assert whole == [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23]


def test_reading_leaves_the_generators_as_they_were() -> None:
    random.seed(4)
    expected = random.random()
    random.seed(4)
    list(StreamReader(stream(3), draw).read(5))
    assert random.random() == expected


@pytest.mark.parametrize(
    ("length", "wrong", "said"),
    [
        (2, "", "Counted gives more samples than its length, 2"),
        (5, "", "Counted ends after 3 samples, and its length is 5"),
        (None, "empty", "Counted gives no sample"),
    ],
)
def test_a_stream_of_another_length_is_an_error(length: int | None, wrong: str, said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        list(StreamReader(stream(3, length, wrong), draw).read(7))


def test_samples_are_those_of_places_in_any_order() -> None:
    made: list[int] = []
    dataset = stream(6)
    make: Callable[[], Any] = dataset.source.make
    dataset.source.make = lambda: made.append(0) or make()  # type: ignore[func-returns-value]
    dataset.keeps = 4
    assert dataset.samples(np.array([1, 0]))["x"].tolist() == [1, 0]
    assert dataset.samples(np.array([4, 5, 2]))["x"].tolist() == [4, 5, 2]
    assert dataset.samples(np.array([3, 3]))["x"].tolist() == [3, 3]
    assert len(made) == 1
    assert dataset.samples(np.array([0]))["x"].tolist() == [0]
    assert len(made) == 2


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("", ""),
        ("late", "has a state that another sample follows: two samples, state_dict, load_state_"),
        ("tuple", "has a state that JSON cannot hold: state_dict()['at'] is a tuple"),
    ],
)
def test_a_state_that_does_not_do_is_known_beforehand(wrong: str, said: str) -> None:
    fault = state_fault_of(stream(6, None, wrong))
    assert fault.startswith(said) if said else not fault


def test_json_holds_what_it_gives_back() -> None:
    assert json_fault({"a": [1, 2.5, None, True, "b", {"c": []}]}) == ""
    assert json_fault([{"a": np.int64(3)}]) == "JSON cannot hold: state_dict()[0]['a'] is a int64"
    numbered = json_fault({"a": {1: "b"}})
    assert numbered == "JSON cannot hold: state_dict()['a'] has the key 1, which is no text"
