"""DeepSpeed's tensor parallelism: its engine checks that all ranks were given the same, and a cache is among that."""

import copy
import os
import subprocess
import sys
import textwrap

import processes
import pytest
import torch
from models import prompt, tiny
from transformers import DynamicCache

from kvferry import OffloadedCache

SAID = 21  # tokens in the cache before the engine is first called


def _engine():
    """A fresh engine whose two ranks hold half of tiny Llama each; it checks the arguments of its first call alone."""
    os.environ["DS_ACCELERATOR"] = "cpu"  # also where there is another
    import deepspeed

    deepspeed.ops.__compatible_ops__ |= dict.fromkeys(deepspeed.ops.__compatible_ops__, False)  # or it compiles one
    model = copy.deepcopy(tiny("llama"))
    config = dict(train_micro_batch_size_per_gpu=2, tensor_parallel=dict(autotp_size=2),
                  optimizer=dict(type="SGD", params=dict(lr=0.1)))  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    assert _checks(engine)
    return engine


def _checks(engine) -> bool:
    """Whether its next call is checked."""
    return engine.first_dataloader_check.id in engine.module._forward_pre_hooks


def _filled(engine, kind):
    """A cache that holds this rank's heads: other bytes than the other rank's."""
    config = engine.module.config
    options = dict(block_tokens=4, resident_layers=0) if kind is OffloadedCache else {}
    cache = kind(config=config, **options)
    with torch.no_grad():
        engine.module.forward(prompt(SAID, rows=2), cache=cache)  # by forward, so that it is not what is checked
    assert cache.layers[0].keys.shape == (2, config.num_key_value_heads // 2, SAID, 16)
    return cache


def _refusals(engine, rank):
    """What the check says to a cache of another class, and to other ids, on one of the ranks."""
    said, config = [], engine.module.config
    for kind, seed in [((OffloadedCache, DynamicCache)[rank], 0), (OffloadedCache, rank)]:
        with pytest.raises(AssertionError) as caught, torch.no_grad():
            engine(prompt(3, seed=seed), cache=kind(config=config))
        said.append(str(caught.value))
    assert _checks(engine)
    return said


def _evaluated(engine, kind):
    """Two calls, of which the first is checked if none was before."""
    cache = _filled(engine, kind)
    with torch.no_grad():
        logits = [engine(prompt(3, rows=2, seed=step), cache=cache).logits for step in range(2)]
    assert not _checks(engine)
    return [*logits, *(tensor for keys, values, _ in cache for tensor in (keys, values))]


def _trained(engine, kind):
    """A step in which the cache is a positional argument."""
    cache, ids = _filled(engine, kind), prompt(7, rows=2, seed=5)
    engine.train()
    loss = engine(ids, None, None, cache, labels=ids).loss
    assert not _checks(engine)
    engine.backward(loss)
    gradients = [p.grad.clone() for p in engine.module.parameters()]
    engine.step()
    return [loss.detach(), *gradients, *(p.detach().clone() for p in engine.module.parameters())]


def _compared(kind):
    """If transformers is gone when the check runs: whether a cache is the same as itself, and as a copy."""
    from deepspeed.runtime.utils import compare_tensors_in_structures

    cache = kind(config=tiny("llama").config)
    same, copied = dict(cache=cache), dict(cache=copy.deepcopy(cache))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "transformers.cache_utils", None)
        return compare_tensors_in_structures(same, same), compare_tensors_in_structures(same, copied)


def _work(rank):
    engine = _engine()
    engine.eval()
    seen = dict(refusals=_refusals(engine, rank))
    for kind in (OffloadedCache, DynamicCache):
        seen[kind] = dict(
            evaluated=_evaluated(engine, kind), trained=_trained(_engine(), kind), compared=_compared(kind)
        )
    return seen


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return processes.run(_work, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("done", ["evaluated", "trained"])
def test_the_check_lets_a_cache_pass(ranks, done):
    """Each rank's cache holds its own heads, so rank 0's, which is sent to all, is another one than theirs."""
    for rank in ranks:
        ours, theirs = rank[OffloadedCache][done], rank[DynamicCache][done]
        assert len(ours) == len(theirs) > 3 and all(torch.equal(a, b) for a, b in zip(ours, theirs))
        assert all(tensor.abs().sum() > 0 for tensor in ours)
    first, second = (rank[OffloadedCache][done] for rank in ranks)
    assert torch.equal(first[0], second[0]) and any(not torch.equal(a, b) for a, b in zip(first, second))


def test_the_check_is_one(ranks):
    for rank in ranks:
        assert len(rank["refusals"]) == 2
        assert all("Data inconsistency within the TP group" in said for said in rank["refusals"])


def test_a_cache_is_nothing_special_if_transformers_went_away(ranks):
    """Then the check compares any two objects by ==, and a copy of a cache is as unequal as one of DynamicCache."""
    for rank in ranks:
        assert rank[OffloadedCache]["compared"] == rank[DynamicCache]["compared"] == (True, False)


def test_without_transformers():
    """DeepSpeed's check runs where transformers is not installed; there no cache of ours can be, and asking says so."""
    code = """
        import os, sys
        os.environ["DS_ACCELERATOR"] = "cpu"
        sys.modules["transformers"] = None  # importing it is a ModuleNotFoundError
        import torch
        from deepspeed.runtime.utils import compare_tensors_in_structures, is_transformers_cache
        ones, held = torch.ones(2), object()
        assert not is_transformers_cache(held)
        assert compare_tensors_in_structures([ones, held], [ones.clone(), held])
        assert compare_tensors_in_structures(dict(cache=held, x=ones), dict(cache=held, x=ones.clone()))
        assert not compare_tensors_in_structures([ones, held], [ones + 1, held])
        try:
            from kvferry import OffloadedCache
        except ImportError as error:
            assert "transformers" in str(error), error
        else:
            raise AssertionError("OffloadedCache was imported")
        print("checked")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1:] == ["checked"], done.stderr
