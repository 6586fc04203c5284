"""Runs transformers' own cache tests with OffloadedCache in DynamicCache's place.

    git -C transformers checkout v5.24.0
    PYTHONPATH=build/release/python .venv/bin/python tests/python/upstream_cache_tests.py transformers [REGEX]

takes a checkout, or the file tests/utils/test_cache_utils.py of one; it is no part of this project. Every test is
printed with how it ended, and what is different as it stands, with DynamicCache. Fails if one passes only as it stands.
Models of the hub are replaced: SmolLM2 by the one of the demo, tiny random ones by tiny random ones.
"""

import argparse
import contextlib
import functools
import importlib.util
import os
import re
import sys
import unittest
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedConfig, cache_utils  # noqa: E402

from kvferry import OffloadedCache  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2] / "client" / "examples"))
import smollm2  # noqa: E402

FILE = Path("tests") / "utils" / "test_cache_utils.py"
TINY = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8
)


class Ours(OffloadedCache):
    """One whose every layer leaves the device at once."""

    made = 0

    def __init__(self, *arguments, **options):
        Ours.made += 1
        super().__init__(*arguments, **dict(block_tokens=2, resident_layers=0) | options)


class OneLayer:
    """Stands for a layer by itself, which ours are not: the cache that has this layer only."""

    def __init__(self, kind: str, sliding_window: int | None = None):
        config = PreTrainedConfig(layer_types=[kind], num_hidden_layers=1, sliding_window=sliding_window)
        self._cache = Ours(config=config)

    def crop(self, tokens: int) -> None:
        self._cache.crop(tokens)

    def __getattr__(self, name: str):
        if name == "activate_past_recording":
            return self._cache.activate_past_recording
        return getattr(self._cache.layers[0], name)


@functools.cache
def smollm2_once():
    return smollm2.load()


class LocalTokenizer:
    @staticmethod
    def from_pretrained(name: str, **_):
        tokenizer, _ = smollm2_once()
        tokenizer.padding_side = "left"
        return tokenizer


class LocalModel:
    @staticmethod
    def from_pretrained(name: str, dtype=None, **_):
        tiny = re.fullmatch(r"hf-internal-testing/tiny-random-(\w+)ForCausalLM", name)
        if name.endswith(smollm2.NAME):
            model = smollm2_once()[1]
        elif tiny:
            kind = {"gemma3": "gemma3_text"}.get(tiny[1].lower(), tiny[1].lower())
            torch.manual_seed(1)
            vocabulary = len(smollm2_once()[0])
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=vocabulary, **TINY))
        else:
            raise unittest.SkipTest(f"needs {name} from the hub")
        return model.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype or torch.float32).eval()


class Outcomes(unittest.TestResult):
    """How every test ended, and whether it made a cache of ours."""

    def __init__(self):
        super().__init__()
        self.of: dict[str, str] = {}
        self.made: dict[str, int] = {}

    def startTest(self, test):  # noqa: N802
        super().startTest(test)
        self._before = Ours.made

    def stopTest(self, test):  # noqa: N802
        super().stopTest(test)
        self.made[_name(test)] = Ours.made - self._before
        self.of.setdefault(_name(test), "passed")

    def addSkip(self, test, reason):  # noqa: N802
        self.of[_name(test)] = f"not run: {reason}"

    def addError(self, test, error):  # noqa: N802
        if _name(test):  # else it is a class that could not be set up
            self.of[_name(test)] = f"failed: {error[0].__name__}: {error[1]}"

    addFailure = addError

    def addSubTest(self, test, subtest, error):  # noqa: N802
        if error:
            self.addError(test, error)


def _name(test) -> str:
    return ".".join(test.id().split(".")[-2:]) if isinstance(test, unittest.TestCase) else ""


def replace_dynamic_cache(old: type, new: type) -> None:
    """In every module that knows it; those imported later take it from cache_utils."""
    for module in list(sys.modules.values()):
        if vars(module).get("DynamicCache") is old and not module.__name__.startswith(("kvferry", "__main__")):
            module.DynamicCache = new
    transformers.DynamicCache = cache_utils.DynamicCache = new


def run(file: Path, kind: type, wanted) -> Outcomes:
    """Runs the tests of the file that `wanted` says yes to by name, with a cache of this kind as DynamicCache."""
    replace_dynamic_cache(DynamicCache, kind)
    spec = importlib.util.spec_from_file_location(f"upstream_with_{kind.__name__}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.AutoModelForCausalLM, module.AutoTokenizer = LocalModel, LocalTokenizer
    if kind is Ours:
        names = {layer.__name__: kind for kind, layer in reversed(cache_utils.DYNAMIC_LAYER_TYPE_MAPPING.items())}
        module.ALL_DYNAMIC_LAYERS = [
            functools.partial(OneLayer, names[layer.__name__]) for layer in getattr(module, "ALL_DYNAMIC_LAYERS", [])
        ]
    every = (test for group in unittest.defaultTestLoader.loadTestsFromModule(module) for test in group)
    outcomes = Outcomes()
    unittest.TestSuite(test for test in every if wanted(_name(test))).run(outcomes)
    replace_dynamic_cache(kind, DynamicCache)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("transformers", type=Path, help=f"a checkout of transformers, or its {FILE}")
    parser.add_argument("regex", nargs="?", default="", help="which tests, by Class.name")
    arguments = parser.parse_args()
    file = arguments.transformers / FILE if arguments.transformers.is_dir() else arguments.transformers
    with contextlib.redirect_stdout(sys.stderr):  # the tests print
        ours = run(file, Ours, lambda name: re.search(arguments.regex, name))
        stock = run(file, DynamicCache, lambda name: ours.made.get(name))
    worse = 0
    for name, outcome in ours.of.items():
        expected = stock.of.get(name)
        if expected is None and not outcome.startswith("not run"):
            outcome = "not run: makes no DynamicCache"
        elif expected not in (None, outcome):
            outcome += f"; with DynamicCache: {expected}"
            worse += expected == "passed"
        elif expected and expected != "passed":
            outcome = f"{outcome[:100]} ... and just so with DynamicCache"
        print(f"{name}: {' '.join(outcome.split())[:400]}")
    return worse > 0


if __name__ == "__main__":
    sys.exit(main())
