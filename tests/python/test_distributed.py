"""Several processes, and several replicas in one: what torch does with a cache when a model runs in parallel."""

import copy
import warnings

import processes
import pytest
import torch
import torch.distributed as dist
from daemon import Kvferryd
from models import prompt, tiny
from torch.nn.parallel import DistributedDataParallel, scatter_gather
from transformers import DynamicCache

import kvferry
from kvferry import OffloadedCache

SEEN = 29  # tokens: more than any window


def offloading(model, **options):
    """A cache whose every layer leaves the device at once."""
    return OffloadedCache(config=model.config, block_tokens=4, resident_layers=0, **options)


def text(model, cache, rank):
    """The ids and logits of a prompt that is another one on every rank."""
    ids = prompt(SEEN, rows=2, seed=rank)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), cache=cache, max_new_tokens=9, do_sample=False,
                         output_logits=True, return_dict_in_generate=True)  # fmt: skip
    return out.sequences, torch.stack(out.logits)


# What runs in each process. Its results are compared where the test is.


def _train(rank):
    """By cache the losses and gradients of two steps; what a step is trained on follows a context that it is not."""
    seen = {}
    for name, make in (("ours", offloading), ("theirs", lambda model: DynamicCache(config=model.config))):
        model = copy.deepcopy(tiny("llama")).train()
        parallel = DistributedDataParallel(model, find_unused_parameters=True)  # then it looks through the output
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen[name] = []
        for step in range(2):
            cache, ids = make(model), prompt(11, rows=2, seed=10 * step + rank)
            with torch.no_grad():
                model(prompt(SEEN, rows=2, seed=rank), cache=cache)
            loss = parallel(input_ids=ids, labels=ids, cache=cache).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen[name].append((loss.detach(), [p.grad.clone() for p in model.parameters()]))
    return seen


def _exchange(rank, name):
    """What each process held, was sent by rank 0 and gathered from all, and the logits that follow from each."""
    model = tiny(name)
    cache = offloading(model)
    text(model, cache, rank)
    sent, gathered = [cache if rank == 0 else None], [None, None]
    dist.broadcast_object_list(sent, src=0)
    dist.all_gather_object(gathered, cache)
    assert [type(each) for each in (*sent, *gathered)] == [OffloadedCache] * 3

    def describe(cache):
        tensors = [t for layer in cache.layers for t in tensors_of(layer)]
        with torch.no_grad():
            return [*tensors, model(prompt(3, rows=2), cache=copy.deepcopy(cache)).logits], cache.get_seq_length()

    return dict(held=describe(cache), sent=describe(sent[0]), gathered=[describe(each) for each in gathered])


def _exchange_all(rank):
    return {name: _exchange(rank, name) for name in ("llama", "mistral", "jamba")}


def _generate(rank, folder):
    """Ids and logits with DynamicCache, with a store of the process's own and with one that both share."""
    daemon, model = Kvferryd(folder), tiny("llama")
    seen = dict(theirs=text(model, DynamicCache(config=model.config), rank))
    for name, url in (("embedded", "embedded://"), ("shared", daemon.url)):
        with kvferry.connect(url) as store:
            cache = offloading(model, store=store)
            seen[name] = text(model, cache, rank)
            cache.flush()
            dist.barrier()  # both hold blocks
            seen[f"{name} stats"] = cache.stats(), daemon.values()
            dist.barrier()
    return seen


def tensors_of(layer):
    """Everything that a layer holds, of whatever kind it is."""
    held = [layer.keys, layer.values] if hasattr(layer, "keys") else []
    for states in ("conv_states", "recurrent_states"):
        held += getattr(layer, states, {}).values()
    return held


def same(ours, theirs):
    return len(ours) == len(theirs) > 0 and all(torch.equal(a, b) for a, b in zip(ours, theirs))


def test_data_parallel_training(tmp_path):
    first, second = processes.run(_train, tmp_path)
    for seen in (first, second):
        for (loss, gradients), (expected, expected_gradients) in zip(seen["ours"], seen["theirs"], strict=True):
            assert torch.equal(loss, expected) and same(gradients, expected_gradients)
            assert all(gradient.abs().sum() > 0 for gradient in gradients)
    for (loss, gradients), (other, others) in zip(first["ours"], second["ours"], strict=True):
        assert loss != other and same(gradients, others), "each had its own data, and the mean of both gradients"


def test_a_cache_is_sent_to_other_processes(tmp_path):
    """It pickles its bytes: what arrives needs no store that the receiver cannot reach, and goes on as the sender."""
    first, second = processes.run(_exchange_all, tmp_path)
    for name in first:
        held = [each[name]["held"] for each in (first, second)]
        assert not same(held[0][0], held[1][0])
        for each in (first[name], second[name]):
            for (tensors, length), (expected, expected_length) in zip(
                [each["sent"], *each["gathered"]], [held[0], *held], strict=True
            ):
                assert same(tensors, expected) and length == expected_length == SEEN + 8


def test_each_process_generates(tmp_path):
    with Kvferryd(tmp_path):
        both = processes.run(_generate, tmp_path, tmp_path)
    assert not torch.equal(both[0]["theirs"][0], both[1]["theirs"][0])
    for seen in both:
        assert same(seen["embedded"], seen["theirs"]) and same(seen["shared"], seen["theirs"])
        for name, sessions in (("embedded", 0), ("shared", 2)):
            stats, values = seen[f"{name} stats"]
            assert stats.blocks_put and stats.blocks_got and values["sessions"] == sessions


# DataParallel: replicas are threads of one process, whose outputs `gather` puts together.


class _GatherOnCpu:
    """torch's Gather for tensors on a CPU, which the real one refuses: as it does on CUDA, scalars become a vector."""

    @staticmethod
    def apply(target_device, dim, *inputs):
        assert target_device == "cpu" and len({(t.dtype, t.device, t.dim()) for t in inputs}) == 1
        if inputs[0].dim() == 0 and dim == 0:
            warnings.warn("all input tensors were scalars", stacklevel=2)
            inputs = [t.view(1) for t in inputs]
        return torch.cat(inputs, dim)


@pytest.mark.filterwarnings("ignore:all input tensors were scalars")
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "jamba", "zamba2", "mamba"])
def test_gathered_replicas(monkeypatch, embedded_store, name, replicas):
    """Of each layer the rows of all replicas, its window, and the tokens it has seen, not those it still holds."""
    monkeypatch.setattr(scatter_gather, "Gather", _GatherOnCpu)
    model = tiny(name)
    with torch.no_grad():
        outputs = []
        for rank in range(replicas):
            cache = offloading(model, store=embedded_store)
            model(prompt(SEEN - 2, seed=rank), cache=cache)
            outputs.append(model(prompt(2, seed=rank), cache=cache))
        whole = scatter_gather.gather(outputs, "cpu")
        assert type(whole) is type(outputs[0]) and torch.equal(whole.logits, torch.cat([o.logits for o in outputs]))
        caches = [output.cache for output in outputs]
        for gathered in (whole.cache, scatter_gather.gather(caches, "cpu")):
            check_gathered(model, gathered, caches)
            check_continued(model, gathered, copy.deepcopy(caches), outputs)


def check_gathered(model, gathered, caches):
    assert type(gathered) is OffloadedCache and len(gathered) == len(caches[0])
    for index, (layer, *parts) in enumerate(zip(gathered.layers, *(cache.layers for cache in caches), strict=True)):
        assert type(layer) is type(parts[0])
        assert getattr(layer, "sliding_window", None) == getattr(parts[0], "sliding_window", None)
        assert same(tensors_of(layer), [torch.cat(each) for each in zip(*map(tensors_of, parts))])
        if hasattr(layer, "get_seq_length"):
            assert layer.get_seq_length() == gathered.get_seq_length(index) == SEEN
            assert gathered.get_mask_sizes(1, index) == caches[0].get_mask_sizes(1, index)


def check_continued(model, gathered, caches, outputs):
    """Until what the windows held is gone, the gathered cache says what each replica says alone."""
    last = [output.logits[:, -1:] for output in outputs]
    for _ in range(20):
        ids = [logits.argmax(-1) for logits in last]
        last = [model(row, cache=cache).logits for row, cache in zip(ids, caches, strict=True)]
        together = model(torch.cat(ids), cache=gathered).logits
        torch.testing.assert_close(together, torch.cat(last), rtol=1e-4, atol=1e-4)
