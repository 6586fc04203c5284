"""A real language model reads licences and answers questions about them, its KV cache in a kvferry store.

Run it by `./dev demo`. SmolLM2-135M-Instruct writes 64 tokens after about a thousand of context four times: with the
caches of transformers, with an embedded store, and with a kvferryd that is started here, on a unix socket. The text has
to be the same each time. The first time the words appear as they come is the one where the cache lies in kvferryd.

The second act (second_act.py) has four conversations of 4,000 tokens in a process with memory for the KV of one.
"""

import argparse
import contextlib
import sys
import time
from dataclasses import dataclass

import smollm2
import stage
from smollm2 import progress

NEW_TOKENS = 64
CONTEXT_TOKENS = 1000
QUESTION = "What freedoms does this licence give to people who receive the program?"
RESIDENT_LAYERS = 2  # of 30: the others leave the device, so that there is something to see


@dataclass
class Row:
    """One line of the table; bytes and seconds."""

    name: str
    text: str
    held: int  # KV bytes that the model's process holds
    service: int | None  # KV bytes in the service
    prefill: float
    rate: float  # tokens a second after the first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--act", type=int, choices=(1, 2), help="only this one; the second takes minutes")
    parser.add_argument("--check", action="store_true", help="second act: compare all texts with DynamicCache's")
    options = parser.parse_args()
    if options.act != 2:
        first_act(options.question)
    if options.act != 1:
        import second_act  # not before the first act has said that it loads torch

        second_act.show(options.check)


def first_act(question: str) -> None:
    print("\nkvferry: the KV cache of a language model, ferried to a store and back\n")
    with progress("Loading torch and transformers"):
        import torch
        from transformers import DynamicCache, StaticCache, TextStreamer

        import kvferry
    tokenizer, model = smollm2.load()
    text = smollm2.licence(tokenizer, CONTEXT_TOKENS - len(tokenizer(question)["input_ids"]))
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": f"{text}\n\n{question}"}],
        add_generation_prompt=True, return_tensors="pt", return_dict=True,
    )  # fmt: skip
    context = inputs["input_ids"].shape[1]

    class Watch(TextStreamer):
        """Notes when each token comes; shows the words, or a count on a terminal."""

        def __init__(self, show: bool):
            super().__init__(tokenizer, skip_prompt=True)
            self.show, self.times = show, []

        def put(self, value):
            if not self.next_tokens_are_prompt:
                self.times.append(time.monotonic())
            super().put(value)

        def on_finalized_text(self, text, stream_end=False):
            if self.show:
                print(text, end="\n" if stream_end else "", flush=True)
            elif sys.stdout.isatty():
                print(f"\r  {len(self.times)} of {NEW_TOKENS} tokens", end="", flush=True)

    def run(name, cache, held, service=lambda: None, show=False) -> Row:
        watch, start = Watch(show), time.monotonic()
        if not show:
            print(f"  {name} ...", end="" if sys.stdout.isatty() else "\n", flush=True)
        ids = model.generate(
            **inputs, cache=cache, streamer=watch, do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS
        )
        row = Row(name, tokenizer.decode(ids[0, context:]), held(), service(), watch.times[0] - start,
                  (len(watch.times) - 1) / (watch.times[-1] - watch.times[0]))  # fmt: skip
        if not show and sys.stdout.isatty():
            print(f"\r  {name}: done" + " " * 30)
        return row

    settings = dict(config=model.config, resident_layers=RESIDENT_LAYERS)
    layers = model.config.num_hidden_layers
    rows = []
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(stage.kvferryd("512MiB"))
        store = stack.enter_context(kvferry.connect(url))
        print(
            f"  SmolLM2-135M-Instruct, float32, {layers} layers, {torch.get_num_threads()} threads; the first "
            f"{RESIDENT_LAYERS} layers' cache stays, the other {layers - RESIDENT_LAYERS} live in kvferryd at\n"
            f"  {url}\n"
        )
        print(f"{text[: text.index('.') + 1]}\n[... {context} tokens in all ...]\n\n> {question}\n")
        cache = kvferry.OffloadedCache(**settings, store=store)
        ours = run(
            "kvferry over gRPC", cache, lambda: cache.stats().device_bytes, lambda: stage.service_bytes(url), show=True
        )
        stats = cache.stats()
        print("\nThe same again with other caches, to compare:\n")

        dynamic = DynamicCache(config=model.config)
        rows.append(run("DynamicCache", dynamic, lambda: tensor_bytes(dynamic)))
        static = StaticCache(config=model.config, max_cache_len=context + NEW_TOKENS)
        rows.append(run("StaticCache", static, lambda: tensor_bytes(static)))
        embedded = stack.enter_context(kvferry.connect("embedded://", memory="512MiB"))
        local = kvferry.OffloadedCache(**settings, store=embedded)
        rows.append(run("kvferry embedded", local, lambda: local.stats().device_bytes + local.stats().stored_bytes))
        rows.append(ours)
    show_table(rows, kvferry.sizes.format_size)
    print("\nThe cache over gRPC says of itself:\n\n" + "\n".join(f"  {line}" for line in str(stats).splitlines()))
    wrong = [row.name for row in rows if row.text != rows[0].text and row.name != "StaticCache"]
    if wrong:
        for row in rows:
            print(f"\n--- {row.name}\n{row.text}")
        sys.exit(f"\nThe text of {' and '.join(wrong)} differs from DynamicCache's. This is a bug: please report it.")


def tensor_bytes(cache) -> int:
    return sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))


def show_table(rows: list[Row], size) -> None:
    head = ("", "text", "KV in the model's process", "KV in the service", "prefill", "tokens/s")
    lines = [
        (row.name, "identical" if row.text == rows[0].text else "DIFFERENT", size(row.held),
         "none" if row.service is None else size(row.service), f"{row.prefill:.2f} s", f"{row.rate:.1f}")
        for row in rows
    ]  # fmt: skip
    stage.print_table(head, lines, 2)
    print("\n  An embedded store is memory of the model's own process; over gRPC it is kvferryd's.")


if __name__ == "__main__":
    main()
