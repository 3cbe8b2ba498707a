"""Tables that are not trained, on purpose or by mistake, and weights by the names that modules had for them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from freescale.embedding import (
    Adam,
    EmbeddingError,
    IdOutOfRange,
    PrioritizedEmbeddingCollection,
    Sgd,
    Table,
    prioritize,
)
from freescale.transport import Transport, connect

from rank_threads import run_in_threads


class Model(nn.Module):
    """One table that is looked up twice, another, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = nn.Embedding(30, 4)
        self.bag = nn.EmbeddingBag(7, 4, mode="sum")
        self.dense = nn.Linear(4, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        rows = self.pages(batch["uih"]).sum(1) * self.pages(batch["candidate"]) + self.bag(batch["uih"] % 7)
        scores: Tensor = self.dense(rows)
        return scores


def make(transport: Transport | None = None) -> Any:
    torch.manual_seed(0)
    ids: dict[str, Any] = {"pages": ["uih", "candidate"], "bag": [lambda batch: batch["uih"] % 7]}
    return prioritize(Model(), transport or connect("local"), optimizer=Adam(lr=0.1), ids=ids)


def make_batch(step: int) -> dict[str, Tensor]:
    return {"uih": (torch.arange(6).view(2, 3) * step) % 30, "candidate": torch.tensor([step, 2])}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in other)


def test_a_backward_through_a_forward_in_eval_mode_is_an_error() -> None:
    model = make()
    model.eval()
    loss = model(make_batch(1)).sum()
    with pytest.raises(EmbeddingError, match=r"eval mode does not train them: call train\(\)"):
        loss.backward()
    model.train()
    model.pages.eval()
    with pytest.raises(EmbeddingError, match=r"requires_grad_\(False\)"):
        model(make_batch(1)).sum().backward()
    with torch.no_grad():
        assert not model(make_batch(1)).requires_grad
    model.prioritized_embeddings.close()


def test_frozen_tables_stay_and_the_rest_trains_until_they_are_trained_again() -> None:
    def story(transport: Transport) -> None:
        model = make(transport)
        tables = model.prioritized_embeddings
        tables.prefetch(make_batch(2))
        model(make_batch(1)).sum().backward()
        before = weights(model)
        assert tables.requires_grad_(False) is tables
        for training in (True, False):
            model.train(training)
            model.dense.zero_grad()
            tables.prefetch(make_batch(3))
            model(make_batch(2)).sum().backward()
            assert model.dense.weight.grad.any()
        assert equal(weights(model), before)
        tables.requires_grad_(True)
        model.train()
        model(make_batch(3)).sum().backward()
        assert not torch.equal(model.state_dict()["pages.weight"], before["pages.weight"])
        tables.close()

    run_in_threads(2, story)


def test_a_collection_can_be_frozen() -> None:
    tables = PrioritizedEmbeddingCollection([Table("item", 9, 2)], connect("local"), optimizer=Sgd(lr=0.1))
    tables.requires_grad_(False)
    assert not tables({"item": torch.tensor([1])})["item"].requires_grad
    tables.close()


def test_one_module_alone_cannot_be_frozen() -> None:
    model = make()
    with pytest.raises(EmbeddingError, match=r"cannot be frozen, or trained, alone: give it ids None"):
        model.pages.requires_grad_(False)
    model.pages.requires_grad_(True)
    model.requires_grad_(False)
    assert not model.dense.weight.requires_grad
    before = weights(model)
    model(make_batch(1)).sum().backward()
    assert not torch.equal(model.state_dict()["pages.weight"], before["pages.weight"])
    model.prioritized_embeddings.close()


def test_weights_are_read_by_the_names_that_they_had() -> None:
    model = make()
    model.prioritized_embeddings.prefetch(make_batch(2))
    model(make_batch(1)).sum().backward()
    assert torch.equal(model.pages.weight, model.state_dict()["pages.weight"])
    with pytest.raises(AttributeError, match="'weight' of prioritized tables cannot be replaced"):
        model.pages.weight = torch.ones(30, 4)
    with pytest.raises(AttributeError, match="has no attribute 'weights'"):
        _ = model.pages.weights
    collection = PrioritizedEmbeddingCollection([Table("item", 9, 2)], connect("local"), optimizer=Sgd(lr=0.1))
    found: Any = collection.embeddings.item.weight
    assert torch.equal(found, collection.state_dict()["embeddings.item.weight"])
    with pytest.raises(AttributeError, match="no 'user' among"):
        _ = collection.embeddings.user
    for tables in (model.prioritized_embeddings, collection):
        tables.close()


@pytest.mark.parametrize("full", [False, True])
def test_state_dicts_of_torch_distributed_go_both_ways(full: bool) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    options = StateDictOptions(full_state_dict=full)
    model = make()
    saved: Any = copy.deepcopy(get_model_state_dict(model, options=options))
    assert equal(saved, weights(model))
    model.prioritized_embeddings.prefetch(make_batch(2))
    model(make_batch(1)).sum().backward()
    assert not equal(saved, weights(model))
    set_model_state_dict(model, dict(saved), options=options)
    assert equal(saved, weights(model))
    model.prioritized_embeddings.close()


def test_an_id_out_of_range_in_an_evaluation_names_the_module() -> None:
    model = make()
    model.eval()
    wrong = make_batch(1) | {"candidate": torch.tensor([1, 30])}
    words = "ids that 'pages' looks up must be from 0 to 29, the rows of table 'pages': got 30 at place 1 on rank 0"
    with pytest.raises(IdOutOfRange, match=words):
        model(wrong)
    assert model(make_batch(1)).shape == (2, 1)
    model.prioritized_embeddings.close()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_and_pickles_are_refused_with_words(copied: Any) -> None:
    model = make()
    with pytest.raises(EmbeddingError, match="have connections to other ranks and cannot be"):
        copied(model.pages)
    model.prioritized_embeddings.close()


def test_tables_do_not_move_to_where_nothing_is() -> None:
    model = make()
    before = weights(model)
    with pytest.raises(EmbeddingError, match="cannot move to the meta device"):
        model.to("meta")
    assert torch.equal(model.state_dict()["pages.weight"], before["pages.weight"])
    model.prioritized_embeddings.close()


@pytest.mark.parametrize("used", [False, True])
def test_closed_tables_look_nothing_up_and_can_be_saved(used: bool) -> None:
    model = make()
    if used:
        model.prioritized_embeddings.prefetch(make_batch(2))
        model(make_batch(1)).sum().backward()
    before = weights(model)
    model.prioritized_embeddings.close()
    for call in (model, model.prioritized_embeddings.prefetch):
        with pytest.raises(EmbeddingError, match="the tables were closed"):
            call(make_batch(1))
    assert equal(weights(model), before)
    model.load_state_dict(before)
