"""A model's tables are swapped in place: same names, same weights, same training."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from freescale.embedding import EmbeddingError, RowwiseAdagrad, Sgd, prioritize
from freescale.transport import Transport, connect

from rank_threads import run_in_threads

IDS = {"pages": ["uih", "candidate"], "user": ["user"], "bag": ["uih"]}


class Model(nn.Module):
    """Looks one table up twice, pools another, and has dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = nn.Embedding(30, 4, padding_idx=0)
        self.user = nn.Embedding(7, 4)
        self.bag = nn.EmbeddingBag(30, 4, mode="mean", include_last_offset=True)
        self.dense = nn.Linear(4, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        history = self.pages(batch["uih"])
        pooled = self.bag(batch["uih"].reshape(-1), torch.arange(0, batch["uih"].numel() + 1, batch["uih"].shape[1]))
        user = self.user(batch["user"])
        item = self.pages(batch["candidate"])
        scores: Tensor = self.dense((history.sum(1) + pooled + user) * item).squeeze(1)
        return scores


def make_batch(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)

    def draw(rows: int, *shape: int) -> Tensor:
        return torch.randint(0, rows, shape, generator=generator)

    return {"uih": draw(30, 6, 3), "user": draw(7, 6), "candidate": draw(30, 6)}


def train_plainly(world_size: int, steps: int) -> dict[str, Tensor]:
    """One process that sees all ranks' batches; gradients are averages over ranks."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world_size):
            (model(make_batch(rank, step)).square().mean() / world_size).backward()
        optimizer.step()
    return dict(model.state_dict())


def train_prioritized(transport: Transport, steps: int, model: Model, **options: Any) -> dict[str, Tensor]:
    prioritize(model, transport, optimizer=Sgd(lr=0.05), ids=IDS, **options)
    tables: Any = model.prioritized_embeddings
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    gradients = transport.channel("gradients")
    batch = make_batch(transport.rank, 0)
    for step in range(steps):
        upcoming = make_batch(transport.rank, step + 1)
        tables.prefetch(upcoming)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad = gradients.all_gather(parameter.grad[None].contiguous()).wait().mean(0)
        optimizer.step()
        batch = upcoming
    state = {key: value.clone() for key, value in model.state_dict().items()}
    tables.close()
    return state


def models(world_size: int) -> list[Model]:
    """The same model for every rank; threads share the generator, so they are made before."""
    made = []
    for _ in range(world_size):
        torch.manual_seed(0)
        made.append(Model())
    return made


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_swapped_model_trains_as_the_model_did(world_size: int) -> None:
    expected = train_plainly(world_size, steps=12)
    ready = models(world_size)
    states = run_in_threads(world_size, lambda t: train_prioritized(t, 12, ready[t.rank]))
    assert list(states[0]) == list(expected)
    for name, value in expected.items():
        parts = [state[name] for state in states]
        found = parts[0] if name.startswith("dense") else torch.cat(parts)
        torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6)


def test_collections_of_torchrec_are_swapped_too() -> None:
    pytest.importorskip("torchrec", reason="torchrec is not installed")
    from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

    class Jagged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            configs = [
                EmbeddingConfig(name="item", embedding_dim=4, num_embeddings=20, feature_names=["clicked", "shown"]),
                EmbeddingConfig(name="shop", embedding_dim=4, num_embeddings=9, feature_names=["shop"]),
            ]
            self.tables = EmbeddingCollection(tables=configs)

        def forward(self, batch: Any) -> Any:
            return self.tables(batch)

    features = KeyedJaggedTensor.from_lengths_sync(
        keys=["clicked", "shown", "shop"],
        values=torch.tensor([3, 3, 5, 1, 3, 8, 0]),
        lengths=torch.tensor([2, 1, 0, 2, 1, 1]),
    )
    plain, ours = Jagged(), Jagged()
    ours.load_state_dict(plain.state_dict())
    prioritize(ours, connect("local"), optimizer=Sgd(lr=1.0), ids={"tables": lambda batch: batch})
    assert list(ours.state_dict()) == list(plain.state_dict())
    expected, found = plain(features), ours(features)
    assert list(found) == list(expected)
    for name, jagged in expected.items():
        assert torch.equal(found[name].values(), jagged.values())
        assert torch.equal(found[name].lengths(), jagged.lengths())
    sum(each.values().square().sum() for each in expected.values()).backward()
    sum(each.values().square().sum() for each in found.values()).backward()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(ours.state_dict()[name], parameter - parameter.grad)
    ours.prioritized_embeddings.close()  # type: ignore[operator,union-attr]


def test_shapes_dtype_and_evaluation_are_those_of_the_module_before() -> None:
    model = nn.ModuleDict(
        {"pages": nn.Embedding(30, 4, dtype=torch.bfloat16), "bag": nn.EmbeddingBag(30, 4, mode="sum")}
    )
    before = {key: value.clone() for key, value in model.state_dict().items()}
    ids = torch.tensor([[3, 4], [4, 5]])
    weights = torch.tensor([[0.5, 2.0], [1.0, 3.0]])
    expected = nn.functional.embedding_bag(ids, before["bag.weight"], mode="sum", per_sample_weights=weights)
    prioritize(model, connect("local"), optimizer=Sgd(lr=0.1), ids={"pages": ["a"], "bag": ["b"]})
    with torch.no_grad():
        found = model["pages"](ids)
        assert torch.equal(found, before["pages.weight"][ids])
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(model["bag"](ids, per_sample_weights=weights), expected)
        offsets = torch.tensor([0, 1, 1])
        plain = nn.functional.embedding_bag(ids[0], before["bag.weight"], offsets, mode="sum")
        torch.testing.assert_close(model["bag"](ids[0], offsets), plain)
    model.prioritized_embeddings.close()  # type: ignore[operator,union-attr]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pages = nn.Embedding(30, 4)
        self.output = nn.Linear(4, 30, bias=False)
        self.output.weight = self.pages.weight


def frozen() -> nn.Module:
    model = nn.ModuleDict({"pages": nn.Embedding(30, 4)})
    model["pages"].weight.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("model", "ids", "words"),
    [
        (nn.ModuleDict({"pages": nn.Embedding(9, 4, max_norm=1.0)}), {"pages": ["a"]}, "'pages' has max_norm=1.0"),
        (
            nn.ModuleDict({"pages": nn.Embedding(9, 4, scale_grad_by_freq=True)}),
            {"pages": ["a"]},
            "'pages' has scale_grad_by_freq=True",
        ),
        (nn.ModuleDict({"bag": nn.EmbeddingBag(9, 4, mode="max")}), {"bag": ["a"]}, "'bag' has mode='max'"),
        (Tied(), {"pages": ["a"]}, "weights of 'pages' are 'output.weight', too"),
        (frozen(), {"pages": ["a"]}, "'pages.weight' is frozen"),
        (Model(), {"pages": ["a"]}, r"ids must say what \['bag', 'user'\] look up"),
        (Model(), {**IDS, "page": ["a"]}, r"got \['page'\]"),
        (Model(), dict.fromkeys(IDS), "at least one embedding module"),
        (nn.Embedding(9, 4), {"": ["a"]}, "got a table itself"),
        (Model(), {**IDS, "user": []}, "ids of 'user' must name at least one column"),
    ],
)
def test_what_cannot_be_swapped_is_refused_by_name(model: nn.Module, ids: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        prioritize(model, connect("local"), optimizer=Sgd(lr=0.1), ids=ids)


def test_modules_without_ids_stay_as_they_are() -> None:
    model = Model()
    prioritize(model, connect("local"), optimizer=Sgd(lr=0.1), ids={**IDS, "user": None})
    assert type(model.user) is nn.Embedding
    assert [name for name, _ in model.named_parameters()] == ["user.weight", "dense.weight", "dense.bias"]
    model.prioritized_embeddings.close()  # type: ignore[operator,union-attr]


def test_lookups_that_ids_did_not_announce_are_named() -> None:
    model = prioritize(
        Model(), connect("local"), optimizer=Sgd(lr=0.1), ids={**IDS, "user": [lambda batch: batch["user"] * 0]}
    )
    with pytest.raises(EmbeddingError, match=r"'user' looks up \[6\] ids that `ids` did not find"):
        model(make_batch(0, 0))
    with pytest.raises(EmbeddingError, match="'pages' can only be called within the forward of the model"):
        model.pages(torch.tensor([1]))  # type: ignore[operator]
    with pytest.raises(KeyError, match="the batch must have 'uih' to look up"):
        model({"user": torch.tensor([1])})
    model.prioritized_embeddings.close()  # type: ignore[operator,union-attr]


def test_ids_may_be_functions_of_the_batch() -> None:
    model = nn.Sequential(nn.Embedding(30, 4))
    prioritize(model, connect("local"), optimizer=RowwiseAdagrad(lr=0.1), ids={"0": lambda batch: batch})
    ids = torch.tensor([[1, 2]])
    model.prioritized_embeddings.prefetch(torch.tensor([[2, 3]]))  # type: ignore[operator,union-attr]
    before = model(ids)
    before.sum().backward()
    with torch.no_grad():
        assert not torch.equal(model(ids), before)
    model.prioritized_embeddings.close()  # type: ignore[operator,union-attr]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # the compiler's
def test_a_model_may_be_compiled_around_its_tables() -> None:
    batches = [make_batch(0, step) for step in range(4)]
    states = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = prioritize(Model(), connect("local"), optimizer=Sgd(lr=0.05), ids=IDS)
        called: Any = torch.compile(model, backend="eager") if compiled else model
        for batch, upcoming in pairwise(batches):
            model.prioritized_embeddings.prefetch(upcoming)  # type: ignore[operator,union-attr]
            called(batch).square().mean().backward()
        states.append({key: value.clone() for key, value in model.state_dict().items()})
        model.prioritized_embeddings.close()  # type: ignore[operator,union-attr]
    for name, value in states[0].items():
        assert torch.equal(states[1][name], value)


def test_a_wrapped_model_is_refused() -> None:
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    with pytest.raises(ValueError, match="must not be wrapped in DistributedDataParallel yet"):
        prioritize(wrapped, connect("local"), optimizer=Sgd(lr=0.1), ids={})


def test_a_batch_without_columns_and_a_transport_by_name_are_refused() -> None:
    model = prioritize(nn.Sequential(nn.Embedding(5, 2)), connect("local"), optimizer=Sgd(lr=0.1), ids={"0": ["page"]})
    with pytest.raises(TypeError, match="ids name column 'page', but the batch is a Tensor"):
        model(torch.tensor([1]))
    transport: Any = "local"
    with pytest.raises(TypeError, match=r"transport must come from freescale\.transport\.connect, got str"):
        prioritize(Model(), transport, optimizer=Sgd(lr=0.1), ids=IDS)
