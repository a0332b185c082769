"""``oled-sim plan`` from end to end, on a small model with costs by formula."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from oled_sim.cli.main import cli
from oled_sim.cli.plan import parse_time_us
from oled_sim.costs.store import save_profile
from oled_sim.costs.synthetic import affine_profile
from oled_sim.errors import CapacityError, OledSimError, UsageError
from oled_sim.geometry import CostGeometry, RoutingGeometry
from oled_sim.planning.memory import Serving, memory_bill
from oled_sim.testing.traces import random_request, write_trace

TOY = CostGeometry("toy", 64, 96, 32, 3, 1, 16, 2, 1, 2, 1, 32, 100)
SIZES = """
hidden_size = 64
dense_intermediate_size = 96
moe_intermediate_size = 32
layers = 3
dense_layers = 1
experts = 16
top_k = 2
shared_experts = 1
heads = 2
kv_heads = 1
head_dim = 32
vocabulary = 100
weight_bytes = 2
"""


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """Return the options that name a small model, its machine, and a trace of four requests."""
    folder = tmp_path_factory.mktemp("toy")
    (folder / "toy.toml").write_text(SIZES)
    save_profile(affine_profile(TOY), folder / "machine.toml")
    routing = RoutingGeometry((1, 2), 16, 2)
    requests = [
        random_request(np.random.default_rng(n), routing, request=n, passes=12) for n in range(4)
    ]
    trace = write_trace(folder / "trace", requests, routing)
    files = {"--model": folder / "toy.toml", "--profile": folder / "machine.toml"}
    options = [str(part) for pair in files.items() for part in pair]
    return [*options, "--trace", str(trace.path), "--reserve", "0", "--policy", "lru",
            "--gpu-memory", "1GiB"]  # fmt: skip


def plan(*arguments):
    return CliRunner().invoke(cli, ["plan", *arguments], catch_exceptions=False)


def json_of(*arguments):
    result = plan(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_smallest_cache_that_meets_the_target(toy):
    sweep = ["sweep", toy[5], "--geometry", toy[1], *toy[2:4], "--history", "0", "--json"]
    run = CliRunner().invoke(cli, [*sweep, "--policy", "lru", "--cache", "2:16"])
    results = json.loads(run.stdout)["runs"][0]["results"]
    every = {row["cache"]: row["summary"]["tpot_us"] for row in results}
    found = json_of(*toy, "--target-tpot", f"{every[9] + 1e-3:.6f}us")
    assert found["met"] is True
    assert found["choice"]["cache"] == min(c for c, time in every.items() if time <= every[9])
    assert found["choice"]["tpot_us"] == pytest.approx(every[found["choice"]["cache"]])


def test_the_bill_is_that_of_the_choice(toy):
    found = json_of(*toy, "--target-tpot", "1s", "--context", "64")
    bill = memory_bill(TOY, Serving(64, block_length=found["serving"]["block_length"],
                                    reserve_bytes=0), found["choice"]["cache"])  # fmt: skip
    assert found["bill"]["total"] == bill.total == found["choice"]["gpu_bytes"]
    assert found["bill"]["experts"] == bill.experts


def test_what_cannot_be_met_is_answered_with_the_best(toy):
    result = plan(*toy, "--target-tpot", "1us")
    assert result.exit_code == 0
    assert "Not to be had" in result.stdout
    found = json_of(*toy, "--target-tpot", "1us")
    assert (found["met"], found["choice"]) == (False, None)
    assert found["fastest"]["tpot_us"] == min(row["tpot_us"] for row in found["curve"])


def test_memory_limits_the_cache(toy):
    least = memory_bill(TOY, Serving(4096, block_length=16, reserve_bytes=0), 5).total
    found = json_of(*toy, "--target-tpot", "1us", "--gpu-memory", f"{least}")
    assert found["largest_cache"] == 5
    assert max(row["cache"] for row in found["curve"]) == 5


def test_the_answer_says_where_it_comes_from(toy):
    text = " ".join(plan(*toy, "--target-tpot", "1s").stdout.split())
    assert "is synthetic, not measured" in text  # the profile
    assert "95 % interval over" in text
    assert "experts per layer" in text


def test_a_figure_is_drawn_and_never_overwritten(toy, tmp_path):
    arguments = [*toy, "--target-tpot", "1s", "--plot", str(tmp_path / "plan.png")]
    assert plan(*arguments).exit_code == 0
    first = (tmp_path / "plan.png").read_bytes()
    with pytest.raises(UsageError, match="exists"):
        plan(*arguments)
    assert plan(*arguments, "--force").exit_code == 0
    assert (tmp_path / "plan.png").read_bytes() == first


def test_the_same_question_gives_the_same_bytes(toy):
    arguments = [*toy, "--target-tpot", "1s", "--json"]
    assert plan(*arguments).stdout == plan(*arguments).stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--target-tpot", "50"], "is no time per token"),
        (["--target-tpot", "0ms"], "is no time per token"),
        (["--target-tpot", "50ms", "--gpu-memory", "lots"], "is not a size"),
        (["--target-tpot", "50ms", "--gpu-memory", "12"], "has no unit: write 12GiB"),
        (["--target-tpot", "50ms", "--policy", "ideal"], "knows the future"),
        (["--target-tpot", "50ms", "--policy", "full"], "no cache size"),
    ],
)
def test_mistakes(toy, arguments, sentence):
    with pytest.raises(UsageError, match=sentence):
        plan(*toy, *arguments)


def test_too_little_memory(toy):
    with pytest.raises(CapacityError, match="--gpu-memory"):
        plan(*toy, "--target-tpot", "50ms", "--gpu-memory", "1kB")


def test_a_trace_of_other_routing_is_refused():
    with pytest.raises(UsageError, match="8 MoE layers × 128 experts"):
        plan("--model", "llada2.0-mini", "--trace", "nano-gsm8k", "--target-tpot", "50ms")


def test_a_model_without_a_trace_is_refused(toy):
    with pytest.raises(OledSimError, match="no trace is at hand for toy"):
        plan(*toy[:4], "--target-tpot", "50ms", "--gpu-memory", "8GiB")


@pytest.mark.slow
def test_flash_is_planned_out_of_the_box_and_said_to_be_synthetic():
    arguments = ["--model", "llada2.0-flash", "--profile", "paper-testbed-llada2.0-flash"]
    found = plan(*arguments, "--target-tpot", "1s", "--policy", "lru", "--requests", "2")
    assert found.exit_code == 0
    assert "Routing: synthetic" in " ".join(found.stdout.split())


@pytest.mark.parametrize(
    ("text", "us"), [("50ms", 5e4), ("0.5s", 5e5), ("800us", 800.0), (" 1.5 ms", 1500.0)]
)
def test_times(text, us):
    assert parse_time_us(text) == pytest.approx(us)
