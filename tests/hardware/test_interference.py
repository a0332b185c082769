"""How lanes are kept busy while another one is measured, with made-up lanes and loads."""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch")

from oled_sim.errors import ProfileError  # noqa: E402
from oled_sim.hardware.measuring import interference  # noqa: E402
from oled_sim.hardware.measuring.interference import ATTEMPTS, Lane  # noqa: E402
from oled_sim.hardware.measuring.timing import Clock  # noqa: E402

CLOCK = Clock(torch.device("cpu"))
ALONE_US = 100.0


class Busy:
    """A load that outlives samples from number ``first`` on, unless it is to last too long."""

    def __init__(self, first: int, longest_us: float = float("inf")) -> None:
        self.first, self.longest_us = first, longest_us
        self.asked_us: list[float] = []

    def start(self, duration_us: float) -> None:
        self.asked_us.append(duration_us)

    def busy(self) -> bool:
        return len(self.asked_us) > self.first and self.asked_us[-1] <= self.longest_us

    def stop(self) -> None:
        pass


def lane_of(load):
    return Lane(sample=lambda: ALONE_US, load=load)


def beside(load, tries):
    return interference._beside(CLOCK, lane_of(load), [load], ALONE_US, tries)


def test_a_load_that_lasts_is_asked_for_once_a_sample():
    load = Busy(first=0)
    assert beside(load, 5) == [ALONE_US] * 5
    assert load.asked_us == [3 * ALONE_US + 3_000] * 5


def test_loads_last_longer_after_they_have_ended_first():
    load = Busy(first=3)
    assert len(beside(load, 2)) == 2
    assert load.asked_us[:4] == sorted(load.asked_us[:4]) and load.asked_us[3] > load.asked_us[0]


def test_disturbed_samples_do_not_make_loads_longer_than_can_be_queued():
    """Five in a row are disturbed; loads of twice the usual length never last."""
    load = Busy(first=5, longest_us=1.5 * (3 * ALONE_US + 3_000))
    assert len(beside(load, 3)) == 3


def test_it_ends_where_loads_always_end_first():
    load = Busy(first=10**9)
    assert beside(load, 3) == []
    assert len(load.asked_us) == 3 * ATTEMPTS


def test_a_lane_is_held_beside_each_other_one_and_beside_both():
    lanes = {name: lane_of(Busy(0)) for name in ("gpu", "h2d", "cpu")}
    loads = interference.loads_beside(lanes, "cpu")
    assert loads == {
        "gpu": [lanes["gpu"].load],
        "h2d": [lanes["h2d"].load],
        "both": [lanes["h2d"].load, lanes["gpu"].load],
    }


def test_what_could_not_be_measured_in_any_round_is_named():
    with pytest.raises(ProfileError, match="h2d beside cpu could not be measured"):
        interference.slow_down([[], []], "h2d beside cpu")


def test_rounds_without_a_sample_and_disturbed_ones_do_not_decide():
    found = interference.slow_down([[1.1, 1.3], [], [3.0, 5.0], [1.0, 1.2]], "h2d beside cpu")
    assert found.mean == 1.2  # of 1.2, 4.0 and 1.1
    assert (found.median, found.repeats) == (1.25, 6)


def test_noise_that_makes_a_gain_counts_as_no_slow_down():
    found = interference.slow_down([[0.8, 0.9]], "h2d beside cpu")
    assert (found.mean, found.median, found.p10, found.p90) == (1.0, 1.0, 1.0, 1.0)


def test_streams_get_queues_of_their_own():
    import oled_sim.hardware.streams  # noqa: F401

    assert int(os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]) >= 1
