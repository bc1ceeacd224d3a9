"""Rehearsals: what runs, what is found in what does not, and what a step needs."""

import copy
import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from tests.cli.command import whale_train
from tests.distributed.served import Served
from tests.distributed.test_parallel_strategies import MODELS, STRATEGIES, pipeline, write_arrays
from tests.pairs import some
from torch import nn
from torch.nn import functional

from whale_train.config import read_request
from whale_train.launcher.compose.command_line import composed, rewritten
from whale_train.launcher.planning.plan_request import resolve_request
from whale_train.rehearsal import Rehearsal
from whale_train.runtime.base.autocast import autocast
from whale_train.runtime.rehearse.agreement import disagreements, unmatched, waiting
from whale_train.runtime.rehearse.attention import as_on_devices
from whale_train.runtime.rehearse.main import as_rank, chosen, groups_of, model_of, rehearse
from whale_train.runtime.rehearse.meta_tensors import HostRead, MetaTensors, OnTheHost
from whale_train.runtime.rehearse.rank import rehearse_rank
from whale_train.runtime.rehearse.recorded_group import Asked, Record

META = torch.device("meta")

# --- Tensors without storage ---------------------------------------------------------------------


def test_memory_is_counted_as_it_comes_and_goes() -> None:
    with MetaTensors() as tensors:
        x = torch.empty(8, 128, device=META)
        assert tensors.live == 8 * 128 * 4
        y = x @ torch.empty(128, 64, device=META)
        assert tensors.live == 4 * (8 * 128 + 8 * 64)  # the weight has gone
        assert tensors.peak == 4 * (8 * 128 + 128 * 64 + 8 * 64)
        view = y.t()[:3]
        del y
        assert tensors.live == 4 * (8 * 128 + 8 * 64)
        del view, x
        assert tensors.live == 0


def test_a_step_needs_what_its_formula_says() -> None:
    """A linear layer: its weights, their gradients, a moment of each, and the input."""
    rows, width, out = 16, 256, 512
    with MetaTensors() as tensors:
        layer = nn.Linear(width, out, bias=False, device=META)
        moment = torch.zeros_like(layer.weight)
        x = torch.empty(rows, width, device=META)
        tensors.restart()
        layer(x).sum().backward()
    weights = 4 * width * out
    values = 4 * rows * width  # nobody keeps the output, whose gradient is one number, expanded
    assert tensors.peak == pytest.approx(3 * weights + values, rel=1e-3)
    assert moment.numel() == width * out


def test_equal_calls_give_equal_kinds_of_tensors() -> None:
    with MetaTensors():
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.empty(4, 6, dtype=dtype, device=META)
            found = [torch.softmax(x.t(), 0) for _ in range(2)]
            for made in found:
                assert made.shape == (6, 4)
                assert made.dtype == dtype
                assert made.stride() == found[0].stride()
            assert found[0].untyped_storage()._cdata != found[1].untyped_storage()._cdata
        assert torch.arange(3).tolist() == [0, 1, 2]  # on the host, nothing changes


def test_what_a_gpu_would_refuse_or_wait_for_is_an_error() -> None:
    with MetaTensors() as tensors:
        x = torch.empty(4, 6, device=META)
        with pytest.raises(OnTheHost, match=r"has a tensor \[6\] on cpu"):
            functional.layer_norm(x, (6,), torch.ones(6))
        assert (x * torch.tensor(2.0)).shape == (4, 6)  # a number from the host is none
        for read in (lambda: x.cpu(), lambda: x.nonzero(), lambda: torch.equal(x, x)):
            with pytest.raises(HostRead):
                read()
        assert bool((x > 0).all())  # of code that is not ours: as if it were so
        assert sum(tensors.reads.values()) == 1
        assert "test_rehearse.py" in next(iter(tensors.reads))


def test_autocast_is_as_on_cuda() -> None:
    """By torch's own table ("Op-Specific Behavior" of its amp page)."""
    x = torch.empty(4, 8, device=META)
    layer, norm = nn.Linear(8, 8, device=META), nn.LayerNorm(8, device=META)
    attend = nn.MultiheadAttention(8, 2, batch_first=True, device=META)
    with autocast("meta", torch.bfloat16):
        y = layer(x)
        assert y.dtype == torch.bfloat16
        assert (y @ y.t()).dtype == torch.bfloat16
        assert functional.gelu(y).dtype == torch.bfloat16
        assert norm(y).dtype == torch.float32
        assert torch.softmax(y, -1).dtype == torch.float32
        assert functional.cross_entropy(
            y, torch.empty(4, dtype=torch.int64, device=META)
        ).dtype == (torch.float32)
        assert y.sum().dtype == torch.float32
        assert torch.addcmul(y, y, x).dtype == torch.float32
        assert attend(x[None], x[None], x[None])[0].dtype == torch.bfloat16
        with autocast("meta", enabled=False):
            assert layer(x).dtype == torch.float32
    assert layer(x).dtype == torch.float32
    layer(x).sum().backward()
    assert layer.weight.grad is not None


def kernels() -> str:
    """Which attention kernels run, by the arguments."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.empty(2, 4, 8, 16, dtype=dtype, device=META, requires_grad=True)
        mask = torch.empty(8, 8, dtype=torch.bool, device=META)
        for name, given in (("causal", {"is_causal": True}), ("mask", {"attn_mask": mask})):
            with as_on_devices(on_cpu=False) as chosen:
                made = functional.scaled_dot_product_attention(x, x, x, **given)  # type: ignore[arg-type]
                made.sum().backward()
            found[f"{dtype} {name}"] = dict(chosen)
    return json.dumps(found)


def test_the_kernel_of_attention_is_told(served: Served) -> None:
    assert json.loads(served.ask(kernels)) == {
        "torch.float32 causal": {"memory-efficient": 1},
        "torch.float32 mask": {"memory-efficient": 1},
        "torch.bfloat16 causal": {"flash": 1},
        "torch.bfloat16 mask": {"memory-efficient": 1},
    }


# --- Agreement -----------------------------------------------------------------------------------


def asked(kind: str, *sizes: int, dtype: str = "float32") -> Asked:
    return Asked(kind, sizes, dtype)


def test_collectives_must_be_the_same() -> None:
    groups = [("pair", (0, 1)), ("alone", (2,))]
    both = [asked("all-reduce", 4), asked("all-gather", 8)]
    for wrong, said in (
        (both[:1], "collective 2 of pair: rank 0 asks for all-gather of 8 float32, rank 1 for "
         "none"),
        (both[::-1], "collective 1 of pair: rank 0 asks for all-reduce of 4 float32, rank 1 for "
         "all-gather of 8 float32"),
        ([both[0], asked("all-gather", 9)], "collective 2 of pair: rank 0 asks for all-gather of 8 "
         "float32, rank 1 for all-gather of 9 float32"),
        ([both[0], asked("all-gather", 8, dtype="bfloat16")], "collective 2 of pair: rank 0 asks "
         "for all-gather of 8 float32, rank 1 for all-gather of 8 bfloat16"),
    ):  # fmt: skip
        records = {0: Record({"pair": both}), 1: Record({"pair": wrong})}
        assert disagreements(groups, records) == [said]
    assert disagreements(groups, {0: Record({"pair": both}), 1: Record({"pair": [*both]})}) == []


def test_ranks_that_wait_for_each_other_are_told() -> None:
    """Each waits for what the other sends only then."""
    send, receive = asked("send", 4), asked("receive", 4)
    good = {
        0: Record({}, {1: [send, receive]}, [("post", 1, 0), ("post", 1, 1), ("wait", 1, 1)]),
        1: Record({}, {0: [receive, send]}, [("post", 0, 0), ("wait", 0, 0), ("post", 0, 1)]),
    }
    assert unmatched(good) == waiting(good) == []
    bad = copy.deepcopy(good)
    bad[0].messages[1] = [receive, send]
    bad[0].events[:] = [("post", 1, 0), ("wait", 1, 0), ("post", 1, 1)]
    assert unmatched(bad) == [
        "message 1 between ranks 0 and 1: rank 0 posts receive of 4 float32, rank 1 receive of 4 "
        "float32"
    ]
    triangle = {
        rank: Record(
            {},
            {(rank + 1) % 3: [send], (rank + 2) % 3: [receive]},
            [("post", (rank + 2) % 3, 0), ("wait", (rank + 2) % 3, 0), ("post", (rank + 1) % 3, 0)],
        )
        for rank in range(3)
    }
    assert unmatched(triangle) == []
    assert waiting(triangle)[0] == "rank 0 waits for message 1 of rank 2 for ever"


def broken(overrides: list[str]) -> str:
    """What is found in the records of a plan's ranks where one of them is changed, by the
    change."""
    config = composed(rewritten([*overrides, "mode=plan"]))
    request = read_request(config, {"hardware": "h", "strategy": "s"})
    plan = resolve_request(request).plan
    model = model_of(request, plan)
    good = {rank: rehearse_rank(request, plan, model, rank).record for rank in range(4)}

    def found(records: dict[int, Record]) -> list[str]:
        wrong = [*disagreements(groups_of(plan), records), *unmatched(records)]
        return wrong or waiting(records)

    answers = {"good": found(good)}
    one = copy.deepcopy(good)
    listed = one[1].messages[next(iter(one[1].messages))]
    listed[0], listed[-1] = listed[-1], listed[0]
    answers["swapped"] = found(one)
    one = copy.deepcopy(good)
    listed = next(x for name, x in one[3].collectives.items() if name != "world")
    del listed[0]
    answers["missing"] = found(one)
    one = copy.deepcopy(good)
    listed = next(iter(one[2].collectives.values()))
    listed[-1] = replace(listed[-1], sizes=(12345,))
    answers["size"] = found(one)
    return json.dumps(answers)


def test_what_is_broken_in_a_real_plan_is_named(served: Served, tmp_path: Path) -> None:
    write_arrays(tmp_path)
    answers = json.loads(
        served.ask(broken, overrides=job("gpt", "split2_pipeline2", tmp_path)),
    )
    assert answers["good"] == []
    (swapped,) = answers["swapped"]
    assert swapped.startswith("message 1 between ranks 1 and 3")
    assert any("rank 3 for" in said for said in answers["missing"]), answers["missing"]
    assert any("12345" in said for said in answers["size"]), answers["size"]


# --- Whole rehearsals ----------------------------------------------------------------------------


def job(model: str, strategy: str, arrays: Path, *more: str) -> list[str]:
    devices, graph, *_ = STRATEGIES[strategy]
    kind, overrides = MODELS[model]
    return [
        *overrides,
        *("data=arrays", f"data.path={arrays / kind}.npz", f"strategy.graph={graph}"),
        *("hardware=dgx_a100", f"strategy.devices={devices}", "train.global_batch=8", *more),
    ]


def rehearsed(overrides: list[str]) -> str:
    """The rehearsal of a request, as JSON."""
    config = composed(rewritten([*overrides, "mode=plan"]))
    request = read_request(config, {"hardware": "h", "strategy": "s"})
    plan = resolve_request(request).plan
    found = rehearse(request, plan, model_of(request, plan), chosen(plan, "kinds"))
    return json.dumps(found.to_mapping())


ALIKE = [name for name, (_, *speeds) in STRATEGIES.items() if len(speeds) == 1]
# Stages in turns, partitions of shards that come and go, and copies of shards of stages. The memory
# of a split head beside copies, of which the ranks have two engines, is asked for below.
CLEAN = some(
    product(ALIKE, ("fp32", "bf16")),
    [("interleaved", "fp32"), ("zero3_split2", "bf16"), ("replicate2_pipeline2_split2", "fp32")],
)


@pytest.mark.parametrize(("strategy", "precision"), CLEAN)
def test_every_rank_runs_and_agrees(
    strategy: str, precision: str, served: Served, tmp_path: Path
) -> None:
    write_arrays(tmp_path)
    overrides = job("llama", strategy, tmp_path, f"train.precision={precision}")
    found = Rehearsal.from_json(served.ask(rehearsed, overrides=overrides))
    assert found.faults == ()
    assert [(kind.error, kind.place) for kind in found.kinds if kind.error] == []
    assert sum(len(kind.ranks) for kind in found.kinds) == STRATEGIES[strategy][0]
    assert all(kind.peak > 0 for kind in found.kinds)


def unlike_their_kind(overrides: list[str]) -> tuple[int, list[str]]:
    """How many kinds of rank there are, and what ranks do otherwise than the first of theirs."""
    config = composed(rewritten([*overrides, "mode=plan"]))
    request = read_request(config, {"hardware": "h", "strategy": "s"})
    plan = resolve_request(request).plan
    model = model_of(request, plan)
    kinds = chosen(plan, "kinds")
    found = []
    for first, *others in kinds:
        known = rehearse_rank(request, plan, model, first)
        for rank in others:
            own = rehearse_rank(request, plan, model, rank)
            stands = as_rank(plan, known, rank)
            peaks = [sum(each.peak_bytes.values()) for each in (own, known)]
            if peaks[0] != pytest.approx(peaks[1], rel=2e-3):
                found.append(f"memory of rank {rank}, of the kind of {first}")
            for what, a, b in (
                ("collectives", own.record.collectives, stands.collectives),
                ("messages", own.record.messages, stands.messages),
                ("events", own.record.events, stands.events),
            ):
                if a != b:
                    found.append(f"{what} of rank {rank}, of the kind of {first}")
    return len(kinds), found


_PAIR = "{split: {degree: 2}}"


# Copies of stages that are split have kinds by all three: by shard, by stage and by copy.
@pytest.mark.parametrize(
    ("devices", "graph", "kinds"),
    [
        pytest.param(4, "{split: {}}", 2, marks=pytest.mark.full),
        pytest.param(4, "[{replicate: {}}, {split: {modules: head}}]", 2, marks=pytest.mark.full),
        pytest.param(
            4, "{replicate: {zero: 3, of: {split: {degree: 2}}}}", 2, marks=pytest.mark.full
        ),
        (12, f"{{replicate: {{of: {pipeline(f'[{_PAIR}, {_PAIR}, {_PAIR}]')}}}}}", 5),
        pytest.param(4, "{split: {dim: sequence}}", 2, marks=pytest.mark.full),
    ],
)
def test_one_rank_stands_for_all_of_its_kind(
    devices: int, graph: str, kinds: int, served: Served
) -> None:
    sizes = ["model.vocab_size=288", "model.width=48", "model.heads=12"]
    overrides = ["model=gpt", *sizes, *("data=text", "hardware=v100_512", "train.global_batch=8")]
    overrides += [f"strategy.graph={graph}", f"strategy.devices={devices}"]
    found = served.ask(unlike_their_kind, overrides=overrides)
    assert found == [kinds, []]


LARGE = [
    *("model=gpt", "model.width=256", "model.depth=6", "model.sequence_length=256"),
    *("data=text", "hardware=dgx_a100", "train.global_batch=64"),
]


@pytest.mark.parametrize(
    ("devices", "kernel", "within"),
    [
        ("hardware=dgx_a100", "memory-efficient", 0.05),
        ("hardware=cpu hardware.devices=2", "unfused", 0.1),
    ],
)
def test_attention_that_drops_is_fused_on_gpus(
    devices: str, kernel: str, within: float, served: Served
) -> None:
    """A CPU saves the weights of all pairs of tokens, a GPU none."""
    overrides = [*LARGE[:4], *devices.split(), "train.global_batch=16", "model.dropout=0.1"]
    more = ["strategy=dp", "train.precision=fp32", "data.sequence_length=256", "model.heads=8"]
    found = Rehearsal.from_json(served.ask(rehearsed, overrides=[*overrides, *more]))
    assert found.is_clean
    for kind in found.kinds:
        assert kind.kernels.keys() == {kernel}
        assert kind.peak == pytest.approx(kind.planned, rel=within), (kind.rank, kind.peak_bytes)


@pytest.mark.parametrize(
    ("graph", "within"),
    [
        ("{replicate: {}}", 0.05),
        ("{replicate: {zero: 1}}", 0.05),
        ("{replicate: {zero: 3}}", 0.10),
        ("{replicate: {zero: 1, state: [3, 3, 3, 3, 1, 1, 1, 1]}}", 0.05),
        ("{replicate: {zero: 3, state: [3, 3, 3, 3, 1, 1, 1, 1]}}", 0.10),
        ("{replicate: {zero: 3, state: [3, 3, 3, 3, 1, 1, 1, 0], recompute: full}}", 0.25),
        ("{split: {}}", 0.10),
        (pipeline(4, micro_batches=8), 0.10),
        (pipeline("[{stage: {recompute: full}}, {stage: {recompute: full}}]"), 0.10),
        ("{replicate: {recompute: full}}", 0.05),
        ("{replicate: {zero: 2, recompute: {memory: 0.5}}}", 0.05),
        ("{split: {recompute: full}}", 0.10),
        ("[{replicate: {}}, {split: {modules: head}}]", 0.05),
    ],
)
# In 16 bits, that of split layers is asked for below, and that of copies in test_reduce_dtype.
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.full)])
def test_memory_is_as_the_plan_predicts(
    graph: str, within: float, precision: str, served: Served
) -> None:
    """Two roads to one figure: the planner's liveness of operations, and the program itself."""
    more = [f"strategy.graph={graph}", f"train.precision={precision}"]
    found = Rehearsal.from_json(served.ask(rehearsed, overrides=[*LARGE, *more]))
    assert found.is_clean, [(kind.error, kind.place) for kind in found.kinds if kind.error]
    for kind in found.kinds:
        assert kind.peak == pytest.approx(kind.planned, rel=within), (kind.rank, kind.peak_bytes)


LLAMA = [
    *("model=hf", "model.architecture=LlamaForCausalLM"),
    "model.config={vocab_size: 4096, hidden_size: 512, intermediate_size: 1408, "
    "num_hidden_layers: 6, num_attention_heads: 8, num_key_value_heads: 2, "
    "max_position_embeddings: 512}",
    *("data=text", "data.sequence_length=512", "hardware=dgx_a100", "train.global_batch=32"),
]


@pytest.mark.parametrize(
    "graph",
    [
        pytest.param("{replicate: {}}", marks=pytest.mark.full),
        "{split: {degree: 2}}",
        pytest.param(pipeline(4), marks=pytest.mark.full),
    ],
)
def test_a_llama_attends_by_flash_with_the_keys_it_has(graph: str, served: Served) -> None:
    """Its memory is planned without the keys that CPUs repeat for their queries."""
    found = Rehearsal.from_json(
        served.ask(rehearsed, overrides=[*LLAMA, f"strategy.graph={graph}"])
    )
    assert found.faults == ()
    assert [kind.error for kind in found.kinds if kind.error] == []
    for kind in found.kinds:
        assert kind.kernels.keys() == {"flash"}
        assert kind.peak == pytest.approx(kind.planned, rel=0.10), (kind.rank, kind.peak_bytes)


# --- The command ---------------------------------------------------------------------------------

USER = (
    *("model.loss=cross_entropy", "data=arrays", "data.path=sequences.npz", "train.global_batch=8"),
    *("hardware=dgx_a100", "strategy=dp"),
)


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        pytest.param(
            *("Body", 0, "8 ranks of 1 kind run and agree; read nothing on the host"),
            marks=pytest.mark.full,
        ),
        ("Reads", 0, "8 ranks of 1 kind run and agree; only the model reads values on the host"),
        pytest.param(
            *("OnTheHost", 1, "OnTheHost: aten.mul.Tensor has a tensor [32] on cpu"),
            marks=pytest.mark.full,
        ),
        ("Counts", 1, "HostRead: aten.nonzero.default reads a value of the device on the host"),
    ],
)
def test_what_a_users_model_does_is_named(
    name: str, status: int, said: str, tmp_path: Path
) -> None:
    write_arrays(tmp_path)
    source = Path(__file__).with_name("rehearsed_models.py").read_text()
    (tmp_path / "my_models.py").write_text(source)
    model = f"model._target_=my_models.{name}"
    answer = whale_train(["mode=rehearse", model, *USER], tmp_path)
    text = " ".join(answer.stdout.split())
    assert said in text, answer
    assert answer.status == status, answer
    assert not answer.left_running
    if name != "Body":
        line = next(n for n, x in enumerate(source.splitlines(), 1) if f"class {name}(" in x)
        assert f"my_models.py:{line + 4} in forward" in text
    (file,) = (tmp_path / "runs").rglob("rehearsal.json")
    assert json.loads(file.read_text())["is_clean"] == (status == 0)


def test_a_plan_has_its_verdict(tmp_path: Path) -> None:
    answer = whale_train(
        ["mode=plan", "rehearse=[0,15]", "strategy=3d", "hardware=v100_p100_mix"], tmp_path
    )
    assert answer.status == 0, answer
    assert "2 ranks of 2 kinds run and agree; read nothing on the host" in answer.stdout
    assert "most of any rank" not in answer.stdout  # the table is mode=rehearse's


def test_a_rank_that_is_none_is_refused(tmp_path: Path) -> None:
    answer = whale_train(
        ["mode=rehearse", "rehearse=[0,16]", "strategy=3d", "hardware=v100_p100_mix"], tmp_path
    )
    assert answer.status == 2, answer
    assert "rehearse=[0, 16] has rank 16, and the plan's are 0 to 15" in answer.stderr


@pytest.mark.parametrize(
    ("arguments", "precision"),
    [
        (("hardware=dgx_a100",), "bf16"),
        pytest.param(("hardware=dgx_a100", "train.precision=fp32"), "fp32", marks=pytest.mark.full),
        (("hardware=v100_p100_mix",), "fp32"),  # which have no bf16
        pytest.param(("hardware=cpu", "hardware.devices=2"), "fp32", marks=pytest.mark.full),
    ],
)
def test_the_precision_is_what_devices_are_made_for(
    arguments: tuple[str, ...], precision: str, tmp_path: Path
) -> None:
    answer = whale_train(["mode=plan", "hydra.run.dir=run", *arguments], tmp_path)
    assert answer.status == 0, answer
    assert json.loads((tmp_path / "run/plan.json").read_text())["precision"] == precision
    said = "train.precision: bf16 (instead of fp32)" in answer.stdout
    assert said == (precision == "bf16")
