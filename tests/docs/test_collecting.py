"""The recipes of docs/collecting.md are run as printed, against stand-ins of the runtimes."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

from oled_sim.testing.models import byte_model  # noqa: E402
from oled_sim.testing.remote_code import LLaDA20  # noqa: E402
from oled_sim.trace import open_trace  # noqa: E402

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "collecting.md").read_text(encoding="utf-8")
RECIPES = re.findall(r"^## `(\S+?)`.*?$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
BLOCKS = [
    (name, number, code)
    for name, text in RECIPES
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
]
SMALL = {
    "gen_length=256": "gen_length=8", "max_new_tokens=256": "max_new_tokens=6",
    '"max_new_tokens": 256': '"max_new_tokens": 8', "block_length=32": "block_length=8",
    "151669": "31", ".to(\"cuda\")": "",
}  # fmt: skip
"""What is made small to be quick, and fits the stand-ins' vocabulary."""


class Published(LLaDA20):
    """The stand-in with its own special tokens in the place of the published ones."""

    def generate(
        self, inputs, temperature=0.0, block_length=32, steps=32, gen_length=2048, threshold=0.95,
        eos_id=0, mask_id=1,
    ):  # fmt: skip
        return super().generate(
            inputs, temperature, block_length, steps, gen_length, threshold, eos_id=eos_id,
            mask_id=mask_id,
        )  # fmt: skip


class Tokenizer:
    def __call__(self, texts, **_):
        return {"input_ids": torch.tensor([[5, 6, 7, 8, 9]])}

    def apply_chat_template(self, messages, return_tensors):
        return torch.tensor([[10, 20, 30]])


@pytest.fixture
def runtimes(monkeypatch):
    """Names that a recipe's user has: modules that import, and what he made himself."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "collectors")
    import dinfer_standin
    import qwen3_moe_standin

    def load(path, **_):
        return Published(byte_model(seed=3)) if "LLaDA2" in path else qwen3()

    def qwen3():
        return qwen3_moe_standin.Qwen3MoeForCausalLM(seed=5)

    def block_diffusion_generate(model, inputs, mask_id, gen_length, block_length):
        prompt = inputs["input_ids"][0].tolist()
        return qwen3_moe_standin.diffuse(model, prompt, gen_length, block_length)

    transformers, sdar = ModuleType("transformers"), ModuleType("generate")
    transformers.AutoModelForCausalLM = type("A", (), {"from_pretrained": staticmethod(load)})
    transformers.AutoTokenizer = type(
        "T", (), {"from_pretrained": staticmethod(lambda path, **_: Tokenizer())}
    )
    sdar.block_diffusion_generate = block_diffusion_generate
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    monkeypatch.setitem(sys.modules, "generate", sdar)
    engine = dinfer_standin.BlockDiffusionLLM()
    return {
        "tokenizer": Tokenizer(), "model": qwen3(), "decoder": None, "iterator_factory": None,
        "cache": None, "BlockDiffusionLLM": lambda *args, **kwargs: engine,
        "prompt": torch.tensor([[1, 2, 3]]),
    }  # fmt: skip


def test_every_recipe_is_there():
    names = [name for name, _, _ in BLOCKS]
    assert names == ["hf", "qwen3-moe", "qwen3-moe", "dinfer"]
    assert [name for name, _ in RECIPES] == ["hf", "qwen3-moe", "dinfer", "sglang-dump"]


@pytest.mark.parametrize(("name", "number", "code"), BLOCKS)
def test_a_recipe_runs_as_printed(tmp_path, monkeypatch, runtimes, name, number, code):
    assert len(code.strip().splitlines()) <= 10
    for printed, small in SMALL.items():
        code = code.replace(printed, small)
    monkeypatch.chdir(tmp_path)
    scope = dict(runtimes)
    exec(code, scope)
    assert scope["rec"].requests == 1
    (out,) = tmp_path.iterdir()
    trace = open_trace(out)
    assert trace.manifest.runtime.name == name
    assert trace.read(0).accepted_count.sum() > 0


def test_the_command_of_the_dump_is_the_importers_name():
    from oled_sim import plugins

    commands = re.findall(r"oled-sim import (\S+)", dict(RECIPES)["sglang-dump"])
    assert commands and set(commands) <= set(plugins.names(plugins.IMPORTERS))
