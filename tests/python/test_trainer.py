"""transformers' Trainer: a cache in a batch goes through it and accelerate to the model's forward."""

import copy

import pytest
import torch
from models import prompt, tiny
from transformers import DynamicCache, Trainer, TrainerCallback, TrainingArguments, default_data_collator

from kvferry import OffloadedCache

STEPS, BATCH = 2, 2


class Recorder(TrainerCallback):
    """The gradients of every step."""

    def __init__(self):
        self.gradients = []

    def on_pre_optimizer_step(self, args, state, control, model, **_):
        self.gradients += [p.grad.clone() for p in model.parameters()]


class Recording(Trainer):
    """Notes which cache each forward pass gave back."""

    def compute_loss(self, model, inputs, return_outputs=False, **options):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **options)
        self.returned = [*getattr(self, "returned", []), outputs.cache]
        return (loss, outputs) if return_outputs else loss


def trainer_of(folder, make_cache, **options):
    """A Trainer of a fresh tiny Llama. With a cache, every batch follows a context that is already in it."""
    model = copy.deepcopy(tiny("llama"))
    rows = [dict(input_ids=row, labels=row) for row in prompt(11, rows=STEPS * BATCH)]

    def collate(features):
        batch = default_data_collator(features)
        if make_cache:
            batch["cache"] = make_cache(config=model.config)
            with torch.no_grad():
                model(prompt(21, rows=BATCH), cache=batch["cache"])
        return batch

    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=BATCH, per_device_eval_batch_size=BATCH,
        learning_rate=0.01, use_cpu=True, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True,
        seed=4, **options,
    )  # fmt: skip
    return Recording(model, arguments, data_collator=collate, train_dataset=rows, eval_dataset=rows,
                     callbacks=[Recorder()])  # fmt: skip


def trained(trainer):
    """Losses, gradients and weights of a training, and the logits of an evaluation after it."""
    recorder = next(c for c in trainer.callback_handler.callbacks if isinstance(c, Recorder))
    trainer.train()
    losses = [torch.tensor(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    weights = [p.detach().clone() for p in trainer.model.parameters()]
    return losses, recorder.gradients, weights, [torch.tensor(trainer.predict(trainer.eval_dataset).predictions)]


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
def test_steps_and_an_evaluation(tmp_path, store, bf16):
    def ours(config):
        return OffloadedCache(config=config, store=store, block_tokens=4, resident_layers=0)

    trainer = trainer_of(tmp_path, ours, bf16=bf16)
    for seen, expected in zip(trained(trainer), trained(trainer_of(tmp_path, DynamicCache, bf16=bf16)), strict=True):
        assert len(seen) == len(expected) > 0 and all(torch.equal(a, b) for a, b in zip(seen, expected))
        assert all(tensor.abs().sum() > 0 for tensor in seen)
    assert [type(cache) for cache in trainer.returned] == [OffloadedCache] * (STEPS + 2)
    for cache in trainer.returned:
        assert cache.get_seq_length() == 21 + 11 and cache.stats().blocks_put > 0


def test_training_makes_no_cache_unless_one_is_given(tmp_path, embedded_store):
    """Trainer turns use_cache off; a cache that is given is used all the same, and shows in what is learnt."""
    without = trainer_of(tmp_path, None)
    assert not without.args.use_cache
    without.train()
    assert without.returned == [None] * STEPS and not without.model.config.use_cache
    given = trainer_of(tmp_path, lambda config: OffloadedCache(config=config, store=embedded_store))
    given.train()
    assert not given.model.config.use_cache
    assert [type(cache) for cache in given.returned] == [OffloadedCache] * STEPS
    losses = [[entry["loss"] for entry in each.state.log_history if "loss" in entry] for each in (without, given)]
    assert losses[0] != losses[1]
