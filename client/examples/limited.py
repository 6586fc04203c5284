"""What the demo's second act runs in a process of its own: conversations, all open at a time, in limited memory.

Says what happens as JSON, an object a line, and ends when its standard input does, the conversations open until then.
The code is the same for both caches, but for the line that makes one. The limit is RLIMIT_DATA: the process's private
writable memory, VmData in /proc/self/status, may be what it is once the model has been loaded and has run, and beside
that the KV of one conversation, what a forward pass computes with, and a little to spare.
"""

import argparse
import contextlib
import copy
import ctypes
import json
import os
import resource
import signal
import sys
import time

import smollm2

SHARED_TOKENS, OWN_TOKENS = 3560, 520  # of the text all conversations begin with, and of each one's own
NEW_TOKENS = 32  # of an answer, at most
CHUNK_TOKENS = 512  # of a forward pass, so that what it computes with stays small
SPARE = 16 * 2**20  # bytes that may lie unused between small things that malloc gave out
DEVICE_MEMORY = "32MiB"  # of one conversation, of which our cache needs 29 MiB for 4,100 tokens, 11 MiB for 1,200
ASKED = [  # a licence that Debian ships, where its text begins, a question
    ("Apache-2.0", "1. Definitions", 'Who is the "Licensor"?'),
    ("MPL-2.0", "1. Definitions", 'What does "Larger Work" mean?'),
    ("Artistic", "Preamble", 'What does "Package" refer to?'),
    ("LGPL-2.1", "Preamble", "What is the purpose of this licence?"),
]


def emit(event: str, **values) -> None:
    print(json.dumps({"event": event, **values}), flush=True)


def memory(pid: int | str = "self") -> tuple[int, int]:
    """Bytes of a process: VmData, which RLIMIT_DATA limits, and RssAnon, what of it lies in memory."""
    with open(f"/proc/{pid}/status") as file:
        values = dict(line.split(":", 1) for line in file)
    return tuple(int(values[name].split()[0]) * 1024 for name in ("VmData", "RssAnon"))


def prompts(tokenizer, shared: int, own: int) -> list[list[int]]:
    """The token ids of each conversation: two licences, of which the first is the same in all, and a question."""
    first = smollm2.licence(tokenizer, shared)
    ids = []
    for name, start, question in ASKED:
        second = smollm2.licence(tokenizer, own, name, start)
        content = f"Here are two licences. The first:\n\n{first}\n\nThe second:\n\n{second}\n\n{question}"
        messages = [{"role": "user", "content": content}]
        ids.append(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])
    return ids


def sizes(config, tokens: int) -> tuple[int, int]:
    """Bytes, in float32: the KV of `tokens` tokens, and what a forward pass of CHUNK_TOKENS behind them needs besides.

    The pass needs a layer's keys and values twice when they grow, and once more for each query head; a mask, first
    of bytes; and what the layer computes: three tensors as wide as the feed-forward network, four as wide as the model.
    """
    column = 2 * 4 * config.head_dim  # of one head, K and V
    kv = tokens * column * config.num_key_value_heads
    widths = 3 * config.intermediate_size + 4 * config.hidden_size
    needed = kv + tokens * column * config.num_attention_heads + CHUNK_TOKENS * (5 * tokens + 4 * widths)
    return kv * config.num_hidden_layers, needed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cache", choices=("DynamicCache", "kvferry"))
    parser.add_argument("--url", help="kvferryd's")
    parser.add_argument("--unlimited", action="store_true")
    parser.add_argument("--device-memory", default=DEVICE_MEMORY)
    parser.add_argument("--tokens", type=int, nargs=2, default=(SHARED_TOKENS, OWN_TOKENS), metavar=("SHARED", "OWN"))
    options = parser.parse_args()
    libc = ctypes.CDLL(None)
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: not to outlive the demo
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    resource.setrlimit(resource.RLIMIT_STACK, (hard, hard))  # for this thread; others have what the shell said

    import torch
    from transformers import DynamicCache

    import kvferry

    tokenizer, model = smollm2.load()
    conversations = prompts(tokenizer, *options.tokens)
    shared = len(os.path.commonprefix(conversations))
    longest = max(map(len, conversations))
    kv, needed = sizes(model.config, longest + NEW_TOKENS)
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(".")]  # one sentence is enough
    torch.set_grad_enabled(False)

    def read(cache, ids: list[int]) -> None:
        for start in range(0, len(ids), CHUNK_TOKENS):
            model.model(torch.tensor([ids[start : start + CHUNK_TOKENS]]), cache=cache)
            emit("read", tokens=cache.get_seq_length())

    read(DynamicCache(config=model.config), conversations[0][:CHUNK_TOKENS])  # threads and buffers made once
    libc.malloc_trim(0)
    data, anonymous = memory()
    if not options.unlimited:
        resource.setrlimit(resource.RLIMIT_DATA, (data + kv + needed + SPARE,) * 2)
    emit("ready", data=data, anonymous=anonymous, kv=kv, needed=needed,
         room=kv + needed + SPARE, shared=shared, shortest=min(map(len, conversations)), longest=longest,
         device_memory=options.device_memory)  # fmt: skip

    caches, doing = [], "connecting"  # all stay open
    with contextlib.ExitStack() as stack:
        try:
            for number, ids in enumerate(conversations):
                start = time.monotonic()
                emit("conversation", number=number)
                if caches:
                    doing = "copying the one before it"
                    cache = copy.deepcopy(caches[-1])
                    cache.crop(shared - cache.get_seq_length())
                elif options.cache == "DynamicCache":
                    cache = DynamicCache(config=model.config)
                else:
                    store = stack.enter_context(kvferry.connect(options.url))
                    cache = kvferry.OffloadedCache(config=model.config, store=store,
                                                   device_memory=options.device_memory)  # fmt: skip
                caches.append(cache)
                doing = "reading its text"
                read(cache, ids[cache.get_seq_length() : -1])
                doing = "answering"
                prompt = torch.tensor([ids])
                answer = model.generate(prompt, attention_mask=torch.ones_like(prompt), cache=cache, do_sample=False,
                                        eos_token_id=ends, max_new_tokens=NEW_TOKENS)[0, len(ids) :].tolist()
                ended = answer[-1] in ends
                text = tokenizer.decode(answer, skip_special_tokens=True).strip() + ("" if ended else " ...")
                emit("answer", number=number, ids=answer, text=text, seconds=time.monotonic() - start)
        except (RuntimeError, MemoryError, kvferry.Error) as error:
            message = str(error)
            caches.clear()  # so that there is memory to say it
            emit("failed", message=f"{doing}: {message.strip().splitlines()[0]}")
        emit("done")
        sys.stdin.read()


if __name__ == "__main__":
    main()
